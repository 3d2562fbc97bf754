"""Where a prompt is computed: at the replica that answers, or at one that hands its KV over to it. A pure decision by
what replicas say of their steps; it knows no connections and no clock.

A place costs the seconds until the call generates where it is to, and those by which it holds up each sequence that
generates meanwhile, there and at the replica that answers. The cheapest is chosen as far as costs are known.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.protocol.types import PrefillLoad

WORTH_MOVING: Final = 0.98  # of what it costs where it answers: a move that gains less is none
COPY_BYTES_S: Final = 4e9  # of KV between two places of memory, while nobody there generates


class PrefillReason(enum.StrEnum):
    """Why a prompt is computed where it is."""

    LOCAL = "local"  # nothing is sooner done elsewhere
    REMOTE = "remote"
    LEARN = "learn"  # elsewhere, since nobody knows yet what that takes


@dataclass(frozen=True, slots=True)
class PrefillSite:
    """A replica that could compute a prompt of which it has `cached_tokens`.

    load      as it was age_s ago; since then queued_prompts were sent, of so many queued_tokens, with the keys that
              those see; coming_s: in how many seconds each sequence comes to it that is computed elsewhere.
    bytes_s   KV travels at from there to the replica that answers, 0: nobody knows; and resume_s after it came the
              first token does.
    untried   nobody has tried of late what it takes.
    """

    load: PrefillLoad
    age_s: float = 0.0
    cached_tokens: float = 0.0
    queued_prompts: int = 0
    queued_tokens: int = 0
    queued_keys: float = 0.0
    coming_s: tuple[float, ...] = ()
    bytes_s: float = 0.0
    resume_s: float = 0.0
    untried: bool = False

    @property
    def known(self) -> bool:
        return self.load.row_us > 0

    @property
    def waiting_prompts(self) -> int:
        return self.load.prompts + self.queued_prompts

    def compute_s(self, tokens: int) -> float:
        """Until a prompt is computed, behind all that is there already, some of which was computed meanwhile."""
        load, fresh = self.load, self._fresh(tokens)
        before_s = self.steps_s(load.pending_tokens, load.pending_keys)
        rows = load.pending_tokens + self.queued_tokens + fresh
        keys = load.pending_keys + self.queued_keys + _keys(tokens - fresh, fresh)
        return self.steps_s(rows, keys) - min(self.age_s, before_s)

    def alone_s(self, tokens: int) -> float:
        """A prompt takes, with nothing before it."""
        fresh = self._fresh(tokens)
        return self.steps_s(fresh, _keys(tokens - fresh, fresh))

    def held_up_s(self, tokens: int, decoding: float) -> float:
        """By which a prompt holds up so many sequences together that generate there: each goes on once a step, and
        steps are longer by so much."""
        load, fresh = self.load, self._fresh(tokens)
        return decoding * (load.row_us * fresh + load.pair_us * _keys(tokens - fresh, fresh)) / 1e6

    def steps_s(self, rows: float, keys: float) -> float:
        """Steps take that compute so many tokens of prompts, which see so many keys."""
        load = self.load
        steps = math.ceil(rows / max(1.0, load.chunk_tokens))
        step_us = load.fixed_us + load.decode_us * load.decoding
        return (steps * step_us + load.row_us * rows + load.pair_us * keys) / 1e6

    def _fresh(self, tokens: int) -> float:
        """The tokens that are not cached: the last one never counts as such."""
        return max(1.0, tokens - self.cached_tokens)


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """`site` is an index among those asked about, None: where it answers. Costs are in seconds, inf: not known; so
    many after the choice the sequence comes to where it is answered."""

    reason: PrefillReason
    site: int | None
    local_s: float
    remote_s: float
    arrives_s: float = 0.0


def choose_prefill(answers: PrefillSite, sites: Sequence[PrefillSite], tokens: int, copies: int = 1) -> PrefillChoice:
    """Where a prompt of so many tokens is computed that `answers` is to go on with, in so many completions. A site of
    which nothing is known is tried once while nothing waits there; what the replica itself takes it learns first."""
    local_s = local_cost(answers, tokens) if answers.known else math.inf
    costs = [remote_cost(site, answers, tokens, copies) for site in sites]
    best = min(range(len(sites)), key=costs.__getitem__, default=None)
    remote_s = math.inf if best is None else costs[best]
    if answers.known:
        for index, site in enumerate(sites):
            if costs[index] == math.inf and site.untried and not site.waiting_prompts:
                return PrefillChoice(PrefillReason.LEARN, index, local_s, remote_s)
        if remote_s < WORTH_MOVING * local_s:
            assert best is not None
            arrives_s = arrival_s(sites[best], tokens, copies)
            return PrefillChoice(PrefillReason.REMOTE, best, local_s, remote_s, arrives_s)
    return PrefillChoice(PrefillReason.LOCAL, None, local_s, remote_s)


def local_cost(answers: PrefillSite, tokens: int) -> float:
    """Seconds that it costs to compute a prompt where it is answered. Prompts before it generate by then."""
    compute_s, alone_s = answers.compute_s(tokens), answers.alone_s(tokens)
    coming = sum(_part_after(come_s, compute_s, alone_s) for come_s in answers.coming_s)
    generating = answers.load.decoding + answers.waiting_prompts + coming
    return compute_s + answers.held_up_s(tokens, generating)


def remote_cost(site: PrefillSite, answers: PrefillSite, tokens: int, copies: int = 1) -> float:
    """Seconds that it costs elsewhere; inf while it is not known. What comes is copied between two steps of the replica
    that answers."""
    if not site.known or not site.bytes_s:
        return math.inf
    copies_s = answers.load.decoding * site.load.token_bytes * tokens * copies / COPY_BYTES_S
    held_up_s = site.held_up_s(tokens, _staying(site, tokens))
    return arrival_s(site, tokens, copies) + site.resume_s + held_up_s + copies_s


def arrival_s(site: PrefillSite, tokens: int, copies: int) -> float:
    """Until a prompt is computed there and its KV has travelled, each step's behind that step and behind that of
    prompts before it."""
    load, compute_s, chunk = site.load, site.compute_s(tokens), site.load.chunk_tokens
    token_s = load.token_bytes / site.bytes_s
    pending_s = site.steps_s(load.pending_tokens, load.pending_keys)
    first_s = 0.0 if load.unsent_tokens else site.steps_s(min(load.pending_tokens, chunk), 0.0)
    before_s = max(
        first_s + token_s * (load.unsent_tokens + load.pending_tokens),
        pending_s + token_s * min(load.pending_tokens, chunk),
    )
    begins_s = compute_s - site.alone_s(tokens) + site.steps_s(min(tokens, chunk), 0.0)
    link_s = max(before_s - site.age_s, begins_s) + token_s * (tokens * copies + site.queued_tokens)
    return max(link_s, compute_s + token_s * min(tokens, chunk) * copies)


def _staying(site: PrefillSite, tokens: int) -> float:
    """How many sequences generate at a site, on average, while a prompt is computed there: those that leave do so once
    their KV is sent."""
    load = site.load
    gone_s = load.token_bytes * load.unsent_tokens / site.bytes_s - site.age_s
    return load.decoding - load.leaving * _part_after(gone_s, site.compute_s(tokens), site.alone_s(tokens))


def _part_after(at_s: float, end_s: float, length_s: float) -> float:
    """The part of a time of this length and with this end that is behind a moment."""
    return min(1.0, max(0.0, (end_s - at_s) / length_s))


def _keys(seen: float, fresh: float) -> float:
    """Keys that so many tokens see behind others, each its own included."""
    return fresh * (seen + (fresh + 1) / 2)
