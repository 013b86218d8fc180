"""What runs inside a PRIME-RL site: the one room that may import `prime_rl`."""
