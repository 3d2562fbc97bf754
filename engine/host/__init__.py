"""The agent of one machine: it starts replicas and reconciles them with the policy. It knows no tokens and no torch."""
