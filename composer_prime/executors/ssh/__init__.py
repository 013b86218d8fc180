"""One's own machines over ssh."""
