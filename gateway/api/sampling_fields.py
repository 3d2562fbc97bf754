"""The fields that native bodies, chat completions and completions have in common, and what they come to.

It does not know messages, prompts or answers.
"""

from typing import Final

import msgspec

from engine.protocol.types import SamplingParams
from gateway.inference.prompt import (
    LogitBias,
    MaxTokens,
    Metadata,
    Penalty,
    Probability,
    RepetitionPenalty,
    ShortText,
    Stop,
    TopK,
    seed_of,
)
from gateway.inference.response_format import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseConstraint,
    ResponseFormat,
    response_constraint,
)

TOP_P_MIN: Final = 0.001  # top_p 0 asks for the one most probable token, which any tiny mass is


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`metadata` is a label: it changes nothing and is not kept."""

    stream: bool | None = None
    max_tokens: MaxTokens | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    response_format: ResponseFormat | None = None
    guided_json: GuidedJson | None = None
    guided_regex: GuidedRegex | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: GuidedGrammar | None = None
    metadata: Metadata | None = None
    user: ShortText | None = None


def sampling_params(
    asked: SamplingFields,
    *,
    temperature: float,
    top_p: float | None,
    seed: int | None,
    drawn_seed: int,
    logprobs: int | None = None,
) -> SamplingParams:
    """The fields whose ranges differ are given beside the others."""
    return SamplingParams(
        temperature=temperature,
        top_k=asked.top_k or 0,
        top_p=1.0 if top_p is None else max(top_p, TOP_P_MIN),
        min_p=asked.min_p or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        seed=seed_of(seed, drawn_seed),
        logit_bias=asked.logit_bias or {},
        logprobs=logprobs,
    )


def constraint_of(asked: SamplingFields) -> ResponseConstraint:
    """What the answer's text is held to. Raises Refusal."""
    return response_constraint(
        asked.response_format, asked.guided_json, asked.guided_regex, asked.guided_choice, asked.guided_grammar
    )
