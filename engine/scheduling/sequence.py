"""The one record that changes while a request runs: its tokens, its KV blocks and how far it has come.

It also opens the door: a `Submit` becomes sequences here or is refused. It decides nothing about when they run.
"""

import enum
import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from engine.protocol.types import Pooling, SamplingParams, SchedulingTerms
from engine.scheduling.block_pool import Pages
from engine.scheduling.fair_queue import AccountQueue
from engine.step.layout import Int32s
from prefixcache.namespace import CacheShare, Namespace, RetentionPolicy
from prefixcache.tree import Lease

CHOICES_MAX: Final = 128
STOP_IDS_MAX: Final = 64
BIASES_MAX: Final = 300
LOGPROBS_MAX: Final = 20
SCOPE_BYTES: Final = 16
WEIGHT_RANGE: Final = (0.001, 1000.0)
DEFAULT_TERMS: Final = SchedulingTerms()
UNLIMITED_SHARE: Final = CacheShare()
ANONYMOUS_POLICY: Final = RetentionPolicy(b"")
_SEEDS: Final = 1 << 63
_IDS_MAX: Final = 1 << 62


class SequenceState(enum.IntEnum):
    """A sequence waits, runs, and may be preempted (wait and run again) any number of times; it ends once."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2


class GrammarMatcher(Protocol):
    """Keeps one text to its grammar. `over`: only its end may follow."""

    over: bool

    def accept(self, token: int) -> str:
        """Takes what was sampled for it. What is wrong, where it cannot go on, or nothing."""
        ...


class GrammarCompilation(Protocol):
    """A grammar that becomes matchers once it is `done`."""

    done: bool

    def matcher(self, stop_ids: frozenset[int]) -> GrammarMatcher:
        """One for a text that these tokens end. Raises Refused where it could not be compiled."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request. `owner` and `id` name it to whoever submitted it.

    tokens[:computed] have their KV written in pages[:blocks], whose blocks are table[:blocks]: the first `public` of
    them are published, those up to `shared` belong to the prefix tree and are pinned by `lease`, the rest to this
    sequence alone. The next token is sampled by the step that computes the last of `tokens`. It ends by length when
    `tokens` reaches `tokens_max`.

        0 ≤ computed ≤ launched ≤ len(tokens) + 1

    The flights in the air that it is in compute positions computed … launched−1. Where all of `tokens` are launched,
    the next one is being sampled by the newest of them, in row `row`, and may be launched before anybody knows it.
    """

    owner: int
    id: int
    account: bytes  # whose turn it takes among those that wait
    namespace: Namespace | None  # None: shares with nobody and never touches the tree
    tokens: "array[int]"  # u32: prompt, then output
    prompt_tokens: int
    tokens_max: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    arrived_s: float
    terms: SchedulingTerms = DEFAULT_TERMS
    pooling: Pooling | None = None  # its prompt is to become a vector, and nothing is written
    keep: RetentionPolicy = ANONYMOUS_POLICY  # for whom and how long the tree keeps what it leaves
    first: int = 0  # the id of choice 0 of its request,
    choices: int = 1  # and how many there are
    deadline_s: float = math.inf  # when nothing of its request has started by then, nothing will

    compilation: GrammarCompilation | None = None  # of its grammar, without which it does not start
    matcher: GrammarMatcher | None = None

    stage: SequenceState = SequenceState.WAITING
    ticket: int = -1  # the order of first admission; of one account's the highest is preempted first
    standing: "AccountQueue[Sequence]" = field(
        default_factory=AccountQueue
    )  # its account's, once a scheduler has taken it in
    counted: int = 0  # tokens of its prompt that its account was charged for, or that were found in the cache
    spared: int = 0  # tokens of its prompt that were found when it first started
    behind: "tuple[Sequence, int] | None" = None  # who computes a prefix of it first, and how many blocks that is
    flying: int = 0  # flights in the air that it is in
    computed: int = 0
    launched: int = 0
    row: int = -1
    sound: int = 0  # tokens sampled from finite numbers, each from all the KV that its table now names
    lease: Lease | None = None
    public: int = 0
    shared: int = 0
    blocks: int = 0
    pages: Pages = field(default_factory=lambda: np.empty(0, np.int64))
    table: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # the low halves of `pages`, in their memory

    @property
    def pending(self) -> int:
        """Known tokens that no step computes yet; the next one is sampled by the step that computes the last."""
        return len(self.tokens) - self.launched

    @property
    def launchable(self) -> bool:
        """Whether a step can compute more of it: never the last token, after which nothing is sampled."""
        return self.launched + 1 < self.tokens_max

    @property
    def background(self) -> bool:
        return self.terms.background

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def penalized(self) -> bool:
        """Whether sampling looks at the tokens so far."""
        sampling = self.sampling
        return (
            sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        )

    def grow(self, pages: Items[int]) -> None:
        """Appends private pages to the table, which keeps room for later ones."""
        wanted = self.blocks + len(pages)
        if wanted > len(self.pages):
            grown = np.zeros(max(wanted, 2 * len(self.pages), 8), np.int64)
            grown[: self.blocks] = self.pages[: self.blocks]
            self.pages, self.table = grown, grown.view("<i4")[::2]
        self.pages[self.blocks : wanted] = pages
        self.blocks = wanted

    def held(self) -> list[int]:
        """The pages that it reads, or will."""
        held: list[int] = self.pages[: self.blocks].tolist()
        return held

    def private(self) -> list[int]:
        """The pages that no one else holds."""
        return self.held()[self.shared :]

    def rewind(self) -> None:
        """Forgets all KV: it has to be matched or computed again. The blocks are the caller's to free before."""
        self.computed = self.launched = self.public = self.shared = self.blocks = 0
        self.sound = 0
        self.lease = None
