"""The only estimator: bytes of a round, bytes a parameter, dollars. It counts, and what can't be counted is unknown.

No torch, no requests: `plan`, `launch`, `doctor`, `join` and `ablate --dry-run` ask it before anything runs.
"""
