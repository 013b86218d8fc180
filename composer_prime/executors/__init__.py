"""Where sites run: one protocol for every platform, and the fleet that starts, watches and ends a run's replicas."""
