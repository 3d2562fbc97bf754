"""Prepares what starts of a model take over: opens it as a replica would, and ends. It serves no requests.

    python -m engine.execution.warmup '<ModelSpec JSON>' DEVICE [look]

With `look` nothing is opened. A line of JSON on stdout says what is kept; what went wrong is the last one on stderr,
with exit status 1.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

import msgspec

from engine.execution.open import inference_mode, model_artifacts, open_model
from engine.log import log
from engine.protocol.reports import WarmupReport
from engine.protocol.specs import ModelSpec

_BEAT_S: Final = 1.0


def warm_up(model: ModelSpec, device: str, opening: bool) -> WarmupReport:
    """Opens the model, or only looks for what a start takes over. Raises as open_model."""
    began = time.monotonic()
    artifacts = model_artifacts(model, device)
    if artifacts is None:
        return WarmupReport(needed=False, found=False, seconds=0.0)
    found = artifacts.read() is not None
    if opening:
        with closing(open_model(model, device, None, _beats())) as opened:
            while opened.executor.warm_up():
                pass
        artifacts.spread()  # what another model of the same sizes has left is to lie beside this one, too
    files = [str(file) for file in artifacts.files if file.exists()] if found or opening else []
    return WarmupReport(needed=True, found=found, seconds=time.monotonic() - began, files=files)


def _beats() -> Callable[[], None]:
    """Returns a beat that logs now and then that the start goes on."""
    logged_at = time.monotonic()

    def beat() -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at >= _BEAT_S:
            logged_at = time.monotonic()
            log("preparing")

    return beat


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model = msgspec.json.decode(argv[0], type=ModelSpec)
    try:
        with inference_mode():
            warmed = warm_up(model, argv[1], opening=argv[2:] != ["look"])
    except (ValueError, RuntimeError, OSError) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 1
    print(msgspec.json.encode(warmed).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
