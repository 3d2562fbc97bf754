"""Where this host is: as its certificate says, and without one as its settings do. It reads no store."""

from gateway.identity.host_identity import HostIdentity
from gateway.settings.config import Config


def host_identity(config: Config) -> HostIdentity | None:
    """Returns who this host is by its certificate; None where it is in no cluster. Raises IdentityError."""
    paths = config.cluster.paths(config.state)
    if not paths.exist:
        return None
    from gateway.identity.files import read_credentials  # only here: most hosts have no keys

    return read_credentials(paths).identity


def host_region(config: Config) -> str:
    """Returns the region of this host; empty where it has no name. Raises IdentityError."""
    identity = host_identity(config)
    return config.server.region if identity is None else identity.region
