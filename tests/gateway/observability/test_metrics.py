import asyncio
import time
from pathlib import Path
from typing import cast

from engine.protocol.frames import PROTOCOL_VERSION
from engine.protocol.types import RankLoad, Residency
from gateway import __version__
from gateway.app import build_app
from gateway.cluster.fleet import ReplicaFleet
from gateway.observability.metrics import OUTCOMES_MAX, Metrics
from gateway.observability.store_health import StoreHealth
from tenants.limits.quota import Quota
from tenants.limits.reconciler import Reconciler
from tenants.limits.reservation import CallUsage
from tenants.records.grants import Grant, Permission
from tenants.records.limits import Limits
from tenants.store.protocol import QuotaStore, Store, StoreUnavailable
from tests.support.certificates import write_certificate
from tests.support.served_gateway import SECRET, config_for, looped, served
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import until

OPERATOR = Grant((Permission.OPERATOR,))
SCRAPER = Grant((Permission.METRICS_READ,))


def test_a_request_is_counted_once_with_its_tokens() -> None:
    metrics = Metrics(10)
    metrics.finished("@cf/a/b", CallUsage(10, 4, 3, "done", 12.0, 50.0), 0.002)
    text = metrics.public_text().decode()
    assert 'hearth_requests_total{model="@cf/a/b",outcome="done"} 1.0' in text
    for kind, count in (("prompt", 10), ("cached", 4), ("completion", 3)):
        assert f'hearth_tokens_total{{kind="{kind}",model="@cf/a/b"}} {count}.0' in text
    assert 'hearth_first_token_seconds_count{model="@cf/a/b"} 1.0' in text
    assert 'hearth_gateway_seconds_sum{model="@cf/a/b"} 0.002' in text


def test_outcomes_are_capped() -> None:
    metrics = Metrics(10)
    for i in range(OUTCOMES_MAX + 50):
        metrics.finished("@cf/a/b", CallUsage(outcome=f"made up {i}"), None)
    lines = [line for line in metrics.public_text().decode().splitlines() if line.startswith("hearth_requests_total")]
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

        async def counted() -> list[str]:
            seen = await lines()
            return seen if f'hearth_prefix_lookups_total{{model="{MODEL}"}} 4.0' in seen else []

        found = await until(counted)
        expected = {
            **{f'lookup_tokens_total{{model="{MODEL}"}}': 9, f'hit_tokens_total{{model="{MODEL}"}}': 64},
            **{f'inserted_blocks_total{{model="{MODEL}"}}': 0, f'duplicate_blocks_total{{model="{MODEL}"}}': 0},
            f'spared_keys_total{{model="{MODEL}"}}': 700,
            f'lookups_total{{model="{MODEL}"}}': 4,
            f'shared_blocks{{model="{MODEL}"}}': 5,
        }
        for cause, blocks in (("space", 5), ("cap", 2), ("epoch", 0), ("age", 0)):
            expected[f'evicted_blocks_total{{cause="{cause}",model="{MODEL}"}}'] = blocks
        assert set(found) == {f"hearth_prefix_{name} {count:.1f}" for name, count in expected.items()}


@looped
async def test_only_the_operator_sees_accounts_and_how_full_replicas_are(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await gateway.run(prompt="hello", max_tokens=3)
        await gateway.settled()
        _, operator = await gateway.accounts.mint(gateway.account_id, "operator", grant=OPERATOR)
        everybody = await gateway.call("/metrics", b"", "GET", authorization="")
        assert everybody.status == 200
        assert gateway.account_id not in everybody.content.decode()
        assert b"hearth_account" not in everybody.content
        assert b"hearth_replica_waiting" not in everybody.content
        for other in (gateway.token, "made up"):
            answer = await gateway.call("/metrics", b"", "GET", authorization=f"Bearer {other}")
            assert b"hearth_requests_total" in answer.content
            assert b"hearth_account" not in answer.content
        text = (await gateway.call("/metrics", b"", "GET", authorization=f"Bearer {operator}")).content.decode()
        whose = f'account="{gateway.account_id}"'
        assert f'hearth_account_requests_total{{{whose},plan="default",ending="done"}} 1\n' in text
        assert f'hearth_account_tokens_total{{{whose},plan="default",kind="completion"}} 3\n' in text
        record = (await gateway.records())[0]
        assert f'hearth_account_neurons_total{{{whose},plan="default"}} {record.micro_neurons / 1e6}' in text
        assert "hearth_replica_waiting" in text


@looped
async def test_a_token_for_metrics_reads_them_from_anywhere_and_does_nothing_else(tmp_path: Path) -> None:
    async with served(tmp_path, metrics_networks=["10.0.0.0/8"]) as gateway:
        await gateway.run(prompt="hello", max_tokens=3)
        await gateway.settled()
        assert (await gateway.call("/metrics", b"", "GET", authorization="")).status == 404
        assert (await gateway.call("/metrics", b"", "GET")).status == 404
        _, scraper = await gateway.accounts.mint(gateway.account_id, "prometheus", grant=SCRAPER)
        bearer = {"authorization": f"Bearer {scraper}"}
        answer = await gateway.call("/metrics", b"", "GET", **bearer)
        assert answer.status == 200
        assert f'hearth_account_requests_total{{account="{gateway.account_id}"' in answer.content.decode()
        assert b"hearth_replica_waiting" in answer.content
        for path, method, status in (
            (gateway.run_path, "POST", 403), ("/v1/models", "GET", 403), ("/client/v4/operator/accounts", "GET", 404),
            (f"/client/v4/accounts/{gateway.account_id}/usage", "GET", 403),
            (f"/client/v4/accounts/{gateway.account_id}/tokens", "GET", 403),
        ):  # fmt: skip
            assert (await gateway.call(path, {"prompt": "hello"}, method, **bearer)).status == status, path


@looped
async def test_what_runs_here_is_told_to_everybody(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        told = await gateway.call("/version", b"", "GET", authorization="", host="10.1.2.3")
        assert told.json == {
            "name": "hearth",
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
        }
        for path in ("/health", "/healthz"):
            assert (await gateway.call(path, b"", "GET", authorization="")).json == {"alive": True}


@looped
async def test_a_refusal_counts_for_its_account_and_limit(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(requests_per_minute=1)) as gateway:
        assert [(await gateway.run(prompt="hello", max_tokens=1)).status for _ in range(3)] == [200, 429, 429]
        await gateway.settled()
        share = gateway.app._serving.context.metrics.account_usage.rows[gateway.account_id, "default"]
        assert share.refused == {"requests_per_minute": 2}
        assert (share.outcomes["done"], share.outcomes["limited"]) == (1, 2)


@looped
async def test_while_the_store_is_away_the_operator_reads_what_everybody_may(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        _, operator = await gateway.accounts.mint(gateway.account_id, "operator", grant=OPERATOR)

        async def away(*_: object) -> None:
            raise StoreUnavailable("away")

        gateway.app._tenancy.accounts.verify = away  # type: ignore[method-assign]
        answer = await gateway.call("/metrics", b"", "GET", authorization=f"Bearer {operator}")
        assert answer.status == 200
        assert b"hearth_store_available 0.0" in answer.content
        assert b"hearth_store_outages_total 1.0" in answer.content
        assert b"hearth_account" not in answer.content


def test_what_waits_in_the_outbox_is_counted_and_what_is_damaged_is_seen(tmp_path: Path) -> None:
    metrics, quota = Metrics(10), Quota(cast(QuotaStore, None), tmp_path)
    metrics.watch(lambda: ["@cf/a/b"], ReplicaFleet([]), StoreHealth(), quota, Reconciler(cast(Store, None)), tmp_path)
    (tmp_path / "one.outbox").write_bytes(b"x" * 300)
    (tmp_path / "two.outbox").write_bytes(b"x" * 30)
    (tmp_path / "three.damaged").write_bytes(b"x")
    text = metrics.public_text().decode()
    assert "hearth_outbox_bytes 330.0" in text
    assert "hearth_outbox_damaged_files 1.0" in text
    assert 'hearth_replicas_ready{model="@cf/a/b"} 0.0' in text


def test_the_end_of_the_certificate_is_told_and_follows_its_file(tmp_path: Path) -> None:
    config = config_for(tmp_path, StubFleet(tmp_path), write_certificate(tmp_path, days=30))
    metrics = build_app(config, SECRET)._serving.context.metrics

    def expires() -> float:
        (line,) = [
            line for line in metrics.public_text().decode().splitlines() if line.startswith("hearth_certificate_")
        ]
        return float(line.split()[1])

    assert abs(expires() - time.time() - 30 * 86400) < 60
    write_certificate(tmp_path, days=90)
    assert abs(expires() - time.time() - 90 * 86400) < 60
    Path(config.server.certificate).unlink()
    assert expires() == 0


@looped
async def test_what_machines_hold_and_move_is_told_to_the_operator_and_where_models_are_to_all(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        _, operator = await gateway.accounts.mint(gateway.account_id, "operator", grant=OPERATOR)
        for index in range(2):
            gateway.fleet.move(index, Residency.MEMORY, ready_ms=300, quarantined=index == 1)
        fleet = gateway.app._serving.context.fleet
        await until(lambda: not fleet.serves(MODEL) and fleet.replicas()[1].state.quarantined)
        gateway.fleet.replicas[0].load(blocks=77, ranks=[RankLoad(30, 1500, 700), RankLoad(30, 500, 800)])
        call = asyncio.create_task(gateway.run(prompt="hello", max_tokens=2))
        await until(lambda: fleet.waiting(MODEL) == 1 and fleet.replicas()[0].load is not None)
        everybody = (await gateway.call("/metrics", b"", "GET", authorization="")).content.decode()
        assert f'hearth_replicas_resident{{model="{MODEL}",residency="MEMORY"}} 2.0' in everybody
        assert f'hearth_replicas_resident{{model="{MODEL}",residency="DEVICE"}} 0.0' in everybody
        assert f'hearth_replicas_ready{{model="{MODEL}"}} 1.0' in everybody, "the other one is quarantined"
        assert "hearth_machine_moves" not in everybody
        assert "hearth_model_waiting" not in everybody
        text = (await gateway.call("/metrics", b"", "GET", authorization=f"Bearer {operator}")).content.decode()
        machine = f'machine="{gateway.fleet.address}"'
        for line in (
            f'hearth_model_waiting{{model="{MODEL}"}} 1.0',
            f'hearth_replicas_quarantined{{model="{MODEL}"}} 1.0',
            f'hearth_replica_mapped_blocks{{model="{MODEL}"}} 77.0',
            f'hearth_machine_moves_total{{ending="done",kind="wake",{machine}}} 3.0',
            f'hearth_machine_moves_total{{ending="failed",kind="wake",{machine}}} 1.0',
            f'hearth_device_held_bytes{{device="0",{machine}}} 500.0',
            f'hearth_device_budget_bytes{{device="0",{machine}}} 600.0',
            f"hearth_host_held_bytes{{{machine}}} 70.0",
            f"hearth_host_budget_bytes{{{machine}}} 90.0",
            f'hearth_rank_steps_total{{{machine},model="{MODEL}",rank="1"}} 30.0',
            f'hearth_rank_waited_seconds_total{{{machine},model="{MODEL}",rank="0"}} 1.5',
            f'hearth_rank_device_bytes{{{machine},model="{MODEL}",rank="1"}} 800.0',
        ):
            assert line + "\n" in text, line
        gateway.fleet.move(0, Residency.DEVICE)
        assert (await call).status == 200
        everybody = (await gateway.call("/metrics", b"", "GET", authorization="")).content.decode()
        assert f'hearth_wake_wait_seconds_count{{model="{MODEL}"}} 1.0' in everybody
