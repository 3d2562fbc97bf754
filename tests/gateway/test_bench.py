import argparse
from pathlib import Path

from gateway.cli import parser
from gateway.commands.bench import Target, measure
from tests.gateway.served import Served, looped, served
from tests.gateway.stub_replica import MODEL


def _options(*words: str) -> argparse.Namespace:
    return parser().parse_args(["bench", "--streams", "4", "--requests", "12", "--max-tokens", "5", *words])


def _target(gateway: Served, token: str | None = None) -> Target:
    return Target(gateway.base_url, gateway.account_id, token or gateway.token, MODEL)


@looped
async def test_every_token_of_every_request_is_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.01
        report = (await measure(_target(gateway), _options("--shared", "50"))).report()
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
        await measure(_target(gateway), _options())
        assert len(gateway.fleet.submits) == 12
        assert max(len(replica.connections) for replica in gateway.fleet.replicas) == 1
        prompts = {submit.tokens for submit in gateway.fleet.submits}
        assert len(prompts) == 12, "no question repeats another"


@looped
async def test_failures_are_told_with_the_servers_words(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        measured = await measure(_target(gateway, token="junk"), _options())
        assert len(measured.failures) == 12
        assert measured.failures[0].startswith("HTTP 4")
        gateway.behaviour.die_at = 2
        measured = await measure(_target(gateway), _options("--requests", "1"))
        assert len(measured.failures) == 1
