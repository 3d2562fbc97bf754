"""What a gateway keeps of encoded prompts for an account's later calls, and for whom it keeps nothing."""

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer

from gateway.cluster.stream import pack_token_ids
from gateway.text import control_tokens, encoding_cache
from gateway.text.control_tokens import PlainTokenizer
from gateway.text.encoding_cache import EncodingCache
from tenants.records.accounts import Settings
from tests.support.admin_api import served_admin
from tests.support.served_gateway import Served, looped, served
from tests.support.waiting import until

LONG = "a lighthouse keeper writes down each ship that passes by. " * 100 + "Why?"


class Encoded:
    """The runs that were encoded by the tokenizer since the last look."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._runs: list[str] = []
        encode, encode_runs = control_tokens.encode_ids, PlainTokenizer.encode_runs

        def spy(tokenizer: Tokenizer, run: str) -> list[int]:
            self._runs.append(run)
            return encode(tokenizer, run)

        def in_one_thread(plain: Any, runs: list[str], spread: bool, known: Any) -> Any:
            return encode_runs(plain, runs, False, known)

        patch.setattr(control_tokens, "encode_ids", spy)
        patch.setattr(PlainTokenizer, "encode_runs", in_one_thread)

    def count(self, text: str) -> int:
        runs, self._runs = self._runs, []
        return sum(text in run for run in runs)


def encodings(gateway: Served) -> EncodingCache:
    return gateway.app._serving.context.encodings


def talk(*lines: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": line} for place, line in enumerate(lines)]


async def change(gateway: Served, **settings: Any) -> None:
    await gateway.accounts.update(gateway.account_id, lambda one: structs.replace(one, settings=Settings(**settings)))
    gateway.see_changes()


@pytest.mark.parametrize("first", ["hello there", LONG])
@looped
async def test_a_conversations_earlier_turns_are_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    async with served(tmp_path) as gateway:
        spy = Encoded(monkeypatch)
        assert (await gateway.chat(messages=talk(first))).status == 200
        assert spy.count(first) == 1
        assert (await gateway.chat(messages=talk(first, "an answer", "and more"))).status == 200
        assert spy.count(first) == 0
        monkeypatch.undo()
        tokenizer = next(iter(gateway.app._serving.endpoint.catalogue)).tokenizer
        whole = tokenizer.encode_chat(talk(first, "an answer", "and more"))
        assert gateway.fleet.submits[-1].tokens == pack_token_ids(whole)
        encodings(gateway).check()


@looped
async def test_calls_that_share_no_prefixes_leave_no_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as gateway:
        spy, messages = Encoded(monkeypatch), talk(LONG)
        for _ in range(2):
            assert (await gateway.run(messages=messages)).status == 200
        assert spy.count(LONG) == 1
        for _ in range(2):
            answer = await gateway.call(gateway.run_path, {"messages": messages}, cf_aig_zdr="true")
            assert answer.status == 200
        assert spy.count(LONG) == 2, "a call under zero retention finds nothing either"
        await change(gateway, cache_scope="request")
        for _ in range(2):
            assert (await gateway.run(messages=talk(LONG + " alone"))).status == 200
        assert spy.count("alone") == 2
        await change(gateway, cache_scope="user")
        for user in ("u", "u", "v", None):
            body = {"messages": talk(LONG + " by user"), "user": user}
            assert (await gateway.chat(**body)).status == 200
        assert spy.count("by user") == 3, "once for u, once for v, and once for nobody"


@looped
async def test_zero_retention_and_purges_free_what_was_encoded(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        gateway = house.gateway
        kept = encodings(gateway)

        async def fill() -> None:
            gateway.see_changes()
            assert (await gateway.run(messages=talk(LONG))).status == 200
            assert kept.bytes > len(LONG)

        await fill()
        assert (await house.ask("POST", f"{house.account}/cache/purge")).status == 200
        assert kept.bytes < len(LONG), "at once, without another call"
        await fill()
        await gateway.accounts.purge_cache(gateway.account_id)  # as another process does
        gateway.see_changes()
        assert (await gateway.run(messages=talk("hi"))).status == 200
        assert kept.bytes < len(LONG)
        await fill()
        await house.ask("PATCH", house.account, {"settings": {"zero_retention": True}})
        assert kept.bytes < len(LONG)
        gateway.see_changes()
        assert (await gateway.run(messages=talk(LONG))).status == 200
        assert kept.bytes < len(LONG)


@looped
async def test_what_is_not_used_for_its_accounts_time_is_freed_without_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_cache, "SWEEP_S", 0.02)
    async with served(tmp_path) as gateway:
        await change(gateway, cache_keep_s=60.0)
        assert (await gateway.run(messages=talk(LONG))).status == 200
        kept = encodings(gateway)
        assert kept.bytes > len(LONG)
        monkeypatch.setattr(kept, "_clock", lambda: time.monotonic() + 61.0)
        await until(lambda: kept.bytes < len(LONG))
