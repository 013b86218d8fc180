"""What is seen before anything starts: access, memory, traffic."""
