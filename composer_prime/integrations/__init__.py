"""Other projects' trainers on our bucket. Nothing here is imported until it is asked for by its own name."""
