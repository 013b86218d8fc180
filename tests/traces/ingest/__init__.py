"""Tests of traces in."""
