"""Lets atheris say what streams of every dialect are about, and holds what a reader finds in them against it.

`python -m tests.fuzz.fuzz_sse -max_total_time=60`; other options are libFuzzer's. It fails with the input whose stream
was read as something else, or not at all.
"""

import sys

import atheris

with atheris.instrument_imports(include=["gateway.dialects", "gateway.http.sse"]):
    from tests.fuzz.events import STREAMED, check

PATHS = sorted(STREAMED)


def one(data: bytes) -> None:
    if data:
        check(PATHS[data[0] % len(PATHS)], data[1:])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
