"""Replica processes between which sequences move, as benchmarks/engine/handovers.py measures them on GPUs."""
