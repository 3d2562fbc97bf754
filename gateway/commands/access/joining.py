"""How a host's command joins a cluster: --join with a token, once; from then on by what it has kept."""

import asyncio
import socket
import sys
import time
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec

from gateway.commands.access.join_options import JoinOptions
from gateway.identity.files import HostFiles, read_credentials, write_identity
from gateway.identity.host_identity import HOST_NAME, HostRole, IdentityError
from gateway.joining.client import Joined, JoinRefused, NoGatewayAnswers, join_cluster
from gateway.joining.token_text import TokenTextError, parse_token_text
from gateway.settings.config import Config, SettingsError
from gateway.state_dir import adopt_secret, open_state

_TRIES: Final = 6
_PAUSE_S: Final = 2.0


def joined_files(config: Config, role: HostRole, options: JoinOptions, listen: str) -> HostFiles | None:
    """This host's identity: the one that it has, else what joining gives; None where it has none and is not to join,
    and for a machine beside a gateway. Others reach it at the port of `listen`. Raises SettingsError."""
    paths = config.cluster.paths(config.state)
    try:
        if paths.exist or config.cluster.own_pki:
            credentials = read_credentials(paths)
            if role is HostRole.MACHINE and credentials.identity.role is HostRole.GATEWAY and options.join is None:
                return None  # a machine beside a gateway, which reaches it on this host
            if credentials.identity.role is not role:
                raise SettingsError(
                    f"{paths.certificate} is of the {credentials.identity}: a {role} needs one of role {role}; "
                    "--state names another folder"
                )
            if credentials.expires_s > time.time() or options.join is None:
                return HostFiles(paths)
        if options.join is None:
            return None
        open_state(config)
        key, name = ec.generate_private_key(ec.SECP256R1()), options.name or host_name()
        joined = asyncio.run(_join(options, role, name, config.cluster.told_address(listen), key))
        if joined.secret is not None:
            adopt_secret(config, joined.secret)
        write_identity(paths, key, joined.certificate, joined.authority)
        files = HostFiles(paths)
    except (IdentityError, JoinRefused, NoGatewayAnswers, TokenTextError) as error:
        raise SettingsError(str(error)) from None
    print(f"joined the cluster {files.credentials().identity.cluster} as {files.credentials().identity}", flush=True)
    return files


async def _join(
    options: JoinOptions, role: HostRole, name: str, address: str, key: ec.EllipticCurvePrivateKey
) -> Joined:
    """Asks again while no gateway answers; the key stays, so that no second use of the token is taken."""
    assert options.join is not None
    token = parse_token_text(_token_text(options))
    for _ in range(_TRIES - 1):
        try:
            return await join_cluster(options.join, token, role, name, address, key)
        except NoGatewayAnswers as error:
            print(f"hearth: {error}; trying again", file=sys.stderr)
            await asyncio.sleep(_PAUSE_S)
    return await join_cluster(options.join, token, role, name, address, key)


def _token_text(options: JoinOptions) -> str:
    if options.token is not None:
        return options.token
    if options.token_file is None:
        raise SettingsError("--join needs --token or --token-file: `hearth cluster token` at a gateway prints one")
    try:
        return Path(options.token_file).read_text()
    except OSError as error:
        raise SettingsError(f"the token file {options.token_file} cannot be read: {error.strerror}") from None


def host_name() -> str:
    """This host's own name, as far as a member may be named so."""
    name = socket.gethostname().lower()
    if not HOST_NAME.fullmatch(name):
        raise SettingsError(f"this host is named {name!r}, which no member may be: --name gives it another name")
    return name
