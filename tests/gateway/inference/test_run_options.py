import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.inference.run_options import (
    METADATA_BYTES_MAX,
    SESSION_BYTES_MAX,
    TAGS_MAX,
    TIMEOUT_MS_MAX,
    RunOptions,
    RunOptionsBody,
    run_options,
)


def test_nothing_said_asks_for_nothing() -> None:
    assert run_options({}, b"") == RunOptions() == RunOptions().joined(None) == RunOptions().joined(RunOptionsBody())


def test_the_query_and_headers_say_how_a_call_is_run() -> None:
    headers = {
        b"cf-aig-request-timeout": b"2500",
        b"cf-aig-metadata": '{"user": "ü", "n": 1.5, "ok": true, "team": 7}'.encode(),
        b"x-session-affinity": b"ses_1",
    }
    assert run_options(headers, b"rejectIfBusy=true&tags=a,team:x/y&tags=b%40c.d&queueRequest=false") == RunOptions(
        reject_if_busy=True,
        timeout_ms=2500,
        tags=("a", "team:x/y", "b@c.d"),
        metadata='{"user":"ü","n":1.5,"ok":true,"team":7}',
        session=b"ses_1",
    )
    assert run_options({}, b"rejectIfBusy=0&tags=&tags=a") == RunOptions(tags=("a",))


def test_the_shorter_of_two_deadlines_holds_and_tags_are_joined() -> None:
    said = run_options({b"cf-aig-request-timeout": b"900"}, b"requestTimeoutMs=500&tags=a,b")
    assert said == RunOptions(timeout_ms=500, tags=("a", "b"))
    joined = said.joined(RunOptionsBody(rejectIfBusy=True, requestTimeoutMs=700, tags=["b", "c"]))
    assert joined == RunOptions(reject_if_busy=True, timeout_ms=500, tags=("a", "b", "c"))
    with pytest.raises(ApiError, match="tags"):
        said.joined(RunOptionsBody(tags=["c", "d", "e", "f"]))


@pytest.mark.parametrize(
    ("query", "named"),
    [
        (b"tags=a,b,c,d,e,f", "tags"),
        (b"tags=a&tags=b&tags=c,d&tags=e,f", "tags"),
        (b"tags=" + b"a" * 51, "50"),
        (b"tags=two%20words", "letters"),
        ("tags=ä".encode(), "letters"),
        (b"tags=a%0A", "letters"),
        (b"rejectIfBusy=maybe", "rejectIfBusy"),
        (b"requestTimeoutMs=0", "requestTimeoutMs"),
        (b"requestTimeoutMs=-1", "requestTimeoutMs"),
        (b"requestTimeoutMs=soon", "requestTimeoutMs"),
        (b"requestTimeoutMs=3600001", "requestTimeoutMs"),
    ],
)
def test_a_wrong_query_is_refused_by_name(query: bytes, named: str) -> None:
    with pytest.raises(ApiError, match=named) as refused:
        run_options({}, query)
    assert (refused.value.status, refused.value.code) == (400, 5006)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (b"cf-aig-request-timeout", [b"", b"0", b"-5", b"1.5", b"1e3", b"3600001", b"9" * 40, "٣".encode()]),
        (b"x-session-affinity", [b"s" * (SESSION_BYTES_MAX + 1)]),
        (
            b"cf-aig-metadata",
            [
                b"",
                b"x",
                b"[]",
                b"7",
                b'{"a": null}',
                b'{"a": {"b": 1}}',
                b'{"a": [1]}',
                b'{"a": NaN}',
                json.dumps({str(n): n for n in range(6)}).encode(),
                json.dumps({"a" * 65: 1}).encode(),
                json.dumps({"a": "b" * 513}).encode(),
                b'{"a": "' + b" " * METADATA_BYTES_MAX + b'"}',
                b'{"a": "\xff"}',
                b"[" * 2000,
            ],
        ),
    ],
)
def test_a_wrong_header_is_refused_by_name(name: bytes, values: list[bytes]) -> None:
    for value in values:
        with pytest.raises(ApiError, match=name.decode()) as refused:
            run_options({name: value}, b"")
        assert refused.value.status == 400, value


def test_the_limits_themselves_are_allowed() -> None:
    tags = [f"{n}" + "a" * 49 for n in range(TAGS_MAX)]
    assert run_options({}, f"tags={','.join(tags)}".encode()).tags == tuple(tags)
    assert run_options({b"cf-aig-request-timeout": b"%d" % TIMEOUT_MS_MAX}, b"").timeout_ms == TIMEOUT_MS_MAX
    assert len(run_options({b"x-session-affinity": b"s" * SESSION_BYTES_MAX}, b"").session) == SESSION_BYTES_MAX


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers() | st.floats() | st.booleans()))
def test_metadata_is_kept_as_it_was_sent(sent: dict[str, object]) -> None:
    said = json.dumps(sent).encode()
    finite = not any(isinstance(value, float) and not math.isfinite(value) for value in sent.values())
    try:
        kept = run_options({b"cf-aig-metadata": said}, b"").metadata
    except ApiError:
        surrogate = any("\ud800" <= char <= "\udfff" for char in json.loads(said, parse_constant=str).__repr__())
        assert len(sent) > 5 or not finite or len(said) > METADATA_BYTES_MAX or surrogate or "\\ud" in said.decode()
    else:
        assert finite
        assert json.loads(kept or "{}") == json.loads(said)
