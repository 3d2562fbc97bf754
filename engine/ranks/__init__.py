"""One model in several processes: rank 0 decides and says, the others follow."""
