"""Losses on tokens: pure functions of tensors that import nothing of ours but each other and the errors."""
