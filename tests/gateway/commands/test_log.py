"""`hearth log`: what became of a request, told from files and from the ledger."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.observability.log_files import log_file
from gateway.settings.config import load_config
from tenants.records.usage import MICRO
from tests.gateway.commands.test_operations import Shell, on_store, record
from tests.gateway.commands.test_operations import shell as shell  # a fixture

pytestmark = pytest.mark.usefixtures("one_day")
ID, REFUSED = "0f7c1d9e-done", "0f7c1d9e-refused"


def write_lines(*events: dict[str, Any]) -> None:
    file = log_file(load_config(), "gateway")
    for event in events:
        file.write(json.dumps({"time": time.time(), "level": "info", **event}).encode())


def settle(account_id: str, request_id: str) -> None:
    used = record(account_id, request_id, neurons=1.5, tags="nightly")
    on_store(lambda store: store.quotas.settle([used]))


def test_a_request_is_told_of_in_words(shell: Shell) -> None:
    account = shell.account("Acme Ltd")
    settle(account, ID)
    fields = {"request": ID, "account": account, "token": "key", "model": "@cf/a/b", "outcome": "done"}
    times = {"first_token_ms": 120.0, "total_ms": 900.0, "gateway_ms": 3.0, "held_ms": 50.0, "queue_ms": 7.0}
    write_lines({"event": "request_ended", **fields, **times}, {"event": "request_ended", "request": f"{ID}-2"})
    text = shell.out("log", ID)
    for part in (
        f"Acme Ltd ({account}), by token key",
        "@cf/a/b",
        "done: it was answered",
        "30 of the prompt, 20 of them cached; 5 of the answer",
        "1.5 neurons",
        "3 ms in the gateway, 50 ms for a replica, or for its model to wake, 7 ms in the replica's queue",
        '"nightly"',
    ):
        assert part in text
    assert f"{ID}-2" not in text
    document = shell.json("log", ID)
    assert (document["record"]["micro_neurons"], len(document["events"])) == (1.5 * MICRO, 1)


def test_whose_a_request_is_is_what_its_lines_say(shell: Shell) -> None:
    shell.account("other")
    account = shell.account()
    settle(account, ID)
    write_lines({"event": "request_ended", "request": ID, "account": account, "outcome": "done"})
    assert f"acme ({account})" in (text := shell.out("log", ID, "--account", "other"))
    assert "1.5 neurons" in text


def test_a_refusal_has_no_cost_and_says_the_field(shell: Shell) -> None:
    account = shell.account()
    refusal = {"status": 400, "code": 5006, "kind": "invalid_request", "field": "top_k", "ms": 2.0}
    write_lines({"event": "request_refused", "request": REFUSED, "account": account, "token": "key", **refusal})
    text = shell.out("log", REFUSED)
    assert "refused with 400, code 5006, because of top_k" in text
    assert "nothing: the ledger has no record of it" in text


def test_a_call_that_nobody_may_make_has_no_account(shell: Shell) -> None:
    shell.account()
    refusal = {"status": 401, "code": 9106, "kind": "invalid_api_key", "ms": 2.0, "account": None}
    write_lines({"event": "request_refused", "request": REFUSED, **refusal})
    assert "nobody: its credential opened nothing" in shell.out("log", REFUSED)


def test_a_call_of_an_account_that_is_gone_is_not_said_to_be_nobodys_and_for_nothing(shell: Shell) -> None:
    shell.account()
    write_lines({"event": "request_ended", "request": ID, "account": "e" * 32, "token": "key", "outcome": "done"})
    text = shell.out("log", ID)
    assert f"account {'e' * 32}, by token key" in text
    assert f"not known: no account has the id or name '{'e' * 32}'" in text


def test_without_lines_the_ledger_still_has_it(shell: Shell) -> None:
    shell.account("other")
    settle(shell.account(), ID)
    assert "acme" in shell.out("log", ID)
    assert "acme" in shell.out("log", ID, "--account", "acme")
    assert "other hosts" in shell.refused("log", ID, "--account", "other")


def test_what_is_nowhere_or_no_id_is_refused(shell: Shell) -> None:
    shell.account()
    assert "gateway.log" in shell.refused("log", "no-such-request")
    assert "x-request-id" in shell.refused("log", "a b; rm")
    assert not Path(".hearth", "serve.lock").exists()
