import asyncio
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.bench.client import LoadMeasurement, Target, measure_in_processes, measure_load
from gateway.bench.load import Workload, word_of_id
from gateway.bench.overhead import GatewayShare
from gateway.bench.server import own_server, tokenizer, write_model
from gateway.cli import main, parse
from gateway.commands.bench import LoadOptions, _hardware, measure_with_costs
from gateway.text.tokenizer import ModelTokenizer
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL


def _load(*words: str) -> Workload:
    options = parse(["bench", "--streams", "4", "--requests", "12", "--max-tokens", "5", *words])
    load: LoadOptions = options.call.keywords["load"]
    return load.workload


def _target(gateway: Served, token: str | None = None) -> Target:
    return Target(gateway.base_url, gateway.account_id, token or gateway.token, MODEL)


@looped
async def test_every_token_of_every_request_is_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.01
        report = (await measure_load(_target(gateway), _load("--shared", "50"))).report()
        assert (report["requests"], report["failed"]) == (12, 0)
        assert report["completion_tokens"] == 12 * 5
        assert report["prompt_tokens"] > 12 * 50
        assert 5 < report["gap_ms"]["p50"] < 100
        assert report["first_token_ms"]["p50"] > 0
        assert report["output_tokens_per_s"] > 0


@looped
async def test_at_most_so_many_requests_are_open_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.01
        await measure_load(_target(gateway), _load())
        assert len(gateway.fleet.submits) == 12
        assert max(len(replica.connections) for replica in gateway.fleet.replicas) == 1
        prompts = {submit.tokens for submit in gateway.fleet.submits}
        assert len(prompts) == 12, "no question repeats another"


@looped
async def test_failures_are_told_with_the_servers_words(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        measured = await measure_load(_target(gateway, token="junk"), _load())
        assert len(measured.failures) == 12
        assert measured.failures[0].startswith("HTTP 4")
        gateway.behaviour.die_at = 2
        measured = await measure_load(_target(gateway), _load("--requests", "1"))
        assert len(measured.failures) == 1


@looped
async def test_an_open_loop_sends_when_its_time_has_come_whatever_is_open(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.2  # five tokens take a second
        load = _load("--rate", "40")
        measured = await measure_load(_target(gateway), load)
        assert not measured.failures
        assert load.arrivals_s()[-1] + 0.6 < measured.seconds < load.arrivals_s()[-1] + 5


@looped
async def test_several_processes_ask_every_question_once(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        measured = await measure_in_processes(_target(gateway), _load(), 2)
        assert len(measured.first_ms) == 12
        assert len({submit.tokens for submit in gateway.fleet.submits}) == 12


def test_arrivals_are_a_poisson_process_that_the_seed_fixes() -> None:
    arrivals = Workload(4000, 1, rate=50.0, seed=3).arrivals_s()
    assert (
        arrivals
        == Workload(4000, 1, rate=50.0, seed=3).arrivals_s()
        != Workload(4000, 1, rate=50.0, seed=4).arrivals_s()
    )
    assert 4000 / arrivals[-1] == pytest.approx(50, rel=0.05)
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # 1 ÷ e are above the mean
    assert Workload(3, 1).arrivals_s() == [0.0, 0.0, 0.0]


def test_chats_are_as_long_as_sharegpts() -> None:
    load = Workload(4000, 1, chats=True)
    words, tokens = zip(*map(load.lengths, range(4000)), strict=True)
    assert sum(words) / 4000 == pytest.approx(222, rel=0.05)
    assert sum(tokens) / 4000 == pytest.approx(185, rel=0.05)
    assert load.lengths(7) == Workload(4000, 1, chats=True).lengths(7)


def test_parts_of_a_load_add_up() -> None:
    parts = [
        LoadMeasurement(first_ms=[1.0], completion_tokens=3, began_s=5, ended_s=7),
        LoadMeasurement(began_s=6, ended_s=9),
    ]
    whole = LoadMeasurement.together(parts)
    assert (whole.seconds, whole.first_ms, whole.completion_tokens) == (4, [1.0], 3)


def test_a_text_of_the_made_up_tokenizer_is_as_many_tokens_as_words(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer(1000)))
    text = ModelTokenizer(tmp_path)
    for load in (Workload(1, 1, words=17, vocabulary=1000), Workload(1, 1, words=1, vocabulary=1000)):
        prompt = json.loads(load.body(0))["prompt"]
        ids = text.encode_prompt(prompt)
        assert len(ids) == load.words
        assert [word_of_id(id) for id in ids] == prompt.split(" ")
    for id in (0, 1, 999):
        assert text.detokenizer([]).push([id]) == f" {word_of_id(id)}"
    assert text.stop_ids == []


def test_an_unknown_geometry_is_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no geometry"):
        write_model("llama-9", tmp_path)


def test_a_server_of_its_own_is_measured_and_ended() -> None:
    """The whole way: made-up model, `hearth serve`, chats, cores, and what the gateway adds."""
    with own_server("tiny", "cpu") as own:
        load = Workload(40, 8, words=12, max_tokens=24, vocabulary=own.vocabulary)
        measured, report = asyncio.run(measure_with_costs(own.target, load, 1, own))
        assert (report["failed"], report["prompt_tokens"], report["completion_tokens"]) == (0, 40 * 12, 40 * 24)
        assert set(report["cores"]) == {"gateway", "replica"}
        assert 0 < report["gateway_added_ms"] < measured.report()["first_token_ms"]["p99"]
        assert GatewayShare(own.target.base_url).mean_ms() is None  # nothing came since
        assert measured.seconds > 0
        assert _hardware(own) == f"cpu, {os.cpu_count()} CPU cores"


def test_shapes_over_http_say_how_many_streams(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shapes", "http-many"]) == 1
    assert "http-N" in capsys.readouterr().err
