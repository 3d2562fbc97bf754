"""Seconds from a fresh clone to the first token of the first call that is pasted, with pip's downloads cached.

    python -m benchmarks.gateway.first_answer

It clones this checkout's last commit, runs `make serve` in the clone as a newcomer does, with pip's cache filled by a
first run that is not counted, and sends the first call as soon as the server listens. It measures no downloads.
"""

import argparse
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import httpx

from benchmarks.record import record

ROOT: Final = Path(__file__).parents[2]
BOUND_S: Final = 30.0
DEADLINE_S: Final = 1200.0


def first_answer_s(folder: Path) -> dict[str, float]:
    """Seconds since the clone began at which it was installed, listened, and gave its first token."""
    began = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(folder)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reached: dict[str, float] = {}
    with (folder / "serve.out").open("w") as out:
        command = ["make", "serve", f"PORT={port}"]
        serve = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        credentials = folder / ".hearth" / "credentials.json"
        while "listens" not in reached:
            assert serve.poll() is None, (folder / "serve.out").read_text()[-2000:]
            assert time.monotonic() - began < DEADLINE_S, "it took too long"
            if "installed" not in reached and (folder / ".venv" / ".serve").exists():
                reached["installed"] = time.monotonic() - began
            try:
                if credentials.exists() and httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=2).is_success:
                    reached["listens"] = time.monotonic() - began
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        reached["first token"] = _first_token(folder, port, began)
    finally:
        os.killpg(serve.pid, signal.SIGINT)
        serve.wait(60)
    return reached


def _first_token(folder: Path, port: int, began: float) -> float:
    """When the first piece of text came. A call that waited in vain for its model is sent again, as its error says."""
    token = httpx.Response(200, content=(folder / ".hearth" / "credentials.json").read_bytes()).json()["token"]
    body = {"prompt": "Hello! Who are you?", "stream": True}
    headers = {"Authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{port}/ai/run/@cf/hearth/ember"
    while True:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith('data: {"response":"') and not line.startswith('data: {"response":""'):
                    return time.monotonic() - began
        assert time.monotonic() - began < DEADLINE_S, "no text came"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", action="store_true", help="pip's cache is filled: skip the run that fills it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not options.warm:
            first_answer_s(Path(folder, "cold"))
        reached = first_answer_s(Path(folder, "clone"))
    print(", ".join(f"{name} after {seconds:.1f} s" for name, seconds in reached.items()))
    for name, seconds in reached.items():
        shape = "first-answer" if name == "first token" else f"first-answer: {name}"
        record("first_hour", shape, round(seconds, 1), "s", bound=BOUND_S if name == "first token" else None)


if __name__ == "__main__":
    main()
