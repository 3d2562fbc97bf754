"""The families of decoders whose MLPs are mixtures of experts, as families.py has the dense ones.

A layer's experts become two parameters: gate and up of each below those of the one before, and all that lead down. How
a checkpoint has them, tensor by tensor or in one, is the family's business.
"""

from dataclasses import replace
from typing import Final

from engine.kernels.experts.routing_rule import RouterScores, RoutingRule
from engine.models.decoder_config import (
    MixtureConfig,
    ModelConfig,
    ModelConfigError,
    QueryTemperature,
    number,
    positive_int,
)
from engine.models.family_parts import (
    CHUNKED_KIND,
    FULL_KIND,
    Entries,
    alternating_spans,
    head_norm_entries,
    mlp_entries,
    output_entries,
    qkv_entries,
    qwen_spans,
    shared_config,
    spans_by_kind,
    window_span,
)
from engine.models.parameter_entries import (
    ExpertStack,
    NumberPacking,
    ParameterEntry,
    TensorScales,
    TensorSource,
    entry,
    linear_entries,
)
from engine.models.rope_config import rope_entry
from engine.step.key_span import FULL, KeySpan

_MXFP4_BLOCK: Final = 32


class _MixtureLayer:
    """Norms before attention and before an MLP that is a mixture, or dense.

    mlp, router  what the checkpoint calls a layer's MLP, and the router in it.
    """

    norm_offset = 0.0
    mlp = "mlp."
    router = "gate"

    def layer(self, config: ModelConfig, index: int, source: str, prefix: str) -> list[ParameterEntry]:
        return [
            entry(f"{prefix}attention_norm", (f"{source}input_layernorm.weight", (config.hidden,))),
            *self.attention(config, index, source, prefix),
            entry(f"{prefix}mlp_norm", (f"{source}post_attention_layernorm.weight", (config.hidden,))),
            *self._mlp(config, index, f"{source}{self.mlp}", prefix),
        ]

    def attention(self, config: ModelConfig, index: int, source: str, prefix: str) -> list[ParameterEntry]:
        """The parameters of a layer's attention, in the order of their use."""
        sinks = (entry(f"{prefix}sinks", (f"{source}self_attn.sinks", (config.heads,))),) if config.sinks else ()
        return [
            *qkv_entries(config, index, source, prefix),
            *head_norm_entries(config, source, prefix, 0.0),
            *sinks,
            *output_entries(config, source, prefix),
        ]

    def _mlp(self, config: ModelConfig, index: int, source: str, prefix: str) -> list[ParameterEntry]:
        mixture = config.mixture
        if mixture is None or not mixture.layers[index]:
            return mlp_entries(config, source, prefix)
        router = [(f"{source}{self.router}", mixture.rule.experts)]
        shared = mlp_entries(config, f"{source}shared_expert.", f"{prefix}shared.", mixture.shared)
        return [
            *linear_entries(f"{prefix}router", router, config.hidden, mixture.biased),
            *(shared if mixture.shared else ()),
            *self._experts(config, mixture, f"{source}experts.", f"{prefix}experts."),
        ]

    def _experts(self, config: ModelConfig, mixture: MixtureConfig, source: str, prefix: str) -> list[ParameterEntry]:
        """Each expert's linear layers are tensors of their own."""
        return _expert_entries(config, mixture, source, prefix, ("gate_proj", "up_proj", "down_proj"))


class Mixtral(_MixtureLayer):
    """Mixtral: some of few wide experts."""

    mlp = "block_sparse_moe."

    def config(self, config: Entries) -> ModelConfig:
        shared = shared_config(config)
        rule = _rule(config, experts=8, chosen=2, normed=True)
        mixture = MixtureConfig((True,) * shared.layers, rule, shared.intermediate)
        return replace(shared, spans=(window_span(config),) * shared.layers, mixture=mixture)

    def _experts(self, config: ModelConfig, mixture: MixtureConfig, source: str, prefix: str) -> list[ParameterEntry]:
        return _expert_entries(config, mixture, source, prefix, ("w1", "w3", "w2"))


class Qwen3Moe(_MixtureLayer):
    """Qwen 3 with experts: many narrow ones, in all layers but those that the file names."""

    def config(self, config: Entries) -> ModelConfig:
        shared, biased = shared_config(config), bool(config.get("attention_bias", False))
        step, dense = positive_int(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ModelConfigError(f"mlp_only_layers must list layers, not {dense!r}")
        layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(shared.layers))
        rule = _rule(config, experts=128, chosen=8, normed=bool(config.get("norm_topk_prob", False)))
        mixture = MixtureConfig(layers, rule, positive_int(config, "moe_intermediate_size", 768))
        return replace(
            shared, spans=qwen_spans(config, shared.layers), qkv_bias=biased, output_bias=biased, qk_norm=True,
            mixture=mixture,
        )  # fmt: skip


class Llama4(_MixtureLayer):
    """Llama 4's text: chunks in the layers that rotate, none in those that do not; one expert of some, and one that all
    rows take, in every layer or in every other one."""

    mlp = "feed_forward."
    router = "router"

    def config(self, config: Entries) -> ModelConfig:
        shared = shared_config({"head_dim": 128, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, **config})
        layers, interval = shared.layers, positive_int(config, "no_rope_layer_interval", 4)
        rotated = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(rotated, list) or len(rotated) != layers:
            raise ModelConfigError(f"no_rope_layers must say of each of {layers} layers whether it rotates")
        chunk = KeySpan(chunk=positive_int(config, "attention_chunk_size", 8192))
        kinds = [CHUNKED_KIND if each else FULL_KIND for each in rotated]
        temperature = None
        if config.get("attn_temperature_tuning", True):
            temperature = QueryTemperature(positive_int(config, "floor_scale", 8192), number(config, "attn_scale", 0.1))
        rule = _rule(config, experts=16, chosen=1, scores=RouterScores.SIGMOID, scales_inputs=True)
        mixture = MixtureConfig(_llama4_layers(config, layers), rule, shared.intermediate, shared=shared.intermediate)
        return replace(
            shared, intermediate=positive_int(config, "intermediate_size_mlp", 16384), mixture=mixture,
            spans=spans_by_kind(config, {FULL_KIND: FULL, CHUNKED_KIND: chunk}, kinds),
            ropes=tuple(
                replace(rope, interleaved=True) if turns and rope else None
                for rope, turns in zip(shared.ropes, rotated, strict=True)
            ),
            temperature=temperature, rotated_norm=bool(config.get("use_qk_norm", True)),
            qkv_bias=bool(config.get("attention_bias", False)), output_bias=bool(config.get("attention_bias", False)),
        )  # fmt: skip

    def _experts(self, config: ModelConfig, mixture: MixtureConfig, source: str, prefix: str) -> list[ParameterEntry]:
        """All experts are one tensor, and each lies [inputs, outputs] in it."""
        experts, inner, hidden = mixture.held, mixture.intermediate, config.hidden
        stack = ExpertStack(transposed=True)
        return [
            _stacked(
                f"{prefix}gate_up.weight", f"{source}gate_up_proj", (experts, hidden, 2 * inner), stack,
                _gate_up_sections(mixture),
            ),
            _stacked(f"{prefix}down.weight", f"{source}down_proj", (experts, inner, hidden), stack),
        ]  # fmt: skip


class GptOss(_MixtureLayer):
    """gpt-oss: a window in every other layer, sinks, and experts with biases, which the files have in 4 bits a number
    or as they are."""

    router = "router"

    def config(self, config: Entries) -> ModelConfig:
        yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
        config = {"head_dim": 64, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, **config}
        if not rope_entry(config):
            config = {**config, "rope_parameters": yarn}
        shared, biased = shared_config(config), bool(config.get("attention_bias", True))
        spans = alternating_spans(config, 2, 128)
        rule = _rule(config, experts=128, chosen=4, scores=RouterScores.SOFTMAX_OF_CHOSEN)
        mixture = MixtureConfig(
            (True,) * shared.layers, rule, shared.intermediate, biased=True, limit=number(config, "swiglu_limit", 7.0)
        )
        mxfp4 = bool(config.get("quantization_config"))
        if mxfp4 and (shared.hidden % _MXFP4_BLOCK or shared.intermediate % _MXFP4_BLOCK):
            raise ModelConfigError(f"hidden_size and intermediate_size must be multiples of {_MXFP4_BLOCK} in mxfp4")
        return replace(
            shared, spans=spans, qkv_bias=biased, output_bias=biased, sinks=True, mixture=mixture, mxfp4=mxfp4
        )

    def _experts(self, config: ModelConfig, mixture: MixtureConfig, source: str, prefix: str) -> list[ParameterEntry]:
        """All experts are one tensor. Their gates and ups take turns."""
        experts, inner, hidden = mixture.held, mixture.intermediate, config.hidden
        parameters = []
        for name, outputs, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            tensor, interleaved = f"{source}{name}_proj", name == "gate_up"
            sections = _gate_up_sections(mixture) if interleaved else ()
            straight = ExpertStack(interleaved=interleaved)
            if config.mxfp4:
                blocks = (experts, outputs, inputs // _MXFP4_BLOCK, _MXFP4_BLOCK // 2)
                scales = TensorScales(f"{tensor}_scales", (blocks[:-1],), NumberPacking.MXFP4)
                weight = TensorSource(f"{tensor}_blocks", blocks, sections, straight, scales)
                parameters.append(ParameterEntry(f"{prefix}{name}.weight", (weight,)))
            else:
                stack, shape = ExpertStack(True, interleaved), (experts, inputs, outputs)
                parameters.append(_stacked(f"{prefix}{name}.weight", tensor, shape, stack, sections))
            parameters.append(
                _stacked(f"{prefix}{name}.bias", f"{tensor}_bias", (experts, outputs), straight, sections)
            )
        return parameters


def _rule(
    config: Entries, experts: int, chosen: int, scores: RouterScores = RouterScores.SOFTMAX, normed: bool = False,
    scales_inputs: bool = False,
) -> RoutingRule:  # fmt: skip
    """Numbers are what is meant where the file has none. Raises ModelConfigError."""
    entry = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    count, each = positive_int(config, entry, experts), positive_int(config, "num_experts_per_tok", chosen)
    if each > count:
        raise ModelConfigError(f"num_experts_per_tok {each} is more than {entry} {count}")
    return RoutingRule(count, each, scores, normed, scales_inputs=scales_inputs)


def _llama4_layers(config: Entries, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: those that the file lists, or every so many."""
    step, listed = positive_int(config, "interleave_moe_layer_step", 1), config.get("moe_layers")
    if listed is None:
        return tuple((layer + 1) % step == 0 for layer in range(layers))
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < layers for layer in listed):
        raise ModelConfigError(f"moe_layers must list some of {layers} layers, not {listed!r}")
    return tuple(layer in listed for layer in range(layers))


def _expert_entries(
    config: ModelConfig, mixture: MixtureConfig, source: str, prefix: str, names: tuple[str, str, str]
) -> list[ParameterEntry]:
    """Stacks made of a tensor for each expert's gate, up and down, which have these names."""
    gate, up, down = names
    experts, inner, hidden = range(mixture.held), mixture.intermediate, config.hidden
    gated = [(f"{source}{expert}.{name}", inner) for expert in experts for name in (gate, up)]
    return [
        *linear_entries(f"{prefix}gate_up", gated, hidden, False),
        *linear_entries(f"{prefix}down", [(f"{source}{expert}.{down}", hidden) for expert in experts], inner, False),
    ]


def _stacked(
    parameter: str, name: str, shape: tuple[int, ...], stack: ExpertStack, sections: tuple[int, ...] = ()
) -> ParameterEntry:
    return ParameterEntry(parameter, (TensorSource(name, shape, sections, stack),))


def _gate_up_sections(mixture: MixtureConfig) -> tuple[int, ...]:
    """Gates and ups of all experts, as they come to lie."""
    return (mixture.intermediate,) * (2 * mixture.held)
