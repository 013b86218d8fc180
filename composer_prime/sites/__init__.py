"""What trains: a site is one inference, orchestrator and trainer split, in one of several make-ups."""
