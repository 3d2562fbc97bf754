"""Models that come, change and go in a running Hearth under streams and short calls: by the command line and by edits
of hearth.toml."""

import json
from pathlib import Path

import pytest

from gateway.catalogue.catalogue import model_entries
from gateway.catalogue.report import catalogue_reports
from gateway.cli import main
from gateway.commands.access.residencies import machine_reports
from gateway.commands.model_tools.progress import leaving_models, liveness
from gateway.settings.config import load_config
from tests.end_to_end.conftest import EMBER, ONE_THREAD, serving
from tests.end_to_end.ledger import read_totals
from tests.support.live_traffic import traffic
from tests.support.tiny_model import write_tiny
from tests.support.waiting import wait_for

STEADY, BY_COMMAND, BY_FILE = "steady", "@cf/acme/guest", "notes"


def settings(folder: Path, *models: str) -> None:
    """Writes hearth.toml anew; each of `models` is an entry's lines."""
    entries = [f'name = "{EMBER}"\nserve = false', f'name = "{STEADY}"\nfolder = "{folder / STEADY}"', *models]
    (folder / "hearth.toml").write_text(ONE_THREAD + "".join(f"[[models]]\n{entry}\n" for entry in entries))


def models(*words: str) -> None:
    """`hearth models …` in the current folder."""
    assert main(["models", *words]) == 0


def doctor(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """What `hearth doctor` finds in the current folder, by subject."""
    capsys.readouterr()
    main(["doctor", "--json"])
    found: dict[str, list[str]] = {}
    for finding in json.loads(capsys.readouterr().out):
        found.setdefault(finding["subject"], []).append(finding["found"])
    return found


def states() -> dict[str, str]:
    """What `hearth models list` says of each."""
    config = load_config()
    gateways, machines, entries = list(catalogue_reports(config)), machine_reports(config), model_entries(config)
    listed = {entry.name: liveness(config, entry, gateways, machines) for entry in entries}
    return {**listed, **leaving_models(entries, gateways, machines)}


@pytest.mark.timeout(600)
def test_twenty_changes_under_streams_refuse_no_connection_cut_no_stream_and_charge_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (STEADY, "guest", BY_FILE):
        write_tiny(tmp_path / name)
    settings(tmp_path)
    start = (tmp_path / "hearth.toml").read_text().removeprefix(ONE_THREAD)
    with serving(tmp_path, start) as hearth, traffic(hearth.base_url, hearth.token, STEADY, "guest", BY_FILE) as calls:
        for turn in range(4):
            entry = f'name = "{BY_FILE}"\nfolder = "{tmp_path / BY_FILE}"'
            models("add", BY_COMMAND, "guest", "--price-input", "10", "--untried", "--wait")
            settings(tmp_path, entry)
            wait_for(lambda: states().get(BY_FILE) == "live")
            models("set", "guest", "--price-output", str(1000 + turn), "--alias", "visitor")
            settings(tmp_path, f"{entry}\ncontext_tokens = {512 + turn}")
            models("set", "visitor", "--context-tokens", str(256 + turn), "--wait")
            wait_for(lambda: states().get(BY_FILE) == "live")
            settings(tmp_path)
            models("remove", "visitor", "--wait")
            wait_for(lambda: BY_FILE not in states())
    assert (calls.refused, calls.cut) == (0, [])
    assert min(calls.ended[name] for name in (STEADY, "guest", BY_FILE, "no such model")) > 0
    totals = read_totals(tmp_path, hearth.account_id)
    assert (totals.micro_neurons, totals.open) == (calls.micro_neurons, 0)


def test_a_wrong_edit_is_named_with_its_line_and_what_was_served_before_is_served_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / STEADY)
    settings(tmp_path)
    good = (tmp_path / "hearth.toml").read_text()
    with serving(tmp_path, good.removeprefix(ONE_THREAD)) as hearth:
        (tmp_path / "hearth.toml").write_text(good + '[[models]]\nname = "notes"\nreplicas = 0\n')
        line = len(good.splitlines()) + 3
        wrong = f"hearth.toml: line {line}: models[2].replicas: expected a whole number >= 1"
        gateway, machine = (tmp_path / ".hearth" / f"{name}.log" for name in ("gateway", "machine"))
        wait_for(lambda: wrong in gateway.read_text() and wrong in machine.read_text())
        assert main(["models", "list"]) == 1
        listed = capsys.readouterr()
        assert wrong in listed.err
        assert "stays in force" in listed.err
        assert STEADY in listed.out
        assert wrong in doctor(capsys)["settings"][0]
        with hearth.client() as client:
            assert client.post(f"/ai/run/{STEADY}", json={"prompt": "Hello", "max_tokens": 1}).status_code == 200
        (tmp_path / "hearth.toml").write_text(good)
        wait_for(lambda: states() == {STEADY: "live"})


def test_doctor_says_what_a_running_server_does_not_follow_and_where_its_models_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (STEADY, "guest"):
        write_tiny(tmp_path / name)
    settings(tmp_path)
    good = (tmp_path / "hearth.toml").read_text()
    with serving(tmp_path, good.removeprefix(ONE_THREAD)):
        assert any(f"{STEADY}: device" in found for found in doctor(capsys)["machine"])
        entry, alias = f'name = "guest"\nfolder = "{tmp_path / "guest"}"\naliases = ["{{}}"]', "@cf/acme/guest"
        models("add", alias, "guest", "--untried")
        settings(tmp_path, entry.format(alias))
        wrong = f"the alias {alias} of guest is a name of {alias}: choose one that is free"
        wait_for(lambda: "gateway" in (said := doctor(capsys)) and any(wrong in found for found in said["machine"]))
        said = doctor(capsys)
        assert said["settings"] == [wrong]
        assert said["gateway"] == [f"what is asked for is not followed: {wrong}"]
        assert any(f"{STEADY}: device" in found for found in said["machine"]), "what serves is still said"
        settings(tmp_path)
        wait_for(lambda: "gateway" not in doctor(capsys))
        weights = tmp_path / STEADY / "model.safetensors"
        weights.write_bytes(weights.read_bytes())
        assert any("its folder had before" in found for found in doctor(capsys)["machine"])


@pytest.mark.parametrize("edit", ["command", "file"])
def test_a_price_changes_for_calls_that_begin_later_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path / STEADY)
    settings(tmp_path)
    start = (tmp_path / "hearth.toml").read_text().removeprefix(ONE_THREAD)
    with serving(tmp_path, start) as hearth, hearth.client() as client:
        model = "ember" if edit == "command" else STEADY
        if edit == "command":
            settings(tmp_path)
            (tmp_path / "hearth.toml").write_text(ONE_THREAD)
            wait_for(lambda: states() == {EMBER: "live"})

        def cost() -> float:
            answer = client.post(f"/ai/run/{model}", json={"prompt": "Hello", "max_tokens": 1})
            neurons: float = answer.json()["result"]["usage"]["neurons"]
            return neurons

        before = cost()
        if edit == "command":
            models("set", "ember", "--price-output", "2e6")
        else:
            text = (tmp_path / "hearth.toml").read_text()
            (tmp_path / "hearth.toml").write_text(f"{text}price = {{ output = 2e6 }}\n")
        wait_for(lambda: cost() > before + 1.5)
