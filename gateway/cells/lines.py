"""This gateway's questions to other cells: one TLS connection to each cell, on which questions follow each other
without waiting, and answers come in their order. It decides nothing."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final

from gateway.cells.messages import (
    CellAnswer,
    CellMessageError,
    CellQuestion,
    Lend,
    LookUp,
    Refresh,
    Settle,
    body_length,
    decode_answer,
    encode,
)
from gateway.cells.trust import CellTrust
from gateway.identity.cell_settings import OtherCell
from gateway.identity.host_identity import IdentityError
from tenants.auth.api_token import CELL_CODE_LENGTH, cell_code
from tenants.auth.copies import AccountCopy, KnownCopy
from tenants.auth.errors import AccountSuspended, HomeUnavailable, UnknownToken, WrongRegion
from tenants.limits.lending import LeaseRefused, LeaseRequest, LeaseReturn
from tenants.records.holds import Denied, Granted

CONNECT_S: Final = 3.0
ANSWER_S: Final = 3.0
WAITING_MAX: Final = 1_000  # questions of one cell that have no answer yet
LOOK_UPS_MAX: Final = 200  # none is asked where so many wait: anybody's made-up credential causes one


class CellLine:
    """The line to one cell: made when it is needed, given up when an answer is late."""

    def __init__(self, other: OtherCell, trust: CellTrust) -> None:
        self._other = other
        self._trust = trust
        self._connecting = asyncio.Lock()
        self._open: _Connection | None = None
        self._first = 0  # of the addresses, which is tried first

    async def ask(self, question: CellQuestion, waiting_max: int = WAITING_MAX) -> CellAnswer:
        """Raises HomeUnavailable."""
        connection = await self._connection()
        if len(connection.waiting) >= waiting_max:
            raise HomeUnavailable(f"{waiting_max} questions wait for the cell {self._other.name}", unsure=False)
        answer: asyncio.Future[CellAnswer] = asyncio.get_running_loop().create_future()
        connection.waiting.append(answer)
        connection.writer.write(encode(question))
        try:
            async with asyncio.timeout(ANSWER_S):
                heard = await answer
        except TimeoutError:
            connection.end("no answer came in time")
            raise HomeUnavailable(f"the cell {self._other.name} did not answer within {ANSWER_S:g} s") from None
        if heard.away:
            raise HomeUnavailable(f"the cell {self._other.name}: {heard.away}")
        return heard

    async def _connection(self) -> "_Connection":
        async with self._connecting:
            if self._open is None or self._open.ended:
                self._open = await self._connect()
            return self._open

    async def _connect(self) -> "_Connection":
        problems, addresses = [], self._other.addresses
        for turn in range(len(addresses)):
            at = (self._first + turn) % len(addresses)
            host, _, port = addresses[at].rpartition(":")
            try:
                context = self._trust.client(self._other.name)
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(
                        host.strip("[]"), int(port), ssl=context, server_hostname="gateway"
                    )
            except (OSError, TimeoutError, IdentityError) as error:
                problems.append(f"{addresses[at]}: {error or 'no answer'}")
                continue
            try:
                tls = writer.get_extra_info("ssl_object")
                identity = self._trust.peer(tls.getpeercert(), tls.getpeercert(binary_form=True))
                if identity.cluster != self._other.name:
                    raise IdentityError(f"it is of the cell {identity.cluster}")
            except IdentityError as error:
                writer.transport.abort()
                problems.append(f"{addresses[at]}: {error}")
                continue
            self._first = at
            return _Connection(reader, writer)
        raise HomeUnavailable(f"the cell {self._other.name} cannot be reached: {'; '.join(problems)}", unsure=False)

    async def close(self) -> None:
        """Ends the connection; a later question makes another."""
        if self._open is not None:
            self._open.end("this gateway ends")
            with contextlib.suppress(asyncio.CancelledError):
                await self._open.reading


class _Connection:
    """One connection, and the questions on it that have no answer yet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.waiting: deque[asyncio.Future[CellAnswer]] = deque()
        self.ended = False
        self._reader = reader
        self.reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        problem = "the connection ended"
        try:
            while True:
                answer = decode_answer(await self._reader.readexactly(body_length(await self._reader.readexactly(4))))
                if not self.waiting:
                    raise CellMessageError("an answer to no question")
                future = self.waiting.popleft()
                if not future.done():  # else who asked has left
                    future.set_result(answer)
        except (OSError, EOFError, CellMessageError) as error:
            problem = str(error) or problem
        self.end(problem)

    def end(self, problem: str) -> None:
        """Nobody waits any more: what was asked may have been heard."""
        self.ended = True
        self.writer.transport.abort()
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_exception(HomeUnavailable(problem))


class CellLines:
    """All other cells, as the borrower of quotas and the copies of accounts ask them."""

    def __init__(self, others: Sequence[OtherCell], trust: CellTrust) -> None:
        self._lines = {other.name: CellLine(other, trust) for other in others}
        self._codes = {cell_code(other.name): other.name for other in others}
        if len({*self._codes, cell_code(trust.cell)}) <= len(others):
            raise IdentityError("two cells have names whose tokens begin alike: give one of them another name")

    def _line(self, cell: str) -> CellLine:
        if cell not in self._lines:
            raise HomeUnavailable(f"this gateway knows no cell {cell}, where the account is kept", unsure=False)
        return self._lines[cell]

    def home_of(self, token_id: str) -> str | None:
        return self._codes.get(token_id[:CELL_CODE_LENGTH])

    async def look_up(self, cell: str, credential: str) -> AccountCopy:
        answer = await self._line(cell).ask(LookUp(credential), LOOK_UPS_MAX)
        if answer.suspended:
            raise AccountSuspended(f"the cell {cell} has suspended the account")
        if answer.regions:
            raise WrongRegion(answer.region, answer.regions)
        if not answer.copies or answer.copies[0] is None:
            raise UnknownToken(f"the cell {cell} refuses the credential: {answer.unknown}")
        return answer.copies[0]

    async def refresh(self, cell: str, known: Sequence[KnownCopy]) -> Sequence[AccountCopy | bool]:
        answer = await self._line(cell).ask(Refresh(list(known)))
        if len(answer.copies) != len(known):
            raise HomeUnavailable(f"the cell {cell} answers {len(answer.copies)} of {len(known)} copies")
        gone = set(answer.gone)
        return [at not in gone and (copy or True) for at, copy in enumerate(answer.copies)]

    async def lend(self, home: str, request: LeaseRequest) -> Granted | Denied:
        answer = await self._ask_for_lease(home, Lend(request))
        decision = answer.granted or answer.denied
        if decision is None:
            raise HomeUnavailable(f"the cell {home} answers neither yes nor no")
        return decision

    async def settle(self, home: str, returned: LeaseReturn) -> None:
        await self._ask_for_lease(home, Settle(returned))

    async def _ask_for_lease(self, home: str, question: Lend | Settle) -> CellAnswer:
        answer = await self._line(home).ask(question)
        if answer.refused:
            raise LeaseRefused(answer.refused)
        return answer

    async def close(self) -> None:
        for line in self._lines.values():
            await line.close()
