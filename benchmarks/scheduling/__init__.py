"""Benchmarks of scheduling and the prefix cache."""
