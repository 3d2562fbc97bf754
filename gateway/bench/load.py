"""The load of a measurement: how many requests, how long, and when. A seed repeats it exactly. It sends nothing."""

import json
import math
import random
from dataclasses import dataclass
from typing import Any, Final

_WORDS: Final = ("harbour", "lantern", "copper", "meadow", "winter", "violin", "granite", "orchard", "signal", "paper")
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_WORD_LETTERS: Final = 4
_PROMPT: Final = (227.0, 1.0, 2048)  # mean, σ and cut of what ShareGPT's prompts and answers are like
_ANSWER: Final = (188.0, 0.9, 1024)


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` clients that each send the next request when their last one ended, or, with a rate, requests that
    come so many a second on average whatever is still open.

    words, max_tokens   of each request; with `chats` both are drawn instead, lognormal as ShareGPT's.
    shared              words of a system prompt that all have in common.
    vocabulary          of a tokenizer whose words are `word`: prompts are then raw and exactly so many tokens long.
    """

    requests: int
    streams: int
    rate: float | None = None
    words: int = 40
    max_tokens: int = 64
    chats: bool = False
    shared: int = 0
    vocabulary: int | None = None
    seed: int = 0

    def lengths(self, number: int) -> tuple[int, int]:
        """Words of the prompt and tokens of the answer of a request."""
        if not self.chats:
            return self.words, self.max_tokens
        draw = random.Random(f"{self.seed} lengths {number}")
        return _lognormal(draw, *_PROMPT), _lognormal(draw, *_ANSWER)

    def body(self, number: int) -> bytes:
        """Every question differs from its first words on; the system prompt is the same for all."""
        words, max_tokens = self.lengths(number)
        draw = random.Random(f"{self.seed} words {number}")
        request: dict[str, Any]
        if self.vocabulary is not None:
            text = " ".join(word_of_id(draw.randrange(self.vocabulary)) for _ in range(words))
            request = {"prompt": text, "raw": True, "temperature": 0}
        else:
            question = f"Note {number}: " + " ".join(draw.choices(_WORDS, k=words))
            request = {"messages": [{"role": "user", "content": question}]}
            if self.shared:
                system = " ".join(_WORDS[index * 3 % len(_WORDS)] for index in range(self.shared))
                request["messages"].insert(0, {"role": "system", "content": system})
        return json.dumps({**request, "max_tokens": max_tokens, "stream": True}).encode()

    def arrivals_s(self) -> list[float]:
        """Seconds until each request is sent: a Poisson process of the rate, or all at once."""
        if self.rate is None:
            return [0.0] * self.requests
        draw, at, arrivals = random.Random(f"{self.seed} arrivals"), 0.0, []
        for _ in range(self.requests):
            at += draw.expovariate(self.rate)
            arrivals.append(at)
        return arrivals


def word_of_id(id: int) -> str:
    """The word of one token id: four letters."""
    letters = []
    for _ in range(_WORD_LETTERS):
        id, letter = divmod(id, len(_LETTERS))
        letters.append(_LETTERS[letter])
    assert not id, "more ids than words of four letters"
    return "".join(reversed(letters))


def _lognormal(draw: random.Random, mean: float, sigma: float, maximum: int) -> int:
    return min(maximum, max(2, round(draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))
