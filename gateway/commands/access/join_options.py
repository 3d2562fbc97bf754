"""--join and what goes with it, for the commands of hosts that may join a cluster. It joins none."""

from dataclasses import dataclass
from typing import Annotated, Final

from cyclopts import Parameter


@Parameter(name="*")
@dataclass(frozen=True)
class JoinOptions:
    """How a host becomes a member. All of it is left out once it is one."""

    join: Annotated[
        str | None, Parameter(metavar="URL", help="where to join the cluster: a gateway's https://HOST or HOST:PORT")
    ] = None
    token: Annotated[str | None, Parameter(help="what `hearth cluster token` printed")] = None
    token_file: Annotated[str | None, Parameter(metavar="FILE", help="a file with the token")] = None
    name: Annotated[str | None, Parameter(help="this host's name in the cluster (default: its host name)")] = None


NO_JOIN: Final = JoinOptions()
