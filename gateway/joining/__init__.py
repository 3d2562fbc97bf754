"""How hosts become members of a cluster, and stay it."""
