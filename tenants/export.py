"""Accounts as lines of JSON, out of one store and into another. It knows no paths and prints nothing.

A header, the plans, then account by account itself, its tokens, its usage records by day and request id, its audit log;
an end. Secrets of tokens are in no store, so the file has their digests, which open under that server's secret alone.
The end is an HMAC under that secret of all lines before it: a file that was cut or altered is not imported.
The file lacks open requests, rates of the running minute, notices on their way, idempotency keys, batches.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import structs

from tenants.audit import PAGE, SYSTEM, AuditLog
from tenants.records.accounts import DEFAULT_PLAN, Account, AuditEntry, Deletion, Plan, Settings, name_key
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import UsageRecord
from tenants.store.protocol import RETENTION_DAYS, NameTaken, Store, StoreUnavailable

FORMAT: Final = 1
LINE_BYTES_MAX: Final = 1 << 20
COMPARED_AT_ONCE: Final = 500  # usage records
SETTLED_AT_ONCE: Final = 50  # so that a call that wants to write meanwhile waits for some milliseconds
SETTLE_TRIES: Final = 5
SETTLE_AGAIN_S: Final = 0.05
SETTLE_PAUSE_S: Final = 0.004  # in which such a call gets its turn

ExportProgress = Callable[[int], object]  # so many bytes more are done


class InvalidExport(ValueError):
    """The file cannot be imported here; the message says where and why. Nothing was changed."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    pass


class _Header(_Line, frozen=True, tag="header"):
    """`secret` is the fingerprint of the server's secret."""

    format: int
    made_at: int
    secret: str


class _Plan(_Line, frozen=True, tag="plan"):
    plan: Plan


class _Account(_Line, frozen=True, tag="account"):
    """The fields of Account, but the plan by its name."""

    id: str
    name: str
    created_at: int
    plan: str
    ceiling: Limits = NO_LIMITS
    own: Limits = NO_LIMITS
    settings: Settings = Settings()
    epoch: int = 0
    suspended_at: int | None = None
    revision: int = 1
    deletion: Deletion | None = None
    home: str = ""


class _Token(_Line, frozen=True, tag="token"):
    token: ApiToken
    seals: list[TokenDigest]


class _Usage(_Line, frozen=True, tag="usage"):
    record: UsageRecord


class _Audit(_Line, frozen=True, tag="audit"):
    entry: AuditEntry


class _End(_Line, frozen=True, tag="end"):
    lines: int
    seal: str


_Any = _Header | _Plan | _Account | _Token | _Usage | _Audit | _End
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Any).decode


def secret_fingerprint(secret: bytes) -> str:
    """A text that tells secrets apart and reveals nothing else of them."""
    return hmac.digest(secret, b"hearth fingerprint", "sha256").hex()[:16]


async def export(
    store: Store, secret: bytes, accounts: Sequence[Account], now_s: int, *, whole: bool, usage: bool, audit: bool
) -> AsyncIterator[bytes]:
    """The lines. `whole`: these are all accounts, so that every plan, and with `audit` the system's own log, goes with
    them; else the plans that they have."""
    seal, lines = _sealer(secret), 0
    async for line in _lines(store, secret, accounts, now_s, whole, usage, audit):
        encoded = _encode(line) + b"\n"
        seal.update(encoded)
        lines += 1
        yield encoded
    yield _encode(_End(lines, seal.hexdigest())) + b"\n"


async def _lines(
    store: Store, secret: bytes, accounts: Sequence[Account], now_s: int, whole: bool, usage: bool, audit: bool
) -> AsyncIterator[_Line]:
    log = AuditLog(store.audit, secret)
    yield _Header(FORMAT, now_s, secret_fingerprint(secret))
    plans = {account.plan.name: account.plan for account in accounts}
    stored = {plan.name: plan for plan in await store.accounts.plans()} if whole else {}
    for _, plan in sorted({**plans, **stored}.items()):
        yield _Plan(plan)
    if whole and audit:
        async for entry in log.entries(SYSTEM):
            yield _Audit(entry)
    for account in accounts:
        yield _account_line(account)
        for token in await store.accounts.tokens(account.id):
            row = await store.accounts.token(token.id)
            assert row is not None, f"token {token.id} of {account.id} is listed and missing"
            yield _Token(row[0], list(row[1]))
        if usage:
            today = now_s // 86_400
            usage_rows = await store.quotas.usage([account.id], today - RETENTION_DAYS, today + 1, ())
            for day in sorted({row.day for row in usage_rows.get(account.id, ())}):
                for record in await store.quotas.records(account.id, day):
                    yield _Usage(record)
        if audit:
            async for entry in log.entries(account.id):
                yield _Audit(entry)


@dataclass(slots=True)
class ImportCounts:
    """How many records of the file were missing here; `accounts` are the ids of the new ones."""

    accounts: list[str] = field(default_factory=list)
    plans: int = 0
    tokens: int = 0
    records: int = 0
    entries: int = 0

    @property
    def nothing(self) -> bool:
        return self == ImportCounts()


async def inspect_export(file: BinaryIO, store: Store, secret: bytes, progress: ExportProgress) -> ImportCounts:
    """Compares the whole file with the store; returns what import_accounts() would add. Raises InvalidExport."""
    file.seek(0)
    _check_seal(file, secret, progress)
    return await _merge(file, store, progress, write=False)


async def import_accounts(file: BinaryIO, store: Store, progress: ExportProgress) -> ImportCounts:
    """Adds the missing records of a file that inspect_export() accepted. After StoreUnavailable a second call completes
    the import."""
    return await _merge(file, store, progress, write=True)


def _check_seal(file: BinaryIO, secret: bytes, progress: ExportProgress) -> None:
    """Raises InvalidExport for what is no export, another format or secret, cut, or altered."""
    first = file.readline(LINE_BYTES_MAX)
    _check_header(first, secret)
    seal, lines, line = _sealer(secret), 0, first
    while following := file.readline(LINE_BYTES_MAX):
        seal.update(line)
        lines += 1
        progress(len(line))
        line = following
    progress(len(line))
    try:
        end = msgspec.json.decode(line, type=_End)
    except msgspec.MsgspecError:
        raise InvalidExport("the file was cut off: its last line is missing") from None
    if end.lines != lines or not hmac.compare_digest(end.seal, seal.hexdigest()):
        raise InvalidExport("the file was altered: its seal is not that of its lines")


def _check_header(line: bytes, secret: bytes) -> None:
    try:
        header = msgspec.json.decode(line)
        known = header["type"] == "header" and isinstance(header["format"], int)
    except (msgspec.MsgspecError, LookupError, TypeError):
        known = False
    if not known:
        raise InvalidExport("this is no export: its first line is not the header of `hearth accounts export`")
    if header["format"] != FORMAT:
        raise InvalidExport(
            f"the file has format {header['format']}; this Hearth reads {FORMAT}: use the one that wrote it"
        )
    if header.get("secret") != secret_fingerprint(secret):
        raise InvalidExport(
            "the file was written under another server's secret, so its tokens would open nothing here: take the file "
            "`secret` of that server's state folder along, or export from a server with this one"
        )


def _sealer(secret: bytes) -> "hmac.HMAC":
    return hmac.new(hmac.digest(secret, b"hearth export", "sha256"), digestmod="sha256")


async def _merge(file: BinaryIO, store: Store, progress: ExportProgress, write: bool) -> ImportCounts:
    file.seek(0)
    plans = {plan.name: plan for plan in await store.accounts.plans()}
    known = {account.id: account for account in await store.accounts.list()}
    merger = _Merger(store, plans, known, write)
    for _, group in groupby(_read(file, progress), _group_key):
        while lines := list(islice(group, COMPARED_AT_ONCE)):
            await merger.merge(lines)
    return merger.imported


def _read(file: BinaryIO, progress: ExportProgress) -> Iterator[_Line]:
    for number, encoded in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1):
        progress(len(encoded))
        try:
            line = _decode(encoded)
        except msgspec.MsgspecError as error:
            raise InvalidExport(f"line {number}: {error}") from None
        if not isinstance(line, _Header | _End):
            yield line


def _group_key(line: _Line) -> object:
    """Lines that follow each other with an equal key are compared with the store at once."""
    match line:
        case _Usage(record=record):
            return record.account_id, record.day
        case _Audit(entry=entry):
            return entry.account_id, "audit", entry.seq // PAGE
        case _:
            return id(line)


class _Merger:
    """One walk through the file. Raises InvalidExport where an id is there twice, or is another record in the store."""

    def __init__(self, store: Store, stored_plans: dict[str, Plan], known: dict[str, Account], write: bool) -> None:
        self._store = store
        self._stored_plans = stored_plans  # the store's plans
        self._known = known  # its accounts
        self._names = {name_key(account.name): account.id for account in known.values()}
        self._default_in_use = any(account.plan.name == DEFAULT_PLAN.name for account in known.values())
        self._write = write
        self._plans: dict[str, Plan] = {}
        self._seen: set[tuple[str, str]] = set()  # kinds and ids
        self._account = SYSTEM  # whose lines these are
        self._record: tuple[int, str] = (0, "")  # the day and id of the record before
        self._seq = 0  # of the audit entry before
        self.imported = ImportCounts()

    async def merge(self, lines: list[_Line]) -> None:
        match lines[0]:
            case _Plan(plan=plan):
                await self._merge_plan(plan)
            case _Account() as line:
                await self._merge_account(line)
            case _Token(token=token, seals=seals):
                await self._merge_token(token, seals)
            case _Usage():
                await self._merge_records([line.record for line in lines if isinstance(line, _Usage)])
            case _Audit():
                await self._merge_entries([line.entry for line in lines if isinstance(line, _Audit)])

    async def _merge_plan(self, plan: Plan) -> None:
        self._require_first("plan", plan.name)
        self._plans[plan.name] = plan
        existing = self._stored_plans.get(plan.name) or (DEFAULT_PLAN if plan.name == DEFAULT_PLAN.name else None)
        if existing is not None and structs.replace(existing, revision=0) == structs.replace(plan, revision=0):
            return
        if plan.name in self._stored_plans or (existing is not None and self._default_in_use):
            raise InvalidExport(f"the plan {plan.name} is another one here: rename one of them, or make them the same")
        self.imported.plans += 1
        if self._write:
            await self._store.accounts.put_plan(structs.replace(plan, revision=1))

    async def _merge_account(self, line: _Account) -> None:
        self._require_first("account", line.id)
        if line.plan not in self._plans:
            raise InvalidExport(f"account {line.id} has the plan {line.plan}, which is not in the file")
        self._account, self._record, self._seq = line.id, (0, ""), 0
        existing = self._known.get(line.id)
        if existing is not None:
            if _account_line(existing) != line:
                raise InvalidExport(
                    f"account {line.id} is there already, in revision {existing.revision}, and not as it is in the file"
                )
            return
        await self._add_account(line)

    async def _add_account(self, line: _Account) -> None:
        """Adds an account. A name that two accounts of the file share is theirs to keep: names need not have been
        unique where it was written."""
        holder = self._names.setdefault(name_key(line.name), line.id)
        if ("account", holder) not in self._seen:
            raise InvalidExport(
                f"account {line.id} has the name {line.name!r}, which is that of account {holder} here: rename one, by "
                "`hearth accounts rename`"
            )
        self.imported.accounts.append(line.id)
        if self._write:
            self._known[line.id] = Account(**{**structs.asdict(line), "plan": self._plans[line.plan]})
            try:
                await self._store.accounts.add(self._known[line.id], shared_name=holder != line.id)
            except NameTaken as taken:
                raise InvalidExport(f"account {taken.account_id} has taken the name {line.name!r} meanwhile") from None

    async def _merge_token(self, token: ApiToken, seals: list[TokenDigest]) -> None:
        self._require_first("token", token.id)
        self._check_owner(token.account_id)
        # A Redis without any account does not answer this: it takes itself for one that was emptied.
        existing = await self._store.accounts.token(token.id) if self._known else None
        sealed = [] if existing is None else list(existing[1])
        # The newest seal alone is what an import leaves that was interrupted.
        if existing is not None and (existing[0] != token or sealed not in (seals, seals[:1])):
            raise InvalidExport(f"token {token.id} is there already and not as the file has it")
        self.imported.tokens += sealed != seals
        if self._write:
            await self._complete(token, seals, sealed)

    async def _complete(self, token: ApiToken, seals: list[TokenDigest], sealed: list[TokenDigest]) -> None:
        if not sealed:
            await self._store.accounts.add_token(token, seals[0])
        if token.revoked_at is not None:
            await self._store.accounts.revoke(token.id, token.revoked_at)
        if sealed != seals and len(seals) > 1:
            await self._store.accounts.update_token(token, seals)

    async def _merge_records(self, records: list[UsageRecord]) -> None:
        """Records of one account and day, by request id."""
        account_id, day = records[0].account_id, records[0].day
        self._check_owner(account_id)
        stored = await self._store.quotas.records(account_id, day, [record.request_id for record in records])
        existing = {record.request_id: record for record in stored}
        added = []
        for record in records:
            if (day, record.request_id) <= self._record:
                raise InvalidExport(f"the usage record {record.request_id} is in the file twice")
            self._record = (day, record.request_id)
            if record.request_id not in existing:
                added.append(record)
            elif existing[record.request_id] != record:
                raise InvalidExport(f"usage record {record.request_id} of account {account_id} is another one here")
        self.imported.records += len(added)
        if self._write:
            for start in range(0, len(added), SETTLED_AT_ONCE):
                await self._settle(added[start : start + SETTLED_AT_ONCE])
                await asyncio.sleep(SETTLE_PAUSE_S)

    async def _settle(self, records: list[UsageRecord]) -> None:
        """Tries again for a moment: of thousands of answers one may be late."""
        for _ in range(SETTLE_TRIES - 1):
            try:
                return await self._store.quotas.settle(records)
            except StoreUnavailable:
                await asyncio.sleep(SETTLE_AGAIN_S)
        await self._store.quotas.settle(records)

    async def _merge_entries(self, entries: list[AuditEntry]) -> None:
        """Merges one account's entries with the stored chain: one is the beginning of the other."""
        account_id, first = entries[0].account_id, entries[0].seq
        self._check_owner(account_id)
        log = f"the audit log of {account_id or 'the system'}"
        for entry in entries:
            if entry.seq != self._seq + 1:
                raise InvalidExport(f"{log} lacks what is before entry {entry.seq}")
            self._seq = entry.seq
        existing = await self._store.audit.entries(account_id, first, len(entries))
        if list(existing) != entries[: len(existing)]:
            raise InvalidExport(f"{log} is another one here, from entry {first} on")
        self.imported.entries += len(entries) - len(existing)
        if self._write:
            for entry in entries[len(existing) :]:
                if not await self._store.audit.append(entry):
                    raise ValueError(f"others wrote to the audit log of {account_id} meanwhile: it is not all there")

    def _require_first(self, kind: str, key: str) -> None:
        if (kind, key) in self._seen:
            raise InvalidExport(f"the {kind} {key} is in the file twice")
        self._seen.add((kind, key))

    def _check_owner(self, account_id: str) -> None:
        if account_id != self._account:
            raise InvalidExport(f"a line of account {account_id} is not behind its account's line")


def _account_line(account: Account) -> _Account:
    fields: dict[str, Any] = structs.asdict(account)
    return _Account(**{**fields, "plan": account.plan.name})
