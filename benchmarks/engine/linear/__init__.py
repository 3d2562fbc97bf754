"""Finds the fastest way to multiply, per shape and number of rows (`python -m benchmarks.engine.linear`)."""
