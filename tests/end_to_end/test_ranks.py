"""A model of two ranks, or of two stages, on a real server: it answers as one, and a rank that is lost costs no request
its answer."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.conftest import EMBER, ROOT, serving
from tests.support.waiting import wait_for

SETTINGS = f"""
[[models]]
name = "{EMBER}"
folder = "{ROOT / "engine" / "builtin_model"}"
"""
ASKED = {
    "messages": [
        {"role": "system", "content": "You work for the Harbour Library. The Wi-Fi password is QUILL-4821."},
        {"role": "user", "content": "What is the Wi-Fi password?"},
    ]
}


def ranks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Rank 0, whose parent is no replica, then its followers."""
    pids = {process.pid for process in processes}
    return sorted(processes, key=lambda process: process.ppid() in pids)


@pytest.mark.parametrize("cut", ["gpus", "stages"])
def test_a_model_of_two_ranks_answers_and_comes_back_when_one_is_lost(tmp_path: Path, cut: str) -> None:
    with serving(tmp_path, f"{SETTINGS}{cut} = 2\n") as hearth, hearth.client() as client:
        path = f"/client/v4/accounts/{hearth.account_id}/ai/run/{EMBER}"
        answer = client.post(path, json=ASKED).json()["result"]
        assert "QUILL-4821" in answer["response"]
        assert client.post(path, json=ASKED).json()["result"]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
        first, follower = ranks(hearth.replicas())
        assert follower.ppid() == first.pid
        for number in (signal.SIGKILL, signal.SIGSTOP):
            leader, follower = ranks(hearth.replicas())
            follower.send_signal(number)
            again = client.post(path, json=ASKED).json()  # asked again of the replica that is started in its place
            assert "QUILL-4821" in again["result"]["response"], again
            wait_for(lambda pids=(leader.pid, follower.pid): not any(map(psutil.pid_exists, pids)), 30, "both are gone")
        lost = re.findall(r'"rank_lost", "rank": 1, "reason": "([^"]*)"', replica_log(tmp_path))
        assert lost == ["rank 1 ended", "rank 1 made no progress for 0.85 s"]


def replica_log(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / ".hearth").rglob("*.log*")))
