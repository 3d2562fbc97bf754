import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from typing import Annotated, Literal

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.http.json_body import (
    DEPTH_MAX,
    WALKED_BYTES,
    _unrepeated,
    check_depth,
    check_names,
    decode_body,
    decode_query,
    is_json,
    query_options,
)


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: Annotated[int, msgspec.Meta(ge=1, le=4)] = 1


class Body(msgspec.Struct, forbid_unknown_fields=True):
    n: Annotated[int, msgspec.Meta(ge=1, le=4)] = 1
    heat: Annotated[float, msgspec.Meta(ge=0, le=5)] = 0.0
    text: str = ""
    inner: list[Inner] = []
    free: dict[str, object] = {}


class Named(msgspec.Struct):
    role: Literal["system", "user"]


class Needs(msgspec.Struct):
    model: str = ""
    inner: list[Named] | None = None


decoder = msgspec.json.Decoder(Body)


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        decode_body(body, decoder)
    return raised.value


def test_a_good_body_is_decoded() -> None:
    assert decode_body(b' {"n": 2, "text": "a\\u00e9", "heat": 1} ', decoder) == Body(n=2, text="aé", heat=1)


@pytest.mark.parametrize("body", [b"", b"  \n"])
def test_an_empty_body_is_missing(body: bytes) -> None:
    assert (refusal(body).status, refusal(body).code) == (400, 3003)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"n": 1.0}', "n"),
        (b'{"n": true}', "n"),
        (b'{"n": "1"}', "n"),
        (b'{"n": 5}', "n"),
        (b'{"n": 99999999999999999999999}', "n"),
        (b'{"heat": "1"}', "heat"),
        (b'{"heat": true}', "heat"),
        (b'{"heat": 1e999}', "heat"),
        (b'{"text": 1}', "text"),
        (b'{"inner": [{"size": 1}, {"size": 9}]}', "inner[1].size"),
        (b'{"inner": [{"sise": 1}]}', "inner[0].sise"),
        (b'{"colour": 1}', "colour"),
        (b'{"n": 1, "n": 2}', "n"),
        (b'{"free": {"a": 1, "\\u0061": 2}}', "a"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, field: str) -> None:
    refused = refusal(body)
    assert (refused.status, refused.code, refused.param) == (400, 5006, field)
    assert f"'{field}'" in refused.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"n": 1',
        b"[1]",
        b'{"heat": NaN}',
        b'{"heat": Infinity}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"n": 1} x',
        b'{"n": 1,}',
        b"\xef\xbb\xbf{}",
        b'{"free": {"x": NaN}}',
        b"[" * 100_000,
        b'{"free": {"x": ' + b"[" * 100_000,
        b'{"free": {"x": ' + b"[" * 900 + b"]" * 900 + b"}} ",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        check_depth(decode_body(body, decoder).free, "free", DEPTH_MAX)
    assert (raised.value.status, raised.value.code) == (400, 5006)


def test_depth_is_counted_exactly() -> None:
    def nested(levels: int) -> object:
        value: object = 1
        for _ in range(levels):
            value = [value]
        return value

    check_depth(nested(16), "tools", 16)
    with pytest.raises(ApiError, match="'tools'"):
        check_depth(nested(17), "tools", 16)


def test_a_large_body_costs_a_large_body_only() -> None:
    body = msgspec.json.encode({"text": 'a "quoted" word\n' * 500_000})
    began = time.process_time()
    decode_body(body, decoder)
    assert time.process_time() - began < 0.5


def test_query_options_are_bounded() -> None:
    assert query_options(b"a=1&b=&a=2") == {"a": "2", "b": ""}
    with pytest.raises(ApiError):
        query_options(b"&".join(b"a%d=1" % i for i in range(100)))


@pytest.mark.parametrize("dense", [b"{}", b"0", b"[]", b'""', b'{"a":"{"}'])
def test_a_body_of_very_many_values_is_refused_before_it_costs_anything(dense: bytes) -> None:
    body = b'{"free": {"x": [' + dense + (b"," + dense) * (9_000_000 // (len(dense) + 1)) + b"]}}"
    began = time.process_time()
    refused = refusal(body)
    assert time.process_time() - began < 0.15
    assert (refused.status, refused.code) == (400, 5006)
    assert "send fewer" in refused.message


def test_commas_and_braces_in_a_text_are_no_values() -> None:
    text = 'if (a) { b(c, [d, "e\\"]); },' * 20_000
    assert decode_body(msgspec.json.encode({"text": text}), decoder).text == text


class Whole(msgspec.Struct):
    def __post_init__(self) -> None:
        raise ValueError("burst needs requests_per_minute")


def test_what_an_object_lacks_as_a_whole_is_not_said_to_be_no_object() -> None:
    with pytest.raises(ApiError) as raised:
        decode_body(b"{}", msgspec.json.Decoder(Whole))
    assert raised.value.message == "burst needs requests_per_minute"


def test_a_text_that_is_nested_deeper_than_can_be_read_is_no_document() -> None:
    assert is_json("[" * DEPTH_MAX + "]" * DEPTH_MAX)
    assert not is_json("[" * 5000 + "]" * 5000)


def test_a_missing_field_is_named_as_the_one_to_give() -> None:
    needs, named = msgspec.json.Decoder(Needs), msgspec.json.Decoder(Named)
    for body, field in ((b"{}", "role"), (b'{"inner": [{}]}', "inner[0].role")):
        with pytest.raises(ApiError, match="is missing; give it") as raised:
            decode_body(body, needs if "inner" in field else named)
        assert raised.value.param == field


def test_a_value_that_is_none_of_the_words_is_not_repeated() -> None:
    for body, field in ((b'{"role": "my secret"}', "role"), (b'{"inner": [{"role": "my secret"}]}', "inner[0].role")):
        with pytest.raises(ApiError, match=re.escape(f"'{field}': send one of system, user")) as raised:
            decode_body(body, msgspec.json.Decoder(Named if field == "role" else Needs))
        assert "secret" not in raised.value.message
        assert raised.value.param == field


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    page: Annotated[int, msgspec.Meta(ge=1, le=9)] | None = None
    name: str = ""
    day: date | None = None
    kind: Literal["a", "b"] = "a"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (b"page=10", "page"), (b"page=0", "page"), (b"page=1.0", "page"), (b"page=1e0", "page"), (b"page=+1", "page"),
        (b"page=", "page"), (b"page=null", "page"), (b"page=" + b"9" * 30, "page"), (b"day=null", "day"),
        (b"day=20260102", "day"), (b"day=7", "day"), (b"kind=c", "kind"), (b"colour=red", "colour"),
        (b"Page=1", "Page"),
    ],
)  # fmt: skip
def test_a_wrong_query_is_refused_by_name(query: bytes, field: str) -> None:
    with pytest.raises(ApiError, match=f"'{field}'") as refused:
        decode_query(query, Asked)
    assert refused.value.status == 400


def test_a_query_is_texts_whole_numbers_words_and_days() -> None:
    assert decode_query(b"", Asked) == Asked()
    assert decode_query(b"page=7&name=8&day=2026-01-02&kind=b", Asked) == Asked(7, "8", date(2026, 1, 2), "b")
    assert decode_query(b"page=1&page=2", Asked).page == 2


class Square(msgspec.Struct, tag_field="kind", tag="square"):
    side: int = 1


class Circle(msgspec.Struct, tag_field="kind", tag="circle"):
    radius: int = 1


class Drawing(msgspec.Struct):
    shapes: list[Square | Circle]


def test_a_kind_that_is_none_of_the_kinds_is_not_repeated() -> None:
    with pytest.raises(ApiError, match=re.escape("'shapes[1].kind': send one of circle, square")) as raised:
        decode_body(b'{"shapes": [{"kind": "circle"}, {"kind": "my secret"}]}', msgspec.json.Decoder(Drawing))
    assert "secret" not in raised.value.message


def any_json(rng: random.Random, depth: int = 0) -> str:
    """A text of JSON in which names come twice now and then, spelled in several ways."""
    spaces = rng.choice(["", "", " ", "\n\t"])
    kind = rng.randrange(5) if depth < 4 else 4
    if kind < 2:
        names = [rng.choice(NAMES) for _ in range(rng.randrange(4))]
        return "{" + ",".join(f"{spaces}{name}{spaces}:{any_json(rng, depth + 1)}" for name in names) + spaces + "}"
    if kind == 2:
        return "[" + f",{spaces}".join(any_json(rng, depth + 1) for _ in range(rng.randrange(4))) + "]"
    return rng.choice(
        [*NAMES, "1", "-2.5e3", "true", "null", r'":{\"a\":1,\"a\":2}"', r'"\\"', r'"\\\\\""', '"{[:,]}"']
    )


NAMES = [
    '"a"',
    '"b"',
    '""',
    r'"\u0061"',
    r'"a\""',
    r'"a\u0022"',
    r'"a\\"',
    r'"a\u005c"',
    '":"',
    '"é"',
    r'"\u00e9"',
    '"{"',
]


def named_twice(check: Callable[[], object]) -> bool:
    try:
        check()
    except ApiError as refused:
        return "is given twice" in refused.message
    return False


def test_names_of_large_bodies_are_compared_as_those_of_small_ones() -> None:
    seed = random.randrange(1 << 32)
    rng, outcomes = random.Random(seed), Counter[bool]()
    for _ in range(4000):
        text = any_json(rng)
        twice = named_twice(lambda text=text: json.loads(text, object_pairs_hook=_unrepeated))  # type: ignore[misc]
        assert named_twice(lambda text=text: check_names(text.encode())) == twice, (seed, text)  # type: ignore[misc]
        outcomes[twice] += 1
    assert min(outcomes.values()) > 400, outcomes


def test_a_large_body_that_names_a_field_twice_is_refused_by_name() -> None:
    text = b'"' + b'a\\"' * WALKED_BYTES + b'"'
    assert decode_body(b'{"text": %b, "n": 2}' % text, decoder).n == 2
    assert refusal(b'{"text": %b, "n": 2, "free": {"c": {"b": 1, "\\u0062": 2}}}' % text).param == "b"


@pytest.mark.parametrize("size", [1, WALKED_BYTES])
def test_what_no_decoder_looks_into_is_utf_8_as_well(size: int) -> None:
    body = b'{"role": "user", "unknown": "%b", "more": "' + b"x" * size + b'"}'
    named: msgspec.json.Decoder[Named] = msgspec.json.Decoder(Named)
    assert decode_body(body % "ж".encode(), named).role == "user"
    with pytest.raises(ApiError, match="UTF-8"):
        decode_body(body % b"\xff", named)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"n": 1,\n}', "line 2, column 1: trailing comma in object"),
        (b'{"text": "\xc3\xa9", n: 1}', "line 1, column 15: object keys must be strings"),
        (b'{"n": NaN}', "line 1, column 7: invalid character"),
        (b'{"n": 1}\n\n x', "line 3, column 2: trailing characters"),
        (b'{"text": "a\n', "line 1, column 12: invalid character"),
        (b'{"n": 1', "line 1, column 8: input data was truncated"),
        (b'{\n"text": "a\xff"}', "line 2, column 11: no UTF-8"),
        (b'{"n": 1, "free": {"a": "\xff"}}', "line 1, column 25: no UTF-8"),
    ],
)
def test_malformed_json_is_found_by_line_and_column(body: bytes, place: str) -> None:
    assert f"not valid JSON at {place}; send one JSON object" in refusal(body).message


def test_a_field_that_is_nearly_one_is_asked_about() -> None:
    assert "'texts' is not a field of this request; did you mean 'text'?" in refusal(b'{"texts": ""}').message
    assert "'inner[0].sise' is not a field of this request; did you mean 'size'?" in (
        refusal(b'{"inner": [{"sise": 1}]}').message
    )
    assert "leave it out" in refusal(b'{"colour": ""}').message
