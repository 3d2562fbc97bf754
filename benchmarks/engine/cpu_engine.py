"""The engine on a CPU beside llama.cpp, with the same weights: decoding alone and in company, a cached system prompt.

    python -m benchmarks.engine.cpu_engine [--threads 2] [--rounds 5] [--geometry 135M]

A Llama with random weights and the sizes of SmolLM2-135M or of Llama-3.2-1B is written as safetensors and as GGUF
(BF16, the small one also F32). Ours runs through `LoadedModel.launch`; llama.cpp through `llama_decode` with one batch
of all sequences a step, which is what its server does with parallel slots. Both are greedy, both include choosing the
token. The two take turns, and each figure is the median of its rounds' medians, at the thread count that suits each
best (1 or --threads), the peer's also with its better file. On a machine that does other work, the ratio is what
counts. GOMP_SPINCOUNT=4000 and GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment have threads wait and pages be
as large as in a replica.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.record import record
from engine.execution.open import inference_mode, open_model
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.step.layout import SequenceSlice, pack_step

BLOCK_TOKENS = 16
SHARED, OWN, CHUNK = 2048, 32, 512
GREEDY = SamplingParams()


class Geometry(NamedTuple):
    """A tied Llama's sizes, and the files that llama.cpp is given of it."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head: int
    kinds: tuple[str, ...]

    @property
    def step_bytes(self) -> int:
        """All weights, which a step reads once, in bf16."""
        width = (self.heads + 2 * self.kv_heads) * self.head
        layer = self.hidden * (width + self.heads * self.head + 3 * self.inner)
        return 2 * (self.layers * layer + self.vocabulary * self.hidden)


GEOMETRIES = {
    "135M": Geometry(576, 1536, 30, 49152, 9, 3, 64, ("bf16", "f32")),
    "1B": Geometry(2048, 8192, 16, 128256, 32, 8, 64, ("bf16",)),
}


def weights(sizes: Geometry) -> dict[str, torch.Tensor]:
    """Random bf16 tensors under their Hugging Face names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.04).bfloat16()

    tensors = {
        "model.embed_tokens.weight": random(sizes.vocabulary, sizes.hidden),
        "model.norm.weight": torch.ones(sizes.hidden).bfloat16(),
    }
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(sizes.hidden).bfloat16()
        for name, outputs, inputs in (
            ("self_attn.q_proj", sizes.heads * sizes.head, sizes.hidden),
            ("self_attn.k_proj", sizes.kv_heads * sizes.head, sizes.hidden),
            ("self_attn.v_proj", sizes.kv_heads * sizes.head, sizes.hidden),
            ("self_attn.o_proj", sizes.hidden, sizes.heads * sizes.head),
            ("mlp.gate_proj", sizes.inner, sizes.hidden),
            ("mlp.up_proj", sizes.inner, sizes.hidden),
            ("mlp.down_proj", sizes.hidden, sizes.inner),
        ):
            tensors[f"{prefix}{name}.weight"] = random(outputs, inputs)
    return tensors


def write_folder(folder: Path, sizes: Geometry, tensors: dict[str, torch.Tensor]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def write_gguf(path: Path, sizes: Geometry, tensors: dict[str, torch.Tensor], kind: str) -> None:
    """The same weights for llama.cpp, which rotates neighbouring pairs: rows of q and k are reordered for it."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(sizes.head)
    writer.add_vocab_size(sizes.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, sizes.layers)
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            heads = tensor.shape[0] // sizes.head
            tensor = tensor.view(heads, 2, sizes.head // 2, sizes.hidden).transpose(1, 2).reshape(tensor.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1 or kind == "f32":
            writer.add_tensor(gguf_name, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(gguf_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Ours:
    """Sequences of our engine, each with its own blocks."""

    def __init__(self, folder: Path, threads: int, dtype: str = "auto") -> None:
        spec = ModelSpec(name=folder.name, folder=str(folder), kv_bytes=1 << 30, dtype=dtype)
        self.model = open_model(spec, "cpu", threads, lambda: None)

    def start(self, prompts: list[list[int]], new_tokens: int) -> None:
        width = -(-(len(prompts[0]) + new_tokens) // BLOCK_TOKENS)
        self.tables = [list(range(i * width, (i + 1) * width)) for i in range(len(prompts))]
        self.length = len(prompts[0])
        self.last = []
        for prompt, table in zip(prompts, self.tables, strict=True):
            flight = self.model.executor.launch(pack_step([SequenceSlice(prompt, 0, [table], GREEDY)], BLOCK_TOKENS))
            self.last.append(int(flight.wait().tokens_R[0]))

    def step(self) -> None:
        slices = [
            SequenceSlice([token], self.length, [table], GREEDY)
            for token, table in zip(self.last, self.tables, strict=True)
        ]
        self.last = self.model.executor.launch(pack_step(slices, BLOCK_TOKENS)).wait().tokens_R.tolist()
        self.length += 1

    def prefill_seconds(self, prompt: list[int], cached: int) -> float:
        """From `cached` tokens on to the first token, in chunks."""
        table = list(range(-(-len(prompt) // BLOCK_TOKENS)))
        started = time.perf_counter()
        for first in range(cached, len(prompt), CHUNK):
            chunk = prompt[first : first + CHUNK]
            sampling = GREEDY if first + CHUNK >= len(prompt) else None
            self.model.executor.launch(pack_step([SequenceSlice(chunk, first, [table], sampling)], BLOCK_TOKENS)).wait()
        return time.perf_counter() - started


class LlamaCpp:
    """The same through libllama: one context of many sequences, one batch a step."""

    def __init__(self, path: Path, sizes: Geometry, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16384, 2048, 512, 16
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self._vocabulary = sizes.vocabulary

    def start(self, prompts: list[list[int]], new_tokens: int) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.last = []
        for sequence, prompt in enumerate(prompts):
            self._decode([(token, position, sequence) for position, token in enumerate(prompt)], [len(prompt) - 1])
            self.last.append(self._greedy(len(prompt) - 1))
        self.length = len(prompts[0])

    def step(self) -> None:
        self._decode([(token, self.length, sequence) for sequence, token in enumerate(self.last)], None)
        self.last = [self._greedy(row) for row in range(len(self.last))]
        self.length += 1

    def _decode(self, entries: list[tuple[int, int, int]], logits_rows: list[int] | None) -> None:
        batch = self.batch
        batch.n_tokens = len(entries)
        for row, (token, position, sequence) in enumerate(entries):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = logits_rows is None or row in logits_rows
        assert self.api.llama_decode(self.context, batch) == 0

    def _greedy(self, row: int) -> int:
        pointer = self.api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(pointer, (self._vocabulary,)).argmax())


def step_seconds(engine: Ours | LlamaCpp, prompts: list[list[int]], steps: int) -> float:
    engine.start(prompts, steps)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per second that a plain sum over more memory than the caches hold reaches: the best of some rounds."""
    data = torch.ones(64 << 20, dtype=torch.float32)
    return data.nbytes / min(_timed(lambda: data.sum()) for _ in range(8))


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--geometry", choices=tuple(GEOMETRIES), default="135M")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), arguments.geometry, arguments.threads, arguments.rounds, arguments.steps)


def instructions() -> str:
    """By which bfloat16 is multiplied here: figures of different ones stand beside each other."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX-512" if torch.cpu._is_avx512_bf16_supported() else "AVX2"


def measure(folder: Path, geometry: str, threads: int, rounds: int, steps: int) -> None:
    sizes = GEOMETRIES[geometry]
    tensors = weights(sizes)
    write_folder(folder, sizes, tensors)
    counts = sorted({1, threads})
    inference_mode().__enter__()
    hearth = Ours(folder, threads)
    peers = {}
    for kind in sizes.kinds:
        write_gguf(folder / f"{kind}.gguf", sizes, tensors, kind)
        for count in counts:
            peers[f"{kind} {count}t"] = LlamaCpp(folder / f"{kind}.gguf", sizes, count)
    del tensors
    bytes_per_second = bandwidth()
    for streams in (1, 16):
        prompts = np.random.default_rng(streams).integers(0, sizes.vocabulary, (streams, 128)).tolist()
        ours_s: dict[int, list[float]] = {count: [] for count in counts}
        peers_s: dict[str, list[float]] = {kind: [] for kind in peers}
        for _ in range(rounds):
            for count in counts:
                torch.set_num_threads(count)
                ours_s[count].append(step_seconds(hearth, prompts, steps))
            for kind, peer in peers.items():
                peers_s[kind].append(step_seconds(peer, prompts, steps))
        ours_s_best, count = min((statistics.median(durations), count) for count, durations in ours_s.items())
        peer_s_best, best = min((statistics.median(durations), kind) for kind, durations in peers_s.items())
        kv_bytes = streams * 140 * sizes.layers * 4 * sizes.kv_heads * sizes.head
        bound = streams * bytes_per_second / (sizes.step_bytes + kv_bytes)
        shape = f"decode, {geometry}, {streams} streams, 128 in, up to {threads} threads, {instructions()}"
        record("cpu_engine", shape, streams / ours_s_best, "tokens/s", bound=bound)
        print(f"{'':12} ours was best with {count} threads")
        record("cpu_engine", shape, streams / peer_s_best, "tokens/s", bound=bound, peer=f"llama.cpp {best}")
        ratio = peer_s_best / ours_s_best
        record("cpu_engine", shape + ": ours ÷ llama.cpp", ratio, "×", bound={1: 0.8, 16: 1.3}[streams])
        if streams == 1:
            record("first_hour", f"first-cpu-decode: {geometry}, ÷ llama.cpp, {instructions()}", ratio, "×", bound=0.8)
    if geometry == "135M":
        measure_prefill(hearth, sizes, threads)


def measure_prefill(hearth: Ours, sizes: Geometry, threads: int) -> None:
    torch.set_num_threads(threads)
    prompt = np.random.default_rng(0).integers(0, sizes.vocabulary, SHARED + OWN).tolist()
    cold = min(hearth.prefill_seconds(prompt, 0) for _ in range(3))
    hit = min(hearth.prefill_seconds(prompt, SHARED) for _ in range(5))
    record("cpu_engine", f"prefill {SHARED}+{OWN} cold, 135M, {threads} threads", 1e3 * cold, "ms")
    record("cpu_engine", f"prefill {OWN} behind {SHARED} cached, 135M, {threads} threads", 1e3 * hit, "ms")
    record("cpu_engine", f"cached ÷ cold first token, 135M, {threads} threads", hit / cold, "×", bound=0.1)


if __name__ == "__main__":
    main()
