"""A gateway among the hosts of its cluster: what it does so that others join, stay members and are found, and serve
the same models. A gateway that joined none does nothing of it."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec import structs

from engine.process.companion import CompanionProcess
from gateway.background import BackgroundJob
from gateway.catalogue.report import report_unlike
from gateway.certificate_keeper import CertificateKeeper
from gateway.cluster.connection import HostConnector
from gateway.cluster.fleet import ReplicaFleet
from gateway.distribution.settings import keeper_command, status_path
from gateway.distribution.watch import CatalogueWatch
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostRole, IdentityError
from gateway.members.open import open_members
from gateway.members.protocol import Members
from gateway.members.registry import RegistryMembers
from gateway.settings.config import Config, SettingsError
from gateway.tenancy import Tenancy

_COMPANION_S: Final = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayHosts:
    """What `open_hosts` found. `files` is None on a host that joined no cluster; `jobs` run for as long as the gateway
    does."""

    config: Config
    members: list[Members]
    files: HostFiles | None = None
    registry: RegistryMembers | None = None
    jobs: dict[str, BackgroundJob] = field(default_factory=dict)

    def fleet(self, on_waited: Callable[[str, float], None]) -> ReplicaFleet:
        """A fleet that reaches this host's processes and, with its certificate, other hosts'."""
        files = self.files
        removed = None if self.registry is None else self.registry.is_removed
        connector = HostConnector(None if files is None else lambda: files.credentials().client, removed)
        return ReplicaFleet((), on_waited=on_waited, connector=connector)

    def placed(self, config: Config) -> Config:
        """The settings with this host's region as its certificate says it, whatever the file says."""
        if self.files is None:
            return config
        server, region = config.server, self.files.credentials().identity.region
        if server.region and server.region != region:
            log.error("[server] region is %s, and this host's certificate says %r, which counts", server.region, region)
        return structs.replace(config, server=structs.replace(server, region=region))

    async def follow(self, fleet: ReplicaFleet) -> None:
        """Tells the fleet of machines that come and go, and this host's commands of replicas that get no calls, until
        cancelled."""

        def unlike() -> list[tuple[str, str]]:
            return sorted((replica.machine, replica.model) for replica in fleet.replicas() if replica.differs)

        async with asyncio.TaskGroup() as group:
            group.create_task(report_unlike(self.config, unlike))
            for source in self.members:
                group.create_task(source.follow(partial(fleet.links.follow, source)))
            if self.registry is not None and self.registry not in self.members:  # it still says who was removed
                group.create_task(self.registry.follow(lambda change: fleet.links.cut(change.removed)))


def open_hosts(config: Config, tenancy: Tenancy) -> GatewayHosts:
    """Reads this host's identity, where it has one. Raises SettingsError."""
    paths = config.cluster.paths(config.state)
    try:
        if not paths.exist and not config.cluster.own_pki:
            return GatewayHosts(config, open_members(config, None))
        files = HostFiles(paths)
        identity = files.credentials().identity
        if identity.role is not HostRole.GATEWAY:
            raise SettingsError(f"{paths.certificate} is of the {identity}: a gateway needs one of role gateway")
        if config.cluster.own_pki:
            return GatewayHosts(config, open_members(config, None), files)
        registry = RegistryMembers(tenancy.store.cluster)
        watch = CatalogueWatch(
            tenancy.store.cluster,
            lambda: registry.members,
            identity.member_id,
            config.cluster.mirror_path(config.state),
            status_path(config),
        )
        keeper = CertificateKeeper(config, tenancy, files, registry, watch)
        jobs: dict[str, BackgroundJob] = {
            "certificates": keeper.run,
            "cluster_catalogue": watch.run,
            "keeper": partial(_run_companion, CompanionProcess("keeper", keeper_command(config))),
        }
        return GatewayHosts(config, open_members(config, registry), files, registry, jobs)
    except (IdentityError, ValueError) as error:
        raise SettingsError(str(error)) from None


async def _run_companion(companion: CompanionProcess) -> None:
    """Keeps a program running until cancelled."""
    try:
        while True:
            companion.poll(time.monotonic())
            await asyncio.sleep(_COMPANION_S)
    finally:
        companion.close()
