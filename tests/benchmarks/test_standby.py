"""benchmarks/engine/standby.py: the shape of twenty models, without a GPU."""

import json
import tomllib
from pathlib import Path

import pytest

from benchmarks.engine import standby


@pytest.mark.parametrize(("free_gib", "standing"), [(1000, 20), (128, 6), (240, 11)])
def test_twenty_models_share_a_sixth_of_what_they_need_and_stand_by_as_far_as_the_host_has_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, standing: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128256}))
    monkeypatch.setattr(standby, "available_memory_bytes", lambda: free_gib << 30)
    models = standby.on_gpu(tmp_path, [8192] * 20, 6.0)
    settings = tomllib.loads(models.settings)
    assert len(models.names) == 20
    assert settings["machine"]["device_bytes"] == int(20 * standby.AWAKE_BYTES / 6)
    assert (models.standing, settings["machine"]["memory_bytes"]) == (standing, standing * standby.STANDBY_BYTES)


def test_six_models_have_the_room_of_two_that_their_rows_were_measured_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128256}))
    machine = tomllib.loads(standby.on_gpu(tmp_path, [8192] * 6, None).settings)["machine"]
    assert machine == {"device_bytes": 46 << 30, "memory_bytes": 6 * (17 << 30)}
