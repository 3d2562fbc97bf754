"""Models that read a whole text at once and give a vector or a score for it. They keep nothing from step to step."""
