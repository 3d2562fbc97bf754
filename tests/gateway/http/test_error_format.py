"""The bodies of errors, as clients of three APIs read them."""

import json
from datetime import date

import pytest

from gateway import errors
from gateway.errors import ApiError
from gateway.http.error_format import anthropic_envelope, envelope, openai_envelope

ID = "00000000-0000-4000-8000-000000000000"


def test_a_models_error_comes_first_and_names_the_request() -> None:
    body = envelope(errors.no_such_model("@cf/a/b"), ID)
    assert list(json.loads(body)) == ["errors", "success", "result", "messages", "error"]
    (error,) = json.loads(body)["errors"]
    assert list(error) == ["message", "code"]
    assert error["code"] == 5007
    assert error["message"].startswith("AiError: No such model @cf/a/b")
    assert error["message"].endswith(f"({ID})")
    assert json.loads(body)["result"] == {}


def test_openais_error_is_in_every_body_and_a_message_has_one_prefix_at_most() -> None:
    for refusal in (errors.no_such_model("@cf/a/b"), errors.bad_input("'n': wrong", "n"), errors.internal()):
        for body in (json.loads(envelope(refusal, ID)), json.loads(openai_envelope(refusal, ID))):
            assert body["error"]["message"] == f"{refusal.message} ({ID})", "a client of OpenAI's shows it as it is"
            assert body["errors"][0]["message"] == f"AiError: {refusal.message} ({ID})"
            assert ": " not in refusal.message.partition("'n'")[0]
    assert json.loads(envelope(errors.no_route("/x"), ""))["error"]["message"] == "No route for that URI: /x"


def test_a_routers_error_has_a_null_result() -> None:
    assert envelope(errors.unauthenticated(), ID).startswith(
        b'{"result":null,"success":false,"errors":[{"code":10000,"message":"Authentication error: '
        b'send \'Authorization: Bearer <token>\' with a token that is in force"}],"messages":[],"error":{'
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
        errors.unauthenticated(): "invalid_request_error",
        errors.no_model_of_name("x"): "invalid_request_error",
        errors.allocation_used("x", 1): "insufficient_quota",
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
        errors.method_not_supported("GET", "POST"): "invalid_request_error",
        errors.deprecated("x", date(2026, 1, 1)): "invalid_request_error",
        errors.internal(): "api_error",
        errors.draining(): "overloaded_error",
    }
    for refusal, kind in kinds.items():
        body = json.loads(anthropic_envelope(refusal, ID))
        assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, ID)
        assert body["error"]["details"] == {"error_code": refusal.kind}
        assert body["errors"][0]["code"] == refusal.code
