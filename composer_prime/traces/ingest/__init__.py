"""Traces in: an agent's logs, in whatever format, become a store of sessions and their decision points."""
