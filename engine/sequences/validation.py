"""Turns a Submit into sequences, or refuses it with a reason. It knows no pool and no turn."""

import math
import sys
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.protocol.frames import Submit
from engine.protocol.types import (
    KEY_BYTES,
    LOGPROBS_MAX,
    GivenTokens,
    ImageInput,
    Pooling,
    RejectReason,
    SamplingParams,
    SchedulingTerms,
    Scope,
    ScopeKind,
)
from engine.sequences.sequence import PromptImage, Sequence
from prefixcache.namespace import CacheShare, Namespace, RetentionPolicy

CHOICES_MAX: Final = 128
STOP_IDS_MAX: Final = 64
BIASES_MAX: Final = 300
SCOPE_BYTES: Final = 16
UNLIMITED_SHARE: Final = CacheShare()
_SEEDS: Final = 1 << 63
_IDS: Final = 1 << 62
_FINITE: Final = sys.float_info.max


class SubmitRejected(Exception):
    """A Submit that will not run. Carries what its Reject says."""

    def __init__(self, reason: RejectReason, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_ms = retry_after_ms


class ImagePlaces(Protocol):
    """What puts elements in the places of a prompt's images."""

    def replace(self, tokens_T: NDArray[np.uint32], images: Items[ImageInput]) -> list[PromptImage]: ...


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """What a model can take, and how its KV is named and kept. `max_total_tokens` counts prompt and output of one
    sequence; `share` is for accounts whose terms set none. `poolings` are how a model gives vectors; a model without
    any gives text. `images` are what stands for a prompt's images, None where it may have none."""

    model_revision: str
    kv_layout: str
    block_tokens: int
    max_total_tokens: int
    vocabulary: int
    stop_ids: frozenset[int]
    share: CacheShare = UNLIMITED_SHARE
    poolings: frozenset[Pooling] = frozenset()
    images: "ImagePlaces | None" = None

    def sequences(self, submit: Submit, owner: int, now_s: float) -> list[Sequence]:
        """The choices of this Submit, waiting. Raises SubmitRejected where it can never run."""
        self._validate(submit)
        prompt, images = self._prompt(submit)
        output_tokens = 0 if submit.pooling is not None else 1
        scope, terms = submit.scope, submit.terms
        # What a tokenizer knows beyond the vocabulary is never sampled, and no logit is there to be lowered.
        known = (token for token in submit.stop_ids if 0 <= token < self.vocabulary)
        stop_ids = frozenset[int]() if submit.sampling.ignore_eos else self.stop_ids.union(known)
        given = [self._given(each, submit, stop_ids) for each in submit.given] or [array("I")] * submit.n
        if len(prompt) + max(map(len, given)) + output_tokens > self.max_total_tokens:
            raise SubmitRejected(
                RejectReason.TOO_LONG,
                f"the prompt has {len(prompt)} tokens; this model takes {self.max_total_tokens}, its output included",
            )
        choices = [each.choice for each in submit.given] or range(submit.n)
        wait_s = submit.deadline_ms / 1e3 if submit.deadline_ms and not terms.background else math.inf
        return [
            Sequence(
                owner=owner,
                id=submit.id + index,
                account=scope.account or scope.id,
                namespace=None if scope.kind == ScopeKind.REQUEST or not scope.id else self.namespace(scope),
                retention=self._retention(scope, terms),
                tokens=prompt + given[index],
                prompt_tokens=len(prompt),
                max_total_tokens=min(len(prompt) + submit.max_tokens, self.max_total_tokens + 1 - output_tokens),
                pooling=submit.pooling,
                sampling=(sampling := _seeded(submit.sampling, choice)),
                stop_ids=stop_ids,
                early_sampling=_unending(sampling, stop_ids) if sampling.min_tokens else None,
                arrived_s=now_s,
                terms=terms,
                first_id=submit.id,
                choices=submit.n,
                deadline_s=now_s + wait_s,
                images=images,
                regions=submit.regions,
            )
            for index, choice in enumerate(choices)
        ]

    def _prompt(self, submit: Submit) -> tuple["array[int]", list[PromptImage]]:
        """The prompt with its images, which have elements in their places. Raises SubmitRejected."""
        if not submit.images:
            return self._tokens(submit.tokens), []
        if self.images is None:
            raise SubmitRejected(RejectReason.IMAGES, "this replica takes no images: it serves the model's text alone")
        tokens_T = np.frombuffer(submit.tokens, "<u4").astype(np.uint32)
        images = self.images.replace(tokens_T, submit.images)
        is_text_T = np.ones(len(tokens_T), np.bool_)
        for image in images:
            is_text_T[image.first : image.end] = False
        if (tokens_T[is_text_T] >= self.vocabulary).any():
            raise _invalid(f"a token id is not below the vocabulary of {self.vocabulary}")
        return array("I", tokens_T.tobytes()), images

    def _tokens(self, packed: bytes) -> "array[int]":
        """Raises SubmitRejected where the model does not know one of them."""
        tokens = np.frombuffer(packed, "<u4")
        if len(tokens) and int(tokens.max()) >= self.vocabulary:
            raise _invalid(f"a token id is not below the vocabulary of {self.vocabulary}")
        return array("I", tokens.astype(np.uint32).tobytes())

    def _given(self, given: GivenTokens, submit: Submit, stop_ids: frozenset[int]) -> "array[int]":
        """What a choice has emitted elsewhere. Raises SubmitRejected where it has ended by that."""
        tokens = self._tokens(given.tokens)
        if len(tokens) >= submit.max_tokens or not stop_ids.isdisjoint(tokens):
            raise _invalid(f"choice {given.choice} has ended by the tokens given")
        return tokens

    def namespace(self, scope: Scope) -> Namespace:
        """All that the KV of a scope's requests depends on."""
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

    def _retention(self, scope: Scope, terms: SchedulingTerms) -> RetentionPolicy:
        floor = self.share.floor if terms.floor_blocks is None else terms.floor_blocks
        cap = self.share.cap if terms.cap_blocks is None else terms.cap_blocks
        return RetentionPolicy(scope.account or scope.id, CacheShare(floor, cap), terms.keep_s)

    def public_sequence(self, tokens: "array[int]") -> Sequence:
        """A sequence that computes a prefix for everybody. No Submit can name its scope."""
        return Sequence(
            owner=0,
            id=0,
            account=b"",
            namespace=self.namespace(Scope(ScopeKind.PUBLIC)),
            tokens=tokens[:],
            prompt_tokens=len(tokens),
            max_total_tokens=len(tokens) + 1,
            sampling=SamplingParams(),
            stop_ids=frozenset(),
            arrived_s=0.0,
        )

    def _validate(self, submit: Submit) -> None:
        """Raises SubmitRejected(INVALID) for what a correct gateway does not send."""
        if not submit.tokens or len(submit.tokens) % 4:
            raise _invalid("tokens must be packed u32, at least one")
        for name, value, low, high in _ranges(submit):
            if value is not None and not low <= value <= high:
                bounds = f"at least {low:g}" if high == _FINITE else f"{low:g} to {high:g}"
                raise _invalid(f"{name} must be {bounds}")
        for name, key in (("id", submit.scope.id), ("account", submit.scope.account)):
            if len(key) not in (0, SCOPE_BYTES):
                raise _invalid(f"scope.{name} must have {SCOPE_BYTES} bytes or none")
        if submit.pooling not in (self.poolings or {None}):
            raise _invalid(f"pooling must be one of {sorted(self.poolings)}, of a model without any it must be unset")
        if submit.pooling is not None and submit.grammar is not None:
            raise _invalid("with pooling there is no grammar")
        if submit.pooling is not None and (submit.n, submit.max_tokens) != (1, 1):
            raise _invalid("with pooling, n and max_tokens are 1")
        if submit.grammar is not None and (submit.sampling.min_tokens or submit.sampling.ignore_eos):
            raise _invalid("with a grammar there is neither min_tokens nor ignore_eos")
        if submit.given and len({each.choice for each in submit.given}) != submit.n:
            raise _invalid("given must name each of the n choices that go on once")
        if any(len(each.tokens) % 4 or not 0 <= each.choice < CHOICES_MAX for each in submit.given):
            raise _invalid(f"given must be packed u32, of choices below {CHOICES_MAX}")
        if any(len(each.handover) not in (0, KEY_BYTES) for each in submit.given):
            raise _invalid(f"the key of a handover has {KEY_BYTES} bytes")
        if submit.given and submit.pooling is not None:
            raise _invalid("with pooling nothing is given")
        for token, bias in submit.sampling.logit_bias.items():
            if not 0 <= token < self.vocabulary or not math.isfinite(bias):
                raise _invalid("logit_bias must map token ids of the vocabulary to finite numbers")


def _ranges(submit: Submit) -> tuple[tuple[str, float | None, float, float], ...]:
    """The numbers of a Submit, None where one is unset, and their ranges: what a packed step can carry and a sampler
    can use. None may be infinite."""
    terms, sampling = submit.terms, submit.sampling
    return (
        ("id", submit.id, 0, _IDS - 1),
        ("n", submit.n, 1, CHOICES_MAX),
        ("max_tokens", submit.max_tokens, 1, _FINITE),
        ("the number of stop_ids", len(submit.stop_ids), 0, STOP_IDS_MAX),
        ("deadline_ms", submit.deadline_ms, 0, _FINITE),
        ("weight", terms.weight, 0.001, 1000.0),
        ("sequences", terms.sequences, 1, _FINITE),
        ("blocks", terms.blocks, 1, _FINITE),
        ("floor_blocks", terms.floor_blocks, 0, _FINITE),
        ("cap_blocks", terms.cap_blocks, 0, _FINITE),
        ("keep_s", terms.keep_s, 0, _FINITE),
        ("temperature", sampling.temperature, 0, 1e4),
        ("top_k", sampling.top_k, 0, 2**31 - 1),
        ("top_p", sampling.top_p, 0, 1),
        ("min_p", sampling.min_p, 0, 1),
        ("repetition_penalty", sampling.repetition_penalty, 1e-4, 1e4),
        ("frequency_penalty", sampling.frequency_penalty, -1e4, 1e4),
        ("presence_penalty", sampling.presence_penalty, -1e4, 1e4),
        ("seed", sampling.seed, 0, _SEEDS - 1),
        ("logprobs", sampling.logprobs, 0, LOGPROBS_MAX),
        ("min_tokens", sampling.min_tokens, 0, _FINITE),
        ("the number of entries of logit_bias", len(sampling.logit_bias), 0, BIASES_MAX),
    )


def _invalid(message: str) -> SubmitRejected:
    return SubmitRejected(RejectReason.INVALID, message)


def _unending(sampling: SamplingParams, stop_ids: frozenset[int]) -> SamplingParams:
    """The sampling in which no token ends the text."""
    return msgspec.structs.replace(sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(stop_ids, -math.inf)})


def _seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The sampling of choice i: seed + i, wrapped into the seeds' range."""
    if not choice:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % _SEEDS)
