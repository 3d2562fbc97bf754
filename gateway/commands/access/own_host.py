"""What this host is in a cluster, for commands: a machine's host has neither the store nor the server's secret, and a
command that made its own there would be believed by nobody. It asks nobody."""

from gateway.porter.settings import news_path, read_news
from gateway.settings.config import Config, SettingsError


def own_member(config: Config) -> str:
    """ROLE/NAME of this host among the members that its cluster's store has; empty where it is none of them. Raises
    SettingsError."""
    paths = config.cluster.paths(config.state)
    if config.cluster.own_pki or not paths.exist:
        return ""
    from gateway.identity.files import read_credentials  # only here: most hosts have no keys
    from gateway.identity.host_identity import IdentityError

    try:
        return read_credentials(paths).identity.member_id
    except IdentityError as error:
        raise SettingsError(str(error)) from None


def require_no_machine(config: Config, only_here: str = "") -> None:
    """Raises SettingsError on a machine's host, which says where such a command is run, and what is `only_here`."""
    own = own_member(config)
    if not own.startswith("machine/"):
        return
    places = read_news(str(news_path(config.state))).places
    known = f", such as {places[0].rpartition(':')[0]}" if places else ""
    raise SettingsError(
        f"this host is the {own.replace('/', ' ')} of a cluster, and has neither its store nor its secret: run this on "
        f"a gateway's host{known}{only_here}"
    )
