"""Processes of this machine, kept by a shim."""
