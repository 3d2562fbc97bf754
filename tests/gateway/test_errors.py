"""The texts of errors, and that docs/api.md has each with a test that provokes it."""

import re
from pathlib import Path

import pytest

from gateway import errors
from gateway.admin.openapi import CODES
from gateway.errors import ApiError


def test_every_429_and_503_says_when_to_come_back() -> None:
    with pytest.raises(AssertionError):
        ApiError(429, 3040, "x", kind="x")
    with pytest.raises(AssertionError):
        ApiError(400, 5006, "x", kind="x", retry_after_s=1)
    for refusal in (errors.busy(), errors.draining(), errors.store_unavailable(), errors.too_many_requests("x", 3)):
        assert isinstance(refusal.retry_after_s, int)
        assert refusal.retry_after_s >= 1


def test_a_long_name_is_cut() -> None:
    assert len(errors.no_such_model("x" * 10_000).message) < 400
    assert len(errors.no_route("/" + "x" * 10_000).message) < 400


ROW = re.compile(r"^\| (\d{3}) \| (\d{4,5}) \| .* \| `(\S+)::(\S+)` \|$", re.MULTILINE)
RAISED = re.compile(r"ApiError\(\s*(\d{3}), (\d{4,5}),")
TESTS = Path(__file__).parent
GATEWAY = TESTS.parents[1] / "gateway"


def test_the_api_page_has_every_code_with_a_test_that_provokes_it() -> None:
    rows = ROW.findall((TESTS.parents[1] / "docs" / "api.md").read_text())
    raised = {found for path in GATEWAY.rglob("*.py") for found in RAISED.findall(path.read_text())}
    assert {(status, code) for status, code, _, _ in rows} == raised
    assert {(str(status), str(code)) for status, codes in CODES.items() for code in codes} == raised
    assert len(rows) == len(raised)
    for status, code, module, name in rows:
        source = (TESTS / f"{module}.py").read_text()
        found = re.search(rf"^(?:async )?def {name}\(.*?(?=^\S(?!.*\) -> None:)|\Z)", source, re.MULTILINE | re.DOTALL)
        assert found is not None, (module, name)
        assert re.search(rf"\b({status}|{code})\b", found[0]), (module, name, code)
