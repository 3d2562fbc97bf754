"""Hearth as users install it: a wheel without a checkout, whose `hearth` serves from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway import __version__
from tests.end_to_end.conftest import Hearth, serving

ROOT = Path(__file__).parents[1]
NO_UV = "there is no uv: `make .venv/.uv` brings it"
NO_INDEX = "uv cannot reach the package index, nor has it all in its cache"
UNREACHABLE = ("Failed to fetch", "error sending request", "Request failed")
WITHOUT_TORCH = "torch; sys_platform == 'never'\n"  # gigabytes that the virtual environment of the tests has anyway
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distribution")]  # one wheel is built at a time


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make dist` builds, of a copy: what an earlier build left beside the sources is not in it."""
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("engine", "gateway", "prefixcache", "tenants"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sources)
    (built,) = folder.glob("hearth_server-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `hearth` of a virtual environment that has the wheel, and dependencies from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, wheel)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = folder / "bin" / "hearth"
    script.write_text(f"#!{folder}/bin/python\nimport sys\nfrom gateway.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        pytest.skip(NO_UV)
    return found


def run_uv(uv: str, folder: Path, *command: object) -> str:
    """What it printed, with PyTorch left out of what it resolves. Skips where the index is out of reach."""
    overrides = folder / "overrides.txt"
    overrides.write_text(WITHOUT_TORCH)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [uv, *(str(word) for word in command)]
    done = subprocess.run(
        words, cwd=folder, env={**environment, "UV_OVERRIDE": str(overrides)}, capture_output=True, text=True
    )
    if done.returncode and any(words in done.stderr for words in UNREACHABLE):
        pytest.skip(NO_INDEX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def served(installed: Path, folder: Path) -> Iterator[Hearth]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with serving(folder, command=[str(installed)], environment=environment) as hearth:
        yield hearth


def test_a_wheel_has_what_serves_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        *("engine", "gateway", "prefixcache", "tenants"),
        f"hearth_server-{__version__}.dist-info",
    }
    assert f"hearth_server-{__version__}.dist-info/licenses/LICENSE" in names
    for wanted in (
        *("engine/builtin_model/model.safetensors", "engine/builtin_model/tokenizer.json"),
        *("engine/builtin_model/config.json", "engine/kernels/tables/h200.json", "gateway/cli.py"),
        *("gateway/console/static/index.html", "gateway/console/static/lib/api.js"),
    ):
        assert wanted in names
    assert sum(1 for name in names if name.startswith("engine/builtin_model/") and name.endswith(".py")) == 1


def test_what_is_installed_runs_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(installed.parent / "python"), "-c", "import gateway.cli; print(gateway.cli.__file__)"]
    where = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(where.stdout.strip()).is_relative_to(installed.parents[1])
    told = subprocess.run([str(installed), "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert told.stdout.strip() == f"hearth {__version__}"


def test_what_is_installed_serves_the_built_in_model(installed: Path, tmp_path: Path) -> None:
    with served(installed, tmp_path) as hearth, hearth.client() as client:
        body = {"messages": [{"role": "user", "content": "Hello!"}]}
        answer = client.post(f"/client/v4/accounts/{hearth.account_id}/ai/run/@cf/hearth/ember", json=body)
        assert answer.status_code == 200
        assert answer.json()["result"]["response"]


def test_uv_makes_an_environment_whose_command_serves(uv: str, wheel: Path, tmp_path: Path) -> None:
    """As docs/install.md says, with the wheel in place of the name."""
    folder = tmp_path / "venv"
    run_uv(uv, tmp_path, "venv", "--quiet", "--python", sys.executable, folder)
    run_uv(uv, tmp_path, "pip", "install", "--quiet", "--python", folder / "bin" / "python", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    assert not (packages / "torch").exists()
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    place = tmp_path / "place"
    place.mkdir()
    with served(folder / "bin" / "hearth", place) as hearth, hearth.client() as client:
        answer = client.post(
            "/v1/chat/completions", json={"model": "ember", "messages": [{"role": "user", "content": "Hello!"}]}
        )
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]


def test_uvx_runs_the_command_by_both_of_its_names(uv: str, wheel: Path, tmp_path: Path) -> None:
    expected = f"hearth {__version__}\n"
    assert (
        run_uv(uv, tmp_path, "tool", "run", "--python", sys.executable, "--from", wheel, "hearth", "--version")
        == expected
    )
    assert run_uv(uv, tmp_path, "tool", "run", "--python", sys.executable, wheel, "--version") == expected
