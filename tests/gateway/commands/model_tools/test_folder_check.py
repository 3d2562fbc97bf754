"""gateway/commands/model_tools/folder_check.py: on how many devices a model is at once, what of it a device has, and
files in a folder's place."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.hostinfo.memory import HOST_MEMORY_DEVICE, DeviceBudget
from engine.protocol.reports import InspectionReport
from engine.protocol.specs import ModelSpec
from gateway.catalogue.tasks import ModelTask
from gateway.commands.model_tools.folder_check import (
    UnservableFolder,
    _require_ranks,
    _weights_bytes,
    inspect_folder,
)
from gateway.settings.config import Config, ModelEntryConfig

BUDGET = (1 << 40, 1 << 40, 1 << 40)
GPUS = [DeviceBudget(f"GPU {index}", *BUDGET) for index in range(3)]


def test_stages_share_a_cpus_memory_and_have_gpus_of_their_own() -> None:
    spec = ModelSpec(name="m", folder="m", stages=2, layers=4)
    assert _require_ranks(spec, [DeviceBudget(HOST_MEMORY_DEVICE, *BUDGET)]) == 1
    assert _require_ranks(spec, GPUS) == 2


def test_more_stages_than_gpus_or_layers_are_refused_by_name() -> None:
    spec = ModelSpec(name="m", folder="m", gpus=2, stages=2, layers=4, most_ranks=2)
    with pytest.raises(UnservableFolder, match="gpus = 2 in 2 stages, and models may use 3 here"):
        _require_ranks(spec, GPUS)
    with pytest.raises(UnservableFolder, match="stages = 5, and the model has 4 layers"):
        _require_ranks(ModelSpec(name="m", folder="m", stages=5, layers=4), GPUS)


def test_a_gguf_file_in_a_folders_place_is_told_what_makes_a_folder_of_it(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        UnservableFolder, match=r"notes\.gguf is a file\n  -> .*`hearth models import FILE --to FOLDER`"
    ):
        inspect_folder(Config(), ModelEntryConfig(name="notes", folder=str(tmp_path / "notes.gguf")), [])


def test_what_encodes_images_counts_where_it_is_loaded() -> None:
    entry, inspected = ModelEntryConfig(name="@cf/a/m", dtype="float32"), InspectionReport(numbers=100, image_numbers=7)
    cpu, gpu = DeviceBudget(HOST_MEMORY_DEVICE, *BUDGET), GPUS[0]
    taken = [
        _weights_bytes(replace(entry, gpus=gpus, stages=stages), inspected, ModelTask.GENERATION, budget)
        for gpus, stages, budget in ((1, 1, cpu), ("auto", "auto", cpu), (2, 1, cpu), (1, 2, cpu), (1, 1, gpu))
    ]
    assert taken == [428, 428, 400, 400, 400]
