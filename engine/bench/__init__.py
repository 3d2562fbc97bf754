"""Measures an engine in process: a model and a scheduler as a replica has them, without sockets.

python -m engine.bench --list
"""
