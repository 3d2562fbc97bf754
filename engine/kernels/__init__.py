"""The operations a model is made of, one a file: Triton kernel and launcher. reference.py has them in plain torch."""
