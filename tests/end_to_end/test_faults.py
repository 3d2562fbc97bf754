"""What users see when parts die: stated errors, a restart, no process left, quotas that hold across gateways."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.conftest import EMBER, Hearth, answers, events, free_port, run_hearth, serving
from tests.support.waiting import wait_for

LONG = {"prompt": "Tell me a very long story.", "stream": True, "max_tokens": 2000, "temperature": 1.5}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Hearth]:
    """A Hearth of this test's own, to be broken."""
    with serving(tmp_path) as running:
        yield running


def test_a_stream_whose_only_replica_is_killed_goes_on_when_it_is_back(own: Hearth) -> None:
    (replica,) = own.replicas()
    asked = {**LONG, "seed": 5, "max_tokens": 200}
    with own.client() as client:
        calm = client.post(f"/ai/run/{EMBER}", json=asked).text
    body = b""
    with own.client() as client, client.stream("POST", f"/ai/run/{EMBER}", json=asked) as said:
        for piece in said.iter_raw():
            if not body:
                replica.kill()
            body += piece
    texts = ["".join(event.get("response") or "" for event in events(each)) for each in (calm, body.decode())]
    assert texts[0] == texts[1]
    assert own.replicas()[0].pid != replica.pid


def test_a_call_during_the_restart_waits_and_is_answered(own: Hearth) -> None:
    own.replicas()[0].kill()
    with own.client() as client:
        said = client.post(f"/ai/run/{EMBER}", json={"prompt": "Hello", "max_tokens": 2})
    assert said.status_code == 200, said.text


def test_killing_serve_leaves_no_process(tmp_path: Path) -> None:
    """The signals that it may handle are in tests/gateway/test_cli.py."""
    with serving(tmp_path) as running:
        family = running.processes()
        assert len(family) >= 3
        running.process.kill()
        _, alive = psutil.wait_procs(family, timeout=25)
        assert alive == []


def test_a_drain_lets_a_running_stream_end_and_refuses_new_work(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        pieces: list[bytes] = []
        began = threading.Event()

        def read() -> None:
            body = {**LONG, "max_tokens": 60}
            with running.client() as client, client.stream("POST", f"/ai/run/{EMBER}", json=body) as said:
                for piece in said.iter_raw():
                    pieces.append(piece)
                    began.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert began.wait(30)
        running.process.send_signal(signal.SIGTERM)
        reader.join(40)
        found = events(b"".join(pieces).decode())
        assert "usage" in found[-1] or found[-1]["success"] is False


def test_clients_that_leave_in_every_phase_leave_no_blocks_behind(own: Hearth) -> None:
    with own.client() as client:
        for phase in range(12):
            patience_s = 0.02 * phase or 0.001
            with (
                contextlib.suppress(httpx.TimeoutException),
                client.stream("POST", f"/ai/run/{EMBER}", json=LONG, timeout=patience_s) as said,
            ):
                for count, _ in enumerate(said.iter_raw()):
                    if count >= phase:
                        break

        def settled() -> bool:
            metrics = client.get("/metrics").text
            return "hearth_open_requests 0.0" in metrics

        wait_for(settled, 10, "all requests settled")
        again = client.post(f"/ai/run/{EMBER}", json={"prompt": "Hello", "max_tokens": 2})
    assert again.status_code == 200


def test_limits_answer_429_with_a_code_and_a_wait(own: Hearth) -> None:
    _, few = own.account("few", "--requests-per-minute", "2", "--burst", "2")
    with own.client(few) as client:
        said = [client.post(f"/ai/run/{EMBER}", json={"prompt": "Hello", "max_tokens": 1}) for _ in range(3)]
    assert [answer.status_code for answer in said] == [200, 200, 429]
    assert said[2].json()["errors"][0]["code"] == 3021
    assert 1 <= int(said[2].headers["retry-after"]) <= 60
    _, poor = own.account("poor", "--neurons-per-day", "0.03")
    with own.client(poor) as client:
        cut = client.post(f"/ai/run/{EMBER}", json={"prompt": "Hello", "max_tokens": 100})
        refused = client.post(f"/ai/run/{EMBER}", json={"prompt": "Hello " * 50, "max_tokens": 100})
    assert (cut.status_code, cut.json()["result"]["finish_reason"]) == (200, "quota"), cut.text
    assert cut.json()["result"]["usage"]["neurons"] <= 0.03
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (429, 4006), refused.text
    assert int(refused.headers["retry-after"]) >= 1


def test_a_revoked_token_is_refused_within_a_second(own: Hearth) -> None:
    account, token = own.account("leaver")
    body = {"prompt": "Hello", "max_tokens": 1}
    with own.client(token) as client:
        assert client.post(f"/ai/run/{EMBER}", json=body).status_code == 200
        (listed,) = json.loads(own.command("tokens", "list", account, "--json"))
        own.command("tokens", "revoke", listed["token_id"])
        time.sleep(1.1)
        assert client.post(f"/ai/run/{EMBER}", json=body).status_code == 401


def test_two_gateways_share_one_budget_one_machine_and_one_cache_through_redis(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "hearth.toml").write_text(f'[store]\nurl = "{redis_url}"\n')
    ports = [free_port(), free_port()]
    commands = [["machine"], *(["gateway", "--port", str(port)] for port in ports)]
    made = json.loads(
        run_hearth(tmp_path, "accounts", "create", "shared", "--requests-per-minute", "3", "--burst", "3", "--json")
    )
    processes = [
        subprocess.Popen([sys.executable, "-m", "gateway.cli", *words], cwd=tmp_path, env=dict(os.environ))
        for words in commands
    ]
    try:
        for port in ports:
            wait_for(lambda port=port: answers(f"http://127.0.0.1:{port}/readyz"), 60, "both gateways ready")
        statuses, hits = [], []
        for port in (*ports, *ports):
            said = httpx.post(
                f"http://127.0.0.1:{port}/ai/run/{EMBER}",
                headers={"Authorization": f"Bearer {made['token']}"},
                json={"prompt": "One fire, many tenants. " * 20, "max_tokens": 1},
                timeout=60,
            )
            statuses.append(said.status_code)
            if said.status_code == 200:
                hits.append(said.json()["result"]["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert statuses == [200, 200, 200, 429]
        assert hits[0] == 0 < hits[1] == hits[2]
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)
