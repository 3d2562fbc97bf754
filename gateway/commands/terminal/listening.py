"""Why an address cannot be listened on, in words that say which option to change. It opens no socket."""

import errno

from gateway.settings.server import ServerConfig


def listen_problem(server: ServerConfig, error: OSError) -> str:
    """What `hearth serve` and `hearth gateway` print where `error` kept them from listening, or from serving at all."""
    where = f"{server.host}:{server.port}"
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {where}: another program does; --port (PORT= of make) names another port"
    if error.errno == errno.EACCES:
        return f"cannot listen on {where}: this user may not; --port (PORT= of make) names a port from 1024 on"
    if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:  # below 0: the resolver's, no such name
        reason = str(error.strerror).partition(" (while ")[0]  # what socket.create_server adds is said already
        return f"cannot listen on {where}: {reason}; --host (HOST= of make) names an address of this host"
    return f"cannot serve on {where}: {error}"
