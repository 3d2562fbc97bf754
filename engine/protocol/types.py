"""Values inside frames: what a request asks of a replica, and how it ends; msgspec structs and enums alone."""

import enum
from typing import Final

import msgspec


class Residency(enum.IntEnum):
    """Where a replica's weights are. It serves on DEVICE alone.

    DISK      there is no process; on the way up they may come from the page cache.
    MEMORY    its process lives and holds them in host memory, or, on a CPU, leaves them to the page cache. It takes
              requests, which wait there.
    DEVICE    they are in a GPU's memory, or, on a CPU, as its matmuls read them.
    """

    DISK = 0
    MEMORY = 1
    DEVICE = 2


class ScopeKind(enum.IntEnum):
    """With whom a cached prefix is shared. REQUEST shares with nobody and is what a missing scope means."""

    REQUEST = 0
    USER = 1
    TENANT = 2
    PUBLIC = 3


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token, or nothing more that its grammar allows
    LENGTH = "length"  # max_tokens or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"
    GRAMMAR = "grammar"  # it cannot be kept to its grammar, or that costs too much; the message says why


class RejectReason(enum.StrEnum):
    TOO_LONG = "too_long"  # can never fit this replica's context or KV pool
    BUSY = "busy"  # the waiting queue is full, or it would wait, or has waited, for longer than it may
    DRAINING = "draining"  # the replica is going away
    INVALID = "invalid"  # a frame that a correct gateway does not send
    GRAMMAR = "grammar"  # the grammar is wrong, asks for what is not supported, or is too large; the message says which


class GrammarKind(enum.StrEnum):
    """The language of a grammar's source."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Pooling(enum.StrEnum):
    """How a text becomes one vector, or, with SCORE, one number: from which of its tokens."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    SCORE = "score"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar of a completion's whole text, which may end only where the text is complete."""

    kind: GrammarKind
    source: str


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """Separates prefix caches. `id` is 16 opaque bytes made in `tenants`; raising `epoch` is a wipe.

    `account` is 16 opaque bytes too: the account whose turn the request takes among those that wait, whatever it may
    share. Without it `id` counts, and requests without either take the turns of one account.
    """

    kind: ScopeKind = ScopeKind.REQUEST
    id: bytes = b""
    epoch: int = 0
    account: bytes = b""


class SchedulingTerms(msgspec.Struct, frozen=True, array_like=True):
    """How a request's account is treated beside others, as its plan and its settings say.

    weight          its part of what is served while accounts compete; a weight of 2 gets twice what one of 1 gets.
    sequences       that it may run at once on this replica, None: as many as fit.
    blocks          KV blocks that its running sequences hold at once here, None: as many as there are.
    floor_blocks    cached blocks, of all its scopes, that it keeps while another account has more above its own floor,
    cap_blocks      and those that it keeps unused at most; None in either: what the replica's settings say.
    keep_s          cached blocks of its scope are found for so long after their last use, None: until they are evicted.
    erase           blocks that the request writes or reads are zeroed before anybody else has them. What a raised epoch
                    or keep_s makes unfindable always is.
    background      it runs only on what live requests leave free, and waits for as long as that takes. What the account
                    has running so counts apart from its live requests.
    """

    weight: float = 1.0
    sequences: int | None = None
    blocks: int | None = None
    floor_blocks: int | None = None
    cap_blocks: int | None = None
    keep_s: float | None = None
    erase: bool = False
    background: bool = False


LOGPROBS_MAX: Final = 20  # alternatives that a row may ask for


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. Values are in range: the gateway checked them.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; penalties are off at 1, 0 and 0.
    `seed` is always set (the gateway draws one when the caller gave none), 0 ≤ seed < 2**63.
    `logprobs` is None (off) or how many alternatives to report beside the chosen token (0–20).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
