"""Benchmarks: each prints its figure beside its bound and records rows in `benchmarks/results/`."""
