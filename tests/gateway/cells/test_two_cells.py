"""Two real gateways of two cells, over TLS: an account of one is served in the other."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import structs

from gateway.admin.account import account_answer
from gateway.cells import lines
from gateway.cells.lines import CellLine, CellLines
from gateway.cells.listener import CellListener
from gateway.cells.messages import CellAnswer, CellQuestion, LookUp, encode
from gateway.cells.trust import CellTrust
from gateway.commands.account_tools.documents import account_json
from gateway.commands.checks.cells import cells
from gateway.commands.checks.finding import FindingLevel
from gateway.identity.authority import CERTIFICATE_S, found_authority
from gateway.identity.cell_settings import CellsConfig, OtherCell
from gateway.identity.files import HostFiles, write_identity
from gateway.identity.host_identity import HostIdentity, HostRole, IdentityError
from gateway.identity.settings import ClusterConfig
from gateway.other_cells import open_cells
from gateway.settings.config import Config, SettingsError
from tenants.auth.api_token import cell_code
from tenants.auth.errors import Conflict, HomeUnavailable
from tenants.limits.lending import LeaseRefused, LeaseRequest
from tenants.open import open_store
from tenants.records.accounts import Settings
from tenants.records.grants import Grant, Permission
from tenants.records.leases import LeaseState
from tenants.records.limits import Limits
from tenants.records.usage import MICRO, Totals, day_of
from tests.support.hosts import HostMaker, host_maker
from tests.support.served_gateway import IDENTITY, SECRET, Answer, Served, looped, served
from tests.support.waiting import until

PLENTY = Limits(neurons_per_day=100_000.0)


@pytest.fixture(params=["sqlite", "redis"])
def store_urls(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str | None]:
    """A store for each cell."""
    if request.param == "sqlite":
        return {"eu": None, "us": None}
    url: str = request.getfixturevalue("redis_url")
    base = url.rpartition("/")[0]
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return {"eu": f"{base}/0", "us": f"{base}/1"}


@dataclass
class Ends:
    """Where a cell's gateway is, and what it needs to be one."""

    name: str
    folder: Path
    makers: dict[str, HostMaker]
    ports: dict[str, int]

    @property
    def others(self) -> list[OtherCell]:
        return [
            OtherCell(
                name=name, addresses=[f"127.0.0.1:{port}"], authority=str(self.makers[name].paths("identity").authority)
            )
            for name, port in self.ports.items()
            if name != self.name
        ]

    @property
    def cells(self) -> CellsConfig:
        return CellsConfig(listen=f"127.0.0.1:{self.ports[self.name]}", others=self.others)


def ends(folder: Path, names: Sequence[str] = ("eu", "us")) -> dict[str, Ends]:
    makers, ports = {}, {}
    for name in names:
        makers[name] = host_maker(folder / name / "state", name)
        makers[name].host(HostRole.GATEWAY, "identity", region=f"{name}-1")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports[name] = free.getsockname()[1]
    return {name: Ends(name, folder / name, makers, ports) for name in names}


@contextlib.asynccontextmanager
async def two_cells(
    folder: Path, limits: Limits = PLENTY, urls: dict[str, str | None] | None = None
) -> AsyncIterator[tuple[Served, Served]]:
    """The home eu of an account with these limits, and us."""
    places, urls = ends(folder), urls or {"eu": None, "us": None}
    async with (
        served(places["eu"].folder, cells=places["eu"].cells, limits=limits, store_url=urls["eu"]) as eu,
        served(places["us"].folder, cells=places["us"].cells, store_url=urls["us"], account_name="us") as us,
    ):
        yield eu, us


@contextlib.asynccontextmanager
async def listening(
    place: Ends,
    answer: Callable[[CellQuestion, HostIdentity], Awaitable[CellAnswer]],
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[None]:
    """The place's listener alone, with these answers."""
    port = place.ports[place.name]
    task = asyncio.create_task(CellListener(trust_of(place), answer, clock).run("127.0.0.1", port))
    yield
    task.cancel()
    await asyncio.wait([task])


async def abroad(eu: Served, us: Served, **body: object) -> Answer:
    """One call with eu's token at us."""
    return await us.call(eu.run_path, {"prompt": "hello", "max_tokens": 8, **body}, authorization=f"Bearer {eu.token}")


async def leases(us: Served) -> list[LeaseState]:
    return [lease.state for lease in await us.app._tenancy.store.leases.list()]


async def counted(gateway: Served, account_id: str) -> Totals:
    await gateway.settled()
    await gateway.quota.flush()
    day = day_of(int(gateway.app._serving.endpoint.calendar() * MICRO))
    balance = await gateway.app._tenancy.store.quotas.reconcile(account_id, day)
    balance.check()
    return balance.counted


@looped
async def test_an_account_is_served_in_another_cell_and_charged_at_home(
    tmp_path: Path, store_urls: dict[str, str | None]
) -> None:
    async with two_cells(tmp_path, urls=store_urls) as (eu, us):
        assert eu.token.removeprefix("hearth_").startswith(cell_code("eu"))
        for _ in range(3):
            answer = await abroad(eu, us)
            assert answer.status == 200, answer.content
        used = await counted(us, eu.account_id)
        assert used.requests == 3
        assert used.micro_neurons > 0
        held = await counted(eu, eu.account_id)
        assert (held.open, held.micro_neurons) == (1, 0), "one lease for three calls"
        for lease in await us.app._tenancy.store.leases.list():
            await us.app._tenancy.store.leases.close(lease.account_id, lease.id)

        async def returned() -> bool:
            return await leases(us) == [LeaseState.RETURNED]

        await until(returned)
        settled = await counted(eu, eu.account_id)
        tokens = (used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        assert settled == Totals(1, used.micro_neurons, *tokens)


@looped
async def test_a_new_cell_without_an_account_of_its_own_serves_those_of_others(tmp_path: Path, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    async with two_cells(tmp_path, urls={"eu": None, "us": redis_url}) as (eu, us):
        store = us.app._tenancy.store
        await store.accounts.remove(us.account_id)
        assert (await abroad(eu, us)).status == 503, "no cluster was founded there: it was emptied"
        await store.cluster.found(found_authority("us", SECRET, time.time()))
        assert (await abroad(eu, us)).status == 200
        assert await leases(us) == [LeaseState.OPEN]


@looped
async def test_two_cells_never_spend_more_than_the_budget_together(
    tmp_path: Path, store_urls: dict[str, str | None]
) -> None:
    budget = 2.0
    async with two_cells(tmp_path, Limits(neurons_per_day=budget), store_urls) as (eu, us):
        refused = {"eu": 0, "us": 0}

        async def calls(name: str) -> None:
            while refused[name] < 2:
                answer = await (eu.run(prompt="hello", max_tokens=8) if name == "eu" else abroad(eu, us))
                assert answer.status in (200, 429), answer.content
                refused[name] += answer.status == 429

        await asyncio.gather(*(calls(name) for name in ("eu", "us") * 3))
        spent = (await counted(eu, eu.account_id)).micro_neurons + (await counted(us, eu.account_id)).micro_neurons
        home = await counted(eu, eu.account_id)
        assert spent <= budget * MICRO
        assert home.micro_neurons + home.held <= budget * MICRO
        assert home.micro_neurons < spent, "some of it was spent in us"


@looped
async def test_what_ends_at_home_ends_in_the_other_cell(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (eu, us):
        assert (await abroad(eu, us)).status == 200
        await eu.accounts.suspend(eu.account_id)

        async def answered(status: int) -> bool:
            us.see_changes()
            return (await abroad(eu, us)).status == status

        await until(lambda: answered(403))
        await eu.accounts.resume(eu.account_id)
        await until(lambda: answered(200))
        (token,) = await eu.accounts.tokens(eu.account_id)
        rolled = eu.token
        _, eu.token = await eu.accounts.roll(token.id)
        await until(lambda: answered(200))
        fresh, eu.token = eu.token, rolled
        await until(lambda: answered(401))
        eu.token = fresh
        await eu.accounts.revoke(token.id)
        await until(lambda: answered(401))


@looped
async def test_changed_limits_and_rights_are_in_force_in_the_other_cell(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (eu, us):
        assert (await abroad(eu, us)).status == 200
        tight = Limits(requests_per_minute=1, burst=1)
        await eu.accounts.update(eu.account_id, lambda account: structs.replace(account, own=tight))

        async def limited() -> bool:
            us.see_changes()
            return (await abroad(eu, us)).status == 429

        await until(limited)


@looped
async def test_an_account_is_neither_copied_nor_served_outside_its_regions(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (eu, us):
        at_home = Settings(regions=("eu-1",))
        await eu.accounts.update(eu.account_id, lambda account: structs.replace(account, settings=at_home))
        client = await us.client()
        head = {**eu.headers, "expect": "100-continue", "content-length": "1000000"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        client.writer.write(f"POST {eu.run_path} HTTP/1.1\r\nhost: test\r\n{lines}\r\n".encode())
        assert await client.head() == 403, "before a byte of the body was asked for"
        refusal = json.loads(await client.body())
        client.leave()
        assert "may be served in eu-1 alone, and this gateway is in us-1" in refusal["errors"][0]["message"]
        assert await us.app._tenancy.store.accounts.get(eu.account_id) is None, "nothing of it has left"
        assert not await leases(us)
        assert (await eu.run(prompt="hello")).status == 200


@looped
async def test_an_account_that_is_called_home_ends_in_the_other_cell(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (eu, us):
        assert (await abroad(eu, us)).status == 200
        queued = await us.call(
            f"{eu.run_path}?queueRequest=true", {"requests": [{"prompt": "hello"}]}, authorization=f"Bearer {eu.token}"
        )
        assert (queued.status, "which is eu" in queued.message) == (403, True), "a batch would be kept there"
        at_home = Settings(regions=("eu-1",))
        await eu.accounts.update(eu.account_id, lambda account: structs.replace(account, settings=at_home))

        async def refused() -> bool:
            us.see_changes()
            answer = await abroad(eu, us)
            return answer.status == 403 and "eu-1 alone" in answer.message

        await until(refused)
        (lease,) = await us.app._tenancy.store.leases.list()
        asked = LeaseRequest(eu.account_id, "us.x", lease.token_id, "", "", 10, 10, 10)
        with pytest.raises(LeaseRefused, match="may not be served in the region"):
            await us.app._tenancy.accounts.copies._cells.lend("eu", asked)  # type: ignore[union-attr]


@looped
async def test_a_cell_whose_home_is_away_serves_what_it_holds_and_says_so_then(tmp_path: Path) -> None:
    places = ends(tmp_path)
    async with served(places["us"].folder, cells=places["us"].cells, account_name="us") as us:
        async with served(places["eu"].folder, cells=places["eu"].cells, limits=PLENTY) as eu:
            assert (await abroad(eu, us)).status == 200
        assert (await abroad(eu, us)).status == 200, "of the lease that it has"
        seen = []

        async def used_up() -> bool:
            seen.append(await abroad(eu, us, max_tokens=32))
            return seen[-1].status == 503

        await until(used_up)
        assert "does not answer now, and what it lent this one is used up; try again." in seen[-1].message
        assert seen[-1].headers["retry-after"] == "1"
        assert (await us.run(prompt="hello")).status == 200, "its own accounts know nothing of it"


@looped
async def test_a_token_that_its_home_does_not_know_opens_nothing(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (eu, us):
        _, lost = await eu.accounts.mint(eu.account_id, "lost")
        (token,) = [token for token in await eu.accounts.tokens(eu.account_id) if token.name == "lost"]
        await eu.accounts.revoke(token.id)
        known, eu.token = eu.token, lost
        assert (await abroad(eu, us)).status == 401
        eu.token = known
        assert (await abroad(eu, us)).status == 200
        with pytest.raises(Conflict, match="is kept in the cell eu: change it there"):
            await us.accounts.suspend(eu.account_id)
        with pytest.raises(Conflict, match="make its tokens there"):
            await us.accounts.mint(eu.account_id, "mine")
        (opened,) = [each.id for each in await us.accounts.tokens(eu.account_id)]
        with pytest.raises(Conflict, match="revoke its tokens there, which ends them everywhere"):
            await us.accounts.revoke(opened)
        with pytest.raises(Conflict, match="change its tokens there"):
            await us.accounts.roll(opened)
        with pytest.raises(Conflict, match="change its tokens there"):
            await us.accounts.update_token(opened, "mine", None, Grant())
        assert (await abroad(eu, us)).status == 200
        copy = await us.accounts.get(eu.account_id)
        assert (copy.home, account_json(copy)["home"], account_answer(copy).result.home) == ("eu",) * 3


@looped
async def test_an_operator_of_one_cell_is_none_of_another(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (eu, us):
        both, accounts = Grant((Permission.INFERENCE, Permission.OPERATOR)), "/client/v4/operator/accounts"
        for grant, status in ((both, 200), (Grant((Permission.OPERATOR,)), 401)):
            _, eu.token = await eu.accounts.mint(eu.account_id, "operator", grant=grant)
            header = f"Bearer {eu.token}"
            assert (await eu.call(accounts, None, "GET", authorization=header)).status == 200
            there = await us.call(accounts, None, "GET", authorization=header)
            assert there.status == (404 if status == 200 else 401)
            assert (await abroad(eu, us)).status == status


def trust_of(place: Ends) -> CellTrust:
    return CellTrust(HostFiles(place.makers[place.name].paths("identity")), place.others)


@looped
async def test_gateways_of_the_cells_that_are_named_are_answered_and_nobody_else(tmp_path: Path) -> None:
    places = ends(tmp_path)
    question = LookUp("hearth_x")
    async with served(places["eu"].folder, cells=places["eu"].cells, limits=PLENTY) as eu:
        (home,) = places["us"].others
        line = CellLine(home, trust_of(places["us"]))

        async def answered() -> bool:
            with contextlib.suppress(HomeUnavailable):
                return (await line.ask(question)).unknown != ""
            return False

        await until(answered)
        assert (await line.ask(LookUp(eu.token))).copies
        await line.close()
        us = places["us"].makers["us"]
        strangers = {
            "another authority's": ends(tmp_path / "other")["us"].makers["us"].paths("identity"),
            "a machine's": us.paths("machine"),
            "one that says it is of another cell": us.paths("pretender"),
        }
        us.host(HostRole.MACHINE, "machine")
        key = ec.generate_private_key(ec.SECP256R1())
        pretended = us.authority.sign(key.public_key(), HostIdentity("ap", HostRole.GATEWAY, "pretender"), time.time())
        write_identity(us.paths("pretender"), key, pretended, us.authority.pem)
        for name, paths in strangers.items():
            context = trust_of(places["us"]).client("eu")
            context.load_cert_chain(paths.certificate, paths.key)
            host, _, port = home.addresses[0].rpartition(":")
            heard = b""
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
                writer.write(encode(question))
                heard = await reader.read(1)
                writer.transport.abort()
            assert not heard, name


@looped
async def test_a_connection_ends_with_the_certificate_that_its_peer_showed(tmp_path: Path) -> None:
    """A host that was removed gets no other one, and would else ask for as long as it stays connected."""
    places, now, asked = ends(tmp_path), [time.time()], list[str]()

    async def answer(question: CellQuestion, peer: HostIdentity) -> CellAnswer:
        asked.append(peer.cluster)
        return CellAnswer()

    async with listening(places["eu"], answer, lambda: now[0]):
        (home,) = places["us"].others
        line = CellLine(home, trust_of(places["us"]))

        async def answered() -> bool:
            with contextlib.suppress(HomeUnavailable):
                return await line.ask(LookUp("hearth_x")) == CellAnswer()
            return False

        await until(answered)
        now[0] += CERTIFICATE_S + 1
        assert await answered(), "the one question that it waited for"
        assert line._open is not None
        await line._open.reading
        assert not await answered()
        assert asked == ["us", "us"]
    await line.close()


@looped
async def test_made_up_credentials_leave_room_for_what_else_is_asked_of_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LOOK_UPS_MAX", 2)
    monkeypatch.setattr(lines, "ANSWER_S", 60.0)
    places, told = ends(tmp_path), asyncio.Event()

    async def answer(question: CellQuestion, peer: HostIdentity) -> CellAnswer:
        await told.wait()
        return CellAnswer()

    async with listening(places["eu"], answer):
        us = CellLines(places["us"].others, trust_of(places["us"]))

        async def connected() -> bool:
            with contextlib.suppress(HomeUnavailable):
                return bool(await us._lines["eu"]._connection())
            return False

        await until(connected)
        opened = await us._lines["eu"]._connection()
        strangers = [asyncio.create_task(us.look_up("eu", "hearth_x")) for _ in range(2)]
        await until(lambda: len(opened.waiting) == 2)
        with pytest.raises(HomeUnavailable, match="2 questions wait"):
            await us.look_up("eu", "hearth_x")
        refresh = asyncio.create_task(us.refresh("eu", []))
        await until(lambda: len(opened.waiting) == 3)
        told.set()
        assert await refresh == []
        await asyncio.gather(*strangers, return_exceptions=True)
        await us.close()


@looped
async def test_a_line_refuses_a_gateway_that_is_of_another_cell_than_it_is_to_be(tmp_path: Path) -> None:
    places = ends(tmp_path, ("eu", "us", "ap"))
    async with served(places["eu"].folder, cells=places["eu"].cells, limits=PLENTY):
        eu, ap = places["us"].others
        wrong = structs.replace(ap, addresses=eu.addresses)
        with pytest.raises(HomeUnavailable, match="cannot be reached"):
            await CellLine(wrong, trust_of(places["us"])).ask(LookUp("hearth_x"))


def test_settings_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    place = ends(tmp_path)["us"]
    files = HostFiles(place.makers["us"].paths("identity"))
    (eu,) = place.others
    with pytest.raises(ValueError, match="a cell twice"):
        CellsConfig(others=[eu, eu])
    with pytest.raises(IdentityError, match="which is this cell itself"):
        CellTrust(files, [structs.replace(eu, name="us")])
    with pytest.raises(IdentityError, match=r"authority of the cell eu, .*nowhere\.pem, cannot be read"):
        CellTrust(files, [structs.replace(eu, authority=str(tmp_path / "nowhere.pem"))])
    with pytest.raises(IdentityError, match="this host is none"):
        CellTrust(place.makers["us"].host(HostRole.MACHINE, "m"), [eu])
    store = open_store(f"sqlite:{tmp_path / 'hearth.db'}")
    with pytest.raises(SettingsError, match="hearth cluster init --cluster NAME"):
        open_cells(Config(state_folder=str(tmp_path / "none"), cells=place.cells), store)


@looped
async def test_the_doctor_says_which_cells_answer(tmp_path: Path) -> None:
    places = ends(tmp_path)
    identity = {name: str(tmp_path / "us" / "state" / "identity" / f"{name}.pem") for name in IDENTITY}
    config = Config(cells=places["us"].cells, cluster=ClusterConfig(**identity))
    (away,) = await asyncio.to_thread(lambda: list(cells(config)))
    assert (away.verdict, "cannot be reached" in away.found) == (FindingLevel.WRONG, True)
    async with served(places["eu"].folder, cells=places["eu"].cells):

        async def answers() -> bool:
            (found,) = await asyncio.to_thread(lambda: list(cells(config)))
            return found.found == f"eu answers us at {places['us'].others[0].addresses[0]}"

        await until(answers)


def test_cells_whose_tokens_would_begin_alike_are_refused(tmp_path: Path) -> None:
    place = ends(tmp_path)["us"]
    names = {cell_code(f"c{n}"): f"c{n}" for n in range(5_000)}
    twin = next(f"c{n}" for n in range(5_000) if names[cell_code(f"c{n}")] != f"c{n}")
    (eu,) = place.others
    others = [structs.replace(eu, name=name) for name in (twin, names[cell_code(twin)])]
    with pytest.raises(IdentityError, match="tokens begin alike"):
        CellLines(others, CellTrust(HostFiles(place.makers["us"].paths("identity")), others))
