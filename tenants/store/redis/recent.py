"""What this process was told lately by a primary, so that it can tell the next one: its open holds, and what it wrote.

A primary that is lost or cut off takes with it what it had acknowledged and not yet sent to its replicas. Each gateway
has that for its own requests, and says it again before it asks a new primary anything. All of it is idempotent, so
that several may, and what was not lost stays as it is. It decides nothing, and sends nothing itself.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from tenants.records.holds import DenialReason, Granted, Hold
from tenants.records.usage import MICRO, UsageRecord
from tenants.store.redis import scripts

KEPT_S: Final = 60.0  # so long may a primary go on that is cut off and not guarded, and nothing is lost
KEPT_BYTES: Final = 64 << 20  # about 100,000 settlements; of more the oldest are forgotten sooner
HOLDS_AT_ONCE: Final = 64

Command = Sequence[Any]

_pack = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _OpenHold:
    day: int
    held: int
    output: int
    rates: str  # tokens per minute for each subject that is counted, as the script RESERVE keeps them
    lifetime_us: int
    record: bytes
    renewed_s: float


@dataclass(frozen=True, slots=True)
class _Write:
    at_s: float
    key: str
    command: Command
    size: int


class RecentDecisions:
    """One process's part. `account_key` names an account's key."""

    def __init__(self, account_key: Callable[[str], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._account_key = account_key
        self._clock = clock
        self._holds: dict[tuple[str, str], _OpenHold] = {}  # the one renewed longest ago first
        self._writes: deque[_Write] = deque()  # the oldest first
        self._bytes = 0
        self._scripts: dict[str, str] = {}  # text by digest, of the writes

    def grant(self, hold: Hold, granted: Granted) -> None:
        """Remembers a hold until it is settled, or is over."""
        now_s, record = self._clock(), hold.record
        per_minute = {
            cap.subject: cap.allowed for cap in hold.caps if cap.measure is DenialReason.OUTPUT_TOKENS_PER_MINUTE
        }
        rates = ",".join(str(per_minute.get(subject, 0)) for subject in record.subjects_counted)
        terms = (granted.day, granted.held, hold.output, rates, hold.lifetime_us)
        self._holds[record.account_id, record.request_id] = _OpenHold(*terms, _pack(record), now_s)
        for key, oldest in list(islice(self._holds.items(), 2)):  # one is added, and two at most go
            if now_s - oldest.renewed_s > oldest.lifetime_us / MICRO:
                del self._holds[key]

    def renew(self, record: UsageRecord) -> None:
        """Remembers a checkpoint of a hold."""
        key = record.account_id, record.request_id
        opened = self._holds.pop(key, None)
        if opened is not None:
            opened.record, opened.renewed_s = _pack(record), self._clock()
            self._holds[key] = opened

    def settle(self, account_id: str, request_id: str) -> None:
        self._holds.pop((account_id, request_id), None)

    def write(self, key: str, command: Command, script: str = "") -> None:
        """Remembers for KEPT_S a command that did what it does, or was in vain; `script` is the text of its script."""
        now_s = self._clock()
        size = 200 + sum(len(part) for part in command if isinstance(part, (bytes, str)))
        self._writes.append(_Write(now_s, key, command, size))
        self._bytes += size
        if script:
            self._scripts[str(command[1])] = script
        while self._writes and (self._bytes > KEPT_BYTES or now_s - self._writes[0].at_s > KEPT_S):
            self._bytes -= self._writes.popleft().size

    def forget(self, key: str) -> None:
        """Forgets what was written under a key that was removed since, so that it does not come back."""
        self._writes = deque(write for write in self._writes if write.key != key)
        self._bytes = sum(write.size for write in self._writes)

    def commands(self) -> list[Command]:
        """All of it, for a primary that may know none of it."""
        now_s = self._clock()
        writes = [write.command for write in self._writes if now_s - write.at_s <= KEPT_S]
        holds = list(self._hold_commands())
        if not writes and not holds:
            return []
        texts = [*self._scripts.values(), scripts.RESTATE]
        return [*(("SCRIPT", "LOAD", text) for text in texts), *writes, *holds]

    def _hold_commands(self) -> Iterator[Command]:
        groups: dict[str, list[Any]] = {}
        for (account_id, request_id), hold in self._holds.items():
            terms = (hold.day, hold.held, hold.output, hold.rates, hold.lifetime_us, hold.record)
            groups.setdefault(self._account_key(account_id), []).append((request_id, *terms))
        for key, holds in groups.items():
            for first in range(0, len(holds), HOLDS_AT_ONCE):
                parts = [part for hold in holds[first : first + HOLDS_AT_ONCE] for part in hold]
                yield ("EVALSHA", scripts.digest(scripts.RESTATE), 1, key, 0, *parts)
