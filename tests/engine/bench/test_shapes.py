"""Every shape, small, on a CPU: that the machinery works and what it tells."""

import json
from pathlib import Path

import pytest

from engine.bench.__main__ import main
from engine.bench.geometries import write_folder
from engine.bench.session import BenchEngine, BenchSession
from engine.bench.shapes import SHAPES, nano_vllm_requests
from engine.protocol.specs import ModelSpec

pytestmark = pytest.mark.usefixtures("inference")

TINY = ["--model", "tiny", "--small", "--device", "cpu"]
FIELDS = {"shape", "value", "unit", "bound", "peer", "hardware", "commit", "command"}


def _engine(folder: Path) -> BenchEngine:
    path = write_folder("tiny", folder / "tiny")
    return BenchEngine(ModelSpec(name="tiny", folder=str(path), random_weights=True, kv_bytes=8 << 20), "cpu")


def test_every_shape_gives_rows_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows, plot = tmp_path / "rows.json", tmp_path / "decode.png"
    names = ",".join(SHAPES)
    assert main([*TINY, "--shapes", names, "--json", str(rows), "--plot", str(plot)]) == 0
    kept = json.loads(rows.read_text())
    assert {f"tiny {name}" for name in SHAPES} <= {row["shape"] for row in kept}
    for row in kept:
        assert row.keys() == FIELDS
        assert row["value"] >= 0 or row["unit"] == "%", "only a cost may be less than nothing"
        assert row["peer"] is None, "vLLM was measured with another geometry"
        assert row["unit"] in {"ms", "tok/s", "s", "x", "µs", "%", "GiB", "tokens a step"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "ratio" in capsys.readouterr().out


def test_a_row_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    for _ in range(2):
        assert main([*TINY, "--shapes", "ttft-1024", "--json", str(rows)]) == 0
    assert len(json.loads(rows.read_text())) == 1


def test_the_start_of_a_replicas_process_is_timed(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    assert main([*TINY, "--shapes", "start", "--json", str(rows)]) == 0
    (row,) = json.loads(rows.read_text())
    assert (row["unit"], 0 < row["value"] < 60) == ("s", True)


def test_the_list_teaches_every_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in (*SHAPES, "start"))


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(SystemExit, match="--list"):
        main(["--shapes", "decode-7"])


def test_the_draw_is_nano_vllms() -> None:
    prompts, outputs = nano_vllm_requests(256)
    assert (sum(map(len, prompts)), sum(outputs)) == (142_827, 133_966)


def test_steps_are_counted_as_every_sequence_gets_a_token_in_each(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    with BenchSession(engine) as session:
        streams = [session.submit([1, 2, 3 + index], 40) for index in range(4)]
        session.run_until_all_stream()
        before = [len(stream.token_s) for stream in streams]
        assert session.steps_ms(5) > 0
        assert [len(stream.token_s) - count for stream, count in zip(streams, before, strict=True)] == [6] * 4
    assert engine.model.paged.layout.blocks > 0


def test_sessions_do_not_see_each_others_cache(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    for _ in range(2):
        with BenchSession(engine) as session:
            stream = session.submit(list(range(100)), 3, scope=1)
            session.run()
            assert len(stream.token_s) == 3


def test_a_profile_is_a_table_and_a_trace_for_each_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--profile", "1,3", "--trace", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "batch 1\n" in told
    assert "batch 3\n" in told
    assert told.count("idle ") == 2
    assert len(list(tmp_path.glob("decode-*.json.gz"))) == 2
