"""One prompt through a folder's model before it is added: a replica of its own is started, asked over its socket, and
ended. It judges no answer, only whether there is one, of tokens that the tokenizer knows.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE, VISIBLE_DEVICES_VARIABLE
from engine.process.supervised import start_child
from engine.protocol import frames
from engine.protocol.reports import loading_percent
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import FinishReason, SamplingParams, Scope
from gateway.catalogue.catalogue import spec_of
from gateway.commands.model_tools.folder_check import FOREIGN_TOKENIZER, FolderReport, UnservableFolder
from gateway.commands.terminal.output import progress_bar
from gateway.settings.config import Config, ModelEntryConfig
from gateway.text.tokenizer import TokenizationError

if TYPE_CHECKING:
    from tqdm import tqdm

Untried = Annotated[bool, Parameter(name="--untried", help="leave out the prompt that is run before it is added")]
_PROMPT: Final = "Hello! What can you do?"
_TOKENS: Final = 8
_CONTEXT_TOKENS: Final = 512
_ANSWER_S: Final = 120.0
_LOOK_S: Final = 0.05
_PROGRESS_S: Final = 0.25
_BAR: Final = "{l_bar}{bar}| {elapsed}"  # the time is seen to pass while a process imports what it needs
_NO_ROOM: Final = ("DoesNotFit", "OutOfDeviceMemory", "OutOfHostMemory", "out of memory")
_ADVICE: Final = "see to what it says; --untried adds it all the same"


class NoRoomToTry(RuntimeError):
    """There is no memory for the model now, so that nothing can be said of it."""


def try_prompt(config: Config, entry: ModelEntryConfig, report: FolderReport) -> None:
    """Has a replica of the entry's model answer one prompt. Raises UnservableFolder where it does not, NoRoomToTry."""
    prompt = _encoded(entry, report)
    with tempfile.TemporaryDirectory(prefix="hearth-try-") as folder, open(Path(folder, "log"), "w+b") as log:
        context_tokens = min(report.sizes.context_tokens, _CONTEXT_TOKENS)
        kind, _, number = config.machine.device.partition(":")
        spec = ReplicaSpec(
            model=msgspec.structs.replace(
                spec_of(config, entry), context_tokens=context_tokens, kv_bytes=None, sequences=1, public_prefixes=[]
            ),
            address=f"unix:{folder}/socket",
            pulse=f"{folder}/pulse",
            boot=1,
            device=kind,
            device_bytes=1,  # beside the weights no more than one context
        )
        command = [sys.executable, "-P", "-m", "engine.replica.server", msgspec.json.encode(spec).decode()]
        environment = {KERNEL_CACHE_VARIABLE: os.environ.get(KERNEL_CACHE_VARIABLE, str(config.kernels_folder))}
        environment |= {VISIBLE_DEVICES_VARIABLE: number} if number else {}
        process = start_child(command, output=log, environment=environment)
        try:
            with (
                progress_bar(desc=f"opening {entry.name}", total=100, bar_format=_BAR, leave=False) as bar,
                _connected(process, f"{folder}/socket", Path(folder, "log"), bar) as replica,
            ):
                bar.set_description(f"{entry.name} answers its first prompt")
                _ask(replica, prompt, report, entry)
        finally:
            process.kill()
            process.wait()


def _encoded(entry: ModelEntryConfig, report: FolderReport) -> list[int]:
    text = report.tokenizer
    try:
        if text.has_chat_template and report.vectors is None:
            return text.encode_chat([{"role": "user", "content": _PROMPT}])
        return text.encode_prompt(_PROMPT)
    except TokenizationError as error:
        raise UnservableFolder(f"{entry.name} cannot take a prompt: {error}", FOREIGN_TOKENIZER) from error


@contextlib.contextmanager
def _connected(process: "subprocess.Popen[bytes]", path: str, log: Path, bar: "tqdm[Any]") -> Iterator[socket.socket]:
    """A connection to the replica once it serves; until then the bar shows how much of its weights it has read."""
    shown = 0.0
    with socket.socket(socket.AF_UNIX) as replica:
        while replica.connect_ex(path):
            if process.poll() is not None:
                raise _ended(log)
            if not bar.disable and time.monotonic() - shown > _PROGRESS_S:
                shown = time.monotonic()
                percents = map(loading_percent, log.read_text(errors="replace").splitlines())
                bar.n = max((percent for percent in percents if percent is not None), default=0)
                bar.refresh()
            time.sleep(_LOOK_S)
        replica.settimeout(_ANSWER_S)
        yield replica


def _ended(log: Path) -> Exception:
    """Why a replica ended before it served, by its last words."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    if any(word in last for word in _NO_ROOM):
        return NoRoomToTry(last)
    return UnservableFolder(f"its replica ends as it starts: {last}", _ADVICE)


def _ask(replica: socket.socket, prompt: list[int], report: FolderReport, entry: ModelEntryConfig) -> None:
    """Raises UnservableFolder where there is no answer, or one of tokens that nobody can read."""
    order = frames.Submit(
        id=1,
        tokens=array("I", prompt).tobytes(),
        scope=Scope(),
        sampling=SamplingParams(),
        max_tokens=1 if report.vectors is not None else _TOKENS,
        pooling=None if report.vectors is None else report.vectors.poolings[0],
    )
    replica.sendall(frames.encode_frame(order))
    tokens: list[int] = []
    for frame in _received(replica, entry):
        if isinstance(frame, frames.Reject):
            raise UnservableFolder(
                f"{entry.name} refuses a prompt of {len(prompt)} tokens: {frame.message}", FOREIGN_TOKENIZER
            )
        if not isinstance(frame, frames.StepOutputs):
            continue
        tokens += memoryview(frame.tokens).cast("I").tolist()
        for finished in frame.finished:
            if finished.reason is FinishReason.ERROR:
                raise UnservableFolder(f"{entry.name} answers a prompt with an error: {finished.message}", _ADVICE)
            _require_readable(tokens, report, entry)
            return


def _received(replica: socket.socket, entry: ModelEntryConfig) -> Iterator[frames.Frame]:
    reader = frames.FrameReader()
    try:
        while received := replica.recv(1 << 16):
            yield from reader.feed(received)
    except TimeoutError:
        raise UnservableFolder(f"{entry.name} gives no answer to a prompt within {_ANSWER_S:.0f} s", _ADVICE) from None
    raise UnservableFolder(f"the replica of {entry.name} ended over its first prompt", _ADVICE)


def _require_readable(tokens: list[int], report: FolderReport, entry: ModelEntryConfig) -> None:
    if report.vectors is not None:
        return
    known = report.tokenizer.ids
    if foreign := [token for token in tokens if token not in known]:
        raise UnservableFolder(
            f"{entry.name} answers with tokens that tokenizer.json lacks: {foreign[:3]}", FOREIGN_TOKENIZER
        )
