"""What prompts and decodes take in this replica's steps, learned from the steps as they land. It plans nothing: others
choose by it where a prompt is computed. It knows counts and times, not texts.

    step = fixed + decode · sequences that generate + row · tokens of prompts + pair · keys that those see

by least squares of what is wrong relative to the step, none of the four below 0; older steps count less. Steps with
prompts and steps without are forgotten apart: thousands of the ones do not blur what the others told.
"""

from collections.abc import Sequence as Items
from typing import Final

from engine.sequences.sequence import Sequence

_KEPT: Final = 0.98  # of what earlier steps of their kind count for, when another one lands
_CHUNK_KEPT: Final = 0.95
_OUTLIER: Final = 4.0  # a step counts as at most so many times as long as was expected
_SURE: Final = 16  # steps after which something is expected
_RIDGE: Final = 1e-9  # of each square, so that what never varied apart has a solution
_TERMS: Final = 4


class StepCosts:
    """The costs of one replica's steps.

    chunk_tokens  of prompts in a step, the most of the last ones.
    prompts_us    of all steps, for prompts; steps_us: all of it. Both only grow.
    """

    def __init__(self) -> None:
        self.chunk_tokens = 0.0
        self.prompts_us = self.steps_us = 0.0
        self._kinds = ([0.0] * (_TERMS * (_TERMS + 1)), [0.0] * (_TERMS * (_TERMS + 1)))
        self._count = 0
        self._solved: tuple[float, float, float, float] | None = None

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """(fixed, decode, row, pair) in µs; row is 0 where no prompt was computed. About 20 µs after a step."""
        if self._solved is None:
            sums = [one + other for one, other in zip(*self._kinds, strict=True)]
            fixed, decode, row, pair = _non_negative(sums)
            self._solved = (fixed, decode, row, pair) if self.chunk_tokens else (fixed, decode, 0.0, 0.0)
        return self._solved

    def observe(self, sequences: Items[Sequence], chunks: Items[int], took_us: float) -> None:
        """Notes a step in which each of these computed its chunk, before that counts as computed."""
        decoding, prompt_rows, pairs = len(chunks), 0, 0
        if sum(chunks) > decoding:
            for sequence, chunk in zip(sequences, chunks, strict=True):
                if chunk > 1:
                    decoding -= 1
                    prompt_rows += chunk
                    pairs += chunk * sequence.computed + chunk * (chunk + 1) // 2
        self.add(decoding, prompt_rows, pairs, took_us)

    def add(self, decoding: int, prompt_rows: int, pairs: int, took_us: float) -> None:
        """Notes a step by its counts."""
        self._count += 1
        if prompt_rows:
            fixed, decode, row, pair = self.costs
            rows_us, rest_us = row * prompt_rows + pair * pairs, fixed + decode * decoding
            self.chunk_tokens = max(prompt_rows, _CHUNK_KEPT * self.chunk_tokens + (1 - _CHUNK_KEPT) * prompt_rows)
            self.prompts_us += took_us * (rows_us / (rows_us + rest_us) if rows_us else 1.0)
            if self._count > _SURE and rows_us:
                took_us = min(took_us, _OUTLIER * (rows_us + rest_us))
        self.steps_us += took_us
        self._sum(self._kinds[prompt_rows > 0], (1.0, decoding, prompt_rows, pairs), took_us)
        self._solved = None

    def _sum(self, sums: list[float], terms: tuple[float, ...], took_us: float) -> None:
        weight = 1.0 / max(took_us, 1.0) ** 2
        at = 0
        for term in terms:
            scaled = weight * term
            for other in (*terms, took_us):
                sums[at] = _KEPT * sums[at] + scaled * other
                at += 1


def _non_negative(sums: list[float]) -> tuple[float, ...]:
    """The solution of the normal equations whose rows lie one behind the other, each with its right side last. A term
    that would be below 0, or was never there, is 0, and the others are solved without it."""
    rows = [sums[at : at + _TERMS + 1] for at in range(0, len(sums), _TERMS + 1)]
    terms = [term for term in range(_TERMS) if rows[term][term] > 0]
    while terms:
        solved = _solve([[rows[term][other] for other in (*terms, _TERMS)] for term in terms])
        least = min(range(len(terms)), key=lambda at: solved[at] * rows[terms[at]][terms[at]] ** 0.5)
        if solved[least] >= 0:
            found = dict(zip(terms, solved, strict=True))
            return tuple(found.get(term, 0.0) for term in range(_TERMS))
        del terms[least]
    return (0.0,) * _TERMS


def _solve(rows: list[list[float]]) -> list[float]:
    """Solves symmetric, positive equations by elimination, in units in which each square is 1."""
    count = len(rows)
    scales = [rows[at][at] ** -0.5 for at in range(count)]
    rows = [
        [value * scales[at] * scale for value, scale in zip(row, (*scales, 1.0), strict=True)]
        for at, row in enumerate(rows)
    ]
    for at in range(count):
        rows[at][at] += _RIDGE
    for at in range(count):
        for below in range(at + 1, count):
            part = rows[below][at] / rows[at][at]
            rows[below] = [value - part * above for value, above in zip(rows[below], rows[at], strict=True)]
    solved = [0.0] * count
    for at in reversed(range(count)):
        known = sum(rows[at][other] * solved[other] for other in range(at + 1, count))
        solved[at] = (rows[at][count] - known) / rows[at][at]
    return [value * scale for value, scale in zip(solved, scales, strict=True)]
