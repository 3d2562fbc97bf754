import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as some
from msgspec import structs

from tenants.auth import accounts as module
from tenants.auth.accounts import AccountService
from tenants.auth.api_token import DIGITS, checksum, parse_token
from tenants.auth.errors import AccountSuspended, MalformedToken, NameInUse, NotFound, Unauthenticated, UnknownToken
from tenants.open import open_store
from tenants.records.accounts import DEFAULT_PLAN, Account, Settings
from tenants.records.batches import BatchJob
from tenants.records.grants import Grant
from tenants.records.limits import Limits
from tenants.store.protocol import Store, StoreUnavailable

pytestmark = pytest.mark.anyio
SECRET = b"the server's secret, 32 bytes up"
BASE62 = string.digits + string.ascii_letters


async def minted(accounts: AccountService, **options: Any) -> tuple[str, str]:
    """Account id and the text of its first ApiToken."""
    others = len(await accounts.list())
    account = await accounts.create(f"ann {others}" if others else "ann")
    _, text = await accounts.mint(account.id, "laptop", **options)
    return account.id, text


async def test_a_minted_token_opens_its_account(accounts: AccountService) -> None:
    account_id, text = await minted(accounts)
    caller = await accounts.verify(text)
    assert caller.account.id == account_id
    assert (caller.account.name, caller.account.limits) == ("ann", DEFAULT_PLAN.limits)
    assert caller.token_id == parse_token(text)


async def test_ids_and_texts_have_their_documented_form(accounts: AccountService) -> None:
    account_id, text = await minted(accounts)
    assert len(account_id) == 32
    assert int(account_id, 16) >= 0
    prefix, key_id, rest = text.split("_")
    assert (prefix, len(key_id), len(rest)) == ("hearth", 11, 49)
    assert set(key_id + rest) <= set(BASE62)


async def test_a_secret_carries_256_random_bits(store: Store) -> None:
    asked = []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return b"\xff" * count

    accounts = AccountService(store, SECRET, entropy=entropy)
    _, text = await minted(accounts)
    assert asked == [16, 8, 32]
    digits = {digit: value for value, digit in enumerate(DIGITS)}
    secret = 0
    for digit in text[-49:-6]:
        secret = secret * 62 + digits[digit]
    assert secret == 2**256 - 1, "the largest secret is cut"


class Deaf:
    """A store that must not be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked")


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "hearth_",
        "Bearer x",
        "sk-proj-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "hearth_" + "a" * 61,
        "hearth_" + "a" * 11 + "_" + "a" * 49,
        "hearth_" + "ä" * 11 + "_" + "a" * 49,
        "x" * 1_000_000,
        "hearth_\x00",
    ],
)
async def test_junk_is_refused_before_any_look_up(junk: str) -> None:
    with pytest.raises(MalformedToken):
        await AccountService(Deaf(), SECRET).verify(junk)  # type: ignore[arg-type]


@given(some.text(max_size=80))
def test_no_text_is_taken_for_a_token_by_chance(text: str) -> None:
    for candidate in (text, f"hearth_{text}"):
        with pytest.raises(MalformedToken):
            parse_token(candidate)


async def test_every_typing_error_is_refused_before_any_look_up(accounts: AccountService) -> None:
    _, text = await minted(accounts)
    deaf = AccountService(Deaf(), SECRET)  # type: ignore[arg-type]
    dice = random.Random(1)
    for place in range(len(text)):
        wrong = dice.choice([digit for digit in BASE62 if digit != text[place]])
        for typo in (
            text[:place] + wrong + text[place + 1 :],
            text[:place] + text[place + 1 :],
            text + wrong,
            f" {text}",
        ):
            with pytest.raises(MalformedToken):
                await deaf.verify(typo)


async def test_a_forged_secret_with_a_right_checksum_opens_nothing(accounts: AccountService) -> None:
    _, text = await minted(accounts)
    forged = text[:-49] + "0" * 43
    forged += checksum(forged)
    for _ in range(2):
        with pytest.raises(UnknownToken):
            await accounts.verify(forged)
    await accounts.verify(text)
    with pytest.raises(UnknownToken):
        await accounts.verify(forged)


async def test_a_token_of_another_server_opens_nothing(store: Store, accounts: AccountService, tmp_path: Path) -> None:
    elsewhere = open_store(f"sqlite:{tmp_path / 'elsewhere.db'}")
    _, foreign = await minted(AccountService(elsewhere, SECRET))
    _, text = await minted(accounts)
    with pytest.raises(UnknownToken):
        await accounts.verify(foreign)
    with pytest.raises(UnknownToken):
        await AccountService(store, SECRET[::-1]).verify(text)
    await elsewhere.close()


async def test_secrets_are_compared_in_constant_time(accounts: AccountService, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = module.hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    _, text = await minted(accounts)
    await accounts.verify(text)
    assert [len(side) for side in compared[0]] == [32, 32]


async def test_a_token_expires(accounts: AccountService, clock: Any) -> None:
    _, text = await minted(accounts, expires_at=clock() + 10)
    await accounts.verify(text)
    clock.now_s += 9.9
    await accounts.verify(text)
    clock.now_s += 0.1
    with pytest.raises(UnknownToken, match="expired"):
        await accounts.verify(text)


async def test_a_verified_token_expires_while_it_is_still_trusted(accounts: AccountService, clock: Any) -> None:
    _, text = await minted(accounts, expires_at=int(clock()) + 1)
    clock.now_s += 0.9
    await accounts.verify(text)
    clock.now_s += 0.1
    with pytest.raises(UnknownToken, match="expired"):
        await accounts.verify(text)


async def test_a_revocation_is_in_force_on_every_gateway_within_a_second(
    store: Store, store_url: str, clock: Any
) -> None:
    other_store = open_store(store_url, clock)
    here, there = AccountService(store, SECRET, clock), AccountService(other_store, SECRET, clock)
    for tenth in range(10):
        _, text = await minted(here)
        await there.verify(text)
        clock.now_s += tenth / 10
        await there.verify(text)
        await here.revoke(parse_token(text))
        clock.now_s += 1.0
        for gateway in (here, there):
            with pytest.raises(UnknownToken, match="revoked"):
                await gateway.verify(text)
    await other_store.close()


async def test_a_verified_token_is_not_looked_up_again_at_once(
    accounts: AccountService, store: Store, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = await minted(accounts)
    looked_up = []
    real = store.accounts.token

    async def counted(token_id: str) -> Any:
        looked_up.append(token_id)
        return await real(token_id)

    monkeypatch.setattr(store.accounts, "token", counted)
    for _ in range(100):
        await accounts.verify(text)
    assert len(looked_up) == 1
    clock.now_s -= 3_600
    await accounts.verify(text)
    assert len(looked_up) == 2, "a clock that is set back would make the cache last for an hour"


async def test_new_limits_reach_the_caller_within_a_second(accounts: AccountService, clock: Any) -> None:
    account_id, text = await minted(accounts)
    await accounts.verify(text)
    ceiling = Limits(requests_per_minute=5)
    await accounts.update(account_id, lambda account: structs.replace(account, ceiling=ceiling))
    clock.now_s += 1
    assert (await accounts.verify(text)).account.limits.requests_per_minute == 5


async def test_a_revocation_that_was_seen_stays_in_force_during_an_outage(
    accounts: AccountService, clock: Any, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    _, good = await minted(accounts)
    _, bad = await minted(accounts)
    await accounts.verify(good)
    await accounts.verify(bad)
    await accounts.revoke(parse_token(bad))
    clock.now_s += 1
    with pytest.raises(UnknownToken):
        await accounts.verify(bad)

    async def away(token_id: str) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store.accounts, "token", away)
    clock.now_s += 100
    with pytest.raises(UnknownToken, match="revoked"):
        await accounts.verify(bad)
    with pytest.raises(StoreUnavailable):
        await accounts.verify(good)


async def test_verified_tokens_in_memory_are_limited(accounts: AccountService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERIFIED_MAX", 3)
    texts = [(await minted(accounts))[1] for _ in range(5)]
    for text in texts * 2:
        await accounts.verify(text)
    assert len(accounts._verified) == 3


async def test_a_token_that_is_used_no_more_is_forgotten(accounts: AccountService, clock: Any) -> None:
    idle, used = [(await minted(accounts))[1] for _ in range(2)]
    await accounts.verify(idle)
    for _ in range(4):
        await accounts.verify(used)
        assert len(accounts._verified) == 2
        clock.now_s += module.KEPT_S / 4
    clock.now_s += 1
    await accounts.verify(used)
    assert len(accounts._verified) == 1


def everything_kept(store_url: str, folder: Path) -> bytes:
    if store_url.startswith("sqlite:"):
        return b"".join(path.read_bytes() for path in folder.glob("hearth.db*"))
    with redis.Redis.from_url(store_url) as client:
        client.config_set("rdbcompression", "no")
        return b"".join(key + client.dump(key) for key in client.scan_iter())


async def test_neither_secret_nor_token_text_is_kept_or_cached(
    accounts: AccountService, store: Store, store_url: str, tmp_path: Path
) -> None:
    _, text = await minted(accounts)
    await accounts.verify(text)
    await store.close()
    kept = repr(accounts._verified).encode() + everything_kept(store_url, tmp_path)
    assert parse_token(text).encode() in kept, "the search would not find anything"
    assert text[-49:-6].encode() not in kept
    assert SECRET not in kept


async def test_an_unknown_account_or_token_is_named_in_the_error(accounts: AccountService) -> None:
    await accounts.create("somebody else")
    calls: list[Callable[[], Any]] = [
        lambda: accounts.get("f" * 32),
        lambda: accounts.suspend("f" * 32),
        lambda: accounts.mint("f" * 32, "laptop"),
        lambda: accounts.tokens("f" * 32),
    ]
    for call in calls:
        with pytest.raises(NotFound, match="f" * 32):
            await call()
    with pytest.raises(NotFound, match="nothing"):
        await accounts.revoke("nothing")


async def test_an_account_is_found_by_id_and_by_name(accounts: AccountService) -> None:
    acme = await accounts.create("Acme")
    for reference in (acme.id, "Acme", "acme", " ACME "):
        assert await accounts.find(reference) == acme
    for unknown in ("acm", "", "f" * 32, acme.id.upper(), "a/b"):
        with pytest.raises(NotFound, match="hearth accounts list"):
            await accounts.find(unknown)


async def test_a_name_means_this_cells_account_whatever_copies_of_others_are_called(
    accounts: AccountService, store: Store
) -> None:
    await store.accounts.add(Account("e" * 32, "acme", Limits(), 1, home="eu"))
    assert (await accounts.find("acme")).home == "eu"
    own = await accounts.create("Acme")
    assert (await accounts.find("acme")).id == own.id
    with pytest.raises(NameInUse) as taken:
        await accounts.create("acme")
    assert taken.value.account_id == own.id


async def test_a_name_that_is_taken_or_looks_like_an_id_is_refused(accounts: AccountService) -> None:
    acme, beta = await accounts.create("acme"), await accounts.create("beta")
    with pytest.raises(NameInUse, match="'ACME'") as taken:
        await accounts.create("ACME")
    assert taken.value.account_id == acme.id
    with pytest.raises(NameInUse):
        await accounts.update(beta.id, lambda account: structs.replace(account, name="Acme"))
    assert (await accounts.get(beta.id)) == beta
    for name in (acme.id, "F" * 32, f" {beta.id} "):
        with pytest.raises(ValueError, match="id"):
            await accounts.create(name)


async def test_accounts_and_tokens_are_listed_oldest_first(accounts: AccountService, clock: Any) -> None:
    created = []
    for name in ("zoe", "ann", "bob"):
        created.append(await accounts.create(name))
        clock.now_s += 1
    assert list(await accounts.list()) == created
    first, _ = await accounts.mint(created[0].id, "z")
    clock.now_s += 1
    second, _ = await accounts.mint(created[0].id, "a")
    assert list(await accounts.tokens(created[0].id)) == [first, second]


@pytest.mark.parametrize("name", ["", "  ", "x" * 101, "line\nbreak", "nul\x00"])
async def test_a_name_is_printable_and_short(accounts: AccountService, name: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        await accounts.create(name)


async def test_a_token_in_place_of_a_name_is_refused_and_not_repeated(accounts: AccountService) -> None:
    account = await accounts.create("ann")
    _, text = await accounts.mint(account.id, "first")
    names = (f"my {text}", f"{text} {'x' * 100}", f"curl\t{text}")
    for store in (accounts.mint(account.id, text), *map(accounts.create, names)):
        with pytest.raises(ValueError, match="has a token in it") as refused:
            await store
        assert text not in str(refused.value)


@pytest.mark.parametrize(
    "limits",
    [
        {"requests_per_minute": 0},
        {"requests_per_minute": 6_000_001},
        {"neurons_per_day": -1.0},
        {"neurons_per_day": float("nan")},
        {"neurons_per_day": float("inf")},
        {"concurrent_requests": 0},
        {"burst": 0},
    ],
)
def test_limits_out_of_range_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)


def test_a_short_server_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        AccountService(Deaf(), b"x" * 31)  # type: ignore[arg-type]


def test_a_scope_is_16_bytes_of_account_and_secret_alone() -> None:
    here, again, other = (AccountService(Deaf(), secret) for secret in (SECRET, SECRET, SECRET[::-1]))  # type: ignore[arg-type]
    scopes = {here.scope(f"{n:032x}") for n in range(1_000)}
    assert len(scopes) == 1_000
    assert {len(scope) for scope in scopes} == {16}
    assert here.scope("a" * 32) == again.scope("a" * 32)
    assert here.scope("a" * 32) != other.scope("a" * 32)


def test_both_kinds_of_bad_token_are_unauthenticated() -> None:
    assert issubclass(MalformedToken, Unauthenticated)
    assert issubclass(UnknownToken, Unauthenticated)


async def test_a_rolled_secret_opens_for_its_grace_and_no_longer(store: Store) -> None:
    now = [1_000.0]
    accounts = AccountService(store, SECRET, clock=lambda: now[0])
    account = await accounts.create("Ann")
    token, first = await accounts.mint(account.id, "ci")
    same, second = await accounts.roll(token.id, grace_s=60)
    assert (same, parse_token(second)) == (token, token.id)
    assert first != second
    for text in (first, second):
        assert (await accounts.verify(text)).token_id == token.id
    now[0] += 59.9
    await accounts.verify(first)
    now[0] += 0.1
    with pytest.raises(UnknownToken):  # at once, though it was verified a moment ago
        await accounts.verify(first)
    await accounts.verify(second)


async def test_no_more_than_two_secrets_of_a_token_live(store: Store) -> None:
    now = [1_000.0]
    accounts = AccountService(store, SECRET, clock=lambda: now[0])
    account = await accounts.create("Ann")
    token, first = await accounts.mint(account.id, "ci")
    _, second = await accounts.roll(token.id, grace_s=600)
    _, third = await accounts.roll(token.id, grace_s=600)
    now[0] += 1
    with pytest.raises(UnknownToken):
        await accounts.verify(first)
    await accounts.verify(second)
    await accounts.verify(third)
    _, fourth = await accounts.roll(token.id)
    now[0] += 1
    for text in (second, third):
        with pytest.raises(UnknownToken):
            await accounts.verify(text)
    await accounts.verify(fourth)
    await accounts.revoke(token.id)
    with pytest.raises(NotFound):
        await accounts.roll(token.id)


async def test_a_changed_grant_is_in_force_within_a_second(store: Store) -> None:
    now = [1_000.0]
    accounts = AccountService(store, SECRET, clock=lambda: now[0])
    account = await accounts.create("Ann")
    token, text = await accounts.mint(account.id, "ci", grant=Grant(models=("@cf/*",)))
    assert (await accounts.verify(text)).grant == Grant(models=("@cf/*",))
    await accounts.update_token(token.id, "ci", None, Grant(models=("@hf/*",)))
    now[0] += 1
    assert (await accounts.verify(text)).grant == Grant(models=("@hf/*",))
    with pytest.raises(NotFound):
        await accounts.update_token("nobody", "n", None, Grant())


async def test_who_asked_earlier_is_a_caller_until_its_token_or_account_ends(
    accounts: AccountService, clock: Any
) -> None:
    account_id, text = await minted(accounts, expires_at=clock.now_s + 60, limits=Limits(requests_per_minute=7))
    token_id = parse_token(text)
    assert await accounts.caller_of(account_id, token_id) == await accounts.verify(text)
    await accounts.suspend(account_id)
    with pytest.raises(AccountSuspended):
        await accounts.caller_of(account_id, token_id)
    await accounts.resume(account_id)
    clock.now_s += 61
    with pytest.raises(UnknownToken):
        await accounts.caller_of(account_id, token_id)
    _, other = await accounts.mint(account_id, "phone")
    await accounts.revoke(parse_token(other))
    with pytest.raises(UnknownToken):
        await accounts.caller_of(account_id, parse_token(other))
    with pytest.raises(UnknownToken):
        await accounts.caller_of("0" * 32, token_id)


async def test_who_came_with_a_jwt_is_a_caller_with_its_rights_until_it_expires(
    accounts: AccountService, clock: Any
) -> None:
    account_id, _ = await minted(accounts)
    grant, expires_at = Grant(models=("@cf/*",)), int(clock.now_s) + 60
    caller = await accounts.caller_of(account_id, "jwt:acme:robot", grant, expires_at)
    assert (caller.account.id, caller.token_id, caller.grant) == (account_id, "jwt:acme:robot", grant)
    assert caller.expires_at == expires_at
    with pytest.raises(UnknownToken):
        await accounts.caller_of("0" * 32, "jwt:acme:robot", grant, expires_at)
    clock.now_s += 61
    with pytest.raises(UnknownToken):
        await accounts.caller_of(account_id, "jwt:acme:robot", grant, expires_at)


async def test_a_token_that_the_store_lost_is_nobodys(accounts: AccountService) -> None:
    account_id, text = await minted(accounts)
    other_id, _ = await minted(accounts)
    for owner, token_id in ((account_id, "0" * 11), (other_id, parse_token(text))):
        with pytest.raises(UnknownToken):
            await accounts.caller_of(owner, token_id)


async def test_an_expiry_that_was_seen_holds_while_the_store_is_away(
    accounts: AccountService, store: Store, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailable("the disk is full")

    _, text = await minted(accounts, expires_at=clock.now_s + 60)
    await accounts.verify(text)
    monkeypatch.setattr(store.accounts, "token", away)
    clock.now_s += 59
    with pytest.raises(StoreUnavailable):
        await accounts.verify(text)
    clock.now_s += 1
    with pytest.raises(UnknownToken, match="expired"):
        await accounts.verify(text)


async def test_turning_zero_retention_on_deletes_the_accounts_batches(
    accounts: AccountService, store: Store, clock: Any
) -> None:
    account_id, _ = await minted(accounts)
    await store.batches.begin(BatchJob("one", account_id, "key", "@cf/a/b", 1, 60, int(clock()), 1 << 31))
    await store.batches.open(account_id, "one")
    await accounts.update(account_id, lambda account: structs.replace(account, settings=Settings(cache_keep_s=5)))
    assert await store.batches.get(account_id, "one") is not None
    await accounts.update(account_id, lambda account: structs.replace(account, settings=Settings(zero_retention=True)))
    assert await store.batches.get(account_id, "one") is None
