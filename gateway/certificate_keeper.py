"""What a gateway's host does for the certificates of its cluster: it lets hosts join, and renews theirs and its own."""

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import Final

from gateway.distribution.watch import CatalogueWatch
from gateway.identity.authority import open_authority, signing_request
from gateway.identity.files import HostFiles, write_identity
from gateway.identity.host_identity import IdentityError
from gateway.joining.client import split_address
from gateway.joining.listener import JoinListener
from gateway.joining.messages import RenewRequest
from gateway.joining.service import JoinService
from gateway.members.registry import RegistryMembers
from gateway.porter.relay import Relay
from gateway.settings.config import Config
from gateway.tenancy import Tenancy
from tenants.audit import SYSTEM, AuditLog
from tenants.records.cluster import ClusterMember
from tenants.store.protocol import StoreUnavailable

_RETRY_S: Final = 2.0
_LOOK_S: Final = 5.0  # between two looks whether this host's certificate is to be renewed, and the store has its record

log = logging.getLogger(__name__)


class CertificateKeeper:
    """Lets hosts join, and renews their certificates and this host's own."""

    def __init__(
        self, config: Config, tenancy: Tenancy, files: HostFiles, registry: RegistryMembers, watch: CatalogueWatch
    ) -> None:
        self._config = config
        self._watch = watch
        self._tenancy = tenancy
        self._files = files
        self._registry = registry
        self._record: ClusterMember | None = None  # this host's own, as the store had it last

    async def run(self) -> None:
        service = await self._open_service()
        listener = JoinListener(self._files, service.answer, self._relay)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew(service))
            group.create_task(self._listen(listener))

    def _relay(self) -> Relay:
        """Lets members through to the files of this host's models."""
        files, registry = self._files, self._registry
        folder = self._config.run_folder
        return Relay(folder, lambda: files.credentials().identity, lambda: frozenset(registry.removed_keys))

    async def _open_service(self) -> JoinService:
        """Waits for the store."""
        while True:
            try:
                record = await self._tenancy.store.cluster.authority()
                if record is None:
                    raise StoreUnavailable("it has no cluster, and this host has joined one: see [store] url")
                authority = open_authority(record, self._tenancy.secret)
                return JoinService(
                    self._tenancy.store.cluster,
                    authority,
                    self._tenancy.secret,
                    lambda: self._registry.members,
                    lambda: self._registry.removed_keys,
                    catalogue=self._watch.answer,
                    note=partial(AuditLog(self._tenancy.store.audit, self._tenancy.secret).write, SYSTEM),
                )
            except (StoreUnavailable, IdentityError) as error:
                log.error("no host can join here: %s", error)
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, listener: JoinListener) -> None:
        host, port = split_address(self._config.cluster.join_listen)
        while True:
            try:
                await listener.run(host, port)
            except OSError as error:
                log.error("no host can join here: %s: %s; [cluster] join_listen names another", host, error)
            await asyncio.sleep(_RETRY_S)

    async def _renew(self, service: JoinService) -> None:
        while True:
            credentials = self._files.credentials()
            await self._say_again(credentials.identity.member_id)
            if time.time() >= credentials.renew_s:
                address = self._config.cluster.told_address(self._config.cluster.join_listen)
                request = RenewRequest(signing_request(credentials.key), address)
                try:
                    seen = await self._own_address()
                    answer = await service.answer(request, credentials.identity, credentials.key_digest, seen)
                except StoreUnavailable as error:
                    log.warning("this host's certificate is renewed later: %s", error)
                else:
                    self._take(answer.certificate, answer.problem)
            await asyncio.sleep(_LOOK_S)

    async def _say_again(self, own: str) -> None:
        """Has a store that failed over know this host again."""
        known = {member.id: member for member in self._registry.members}
        self._record = known.get(own, self._record)
        if own not in known and self._record is not None:
            with contextlib.suppress(StoreUnavailable):
                if await self._tenancy.store.cluster.restore(self._record, int(time.time())):
                    log.warning("the store had lost this host, the %s, and knows it again", own)

    async def _own_address(self) -> str:
        """Where this gateway was reached so far."""
        identity = self._files.credentials().identity
        own = [each for each in await self._tenancy.store.cluster.members() if each.id == identity.member_id]
        return split_address(own[0].address)[0] if own else ""

    def _take(self, certificate: bytes, problem: str) -> None:
        if problem:
            log.error("this host's certificate is not renewed: %s", problem)
            return
        paths = self._files.paths
        try:
            write_identity(paths, self._files.credentials().key, certificate, paths.authority.read_bytes())
        except OSError as error:  # of a full disk: there is a third of a certificate's life to try again in
            log.error("this host's certificate cannot be kept: %s", error)
