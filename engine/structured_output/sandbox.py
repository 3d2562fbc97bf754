"""Tries grammars in a process of its own, where they may take too long or too much: no thread could be stopped.

    python -m engine.structured_output.sandbox FOLDER SECONDS BYTES

reads one Lark text after the other and answers each with what is wrong with it, or nothing. Each is tried by a fork
that ends with it, and with its memory. The program knows no masks.
"""

import gc
import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, Final

import llguidance

from engine.process.supervised import die_with_parent
from engine.structured_output.llguidance_backend import open_matcher, open_tokenizer

SANDBOX_TIME_S: Final = 0.5  # of a processor
SANDBOX_MEMORY_BYTES: Final = 512 << 20  # beside the tokenizer
_LENGTH: Final = struct.Struct(">I")
_END_STATUS: Final = 3  # of a fork that found the end of its input,
_TOO_MUCH_STATUS: Final = 4  # and of one that found no memory


class SandboxGone(Exception):
    """The process that tries grammars is gone."""


class GrammarSandbox:
    """The process, to be used by one thread."""

    def __init__(self, folder: Path, time_s: float = SANDBOX_TIME_S, memory_bytes: int = SANDBOX_MEMORY_BYTES) -> None:
        """Starts the process with the tokenizer of a model's folder."""
        command = [sys.executable, "-m", "engine.structured_output.sandbox", str(folder.absolute())]
        command += [str(time_s), str(memory_bytes)]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def check(self, lark: str) -> str:
        """What is wrong with the grammar, or nothing. Raises SandboxGone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _send(self._process.stdin, lark)
            problem = _receive(self._process.stdout)
        except OSError as error:
            raise SandboxGone(str(error)) from error
        if problem is None:
            raise SandboxGone("it has ended")
        return problem

    def end(self) -> None:
        """Ends the process, from any thread; a `check` that waits raises SandboxGone."""
        self._process.kill()
        self._process.wait()


def _send(stream: IO[bytes], text: str) -> None:
    encoded = text.encode()
    stream.write(_LENGTH.pack(len(encoded)) + encoded)
    stream.flush()


def _receive(stream: IO[bytes]) -> str | None:
    """None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    return stream.read(length).decode()


def main(folder: str, time_s: float, memory_bytes: int) -> int:
    tokenizer = open_tokenizer(Path(folder))
    try:
        address_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory_bytes
    except OSError:  # only Linux has it, and only there it is a limit
        address_bytes = resource.RLIM_INFINITY
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its replica
    die = die_with_parent(os.getpid())
    while True:
        fork = os.fork()
        if fork == 0:
            die()  # or it would answer once for a parent that is gone
            _try_one(tokenizer, time_s, address_bytes)
        _, status = os.waitpid(fork, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _END_STATUS:
            return 0
        if status != 0:
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            limit = f"{time_s:g} s" if late else f"{memory_bytes >> 20} MB"
            _send(sys.stdout.buffer, f"it takes more than {limit} to compile")


def _try_one(tokenizer: llguidance.LLTokenizer, time_s: float, address_bytes: int) -> None:
    """Runs one fork, and ends it."""
    status = _TOO_MUCH_STATUS
    try:
        lark = _receive(sys.stdin.buffer)
        if lark is None:
            status = _END_STATUS
            return
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # messages about its end may quote the text
        resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
        signal.setitimer(signal.ITIMER_PROF, time_s)  # it ends the process then, whatever that does
        problem = open_matcher(tokenizer, lark).get_error()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sys.stdout.buffer, problem)
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
