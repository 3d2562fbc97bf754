"""config.json's entries of rotary embeddings → RopeConfig, in both spellings. It computes no tables."""

import math
from collections.abc import Mapping
from typing import Any

from engine.models.decoder_config import ROPE_KINDS, ModelConfigError, RopeConfig, number, positive_int


def rope_entry(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_theta beside rope_scaling, or the newer rope_parameters that holds all of it."""
    entry = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(entry, Mapping):
        raise ModelConfigError(f"rope scaling must be an object, not {entry!r}")
    return entry


def rope_config(config: Mapping[str, Any], head_dim: int, entry: Mapping[str, Any], theta: float) -> RopeConfig:
    """What `entry` means; what it leaves unsaid of the context is config.json's, and theta. Raises ModelConfigError."""
    kind = str(entry.get("rope_type", entry.get("type", "default")))
    theta = number({"rope_theta": entry.get("rope_theta", config.get("rope_theta"))}, "rope_theta", theta)
    partial = number(
        {"partial_rotary_factor": entry.get("partial_rotary_factor", config.get("partial_rotary_factor"))},
        "partial_rotary_factor", 1.0,
    )  # fmt: skip
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelConfigError(f"partial_rotary_factor {partial} rotates {rotary_dim} of a head's {head_dim} numbers")
    rotated = None if rotary_dim == head_dim else rotary_dim
    try:
        match kind:
            case "default":
                return RopeConfig(theta, rotary_dim=rotated)
            case "linear":
                return RopeConfig(theta, kind, number(entry, "factor"), rotary_dim=rotated)
            case "llama3":
                low, high = float(entry["low_freq_factor"]), float(entry["high_freq_factor"])
                original = int(entry["original_max_position_embeddings"])
                return RopeConfig(theta, kind, float(entry["factor"]), low, high, original, rotary_dim=rotated)
            case "yarn":
                return _yarn(config, entry, theta, rotated)
            case "longrope" | "su":
                return _longrope(config, entry, theta, rotary_dim, rotated)
    except KeyError as missing:
        raise ModelConfigError(f"rope scaling {kind!r} lacks {missing}") from None
    raise ModelConfigError(f"rope scaling {kind!r} is not supported; {', '.join(ROPE_KINDS)} are")


def _yarn(config: Mapping[str, Any], entry: Mapping[str, Any], theta: float, rotated: int | None) -> RopeConfig:
    """As in YaRN (Peng et al., 2023): attention grows by 0.1·log(factor) unless the entry says otherwise."""
    original = positive_int(entry, "original_max_position_embeddings")
    factor = number(entry, "factor", positive_int(config, "max_position_embeddings") / original)
    gain, gain_all = entry.get("mscale"), entry.get("mscale_all_dim")
    attention = _gain(factor, gain) / _gain(factor, gain_all) if gain and gain_all else _gain(factor)
    return RopeConfig(
        theta, "yarn", factor, original_context_tokens=original,
        ramp_turns=(number(entry, "beta_slow", 1.0), number(entry, "beta_fast", 32.0)),
        ramp_whole=bool(entry.get("truncate", True)),
        attention_factor=number(entry, "attention_factor", attention), rotary_dim=rotated,
    )  # fmt: skip


def _gain(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(
    config: Mapping[str, Any], entry: Mapping[str, Any], theta: float, rotary_dim: int, rotated: int | None
) -> RopeConfig:
    factors = []
    for name in ("short_factor", "long_factor"):
        listed = entry[name]
        if not isinstance(listed, list) or len(listed) != rotary_dim // 2 or not all(listed):
            raise ModelConfigError(f"rope scaling's {name} must list {rotary_dim // 2} divisors, not {listed!r}")
        factors.append(tuple(float(each) for each in listed))
    context = positive_int(config, "max_position_embeddings")
    original = positive_int(entry, "original_max_position_embeddings", config.get("original_max_position_embeddings"))
    factor = number(entry, "factor", context / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta, "longrope", factor, original_context_tokens=original, short_factors=factors[0], long_factors=factors[1],
        attention_factor=number(entry, "attention_factor", attention), rotary_dim=rotated,
    )  # fmt: skip
