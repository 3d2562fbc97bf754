"""The timing gate of the prefix cache: does a request's time tell what another tenant has cached?

Over HTTP against `hearth serve` with the built-in model, n triples, each of its own random words and in random order:

    cold   a prompt that nobody ever sent
    cross  a prompt that another account has sent just before
    same   a prompt that the account itself has sent just before

It is valid only if times tell `same` from `cold` (AUC ≥ 0.95), and passes if they do not tell `cross` from `cold`: the
Mann-Whitney AUC lies in 0.45 … 0.55 and a two-sided Kolmogorov-Smirnov test gives p ≥ 0.001. What the answers say of
cached tokens is checked for every request, exactly. `--broken` is the control: a gateway in which accounts share their
prefixes, which times alone have to tell.

    python -m benchmarks.scheduling.isolation [--triples 1000] [--words 100] [--seed N] [--broken]
"""

import argparse
import random
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import exp, sqrt
from pathlib import Path
from typing import Final

import httpx

from benchmarks.record import record
from tests.end_to_end.conftest import EMBER, Hearth, serving, serving_broken

CONTROL_MIN: Final = 0.95
CROSS: Final = (0.45, 0.55)
P_MIN: Final = 0.001
BLOCK_TOKENS: Final = 16
WARM_UP: Final = 3
UNLIMITED: Final = ("--requests-per-minute", "1000000", "--neurons-per-day", "1000000000")


def auc(some: list[float], others: list[float]) -> float:
    """How often one of `some` is less than one of `others`, ties half."""
    ranked = sorted([(value, 0) for value in some] + [(value, 1) for value in others])
    wins, below, at = 0.0, 0, 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        right = sum(side for _, side in ranked[at:end])
        left = end - at - right
        wins += right * (below + left / 2)
        below, at = below + left, end
    return wins / (len(some) * len(others))


def ks_p(some: list[float], others: list[float]) -> float:
    """The two-sided p of the Kolmogorov-Smirnov test, by its asymptotic distribution as Numerical Recipes has it."""
    distance = left = right = 0.0
    for _, side in sorted([(value, 0) for value in some] + [(value, 1) for value in others]):
        left, right = left + (not side) / len(some), right + side / len(others)
        distance = max(distance, abs(left - right))
    root = sqrt(len(some) * len(others) / (len(some) + len(others)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0  # where the series hardly converges, and is 1 to twelve digits
    return min(1.0, 2 * sum((-1) ** (k - 1) * exp(-2 * (k * scaled) ** 2) for k in range(1, 101)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the times of triples tell. `control`: how often `same` was faster than `cold`, `cross` likewise; `p`: how
    likely the times of `cross` and `cold` would differ as they do where nothing is to be told."""

    control: float
    cross: float
    p: float

    @property
    def is_valid(self) -> bool:
        return self.control >= CONTROL_MIN

    @property
    def passes(self) -> bool:
        return self.is_valid and CROSS[0] <= self.cross <= CROSS[1] and self.p >= P_MIN


def judge(times: dict[str, list[float]]) -> Verdict:
    cold = times["cold"]
    return Verdict(auc(times["same"], cold), auc(times["cross"], cold), ks_p(times["cross"], cold))


class Asker:
    """One account on one connection."""

    def __init__(self, hearth: Hearth, name: str) -> None:
        account, token = hearth.account(f"{name} {secrets.token_hex(3)}", *UNLIMITED)
        self._client: httpx.Client = hearth.client(token)
        self._path = f"/client/v4/accounts/{account}/ai/run/{EMBER}"

    def ask(self, prompt: str) -> tuple[float, int, int]:
        """Seconds until the whole answer of one token is there; the prompt's tokens, and how many were cached."""
        began = time.perf_counter()
        response = self._client.post(self._path, json={"prompt": prompt, "max_tokens": 1})
        took_s = time.perf_counter() - began
        assert response.status_code == 200, response.text
        usage = response.json()["result"]["usage"]
        return took_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def measure(
    hearth: Hearth, triples: int, words: int, pick: random.Random, *, exact: bool = True
) -> dict[str, list[float]]:
    """The times of each kind of request in ms. `exact`: what they say of cached tokens is compared too."""
    tenant, stranger = Asker(hearth, "tenant"), Asker(hearth, "stranger")
    numbers = count()

    def prompt() -> str:
        """Words that nobody sent, from the first on."""
        return f"{next(numbers)} " + " ".join(str(pick.randrange(10, 100)) for _ in range(words))

    times: dict[str, list[float]] = {"cold": [], "cross": [], "same": []}
    for number in range(WARM_UP + triples):
        cold, shared, own = prompt(), prompt(), prompt()
        for kind, request in pick.sample([("cold", cold), ("cross", shared), ("same", own)], 3):
            if kind != "cold":
                (tenant if kind == "cross" else stranger).ask(request)
            took_s, tokens, cached = stranger.ask(request)
            expected = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS if kind == "same" else 0
            assert cached == expected or not exact, (
                f"{kind}: {cached} of {tokens} tokens were cached, {expected} should be"
            )
            if number >= WARM_UP:
                times[kind].append(1e3 * took_s)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triples", type=int, default=1000)
    parser.add_argument(
        "--words", type=int, default=100, help="of each prompt: the control needs prompts that take time"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--broken", action="store_true", help="accounts share prefixes; nothing is recorded")
    options = parser.parse_args()
    print("seed", options.seed)
    start = partial(serving_broken, "tenants-share-prefixes") if options.broken else serving
    with tempfile.TemporaryDirectory(dir="/tmp") as name, start(Path(name)) as hearth:
        pick = random.Random(options.seed)
        times = measure(hearth, options.triples, options.words, pick, exact=not options.broken)
    for kind, times_ms in times.items():
        print(f"    {kind:6} median {statistics.median(times_ms):.3f} ms")
    verdict = judge(times)
    if options.broken:
        print(verdict)
        return int(verdict.passes)
    shape = f"{options.triples} triples: "
    record("isolation", shape + "same before cold, AUC (at least)", verdict.control, "", bound=CONTROL_MIN)
    record("isolation", shape + "cross before cold, AUC (0.45 to 0.55)", verdict.cross, "", bound=0.5)
    record("isolation", shape + "cross and cold, two-sided KS p (at least)", verdict.p, "", bound=P_MIN)
    if not verdict.is_valid:
        print("not valid: times do not tell hits from misses; take more words, or a quieter machine")
    return int(not verdict.passes)


if __name__ == "__main__":
    sys.exit(main())
