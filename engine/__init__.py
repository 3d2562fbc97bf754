"""The engine: replicas that run a model, and the machine that starts and watches them."""
