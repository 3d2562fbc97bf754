"""DFloat11 on the geometry that the lossless figures are taken on: bytes of its weights, and steps of 1 and 64 rows.

    pip install dfloat11==0.5.0 dahuffman==0.4.2 cupy-cuda13x accelerate transformers
    python -m benchmarks.bf12.dfloat11

The package's own loader, hooks and kernel run, unchanged, in transformers' Llama. Each step runs eagerly, as in the
package, and in a CUDA graph, which favours it; the same model in bf16 runs beside it. A step has no keys of earlier
tokens: only the cost of the weights is compared, which favours it too. Weights are Gaussian, and the logits of both
models must be equal.

Only the packing of codes is ours: the package's loop in Python over each number takes hours for 8 billion. `packed`
does the same with torch, and is compared with that loop on the first numbers of each module.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.record import record
from engine.bench.geometries import GEOMETRIES

GEOMETRY: Final = "llama-3.1-8b"
ROWS: Final = (1, 64)
MATRICES: Final = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
PATTERNS: Final = {r"model\.embed_tokens": [], "lm_head": [], r"model\.layers\.\d+": list(MATRICES)}
PEER: Final = "DFloat11 0.5.0"
PLAIN: Final = "transformers, bf16"
_THREADS, _THREAD_BYTES = 512, 8  # the kernel's, as its loader has them
_CHECKED: Final = 200_000  # numbers that the package's own loop packs too
_ROUNDS: Final = 5
_STEPS: Final = 5  # of a round
_WARM_S: Final = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    _offer_pkg_resources()
    plain = _llama(torch.device("cuda"))
    with tempfile.TemporaryDirectory(prefix="hearth-dfloat11-") as name:
        began = time.monotonic()
        for at, (module, weights) in enumerate(_modules(plain)):
            _save(Path(name) / f"{at:03}.safetensors", module, weights)
        config = {"version": "0.5.0", "threads_per_block": [_THREADS], "bytes_per_thread": _THREAD_BYTES}
        (Path(name) / "config.json").write_text(json.dumps({"dfloat11_config": {**config, "pattern_dict": PATTERNS}}))
        print(f"packed in {time.monotonic() - began:.0f} s", flush=True)
        from dfloat11 import DFloat11Model

        coded = DFloat11Model.from_pretrained(name, device="cuda:0", bfloat16_model=_llama(torch.device("cpu")))
    for peer, model in ((PLAIN, plain), (PEER, coded)):
        record("lossless", "dfloat11-bytes", round(_bytes_of(model) / 1e9, 3), "GB", peer=peer)
    for how, wrap in ((" eager", _eager), ("", _graphed)):
        for rows in ROWS:
            ids = torch.randint(plain.config.vocab_size, (rows, 1), device="cuda")
            with torch.inference_mode():
                same = torch.equal(plain(ids, use_cache=False).logits, coded(ids, use_cache=False).logits)
            assert same, "DFloat11's logits are not those of bf16"
            for peer, ms in zip((PLAIN, PEER), pairs([wrap(plain, ids), wrap(coded, ids)]), strict=True):
                record("lossless", f"dfloat11-{rows}{how}", round(ms, 3), "ms", peer=peer)


# Steps


def _eager(model: Any, ids: Tensor) -> Callable[[], object]:
    @torch.inference_mode()
    def step() -> object:
        return model(ids, use_cache=False).logits

    return step


def _graphed(model: Any, ids: Tensor) -> Callable[[], object]:
    """The package launches on cupy's stream: it is told that the one that is captured is that."""
    import cupy

    step, graph, stream = _eager(model, ids), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        step()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        step()
    return graph.replay


def pairs(steps: Sequence[Callable[[], object]]) -> list[float]:
    """The median ms of each, in rounds that take all of them in turn."""
    began = time.monotonic()
    while time.monotonic() < began + _WARM_S:
        for step in steps:
            step()
        torch.cuda.synchronize()
    took: list[list[float]] = [[] for _ in steps]
    for number in range(_ROUNDS):
        for at in range(len(steps)) if number % 2 else reversed(range(len(steps))):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(_STEPS):
                steps[at]()
            end.record()
            end.synchronize()
            took[at].append(start.elapsed_time(end) / _STEPS)
    return [statistics.median(each) for each in took]


# The model, and its weights in the package's format


def _llama(device: torch.device) -> Any:
    """On the GPU with weights drawn, on the CPU with none: those are loaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {key: value for key, value in GEOMETRIES[GEOMETRY].items() if key not in ("architectures", "torch_dtype")}
    config = LlamaConfig(**sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device, _undrawn():
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.eval()
    if device.type == "cuda":
        draw = torch.Generator(device).manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(0, 0.02, generator=draw)
    return model


@contextlib.contextmanager
def _undrawn() -> Iterator[None]:
    """Modules' matrices hold what their memory held: to draw 8 billion numbers on a CPU takes minutes."""
    from transformers import PreTrainedModel

    originals = [(kind, name, getattr(kind, name)) for kind, name in (
        (nn.Linear, "reset_parameters"), (nn.Embedding, "reset_parameters"), (PreTrainedModel, "init_weights"),
    )]  # fmt: skip
    for kind, name, _ in originals:
        setattr(kind, name, lambda self: None)
    try:
        yield
    finally:
        for kind, name, was in originals:
            setattr(kind, name, was)


def _modules(model: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """What the package packs together: a layer's matrices, the embedding, the head."""
    yield "model.embed_tokens", [model.model.embed_tokens.weight]
    yield "lm_head", [model.lm_head.weight]
    for number, layer in enumerate(model.model.layers):
        yield f"model.layers.{number}", [layer.get_submodule(name).weight for name in MATRICES]


def _save(path: Path, module: str, weights: list[Tensor]) -> None:
    from dfloat11 import dfloat11_utils
    from safetensors.torch import save_file

    bits_E = torch.cat([weight.data.flatten().view(torch.int16) for weight in weights])
    exponents_E = (bits_E >> 7).to(torch.uint8)
    rest_E = ((bits_E >> 8) & 0x80 | bits_E & 0x7F).to(torch.uint8)
    counts = torch.bincount(exponents_E.int(), minlength=256).tolist()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its tables
        codec, _, table = dfloat11_utils.get_32bit_codec({value: count for value, count in enumerate(counts) if count})
        luts = dfloat11_utils.get_luts(table)
    head = exponents_E[:_CHECKED]
    expected = dfloat11_utils.encode(head.tolist(), codec, _THREAD_BYTES, _THREADS)
    for result, own in zip(packed(head, codec), expected, strict=True):
        assert result.cpu().tolist() == own.tolist(), "not packed as the package packs"
    encoded, gaps, positions = packed(exponents_E, codec)
    splits = torch.tensor([weight.numel() for weight in weights]).cumsum(0)[:-1]
    tensors = {
        "luts": luts, "encoded_exponent": encoded, "sign_mantissa": rest_E, "gaps": gaps,
        "output_positions": positions.int().view(torch.uint8), "split_positions": splits,
    }  # fmt: skip
    save_file({f"{module}.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)


def packed(symbols_E: Tensor, codec: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The codes one after another, where the first one that begins in each thread's bytes does so (5 bits each), and
    which one is the first of each block of threads: as the package's `encode` has them."""
    device, table = symbols_E.device, codec._table
    lengths, codes = torch.zeros(256, dtype=torch.int64), torch.zeros(256, dtype=torch.int64)
    for symbol, (length, code) in table.items():
        if isinstance(symbol, int):
            lengths[symbol], codes[symbol] = length, code
    index_E = symbols_E.int()
    length_E, code_E = lengths.to(device)[index_E], codes.to(device)[index_E]
    ends_E = length_E.cumsum(0)
    begins_E, total = ends_E - length_E, int(ends_E[-1])
    words = torch.zeros(total // 32 + 3, dtype=torch.int64, device=device)
    pair_E = code_E << (64 - begins_E % 32 - length_E)  # the code within two words
    words.index_add_(0, begins_E >> 5, (pair_E >> 32) & 0xFFFFFFFF)
    words.index_add_(0, (begins_E >> 5) + 1, pair_E & 0xFFFFFFFF)
    thread_bits, block_bits = 8 * _THREAD_BYTES, 8 * _THREAD_BYTES * _THREADS
    threads = _first_of(begins_E // thread_bits)
    gaps = begins_E[threads] % thread_bits
    positions = _first_of(begins_E // block_bits)
    bytes_ = ((words.unsqueeze(1) >> torch.tensor([24, 16, 8, 0], device=device)) & 0xFF).to(torch.uint8).view(-1)
    size = total // 8
    if total % 8:  # what is left of a byte is filled with the code that ends a text
        if total // thread_bits >= len(gaps):
            gaps = torch.cat((gaps, gaps.new_tensor([total % thread_bits])))
        if total // block_bits >= len(positions):
            positions = torch.cat((positions, positions.new_tensor([len(symbols_E)])))
        length, code = table[codec._eof]
        missing = 8 - total % 8
        bytes_[size] |= code >> (length - missing) if length >= missing else code << (missing - length)
        size += 1
    blocks = -(-size // (_THREADS * _THREAD_BYTES))
    gaps = nn.functional.pad(gaps, (0, _THREADS * blocks - len(gaps)))
    ones = (gaps.unsqueeze(1) >> torch.arange(4, -1, -1, device=device)) & 1
    eights = nn.functional.pad(ones.view(-1), (0, -ones.numel() % 8)).view(-1, 8)
    gap_bytes = (eights << torch.arange(7, -1, -1, device=device)).sum(1).to(torch.uint8)
    return bytes_[:size], gap_bytes, torch.cat((positions, positions.new_tensor([len(symbols_E)])))


def _first_of(groups_E: Tensor) -> Tensor:
    """Where each run of equal numbers begins."""
    begins = torch.ones_like(groups_E, dtype=torch.bool)
    begins[1:] = groups_E[1:] != groups_E[:-1]
    return begins.nonzero().view(-1)


def _bytes_of(model: Any) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def _offer_pkg_resources() -> None:
    """The package asks pkg_resources where its kernel lies; later setuptools have none."""
    with contextlib.suppress(ImportError):
        import pkg_resources  # noqa: F401

        return
    import importlib.resources

    stand_in = types.ModuleType("pkg_resources")
    stand_in.resource_filename = (  # type: ignore[attr-defined]
        lambda package, name: str(importlib.resources.files(package) / name)
    )
    sys.modules["pkg_resources"] = stand_in


if __name__ == "__main__":
    main()
