"""What goes on beside a gateway's requests, and what becomes of the gateway where some of it fails."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.process import allocator
from gateway import background
from gateway.background import BackgroundJobs
from gateway.batch import worker
from tenants.limits import soft_caps
from tests.gateway.http.test_server import ROOT, free_port
from tests.support.served_gateway import looped, served
from tests.support.waiting import until, wait_for

pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.background._BACKOFF_S", (0.0, 0.0))


class Failing:
    """A job that fails some times, and then goes on."""

    def __init__(self, times: int, at_its_end: bool = False) -> None:
        self.times = times
        self.goes_on = asyncio.Event()
        self._at_its_end = at_its_end

    async def run(self) -> None:
        if self.times:
            self.times -= 1
            raise KeyError("not foreseen")
        self.goes_on.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if self._at_its_end:
                raise ValueError("not foreseen either")


@looped
async def test_a_job_that_fails_is_begun_again_told_and_counted_and_stops_no_other() -> None:
    counted: list[str] = []
    failing, other = Failing(3), Failing(0)
    jobs = BackgroundJobs({"failing": failing.run, "other": other.run}, ["other"], counted.append)
    async with jobs.running():
        async with asyncio.timeout(60):
            await failing.goes_on.wait()
            await other.goes_on.wait()
        assert counted == ["failing"] * 3
        assert not jobs.failed


@looped
async def test_pauses_grow_while_a_job_fails_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.background._BACKOFF_S", (0.001, 0.004))
    failing = Failing(4)
    async with BackgroundJobs({"failing": failing.run}, (), lambda name: None).running():
        async with asyncio.timeout(60):
            await failing.goes_on.wait()
    fields = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert fields == [{"job": "failing", "again_after_s": pause} for pause in (0.001, 0.002, 0.004, 0.004)]
    assert all(record.exc_info is not None for record in caplog.records), "with a traceback"


@looped
async def test_an_essential_job_that_fails_is_not_begun_again() -> None:
    failing, other = Failing(1), Failing(0)
    jobs = BackgroundJobs({"failing": failing.run, "other": other.run}, ["failing"], lambda name: None)
    async with jobs.running():
        await until(lambda: jobs.failed == "failing")
        assert not failing.times
        assert not failing.goes_on.is_set()


@looped
async def test_jobs_that_fail_as_they_are_ended_hold_nothing_up() -> None:
    failing = Failing(0, at_its_end=True)
    jobs = BackgroundJobs({"failing": failing.run}, ["failing"], lambda name: None)
    async with asyncio.timeout(60), jobs.running():
        await failing.goes_on.wait()
    assert not jobs.failed


@looped
async def test_a_gateway_goes_on_where_a_job_of_its_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_caps, "WRITE_S", 0.01)
    async with served(tmp_path) as gateway:
        failing, notices = Failing(1), gateway.app._tenancy.soft_caps
        monkeypatch.setattr(notices, "flush", failing.run)
        await until(failing.goes_on.is_set)
        assert (await gateway.run(prompt="hello")).status == 200
        counted = (await gateway.call("/metrics", b"", "GET")).content.decode()
        assert 'hearth_job_failures_total{background_job="soft_caps"} 1.0' in counted
        assert 'hearth_job_failures_total{background_job="fleet"} 0.0' in counted


@looped
async def test_batches_go_on_once_the_worker_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "TIDY_S", 0.05)
    monkeypatch.setattr(worker, "LOOK_S", 0.05)
    async with served(tmp_path) as gateway:
        gateway.behaviour.first_s = 60.0
        body = {"requests": [{"prompt": "hello", "max_tokens": 2}] * 3}
        queued = (await gateway.call(f"{gateway.run_path}?queueRequest=true", body)).json["result"]["request_id"]
        await until(lambda: gateway.fleet.submits)
        sweep, bugs = gateway.app._batches._batches.sweep, [KeyError("not foreseen")]

        async def swept() -> None:
            if bugs:
                raise bugs.pop()
            gateway.behaviour.first_s = 0.0
            await sweep()

        monkeypatch.setattr(gateway.app._batches._batches, "sweep", swept)

        async def result() -> list[bool] | None:
            answer = (await gateway.call(gateway.run_path, {"request_id": queued})).json["result"]
            return [one["success"] for one in answer["responses"]] if "responses" in answer else None

        assert await until(result) == [True] * 3, "before their leases are over"
        await until(lambda: not (gateway.app._batches.running.total() or gateway.quota.open))


@looped
async def test_a_server_whose_fleet_failed_drains_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as gateway:
        monkeypatch.setattr(gateway.app._serving.context.fleet._replica_links, "look", None)
        await until(gateway.server.lifespan.shutdown_event.is_set)
        assert gateway.app.failed == "fleet"


def test_a_gateway_whose_fleet_failed_exits_with_1_and_says_why(tmp_path: Path) -> None:
    toml = tmp_path / "hearth.toml"
    toml.write_text(f'state_folder = "{tmp_path / "state"}"\n[server]\nport = {free_port()}\ndrain_s = 1.0\n')
    script = """
import sys
from gateway.cluster.replica_links import ReplicaLinks
ReplicaLinks.look = None
from gateway.cli import main
sys.exit(main(["gateway", "--config", sys.argv[1]]))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(toml)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        wait_for(lambda: child.poll() is not None)
        assert child.stderr is not None
        errors = child.stderr.read()
        assert child.returncode == 1, errors
        assert '"event": "job_failed", "job": "fleet", "again_after_s": null' in errors
        assert errors.splitlines()[-1] == "hearth: the gateway's job fleet ended by an error; the log has it"
    finally:
        child.kill()
        child.wait()


@looped
async def test_a_request_of_a_batch_whose_end_fails_leaves_no_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LEASE_S", 600.0)  # it is not tried again here
    async with served(tmp_path) as gateway:
        batches, bugs = gateway.app._batches._batches, [KeyError("not foreseen")]
        end = batches.end

        async def ended(*arguments: Any) -> None:
            if bugs:
                raise bugs.pop()
            await end(*arguments)

        monkeypatch.setattr(batches, "end", ended)
        body = {"requests": [{"prompt": "hello", "max_tokens": 2}]}
        await gateway.call(f"{gateway.run_path}?queueRequest=true", body)
        await until(lambda: not bugs and not gateway.quota.open)


@looped
async def test_the_heap_is_trimmed_for_as_long_as_a_gateway_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = list[None]()
    monkeypatch.setattr(background, "_TRIM_S", 0.01)
    monkeypatch.setattr(allocator, "trim_heap", lambda: trimmed.append(None))
    async with served(tmp_path):
        await until(lambda: len(trimmed) > 2)
