"""One line for each refused call, and a count of those that were too many."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.http.client_address import ClientAddress
from gateway.http.exchange import Exchange, ExchangeTimeouts
from gateway.observability.refusals import LINES_MAX, RefusalLog
from tests.support.served_gateway import looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import StoppedClock


class Refusals:
    """A log under a clock that tests move, with what it wants to be called for later."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.clock = StoppedClock(100.5)
        self.later: list[Callable[[], None]] = []
        self.log = RefusalLog(self.clock, lambda seconds, act: self.later.append(act))

    def refuse(self, account_id: str, reported: bool = False) -> None:
        scope = {"method": "POST", "path": "/x", "query_string": b"", "headers": []}
        timeouts = ExchangeTimeouts(0, 0, 0, 0)
        client = ClientAddress("192.0.2.1", trusted=False)
        exchange = Exchange(scope, _none, _none, timeouts, "id", self.clock, client)
        exchange.account_id, exchange.reported = account_id, reported
        self.log.note(exchange, errors.bad_input("'top_k' is secret", "top_k"))

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [(record.getMessage(), record.__dict__["fields"]) for record in self._caplog.records]


async def _none(*_: Any) -> Any:
    raise AssertionError("nothing is read or sent")


@pytest.fixture
def refusals(caplog: pytest.LogCaptureFixture) -> Refusals:
    return Refusals(caplog)


def test_a_line_has_account_code_and_field_and_no_message(refusals: Refusals) -> None:
    refusals.refuse("a" * 32)
    ((event, fields),) = refusals.events()
    assert event == "request_refused"
    expected = {"account": "a" * 32, "status": 400, "code": 5006, "kind": "invalid_request", "field": "top_k"}
    assert expected.items() <= fields.items()
    assert "secret" not in json.dumps(fields)
    assert "192.0.2.1" not in json.dumps(fields)


def test_what_has_a_line_of_its_end_gets_no_second_one(refusals: Refusals) -> None:
    refusals.refuse("a", reported=True)
    assert refusals.events() == []


def test_an_account_has_so_many_lines_a_second_and_the_rest_is_counted(refusals: Refusals) -> None:
    for _ in range(LINES_MAX + 7):
        refusals.refuse("loud")
    refusals.refuse("quiet")
    assert [fields["account"] for _, fields in refusals.events()] == ["loud"] * LINES_MAX + ["quiet"]
    refusals.clock.now_s += 1
    refusals.refuse("loud")
    assert refusals.events()[-2:-1] == [("refusals_left_out", {"account": "loud", "requests": 7})]
    assert refusals.events()[-1][0] == "request_refused"


def test_what_was_left_out_is_told_also_where_nothing_follows(refusals: Refusals) -> None:
    for _ in range(LINES_MAX + 3):
        refusals.refuse("")
    (act,) = refusals.later
    refusals.clock.now_s += 1
    act()
    assert refusals.events()[-1] == ("refusals_left_out", {"account": None, "requests": 3})
    act()
    assert len(refusals.events()) == LINES_MAX + 1


@looped
async def test_each_refused_call_of_a_gateway_has_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with served(tmp_path) as gateway:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "a secret"}], "top_k": "a secret"}
        answers = [
            await gateway.call("/v1/chat/completions", json.dumps(asked).encode()),
            await gateway.call("/v1/chat/completions", b"{}", authorization="Bearer nobody"),
            await gateway.call(f"/client/v4/accounts/{'f' * 32}/ai/run/{MODEL}", b"{}"),
        ]
        lines = [record.__dict__["fields"] for record in caplog.records if "refused" in record.getMessage()]
        assert [line["status"] for line in lines] == [answer.status for answer in answers] == [400, 401, 403]
        assert [line["account"] for line in lines] == [gateway.account_id, None, gateway.account_id]
        assert lines[0]["request"] == answers[0].headers["x-request-id"]
        assert lines[0]["field"] == "top_k"
        assert "a secret" not in caplog.text + json.dumps(lines)
