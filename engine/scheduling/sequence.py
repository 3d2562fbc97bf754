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

from engine.protocol.frames import Pooling, RejectReason, Sampling, Scope, ScopeKind, Submit, Terms
from engine.scheduling.block_pool import Pages
from engine.scheduling.fair_queue import Standing
from engine.step.layout import Int32s
from prefixcache.namespace import Keep, Namespace, Share
from prefixcache.tree import Lease

CHOICES_MAX: Final = 128
STOP_IDS_MAX: Final = 64
BIASES_MAX: Final = 300
LOGPROBS_MAX: Final = 20
SCOPE_BYTES: Final = 16
WEIGHTS: Final = (0.001, 1000.0)
PLAIN: Final = Terms()
OPEN: Final = Share()
NOBODYS: Final = Keep(b"")
_SEEDS: Final = 1 << 63
_IDS_MAX: Final = 1 << 62


class Stage(enum.IntEnum):
    """A sequence waits, runs, and may be preempted (wait and run again) any number of times; it ends once."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2


class Matcher(Protocol):
    """Keeps one text to its grammar. `over`: only its end may follow."""

    over: bool

    def accept(self, token: int) -> str:
        """Takes what was sampled for it. What is wrong, where it cannot go on, or nothing."""
        ...


class Compilation(Protocol):
    """A grammar that becomes matchers once it is `done`."""

    done: bool

    def matcher(self, stop_ids: frozenset[int]) -> Matcher:
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
    sampling: Sampling
    stop_ids: frozenset[int]
    arrived_s: float
    terms: Terms = PLAIN
    pooling: Pooling | None = None  # its prompt is to become a vector, and nothing is written
    keep: Keep = NOBODYS  # for whom and how long the tree keeps what it leaves
    first: int = 0  # the id of choice 0 of its request,
    choices: int = 1  # and how many there are
    deadline_s: float = math.inf  # when nothing of its request has started by then, nothing will

    compilation: Compilation | None = None  # of its grammar, without which it does not start
    matcher: Matcher | None = None

    stage: Stage = Stage.WAITING
    ticket: int = -1  # the order of first admission; of one account's the highest is preempted first
    standing: "Standing[Sequence]" = field(default_factory=Standing)  # its account's, once a scheduler has taken it in
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


class Refused(Exception):
    """A Submit that will not run. Carries what its Reject says."""

    def __init__(self, reason: RejectReason, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_ms = retry_after_ms


@dataclass(frozen=True, slots=True)
class Door:
    """What a model can take, and how its KV is named and kept. `tokens_max` counts prompt and output of one sequence;
    `share` is what an account has whose terms say nothing. `poolings` are how a model gives vectors; one that has none
    gives text."""

    model_revision: str
    kv_layout: str
    block_tokens: int
    tokens_max: int
    vocabulary: int
    stop_ids: frozenset[int]
    share: Share = OPEN
    poolings: frozenset[Pooling] = frozenset()

    def sequences(self, submit: Submit, owner: int, now_s: float) -> list[Sequence]:
        """The choices of this Submit, waiting. Raises Refused where it can never run."""
        self._examine(submit)
        tokens = np.frombuffer(submit.tokens, "<u4")
        if len(tokens) and int(tokens.max()) >= self.vocabulary:
            raise _invalid(f"a token id is not below the vocabulary of {self.vocabulary}")
        output_tokens = 0 if submit.pooling is not None else 1
        if len(tokens) + output_tokens > self.tokens_max:
            raise Refused(
                RejectReason.TOO_LONG,
                f"the prompt has {len(tokens)} tokens; this model takes {self.tokens_max}, its output included",
            )
        wait_s = submit.deadline_ms / 1e3 if submit.deadline_ms and not submit.terms.background else math.inf
        return [
            Sequence(
                owner=owner,
                id=submit.id + choice,
                account=submit.scope.account or submit.scope.id,
                namespace=self._namespace(submit),
                keep=self._keep(submit),
                tokens=array("I", tokens.astype(np.uint32).tobytes()),
                prompt_tokens=len(tokens),
                tokens_max=min(len(tokens) + submit.max_tokens, self.tokens_max + 1 - output_tokens),
                pooling=submit.pooling,
                sampling=_seeded(submit.sampling, choice),
                stop_ids=self.stop_ids.union(submit.stop_ids),
                arrived_s=now_s,
                terms=submit.terms,
                first=submit.id,
                choices=submit.n,
                deadline_s=now_s + wait_s,
            )
            for choice in range(submit.n)
        ]

    def _namespace(self, submit: Submit) -> Namespace | None:
        scope = submit.scope
        return None if scope.kind == ScopeKind.REQUEST or not scope.id else self._name(scope)

    def _name(self, scope: Scope) -> Namespace:
        return Namespace(
            model_revision=self.model_revision,
            adapter_revision="",
            tokenizer=self.model_revision,  # the tokenizer's files are part of the model's folder and its revision
            kv_layout=self.kv_layout,
            block_tokens=self.block_tokens,
            scope_kind=int(scope.kind),
            scope_id=scope.id,
            epoch=scope.epoch,
        )

    def _keep(self, submit: Submit) -> Keep:
        terms = submit.terms
        floor = self.share.floor if terms.floor_blocks is None else terms.floor_blocks
        cap = self.share.cap if terms.cap_blocks is None else terms.cap_blocks
        return Keep(submit.scope.account or submit.scope.id, Share(floor, cap), terms.keep_s)

    def public(self, tokens: "array[int]") -> Sequence:
        """A sequence that computes a prefix for everybody. No Submit names its scope."""
        return Sequence(
            owner=0,
            id=0,
            account=b"",
            namespace=self._name(Scope(ScopeKind.PUBLIC)),
            tokens=tokens[:],
            prompt_tokens=len(tokens),
            tokens_max=len(tokens) + 1,
            sampling=Sampling(),
            stop_ids=frozenset(),
            arrived_s=0.0,
        )

    def _examine(self, submit: Submit) -> None:
        """Raises Refused(INVALID) for what a correct gateway does not send."""
        if not 0 <= submit.id < _IDS_MAX:
            raise _invalid("id must be at least 0 and below 2**62")
        if not submit.tokens or len(submit.tokens) % 4:
            raise _invalid("tokens must be packed u32, at least one")
        for name, key in (("id", submit.scope.id), ("account", submit.scope.account)):
            if len(key) not in (0, SCOPE_BYTES):
                raise _invalid(f"scope.{name} must have {SCOPE_BYTES} bytes or none")
        if not 1 <= submit.n <= CHOICES_MAX:
            raise _invalid(f"n must be 1 to {CHOICES_MAX}")
        if submit.max_tokens < 1:
            raise _invalid("max_tokens must be at least 1")
        if len(submit.stop_ids) > STOP_IDS_MAX:
            raise _invalid(f"at most {STOP_IDS_MAX} stop_ids")
        if submit.deadline_ms < 0:
            raise _invalid("deadline_ms must be at least 0")
        if submit.pooling not in (self.poolings or {None}):
            raise _invalid(f"pooling must be one of {sorted(self.poolings)}, of a model without any it must be unset")
        if submit.pooling is not None and submit.grammar is not None:
            raise _invalid("with pooling there is no grammar")
        if submit.pooling is not None and (submit.n, submit.max_tokens) != (1, 1):
            raise _invalid("with pooling, n and max_tokens are 1")
        problem = _terms_problem(submit.terms) or _sampling_problem(submit.sampling, self.vocabulary)
        if problem:
            raise _invalid(problem)


def _invalid(message: str) -> Refused:
    return Refused(RejectReason.INVALID, message)


def _seeded(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of choice i: seed + i, wrapped into the seeds' range."""
    if not choice:
        return sampling
    changed = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**{**changed, "seed": (sampling.seed + choice) % _SEEDS})


def _terms_problem(terms: Terms) -> str:
    """What is out of range, or nothing."""
    least, most = WEIGHTS
    if not least <= terms.weight <= most:
        return f"weight must be {least:g} to {most:g}"
    for name, cap in (("sequences", terms.sequences), ("blocks", terms.blocks)):
        if cap is not None and cap < 1:
            return f"{name} must be at least 1"
    for name, bound in (
        ("floor_blocks", terms.floor_blocks),
        ("cap_blocks", terms.cap_blocks),
        ("keep_s", terms.keep_s),
    ):
        if bound is not None and not 0 <= bound < math.inf:
            return f"{name} must be at least 0"
    return ""


def _sampling_problem(sampling: Sampling, vocabulary: int) -> str:
    """What is out of range, or nothing. The ranges are those that a packed batch can carry and a sampler can use."""
    numbers = (
        ("temperature", sampling.temperature, 0.0, 1e4),
        ("top_k", sampling.top_k, 0, 2**31 - 1),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 1e-4, 1e4),
        ("frequency_penalty", sampling.frequency_penalty, -1e4, 1e4),
        ("presence_penalty", sampling.presence_penalty, -1e4, 1e4),
        ("seed", sampling.seed, 0, _SEEDS - 1),
        ("logprobs", sampling.logprobs or 0, 0, LOGPROBS_MAX),
    )
    for name, value, least, most in numbers:
        if not least <= value <= most:
            return f"{name} must be {least:g} to {most:g}"
    if len(sampling.logit_bias) > BIASES_MAX:
        return f"at most {BIASES_MAX} entries of logit_bias"
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocabulary or not math.isfinite(bias):
            return "logit_bias must map token ids of the vocabulary to finite numbers"
    return ""
