"""The operations a model is made of, one a file: a Triton kernel and its launcher. reference.py has them in plain torch."""
