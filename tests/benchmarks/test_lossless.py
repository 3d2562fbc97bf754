"""benchmarks/bf12/lossless.py on a model of a megabyte: each figure is there, and pairs are what they say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from benchmarks import record
from benchmarks.bf12 import lossless
from benchmarks.bf12.lossless import SMALL, main, step_ms
from benchmarks.engine import standby
from engine.bench.geometries import RooflineBound
from gateway.admin.machines import MachineReplicaItem


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[tuple[str, str | None], float]]:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")

    def kept() -> dict[tuple[str, str | None], float]:
        written = json.loads((tmp_path / "results" / "lossless.json").read_text())
        return {(row["shape"], row["peer"]): row["value"] for row in written}

    return kept


@pytest.mark.timeout(300)  # four processes that import torch, one after the other and two together
def test_all_parts_that_need_no_gpu_give_their_rows(
    tmp_path: Path, rows: Callable[[], dict[tuple[str, str | None], float]]
) -> None:
    folder = tmp_path / "model"
    main(["--device", "cpu", "--small", "--folder", str(folder)])
    found = rows()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("hearth-expanded")]
    assert found["lossless-files", None] < 0.77, "a quarter of the bytes is saved"
    assert {"lossless-compress-s", "lossless-expand-s", "lossless-bytes"} <= {shape for shape, _ in found}
    for count in SMALL.rows:
        ratio = found[f"lossless-{count} step", "bf16"] / found[f"lossless-{count} step", None]
        assert found[f"lossless-{count}", None] == pytest.approx(ratio, rel=1e-3), "more is faster"
    for count in SMALL.tokens:
        ratio = found[f"lossless-ttft-{count} time", None] / found[f"lossless-ttft-{count} time", "bf16"]
        assert found[f"lossless-ttft-{count}", None] == pytest.approx(ratio, rel=1e-3), "less is faster"


def test_what_does_not_come_back_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lossless.write_plain(tmp_path / "model", small=True)

    def other_bytes(program: str, source: Path, target: Path, device: str) -> float:
        target.mkdir(parents=True)
        for path in source.glob("*.safetensors"):
            (target / path.name).write_bytes(path.read_bytes()[:-1] + b"?")
        return 1.0

    monkeypatch.setattr(lossless, "_run", other_bytes)
    with pytest.raises(RuntimeError, match="did not come back"):
        lossless.measure_files(plain, tmp_path / "coded", "cpu")


def test_a_step_of_few_rows_is_bound_by_stored_bytes_and_one_of_many_by_flop() -> None:
    bound = RooflineBound(weights_bytes=15 * 10**9, head_bytes=10**9, kv_token_bytes=131072, attention_flop=0)
    assert step_ms(bound, 0.75, 1, 0) == pytest.approx(0.75 * step_ms(bound, 1.0, 1, 0))
    assert step_ms(bound, 0.75, 512, 0) == step_ms(bound, 1.0, 512, 0)
    assert step_ms(bound, 1.0, 64, 1000) == pytest.approx(bound.step_ms(64, 1000))


class Sleepers:
    """What a server answers whose models wake as they are asked for; the 12-bit one in 0.7 s, others in 1 s."""

    def __init__(self) -> None:
        self.models = standby.Models(["bf16", "bf12", "large"], "", 100, 3)
        self.awake: set[str] = {"bf16", "bf12"}

    def once(self, model: str, prompt: str) -> standby.Answered:
        self.awake = {model} if model == "large" else {*self.awake - {"large"}, model}
        return standby.Answered(standby.Asked(0.0, model, 1), 0.7 if model == "bf12" else 1.0, 2.0, 4, 0)

    def prompt(self, tokens: int) -> str:
        return "words"

    def replicas(self) -> dict[str, MachineReplicaItem]:
        return {
            name: cast(MachineReplicaItem, _Replica("DEVICE" if name in self.awake else "MEMORY"))
            for name in self.models.names
        }

    def await_places(self, wanted: Callable[[dict[str, MachineReplicaItem]], bool], within_s: float, what: str) -> None:
        assert wanted(self.replicas()), what


class _Replica:
    weights_bytes = 55_000_000

    def __init__(self, residency: str) -> None:
        self.residency = residency


def test_each_model_wakes_beside_the_other_into_free_room(
    rows: Callable[[], dict[tuple[str, str | None], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless.time, "sleep", lambda seconds: None)
    lossless.measure_wakes(cast(standby.Hearth, Sleepers()), rounds=2)
    assert rows() == {
        ("lossless-wake time", "bf16"): 1.0,
        ("lossless-wake time", None): 0.7,
        ("lossless-wake", None): 0.7,
    }


def test_both_models_are_served_with_room_for_both_and_not_for_a_third(tmp_path: Path) -> None:
    plain = lossless.write_plain(tmp_path / "model", small=True)
    models = lossless.served(plain, tmp_path / "model-bf12")
    assert len(models.names) == 3
    assert models.settings.count("[[models]]") == 4, "the built-in one is not served"
    assert models.vocabulary == 512


def test_wakes_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--part", "wake"])
    assert "on a GPU" in capsys.readouterr().err
