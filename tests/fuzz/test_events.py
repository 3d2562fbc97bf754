"""A bounded look at what fuzz_sse.py looks at for as long as it is let."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import errors
from gateway.inference.reply import RunningUsage
from tests.fuzz.events import PIECES, STREAMED, Told, check, events_of, read, reply_of


@pytest.mark.parametrize("path", STREAMED)
@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=60))
def test_what_is_streamed_is_what_is_read(path: str, data: bytes) -> None:
    check(path, data)


@pytest.mark.parametrize("path", STREAMED)
def test_no_piece_of_text_ends_its_event(path: str) -> None:
    for piece in PIECES:
        reply = reply_of(path)
        whole = "".join([reply.begin(RunningUsage(1)).decode(), reply.text(0, piece, []).decode()]).encode()
        kinds = events_of(whole)
        assert len(kinds) == len(events_of(reply_of(path).begin(RunningUsage(1)))) + len(
            events_of(_text_alone(path, piece))
        )


def _text_alone(path: str, piece: str) -> bytes:
    reply = reply_of(path)
    reply.begin(RunningUsage(1))
    return reply.text(0, piece, [])


@pytest.mark.parametrize("path", STREAMED)
def test_a_failure_is_events_too(path: str) -> None:
    refusal = errors.failed("line one\nline two\r\n\r\ndata: [DONE]\n\n\u2028")
    events = events_of(reply_of(path).begin(RunningUsage(1)) + reply_of(path).fail(refusal, "the-id"))
    assert any("the-id" in data for _, data in events)


def test_the_reader_finds_what_a_careless_writer_does() -> None:
    for careless in (b'data: {"response":"a\nb"}\n\n', b'data: {"response":"a"}\n\ndata: x\n\n', b'data: {"a":1}\n'):
        with pytest.raises((AssertionError, ValueError, KeyError)):
            assert read("/run", careless + b"data: [DONE]\n\n") == Told("a\nb")
