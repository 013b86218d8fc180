"""Modal: one call of a deployed function for each site and attempt."""
