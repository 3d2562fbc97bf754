"""Finds every operation of an official Python SDK in the SDK itself, and calls what has no counterpart here with
arguments of the right kind, to see what its user is told."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.conformance.row import Row

UNSERVED = {(404, 7000), (404, 7003), (405, 7001)}
FILE = ("file.txt", b"text")
_HELPERS = re.compile("^(_|with_)")
# Opens a WebSocket later; reads a webhook; works on files or answers first; or breaks within the SDK.
_LOCAL = re.compile(
    r"(^|\.)(connect|webhooks\.(unwrap|verify_signature|parse_unverified)|messages\.thread|artifacts\.for_result"
    r"|environments\.files\.(prepare|prepare_directory|upload)|upload_file_chunked|to_markdown\.transform)$"
)
_ONE_OF = re.compile(r"Expected either \((.*?)\)")


class Watch:
    """Counts what clients ask of the server."""

    def __init__(self) -> None:
        self.asked = 0

    def follow(self, client: Any) -> None:
        """By the hooks of its HTTP client, which all three SDKs keep in the same place."""
        client._client.event_hooks = {"request": [self._note]}

    def _note(self, request: Any) -> None:
        self.asked += 1


def operations(client: Any, only: tuple[str, ...] = ()) -> dict[str, Callable[..., Any]]:
    """Every public method of every resource by its dotted name; `only` names the resources at the top that count."""
    base = importlib.import_module(f"{type(client).__module__.partition('.')[0]}._resource")
    kinds = (base.SyncAPIResource, base.AsyncAPIResource)
    found: dict[str, Callable[..., Any]] = {}
    for name in only or _public(client):
        child = getattr(client, name, None)
        if isinstance(child, kinds):
            found.update(_below(child, kinds, name))
    return found


def _below(resource: Any, kinds: tuple[type, ...], path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _public(resource):
        if inspect.isfunction(inspect.getattr_static(type(resource), name)):
            yield f"{path}.{name}", getattr(resource, name)
        elif isinstance(child := getattr(resource, name), kinds):
            yield from _below(child, kinds, f"{path}.{name}")


def _public(thing: Any) -> list[str]:
    return [name for name in dir(type(thing)) if not _HELPERS.match(name)]


def unserved(sdk: str, operation: str, call: Callable[..., Any], watch: Watch, known: dict[str, Any]) -> Row:
    """Calls it, and says how it ended: well is the SDK's own error with the server's code for what is not served."""
    asked = watch.asked
    try:
        _ask(call, known)
    except Exception as error:
        status = getattr(error, "status_code", None)
        if watch.asked == asked:
            return _local(sdk, operation, error)
        code = _code(error)
        if (status, code) in UNSERVED:
            return Row(sdk, operation, "none", f"{type(error).__name__} {status}, code {code}")
        return Row(sdk, operation, "fail", f"{type(error).__name__}: {str(error)[:200]}")
    if watch.asked == asked:
        return _local(sdk, operation)
    return Row(sdk, operation, "fail", "it was answered, and is in no list of what is served")


def _ask(call: Callable[..., Any], known: dict[str, Any]) -> None:
    """Until the server was asked: iterators and contexts ask when they begin."""
    arguments = _arguments(call, known)
    try:
        called = call(**arguments)
    except TypeError as error:
        if (choices := _ONE_OF.search(str(error))) is None:
            raise
        missing = set(re.findall(r"'(\w+)'", choices[1])) - arguments.keys()
        called = call(**arguments, **{name: FILE if name == "audio_sample" else "x" for name in missing})
    if hasattr(called, "__enter__"):
        called.__enter__()
    elif hasattr(called, "__next__"):
        next(called)


def _local(sdk: str, operation: str, error: Exception | None = None) -> Row:
    """Fine for what opens a WebSocket later or reads a webhook; any other was given the wrong arguments here."""
    if _LOCAL.search(operation):
        return Row(sdk, operation, "local")
    return Row(sdk, operation, "fail", f"it never asked the server: {type(error).__name__}: {str(error)[:200]}")


def _code(error: Exception) -> int | None:
    """The server's own, from the envelope, which the bodies of all dialects' errors have."""
    response = getattr(error, "response", None)
    errors = [] if response is None else response.json().get("errors", [])
    return int(errors[0]["code"]) if errors else None


def _arguments(call: Callable[..., Any], known: dict[str, Any]) -> dict[str, Any]:
    wanted = inspect.signature(call).parameters.values()
    return {
        one.name: known[one.name] if one.name in known else _sample(str(one.annotation))
        for one in wanted
        if one.name in known
        or (one.default is inspect.Parameter.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))
    }


def _sample(annotation: str) -> Any:
    """Something of the kind, for no argument is looked at before the path is."""
    if re.search("FileTypes|FileContent|PathLike|Video$", annotation):
        return [FILE] if annotation.startswith("Iterable") else FILE
    if re.match(r"(SequenceNotStr|Iterable|List|list|Sequence)\[", annotation):
        return []
    if re.match(r"(Dict|dict|Mapping)\[", annotation) or "TypedDict" in annotation or annotation.endswith("Param"):
        return {}
    return {"int": 1, "float": 1.0, "bool": True}.get(annotation, "x")
