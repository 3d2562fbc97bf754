"""A call's texts as token ids of a model that gives vectors, checked against what that model does.

It knows no replica and no limits of accounts.
"""

from dataclasses import dataclass

from engine.protocol.types import Pooling
from gateway import errors
from gateway.catalogue.catalogue import Model
from gateway.catalogue.tasks import EmbeddingSpec
from gateway.inference.embedding_types import EmbeddingInput, EmbeddingInputs, InputKind
from gateway.inference.lifecycle import InferenceCall
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

    Long texts are encoded in a thread.
    """
    model, context = call.model, call.context
    max_tokens = min(spec.tokens_max, context.fleet.context_tokens(model.name, spec.tokens_max))
    return await call.compute(_InputEncoder(model, spec, inputs, max_tokens).sequences)


@dataclass(frozen=True, slots=True)
class _InputEncoder:
    """Encodes one call's items into sequences of at most `max_tokens`."""

    model: Model
    spec: EmbeddingSpec
    inputs: EmbeddingInputs
    max_tokens: int

    def sequences(self) -> list[list[int]]:
        return self._pairs() if Pooling.SCORE in self.spec.poolings else list(map(self._single, self.inputs.items))

    def _pairs(self) -> list[list[int]]:
        """The query with each document."""
        frame, max_tokens = self.model.tokenizer.special_tokens, self.max_tokens
        query, *documents = [self._encode(item, "") for item in self.inputs.items]
        room = max_tokens - frame.pair_count - len(query)
        if room < 1:
            raise errors.text_too_long("query", len(query) + frame.pair_count, max_tokens, cut=None)
        items = self.inputs.items[1:]
        return [frame.pair(query, self._fit(item, ids, room)) for item, ids in zip(items, documents, strict=True)]

    def _single(self, item: EmbeddingInput) -> list[int]:
        if not isinstance(item.content, str):
            vocabulary, ids = self.model.vocabulary, self._fit(item, item.content, self.max_tokens)
            over = [id for id in ids if id >= vocabulary]
            if over:
                message = f"'{item.place}': {over[0]} is no token id; the vocabulary has {vocabulary}"
                raise errors.bad_input(message, item.place)
            return ids
        match item.kind:
            case InputKind.QUERY:
                prefix = self.spec.prompt(self.inputs.instruction)
            case InputKind.DOCUMENT:
                prefix = self.spec.document
            case InputKind.TEXT:
                prefix = ""
        frame = self.model.tokenizer.special_tokens
        sequence = frame.single(self._fit(item, self._encode(item, prefix), self.max_tokens - frame.count))
        if not sequence:
            raise errors.bad_input(f"'{item.place}' has no tokens; send some text", item.place)
        return sequence

    def _encode(self, item: EmbeddingInput, prefix: str) -> list[int]:
        """The item's ids. A text that cannot fit, and may not be cut, is not encoded at all."""
        assert isinstance(item.content, str)
        token_chars, cut = self.model.tokenizer.token_bytes_max, self.inputs.truncate
        if token_chars and not cut and len(item.content) > self.max_tokens * token_chars:
            raise errors.text_too_long(item.place, len(item.content) // token_chars, self.max_tokens, cut=cut)
        try:
            return self.model.tokenizer.encode_text(prefix + item.content)
        except TokenizationError as error:
            raise errors.bad_input(f"'{item.place}': {error}", item.place) from None

    def _fit(self, item: EmbeddingInput, ids: list[int], room: int) -> list[int]:
        """The item's ids, or the first of them where it may be cut; the rest of `max_tokens` is taken. Raises
        ApiError."""
        cut = self.inputs.truncate
        if len(ids) > room and not cut:
            raise errors.text_too_long(item.place, len(ids) + self.max_tokens - room, self.max_tokens, cut=cut)
        return ids[:room]
