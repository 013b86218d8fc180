"""Hugging Face Jobs: one job for each site and attempt."""
