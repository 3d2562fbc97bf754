"""Which model is where: pure decisions over a snapshot. It knows no processes, devices or clocks."""
