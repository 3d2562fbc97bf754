"""Types and checks of the fields that bodies of several dialects have, and the fields of a Prompt that they come to.

It does not know messages, tools or answers.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.protocol.types import SamplingParams
from gateway.errors import bad_input
from gateway.http.json_body import check_depth
from gateway.inference.prompt import SEED_BITS, left_to_model
from gateway.inference.response_format import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseConstraint,
    ResponseFormat,
    response_constraint,
)

TEMPERATURE_DEFAULT: Final = 1.0  # of OpenAI and Anthropic, where neither body nor model says another
CHOICES_MAX: Final = 128
STOPS_MAX: Final = 4
BIASES_MAX: Final = 300
MESSAGES_MAX: Final = 4096
TEMPLATE_OPTIONS_MAX: Final = 16
TEMPLATE_OPTIONS_BYTES_MAX: Final = 4096
TEMPLATE_OPTIONS_DEPTH_MAX: Final = 4
LOGPROBS_MAX: Final = 20
TOP_P_MIN: Final = 0.001  # top_p 0 asks for the one most probable token, which any tiny mass is

StopString = Annotated[str, Meta(min_length=1, max_length=64)]
_IDS: Final = {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}}  # JSON Schema has no type for keys
Stop = StopString | Annotated[list[StopString], Meta(max_length=STOPS_MAX)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=BIASES_MAX, extra_json_schema=_IDS)
]
MaxTokens = Annotated[int, Meta(ge=1, le=1 << 24)]
MinTokens = Annotated[int, Meta(ge=0, le=1 << 24)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=1, le=50)]
ShortText = Annotated[str, Meta(max_length=512)]
TemplateOptions = Annotated[dict[Annotated[str, Meta(max_length=64)], Any], Meta(max_length=TEMPLATE_OPTIONS_MAX)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage asks for a last chunk with `usage`; include_obfuscation false leaves the padding out.
    continuous_usage_stats asks for the usage so far in every chunk, of all choices together, and for the last one."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`metadata` is a label: it changes nothing and is not kept. `min_tokens` are generated before a stop token may be
    and stop strings are looked for; with `ignore_eos` no stop token ends the text. Both as vLLM has them."""

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
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None


def prompt_sampling(
    body: SamplingFields,
    drawn_seed: int,
    *,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    logprobs: int | None = None,
) -> dict[str, Any]:
    """The fields of a Prompt that the body's sampling fields come to. Fields whose ranges differ between dialects are
    arguments. Raises ApiError."""
    constraint = response_constraint(
        body.response_format, body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )
    sampling = SamplingParams(
        temperature=TEMPERATURE_DEFAULT if temperature is None else temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if top_p is None else max(top_p, TOP_P_MIN),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        seed=drawn_seed if seed is None else seed & ((1 << SEED_BITS) - 1),  # into the bits of a frame
        logit_bias=body.logit_bias or {},
        logprobs=logprobs,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
    )
    return {
        **prompt_constraint(constraint),
        "sampling": sampling,
        "left_to_model": left_to_model(
            temperature=temperature,
            top_k=body.top_k,
            top_p=top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
        ),
        "stop": stop_strings(body.stop),
        "user": body.user,
    }


def stop_strings(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def prompt_constraint(constraint: ResponseConstraint) -> dict[str, Any]:
    """The fields of a Prompt whose answer is held to this."""
    return {"grammar": constraint.grammar, "grammar_field": constraint.field, "json": constraint.json}


def prompt_stream(stream: bool | None, options: StreamOptions | None) -> dict[str, Any]:
    """The fields of a Prompt whose answer is streamed, or not. Raises ApiError."""
    if options is not None and not stream:
        raise bad_input("'stream_options' goes with 'stream': true only; leave it out", "stream_options")
    options = options or StreamOptions()
    continuous = bool(options.continuous_usage_stats)
    if continuous and options.include_usage is False:
        field = "stream_options.include_usage"
        raise bad_input(f"'{field}' is true where 'continuous_usage_stats' is; leave it out", field)
    return {
        "stream": bool(stream),
        "include_usage": continuous or bool(options.include_usage),
        "continuous_usage": continuous,
        "padded": options.include_obfuscation is not False,
    }


def only(*served: object) -> Meta:
    """States in a field's schema that it takes these values alone; the dialect refuses all others by name."""
    return Meta(extra_json_schema={"enum": list(served)})


def template_options(kwargs: dict[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """The further variables of a chat template, known to the model's template or not. Raises ApiError."""
    options = {} if kwargs is None else kwargs
    check_depth(options, "chat_template_kwargs", TEMPLATE_OPTIONS_DEPTH_MAX)
    if len(msgspec.json.encode(options)) > TEMPLATE_OPTIONS_BYTES_MAX:
        problem = f"has more than {TEMPLATE_OPTIONS_BYTES_MAX} bytes; shorten it"
        raise bad_input(f"'chat_template_kwargs' {problem}", "chat_template_kwargs")
    if reasoning_effort is None:
        return options
    if "reasoning_effort" in options:
        raise bad_input("'reasoning_effort' is given twice; leave it out of 'chat_template_kwargs'", "reasoning_effort")
    return {**options, "reasoning_effort": reasoning_effort}


def max_tokens_of(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    """OpenAI's two names of one limit. Raises ApiError where both are used."""
    if max_tokens is not None and max_completion_tokens is not None:
        raise bad_input("'max_tokens' and 'max_completion_tokens' say the same; send one", "max_completion_tokens")
    return max_tokens or max_completion_tokens


def check_same_model(in_body: str | None, in_path: str) -> None:
    """Raises ApiError where the body names another model than the path does."""
    if in_body is not None and in_body != in_path:
        raise bad_input("'model' differs from the model in the path; leave it out", "model")


def refuse_field(field: str, value: object, advice: str) -> None:
    """Raises ApiError where a field of the wider API is used that is not served; it is never silently ignored."""
    if value is not None:
        raise bad_input(f"'{field}' is not supported here; {advice}", field)


def refuse_unless(field: str, value: object, served: tuple[object, ...], advice: str) -> None:
    """Raises ApiError for a value, if there is one, that is none of those that are served."""
    if value not in served:
        refuse_field(field, value, advice)
