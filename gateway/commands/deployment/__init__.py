"""How the processes of a deployment are started by what runs a host or a cluster."""
