"""The HTTP server under every route: connections, requests, streams and TLS. It knows no tenants."""
