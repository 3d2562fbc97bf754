"""What this host has, without torch: GPUs, memory and the limits of its control group."""
