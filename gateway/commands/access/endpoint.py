"""Where a gateway on this host is reached, and whether it answers. It starts none."""

from gateway.config import ServerConfig


def base_url(server: ServerConfig, port: int) -> str:
    """How a client reaches the server: by the first of its names, or by its address on this host."""
    scheme = "https" if server.certificate else "http"
    name = next((name for name in server.hosts if not name.startswith("*.")), reachable_host(server.host))
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def reachable_host(host: str) -> str:
    """Where a server that listens there is reached from its own host."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def endpoint_answers(server: ServerConfig, port: int, path: str) -> bool:
    """Whether a gateway on this host says 200 there. Its certificate need not name this host's address."""
    import httpx  # only here: other commands start without it

    scheme, host = "https" if server.certificate else "http", reachable_host(server.host)
    url = httpx.URL(scheme=scheme, host=host, port=port, path=path)
    try:
        return httpx.get(url, timeout=2, verify=False, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
