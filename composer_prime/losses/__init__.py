"""Losses on tokens and on pairs: pure functions that import nothing of ours but each other, the errors, and
config.distill, which names the settings."""
