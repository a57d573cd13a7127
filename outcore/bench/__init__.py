"""Benchmarks: Outcore and its peers side by side, counted one way."""
