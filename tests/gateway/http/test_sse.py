import itertools

from gateway.http import sse


def test_an_event_is_one_line_and_a_blank_one() -> None:
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'


def test_padding_lengths_are_random_and_all_used() -> None:
    drawn = list(itertools.islice(sse.paddings(), 20_000))
    lengths = [len(padding) for padding in drawn]
    assert set(lengths) == set(range(8, 72))
    assert max(lengths.count(length) for length in range(8, 72)) < 2 * 20_000 / 64
    alphabet = b"abcdefghijklmnopqrstuvwxyz0123456789" * 2
    assert all(alphabet.startswith(padding) for padding in set(drawn))


def test_nothing_may_cache_or_buffer_a_stream() -> None:
    assert dict(sse.HEADERS) == {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-store",
        b"x-accel-buffering": b"no",
    }
