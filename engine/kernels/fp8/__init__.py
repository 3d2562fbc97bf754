"""Kernels for weights and rows in 8 bits a number."""
