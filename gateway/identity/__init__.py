"""Hosts' identities: keys, certificates and their authority."""
