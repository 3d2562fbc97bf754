"""The one record that changes while a request runs: its tokens, its KV blocks and how far it has come. It decides
nothing about when it runs.
"""

import enum
import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.handover.staging import StagedPrefix
from engine.protocol.types import FinishReason, Pooling, SamplingParams, SchedulingTerms
from engine.sequences.fair_queue import GENERATED_TOKEN, PROMPT_TOKEN, AccountQueue
from engine.step.layout import Int32s, Pages
from prefixcache.lease import Lease
from prefixcache.namespace import Namespace, RetentionPolicy

Ending = tuple[FinishReason, str]  # why a text ends, and what is wrong with it if something is
FORCED_MAX: Final = 16  # tokens that are appended at once because nothing else may follow
DEFAULT_TERMS: Final = SchedulingTerms()
ANONYMOUS_POLICY: Final = RetentionPolicy(b"")


class SequenceState(enum.IntEnum):
    """A sequence waits, runs, and may be preempted (wait and run again) any number of times; it ends once."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2


class FetchState(enum.IntEnum):
    """Blocks of its prompt were not asked of the disk yet, are awaited from there, or were asked for, once."""

    NONE = 0
    WAITING = 1
    DONE = 2


class GrammarMatcher(Protocol):
    """Keeps one text to its grammar.

    finished    only the end of the text may follow.
    mask_us     its part of how long the last masks took together, and what came with it: about what its next one will.
    """

    finished: bool
    mask_us: float

    def accept(self, token: int) -> str:
        """Takes the text's next token. Returns what is wrong where it cannot go on, or nothing."""

    def forced(self, tokens: "array[int]") -> list[int]:
        """At most FORCED_MAX tokens that the text goes on with whatever is sampled, as the tokenizer writes them behind
        `tokens`, which end in those accepted; they are not accepted by that."""


class GrammarCompilation(Protocol):
    """A grammar on its way to matchers, which it gives once it is `done`."""

    done: bool

    def new_matcher(self, stop_ids: frozenset[int], given: Items[int] = ()) -> GrammarMatcher:
        """A matcher for a text that begins with the tokens `given`, and that `stop_ids` end. Raises SubmitRejected
        where the grammar could not be compiled, or allows no text that goes on behind these tokens."""


@dataclass(slots=True)
class WindowTable:
    """What a sequence has of a windowed KV group: pages for its blocks first … first+len(pages)−1."""

    first: int
    pages: Pages

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


@dataclass(slots=True, eq=False)
class PromptImage:
    """An image of a prompt, which is its tokens first … first+tokens−1; a request's choices have it in common.

    token    the id that stands for it where only ids can.
    pixels   none any more once it is encoded; `size` is how many bytes there were.
    rows_NH  what the decoder takes in place of its embeddings, once it is encoded.
    ordered  it is to be encoded, or is.
    users    how many sequences have it that have not ended.
    """

    first: int
    tokens: int
    token: int
    pixels: bytes
    size: int
    rows_NH: NDArray[np.float32] | None = None
    ordered: bool = False
    users: int = 0

    @property
    def end(self) -> int:
        return self.first + self.tokens


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One choice of one request. `owner` and `id` name it to whoever submitted it.

    tokens[:computed] have their KV written in pages[:block_count], whose blocks are table[:block_count]: the first
    `public_blocks` of them are public, those up to `shared_blocks` belong to the prefix tree and are pinned by `lease`,
    the rest to this sequence alone. While it runs, `window_tables` name what it has of layers that see only near keys,
    one for each group of them. The next token is sampled by the step that computes the last of `tokens`. The
    sequence ends by length when `tokens` reaches `max_total_tokens`.

        0 ≤ computed ≤ launched ≤ len(tokens) + 1

    Its steps in flight compute positions computed … launched−1. Where all of `tokens` are launched, the newest of these
    steps samples the next one, in row `sampled_row`, and that token may be launched before it is known.
    """

    owner: int
    id: int
    account: bytes  # whose turn it takes among waiting ones
    namespace: Namespace | None  # None: it shares with nobody and never touches the tree
    tokens: "array[int]"  # u32: prompt, then output
    prompt_tokens: int
    max_total_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]  # end the text
    arrived_s: float
    terms: SchedulingTerms = DEFAULT_TERMS
    pooling: Pooling | None = None  # how its prompt becomes a vector; no tokens are generated then
    retention: RetentionPolicy = ANONYMOUS_POLICY  # for whom and how long the tree keeps its blocks
    early_sampling: SamplingParams | None = None  # of its first `min_tokens`, where it has such: none of them ends it
    first_id: int = 0  # the id of choice 0 of its request,
    choices: int = 1  # and how many there are
    deadline_s: float = math.inf  # its request is rejected if no choice has started by then
    images: Items[PromptImage] = ()  # of its prompt, in their order; `tokens` has elements in their places
    regions: Items[str] = ()  # where alone it may be computed; empty: anywhere

    staged: StagedPrefix | None = None  # its first blocks, as another replica computed them, until it starts
    compilation: GrammarCompilation | None = None  # of its grammar, before which it does not start
    matcher: GrammarMatcher | None = None

    state: SequenceState = SequenceState.WAITING
    fetch: FetchState = FetchState.NONE
    row_turn: int = 0  # rises with each step in which it had a row of those that there was time for, see step_time.py
    start_order: int = -1  # when it first started, counted; the highest of an account is preempted first
    account_queue: "AccountQueue[Sequence]" = field(default_factory=AccountQueue)  # set when it is queued
    charged_tokens: int = 0  # of its prompt: its account was charged for them, or they were cached
    cached_tokens: int = 0  # of its prompt: found when it first started
    passed: int = 0  # how many later ones of its account started before it, while it could have
    prefix_source: "tuple[Sequence, int] | None" = None  # which sequence computes a prefix of it, of how many blocks
    inflight_steps: int = 0  # that read or write its blocks, a load from the host counted as one
    stop_at: int | None = None  # steps compute no token from this one on: it is about to go on elsewhere
    chunk_limit: int | None = None  # a step computes no more of its prompt: what it computed leaves meanwhile
    loading_blocks: int = 0  # behind its computed tokens, on their way from the host: it is in no step until then
    computed: int = 0
    launched: int = 0
    sampled_row: int = -1
    finite_samples: int = 0  # tokens sampled from finite numbers, each from all the KV that its table now names
    lease: Lease | None = None
    public_blocks: int = 0
    shared_blocks: int = 0
    block_count: int = 0
    pages: Pages = field(default_factory=lambda: np.empty(0, np.int64))
    table: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # the low halves of `pages`, in their memory
    window_tables: list[WindowTable] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Known tokens that no step computes yet; the step that computes the last of them samples the next one."""
        return len(self.tokens) - self.launched

    @property
    def wanted_rows(self) -> int:
        """Rows beyond its first one that it has tokens for in a step."""
        return (self.pending if self.chunk_limit is None else min(self.pending, self.chunk_limit)) - 1

    @property
    def awaits_image(self) -> bool:
        """Whether the next token to compute is of an image that is not encoded yet."""
        return any(each.rows_NH is None and each.first <= self.launched < each.end for each in self.images)

    @property
    def token_ids(self) -> "array[int]":
        """`tokens` with an id in place of each element."""
        if not self.images:
            return self.tokens
        tokens = self.tokens[:]
        for image in self.images:
            tokens[image.first : image.end] = array("I", [image.token]) * image.tokens
        return tokens

    def cut_at_images(self, chunk: int) -> tuple[int, int]:
        """How many of its next tokens a step may compute that has about `chunk` rows for them, and how many of a step
        that has no more. Images are computed whole, and once they are encoded."""
        end = self.launched + chunk
        for image in self.images:
            if image.end <= self.launched or image.first >= end or (image.rows_NH is not None and image.end <= end):
                continue  # computed, later, or there as a whole
            if image.rows_NH is None or image.first > self.launched:
                before = max(image.first - self.launched, 0)
                return before, before
            return image.end - self.launched, 0
        return chunk, chunk

    @property
    def max_work(self) -> float:
        """The most that it will be served from now on."""
        prompt = self.prompt_tokens - self.charged_tokens
        output = self.max_total_tokens - len(self.tokens)
        return PROMPT_TOKEN * prompt + GENERATED_TOKEN * output

    @property
    def launchable(self) -> bool:
        """Whether a step can compute more of it. The last token is never computed: nothing is sampled after it."""
        return self.launched + 1 < self.max_total_tokens and (self.stop_at is None or self.launched < self.stop_at)

    @property
    def decoding(self) -> bool:
        """Whether its next token is awaited, with no more to compute before it than what was forced."""
        return self.pending <= 1 or (self.emitted > 0 and self.pending <= 1 + FORCED_MAX)

    @property
    def mask_us(self) -> float:
        """About what its next mask takes."""
        return 0.0 if self.matcher is None else self.matcher.mask_us

    @property
    def background(self) -> bool:
        return self.terms.background

    @property
    def awaited(self) -> bool:
        """Whether it cannot start yet: its grammar, or blocks from disk, are on their way."""
        return self.compilation is not None or self.fetch == FetchState.WAITING

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

    def sampling_behind(self, end: int) -> SamplingParams:
        """How the token behind the first `end` is sampled."""
        early = self.early_sampling
        return self.sampling if early is None or end - self.prompt_tokens >= self.sampling.min_tokens else early

    def charge_prompt(self) -> int:
        """Charges its account for what was computed of its prompt, once: not again after a preemption. Returns how many
        tokens that is."""
        charged = min(self.computed, self.prompt_tokens)
        tokens = max(0, charged - self.charged_tokens)
        self.charged_tokens += tokens
        self.account_queue.level += tokens * self.account_queue.prompt_cost
        self.account_queue.pending_tokens -= tokens
        return tokens

    def follow_grammar(self, matcher: GrammarMatcher) -> Ending | None:
        """Takes in the newest token, and appends those that the grammar leaves no choice of (jump-forward decoding, as
        SGLang has it), unless logprobs are reported, which only sampling gives. Returns how the text ends, if it does.
        """
        ending = self._accept_newest(matcher)
        if ending is None and self.sampling.logprobs is None:
            for token in matcher.forced(self.tokens):
                self.tokens.append(token)
                if (ending := self._accept_newest(matcher)) is not None:
                    break
        return ending

    def _accept_newest(self, matcher: GrammarMatcher) -> Ending | None:
        token = self.tokens[-1]
        if problem := matcher.accept(token):
            return FinishReason.GRAMMAR, problem
        if token in self.stop_ids or matcher.finished:
            return FinishReason.STOP, ""
        return (FinishReason.LENGTH, "") if len(self.tokens) >= self.max_total_tokens else None

    def append_pages(self, pages: Items[int]) -> None:
        """Appends pages to the table, which has room for later ones."""
        count = self.block_count + len(pages)
        if count > len(self.pages):
            larger = np.zeros(max(count, 2 * len(self.pages), 8), np.int64)
            larger[: self.block_count] = self.pages[: self.block_count]
            self.pages, self.table = larger, larger.view("<i4")[::2]
        self.pages[self.block_count : count] = pages
        self.block_count = count

    def held_pages(self) -> list[int]:
        """The pages that it reads, or will."""
        pages: list[int] = self.pages[: self.block_count].tolist()
        return pages

    def private_pages(self) -> list[int]:
        """The pages that no other sequence holds."""
        return self.held_pages()[self.shared_blocks :]

    def rewind(self) -> None:
        """Forgets all KV: it has to be matched or computed again. The caller frees the blocks before."""
        self.computed = self.launched = self.public_blocks = self.shared_blocks = self.block_count = 0
        self.finite_samples = self.loading_blocks = 0
        self.window_tables = []
        self.lease = None
