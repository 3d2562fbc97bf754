"""The porter of a machine's host: it lets gateways through to the sockets of the agent and the replicas, and other
machines to those that take in KV; it lets the host's own replicas out to those, renews the host's certificate, and
hears which members were removed. The agent starts and watches it.

    python -m gateway.porter.porter '<PorterSettings JSON>'
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from engine.log import log, log_uncaught
from gateway.catalogue.mirror import CatalogueMirror, write_mirror
from gateway.distribution.status import read_status
from gateway.distribution.watch import document_digest
from gateway.identity.authority import signing_request
from gateway.identity.files import HostCredentials, HostFiles, write_identity
from gateway.identity.host_identity import IdentityError
from gateway.identity.settings import IdentityPaths
from gateway.identity.tls_door import TlsDoor
from gateway.joining.client import JoinRefused, NoGatewayAnswers, ask_gateways, split_address
from gateway.joining.messages import NewsQuestion, RenewRequest
from gateway.porter.outward import OutwardRelay
from gateway.porter.relay import Relay
from gateway.porter.settings import ClusterNews, PorterSettings, read_news, write_news

NEWS_S: Final = 2.0
REFUSED_S: Final = 30.0  # a host that was removed asks less often
_RENEW_AGAIN_S: Final = 60.0


@dataclass
class Porter:
    """One porter."""

    settings: PorterSettings
    files: HostFiles
    news: ClusterNews
    door: TlsDoor | None = None

    async def run(self) -> None:
        """Serves until cancelled. Raises OSError where it cannot listen."""
        folder = Path(self.settings.folder)
        self.door = TlsDoor(
            self.files,
            lambda _: Relay(folder, lambda: self.files.credentials().identity, lambda: frozenset(self.news.removed)),
            lambda address, reason: log("host_refused", level="warning", address=address, reason=reason),
        )
        host, port = split_address(self.settings.listen)
        server = await self.door.listen(host, port)
        outward = await OutwardRelay(self.files, lambda: frozenset(self.news.removed)).listen(folder)
        log("porter_listens", address=self.settings.listen, identity=self.files.credentials().identity.uri)
        try:
            await self._keep_up()
        finally:
            server.close()
            outward.close()

    async def _keep_up(self) -> None:
        """Asks gateways for news, and renews the certificate in time."""
        renew_at, problem, pause_s = 0.0, "", NEWS_S
        while True:
            credentials = self.files.credentials()  # also notices files that somebody else wrote
            if self.settings.news is not None:
                try:
                    news, answering = await ask_gateways(self.news.places, credentials, self._question())
                    self._keep_mirror(news.mirror)
                    gateways = list(dict.fromkeys([answering, *news.gateways]))
                    self._take(ClusterNews(gateways, news.removed, self.news.joined))
                    if time.time() >= max(credentials.renew_s, renew_at):
                        renew_at = time.time() + _RENEW_AGAIN_S
                        await self._renew(credentials)
                    problem, pause_s = "", NEWS_S
                except (NoGatewayAnswers, JoinRefused, OSError) as error:  # a full disk cuts no connection
                    pause_s = REFUSED_S if isinstance(error, JoinRefused) else NEWS_S
                    if str(error) != problem:
                        problem = str(error)
                        event = "news_not_kept" if isinstance(error, OSError) else "gateways_unreachable"
                        log(event, level="warning", problem=problem)
            await asyncio.sleep(pause_s)

    def _question(self) -> NewsQuestion:
        mirror, status = self.settings.mirror, self.settings.status
        known = b""
        with contextlib.suppress(OSError):
            known = b"" if mirror is None else Path(mirror).read_bytes()
        has = None if status is None else read_status(Path(status))
        return NewsQuestion(self.settings.address, document_digest(known), has)

    def _keep_mirror(self, document: bytes) -> None:
        """Keeps a catalogue that a gateway said, where it can be read."""
        if not document or self.settings.mirror is None:
            return
        try:
            mirror = msgspec.json.decode(document, type=CatalogueMirror)
            write_mirror(Path(self.settings.mirror), mirror)
        except (msgspec.MsgspecError, OSError) as error:
            log("catalogue_refused", level="warning", problem=str(error))
        else:
            log("catalogue_read", level="debug", revision=mirror.catalogue.revision)

    async def _renew(self, credentials: HostCredentials) -> None:
        """Raises what asking gateways does."""
        request = RenewRequest(signing_request(credentials.key), self.settings.address)
        renewed, _ = await ask_gateways(self.news.places, credentials, request)
        paths = self.files.paths
        write_identity(paths, credentials.key, renewed.certificate, paths.authority.read_bytes())
        log("certificate_renewed", identity=credentials.identity.uri)

    def _take(self, news: ClusterNews) -> None:
        if news == self.news:
            return
        assert self.settings.news is not None
        self.news = news
        if self.door is not None and (count := self.door.cut(frozenset(news.removed))):
            log("removed_hosts_cut", connections=count)
        write_news(Path(self.settings.news), news)


def main(words: Sequence[str]) -> int:
    """Runs the porter that the JSON in words[0] describes."""
    settings = msgspec.json.decode(words[0], type=PorterSettings)
    paths = IdentityPaths(Path(settings.certificate), Path(settings.key), Path(settings.authority))
    logging.basicConfig(level=logging.WARNING)
    log_uncaught()
    try:
        porter = Porter(settings, HostFiles(paths), read_news(settings.news))
        uvloop.run(porter.run())
    except (IdentityError, OSError) as error:
        log("porter_cannot_run", level="error", problem=str(error), listen=settings.listen)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
