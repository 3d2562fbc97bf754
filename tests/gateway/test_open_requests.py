"""Whatever would refuse a new call ends those that run: streams of every dialect, on every gateway of a store."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from gateway import open_requests
from gateway.settings.config import ModelEntryConfig
from tenants.auth.api_token import parse_token
from tenants.records.accounts import Account, Plan, Settings
from tenants.records.grants import Grant, Permission
from tenants.records.limits import Limits
from tenants.store.protocol import StoreUnavailable
from tests.support.served_gateway import PRICE, Client, Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import holds, until

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 5000, "stream": True}
MESSAGES: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 5000,
    "stream": True,
}
USED = 5000 * PRICE.output / 1e6  # neurons that one long call holds, and its prompt a few more
ENDS_WITHIN_S = 5.0
CHECK_S = open_requests.CHECK_S  # as in service


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks more often than in service."""
    monkeypatch.setattr(open_requests, "CHECK_S", 0.05)


def folder(path: Path) -> Path:
    path.mkdir()
    return path


async def started(gateway: Served, body: Any = None, path: str | None = None, token: str | None = None) -> Client:
    """A stream that has begun, of 20 tokens a second."""
    gateway.behaviour.step_s = 0.05
    client = await gateway.client()
    headers = {"authorization": f"Bearer {token or gateway.token}"}
    await client.post(path or gateway.run_path, body or LONG, headers)
    assert await client.head() == 200
    await client.reader.readuntil(b"data: ")
    return client


async def rest(client: Client) -> str:
    """The end of a stream that has begun."""
    async with asyncio.timeout(ENDS_WITHIN_S):
        return (await client.reader.readuntil(b"\r\n0\r\n\r\n")).decode()


def grants(**fields: Any) -> Callable[[Served], Awaitable[Any]]:
    return lambda gateway: gateway.accounts.update_token(token_id(gateway), "test", None, Grant(**fields))


def lowers(**fields: Any) -> Callable[[Served], Awaitable[Any]]:
    return changes(lambda account: structs.replace(account, own=Limits(**fields)))


def changes(change: Callable[[Account], Account]) -> Callable[[Served], Awaitable[Any]]:
    return lambda gateway: gateway.accounts.update(gateway.account_id, change)


def token_id(gateway: Served) -> str:
    return parse_token(gateway.token)


async def expires(gateway: Served) -> None:
    expires_at = gateway.clock() + 60
    await gateway.accounts.update_token(token_id(gateway), "test", expires_at, Grant())
    gateway.clock.offset_s += 61


async def limits_token(gateway: Served) -> None:
    await gateway.accounts.update_token(token_id(gateway), "test", None, Grant(), Limits(neurons_per_month=0))


async def limits_class(gateway: Served) -> None:
    limits = Limits(classes={"large": Limits(neurons_per_day=0)})
    await gateway.accounts.update_token(token_id(gateway), "test", None, Grant(), limits)


async def lowers_plan(gateway: Served) -> None:
    await gateway.accounts.put_plan(Plan("default", Limits(neurons_per_day=0)))


async def ends_model(gateway: Served) -> None:
    model = gateway.app._serving.endpoint.catalogue.find(MODEL)
    assert model is not None
    object.__setattr__(model, "settings", structs.replace(model.settings, planned_deprecation_date=date(2020, 1, 1)))


class Change(NamedTuple):
    make: Callable[[Served], Awaitable[Any]]
    code: int
    outcome: str


CHANGES = {
    "token revoked": Change(lambda gateway: gateway.accounts.revoke(token_id(gateway)), 10000, "invalid_api_key"),
    "token expired": Change(expires, 10000, "invalid_api_key"),
    "secret rolled": Change(lambda gateway: gateway.accounts.roll(token_id(gateway)), 10000, "invalid_api_key"),
    "account suspended": Change(
        lambda gateway: gateway.accounts.suspend(gateway.account_id), 9109, "account_suspended"
    ),
    "network taken": Change(grants(networks=("10.0.0.0/8",)), 9109, "permission_denied"),
    "permission taken": Change(grants(permissions=(Permission.USAGE_READ,)), 9109, "permission_denied"),
    "model taken": Change(grants(models=("@hf/*",)), 3041, "model_not_permitted"),
    "region set": Change(
        changes(lambda account: structs.replace(account, settings=Settings(regions=("mars",)))), 9109, "wrong_region"
    ),
    "model ended": Change(ends_model, 5028, "model_deprecated"),
    "day's budget 0": Change(lowers(neurons_per_day=0), 4006, "insufficient_quota"),
    "month's budget 0": Change(lowers(neurons_per_month=0), 4006, "insufficient_quota"),
    "rate below one call's": Change(lowers(output_tokens_per_minute=100), 3021, "rate_limit_exceeded"),
    "plan's budget 0": Change(lowers_plan, 4006, "insufficient_quota"),
    "token's budget 0": Change(limits_token, 4006, "insufficient_quota"),
    "token's budget of a class 0": Change(limits_class, 4006, "insufficient_quota"),
}


@contextlib.asynccontextmanager
async def classed(folder: Path) -> AsyncIterator[Served]:
    """A gateway whose model belongs to the class `large`."""
    ember = Path(__file__).parents[2] / "engine" / "builtin_model"
    entry = ModelEntryConfig(name=MODEL, folder=str(ember), price=PRICE, limits_class="large")
    async with served(folder, models=[entry]) as gateway:
        yield gateway


@pytest.mark.parametrize("name", CHANGES)
@looped
async def test_what_refuses_a_new_call_ends_a_stream_with_the_same_error(tmp_path: Path, name: str) -> None:
    change = CHANGES[name]
    async with classed(tmp_path) as gateway:
        bystander = await gateway.accounts.create("bystander")
        _, other = await gateway.accounts.mint(bystander.id, "other")
        path = gateway.run_path.replace(gateway.account_id, bystander.id)
        kept = None if name in ("model ended", "plan's budget 0") else await started(gateway, path=path, token=other)
        client = await started(gateway)
        await change.make(gateway)
        gateway.see_changes()
        end = await rest(client)
        assert f'"code":{change.code}' in end
        refused = await gateway.run(prompt="hello", max_tokens=5000)
        assert (refused.status >= 400, refused.code) == (True, change.code)
        await until(lambda: gateway.app.open_requests == (kept is not None))
        (record,) = await gateway.records()
        assert (record.outcome, 0 < record.completion_tokens < 5000) == (change.outcome, True)
        assert record.micro_neurons > 0
        balance = await gateway.app._tenancy.store.quotas.reconcile(gateway.account_id, record.day)
        balance.check()
        if kept is not None:
            kept.leave()


@pytest.mark.parametrize(
    ("path", "body", "ends"),
    [
        (f"/ai/run/{MODEL}", LONG, ['"success":false', "data: [DONE]"]),
        ("/v1/chat/completions", MESSAGES, ['"code":"insufficient_quota"', "data: [DONE]"]),
        ("/v1/completions", {**LONG, "model": MODEL}, ['"code":"insufficient_quota"', "data: [DONE]"]),
        (
            "/v1/responses",
            {"model": MODEL, "input": "hello", "max_output_tokens": 5000, "stream": True},
            ["event: error", "event: response.failed"],
        ),
        ("/v1/messages", MESSAGES, ["event: error", '"type":"error"']),
    ],
)
@looped
async def test_each_dialect_says_the_error_in_its_own_form(
    tmp_path: Path, path: str, body: dict[str, Any], ends: list[str]
) -> None:
    async with served(tmp_path) as gateway:
        client = await started(gateway, body, path)
        await lowers(neurons_per_day=0)(gateway)
        gateway.see_changes()
        end = await rest(client)
        for each in ends:
            assert each in end, end
        assert "account test has 0 neurons for a whole day" in end


@looped
async def test_a_budget_below_what_is_used_and_held_ends_a_stream(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await started(gateway)
        await lowers(neurons_per_day=USED / 2)(gateway)
        gateway.see_changes()
        end = await rest(client)
        assert '"code":4006' in end
        assert f"{USED / 2:.1f} of account test are used or reserved" in end
        await gateway.settled()
        gateway.behaviour.step_s = 0.0
        assert (await gateway.run(prompt="hello", max_tokens=5)).status == 200, "its end gave back what it held"


@looped
async def test_a_change_that_leaves_room_ends_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await started(gateway)
        await gateway.accounts.update_token(
            token_id(gateway), "renamed", None, Grant(models=("@cf/*",), networks=("127.0.0.0/8",))
        )
        room = Limits(neurons_per_day=USED * 1.1, requests_per_minute=1, concurrent_requests=1)
        await changes(lambda account: structs.replace(account, own=room))(gateway)
        gateway.see_changes()
        (request,) = gateway.app._requests._open.values()
        assert request is not None
        await until(lambda: request.call is not None and request.call.caller.limits.concurrent_requests == 1)
        assert (await gateway.run(prompt="hello", max_tokens=5)).status == 429, "no new one has room"
        await holds(lambda: gateway.app.open_requests == 1, 0.3)
        client.leave()


@looped
async def test_a_change_at_one_gateway_ends_streams_of_another_within_five_seconds(
    tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "CHECK_S", CHECK_S)
    async with (
        served(folder(tmp_path / "a"), store_url=store_url) as first,
        served(folder(tmp_path / "b"), store_url=store_url, account_name="second") as second,
    ):
        _, admin = await first.accounts.mint(
            first.account_id, "admin", grant=Grant(permissions=(Permission.ACCOUNT_ADMIN,))
        )
        path = f"/client/v4/accounts/{first.account_id}"
        client = await started(second, path=first.run_path, token=first.token)
        answer = await first.call(f"{path}/limits", {"neurons_per_day": 0}, "PUT", authorization=f"Bearer {admin}")
        assert answer.status == 200, answer.content
        assert '"code":4006' in await rest(client)


@looped
async def test_calls_that_do_not_stream_are_refused_with_the_status_of_the_error(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.05
        call = asyncio.create_task(gateway.run(prompt="hello", max_tokens=5000))
        await until(lambda: gateway.fleet.running)
        await grants(permissions=(Permission.USAGE_READ,))(gateway)
        gateway.see_changes()
        answer = await call
        assert (answer.status, answer.code) == (403, 9109)


@looped
async def test_a_request_whose_body_is_still_on_its_way_is_refused_when_it_has_come(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await gateway.client()
        body = b'{"prompt": "hello", "max_tokens": 5}'
        head = f"POST {gateway.run_path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.token}\r\n"
        client.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:5])
        await until(lambda: any(gateway.app._requests._open.values()))
        await gateway.accounts.revoke(token_id(gateway))
        gateway.see_changes()
        ((exchange, _),) = gateway.app._requests._open.items()
        await until(lambda: exchange._refusal is not None)
        client.writer.write(body[5:])
        assert await client.head() == 401
        assert not gateway.fleet.submits
        client.leave()


@looped
async def test_streams_that_share_a_token_cost_one_look_up_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as gateway:
        clients = [await started(gateway) for _ in range(30)]
        store, asked = gateway.app._tenancy.store, []
        checks, remaining = gateway.app._requests._checks, store.quotas.remaining
        look_up = store.accounts.token

        async def counted_token(token: str) -> Any:
            asked.append("token")
            return await look_up(token)

        async def counted_remaining(*arguments: Any) -> Any:
            asked.append("remaining")
            return await remaining(*arguments)

        monkeypatch.setattr(open_requests, "CHECK_S", 3600.0)
        monkeypatch.setattr(store.accounts, "token", counted_token)
        monkeypatch.setattr(store.quotas, "remaining", counted_remaining)
        verify = gateway.app._requests._authenticator.look_up
        requests = [request for request in gateway.app._requests._open.values() if request is not None]
        assert len(requests) == 30
        gateway.see_changes()
        await checks.end_refused([(lambda: verify(gateway.token), requests)])
        assert asked == ["token"]
        await lowers(neurons_per_day=31 * USED, requests_per_minute=7)(gateway)
        asked.clear()
        gateway.see_changes()
        await checks.end_refused([(lambda: verify(gateway.token), requests)])
        assert asked == ["token", "remaining"]
        asked.clear()
        gateway.see_changes()
        await checks.end_refused([(lambda: verify(gateway.token), requests)])
        assert asked == ["token"], "the same change is looked at once"
        for client in clients:
            client.leave()


@looped
async def test_what_checks_requests_keeps_none_that_is_over(tmp_path: Path) -> None:
    """A prompt under zero retention stayed in memory until the next request was checked."""

    def alive() -> int:
        gc.collect()
        return sum(type(instance) is open_requests.OpenRequest for instance in gc.get_objects())

    async with served(tmp_path) as gateway:
        client = await started(gateway)
        await until(alive)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await client.reader.readuntil(b"data: ")
        client.leave()
        await gateway.settled()
        await until(lambda: not alive(), ENDS_WITHIN_S)


@looped
async def test_all_go_on_while_the_store_is_away_but_what_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as gateway:
        _, short = await gateway.accounts.mint(gateway.account_id, "short", gateway.clock() + 3600)
        lasting, ending = await started(gateway), await started(gateway, token=short)
        accounts = gateway.app._tenancy.store.accounts
        asked = []

        async def away(*_: object) -> Any:
            asked.append(1)
            raise StoreUnavailable("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(accounts, "token", away)
            gateway.see_changes()
            await until(lambda: len(asked) > 4)
            assert gateway.app.open_requests == 2
            gateway.clock.offset_s += 3600
            assert '"code":10000' in await rest(ending)
            assert gateway.app.open_requests == 1
        gateway.see_changes()
        await gateway.accounts.revoke(token_id(gateway))
        assert '"code":10000' in await rest(lasting)
