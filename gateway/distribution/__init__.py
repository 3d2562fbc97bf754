"""How the models of a cluster's catalogue come to each of its hosts."""
