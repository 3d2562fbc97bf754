"""One step's work as one flat int32 array: what the scheduler, ranks, kernels and tests share."""
