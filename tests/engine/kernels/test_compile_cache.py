"""engine/kernels/compile_cache.py with Triton's own cache, as its compiler uses it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.runtime.cache import CacheManager, get_cache_manager  # noqa: E402

from engine.kernels import compile_cache  # noqa: E402
from engine.kernels.compile_cache import share_kernel_cache  # noqa: E402

KEY = "ab" * 32
Open = Callable[[str], CacheManager]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        share_kernel_cache(tmp_path / "beside")
        yield tmp_path / "cache"


def compile_one(key: str = KEY) -> None:
    """As Triton's compiler does."""
    manager = get_cache_manager(key)
    assert manager.get_group("kernel.json") is None
    manager.put_group("kernel.json", {name: manager.put(f"{name} of {key}", name) for name in ("a.cubin", "a.json")})


def found(key: str = KEY) -> dict[str, str]:
    return {
        name: Path(path).read_text() for name, path in (get_cache_manager(key).get_group("kernel.json") or {}).items()
    }


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_what_is_compiled_is_found_beside_the_model_by_a_machine_that_never_compiled_it(cache: Path) -> None:
    compile_one()
    told = found()
    assert list(told) == ["a.cubin", "a.json"]
    shutil.rmtree(cache)
    assert found() == told
    group = get_cache_manager(KEY).get_group("kernel.json")
    assert group is not None
    assert all(Path(path).is_relative_to(cache) for path in group.values())


def test_what_another_model_has_compiled_is_kept_beside_each_that_uses_it(cache: Path, tmp_path: Path) -> None:
    compile_one()
    compile_one("cd" * 32)
    share_kernel_cache(tmp_path / "another")
    found()
    assert len(entries(tmp_path / "another")) == 1


def test_a_launcher_is_kept_when_it_is_used(cache: Path, tmp_path: Path) -> None:
    get_cache_manager(KEY).put(b"machine code", "launcher.so")
    get_cache_manager(KEY).get_file("launcher.so")
    shutil.rmtree(cache)
    path = get_cache_manager(KEY).get_file("launcher.so")
    assert path is not None
    assert Path(path).read_bytes() == b"machine code"


def test_what_is_odd_beside_the_model_is_compiled_again(cache: Path, tmp_path: Path) -> None:
    compile_one()
    for group in (tmp_path / "beside").rglob("__grp__*"):
        group.write_text("no JSON")
    shutil.rmtree(cache)
    compile_one()
    assert len(found()) == 2


def test_a_folder_that_cannot_be_written_is_done_without(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    share_kernel_cache(tmp_path / "file" / "kernels")
    compile_one()
    assert len(found()) == 2


def test_the_oldest_entries_go(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "_ENTRIES_MAX", 3)
    for number in range(4):
        compile_one(f"{number:02x}" * 32)
        newest = max((tmp_path / "beside").iterdir(), key=lambda entry: entry.stat().st_ctime)
        os.utime(newest, (number, number))
    before = sorted((tmp_path / "beside").iterdir(), key=lambda entry: entry.stat().st_mtime)
    share_kernel_cache(tmp_path / "beside")
    assert entries(tmp_path / "beside") == sorted(entry.name for entry in before[1:])


NAMES = """
import sys
from triton.runtime.jit import JITFunction
from engine.kernels import attention, attention_hopper, compile_cache
for name in sys.argv[1:]:
    _ = getattr(attention_hopper, name).cache_key
compile_cache.name_kernels()
for module in (attention, attention_hopper):
    print({name: kernel.hash for name, kernel in vars(module).items() if isinstance(kernel, JITFunction)})
"""


def names(*first: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, "-c", NAMES, *first], env=environment, capture_output=True, check=True, text=True
    ).stdout


def test_a_kernel_has_the_same_name_in_every_process() -> None:
    told = names()
    assert told == names()
    assert "_wide" in told
    assert "None" not in told
