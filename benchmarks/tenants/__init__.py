"""Benchmarks of quotas and their stores."""
