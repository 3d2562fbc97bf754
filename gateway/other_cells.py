"""What a gateway needs to serve accounts of other cells, and to be home to its own; nothing where no cell is named."""

import asyncio
import logging

from gateway.background import BackgroundJob
from gateway.cells.lines import CellLines
from gateway.cells.listener import CellListener
from gateway.cells.service import CellService
from gateway.cells.trust import CellTrust
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import IdentityError
from gateway.settings.config import Config, SettingsError
from tenants.auth.accounts import AccountService
from tenants.limits.borrowing import QuotaBorrower
from tenants.limits.lending import QuotaLender
from tenants.store.protocol import Clock, Store

log = logging.getLogger(__name__)


class Cells:
    """The cells beside this one, for the accounts and quotas of one gateway."""

    def __init__(self, config: Config, trust: CellTrust, store: Store) -> None:
        self._config = config
        self._trust = trust
        self._store = store
        self.lines = CellLines(config.cells.others, trust)
        self.borrower = QuotaBorrower(store.leases, self.lines, trust.cell)

    def jobs(self, accounts: AccountService, clock: Clock) -> dict[str, BackgroundJob]:
        """What runs for as long as the gateway does."""
        assert accounts.copies is not None
        lender = QuotaLender(self._store, len(self._config.cells.others), clock)
        listener = CellListener(self._trust, CellService(self._store, accounts, lender, clock).answer)
        host, _, port = self._config.cells.listen.rpartition(":")
        return {
            "leases": self.borrower.run,
            "account_copies": accounts.copies.run,
            "cells": lambda: listener.run(host.strip("[]"), int(port)),
            "cell_lines": self._close_at_the_end,
        }

    async def _close_at_the_end(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self.lines.close()


def cell_name(config: Config) -> str:
    """This host's cell, which is its cluster; "" on a host that joined none, or whose identity cannot be read."""
    paths = config.cluster.paths(config.state)
    try:
        return HostFiles(paths).credentials().identity.cluster if paths.exist else ""
    except IdentityError as error:
        log.warning("the cell of this host is not known: %s", error)
        return ""


def open_cells(config: Config, store: Store) -> Cells | None:
    """Reads this host's identity and the other cells' authorities. Raises SettingsError."""
    if not config.cells.others:
        return None
    paths = config.cluster.paths(config.state)
    if not paths.exist:
        raise SettingsError(
            "[[cells.others]] are reached by this host's certificate, and it has none: "
            "`hearth cluster init --cluster NAME` founds this cell, `hearth gateway --join` makes this host one of it"
        )
    try:
        return Cells(config, CellTrust(HostFiles(paths), config.cells.others), store)
    except IdentityError as error:
        raise SettingsError(str(error)) from None
