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


class ReplicaRole(enum.IntEnum):
    """Which part of calls a replica is for, as its machine says; any can do both."""

    BOTH = 0
    PREFILL = 1  # it computes prompts for others, which go on; a whole call only where no other serves
    DECODE = 2  # it answers; a prompt is computed elsewhere where that is sooner done


class RankLoad(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a replica since its start: steps, for how long it waited for other ranks (0 on GPUs, where kernels
    wait), and what it holds of its device."""

    steps: int
    waited_ms: int
    device_bytes: int


class TierLoad(msgspec.Struct, frozen=True, array_like=True):
    """How full a tier below the pool is: bytes of KV that are found there, and that there is room for in all; no room:
    it has ended."""

    held_bytes: int
    room_bytes: int


class PrefillLoad(msgspec.Struct, frozen=True, array_like=True):
    """What computing a prompt takes at a replica, as its last steps taught: for whoever chooses where that is done.

    prompts         that run or wait there; their pending_tokens are not computed yet, and see so many pending_keys.
    decoding        sequences that generate, of which so many as are `leaving` are to go on elsewhere; unsent_tokens of
                    what leaves are computed, and not on their way.
    chunk_tokens    of prompts, that a step of theirs computes.
    fixed_us        a step takes, whatever it computes; decode_us more for each sequence that generates, row_us for
                    each token of a prompt and pair_us for each key that such a token sees. row_us is 0 where no prompt
                    was computed yet.
    token_bytes     of KV.
    links           bytes a second that handovers took to replicas, by where those take them in.
    """

    prompts: int
    pending_tokens: int
    pending_keys: float
    decoding: int
    leaving: int
    unsent_tokens: int
    chunk_tokens: float
    fixed_us: float
    decode_us: float
    row_us: float
    pair_us: float
    token_bytes: int = 0
    links: dict[str, float] = {}


class PrefixTier(enum.IntEnum):
    """Where a replica has a prefix: on its device, or in the tiers below; NONE: nowhere any more."""

    NONE = 0
    DISK = 1
    HOST = 2
    DEVICE = 3


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token, or nothing more that its grammar allows
    LENGTH = "length"  # max_tokens or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"
    GRAMMAR = "grammar"  # it cannot be kept to its grammar, or that costs too much; the message says why
    MOVED = "moved"  # not an end: it goes on at another replica, which has its KV now


class RejectReason(enum.StrEnum):
    TOO_LONG = "too_long"  # can never fit this replica's context or KV pool
    BUSY = "busy"  # the waiting queue is full, or it would wait, or has waited, for longer than it may
    DRAINING = "draining"  # the replica is going away
    INVALID = "invalid"  # a frame that a correct gateway does not send
    IMAGES = "images"  # this replica takes no images
    REGION = "region"  # its host is in no region that the request may be served in
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


class GivenTokens(msgspec.Struct, frozen=True, array_like=True):
    """What choice `choice` of a request has emitted elsewhere, packed u32 little-endian. Where its KV was handed over,
    `handover` is the key."""

    choice: int
    tokens: bytes
    handover: bytes = b""


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt, which is token `first` and those behind it, as many as the model makes of one.

    `pixels` are rows of red, green and blue, of 8 bits each, of the side that the model takes; `digest` is their
    SHA-256.
    """

    first: int
    digest: bytes
    pixels: bytes


KEY_BYTES: Final = 32  # of a handover: random, and nobody's but those of its two replicas and one gateway
LOGPROBS_MAX: Final = 20  # alternatives that a row may ask for


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. Values are in range: the gateway checked them.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; penalties are off at 1, 0 and 0.
    `seed` is always set (the gateway draws one when the caller gave none), 0 ≤ seed < 2**63.
    `logprobs` is None (off) or how many alternatives to report beside the chosen token (0–20).
    `min_tokens` are generated before a stop token may be; with `ignore_eos` none ends the text. Neither goes with a
    grammar.
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
    min_tokens: int = 0
    ignore_eos: bool = False
