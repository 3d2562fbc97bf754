import io
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from msgspec import structs

from tenants import export
from tenants.audit import SYSTEM, AuditLog
from tenants.auth.accounts import AccountService
from tenants.auth.errors import Unauthenticated
from tenants.export import ImportCounts, InvalidExport
from tenants.open import open_store
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan, Settings
from tenants.records.grants import Grant, Permission
from tenants.records.holds import Hold
from tenants.records.limits import Limits
from tenants.records.usage import EXPIRED, MICRO, UsageRecord
from tenants.store.protocol import Store, StoreUnavailable
from tenants.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio
SECRET = b"the server's secret, 32 bytes up"
Lines = list[dict[str, Any]]


@pytest.fixture
async def target(request: pytest.FixtureRequest, store_url: str, tmp_path: Any, clock: Any) -> AsyncIterator[Store]:
    """An empty store of the other kind."""
    from_redis = store_url.startswith("redis")
    url = f"sqlite:{tmp_path / 'other.db'}" if from_redis else request.getfixturevalue("empty_redis_url")
    opened = open_store(url, clock)
    yield opened
    await opened.close()


class Town:
    """Two accounts with all that accounts have, in one store."""

    def __init__(self, store: Store, clock: Any) -> None:
        self.store = store
        self.clock = clock
        self.accounts = AccountService(store, SECRET, clock)
        self.audit = AuditLog(store.audit, SECRET, clock)
        self.texts: dict[str, str] = {}
        self.ids: list[str] = []

    async def settle(self) -> None:
        await self.accounts.put_plan(Plan("team", Limits(requests_per_minute=9), weight=2.5))
        await self.audit.write(SYSTEM, "command line", "plan.change", "team")
        for name, plan in (("ann", "team"), ("bob", DEFAULT_PLAN.name)):
            ceiling = Limits(classes={"large": Limits(neurons_per_month=5.5)})
            account = await self.accounts.create(name, ceiling, plan)
            self.ids.append(account.id)
            await self.audit.write(account.id, "command line", "account.create", account.id)
            await self._mint(account)
            await self._use(account.id)
        ann, bob = self.ids
        wishes = Settings(zero_retention=True, sharing=(ann, bob), regions=("eu",))
        await self.accounts.update(ann, lambda one: structs.replace(one, settings=wishes, own=Limits(burst=None)))
        await self.accounts.purge_cache(ann)
        await self.accounts.suspend(bob)
        await self.accounts.resume(bob)

    async def _mint(self, account: Account) -> None:
        grant = Grant((Permission.USAGE_READ, Permission.INFERENCE), ("@cf/*",), ("10.0.0.0/8",))
        for name in ("plain", "rolled", "revoked"):
            given = (self.clock.now_s + 900, grant, Limits(concurrent_requests=2))
            token, self.texts[f"{account.name} {name}"] = await self.accounts.mint(account.id, name, *given)
            if name == "rolled":
                _, self.texts[f"{account.name} new"] = await self.accounts.roll(token.id, 600)
            if name == "revoked":
                await self.accounts.revoke(token.id)

    async def _use(self, account_id: str) -> None:
        """Three requests, of which one is never heard of again."""
        for n in range(3):
            record = used(account_id, f"r{n}", self.clock.day, cost=n)
            await self.store.quotas.reserve(Hold(structs.replace(record, outcome=EXPIRED), 100, MICRO, (), 7))
            if n:
                await self.store.quotas.settle([record])
        self.clock.now_s += 5
        assert await self.store.quotas.sweep() == 1
        await self.store.quotas.settle([used(account_id, "r1", self.clock.day - 3, cost=70)])


def used(account_id: str, request_id: str, day: int, cost: int) -> UsageRecord:
    tokens = (cost * 3, cost * 2, cost * 5)
    return UsageRecord(account_id, request_id, day, cost, *tokens, "done", "key", "@cf/a/b", 7, 1.5, None, "token:key")


@pytest.fixture
async def town(store: Store, clock: Any) -> Town:
    found = Town(store, clock)
    await found.settle()
    return found


async def exported(store: Store, *ids: str, usage: bool = True, audit: bool = True) -> bytes:
    accounts = [account for account in await store.accounts.list() if not ids or account.id in ids]
    lines = export.export(store, SECRET, accounts, transfer_day(store), whole=not ids, usage=usage, audit=audit)
    return b"".join([line async for line in lines])


def transfer_day(store: Any) -> int:
    database = store._file if isinstance(store, SqliteStore) else store._database
    return int(database.now_us()) // MICRO


async def imported(content: bytes, store: Store, secret: bytes = SECRET) -> ImportCounts:
    file, done = io.BytesIO(content), []
    found = await export.inspect_export(file, store, secret, done.append)
    assert await export.import_accounts(file, store, done.append) == found
    assert sum(done) == 3 * len(content)
    return found


async def without_header(store: Store) -> list[bytes]:
    return (await exported(store)).splitlines()[1:-1]


async def refused(content: bytes, store: Store, says: str, secret: bytes = SECRET) -> None:
    """It is refused in these words, and nothing was changed."""
    before = await without_header(store)
    with pytest.raises(InvalidExport, match=says):
        await imported(content, store, secret)
    assert await without_header(store) == before


def edited(content: bytes, edit: Callable[[Lines], object]) -> bytes:
    """As a server with this secret would have sealed it."""
    lines = [json.loads(line) for line in content.splitlines()[:-1]]
    edit(lines)
    body = [json.dumps(line).encode() + b"\n" for line in lines]
    seal = export._sealer(SECRET)
    seal.update(b"".join(body))
    return b"".join([*body, json.dumps({"type": "end", "lines": len(body), "seal": seal.hexdigest()}).encode()])


def of_type(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["type"] == kind]


async def test_all_of_an_account_comes_over_into_a_store_of_the_other_kind(
    town: Town, target: Store, clock: Any
) -> None:
    content = await exported(town.store)
    found = await imported(content, target)
    assert (found.accounts, found.plans, found.tokens, found.records, found.entries) == (town.ids, 1, 6, 8, 3)
    assert await without_header(target) == content.splitlines()[1:-1]
    accounts = AccountService(target, SECRET, clock)
    for name in ("plain", "rolled", "new"):
        caller = await accounts.verify(town.texts[f"ann {name}"])
        assert (caller.account.id, caller.token_limits) == (town.ids[0], Limits(concurrent_requests=2))
        assert caller.account.limits == (await town.accounts.get(town.ids[0])).limits
    with pytest.raises(Unauthenticated):
        await accounts.verify(town.texts["ann revoked"])
    for account_id in town.ids:
        for day, sum_of_neurons in ((clock.day, 3), (clock.day - 3, 70)):
            for subject in ("", "token:key"):
                balance = await target.quotas.reconcile(account_id, day, subject)
                balance.check()
                assert balance.counted == (await town.store.quotas.reconcile(account_id, day, subject)).counted
                assert balance.counted.micro_neurons == sum_of_neurons
        assert (await AuditLog(target.audit, SECRET).verify(account_id)).entries == 1


async def test_a_second_import_adds_nothing(town: Town, target: Store) -> None:
    content = await exported(town.store)
    await imported(content, target)
    await AuditLog(target.audit, SECRET).write(town.ids[0], "command line", "account.import", town.ids[0])
    assert (await imported(content, target)).nothing
    assert (await imported(content, town.store)).nothing


async def test_an_import_that_was_interrupted_is_completed_by_the_next(town: Town, target: Store) -> None:
    content = await exported(town.store)
    failing, interrupted = _Failing(target), 0
    while interrupted < 30:
        failing.left = 1  # each does one write more than the one before it
        try:
            await export.import_accounts(io.BytesIO(content), cast(Any, failing), lambda count: None)
        except StoreUnavailable:
            interrupted += 1
        else:
            break
    assert interrupted == 17
    assert (await imported(content, target)).nothing
    assert await without_header(target) == content.splitlines()[1:-1]
    with pytest.raises(Unauthenticated):
        await AccountService(target, SECRET, town.clock).verify(town.texts["bob revoked"])


async def test_an_import_settles_few_records_at_a_time_with_pauses_for_others(
    store: Store, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, day = 2 * export.COMPARED_AT_ONCE + 7, clock.day
    account = await AccountService(store, SECRET, clock).create("ann")
    made = [UsageRecord(account.id, f"r{n:05}", day, 1, 1, 1, 1, "done", "k", "m", 7, 1.0) for n in range(count)]
    await store.quotas.settle(made)
    content = await exported(store)
    steps: list[int] = []

    async def pause(seconds: float) -> None:
        assert seconds >= 0.001
        steps.append(0)

    class Spy:
        async def settle(self, records: Any) -> None:
            steps.append(len(records))

        async def records(self, account_id: str, of_day: int, request_ids: Any) -> Any:
            assert len(request_ids) <= export.COMPARED_AT_ONCE
            return []

    monkeypatch.setattr(store, "quotas", Spy())
    monkeypatch.setattr(export.asyncio, "sleep", pause)
    await export.import_accounts(io.BytesIO(content), store, lambda done: None)
    assert sum(steps) == count
    assert max(steps) == export.SETTLED_AT_ONCE
    assert all(step == 0 for step in steps[1::2]), "a pause behind each"


async def test_an_import_goes_on_behind_an_answer_that_was_late(town: Town, target: Store) -> None:
    content, late = await exported(town.store), 3
    settle = target.quotas.settle

    async def sometimes(records: Any) -> None:
        nonlocal late
        await settle(records)  # the store acts, and its answer is lost
        if late:
            late -= 1
            raise StoreUnavailable("late", unsure=True)

    cast(Any, target.quotas).settle = sometimes
    assert (await imported(content, target)).records == 8
    assert late == 0
    assert await without_header(target) == content.splitlines()[1:-1]


WRITES = ("add", "add_token", "update_token", "put_plan", "settle", "append")


class _Failing:
    """A store that fails after so many writes. A revocation is none, for it is repeated each time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.left = 0

    def __getattr__(self, name: str) -> Any:
        return _FailingPart(self, getattr(self._store, name))


class _FailingPart:
    def __init__(self, store: _Failing, part: Any) -> None:
        self._store = store
        self._part = part

    def __getattr__(self, name: str) -> Any:
        if name in WRITES:
            if self._store.left == 0:
                raise StoreUnavailable("gone")
            self._store.left -= 1
        return getattr(self._part, name)


async def test_an_export_has_no_secret_of_a_token(town: Town) -> None:
    content = await exported(town.store)
    for text in town.texts.values():
        assert text.encode() not in content
        assert text.split("_")[2].encode() not in content
    assert SECRET not in content


async def test_named_accounts_go_alone_with_their_plan(town: Town, target: Store) -> None:
    ann, bob = town.ids
    content = await exported(town.store, ann, usage=False, audit=False)
    assert bob.encode() not in content.replace(b'"sharing":["' + ann.encode() + b'","' + bob.encode(), b"")
    found = await imported(content, target)
    assert (found.accounts, found.plans, found.tokens, found.records, found.entries) == ([ann], 1, 3, 0, 0)


async def test_a_file_that_was_cut_anywhere_is_refused(town: Town, target: Store) -> None:
    content = await exported(town.store, town.ids[0])
    for length in range(0, len(content) - 2, 131):
        await refused(content[:length], target, "cut off|this is no export")
    whole_lines = content.splitlines(keepends=True)
    for count in range(1, len(whole_lines)):
        await refused(b"".join(whole_lines[:count]), target, "cut off")


async def test_a_file_that_was_altered_anywhere_is_refused(town: Town, target: Store) -> None:
    content = await exported(town.store, town.ids[0])
    for place in range(0, len(content) - 1, 97):
        altered = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        await refused(altered, target, "altered|cut off|this is no export|has format|another server's secret")
    lines = content.splitlines(keepends=True)
    await refused(b"".join([*lines[:2], *lines[3:]]), target, "altered")
    await refused(b"".join([*lines[:2], lines[2], *lines[2:]]), target, "altered")


async def test_other_formats_secrets_and_files_are_refused(town: Town, target: Store) -> None:
    content = await exported(town.store)
    await refused(edited(content, lambda lines: lines[0].update(format=2)), target, "format 2; this Hearth reads 1")
    await refused(content, target, "another server's secret", b"another secret of 32 bytes or so")
    for other in (b"", b"[1]", b"{}", b'"header"', b"\xff\xfe", b"id,name\n1,ann\n", b'{"type":"header"}\n'):
        await refused(other, target, "this is no export")


def _twice(kind: str) -> Callable[[Lines], object]:
    def edit(lines: Lines) -> None:
        first = of_type(lines, kind)[0]
        lines.insert(lines.index(first), first)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_twice("plan"), "plan default is in the file twice"),
        (_twice("account"), "account .* is in the file twice"),
        (_twice("token"), "token .* is in the file twice"),
        (_twice("usage"), "usage record r1 is in the file twice"),
        (lambda lines: lines.append(of_type(lines, "token")[0]), "is in the file twice"),
        (lambda lines: lines.append(of_type(lines, "usage")[0]), "not behind its account's line"),
        (lambda lines: lines.remove(of_type(lines, "plan")[0]), "has the plan default, which is not in the file"),
        (lambda lines: lines.remove(of_type(lines, "account")[0]), "not behind its account's line"),
        (lambda lines: of_type(lines, "audit")[-1]["entry"].update(seq=3), "lacks what is before entry 3"),
        (lambda lines: of_type(lines, "account")[0].update(colour="red"), "line .*colour"),
        (lambda lines: of_type(lines, "account")[0]["ceiling"].update(burst=-1), "burst"),
        (lambda lines: lines.append({"type": "cake"}), "cake"),
    ],
)
async def test_what_no_export_has_is_refused(
    town: Town, target: Store, edit: Callable[[Lines], object], says: str
) -> None:
    await refused(edited(await exported(town.store), edit), target, says)


async def test_what_is_something_else_here_is_a_conflict(town: Town, target: Store) -> None:
    content = await exported(town.store)
    ann, bob = town.ids
    await imported(content, target)
    there = AccountService(target, SECRET)
    token = next(token for token in await there.tokens(bob) if token.name == "plain")
    await there.put_plan(structs.replace(await there.plan("team"), weight=9.0))
    await refused(content, target, "the plan team is another one here")
    await there.put_plan(await town.accounts.plan("team"))
    await there.update_token(token.id, "renamed", token.expires_at, token.grant, token.limits)
    await refused(content, target, f"token {token.id} is there already and not as")
    await there.update_token(token.id, token.name, token.expires_at, token.grant, token.limits)
    await there.update(ann, lambda account: account)
    await refused(content, target, f"account {ann} is there already, in revision")


async def test_a_record_or_an_audit_log_that_differs_is_a_conflict(town: Town, target: Store, clock: Any) -> None:
    content = await exported(town.store)
    await imported(await exported(town.store, usage=False, audit=False), target)
    await target.quotas.settle([used(town.ids[0], "r2", clock.day, cost=3)])
    await refused(content, target, "usage record r2 of account .* is another one here")
    content = await exported(town.store, usage=False)
    await AuditLog(target.audit, SECRET, clock).write(town.ids[0], "command line", "account.import", town.ids[0])
    await refused(content, target, "audit log of .* is another one here, from entry 1 on")


async def test_the_default_plan_of_a_store_that_uses_it_is_not_replaced(town: Town, target: Store) -> None:
    await town.accounts.put_plan(structs.replace(DEFAULT_PLAN, weight=3.0))
    content = await exported(town.store, town.ids[1])
    carol = await AccountService(target, SECRET).create("carol")
    await refused(content, target, "the plan default is another one here")
    await target.accounts.update(structs.replace(carol, plan=Plan("other"), revision=2))
    await target.accounts.put_plan(Plan("other", revision=1))
    await imported(content, target)
    assert (await AccountService(target, SECRET).plan("default")).weight == 3.0


async def test_expired_records_come_over_as_they_are(town: Town, target: Store, clock: Any) -> None:
    await imported(await exported(town.store), target)
    outcomes = {record.request_id: record.outcome for record in await target.quotas.records(town.ids[0], clock.day)}
    assert outcomes == {"r0": EXPIRED, "r1": "done", "r2": "done"}
