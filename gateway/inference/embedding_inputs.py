"""A call's texts as token ids of a model that gives vectors, checked against what that model does.

It knows no replica and no limits of accounts.
"""

from engine.protocol.types import Pooling
from gateway import errors
from gateway.catalogue.catalogue import Model
from gateway.catalogue.tasks import EmbeddingSpec
from gateway.inference.embedding_types import EmbeddingInput, EmbeddingInputs, InputKind
from gateway.inference.lifecycle import InferenceCall
from gateway.inference.prompt_encoding import LONG_TEXT_CHARS
from gateway.text.tokenizer import TokenizationError


def check_inputs(model: Model, spec: EmbeddingSpec, inputs: EmbeddingInputs) -> Pooling:
    """How the texts are pooled. Raises ApiError for what this model does not do."""
    if inputs.pooling is not None and inputs.pooling not in spec.poolings:
        known = " or ".join(f"'{pooling}'" for pooling in spec.poolings)
        raise errors.bad_input(f"'pooling' of {model.name} is {known}; leave it out", "pooling")
    if inputs.instruction is not None and not spec.takes_instruction:
        raise errors.bad_input(f"'instruction' is not known to {model.name}; leave it out", "instruction")
    size, cuts, full = inputs.dimensions, spec.allowed_dimensions, spec.dimensions
    if size is not None and size != full and (size > full or (cuts is not None and size not in cuts)):
        served = f"1 to {full}" if cuts is None else ", ".join(map(str, sorted({*cuts, full})))
        raise errors.bad_input(f"'dimensions' of {model.name} may be {served}; leave it out", "dimensions")
    return inputs.pooling or spec.poolings[0]


async def encode_inputs(call: InferenceCall, spec: EmbeddingSpec, inputs: EmbeddingInputs) -> list[list[int]]:
    """The token ids of each sequence: of each item, or of pairs of the query and each other item. Raises ApiError.

    Long texts are encoded in a thread, one call at a time for each account, and under zero retention in a thread of
    their own.
    """
    model, context = call.model, call.context
    max_tokens = min(spec.tokens_max, context.fleet.context_tokens(model.name, spec.tokens_max))
    encoder = _InputEncoder(model, spec, inputs, max_tokens)
    if inputs.length <= LONG_TEXT_CHARS and not call.zero_retention:
        return encoder.sequences()
    return await context.account_locks.run_in_thread(
        call.caller.account.id, encoder.sequences, fresh=call.zero_retention
    )


class _InputEncoder:
    """Encodes one call's items into sequences of at most `max_tokens`."""

    def __init__(self, model: Model, spec: EmbeddingSpec, inputs: EmbeddingInputs, max_tokens: int) -> None:
        self._model = model
        self._spec = spec
        self._inputs = inputs
        self._max_tokens = max_tokens

    def sequences(self) -> list[list[int]]:
        return self._pairs() if Pooling.SCORE in self._spec.poolings else [self._single(i) for i in self._inputs.items]

    def _pairs(self) -> list[list[int]]:
        """The query with each document."""
        frame, max_tokens = self._model.tokenizer.special_tokens, self._max_tokens
        query, *documents = [self._encode(item, "") for item in self._inputs.items]
        room = max_tokens - frame.pair_count - len(query)
        if room < 1:
            raise errors.text_too_long("query", len(query) + frame.pair_count, max_tokens, cut=False)
        items = self._inputs.items[1:]
        return [frame.pair(query, self._fit(item, ids, room)) for item, ids in zip(items, documents, strict=True)]

    def _single(self, item: EmbeddingInput) -> list[int]:
        if not isinstance(item.content, str):
            return self._checked(item, self._fit(item, item.content, self._max_tokens))
        frame = self._model.tokenizer.special_tokens
        ids = self._fit(item, self._encode(item, self._prefix(item.kind)), self._max_tokens - frame.count)
        sequence = frame.single(ids)
        if not sequence:
            raise errors.bad_input(f"'{item.place}' has no tokens; send some text", item.place)
        return sequence

    def _prefix(self, kind: InputKind) -> str:
        """The words that the model wants before a text of this kind."""
        match kind:
            case InputKind.QUERY:
                return self._spec.prompt(self._inputs.instruction)
            case InputKind.DOCUMENT:
                return self._spec.document
            case InputKind.TEXT:
                return ""

    def _encode(self, item: EmbeddingInput, prefix: str) -> list[int]:
        """The item's ids. A text that cannot fit, and may not be cut, is not encoded at all."""
        assert isinstance(item.content, str)
        max_chars_per_token = self._model.tokenizer.token_bytes_max
        if (
            max_chars_per_token
            and not self._inputs.truncate
            and len(item.content) > self._max_tokens * max_chars_per_token
        ):
            tokens = len(item.content) // max_chars_per_token
            raise errors.text_too_long(item.place, tokens, self._max_tokens, cut=True)
        try:
            return self._model.tokenizer.encode_text(prefix + item.content)
        except TokenizationError as error:
            raise errors.bad_input(f"'{item.place}': {error}", item.place) from None

    def _checked(self, item: EmbeddingInput, ids: list[int]) -> list[int]:
        """Token ids from the caller. Raises ApiError where the model's vocabulary lacks one."""
        vocabulary = self._model.vocabulary
        over = [id for id in ids if id >= vocabulary]
        if over:
            message = f"'{item.place}': {over[0]} is no token id; the vocabulary has {vocabulary}"
            raise errors.bad_input(message, item.place)
        return ids

    def _fit(self, item: EmbeddingInput, ids: list[int], room: int) -> list[int]:
        """The item's ids, or the first of them where it may be cut; the rest of `max_tokens` is taken. Raises
        ApiError."""
        if len(ids) <= room:
            return ids
        if not self._inputs.truncate:
            raise errors.text_too_long(item.place, len(ids) + self._max_tokens - room, self._max_tokens, cut=True)
        return ids[:room]
