"""The unit that `hearth systemd` prints: systemd accepts it, and it says what the settings say."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from gateway.cli import main, parse
from gateway.commands.deployment.systemd import unit
from gateway.settings.config import load_config


def _unit(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """The printed unit's settings, each with all its values."""
    assert main(["systemd", *words]) == 0
    settings: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_runs_serve_with_the_settings_of_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hearth.toml").write_text("[server]\ndrain_s = 100\nconnections = 40000\n")
    settings = _unit(capsys, "--user", "ann")
    (command,) = settings["ExecStart"]
    program, *words = command.split()
    assert Path(program).is_absolute()
    assert Path(program).parent == Path(sysconfig.get_path("scripts"))
    words = words[words.index("serve") :]
    assert words == ["serve", "--config", str(folder / "hearth.toml"), "--state", str(folder / ".hearth")]
    parse(words)
    assert settings["User"] == ["ann"]
    assert settings["WorkingDirectory"] == [str(folder / ".hearth")]
    assert settings["ReadWritePaths"][0].split()[0] == str(folder / ".hearth")  # then its sockets, where a path is long
    assert settings["KillMode"] == ["mixed"], "the children are drained by the first process, and not by systemd"
    assert int(settings["TimeoutStopSec"][0]) > 100 + 35, "nothing is killed while it drains"
    assert int(settings["LimitNOFILE"][0]) >= 80000
    assert settings["StandardOutput"] == ["null"], "the journal is no place for a token"


@pytest.mark.parametrize("part", ["gateway", "machine"])
def test_a_part_runs_alone_and_its_log_goes_into_the_journal(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = _unit(capsys, f"--{part}")
    assert f" {part} --state " in settings["ExecStart"][0]
    assert "StandardOutput" not in settings


def test_gpus_and_compiled_kernels_stay_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert not {"PrivateDevices", "ProtectClock", "DevicePolicy", "DeviceAllow", "MemoryDenyWriteExecute"} & set(
        _unit(capsys)
    )


def test_a_low_port_takes_the_right_to_it_and_no_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _unit(capsys)["AmbientCapabilities"] == [""]
    (folder / "hearth.toml").write_text("[server]\nport = 443\n")
    settings = _unit(capsys)
    assert settings["AmbientCapabilities"] == settings["CapabilityBoundingSet"] == ["CAP_NET_BIND_SERVICE"]
    assert _unit(capsys, "--machine")["AmbientCapabilities"] == [""]


def test_what_lies_elsewhere_can_be_written_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hearth.toml").write_text(
        '[store]\nurl = "sqlite:/srv/db/hearth.db"\n[machine]\nfolder = "/run/hearth"\n'
    )
    written = _unit(capsys, "--state", "/srv/hearth")
    assert written["ReadWritePaths"] == ["/srv/hearth /run/hearth /srv/db"]
    assert written["PrivateTmp"] == ["yes"]
    assert "PrivateTmp" not in _unit(capsys, "--state", "/tmp/hearth"), "others look for its sockets there"


def test_both_parts_at_once_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["systemd", "--gateway", "--machine"]) == 2
    assert "--gateway, --machine" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("part", ["serve", "gateway", "machine"])
def test_systemd_accepts_it(part: str, folder: Path) -> None:
    settings = folder / "50 % of it.toml"
    settings.write_text("[server]\nport = 80\n")
    state = folder / 'a "state" of $HOME, 100 %'
    state.mkdir()
    file = folder / "hearth.service"
    file.write_text(unit(part, load_config(settings, state_folder=state), settings, "root") + "\n")  # type: ignore[arg-type]
    verified = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
    assert (verified.returncode, "hearth.service" in verified.stderr) == (0, False), verified.stderr
