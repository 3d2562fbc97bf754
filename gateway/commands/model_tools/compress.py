"""`hearth models compress`, `expand` and `quantize`: has the engine make a folder whose weights take 12 bits each, its
original again, or one in fp8. It knows nothing of the codes.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from gateway.catalogue.catalogue import folder_of, model_entries
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail
from gateway.settings.config import Config

_COMPRESSING: Final = """\
examples:
  hearth models compress models/assistant models/assistant-12 --dry-run
  hearth models compress models/assistant models/assistant-12
  hearth models compress @hf/Qwen/Qwen3-8B /srv/models/qwen3-8b-12 --json
  hearth models compress models/assistant /srv/share/assistant --distribution
  hearth models add @cf/acme/assistant models/assistant-12          then serve it like any other

Nothing is lost: answers are those of the bf16 model, and `hearth models expand` gives back its files bit for bit. bf16
matrices take three quarters of their bytes, on disk, in host memory and on a GPU, which reads so much less for each
token; other tensors are kept as they are, and the report says why. A CPU expands the weights while it loads them. With
--distribution the folder is smaller still (67 of 100 bytes), to be sent or kept; it serves as well, and once loaded is
the same. The folder appears when all of it is on the disk; whatever stops this before leaves nothing of it.
"""
_EXPANDING: Final = """\
examples:
  hearth models expand models/assistant-12 models/assistant
  cd models/assistant && sha256sum --check SHA256SUMS               where the original had one

The files are those that were compressed, bit for bit: every piece, tensor and file is held against its sum.
"""
_QUANTIZING: Final = """\
examples:
  hearth models quantize models/assistant models/assistant-fp8 --to fp8
  hearth models quantize @hf/Qwen/Qwen3-8B /srv/models/qwen3-8b-fp8 --to fp8 --json
  hearth models add @cf/acme/assistant models/assistant-fp8         then serve it like any other

Linear layers' weights take half of their bytes, with a factor for each output (compressed-tensors, which vLLM reads
too); embedding, head, norms and routers stay. Unlike `compress` it loses something: the report has the relative error
of each tensor and of its worst output, the largest first. Try the answers before you serve it.
"""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
Model = Annotated[str, Parameter(metavar="NAME|FOLDER", help="a model of the catalogue, or a Hugging Face folder")]
Target = Annotated[str, Parameter(help="a new folder")]
ComputeDevice = Annotated[str, Parameter(help="where to compute: auto, cpu or cuda:N (default: auto)")]
compress_app = command_app("compress", "Make a folder whose weights take 12 bits each, without loss.", _COMPRESSING)
expand_app = command_app("expand", "Make the folder that a compressed one was made of, bit for bit.", _EXPANDING)

_FP8: Final = "Make a folder whose linear layers are in fp8, and say how far off."
quantize_app = command_app("quantize", _FP8, _QUANTIZING)


@compress_app.default
def compress(
    model: Model,
    target: Annotated[str | None, Parameter(help="a new folder; not needed in a dry run")] = None,
    /,
    *,
    distribution: Annotated[bool, Parameter(help="smaller still, for its way to other machines")] = False,
    dry_run: Annotated[bool, Parameter(help="only say what each tensor would take")] = False,
    device: ComputeDevice = "auto",
    json: Json = False,
    source: Source,
) -> int:
    """Make a folder whose weights take 12 bits each, without loss."""
    if target is None and not dry_run:
        return fail("say which folder is to be made, or --dry-run to see what it would be")
    output = ["--dry-run"] if target is None or dry_run else [target]
    level = ["--level", "distribution" if distribution else "device"]
    status = _run_engine("compress", source.load(), model, [*output, *level], device, json)
    if status == 0 and not json and not dry_run:
        print(f"Serve it: `hearth models add NAME {target}`, with a name like @cf/acme/assistant")
    return status


@expand_app.default
def expand(
    model: Model, target: Target, /, *, device: ComputeDevice = "auto", json: Json = False, source: Source
) -> int:
    """Make the folder that a compressed one was made of, bit for bit."""
    return _run_engine("expand", source.load(), model, [target], device, json)


@quantize_app.default
def quantize(
    model: Model,
    target: Target,
    /,
    *,
    to: Annotated[Literal["fp8"], Parameter(help="the form: fp8, with a factor for each output")],
    device: ComputeDevice = "auto",
    json: Json = False,
    source: Source,
) -> int:
    """Make a folder whose linear layers are in fp8, with a report of each tensor's error."""
    return _run_engine("quantize", source.load(), model, [target], device, json)


def _folder(config: Config, name: str) -> Path | None:
    folders = {entry.name: folder_of(config, entry) for entry in model_entries(config)}
    folder = folders.get(name, Path(name))
    return folder if folder.is_dir() else None


def _run_engine(module: str, config: Config, model: str, arguments: Sequence[str], device: str, json: bool) -> int:
    """The exit status of a program that makes a folder of the model's."""
    if (folder := _folder(config, model)) is None:
        return fail(f"{model} is neither a folder nor a model of the catalogue, which `hearth models list` shows")
    options = ["--device", device, *(["--json"] if json else [])]
    return run_program(f"engine.compression.{module}", [str(folder), *arguments, *options])


def run_program(module: str, arguments: Sequence[str]) -> int:
    """The exit status of a program of the engine, which reports for itself and ends when this process is told to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the program takes them once it can end well
    with subprocess.Popen([sys.executable, "-P", "-m", module, *arguments]) as process:
        before = [signal.signal(number, lambda number, _: process.send_signal(number)) for number in _SIGNALS]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            return process.wait()
        finally:
            for number, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(number, handler)
