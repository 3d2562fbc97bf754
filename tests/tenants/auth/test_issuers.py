"""What JWTs open, and that none of the attacks does."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tenants.auth import issuers as module
from tenants.auth import jwks
from tenants.auth.accounts import AccountService
from tenants.auth.errors import AccountSuspended, MalformedToken, UnknownToken
from tenants.auth.issuers import Issuer, IssuerUnavailable, JwtVerifier
from tenants.auth.jwt import InvalidJwt
from tenants.limits.quota import Quota
from tenants.limits.reservation import CallUsage, NeuronPrice, QuotaRequest
from tenants.records.accounts import Account
from tenants.records.grants import Grant, Permission
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken
from tenants.store.protocol import Store
from tests.support.issuers import ACCOUNT, ALGORITHMS, JwksServer, World, documents, jwk, signer
from tests.support.jwt_attacks import ATTACKS, Attack, mapped
from tests.tenants.conftest import SECRET, DayClock

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[JwksServer]:
    serving = JwksServer()
    serving.documents = documents()
    async with serving.serving(tmp_path):
        yield serving


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issuers, files too, may take as long as a busy machine needs."""
    monkeypatch.setattr(jwks, "FETCH_S", 60.0)


@pytest.fixture
def world(clock: DayClock, tmp_path: Path, server: JwksServer) -> World:
    return World(clock(), f"https://localhost:{server.port}", str(tmp_path / "ca.pem"))


def filed(issuer: Issuer, folder: Path) -> Issuer:
    """With its keys in a file."""
    path = folder / f"{issuer.algorithm}.json"
    path.write_bytes(msgspec.json.encode(documents()[f"/{issuer.algorithm}"]))
    return msgspec.structs.replace(issuer, jwks_url=None, jwks_file=str(path))


@asynccontextmanager
async def fetching(issuers: JwtVerifier) -> AsyncIterator[JwtVerifier]:
    running = asyncio.create_task(issuers.run())
    try:
        yield issuers
    finally:
        running.cancel()


@pytest.fixture
async def issuers(world: World, clock: DayClock) -> AsyncIterator[JwtVerifier]:
    async with fetching(JwtVerifier(world.settings, clock)) as found:
        yield found


@pytest.fixture
async def known(store: Store, clock: DayClock, issuers: JwtVerifier) -> AccountService:
    """Accounts that take JWTs; the one that they name is there."""
    await store.accounts.add(Account(ACCOUNT, "red", Limits(), int(clock())))
    return AccountService(store, SECRET, clock, issuers=issuers)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_attack_is_refused_for_its_own_reason(attack: Attack, clock: DayClock, tmp_path: Path) -> None:
    """With keys in files: so many tests would spend their time on shaking hands with servers."""
    world = World(clock(), "https://localhost", "")
    async with fetching(JwtVerifier([filed(issuer, tmp_path) for issuer in world.settings], clock)) as issuers:
        with pytest.raises(InvalidJwt, match=re.escape(attack.reason)):
            await issuers.verify(attack.make(world))
        for algorithm in ALGORITHMS:
            assert (await issuers.verify(world.jwt(algorithm))).token.account_id == ACCOUNT, "the table proves nothing"


async def test_no_attack_opens_an_account(
    world: World, known: AccountService, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = []
    for attack in ATTACKS:
        try:
            accepted.append(await known.verify(attack.make(world)))
        except (UnknownToken, MalformedToken):
            assert (await known.verify(world.jwt())).account.id == ACCOUNT
    assert accepted == []
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60
    with capsys.disabled():
        print(f"\n{len(ATTACKS)} JWT attacks: {len(accepted)} accepted")


async def test_a_credential_of_earlier_holds_as_long_as_its_key(world: World, known: AccountService) -> None:
    caller = await known.verify(world.jwt())
    of_earlier = (ACCOUNT, caller.token_id, caller.grant, caller.expires_at)
    assert await known.caller_of(*of_earlier, caller.key_id) == replace(caller, key_id="")
    for token_id, key_id in ((caller.token_id, "withdrawn"), ("jwt:gone:ann", caller.key_id)):
        with pytest.raises(UnknownToken, match="refused"):
            await known.caller_of(ACCOUNT, token_id, caller.grant, caller.expires_at, key_id)
    assert await known.caller_of(*of_earlier) == replace(caller, key_id="")  # one that was stored without its key


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_a_jwt_opens_the_account_of_its_claim(algorithm: str, world: World, known: AccountService) -> None:
    caller = await known.verify(world.jwt(algorithm))
    assert (caller.account.id, caller.account.name) == (ACCOUNT, "red")
    assert caller.token_id == f"jwt:{algorithm.lower()}:ann"
    assert (caller.grant, caller.expires_at) == (Grant(), world.now + 600)


async def test_an_account_of_nobody_opens_nothing(world: World, known: AccountService) -> None:
    with pytest.raises(UnknownToken, match="no account"):
        await known.verify(world.jwt(hearth_account="f" * 32))


async def test_without_issuers_a_jwt_is_no_credential(world: World, store: Store) -> None:
    with pytest.raises(MalformedToken):
        await AccountService(store, SECRET).verify(world.jwt())


async def test_an_api_token_is_taken_beside(known: AccountService) -> None:
    _, text = await known.mint(ACCOUNT, "laptop")
    assert (await known.verify(text)).account.id == ACCOUNT


@pytest.mark.parametrize(
    ("claims", "grant"),
    [
        ({}, Grant()),
        ({"hearth_permissions": "inference operator root"}, Grant()),
        ({"hearth_permissions": ["usage:read", "inference", "inference"]}, Grant((*Grant().permissions, "usage:read"))),
        ({"hearth_permissions": "account:admin"}, Grant((Permission.ACCOUNT_ADMIN,))),
        ({"hearth_models": ["@cf/acme/*", "@hf/*"]}, Grant(models=("@cf/acme/*", "@hf/*"))),
        ({"hearth_models": "@cf/acme/*"}, Grant(models=("@cf/acme/*",))),
        ({"hearth_models": []}, Grant(models=())),
    ],
    ids=str,
)
async def test_claims_say_what_it_may_do(
    claims: dict[str, Any], grant: Grant, world: World, issuers: JwtVerifier
) -> None:
    assert (await issuers.verify(world.jwt(**claims))).token.grant == grant


async def test_only_an_issuer_that_is_told_so_gives_the_operators_permission(
    world: World, issuers: JwtVerifier
) -> None:
    """The issuer `mapped` may, as its settings say; all others may not, as the attacks show."""
    proof = (await issuers.verify(mapped(world, team="red", scope="operator"))).token
    assert proof.account_id == ACCOUNT
    assert proof.grant == Grant((Permission.OPERATOR,))


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": ["https://other.example", "https://hearth.example"]},
        {"nbf": 0},
        {"scope": "anything", "more": {"x": [1, None]}},
        {"exp": 600.5},
        {"iat": 9},
        {"nbf": 10},
    ],
    ids=str,
)
async def test_what_issuers_do_differently_is_taken(
    changes: dict[str, Any], world: World, issuers: JwtVerifier
) -> None:
    times = {name: world.now + changes[name] for name in ("exp", "iat", "nbf") if name in changes}
    assert (await issuers.verify(world.jwt(**{**changes, **times}))).token.account_id == ACCOUNT


@pytest.mark.parametrize("typ", ["JWT", "jwt", "at+jwt", "application/at+JWT"])
async def test_types_of_access_tokens_are_taken(typ: str, world: World, issuers: JwtVerifier) -> None:
    assert await issuers.verify(world.jwt(header={"typ": typ, "x5t": "thumb", "custom": 1}))


@pytest.mark.parametrize(
    ("subject", "shown"),
    [
        ("ann", "jwt:eddsa:ann"),
        ("repo:acme/app@main", "jwt:eddsa:repo:acme/app@main"),
        ("s" * 54, f"jwt:eddsa:{'s' * 54}"),
        ("s" * 55, "jwt:eddsa:#"),
        ("Ann Lee", "jwt:eddsa:#"),
        ("ann\n", "jwt:eddsa:#"),
        ("#ann", "jwt:eddsa:#"),
    ],
)
async def test_a_token_id_is_short_and_one_subjects_alone(
    subject: str, shown: str, world: World, issuers: JwtVerifier
) -> None:
    token_id = (await issuers.verify(world.jwt(sub=subject))).token.id
    assert len(token_id) <= 64
    assert token_id.isprintable()
    assert token_id == shown if "#" not in shown else re.fullmatch(f"{shown}[0-9a-f]{{32}}", token_id)
    assert token_id == (await issuers.verify(world.jwt(sub=subject, jti="2"))).token.id
    assert token_id != (await issuers.verify(world.jwt(sub=token_id.rpartition(":")[2][:54] + "x"))).token.id


async def test_a_jwt_ends_when_it_expires(world: World, known: AccountService, clock: DayClock) -> None:
    text = world.jwt(exp=world.now + 1.2)
    await known.verify(text)
    clock.now_s += 0.9
    await known.verify(text)
    clock.now_s += 0.1
    with pytest.raises(UnknownToken, match="expired"):
        await known.verify(text)


async def test_what_was_proven_once_expires_all_the_same(world: World, issuers: JwtVerifier, clock: DayClock) -> None:
    text = world.jwt(exp=world.now + 60)
    assert await issuers.verify(text)
    clock.now_s += 60
    with pytest.raises(InvalidJwt, match="expired"):
        await issuers.verify(text)


async def test_a_jwt_costs_one_hash_while_it_is_trusted(
    world: World, known: AccountService, clock: DayClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = world.jwt()
    caller = await known.verify(text)
    for name in ("_store", "_issuers"):
        monkeypatch.setattr(known, name, None)
    assert await known.verify(text) is caller


async def test_a_signature_is_computed_once_as_long_as_its_key_stays(
    world: World, server: JwksServer, known: AccountService, clock: DayClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, proven = world.jwt(), []
    real = module.read_jwt
    monkeypatch.setattr(module, "read_jwt", lambda text: proven.append(text) or real(text))
    for _ in range(5):
        await known.verify(text)
        clock.now_s += 1
    assert len(proven) == 1
    issuer = known._issuers
    assert issuer is not None
    server.documents["/EdDSA"] = {"keys": [jwk("EdDSA next", "EdDSA-2")]}
    await issuer._by_iss["https://eddsa.example"][1].refresh()
    with pytest.raises(UnknownToken, match="'kid' is none"):
        await known.verify(text)


async def test_no_more_signatures_are_remembered_than_there_is_room_for(
    world: World, issuers: JwtVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROVEN_MAX", 3)
    for number in range(10):
        await issuers.verify(world.jwt(jti=str(number)))
    assert len(issuers._proven) == 3


async def test_an_account_is_asked_for_again_within_a_second(
    world: World, store: Store, known: AccountService, clock: DayClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = world.jwt()
    red = (await known.verify(text)).account

    async def account(account_id: str) -> Account:
        assert account_id == ACCOUNT
        return msgspec.structs.replace(red, name="blue")

    monkeypatch.setattr(store.accounts, "get", account)
    assert (await known.verify(text)).account.name == "red"
    clock.now_s += 0.5
    assert (await known.verify(text)).account.name == "blue"


async def test_keys_that_were_never_fetched_are_no_refusal(
    world: World, server: JwksServer, store: Store, clock: DayClock
) -> None:
    server.status = "500 Sorry"
    async with fetching(JwtVerifier(world.settings, clock)) as issuers:
        accounts = AccountService(store, SECRET, clock, issuers=issuers)
        with pytest.raises(IssuerUnavailable, match=r"eddsa .*500"):
            await accounts.verify(world.jwt())
        with pytest.raises(UnknownToken):
            await accounts.verify(world.jwt(iss="https://nobody.example"))


async def test_what_a_jwt_runs_is_reserved_and_recorded(
    world: World, known: AccountService, store: Store, clock: DayClock, tmp_path: Path
) -> None:
    """Its token id is in no table of the store."""
    quota = Quota(store.quotas, tmp_path / "outbox", clock)
    caller = await known.verify(world.jwt(sub="Ann Lee"))
    reservation = await quota.reserve(caller, "request", QuotaRequest("@cf/a/b", NeuronPrice(output=1.0), 3, 4))
    quota.settle(reservation, CallUsage(prompt_tokens=3, completion_tokens=2))
    await quota.flush()
    (record,) = await store.quotas.records(ACCOUNT, clock.day)
    assert (record.token_id, record.completion_tokens) == (caller.token_id, 2)
    await quota.close()


async def test_a_suspended_account_is_suspended_for_its_jwts(
    world: World, known: AccountService, clock: DayClock
) -> None:
    await known.verify(world.jwt())
    await known.suspend(ACCOUNT)
    clock.now_s += 1
    with pytest.raises(AccountSuspended):
        await known.verify(world.jwt())


@pytest.mark.parametrize("claim", ["iat", "nbf"])
async def test_an_issuers_clock_may_be_a_little_ahead(claim: str, world: World, issuers: JwtVerifier) -> None:
    assert await issuers.verify(world.jwt(**{claim: world.now + 10}))
    with pytest.raises(InvalidJwt, match="future"):
        await issuers.verify(world.jwt(**{claim: world.now + 10.1}))


async def test_the_longest_life_is_taken_and_no_longer(world: World, issuers: JwtVerifier) -> None:
    assert await issuers.verify(world.jwt(iat=world.now, exp=world.now + 3600))
    with pytest.raises(InvalidJwt, match="lives for 3601"):
        await issuers.verify(world.jwt(iat=world.now, exp=world.now + 3601))


async def test_the_operator_is_told_each_reason_once(
    world: World, issuers: JwtVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    """Reasons that strangers can make up are not logged."""
    for text in [world.jwt(aud="x"), world.jwt(aud="y"), world.jwt(sub=""), world.jwt(sign=signer("EdDSA own"))]:
        with pytest.raises(InvalidJwt):
            await issuers.verify(text)
    told = [record.fields for record in caplog.records if record.message == "jwt_refused"]  # type: ignore[attr-defined]
    assert [fields["issuer"] for fields in told] == ["eddsa", "eddsa"]
    assert "aud" in told[0]["reason"]


def settings(**changes: Any) -> dict[str, Any]:
    needed = {"name": "acme", "issuer": "https://acme.example", "audience": "hearth", "algorithm": "ES256"}
    return {**needed, "jwks_url": "https://acme.example/jwks", **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"jwks_url": None}, "one place"),
        ({"jwks_file": "keys.json"}, "one place"),
        ({"jwks_url": "http://acme.example/jwks"}, "https"),
        ({"jwks_url": "http://127.0.0.1.acme.example/jwks"}, "https"),
        ({"jwks_url": "http://10.0.0.1/jwks"}, "https"),
        ({"jwks_url": "file:///etc/passwd"}, "https"),
        ({"jwks_url": "https://ann:secret@acme.example/"}, "https"),
        ({"jwks_url": "https://acme.example/\r\nx: y"}, "https"),
        ({"jwks_url": "https://acme.example:port/"}, "https"),
        ({"jwks_url": "https:///jwks"}, "https"),
        ({"jwks_url": "https://acme.example/jwks#1"}, "https"),
        ({"algorithm": "HS256"}, "HS256"),
        ({"algorithm": "none"}, "none"),
        ({"algorithm": ["ES256", "RS256"]}, "algorithm"),
        ({"name": "Acme Inc"}, "name"),
        ({"name": "a" * 17}, "name"),
        ({"issuer": ""}, "issuer"),
        ({"accounts": {"red": ACCOUNT.upper()}}, "no account id"),
        ({"permissions": ["root"]}, "no permissions"),
        ({"permissions_max": ["root"]}, "no permissions"),
        ({"permissions": ["operator"]}, "permissions_max"),
        ({"models": [""]}, "model pattern"),
        ({"leeway_s": 3600}, "leeway_s"),
        ({"token_s_max": 10**9}, "token_s_max"),
        ({"secret": "x"}, "secret"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_in_words(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(settings(**changes), Issuer)


@pytest.mark.parametrize("url", ["http://127.0.0.1:80/", "http://localhost/x", "http://[::1]:8080/x?y=1", "https://a/"])
def test_http_is_for_loopback(url: str) -> None:
    assert msgspec.convert(settings(jwks_url=url), Issuer).jwks_url == url


async def test_keys_may_be_given_in_a_file(world: World, clock: DayClock, tmp_path: Path) -> None:
    async with fetching(JwtVerifier([filed(world.settings[0], tmp_path)], clock)) as issuers:
        proof = (await issuers.verify(world.jwt())).token
    assert proof == ApiToken("jwt:eddsa:ann", ACCOUNT, "jwt:eddsa:ann", world.now - 10, world.now + 600)
