"""The process of a machine's host that gateways on other hosts connect to."""
