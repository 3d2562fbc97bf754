"""The gateway's listener where hosts join and renew: one question at a time of each connection, one answer to each. It
does not know what the answers mean."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostIdentity
from gateway.identity.tls_door import ChannelHandler, TlsChannel, TlsDoor
from gateway.joining.messages import JoinAnswer, JoinMessage, MessageError, NewsQuestion, encode_message, take_questions
from tenants.store.protocol import StoreUnavailable

_QUESTIONS_MAX: Final = 4  # that a peer may have sent ahead

Answer = Callable[[JoinMessage, HostIdentity | None, str, str], Awaitable[JoinAnswer]]

log = logging.getLogger(__name__)


class JoinListener:
    """Listens until cancelled. `answer` gets a question, and the peer's identity, key and IP address; a peer that asks
    for a socket of this host by its name gets what `relay` makes, where there is one."""

    def __init__(self, files: HostFiles, answer: Answer, relay: Callable[[], ChannelHandler] | None = None) -> None:
        def handler(server_name: str) -> ChannelHandler:
            return relay() if relay is not None and "." in server_name else _Conversation(answer)

        self._door = TlsDoor(files, handler, _log_refusal)

    async def run(self, host: str, port: int) -> None:
        """Raises OSError where it cannot listen."""
        server = await self._door.listen(host, port)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            for channel in list(self._door.channels):
                channel.abort()


class _Conversation:
    """One connection's questions, answered in their order."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._channel: TlsChannel | None = None
        self._pending = bytearray()
        self._questions: asyncio.Queue[JoinMessage] = asyncio.Queue(_QUESTIONS_MAX)
        self._task: asyncio.Task[None] | None = None

    def opened(self, channel: TlsChannel) -> None:
        self._channel = channel
        self._task = asyncio.get_running_loop().create_task(self._answer_all(channel))

    def received(self, plain: bytes) -> None:
        assert self._channel is not None
        self._pending += plain
        try:
            for question in take_questions(self._pending):
                self._questions.put_nowait(question)
        except (MessageError, asyncio.QueueFull):
            self._channel.abort()

    def lost(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def hold(self) -> None:
        """Answers are few and small: what is not read waits in the transport."""

    def resume(self) -> None:
        """See hold."""

    async def _answer_all(self, channel: TlsChannel) -> None:
        while True:
            question = await self._questions.get()
            try:
                answer = await self._answer(question, channel.identity, channel.key, channel.address)
            except StoreUnavailable as error:
                answer = JoinAnswer(problem=f"the store does not answer now, try again: {error}")
            except Exception:  # a bug: the peer is to notice, and asks again
                log.exception("%s of %s was not answered", type(question).__name__, channel.address)
                channel.abort()
                return
            if answer.problem and not isinstance(question, NewsQuestion):  # a removed host asks that on and on
                log.warning("%s asked by %s: %s", type(question).__name__, channel.address, answer.problem)
            channel.write(encode_message(answer))


def _log_refusal(address: str, reason: str) -> None:
    log.warning("a host at %s was refused: %s", address, reason)
