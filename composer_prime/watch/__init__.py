"""What a run is doing, from its bucket alone: nothing is asked of a site, and no torch is needed to look."""
