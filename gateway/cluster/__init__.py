"""Machines and replicas as a gateway sees them: who serves what, how full it is, and who waits."""
