"""The hardware of this host, found without torch: GPUs, memory and the limits of its control group."""
