"""A Redis database as the stores use it: commands in shared flights, scripts, long reads. It knows no records.

All that a decision touches shares one hash tag, `{account id}`:

    hearth:{ID}                   hash: created_at, revision, suspended_at, plan, document, name_key, line
    hearth:{ID}:tokens            hash: token id → ApiToken and TokenDigests
    hearth:{ID}:revoked           hash: token id → when
    hearth:{ID}:holds             hash: request id → day:held:output:rates:checkpoint, where the checkpoint is a record
    hearth:{ID}:expiries          sorted set: request ids by expires_us
    hearth:{ID}:gauge:SUBJECT     hash: requests_us, input_us, output_us, output, open; SUBJECT is "" for the account
    hearth:{ID}:day:DAY[:SUBJECT] hash: the counters of that day
    hearth:{ID}:month:DAY[:SUBJECT] micro-neurons used and held in the month that begins on DAY, once a limit asked
    hearth:{ID}:usage:DAY         hash: token and model → five sums over the ledger
    hearth:{ID}:ledger:DAY        hash: request id → record
    hearth:{ID}:audit             list of entries
    hearth:{ID}:lease:LEASE       hash: what another cell lent, a field for each of QuotaLease; hearth:leases has all
    hearth:{ID}:claim:KEY         what was claimed
    hearth:accounts               set of ids
    hearth:name:KEY, hearth:named sets of ids: that have the name, and whose names are in these sets
    hearth:accounts:by_name, :by_age  sorted sets: the line of each account, see account_scripts.py
    hearth:deletions              sorted set: ids of accounts by when they are to be removed
    hearth:token:TOKEN            account id
    hearth:plans, :revisions      hashes: name → document, revision
    hearth:notices, :bodies       sorted set: notices' ids by due_at; hash: id → Notice
    hearth:notice:ID              that there was one
    hearth:cluster:…              the hosts, see cluster.py
    …:batch…, :line:, :leases:    see batches.py, and hearth:lines:MODEL
    hearth:probe                  nothing, see guard.py
    hearth:version                of all this, VERSION, once a gateway or `hearth doctor` has looked

Redis must run with `maxmemory-policy noeviction`, or it forgets accounts under pressure, and with `appendonly yes` and
`appendfsync everysec`; advice() says so. How long a Redis that hangs can hold a request up is in pipeline.py. An
emptied one counts as down until it has its data back: after a FLUSHALL by starting it without that command in its log.
What a new primary is told first is in recent.py.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from redis.exceptions import NoScriptError, RedisError

from tenants.records.usage import MICRO
from tenants.store.protocol import Clock, StoreUnavailable
from tenants.store.redis import scripts
from tenants.store.redis.address import read_address
from tenants.store.redis.errors import redis_errors, unavailable
from tenants.store.redis.guard import FollowGuard
from tenants.store.redis.pipeline import PIPELINE_COMMANDS, CommandPipeline
from tenants.store.redis.primary import Primary
from tenants.store.redis.recent import RecentDecisions
from tenants.store.redis.replicas import Replicas

CLUSTER_KEY: Final = "hearth:cluster"  # what was founded there
READ_S: Final = 5.0  # for an answer that may be long
SCAN_FIELDS: Final = 500

K = TypeVar("K")
T = TypeVar("T")


class RedisDatabase:
    """One connection for `pipeline`, others for `reads`; they are made when needed, so opening never fails. Methods
    raise StoreUnavailable."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.recent = RecentDecisions(account_key)
        self.primary = Primary(read_address(url), self.recent.commands)
        self.pipeline = CommandPipeline(self.primary.connect)
        self._replicas = Replicas(self.primary.address, self.pipeline)
        self._everywhere = CommandPipeline(self.primary.connect, self._replicas.count)
        followed = CommandPipeline(self.primary.connect, lambda: 1)
        self.guard = FollowGuard(followed, lambda: self.primary.guarded)
        self.pipelines = (self.pipeline, self._everywhere, followed)
        self.reads: Any = self.primary.pool()
        self._clock = clock

    def now_us(self) -> int:
        """0 lets Redis read its own clock."""
        return 0 if self._clock is None else int(self._clock() * MICRO)

    async def ask(self, *command: Any) -> Any:
        """The answer of one command."""
        return (await self.ask_all(command))[0]

    async def ask_all(self, *commands: Sequence[Any]) -> list[Any]:
        """The answers of commands that go in one flight."""
        return _checked(await self.pipeline.ask(*commands))

    async def run_script(self, script: str, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """Runs a script once for each (key, arguments). Scripts are idempotent, so all run again where Redis had
        forgotten the text."""
        return await self._run(self.pipeline, [run_command(script, *call) for call in calls], script)

    async def _run(self, pipeline: CommandPipeline, commands: Sequence[Sequence[Any]], script: str) -> list[Any]:
        answers = await pipeline.ask(*commands)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            await self.ask("SCRIPT LOAD", script)
            answers = await pipeline.ask(*commands)
        return _checked(answers)

    async def run_lasting(self, script: str, key: str, *arguments: Any) -> Any:
        """The answer of one run, of which a new primary is told again. It may come anew after later writes of others,
        and must do nothing then."""
        answer = await self.run_script_once(script, key, *arguments)
        self.recent.write(key, run_command(script, key, arguments), script)
        return answer

    async def ask_lasting(self, key: str, *command: Any) -> Any:
        """The same of one command."""
        answer = await self.ask(*command)
        self.recent.write(key, command)
        return answer

    async def run_everywhere(self, script: str, key: str, *arguments: Any) -> Any:
        """The answer of one run, once every replica has what it wrote. Raises StoreUnavailable where one is away; then
        it may have run."""
        await self._replicas.require_all()
        return (await self._run(self._everywhere, [run_command(script, key, arguments)], script))[0]

    async def run_script_once(self, script: str, key: str, *arguments: Any) -> Any:
        """The answer of one run."""
        return (await self.run_script(script, [(key, arguments)]))[0]

    async def read(self, *commands: Sequence[Any]) -> list[Any]:
        """The answers of one consistent look at what may be large; not on the request path."""
        with redis_errors():
            async with asyncio.timeout(READ_S), self.reads.pipeline(transaction=True) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = await pipeline.execute()
                return answers

    async def read_apart(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """The answers of commands between which others may come; not on the request path."""
        answers: list[Any] = []
        with redis_errors():
            for first in range(0, len(commands), PIPELINE_COMMANDS):
                async with asyncio.timeout(READ_S), self.reads.pipeline(transaction=False) as pipeline:
                    for command in commands[first : first + PIPELINE_COMMANDS]:
                        pipeline.execute_command(*command)
                    answers += await pipeline.execute()
        return answers

    async def hash_pieces(self, key: str) -> AsyncIterator[dict[bytes, bytes]]:
        """The fields and values of a large hash in pieces, so that no other command waits long. What changes meanwhile
        may be there twice, before and after; what stays there is there."""
        cursor: int | None = None
        with redis_errors():
            async with asyncio.timeout(READ_S * 12):
                while cursor != 0:
                    cursor, piece = await self.reads.hscan(key, cursor or 0, count=SCAN_FIELDS)
                    yield piece

    async def account_keys(self, account_id: str) -> AsyncIterator[tuple[str, str]]:
        """All keys of an account but its own, each with the part behind the account's id; it walks the database."""
        start = account_key(account_id, " ")[:-1]
        with redis_errors():
            async with asyncio.timeout(READ_S * 12):
                async for key in self.reads.scan_iter(match=f"{start}*", count=SCAN_FIELDS * 2):
                    yield key.decode(), key.decode().removeprefix(start)

    async def account_ids(self) -> list[str]:
        (ids,) = await self.read(("SMEMBERS", "hearth:accounts"))
        return [id.decode() for id in ids]

    async def require_data(self) -> None:
        """Raises StoreUnavailable where there is neither an account nor a cluster: an emptied Redis would be taken for
        one that knows nobody, and tokens and usage thrown away that are in force once it is restored. A new cell has no
        account of its own, and serves those of others."""
        if not await self.ask("EXISTS", "hearth:accounts", CLUSTER_KEY):
            raise StoreUnavailable(
                "Redis has no account: it was emptied, and must be restored from its log or a backup; "
                "or [store] url names another one; or `hearth accounts create` has yet to make the first"
            )


def account_key(account_id: str, part: str = "") -> str:
    """The key of an account, or of a part of it, under the account's hash tag."""
    return f"hearth:{{{account_id}}}:{part}" if part else f"hearth:{{{account_id}}}"


def run_command(script: str, key: str, arguments: Sequence[Any]) -> Sequence[Any]:
    """The command that runs a script that Redis knows."""
    return ("EVALSHA", scripts.digest(script), 1, key, *arguments)


def grouped(records: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """The records that have an equal key together, in their order."""
    groups: dict[K, list[T]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.items())


def _checked(answers: list[Any]) -> list[Any]:
    """Raises StoreUnavailable where an answer is an error."""
    for answer in answers:
        if isinstance(answer, RedisError):
            raise unavailable(answer) from answer
    return answers
