"""Sites as managed jobs of SkyPilot, through its API server alone: its own package can't share our environment."""
