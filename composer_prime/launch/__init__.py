"""A launch: its plan, its jobs as the bucket records them, and their supervisor."""
