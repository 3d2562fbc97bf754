"""The control tokens that a tokenizer puts around a text, or around two, as an encoder was trained with them.

Encoding a probe finds them, so that every kind of post-processor of tokenizer.json is understood. It knows no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tokenizers import Tokenizer

_PROBE = "a"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`lead` and `tail` stand around a text; `pair_lead`, `between` and `pair_tail` around two."""

    lead: tuple[int, ...]
    tail: tuple[int, ...]
    pair_lead: tuple[int, ...]
    between: tuple[int, ...]
    pair_tail: tuple[int, ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """Finds them by encoding one letter, and a pair of letters."""
        probe = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        lead, tail = _cut(tokenizer.encode(_PROBE).ids, probe)
        pair_lead, rest = _cut(tokenizer.encode(_PROBE, _PROBE).ids, probe)
        return cls(lead, tail, pair_lead, *_cut(rest, probe))

    @property
    def count(self) -> int:
        """How many tokens stand around a text."""
        return len(self.lead) + len(self.tail)

    @property
    def pair_count(self) -> int:
        """How many tokens stand around a pair."""
        return len(self.pair_lead) + len(self.between) + len(self.pair_tail)

    def single(self, ids: Sequence[int]) -> list[int]:
        return [*self.lead, *ids, *self.tail]

    def pair(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        return [*self.pair_lead, *first, *self.between, *second, *self.pair_tail]


def _cut(ids: Sequence[int], probe: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and behind the probe; nothing where the probe is missing."""
    for start in range(len(ids) - len(probe) + 1):
        if list(ids[start : start + len(probe)]) == list(probe):
            return tuple(ids[:start]), tuple(ids[start + len(probe) :])
    return (), ()
