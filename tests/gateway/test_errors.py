import json
import re
from pathlib import Path

import pytest

from gateway import errors
from gateway.admin.openapi import CODES
from gateway.errors import ApiError, anthropic_envelope, envelope, openai_envelope

ID = "00000000-0000-4000-8000-000000000000"


def test_a_models_error_comes_first_and_names_the_request() -> None:
    body = envelope(errors.no_such_model("@cf/a/b"), ID)
    assert list(json.loads(body)) == ["errors", "success", "result", "messages"]
    (error,) = json.loads(body)["errors"]
    assert list(error) == ["message", "code"]
    assert error["code"] == 5007
    assert error["message"].startswith("AiError: No such model @cf/a/b")
    assert error["message"].endswith(f"({ID})")
    assert json.loads(body)["result"] == {}


def test_a_routers_error_has_a_null_result() -> None:
    assert envelope(errors.unauthenticated(), ID) == (
        b'{"result":null,"success":false,"errors":[{"code":10000,"message":"Authentication error: '
        b'send \'Authorization: Bearer <token>\' with a token that is in force"}],"messages":[]}'
    )


@pytest.mark.parametrize("refusal", [errors.bad_input("'n': wrong", "n"), errors.unauthenticated(), errors.busy()])
def test_openai_paths_carry_both_shapes(refusal: ApiError) -> None:
    body = json.loads(openai_envelope(refusal, ID))
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == refusal.param
    assert body["errors"][0]["code"] == refusal.code
    assert body["success"] is False


def test_types_follow_the_status() -> None:
    kinds = {
        errors.bad_input("x"): "invalid_request_error",
        errors.unauthenticated(): "authentication_error",
        errors.foreign_account(): "permission_error",
        errors.busy(): "rate_limit_error",
        errors.internal(): "server_error",
        errors.draining(): "server_error",
    }
    for refusal, kind in kinds.items():
        assert json.loads(openai_envelope(refusal, ID))["error"]["type"] == kind


def test_anthropics_paths_have_its_types_and_say_more_in_the_details() -> None:
    kinds = {
        errors.bad_input("x"): "invalid_request_error",
        errors.unauthenticated(): "authentication_error",
        errors.foreign_account(): "permission_error",
        errors.no_route("/v1/x"): "not_found_error",
        errors.timed_out(1): "timeout_error",
        errors.busy(): "rate_limit_error",
        errors.crashes(10): "invalid_request_error",
        errors.internal(): "api_error",
        errors.draining(): "overloaded_error",
    }
    for refusal, kind in kinds.items():
        body = json.loads(anthropic_envelope(refusal, ID))
        assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, ID)
        assert body["error"]["details"] == {"error_code": refusal.kind}
        assert body["errors"][0]["code"] == refusal.code


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
