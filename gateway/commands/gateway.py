"""`hearth gateway`: the HTTP side alone, for deployments where machines run apart."""

import sys
from typing import Annotated, Final

from cyclopts import Parameter

from engine.process.allocator import keep_first_thresholds
from gateway.commands.access.join_options import NO_JOIN, JoinOptions
from gateway.commands.terminal.listening import listen_problem
from gateway.commands.terminal.options import PORTS, Source, command_app
from gateway.commands.terminal.output import fail
from gateway.identity.host_identity import HostRole
from gateway.observability.logging import configure_logging
from gateway.privacy.process import scrub_memory
from gateway.settings.config import SettingsFile
from gateway.state_dir import server_secret
from tenants.store.protocol import StoreUnavailable

_TEACHING: Final = """\
examples:
  hearth gateway                                       listens on 127.0.0.1:8787
  hearth gateway --host 0.0.0.0 --port 80 --config /etc/hearth.toml
  hearth gateway --join 10.0.0.1:8790 --token …        once, on a further host (`hearth cluster token --role gateway`)

Any number of gateways may run: they keep nothing but open requests. They share a store ([store] url; SQLite serves
one gateway, Redis many) and the file `secret` in the state folder, and connect to [machine] addresses, or to the
machines that joined their cluster; a gateway that joins gets the secret.
SIGTERM drains: new work is refused, running streams get [server] drain_s to end.
"""
app = command_app("gateway", "serve HTTP; replicas are on machines", _TEACHING)


@app.default
def gateway(
    *,
    host: Annotated[str | None, Parameter(help="address to listen on (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, Parameter(validator=PORTS, help="port to listen on (default: 8787)")] = None,
    join: JoinOptions = NO_JOIN,
    source: Source,
) -> int:
    """Serve HTTP; replicas are on machines."""
    keep_first_thresholds()
    config = source.load(host=host, port=port)
    from gateway.commands.access.joining import joined_files  # only here: it reads keys

    joined_files(config, HostRole.GATEWAY, join, config.cluster.join_listen)
    if config.server.scrub_memory:
        scrub_memory()
    try:
        from gateway.app import build_app  # only here: other commands start without an HTTP server
        from gateway.http.server import run_server
        from gateway.http.tls import open_certificate

        configure_logging(sys.stderr, config.log)
        certificate = open_certificate(config.server)
        settings = SettingsFile(source.config, lambda: source.load(host=host, port=port))
        app = build_app(config, server_secret(config), source=settings)
        run_server(app, config.server, certificate)
        return fail(f"the gateway's job {app.failed} ended by an error; the log has it") if app.failed else 0
    except StoreUnavailable as error:
        return fail(str(error))
    except OSError as error:
        return fail(listen_problem(config.server, error))
