"""`hearth models import`: has the engine make a model's folder of a GGUF file. It knows nothing of the format."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from gateway.commands.model_tools.compress import run_program
from gateway.commands.terminal.options import Json, command_app
from gateway.commands.terminal.output import fail

_TEACHING: Final = """\
examples:
  hearth models import SmolLM2-135M-Instruct.Q4_1.gguf
  hearth models import qwen3-0.6b-Q4_K_M.gguf --to models/qwen3-0.6b
  hearth models add @cf/acme/assistant models/qwen3-0.6b            then serve it like any other

Read are files of the architectures llama (Llama 2 and 3, Mistral, SmolLM2 and their like), qwen2 and qwen3, with
numbers as F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K; another kind is refused by name, before
anything is written. The folder has them in bf16: what a file lost when it was made small stays lost. Tokenizer, chat
template, and the tokens that end an answer come from the file too. The folder appears when all of it is on the disk;
whatever stops this before leaves nothing of it.

It needs the package gguf: pip install 'hearth-server[gguf]'
"""
app = command_app("import", "Make a folder that is served of a GGUF file.", _TEACHING)


@app.default
def import_gguf(
    file: Annotated[Path, Parameter(metavar="FILE.gguf", help="a GGUF file; a model in several has them merged first")],
    /,
    *,
    to: Annotated[Path | None, Parameter(help="a new or empty folder (default: the file's name without .gguf)")] = None,
    json: Json = False,
) -> int:
    """Make a folder that is served of a GGUF file."""
    if importlib.util.find_spec("gguf") is None:
        install = f"{sys.executable} -m pip install 'hearth-server[gguf]'"
        return fail(f"the package gguf is not installed, which knows these files: {install}")
    target = to or file.with_suffix("")
    if target == file:
        return fail(f"{file} has no suffix to leave out: say which folder is to be made with --to")
    status = run_program("engine.gguf.convert", [str(file), str(target), *(["--json"] if json else [])])
    if status == 0 and not json:
        print(f"Serve it: `hearth models add NAME {target}`, with a name like @cf/acme/assistant")
    return status
