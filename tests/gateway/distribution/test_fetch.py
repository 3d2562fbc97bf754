"""Fetching one file: it goes on where it stopped, and is there only with its sum, whatever sources give."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.distribution import fetch
from gateway.distribution.fetch import FetchError, FileFetcher, NoRoom
from gateway.distribution.transfer import TransferError
from tenants.records.catalogue import CatalogueFile

CONTENT = bytes(range(256)) * 40
FILE = CatalogueFile("model.safetensors", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@dataclass
class Source:
    """Gives `content` in pieces, and fails after `cut` bytes."""

    name: str = "m1"
    content: bytes = CONTENT
    cut: int | None = None
    asked: list[int] = field(default_factory=list)
    passing: Callable[[], None] = lambda: None

    def read(self, sha256: str, offset: int) -> Iterator[bytes]:
        assert sha256 == FILE.sha256
        self.asked.append(offset)
        for start in range(offset, len(self.content), 1000):
            if self.cut is not None and start >= self.cut:
                raise TransferError(f"{self.name}: the connection ended")
            self.passing()
            yield self.content[start : start + 1000]


@pytest.fixture
def fetcher(tmp_path: Path) -> FileFetcher:
    return FileFetcher(tmp_path / "incoming", lambda _: None)


def test_a_cut_file_goes_on_where_it_stopped_at_another_source(fetcher: FileFetcher) -> None:
    cut, whole = Source(cut=3000), Source("m2")
    path = fetcher.fetch(FILE, [cut, whole])
    assert path.read_bytes() == CONTENT
    assert (cut.asked, whole.asked) == ([0], [3000])
    assert fetcher.fetch(FILE, []) == path, "it is there already"


def test_what_came_stays_for_the_next_try(fetcher: FileFetcher) -> None:
    cut = Source(cut=5000)
    with pytest.raises(FetchError, match="m1: the connection ended"):
        fetcher.fetch(FILE, [cut])
    assert fetcher.bytes_of(FILE) == 5000
    again = Source()
    assert fetcher.fetch(FILE, [again]).read_bytes() == CONTENT
    assert again.asked == [5000]
    assert fetcher.bytes_of(FILE) == len(CONTENT)


def test_a_damaged_file_is_never_there_and_the_next_source_is_taken(fetcher: FileFetcher, tmp_path: Path) -> None:
    damaged = Source("m1", CONTENT[:-1] + b"!")
    with pytest.raises(FetchError, match=r"m1 gave model\.safetensors damaged"):
        fetcher.fetch(FILE, [damaged])
    assert list((tmp_path / "incoming").iterdir()) == []
    whole = Source("m2")
    assert fetcher.fetch(FILE, [damaged, whole]).read_bytes() == CONTENT
    assert whole.asked == [0], "nothing of the damaged one is used"


def test_a_source_is_not_blamed_for_the_part_that_another_gave(fetcher: FileFetcher) -> None:
    begun, whole = Source("m1", b"!" + CONTENT[1:], cut=2000), Source("m2")
    assert fetcher.fetch(FILE, [begun, whole]).read_bytes() == CONTENT
    assert whole.asked == [2000, 0]


@pytest.mark.parametrize("content", [CONTENT + b"more", CONTENT[:-1], b""])
def test_a_file_of_another_size_is_refused(fetcher: FileFetcher, content: bytes) -> None:
    with pytest.raises(FetchError, match="m1 gave"):
        fetcher.fetch(FILE, [Source("m1", content)])
    assert fetcher.fetch(FILE, [Source("m2")]).read_bytes() == CONTENT


def test_an_endless_source_takes_no_more_than_the_file_has(fetcher: FileFetcher, tmp_path: Path) -> None:
    endless = Source("m1", CONTENT * 1000)
    sizes: list[int] = []
    endless.passing = lambda: sizes.append((tmp_path / "incoming" / f"{FILE.sha256}.part").stat().st_size)
    with pytest.raises(FetchError, match="gave more"):
        fetcher.fetch(FILE, [endless])
    assert max(sizes) <= len(CONTENT)


def test_a_slow_source_is_left_for_the_next_one(tmp_path: Path) -> None:
    now = [0.0]

    def pass_time() -> None:
        now[0] += fetch.SLOW_S / 3

    fetcher = FileFetcher(tmp_path / "incoming", lambda _: None, lambda: now[0])
    slow, quick = Source("m1", passing=pass_time), Source("m2")
    assert fetcher.fetch(FILE, [slow, quick]).read_bytes() == CONTENT
    assert quick.asked == [3000]


def test_a_file_without_room_is_refused_before_a_byte_is_asked_for(
    fetcher: FileFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FREE_BYTES", 1 << 60)
    source = Source()
    with pytest.raises(NoRoom, match=r"MiB free, and model\.safetensors needs"):
        fetcher.fetch(FILE, [source])
    assert source.asked == []


def test_a_file_of_no_bytes_is_there_at_once(fetcher: FileFetcher) -> None:
    empty = CatalogueFile("chat_template.jinja", 0, hashlib.sha256(b"").hexdigest())
    assert fetcher.fetch(empty, [Source()]).read_bytes() == b""
