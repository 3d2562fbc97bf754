"""Mixtures of experts: which experts a row takes, and the matmuls of all rows with theirs."""
