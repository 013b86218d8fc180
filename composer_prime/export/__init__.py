"""Weights out of a run: Hugging Face folders of its masters, deltas between them, and servers that follow them."""
