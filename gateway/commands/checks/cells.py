"""Whether the cells beside this one answer, as a gateway asks them."""

import asyncio
from collections.abc import Iterator

from gateway.cells.lines import CellLine, CellLines
from gateway.cells.messages import LookUp
from gateway.cells.trust import CellTrust
from gateway.commands.checks.finding import Finding, good, wrong
from gateway.identity.cell_settings import OtherCell
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import IdentityError
from gateway.settings.config import Config
from tenants.store.protocol import StoreUnavailable

_NOBODYS = "hearth_"  # a credential that opens nothing


def cells(config: Config) -> Iterator[Finding]:
    """One finding for each cell that hearth.toml names."""
    others = config.cells.others
    if not others:
        return
    try:
        trust = CellTrust(HostFiles(config.cluster.paths(config.state)), others)
        CellLines(others, trust)
    except IdentityError as error:
        yield wrong("cells", str(error), "correct [[cells.others]]; `hearth cluster init --cluster NAME` names a cell")
        return
    for other in others:
        problem = asyncio.run(_problem(other, trust))
        if problem:
            advice = f"start a gateway there, open its port of [cells] listen, and let it name {trust.cell} as well"
            yield wrong("cells", f"{other.name}: {problem}", advice)
        else:
            yield good("cells", f"{other.name} answers {trust.cell} at {', '.join(other.addresses)}")


async def _problem(other: OtherCell, trust: CellTrust) -> str:
    line = CellLine(other, trust)
    try:
        await line.ask(LookUp(_NOBODYS))
    except StoreUnavailable as problem:
        return str(problem) or "it ended the connection: it does not know this cell"
    finally:
        await line.close()
    return ""
