"""Pairs and step scores: where text teachers agree on another action than a trace's author, and where on its own."""
