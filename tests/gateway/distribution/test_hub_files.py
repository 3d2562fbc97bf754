"""The hub as a source of a cluster's files."""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_url

from gateway.distribution import hub_files
from gateway.distribution.fetch import FetchError, FileFetcher
from gateway.distribution.hub_files import HubFiles
from tenants.records.catalogue import CatalogueFile
from tests.support.hub import COMMIT, Hub, serving

CONTENT = bytes(range(256)) * 300
FILE = CatalogueFile("model.safetensors", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as made:
        made.repositories["org/name"] = {FILE.name: CONTENT}
        monkeypatch.setattr(hub_files, "hf_hub_url", functools.partial(hf_hub_url, endpoint=made.url))
        yield made


def test_a_cut_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    fetcher, source = FileFetcher(tmp_path, lambda _: None), HubFiles(f"org/name@{COMMIT}", [FILE])
    hub.cut_after = 30_000
    with pytest.raises(FetchError, match="the hub"):
        fetcher.fetch(FILE, [source])
    hub.cut_after = None
    assert fetcher.fetch(FILE, [source]).read_bytes() == CONTENT
    assert hub.ranges(FILE.name)[-1] == "bytes=30000-"


def test_a_damaged_file_and_one_that_is_not_there_are_refused_by_name(hub: Hub, tmp_path: Path) -> None:
    hub.damaged = True
    with pytest.raises(FetchError, match=r"the hub gave model\.safetensors damaged"):
        FileFetcher(tmp_path, lambda _: None).fetch(FILE, [HubFiles(f"org/name@{COMMIT}", [FILE])])
    with pytest.raises(FetchError, match="the hub: HTTP Error 404"):
        FileFetcher(tmp_path, lambda _: None).fetch(FILE, [HubFiles(f"org/other@{COMMIT}", [FILE])])
    assert list(tmp_path.iterdir()) in ([], [tmp_path / f"{FILE.sha256}.part"])
