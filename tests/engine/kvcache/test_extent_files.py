"""Encrypted files of blocks on a real disk: what comes back is what was written, or is noticed not to be."""

import errno
import os
import random
import select
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.kvcache import extent_files
from engine.kvcache.extent_files import ALIGN, SUFFIX, ExtentFiles
from engine.step.executor import CopyOutcome, FileCopy

BLOCK_BYTES = 9000
CANARY = b"a canary that sings" * 400
DEADLINE_S = 30.0


class Disk:
    """Files, and memory for eight slots."""

    def __init__(self, folder: Path, extents: int = 2) -> None:
        self.memory = [bytearray(BLOCK_BYTES) for _ in range(8)]
        place_bytes = -(-(BLOCK_BYTES + 16) // ALIGN) * ALIGN
        extent_bytes = extent_files.EXTENT_BYTES // place_bytes * place_bytes
        self.files = ExtentFiles(
            folder, BLOCK_BYTES, extents * extent_bytes, lambda slot: memoryview(self.memory[slot])
        )
        assert self.files.max_extents == extents

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            assert select.select([self.files], [], [], DEADLINE_S)[0], "nothing came"
            self.files._bell.recv(100)

    def grow(self) -> None:
        places = self.files.places
        self.files.grow()
        self.wait(lambda: self.files.places > places or bool(self.files.error))

    def end(self, *copies: FileCopy) -> list[CopyOutcome]:
        done: list[FileCopy] = []
        while len(done) < len(copies):
            assert select.select([self.files], [], [], DEADLINE_S)[0], "nothing came"
            done += self.files.take_done()
        assert {*done} == {*copies}
        return [copy.outcome for copy in copies]

    def write(self, name: bytes, slot: int, place: int) -> CopyOutcome:
        self.files.write(copy := FileCopy(name, slot, place))
        return self.end(copy)[0]

    def read(self, name: bytes, slot: int, place: int) -> CopyOutcome:
        self.files.read(copy := FileCopy(name, slot, place))
        return self.end(copy)[0]

    def stored(self) -> bytes:
        """What a thief would have."""
        size = self.files.extent_places * self.files.place_bytes
        return b"".join(Path(f"/proc/self/fd/{file}").read_bytes()[:size] for file in self.files._files)

    def overwrite(self, place: int, at: int, data: bytes) -> None:
        """As a failing disk or an attacker would; past the alignment that direct writes need."""
        extent, index = divmod(place, self.files.extent_places)
        path = f"/proc/self/fd/{self.files._files[extent]}"
        with open(path, "r+b") as file:
            file.seek(index * self.files.place_bytes + at)
            file.write(data)


def test_a_bug_ends_the_files_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.grow()
    disk.memory.clear()
    assert disk.write(b"name", 0, 0) is not CopyOutcome.DONE
    assert disk.files.error.startswith("disk_failed: ")
    disk.files.close()


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_files, "EXTENT_BYTES", 100_000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "kv")
    made.grow()
    yield made
    made.files.close()


def word(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_any_order_of_writes_and_reads_gives_what_was_written_last(disk: Disk) -> None:
    disk.grow()
    pick, lies = random.Random(5), dict[int, tuple[bytes, bytes]]()
    for turn in range(60):
        place, slot = pick.randrange(disk.files.places), pick.randrange(8)
        if place in lies and pick.random() < 0.5:
            name, content = lies[place]
            assert disk.read(name, slot, place) == CopyOutcome.DONE
            assert disk.memory[slot] == content
        else:
            disk.memory[slot][:] = pick.randbytes(BLOCK_BYTES)
            lies[place] = word(turn), bytes(disk.memory[slot])
            assert disk.write(word(turn), slot, place) == CopyOutcome.DONE


def test_many_at_once_end_each_once(disk: Disk) -> None:
    for slot in range(8):
        disk.memory[slot][:] = bytes([slot + 1]) * BLOCK_BYTES
    writes = [FileCopy(word(slot), slot, slot % disk.files.places) for slot in range(disk.files.places)]
    for copy in writes:
        disk.files.write(copy)
    assert disk.end(*writes) == [CopyOutcome.DONE] * len(writes)
    reads = [FileCopy(copy.name, 7 - copy.slot, copy.place) for copy in writes]
    for copy in reads:
        disk.files.read(copy)
    assert disk.end(*reads) == [CopyOutcome.DONE] * len(reads)
    for copy in reads:
        assert disk.memory[copy.slot] == bytes([8 - copy.slot]) * BLOCK_BYTES


def test_files_go_past_the_page_cache_where_they_can_and_are_aligned(disk: Disk) -> None:
    assert disk.files.place_bytes % ALIGN == 0
    flags = [os.get_inheritable(file) for file in disk.files._files]
    assert flags == [False]
    info = Path(f"/proc/self/fdinfo/{disk.files._files[0]}").read_text()
    direct = bool(int(info.split("flags:")[1].split()[0], 8) & os.O_DIRECT)
    assert direct == disk.files.direct


def test_a_file_system_without_direct_io_is_used_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = os.open

    def no_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "told to")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", no_direct)
    disk = Disk(tmp_path / "kv")
    disk.grow()
    disk.grow()
    disk.memory[0][:] = CANARY.ljust(BLOCK_BYTES)
    assert disk.write(word(1), 0, 0) == disk.read(word(1), 1, 0) == CopyOutcome.DONE
    assert disk.memory[1] == disk.memory[0]
    assert not disk.files.direct
    assert capfd.readouterr().err.count("disk_tier_buffered") == 1
    disk.files.close()


# Secrets


def test_a_canary_is_in_no_file_and_neither_is_a_key(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.memory[0][:] = CANARY.ljust(BLOCK_BYTES)[:BLOCK_BYTES]
    assert disk.write(word(1), 0, 0) == CopyOutcome.DONE
    assert CANARY[:19] not in disk.stored()
    assert word(1) not in disk.stored()

    def plain(nonce: bytes, data: memoryview, aad: bytes, out: memoryview) -> None:
        out[: len(data)] = data

    class Plain:
        encrypt_into = staticmethod(plain)

    disk.files._cipher = Plain()  # type: ignore[assignment]
    disk.write(word(1), 0, 1)
    assert CANARY[:19] in disk.stored(), "the control: without a cipher it would be seen"


def test_a_stolen_file_opens_nothing_under_any_other_key(disk: Disk, tmp_path: Path) -> None:
    disk.memory[0][:] = CANARY.ljust(BLOCK_BYTES)[:BLOCK_BYTES]
    disk.write(word(1), 0, 0)
    stolen = disk.stored()[: BLOCK_BYTES + 16]
    nonce = disk.files._nonces[0]
    assert disk.files._cipher.decrypt(nonce, stolen, word(1)) == bytes(disk.memory[0]), "the control: its own does"
    other = Disk(tmp_path / "next")
    for cipher in (other.files._cipher, AESGCM(bytes(32))):
        with pytest.raises(InvalidTag):
            cipher.decrypt(nonce, stolen, word(1))
    other.files.close()


def test_no_nonce_is_used_twice(disk: Disk) -> None:
    seen = set()
    for turn in range(20):
        disk.write(word(turn % 3), 0, turn % disk.files.places)
        seen.add(disk.files._nonces[turn % disk.files.places])
    assert len(seen) == 20


def test_no_file_has_a_name_and_those_of_a_former_start_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / f"left{SUFFIX}").write_bytes(CANARY)
    (folder / "other").write_bytes(b"mine")
    disk = Disk(folder)
    disk.grow()
    assert disk.write(word(1), 0, 0) == CopyOutcome.DONE
    assert [path.name for path in folder.iterdir()] == ["other"]
    file = disk.files._files[0]
    disk.files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    disk.files.close()


def test_what_is_erased_is_zero(disk: Disk) -> None:
    disk.memory[0][:] = CANARY.ljust(BLOCK_BYTES)[:BLOCK_BYTES]
    disk.write(word(1), 0, 2)
    size = disk.files.place_bytes
    assert any(disk.stored()[2 * size : 3 * size])
    disk.files.erase([2])
    disk.write(word(2), 0, 3)  # which is behind it
    assert not any(disk.stored()[2 * size : 3 * size])
    assert any(disk.stored()[3 * size : 4 * size])


# Faults


@pytest.mark.parametrize("at", [0, BLOCK_BYTES // 2, BLOCK_BYTES + 15], ids=["first", "middle", "tag"])
def test_a_changed_byte_is_noticed_and_its_neighbours_are_as_they_were(disk: Disk, at: int) -> None:
    for place in range(3):
        disk.memory[place][:] = bytes([place + 1]) * BLOCK_BYTES
        disk.write(word(place), place, place)
    before = disk.stored()[disk.files.place_bytes + at]
    disk.overwrite(1, at, bytes([before ^ 1]))
    assert disk.read(word(1), 5, 1) == CopyOutcome.CORRUPT
    assert [disk.read(word(place), 5, place) for place in (0, 2)] == [CopyOutcome.DONE] * 2
    assert not disk.files.error


def test_another_block_in_its_place_an_older_one_and_another_name_are_noticed(disk: Disk) -> None:
    size = disk.files.place_bytes
    disk.memory[0][:] = b"1" * BLOCK_BYTES
    disk.write(word(1), 0, 0)
    disk.write(word(2), 0, 1)
    older = disk.stored()[:size]
    assert disk.read(word(9), 3, 0) == CopyOutcome.CORRUPT, "it is no block of that name"
    disk.write(word(1), 0, 0)
    assert disk.read(word(1), 3, 0) == CopyOutcome.DONE
    disk.overwrite(0, 0, older)
    assert disk.read(word(1), 3, 0) == CopyOutcome.CORRUPT, "it was put back as it was before"
    disk.overwrite(1, 0, disk.stored()[:size])
    assert disk.read(word(2), 3, 1) == CopyOutcome.CORRUPT, "another place's"


def test_a_file_that_was_cut_is_noticed(disk: Disk) -> None:
    disk.write(word(1), 0, 3)
    os.ftruncate(disk.files._files[0], 2 * disk.files.place_bytes)
    assert disk.read(word(1), 0, 3) == CopyOutcome.CORRUPT


def failing(code: int) -> Callable[[int, Sequence[memoryview], int], int]:
    def fail(file: int, buffers: Sequence[memoryview], at: int) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("call", "code", "named"),
    [
        ("pwritev", errno.ENOSPC, "disk_full"),
        ("pwritev", errno.EIO, "disk_failed"),
        ("preadv", errno.EIO, "disk_failed"),
    ],
)
def test_a_full_or_failing_disk_ends_the_files_with_a_named_error(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, call: str, code: int, named: str
) -> None:
    assert disk.write(word(1), 0, 0) == CopyOutcome.DONE
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(code))
        way = disk.write if call == "pwritev" else disk.read
        assert way(word(1), 0, 0) == CopyOutcome.LOST
    assert disk.files.error.startswith(f"{named}: ")
    assert disk.read(word(1), 0, 0) == disk.write(word(2), 0, 1) == CopyOutcome.LOST, "nothing is tried again"
    places = disk.files.places
    disk.files.grow()
    assert disk.files.places == places


def test_a_short_write_ends_the_files_and_is_never_read(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, at: 4096)
    assert disk.write(word(1), 0, 0) == CopyOutcome.LOST
    assert "4096 of" in disk.files.error


@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
def test_a_disk_without_room_or_a_folder_that_cannot_be_written_gives_no_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    disk = Disk(tmp_path / "kv")
    monkeypatch.setattr(os, call, failing(errno.ENOSPC))
    disk.grow()
    assert disk.files.places == 0
    assert disk.files.error.startswith("disk_full: ")
    disk.files.close()


def test_a_folder_that_cannot_be_made_is_an_error_and_no_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = Disk(tmp_path / "file" / "kv")
    assert disk.files.error.startswith("disk_failed: ")
    disk.files.close()


def test_no_more_is_taken_of_the_disk_than_so_much(disk: Disk) -> None:
    disk.grow()
    places = disk.files.places
    disk.files.grow()
    disk.write(word(1), 0, 0)  # which is behind it
    assert disk.files.places == places == 2 * disk.files.extent_places
