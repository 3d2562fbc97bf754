"""Lets atheris write bodies for every dialect, and query strings with them.

`python -m tests.fuzz.fuzz_body -max_total_time=60`; other options are libFuzzer's. It fails with the input that made
anything else of it than a request or a refusal.
"""

import sys

import atheris

with atheris.instrument_imports(include=["gateway.api", "gateway.http.json_body", "gateway.inference.run_options"]):
    from tests.fuzz.bodies import made, read


def one(data: bytes) -> None:
    read(*made(data))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
