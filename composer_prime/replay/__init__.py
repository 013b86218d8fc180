"""Teacher signals: served models score what a policy sampled; stored traces are served again as a teacher's tokens."""
