"""Traces: an agent's logs into a store, what other models would have done there, and pairs and turns to train on."""
