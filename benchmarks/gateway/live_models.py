"""Models added to a running Hearth under streams and short calls: how long until one is served, and what that costs
the callers of others.

    python -m benchmarks.gateway.live_models [--rounds 5] [--quiet]

Each round adds the built-in model's folder under another name by `hearth models add` and takes it out again, while 16
streams and a closed loop of short calls run (with --quiet nothing runs: the figure of a host that is not busy). Counted
is from the command's end to the first answer of the new model, without what its replica says that loading took.
"""

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from benchmarks.record import record
from gateway.catalogue.catalogue import BUILT_IN, folder_of
from gateway.cli import main as hearth_command
from gateway.settings.config import Config, ModelEntryConfig
from tests.end_to_end.conftest import Hearth, serving
from tests.support.live_traffic import traffic
from tests.support.waiting import wait_for

_NAME: Final = "@cf/bench/live"


def _served_after_s(client: httpx.Client) -> float:
    """Seconds until the model answers a prompt. It does not count what nobody could call it by before."""
    began = time.monotonic()

    def answers() -> bool:
        return client.post(f"/ai/run/{_NAME}", json={"prompt": "Hello", "max_tokens": 1}).status_code == 200

    wait_for(answers, 120)
    return time.monotonic() - began


def _loaded_s(hearth: Hearth) -> float:
    """What the last replica that was started says that loading took."""
    text = (hearth.folder / ".hearth" / "machine.log").read_text()
    return float(re.findall(rf'"loaded", "model": "{_NAME}", "seconds": ([0-9.]+)', text)[-1])


def _round(hearth: Hearth, client: httpx.Client, folder: Path) -> float:
    """Adds the model and takes it out again; the seconds beside loading."""
    assert hearth_command(["models", "add", _NAME, str(folder), "--untried"]) == 0
    seconds = _served_after_s(client)
    beside_s = seconds - _loaded_s(hearth)
    assert hearth_command(["models", "remove", _NAME, "--wait"]) == 0
    print(f"served after {seconds:.2f} s, {beside_s:.2f} s beside loading")
    return beside_s


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(argv)
    folder = folder_of(Config(), ModelEntryConfig(name=BUILT_IN))
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as running:
        running.enter_context(contextlib.chdir(temporary))
        hearth = running.enter_context(serving(Path(temporary)))
        client = running.enter_context(hearth.client())
        calls = None
        if not options.quiet:
            calls = running.enter_context(traffic(hearth.base_url, hearth.token, BUILT_IN, _NAME))
        rounds = [_round(hearth, client, folder) for _ in range(options.rounds)]
    how = "nothing else runs" if calls is None else "16 streams and a closed loop"
    record(
        "first_hour", f"first-live-add: until served, beside loading; {how}", statistics.median(rounds), "s", bound=2.0
    )
    if calls is not None:
        record("first_hour", "first-live-add: refused connections", calls.refused, "connections", bound=0.0)
        record("first_hour", "first-live-add: cut streams and failed calls", len(calls.cut), "calls", bound=0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
