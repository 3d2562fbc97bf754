"""Folders that operators add, as a machine runs them, and what `hearth top` says of a running Hearth."""

import json
import subprocess
import sys
from pathlib import Path

from gateway.commands.access.residencies import machine_reports, replicas_of
from gateway.settings.config import load_config
from tests.end_to_end.conftest import EMBER, ONE_THREAD, Hearth, run_hearth
from tests.support.tiny_model import write_tiny
from tests.support.waiting import wait_for

WHOLE, CHANGED = "@cf/acme/whole", "@cf/acme/changed"


def test_an_added_folder_runs_and_one_that_was_changed_since_is_named_by_its_replica(tmp_path: Path) -> None:
    (tmp_path / "hearth.toml").write_text(f'{ONE_THREAD}[[models]]\nname = "{EMBER}"\nserve = false\n')
    for name in (WHOLE, CHANGED):
        run_hearth(tmp_path, "models", "add", name, str(write_tiny(tmp_path / name.rpartition("/")[2])))
    weights = tmp_path / "changed" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config = load_config(tmp_path / "hearth.toml")
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "gateway.cli", "machine"]
        machine = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:

        def told() -> bool:
            assert machine.poll() is None, (tmp_path / "log").read_text()
            said = machine_reports(config)
            whole = [replica.residency.name for replica in replicas_of(WHOLE, said)]
            problems = " ".join(replica.problem for replica in replicas_of(CHANGED, said))
            return whole == ["DEVICE"] and str(weights) in problems and "cut short" in problems

        wait_for(told, 60, f"one runs and the other is named: {(tmp_path / 'log').read_text()[-2000:]}")
    finally:
        machine.terminate()
        assert machine.wait(40) == 0


def test_top_shows_a_running_hearth_with_a_token_that_ends_with_it(hearth: Hearth) -> None:
    with hearth.client() as client:
        path = f"/client/v4/accounts/{hearth.account_id}/ai/run/{EMBER}"
        assert client.post(path, json={"prompt": "Hello", "max_tokens": 3}).status_code == 200
    shown = hearth.command("top", "--once")
    assert any(EMBER in line and "device" in line for line in shown.splitlines()), shown
    (machine,) = json.loads(hearth.command("top", "--json"))["machines"]
    assert [(one["model"], one["residency"]) for one in machine["replicas"]] == [(EMBER, "DEVICE")]
    tokens = [one for one in json.loads(hearth.command("tokens", "list", hearth.account_id, "--json"))]
    made = [one for one in tokens if one["name"] == "hearth top"]
    assert [one["permissions"] for one in made] == [["operator"]] * 2
    assert all(one["revoked_at"] is not None for one in made)
