"""A model in stages on GPUs: what each stage launches of micro-batches, and how rank 0 keeps all of them busy."""
