"""Losses on tokens: pure functions of tensors that import nothing of ours but each other, the errors, and
config.distill, which names the settings."""
