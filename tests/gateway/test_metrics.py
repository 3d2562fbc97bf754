import asyncio
from pathlib import Path

from gateway.metrics import OUTCOMES_MAX, Metrics
from tenants.quota import Spent
from tests.gateway.served import looped, served
from tests.gateway.stub_replica import MODEL


def test_a_request_is_counted_once_with_its_tokens() -> None:
    metrics = Metrics()
    metrics.finished("@cf/a/b", Spent(10, 4, 3, "done", 12.0, 50.0), 0.002)
    text = metrics.text().decode()
    assert 'hearth_requests_total{model="@cf/a/b",outcome="done"} 1.0' in text
    for kind, count in (("prompt", 10), ("cached", 4), ("completion", 3)):
        assert f'hearth_tokens_total{{kind="{kind}",model="@cf/a/b"}} {count}.0' in text
    assert 'hearth_first_token_seconds_count{model="@cf/a/b"} 1.0' in text
    assert 'hearth_gateway_seconds_sum{model="@cf/a/b"} 0.002' in text


def test_outcomes_are_capped() -> None:
    metrics = Metrics()
    for i in range(OUTCOMES_MAX + 50):
        metrics.finished("@cf/a/b", Spent(outcome=f"made up {i}"), None)
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("hearth_requests_total")]
    assert len(lines) == OUTCOMES_MAX + 1
    assert 'outcome="other"} 50.0' in "\n".join(lines)


@looped
async def test_metrics_are_served_and_only_name_models_of_the_catalogue(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await gateway.run(prompt="hello", max_tokens=3)
        await gateway.call("/ai/run/@cf/made/up", {"prompt": "x"})
        await gateway.settled()
        answer = await gateway.call("/metrics", b"", "GET")
        assert answer.headers["content-type"].startswith("text/plain")
        text = answer.content.decode()
        assert f'hearth_tokens_total{{kind="completion",model="{MODEL}"}} 3.0' in text
        assert 'hearth_http_answers_total{route="run",status="400"} 1.0' in text
        assert "made" not in text
        assert "hearth_open_requests 0.0" in text


@looped
async def test_what_the_caches_of_all_replicas_count_is_served_by_model_and_cause(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        one, two = gateway.fleet.replicas
        one.load(counters={"lookups": 3, "hit_tokens": 64, "evicted_space_blocks": 5, "made_up": 1}, shared_blocks=4)
        two.load(
            counters={"lookups": 1, "lookup_tokens": 9, "evicted_cap_blocks": 2, "spared_keys": 700}, shared_blocks=1
        )

        async def lines() -> list[str]:
            answer = await gateway.call("/metrics", b"", "GET")
            return [line for line in answer.content.decode().splitlines() if line.startswith("hearth_prefix_")]

        async with asyncio.timeout(5):
            while f'hearth_prefix_lookups_total{{model="{MODEL}"}} 4.0' not in (found := await lines()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        expected = {
            **{f'lookup_tokens_total{{model="{MODEL}"}}': 9, f'hit_tokens_total{{model="{MODEL}"}}': 64},
            **{f'inserted_blocks_total{{model="{MODEL}"}}': 0, f'duplicate_blocks_total{{model="{MODEL}"}}': 0},
            f'spared_keys_total{{model="{MODEL}"}}': 700,
            f'lookups_total{{model="{MODEL}"}}': 4,
            f'shared_blocks{{model="{MODEL}"}}': 5,
        }
        for cause, blocks in (("space", 5), ("cap", 2), ("epoch", 0), ("clear", 0)):
            expected[f'evicted_blocks_total{{cause="{cause}",model="{MODEL}"}}'] = blocks
        assert set(found) == {f"hearth_prefix_{name} {count:.1f}" for name, count in expected.items()}
