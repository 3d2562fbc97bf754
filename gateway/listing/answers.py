"""The answers of models as types, for the API's document and the catalogue. Dialects write their answers themselves,
faster than through types; tests hold every answer and event against these.
"""

from typing import Any, Final, Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

R = TypeVar("R")


class Enveloped(Struct, Generic[R], frozen=True, forbid_unknown_fields=True):
    """The native envelope around an answer."""

    result: R
    success: Literal[True]
    errors: tuple[()]
    messages: tuple[()]


class Cached(Struct, frozen=True, forbid_unknown_fields=True):
    cached_tokens: int


class Spent(Struct, frozen=True, forbid_unknown_fields=True):
    """The usage of a call. `neurons_left` is only in the last event of a stream, `neurons` in none before it."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached
    neurons: float | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET
    neurons_left: dict[str, float] | UnsetType = UNSET


# ---- native ----------------------------------------------------------------------------------------------------------


class NativeCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool, its arguments read."""

    name: str
    arguments: dict[str, Any]


class Generated(Struct, frozen=True, forbid_unknown_fields=True):
    """`response` is a text, or the document where JSON was asked for. `finish_reason` says that a budget cut it."""

    response: Any
    tool_calls: list[NativeCall]
    usage: Spent
    reasoning_content: str | UnsetType = UNSET
    finish_reason: Literal["quota"] | UnsetType = UNSET


class NativeEvent(Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of the answer; `p` is padding. The last one has `usage`."""

    response: str
    p: str | UnsetType = UNSET
    tool_calls: list[NativeCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    usage: Spent | UnsetType = UNSET
    finish_reason: Literal["quota"] | UnsetType = UNSET


class Vectors(Struct, frozen=True, forbid_unknown_fields=True):
    """A vector for each text: `data`, or `response` where the texts were `contexts`. `shape` is how many, and of what
    length."""

    shape: list[int]
    pooling: Literal["mean", "cls", "last"]
    usage: Spent
    data: list[list[float]] | UnsetType = UNSET
    response: list[list[float]] | UnsetType = UNSET


class Score(Struct, frozen=True, forbid_unknown_fields=True):
    """`id` is the place among the contexts."""

    id: int
    score: float


class Scores(Struct, frozen=True, forbid_unknown_fields=True):
    """Scores of texts as answers to a query, the best first if the model was made for it."""

    response: list[Score]
    usage: Spent


class BatchState(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of many requests that were sent at once."""

    status: Literal["queued", "running"]
    request_id: str
    model: str


class BatchTokens(Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class BatchResult(Struct, frozen=True):
    """`id` is the request's place, `result` what the model answers to such a request, or there are `errors`."""

    id: int
    success: bool
    external_reference: str | None


class BatchResults(Struct, frozen=True, forbid_unknown_fields=True):
    """The results of requests that ended; if the batch was not done, `status` says how it ended."""

    responses: list[BatchResult]
    usage: BatchTokens
    status: Literal["cancelled", "failed"] | UnsetType = UNSET
    request_id: str | UnsetType = UNSET
    model: str | UnsetType = UNSET


# ---- OpenAI's --------------------------------------------------------------------------------------------------------

Finish = Literal["stop", "length", "tool_calls", "quota"]


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """`arguments` is the text of a JSON object."""

    arguments: str
    name: str | UnsetType = UNSET


class ChatCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call; in a chunk a part of the call at `index`: first its id and name, then pieces of its arguments."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class Scored(Struct, frozen=True, forbid_unknown_fields=True):
    """A token and its log probability, with the most probable ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: "list[Scored] | UnsetType" = UNSET


class ChatLogprobs(Struct, frozen=True, forbid_unknown_fields=True):
    content: list[Scored]
    refusal: UnsetType | None = UNSET


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ChatCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Spent


class Delta(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    delta: Delta
    finish_reason: Finish | None
    logprobs: ChatLogprobs | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, forbid_unknown_fields=True):
    """`obfuscation` is padding. The last one has no choices but `usage`, where that was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Spent | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET


class TextLogprobs(Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextCompletion(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole one, or a piece of one in a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Spent | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET


class Embedding(Struct, frozen=True, forbid_unknown_fields=True):
    """A vector; in base64 it is float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Struct, frozen=True, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Spent


class RankedText(Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class Ranked(Struct, frozen=True, forbid_unknown_fields=True):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Struct, frozen=True, forbid_unknown_fields=True):
    """The best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Spent


class Response(Struct, frozen=True):
    """OpenAI's `response`, in the shapes of its SDKs; it also repeats the request's fields."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list["ResponseItem"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ResponseItem(Struct, frozen=True):
    """A message with its parts, a call of a function, or the model's reasoning."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseEvent(Struct, frozen=True):
    """`type` is also the event's name, and says which fields are beside it, as OpenAI's SDKs know them."""

    type: str
    sequence_number: int


class ResponseTokens(Struct, frozen=True, forbid_unknown_fields=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


# ---- Anthropic's -----------------------------------------------------------------------------------------------------


class Block(Struct, frozen=True):
    """A text, the model's thinking, or a use of a tool with its `input`."""

    type: Literal["text", "thinking", "tool_use"]


class AnthropicSpent(Struct, frozen=True):
    """`input_tokens` excludes those that were read from the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnthropicMessage(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "quota"] | None
    stop_sequence: str | None
    usage: AnthropicSpent


class AnthropicEvent(Struct, frozen=True):
    """`type` is also the event's name, and says which fields are beside it, as Anthropic's SDKs know them."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


class AnthropicTokens(Struct, frozen=True, forbid_unknown_fields=True):
    input_tokens: int


RESPONSE_TYPES: Final[dict[str, tuple[Any, ...]]] = {
    "native": (Generated,),
    "chat": (ChatCompletion, TextCompletion),
    "embeddings": (Vectors, Scores),
    "rerank": (Scores,),
}
