"""The canary for uvicorn: all that http/server.py uses of its classes is there, in the versions that are allowed."""

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.http.server import HttpProtocol, HttpServer

ROOT = Path(__file__).parents[3]


def tree(kind: type[Any]) -> ast.ClassDef:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    return found


def attributes(kind: type[Any]) -> set[str]:
    """Methods and annotations of a class and what its instances are given, those of its bases too."""
    names = set(dir(kind))
    for base in kind.__mro__[:-1]:
        try:
            names |= {target.attr for target in targets(tree(base)) if is_name(target.value, "self")}
        except (TypeError, OSError):
            continue  # it is written in C
        names |= set(base.__annotations__)
    return names


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def used(kind: type[Any], owner: str) -> set[str]:
    """Names behind `self.` in a class of ours, or behind `self.cycle.`; `super().` counts as `self.`."""
    names = set()
    for node in ast.walk(tree(kind)):
        if not isinstance(node, ast.Attribute):
            continue
        above = node.value
        if isinstance(above, ast.Call) and is_name(above.func, "super"):
            above = ast.Name("self")
        path = f"self.{above.attr}" if isinstance(above, ast.Attribute) and is_name(above.value, "self") else ""
        if owner == (path or ("self" if is_name(above, "self") else "")):
            names.add(node.attr)
    return names


@pytest.mark.parametrize(("ours", "theirs"), [(HttpProtocol, HttpToolsProtocol), (HttpServer, uvicorn.Server)])
def test_all_that_is_used_of_a_base_class_is_there(ours: type[Any], theirs: type[Any]) -> None:
    own = {target.attr for target in targets(tree(ours)) if is_name(target.value, "self")} - attributes(theirs)
    methods = {node.name for node in tree(ours).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    private = {name for name in methods if re.match("_[a-z]", name)} - attributes(theirs)
    missing = (used(ours, "self") | methods) - own - private - attributes(theirs)
    assert missing == set()
    assert {name for name in used(ours, "self") & attributes(theirs) if name.startswith("_")}, "it proves something"


def test_methods_that_are_overridden_take_what_they_took() -> None:
    for ours, theirs in ((HttpProtocol, HttpToolsProtocol), (HttpServer, uvicorn.Server)):
        for name, method in vars(ours).items():
            if inspect.isfunction(method) and name != "__init__" and hasattr(theirs, name):
                expected = inspect.signature(getattr(theirs, name)).parameters
                assert list(inspect.signature(method).parameters) == list(expected), name


def test_what_is_used_of_an_open_request_is_there() -> None:
    names = used(HttpProtocol, "self.cycle")
    assert names >= {"response_complete", "response_started", "keep_alive", "body"}
    assert names <= attributes(RequestResponseCycle)
    assert STATUS_LINE[503].startswith(b"HTTP/1.1 503 ")


def test_the_installed_version_is_the_one_that_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = [each for each in project["dependencies"] if each.startswith("uvicorn")]
    low, high = re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", pin).groups()  # type: ignore[union-attr]
    assert int(high) == int(low) + 1, "one minor version"
    assert uvicorn.__version__.split(".")[:2] == ["0", low]
