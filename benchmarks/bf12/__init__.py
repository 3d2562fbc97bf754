"""Benchmarks of 12-bit weights."""
