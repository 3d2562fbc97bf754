"""Hearth as users install it: a wheel without a checkout, whose `hearth` serves from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Hearth, serving

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distribution")]  # one wheel is built at a time


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make dist` builds, of a copy: what an earlier build left beside the sources is not in it."""
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    for name in ("engine", "gateway", "prefixcache", "tenants"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sources)
    (built,) = folder.glob("hearth-*.whl")
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


@contextmanager
def served(installed: Path, folder: Path) -> Iterator[Hearth]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with serving(folder, command=[str(installed)], environment=environment) as hearth:
        yield hearth


def test_a_wheel_has_what_serves_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        *("engine", "gateway", "prefixcache", "tenants"),
        f"hearth-{version('hearth')}.dist-info",
    }
    for wanted in (
        *("engine/builtin_model/model.safetensors", "engine/builtin_model/tokenizer.json"),
        *("engine/builtin_model/config.json", "engine/kernels/tables/h200.json", "gateway/cli.py"),
    ):
        assert wanted in names
    assert sum(1 for name in names if name.startswith("engine/builtin_model/") and name.endswith(".py")) == 1


def test_what_is_installed_runs_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(installed.parent / "python"), "-c", "import gateway.cli; print(gateway.cli.__file__)"]
    where = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(where.stdout.strip()).is_relative_to(installed.parents[1])
    told = subprocess.run([str(installed), "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert re.fullmatch(rf"(hearth )?{re.escape(version('hearth'))}", told.stdout.strip())


def test_what_is_installed_serves_the_built_in_model(installed: Path, tmp_path: Path) -> None:
    with served(installed, tmp_path) as hearth, hearth.client() as client:
        body = {"messages": [{"role": "user", "content": "Hello!"}]}
        answer = client.post(f"/client/v4/accounts/{hearth.account_id}/ai/run/@cf/hearth/ember", json=body)
        assert answer.status_code == 200
        assert answer.json()["result"]["response"]
