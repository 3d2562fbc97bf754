"""Imports go one way. This reads the source: it imports nothing of it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("gateway", "engine", "prefixcache", "tenants")

# What a room may import of ours: whole rooms, or single modules.
ALLOWED = {
    "gateway": ("gateway", "tenants", "engine.protocol", "engine.hostinfo"),
    "engine": ("engine", "prefixcache"),
    "tenants": ("tenants",),
    "prefixcache": ("prefixcache",),
}
# Who may import what others made.
ONLY_IN = {
    "torch": (
        *(f"engine.{name}" for name in ("memory", "kvcache", "kernels", "layers", "models", "weights", "execution")),
        *("engine.bf12", "engine.compression", "engine.bench", "engine.step.sampling"),
    ),
    "triton": ("engine.kernels",),
    "starlette": ("gateway", "tenants.admin"),
    "uvicorn": ("gateway",),
    "redis": ("tenants.store.redis",),
    "sqlite3": ("tenants.store.sqlite",),
    "jwt": ("tenants.auth.jwks",),
    "llguidance": ("engine.structured_output",),
    "asyncio": ("gateway", "tenants"),
    "opentelemetry": ("gateway.observability.tracing", "engine.replica.tracing"),
    "pickle": (),
    "marshal": (),
    "shelve": (),
}


def _sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(module: str, source: str) -> Iterator[str]:
    """Everything that is imported anywhere in the text, functions included, as full dotted names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def _within(name: str, places: tuple[str, ...]) -> bool:
    """A place is a module or package; with a star, all modules whose names begin so."""
    return any(
        name.startswith(place[:-1]) if place.endswith("*") else name == place or name.startswith(place + ".")
        for place in places
    )


def _offences(module: str, source: str) -> list[str]:
    room = module.split(".")[0]
    found = []
    for name in _imports(module, source):
        top = name.split(".")[0]
        if top in ROOMS and not _within(name, ALLOWED[room]):
            found.append(f"{module} imports {name}")
        if name == "engine.protocol.frames" and room not in ("gateway", "engine"):
            found.append(f"{module} imports {name}")
        if top in ONLY_IN and not _within(module, ONLY_IN[top]):
            found.append(f"{module} imports {name}")
        if room == "prefixcache" and top not in ROOMS and not _is_standard(top):
            found.append(f"{module} imports {name}, which is not in the standard library")
    return found


def _is_standard(top: str) -> bool:
    return top in sys.stdlib_module_names


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    assert _offences(_module(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gateway.inference.generate", "from engine.scheduling.scheduler import Scheduler"),
        ("gateway.inference.generate", "import engine.step.layout"),
        ("gateway.inference.generate", "from engine import batch"),
        ("gateway.inference.generate", "def f():\n    import torch"),
        ("engine.scheduling.scheduler", "from tenants.auth.accounts import Account"),
        ("engine.scheduling.scheduler", "import torch.nn"),
        ("engine.scheduling.scheduler", "from llguidance import LLMatcher"),
        ("engine.replica.server", "import asyncio"),
        ("engine.replica.server", "def f():\n    from opentelemetry import trace"),
        ("engine.host.agent", "import gateway.config"),
        ("tenants.limits.quota", "from engine.protocol.frames import Scope"),
        ("tenants.limits.quota", "import redis.asyncio"),
        ("prefixcache.tree", "import numpy"),
        ("prefixcache.tree", "from engine.protocol.frames import Scope"),
        ("engine.protocol.frames", "import pickle"),
        ("engine.bench.shapes", "from ...gateway import text"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert _offences(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gateway.cluster.fleet", "from engine.protocol import frames"),
        ("gateway.cluster.fleet", "from engine.protocol.frames import Scope"),
        ("gateway.app", "from tenants.auth.accounts import Accounts"),
        ("engine.scheduling.scheduler", "from prefixcache.tree import Tree"),
        ("engine.models.decoder_layer", "import torch"),
        ("tenants.store.redis.store", "import redis.asyncio"),
        ("prefixcache.tree", "import heapq"),
        ("engine.bench.shapes", "from .session import Engine"),
    ],
)
def test_an_allowed_import_is_not_found(module: str, source: str) -> None:
    assert _offences(module, source) == []


def test_every_room_is_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in _sources()} == set(ROOMS)
