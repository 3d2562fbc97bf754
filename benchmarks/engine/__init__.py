"""Benchmarks of the engine, on CPUs and GPUs."""
