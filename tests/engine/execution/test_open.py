"""engine/execution/open.py: what opening promises, and that a row's logits are the same bits however its text is
computed."""

import json
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution import cpu_memory
from engine.execution.memory_plan import DoesNotFit
from engine.execution.open import open_model
from engine.layers import linear_cpu
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.step.executor import InflightStep, LoadedModel
from engine.step.layout import EmbeddingSpan, SequenceSlice, pack_step
from engine.weights.checkpoint import CheckpointError
from tests.support.batch_invariance import skip_if_bfloat16_varies
from tests.support.small_models import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    Text,
    in_all_groups,
    kv_pools,
    logits,
    open_small,
    poison,
    reference_model,
    saved,
    shuffled_tables,
    spec,
)

pytestmark = pytest.mark.usefixtures("inference")

GREEDY = SamplingParams()
EMBER = Path(__file__).parents[3] / "engine" / "builtin_model"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("llama 3.2 tied", "mistral window", "qwen2 window", "qwen3", "gemma2", "phi4 mini")
    folders = {family: saved(reference_model(family), tmp_path_factory.mktemp("model")) for family in families}
    return folders | {"ember": EMBER}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama 3.2 tied", "mistral window", "qwen3", "gemma2", "phi4 mini", "ember"])
@skip_if_bfloat16_varies()
def test_logits_are_equal_to_the_bit_whatever_the_chunks_the_company_and_the_blocks(
    folders: dict[str, Path], name: str, dtype: str
) -> None:
    runner = open_small(folders[name], dtype=dtype, kv_bytes=24 << 20)
    poison(runner)
    rng = np.random.default_rng(5)
    ids = rng.integers(0, runner.executor.limits.vocabulary, 700).tolist()
    ends = sorted({*rng.integers(1, 700, 60).tolist(), 1, 63, 64, 65, 128, 129, 512, 513, 700})
    alone = compute(runner, ids, ends, company=0, seed=1)
    for seed in range(2, 8):
        cuts = sorted({*rng.choice(ends, int(rng.integers(1, 30))).tolist(), 700})
        again = compute(runner, ids, cuts, company=seed % 4 * 3, seed=seed)
        for end in cuts:
            assert torch.equal(again[end], alone[end]), (seed, cuts, end)
    for pool in kv_pools(runner):
        pool.check()


def compute(runner: LoadedModel, ids: list[int], cuts: list[int], company: int, seed: int) -> dict[int, Tensor]:
    """Logits after each cut, the text computed in runs that end there, in other blocks for each seed, among others."""
    rng = np.random.default_rng(seed)
    lengths = [len(ids), *rng.integers(1, 60, company).tolist()]
    tables = shuffled_tables(runner, lengths, seed)
    text, found = Text(ids, tables[0]), {}
    for cut in cuts:
        others = [
            SequenceSlice(rng.integers(0, runner.executor.limits.vocabulary, length).tolist(), 0, [table], GREEDY)
            for length, table in zip(lengths[1:], tables[1:], strict=True)
        ]
        mine = text.slice(cut - text.computed, GREEDY)
        place = int(rng.integers(0, company + 1))
        found[cut] = logits(runner, [*others[:place], mine, *others[place:]])[place]
    return found


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.9, top_p=0.95, seed=4)])
def test_text_is_the_same_with_cache_hits_chunks_preemption_and_company(
    folders: dict[str, Path], sampling: SamplingParams
) -> None:
    runner = open_small(folders["ember"], dtype="auto", kv_bytes=24 << 20)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(10, runner.executor.limits.vocabulary, length).tolist() for length in (5, 130, 200)]
    tables = shuffled_tables(runner, [300] * 3, 1)
    plain = [write(runner, prompt, table, sampling, 40) for prompt, table in zip(prompts, tables, strict=True)]

    # Cache hit: the first 128 tokens of the last prompt lie in the blocks of the run before; only the rest is computed.
    cached = tables[2][:8] + shuffled_tables(runner, [300] * 4, 1)[3]
    assert write(runner, prompts[2], cached, sampling, 40, computed=128) == plain[2]

    # Preemption: after 17 tokens the blocks are lost, and prompt and output are computed again in chunks elsewhere.
    other = shuffled_tables(runner, [400], 9)[0]
    first = write(runner, prompts[1], tables[1], sampling, 17)
    again = write(runner, prompts[1] + first, other, sampling, 23, chunk=33)
    assert first + again == plain[1]

    # Company: all three at once, a token each per step.
    texts, written = prompts, [[token[0]] for token in plain]
    for prompt, table in zip(texts, tables, strict=True):
        runner.executor.launch(pack_step([SequenceSlice(prompt, 0, [table])], BLOCK_TOKENS)).wait()
    for step in range(39):
        slices = [
            SequenceSlice([done[-1]], len(prompt) + step, [table], sampling)
            for done, prompt, table in zip(written, texts, tables, strict=True)
        ]
        for done, token in zip(
            written, runner.executor.launch(pack_step(slices, BLOCK_TOKENS)).wait().tokens_R, strict=True
        ):
            done.append(int(token))
    assert written == plain


def write(
    runner: LoadedModel,
    prompt: list[int],
    table: list[int],
    sampling: SamplingParams,
    count: int,
    computed: int = 0,
    chunk: int = 512,
) -> list[int]:
    """`count` tokens after the prompt, which is computed from `computed` on in chunks."""
    ids, written = list(prompt), []
    while len(written) < count:
        end = min(computed + chunk, len(ids))
        wanted = sampling if end == len(ids) else None
        done = runner.executor.launch(
            pack_step([SequenceSlice(ids[computed:end], computed, [table], wanted)], BLOCK_TOKENS)
        ).wait()
        computed = end
        if wanted:
            written.append(int(done.tokens_R[0]))
            ids.append(written[-1])
    return written


SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.9, top_k=9, top_p=0.8, seed=6, logprobs=3),
    SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 1.5}),
]


@pytest.mark.parametrize("name", ["mistral window", "qwen3", "qwen2 window"])
def test_several_rows_of_a_slice_sample_what_steps_of_a_row_each_do(folders: dict[str, Path], name: str) -> None:
    """Masks and histories too: the nth row has the nth mask, and the tokens before it."""
    runner = open_small(folders[name])
    ids = np.random.default_rng(3).integers(0, 160, 90).tolist()
    tables = shuffled_tables(runner, [len(ids)] * (2 * len(SAMPLINGS) + 1), 5)
    masks_MW = np.random.default_rng(4).integers(-(2**31), 2**31, (5, 5), np.int64).astype(np.int32)
    apart = []
    for sampling, table in zip(SAMPLINGS, tables, strict=False):
        launch(runner, [SequenceSlice(ids[:85], 0, [table])]).wait()
        for end in range(86, 91):
            item = SequenceSlice(ids[end - 1 : end], end - 1, [table], sampling, (ids[:end], 40), masked=True)
            step = launch(runner, [item])
            runner.executor.sample(step, masks_MW[end - 86 : end - 85])
            apart.append(step.wait())
    slices = [
        SequenceSlice(ids[3:], 3, [table], sampling, (ids, 40), masked=True, wanted=5)
        for sampling, table in zip(SAMPLINGS, tables[len(SAMPLINGS) :], strict=False)
    ]
    launch(runner, [SequenceSlice(ids[:3], 0, item.tables) for item in slices]).wait()
    company = SequenceSlice([5, 6, 7], 0, [tables[-1]], GREEDY, wanted=2)
    step = launch(runner, [slices[0], company, *slices[1:]])
    runner.executor.sample(step, np.concatenate([masks_MW] * len(SAMPLINGS)))
    together = step.wait()
    rows = [row for row in range(len(together.tokens_R)) if row not in (5, 6)]
    assert together.tokens_R[rows].tolist() == [int(done.tokens_R[0]) for done in apart]
    for row, done in zip(rows, apart, strict=True):
        assert together.logprobs.get(row) == done.logprobs.get(0)


@pytest.mark.parametrize("rows", [1, 20])
def test_groups_have_tables_of_their_own_that_need_not_name_what_no_row_sees(
    folders: dict[str, Path], rows: int
) -> None:
    runner = open_small(folders["qwen2 window"])  # the first layer sees all, the others 40 tokens
    ids = np.random.default_rng(3).integers(0, 160, 120).tolist()
    whole, near, common = shuffled_tables(runner, [120] * 3, 5)
    poison(runner)
    launch(runner, [SequenceSlice(ids[:100], 0, [common])]).wait()
    launch(runner, [SequenceSlice(ids[:100], 0, [whole, near])]).wait()
    wanted = logits(runner, [SequenceSlice(ids[100 : 100 + rows], 100, [common], GREEDY, wanted=rows)])
    for layer, table in ((0, near), (1, whole), (2, whole), (1, near[:3]), (2, near[:3])):
        runner.sleeper.pools.layers[layer].view(-1, BLOCK_TOKENS, 64)[table] = float("nan")
    tables, firsts = [whole, near[3:]], [0, (100 + 1 - 40) // BLOCK_TOKENS]
    item = SequenceSlice(ids[100 : 100 + rows], 100, tables, GREEDY, wanted=rows, table_starts=firsts)
    assert torch.equal(logits(runner, [item]), wanted)


def launch(runner: LoadedModel, slices: list[SequenceSlice]) -> InflightStep:
    return runner.executor.launch(pack_step(in_all_groups(runner, slices), BLOCK_TOKENS))


def test_rows_of_a_buffer_are_taken_for_embeddings_and_nothing_else_changes(folders: dict[str, Path]) -> None:
    runner = open_small(folders["llama 3.2 tied"])
    executor, ids = runner.executor, np.random.default_rng(8).integers(0, 160, 40).tolist()
    table_VH = runner.sleeper.decoder.parameters.embedding
    plain = logits(runner, [SequenceSlice(ids, 0, [[2, 1, 0]], GREEDY, wanted=40)])
    executor._embeddings_EH = table_VH[ids[12:25]].float()
    spans = [EmbeddingSpan(12, 0, 5), EmbeddingSpan(20, 8, 5)]
    unknown = [*ids[:12], *[1] * 5, *ids[17:20], *[1] * 5, *ids[25:]]
    item = SequenceSlice(unknown, 0, [[2, 1, 0]], GREEDY, wanted=40, embeddings=spans)
    assert torch.equal(logits(runner, [item]), plain)
    with pytest.raises(AssertionError, match="past the buffer"):
        executor.launch(pack_step([item], BLOCK_TOKENS))  # its limits name none


def test_opening_says_what_the_replica_must_know(folders: dict[str, Path]) -> None:
    beats: list[int] = []
    runner = open_model(spec(folders["qwen3"]), "cpu", 1, lambda: beats.append(1))
    assert beats
    limits = runner.executor.limits
    assert (limits.context_tokens, limits.vocabulary, runner.stop_ids) == (CONTEXT_TOKENS, 160, {1})
    assert runner.paged.layout.block_tokens == BLOCK_TOKENS
    assert runner.report.kv_bytes <= 8 << 20
    assert runner.report.kv_bytes == runner.paged.layout.blocks * 3 * 2 * 2 * 32 * 4 * BLOCK_TOKENS
    assert runner.paged.layout.name == "kv-float32-l3-h2x32-b16"
    assert runner.report.weights_bytes > 0
    assert len(runner.revision) == 32
    loading = len(beats)
    runner.executor.launch(pack_step([SequenceSlice([1, 2, 3], 0, [[0]], GREEDY)], BLOCK_TOKENS)).wait()
    assert len(beats) == loading + 3, "one beat for each layer"


def test_a_step_without_rows_to_sample_gives_no_tokens(folders: dict[str, Path]) -> None:
    runner = open_small(folders["qwen3"])
    assert len(runner.executor.launch(pack_step([SequenceSlice([1, 2], 0, [[0]])], BLOCK_TOKENS)).wait().tokens_R) == 0


def test_auto_measures_both_dtypes_and_says_so(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "engine"):
        runner = open_small(folders["qwen3"], dtype="auto")
    assert runner.paged.layout.name.startswith(("kv-float32", "kv-bfloat16"))
    said = caplog.text
    assert "dtype auto" in said
    assert "MB/s" in said
    assert f"{runner.paged.layout.blocks} KV blocks" in said


@pytest.fixture
def without_invariant_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose bfloat16 adds up in another order for each count of rows, in pieces too."""
    pieces = linear_cpu.piece_rows

    def of_such_a_processor(inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> int | None:
        if dtype is torch.bfloat16 and inputs > 1000:
            raise linear_cpu.NotBatchInvariant("no row count")
        return pieces(inputs, outputs, dtype, threads)

    monkeypatch.setattr(linear_cpu, "piece_rows", of_such_a_processor)
    monkeypatch.setattr(linear_cpu, "has_tiles", lambda: False)


@pytest.mark.usefixtures("without_invariant_bfloat16")
def test_a_dtype_in_which_rows_depend_on_their_company_is_not_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in EMBER.iterdir():  # but not what an earlier start has found out
        if file.is_file():
            (tmp_path / file.name).symlink_to(file.resolve())
    with caplog.at_level("INFO"):
        runner = open_model(ModelSpec(name="m", folder=str(tmp_path), kv_bytes=10_000_000), "cpu", 1, lambda: None)
    assert runner.paged.layout.name.startswith("kv-float32")
    assert "torch.bfloat16" not in caplog.text
    assert runner.report.note == "", "nobody asked for bfloat16"


@pytest.mark.usefixtures("without_invariant_bfloat16")
def test_asked_for_such_a_dtype_a_model_computes_in_float32_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its replicas died of it before, again and again, until they were quarantined."""
    spec = ModelSpec(name="m", folder=str(EMBER), kv_bytes=10_000_000, dtype="bfloat16")
    with caplog.at_level("WARNING"):
        model = open_model(spec, "cpu", 1, lambda: None)
    assert model.paged.layout.name.startswith("kv-float32")
    assert model.report.note.startswith("computes in float32: in bfloat16")
    assert f"m: {model.report.note}" in caplog.text


@pytest.mark.parametrize("asked", ["auto", "bfloat16", "float16"])
def test_on_a_processor_that_has_float32_alone_a_model_computes_in_that(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AVX2 and no AVX-512, oneDNN refuses a bfloat16 weight: no model could be opened there without a compiler."""
    for dtype in (torch.bfloat16, torch.float16):
        monkeypatch.setitem(linear_cpu._LIBRARY_HAS, dtype, lambda: False)
    monkeypatch.setattr(linear_cpu, "has_tiles", lambda: False)
    for probe in (linear_cpu.min_invariant_rows, linear_cpu.piece_rows):
        probe.cache_clear()
    for file in EMBER.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file.resolve())
    spec = ModelSpec(name="m", folder=str(tmp_path), kv_bytes=10_000_000, dtype=asked)
    model = open_model(spec, "cpu", 1, lambda: None)
    assert model.paged.layout.name.startswith("kv-float32")
    assert (asked in model.report.note) == (asked != "auto")


def test_only_a_model_in_another_dtype_than_asked_for_has_a_note(folders: dict[str, Path]) -> None:
    for dtype in ("float32", "bfloat16"):
        model = open_small(folders["qwen3"], dtype=dtype)
        assert (model.report.note == "") == model.paged.layout.name.startswith(f"kv-{dtype}")


def test_the_pool_holds_one_context_at_least_and_all_sequences_at_most(folders: dict[str, Path]) -> None:
    context_blocks = CONTEXT_TOKENS // BLOCK_TOKENS
    assert open_small(folders["qwen3"], kv_bytes=None, sequences=1).paged.layout.blocks == context_blocks
    assert open_small(folders["qwen3"], kv_bytes=None, sequences=3).paged.layout.blocks == 3 * context_blocks
    assert open_small(folders["qwen3"], kv_bytes=None, sequences=1, context_tokens=64).paged.layout.blocks == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_tokens": CONTEXT_TOKENS + 1}, "context_tokens"),
        ({"kv_bytes": 100}, "kv_bytes"),
        ({"block_tokens": 24}, "block_tokens"),
        ({"kv_dtype": "fp8"}, "for GPUs"),
    ],
)
def test_sizes_that_cannot_be_are_refused(folders: dict[str, Path], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DoesNotFit, match=said):
        open_small(folders["qwen3"], **changes)


@pytest.mark.parametrize(
    "item",
    [
        SequenceSlice([1], CONTEXT_TOKENS, [list(range(129))], GREEDY),
        SequenceSlice([160], 0, [[0]], GREEDY),
        SequenceSlice([1], 0, [[10**6]], GREEDY),
    ],
)
def test_launch_asserts_that_the_step_is_within_the_model_and_the_pool(
    folders: dict[str, Path], item: SequenceSlice
) -> None:
    runner = open_small(folders["qwen3"])
    with pytest.raises(AssertionError, match="past "):
        runner.executor.launch(pack_step([item], BLOCK_TOKENS))


# Asleep and awake again


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("name", ["qwen3", "ember"])
def test_what_wakes_says_the_same_and_reads_the_kv_that_was_kept(
    folders: dict[str, Path], name: str, dtype: str
) -> None:
    runner = open_small(folders[name], dtype=dtype, kv_bytes=24 << 20)
    prompt = np.random.default_rng(3).integers(10, runner.executor.limits.vocabulary, 120).tolist()
    table = list(range(40, 60))
    expected = write(runner, prompt, table, GREEDY, 12)
    layers = [rows.view(runner.paged.layout.blocks + 1, -1)[40:47].clone() for rows in runner.paged.pool.layers]
    for cycle in range(3):
        moved = runner.sleeper.sleep([table[:7]])
        assert (runner.paged.mapped, moved) == ([], sum(rows.nbytes for rows in layers))
        assert runner.sleeper.usage().kept_bytes == moved
        runner.sleeper.wake([range(4)], [restored := list(range(cycle, cycle + 14, 2))])
        assert runner.sleeper.arrived()
        for before, after in zip(layers, runner.paged.pool.layers, strict=True):
            assert torch.equal(before, after.view(runner.paged.layout.blocks + 1, -1)[restored])
        table = restored + list(range(20, 33))
        assert write(runner, prompt, table, GREEDY, 12, computed=112) == expected
    for pool in kv_pools(runner):
        pool.check()


def test_kept_kv_that_is_erased_asleep_comes_back_as_nothing(folders: dict[str, Path]) -> None:
    runner = open_small(folders["qwen3"])
    write(runner, list(range(2, 50)), [5, 6, 7, 8], GREEDY, 2)
    runner.sleeper.sleep([[5, 6, 7]])
    runner.paged.zero([6])
    runner.sleeper.wake([range(2)], [[1, 2, 3]])
    for rows in runner.paged.pool.layers:
        blocks = rows.view(runner.paged.layout.blocks + 1, -1)
        assert [bool(blocks[block].any()) for block in (1, 2, 3)] == [True, False, True]


def test_blocks_that_moved_are_read_where_they_are(folders: dict[str, Path]) -> None:
    runner = open_small(folders["qwen3"])
    prompt = list(range(2, 50))
    expected = write(runner, prompt, [5, 6, 7, 8], GREEDY, 9)
    runner.paged.copy([5, 6, 7], [20, 9, 21])
    runner.paged.zero([])
    runner.paged.zero([5, 6])
    assert write(runner, prompt, [20, 9, 21, 30], GREEDY, 9, computed=47) == expected


def test_sizes_say_what_is_held_awake_and_asleep(folders: dict[str, Path]) -> None:
    runner = open_model(spec(folders["qwen3"], sequences=4, kv_bytes=None), "cpu", 1, lambda: None, device_bytes=0)
    held = runner.sleeper.usage()
    assert (
        len(runner.paged.mapped)
        == runner.paged.layout.min_extents
        < len(range(0, runner.paged.layout.blocks, runner.paged.layout.extent_blocks))
    )
    assert runner.paged.layout.min_extents * runner.paged.layout.extent_blocks >= CONTEXT_TOKENS // BLOCK_TOKENS
    assert held.device_bytes == held.min_bytes == held.weights_bytes + held.kv_bytes
    runner.paged.map([len(runner.paged.mapped)])
    assert runner.sleeper.usage().device_bytes == held.device_bytes + runner.paged.layout.extent_bytes
    runner.sleeper.sleep([[]])
    asleep = runner.sleeper.usage()
    assert (asleep.device_bytes, asleep.kv_bytes, asleep.kept_bytes) == (0, 0, 0)
    assert (asleep.min_bytes, asleep.max_bytes) == (held.min_bytes, held.max_bytes)


def test_random_weights_are_made_again_as_they_were(folders: dict[str, Path]) -> None:
    runner = open_small(folders["qwen3"], random_weights=True)
    expected = write(runner, [3, 4, 5], [0, 1], GREEDY, 20)
    runner.sleeper.sleep([[]])
    runner.sleeper.wake([[0]], [[]])
    assert write(runner, [3, 4, 5], [0, 1], GREEDY, 20) == expected


def test_the_built_in_model_wakes_within_three_tenths_of_a_second() -> None:
    """Of this process's own time, the least of some: who else computes here meanwhile is not its fault."""
    runner = open_model(ModelSpec(name="m", folder=str(EMBER), kv_bytes=24 << 20), "cpu", 1, lambda: None)
    took = []
    for _ in range(5):
        runner.sleeper.sleep([[]])
        began = time.process_time()
        runner.sleeper.wake([[0]], [[]])
        took.append(time.process_time() - began)
    assert min(took) < 0.3, took


def test_what_sleeps_gives_its_memory_back_and_takes_no_more_after_many_cycles(tmp_path: Path) -> None:
    """In a process of its own, where nobody else's memory comes and goes."""
    config = json.loads((EMBER / "config.json").read_text()) | {"hidden_size": 512, "intermediate_size": 1536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = """
import json, sys, psutil, torch
from engine.execution.open import inference_mode, open_model
from engine.protocol.specs import ModelSpec
resident = lambda: psutil.Process().memory_info().rss
model = ModelSpec(name="m", folder=sys.argv[1], random_weights=True, dtype="float32", kv_bytes=64 << 20)
inference_mode().__enter__()
runner = open_model(model, "cpu", 1, lambda: None)
for rows in runner.paged.pool.layers:
    rows[: runner.paged.layout.blocks * runner.paged.layout.block_tokens] = 1
extents, awake = runner.paged.mapped, [resident()]
asleep = []
for _ in range(3):
    runner.sleeper.sleep([[]])
    asleep.append(resident())
    runner.sleeper.wake([extents], [[]])
    awake.append(resident())
print(json.dumps([runner.sleeper.usage().weights_bytes, runner.sleeper.usage().kv_bytes, awake, asleep]))
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    weights_bytes, kv_bytes, awake, asleep = json.loads(ran.stdout)
    assert weights_bytes > 100 << 20
    assert awake[0] - asleep[0] > 0.9 * (weights_bytes + kv_bytes)
    assert asleep[-1] - asleep[0] < 0.1 * weights_bytes
    assert awake[-1] <= awake[0]


def test_a_folder_that_changed_or_is_gone_is_not_woken_and_sleeps_as_before(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["qwen3"], tmp_path, dirs_exist_ok=True)
    runner = open_small(tmp_path)
    expected = write(runner, [3, 4, 5], [0, 1], GREEDY, 20)
    runner.sleeper.sleep([[0]])
    held = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="changed"):
        runner.sleeper.wake([[0]], [[0]])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        runner.sleeper.wake([[0]], [[0]])
    (tmp_path / "model.safetensors").write_bytes(held)
    runner.sleeper.wake([[0]], [[0]])
    assert write(runner, [3, 4, 5], [0, 1], GREEDY, 20) == expected


def test_without_memory_it_neither_wakes_nor_sleeps_and_is_as_before(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_small(folders["qwen3"])
    expected = write(runner, [3, 4, 5], [0, 1], GREEDY, 20)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_memory, "available_memory_bytes", lambda: 10)
        with pytest.raises(OutOfHostMemory):
            runner.sleeper.sleep([[0]])
        assert write(runner, [3, 4, 5], [0, 1], GREEDY, 20) == expected
        runner.sleeper.sleep([[]])
        with pytest.raises(OutOfDeviceMemory):
            runner.sleeper.wake([[0]], [[]])
    runner.sleeper.wake([[0]], [[]])
    assert write(runner, [3, 4, 5], [0, 1], GREEDY, 20) == expected


def test_closing_gives_everything_back_once(folders: dict[str, Path]) -> None:
    model = open_small(folders["qwen3"])
    assert model.sleeper.usage().device_bytes > 0
    for _ in range(2):
        model.close()
        assert (model.sleeper.usage().device_bytes, model.paged.mapped) == (0, [])
    with pytest.raises(AssertionError, match="asleep"):
        model.executor.launch(pack_step([SequenceSlice([1], 0, [[0]])], BLOCK_TOKENS))


def test_masks_of_another_vocabulary_are_refused(folders: dict[str, Path]) -> None:
    model = open_small(folders["qwen3"])
    step = model.executor.launch(pack_step([SequenceSlice([1], 0, [[0]], GREEDY, masked=True)], BLOCK_TOKENS))
    with pytest.raises(AssertionError, match="another vocabulary"):
        model.sampler.sample(step, np.full((1, 4), -1, np.int32))
