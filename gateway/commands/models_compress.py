"""`hearth models compress` and `hearth models expand`: has the engine make a folder whose weights take 12 bits each, or
the original of such a one. It knows nothing of the code.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from gateway.catalogue.catalogue import folder_of, model_entries
from gateway.commands.output import add_action, fail
from gateway.config import Config

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
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def add(actions: Any) -> None:
    compressing = add_action(actions, "compress", "make a folder whose weights take 12 bits each, without loss")
    compressing.epilog, compressing.formatter_class = _COMPRESSING, argparse.RawDescriptionHelpFormatter
    compressing.add_argument("source", metavar="NAME|FOLDER", help="a model of the catalogue, or a Hugging Face folder")
    target = compressing.add_argument("target", metavar="TARGET", help="a new folder; not needed in a dry run")
    target.required = False  # nargs="?" would be settled, empty, by the first option behind the source
    compressing.add_argument("--distribution", action="store_true", help="smaller still, for its way to other machines")
    compressing.add_argument("--dry-run", action="store_true", help="only say what each tensor would take")
    expanding = add_action(actions, "expand", "make the folder that a compressed one was made of, bit for bit")
    expanding.epilog, expanding.formatter_class = _EXPANDING, argparse.RawDescriptionHelpFormatter
    expanding.add_argument("source", metavar="NAME|FOLDER", help="a compressed model of the catalogue, or folder")
    expanding.add_argument("target", metavar="TARGET", help="a new folder")
    for parser in (compressing, expanding):
        parser.add_argument("--device", default="auto", help="where to compute: auto, cpu or cuda:N (default: auto)")


def compress_model(config: Config, options: argparse.Namespace) -> int:
    if options.target is None and not options.dry_run:
        return fail("say which folder is to be made, or --dry-run to see what it would be")
    if (source := _source(config, options.source)) is None:
        return _nowhere(options.source)
    level = ["--level", "distribution" if options.distribution else "device"]
    target = ["--dry-run"] if options.dry_run else [options.target]
    status = _engine("compress", [str(source), *target, *level, *_common(options)])
    if status == 0 and not options.json and not options.dry_run:
        print(f"Serve it: `hearth models add NAME {options.target}`, with a name like @cf/acme/assistant")
    return status


def expand_model(config: Config, options: argparse.Namespace) -> int:
    if (source := _source(config, options.source)) is None:
        return _nowhere(options.source)
    return _engine("expand", [str(source), options.target, *_common(options)])


def _source(config: Config, named: str) -> Path | None:
    of_catalogue = next((folder_of(config, entry) for entry in model_entries(config) if entry.name == named), None)
    folder = of_catalogue or Path(named)
    return folder if folder.is_dir() else None


def _nowhere(named: str) -> int:
    return fail(f"{named} is neither a folder nor a model of the catalogue, which `hearth models list` shows")


def _common(options: argparse.Namespace) -> list[str]:
    return ["--device", options.device, *(["--json"] if options.json else [])]


def _engine(module: str, arguments: Sequence[str]) -> int:
    """The status of a program of the engine, which says for itself what it does, and is told to end when this is."""
    command = [sys.executable, "-P", "-m", f"engine.compression.{module}", *arguments]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the program takes them once it can end well
    with subprocess.Popen(command) as process, _passed_on(process):
        return process.wait()


@contextmanager
def _passed_on(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    before = [signal.signal(number, lambda number, _: process.send_signal(number)) for number in _SIGNALS]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)
