"""The only estimator, before anything runs: it counts, and what can't be counted is unknown. No torch, no requests."""
