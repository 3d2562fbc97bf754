"""The tables of rotary embeddings: cos and sin by position, for each kind of layer that a model has.

T rows, P positions, D head size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.decoder_config import ModelConfig, QueryTemperature, RopeConfig


@dataclass(frozen=True, slots=True)
class RopeKind:
    """How a layer rotates. Where it sees chunks of `period` positions, a place in the chunk does for a position."""

    rope: RopeConfig
    period: int | None

    def tables(self, head_dim: int, context_tokens: int) -> tuple[Tensor, Tensor]:
        """`rope_tables` as far as the layer needs them in a context."""
        return rope_tables(self.rope, head_dim, min(context_tokens, self.period or context_tokens), context_tokens)


def rope_kinds(config: ModelConfig) -> tuple[RopeKind | None, ...]:
    """Each layer's; None where it does not rotate."""
    return tuple(
        None if rope is None else RopeKind(rope, span.chunk)
        for rope, span in zip(config.ropes, config.spans, strict=True)
    )


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: int, context_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim], both halves written out; sin's first half is negated. What does not
    turn follows what does in each half (parameter_entries.HeadOrder)."""
    frequencies_D = inverse_frequencies(rope, rope.rotary_dim or head_dim, context_tokens or positions)
    angles = torch.outer(torch.arange(positions).float(), frequencies_D)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    still = head_dim // 2 - cos.shape[1]
    cos, sin = torch.nn.functional.pad(cos, (0, still), value=1.0), torch.nn.functional.pad(sin, (0, still))
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, context_tokens: int) -> Tensor:
    """float32 [rotary_dim ÷ 2]: how fast each pair turns per position."""
    turns = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)
    match rope.kind:
        case "linear":
            return 1.0 / turns / rope.factor
        case "llama3":
            return _llama3(rope, 1.0 / turns)
        case "yarn":
            return _yarn(rope, turns, rotary_dim)
        case "longrope":
            # By the context served, as in vLLM. By each text's length, as the reference library has it, KV would have
            # to be computed again from the text's first token on when it grows past the original context, and no
            # prefix that was cached by one set of factors could serve a text that takes the other.
            long = context_tokens > rope.original_context_tokens
            return 1.0 / (torch.tensor(rope.long_factors if long else rope.short_factors) * turns)
        case _:
            return 1.0 / turns


def query_temperatures(heat: QueryTemperature, positions_T: Tensor) -> Tensor:
    """float32 [T]: what the queries at these positions are multiplied by."""
    steps_T = torch.floor((positions_T.float() + heat.ahead) / heat.unit)
    return torch.log1p(steps_T) * heat.gain + 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    low_wavelength = rope.original_context_tokens / rope.low_frequency_factor
    high_wavelength = rope.original_context_tokens / rope.high_frequency_factor
    span = rope.high_frequency_factor - rope.low_frequency_factor
    smooth = (rope.original_context_tokens / wavelength - rope.low_frequency_factor) / span
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > low_wavelength, plain / rope.factor, plain)
    between = (wavelength <= low_wavelength) & (wavelength >= high_wavelength)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, turns: Tensor, rotary_dim: int) -> Tensor:
    """Pairs that turn fast are kept, slow ones stretched by the factor, with a ramp between (Peng et al., 2023)."""

    def pair(count: float) -> float:
        """The pair that turns so often within the original context."""
        waves = rope.original_context_tokens / (count * 2 * math.pi)
        return rotary_dim * math.log(waves) / (2 * math.log(rope.theta))

    high, low = (pair(count) for count in rope.ramp_turns)
    if rope.ramp_whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * turns) * (1 - kept) + 1.0 / turns * kept
