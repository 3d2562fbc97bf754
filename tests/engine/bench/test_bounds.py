"""The bounds against those computed by hand for Llama-3.1-8B on one H200."""

from pathlib import Path

import pytest

from engine.bench.geometries import GEOMETRIES, RooflineBound, write_folder
from engine.bench.shapes import nano_vllm_requests
from engine.models.config import read_decoder_config


def _bound(name: str, folder: Path) -> RooflineBound:
    return RooflineBound.of(read_decoder_config(write_folder(name, folder)))


def test_a_geometry_has_the_bytes_that_its_model_has(tmp_path: Path) -> None:
    llama = _bound("llama-3.1-8b", tmp_path / "llama")
    assert llama.weights_bytes == pytest.approx(15.01e9, rel=0.001)
    assert llama.kv_token_bytes == 128 << 10
    kv_kib = {"qwen3-0.6b": 112, "qwen3-8b": 144, "qwen3-14b": 160}
    weights = {"qwen3-0.6b": 1.19e9, "qwen3-8b": 15.1e9, "qwen3-14b": 28.0e9}
    for name in kv_kib:
        bound = _bound(name, tmp_path / name)
        assert bound.kv_token_bytes == kv_kib[name] << 10
        assert bound.weights_bytes == pytest.approx(weights[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [
        ("mistral-7b", 7.11, 128), ("ministral-8b", 7.48, 144), ("qwen2.5-7b", 7.07, 56), ("phi-4", 14.1, 200),
        ("gemma-2-9b", 9.24, 336), ("gemma-3-27b", 27.0, 496),
    ],
)  # fmt: skip
def test_geometries_of_other_families(name: str, billions: float, kv_kib: int, tmp_path: Path) -> None:
    """Parameters without an embedding that is no head."""
    bound = _bound(name, tmp_path)
    assert bound.kv_token_bytes == kv_kib << 10
    assert bound.weights_bytes == pytest.approx(2e9 * billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions", "row_billions"),
    [("mixtral-8x7b", 46.6, 12.7), ("qwen3-30b", 30.2, 3.04), ("gpt-oss-20b", 20.3, 3.61), ("scout", 106.7, 16.1)],
)
def test_a_mixture_reads_what_rows_choose(name: str, billions: float, row_billions: float, tmp_path: Path) -> None:
    """Parameters without the embedding, and those that one token goes through; the published counts, but for biases."""
    bound = _bound(name, tmp_path)
    assert bound.weights_bytes + bound.experts * bound.expert_bytes == pytest.approx(2e9 * billions, rel=0.01)
    assert bound.row_flop == pytest.approx(2e9 * row_billions, rel=0.02)
    assert bound.read_bytes(1) == pytest.approx(bound.row_flop)
    assert bound.read_bytes(4096) == pytest.approx(bound.weights_bytes + bound.experts * bound.expert_bytes)


def test_scouts_experts_are_as_distinct_as_computed_by_hand(tmp_path: Path) -> None:
    bound = _bound("scout", tmp_path)
    touched = [(bound.read_bytes(rows) - bound.weights_bytes) / bound.expert_bytes for rows in (1, 8, 64)]
    assert touched == pytest.approx([1.0, 6.45, 15.74], abs=0.01)
    assert bound.spans == ((None, 0.25), (8192, 0.75))


def test_windows_bound_what_is_read(tmp_path: Path) -> None:
    bound = _bound("gemma-3-27b", tmp_path)
    assert bound.spans == ((None, 10 / 62), (1024, 52 / 62))
    keys_ms = bound.step_ms(4, 4 * 32768) - bound.step_ms(4, 0)
    assert keys_ms == pytest.approx(1e3 * 4 * (10 * 32768 + 52 * 1024) / 62 * bound.kv_token_bytes / 4.3e12)
    short = _bound("mistral-7b", tmp_path)
    seen = 4096 * 4097 // 2 + (6000 - 4096) * 4096
    prompt_ms = (
        short.prompt_ms(6000) - 1e3 * (6000 * (short.weights_bytes - short.head_bytes) + short.head_bytes) / 790e12
    )
    assert prompt_ms == pytest.approx(1e3 * seen * short.attention_flop / 790e12)


@pytest.mark.parametrize(("rows", "step_ms"), [(1, 3.51), (8, 3.63), (32, 4.05), (64, 4.61), (128, 5.74)])
def test_a_decode_step_reads_weights_and_keys(rows: int, step_ms: float, tmp_path: Path) -> None:
    bound = _bound("llama-3.1-8b", tmp_path)
    assert bound.step_ms(rows, rows * 576) == pytest.approx(step_ms, rel=0.02)


def test_many_rows_are_bound_by_arithmetic(tmp_path: Path) -> None:
    bound = _bound("llama-3.1-8b", tmp_path)
    linear_ms, keys_ms = 256 * 15.01e9 / 790e12 * 1e3, 256 * 576 * 131072 / 4.3e12 * 1e3
    assert bound.step_ms(256, 256 * 576) == pytest.approx(linear_ms + keys_ms, rel=0.001)


def test_keys_that_many_rows_share_are_bound_by_bytes_or_by_arithmetic(tmp_path: Path) -> None:
    bound = _bound("llama-3.1-8b", tmp_path)
    assert bound.step_ms(64, 4096, 16 * 4096) == bound.step_ms(64, 4096), "16 rows for a key: their bytes take longer"
    arithmetic_ms = 256 * 16384 * 4 * 32 * 4096 / 790e12 * 1e3
    assert bound.step_ms(256, 16384, 256 * 16384) == pytest.approx(bound.step_ms(256, 0) + arithmetic_ms)


@pytest.mark.parametrize(("tokens", "prompt_ms"), [(1024, 18.4), (4096, 78.0), (8192, 167.0), (16000, 368.0)])
def test_a_prompt_is_bound_by_arithmetic(tokens: int, prompt_ms: float, tmp_path: Path) -> None:
    assert _bound("llama-3.1-8b", tmp_path).prompt_ms(tokens) == pytest.approx(prompt_ms, rel=0.02)


def test_requests_at_once_are_bound_by_their_steps_and_prompts(tmp_path: Path) -> None:
    prompts, outputs = nano_vllm_requests(256)
    requests = list(zip(map(len, prompts), outputs, strict=True))
    bound = _bound("llama-3.1-8b", tmp_path)
    assert bound.throughput(requests) == pytest.approx(13_000, rel=0.05)
    assert bound.throughput([(512, 2)]) == pytest.approx(2e3 / (bound.prompt_ms(512) + bound.step_ms(1, 513)))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry_is_a_model_that_the_engine_reads(name: str, tmp_path: Path) -> None:
    assert read_decoder_config(write_folder(name, tmp_path)).layers > 0
