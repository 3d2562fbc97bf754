"""A bounded look at what fuzz_body.py looks at for as long as it is let."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.bodies import DIALECTS, WHOLE, made, read


def test_every_path_has_whole_bodies_to_begin_with() -> None:
    assert WHOLE.keys() == DIALECTS.keys()


@pytest.mark.parametrize("path", WHOLE)
def test_the_whole_bodies_are_read(path: str) -> None:
    for body in WHOLE[path]:
        assert read(path, b"", json.dumps(body).encode()), body


@settings(max_examples=600, deadline=None)
@given(st.binary(max_size=40))
def test_no_body_makes_anything_but_a_request_or_a_refusal(data: bytes) -> None:
    read(*made(data))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_no_json_does(path: str, body: object) -> None:
    read(path, b"", json.dumps(body).encode())
