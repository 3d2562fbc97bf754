"""What a newcomer sees: the printed curl line works, a real model answers, a tenant alone shares its system prompt."""

import json
import re
import stat
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.conftest import EMBER, Hearth, events, serving
from tests.support.waiting import wait_for

SYSTEM = (
    "You are the assistant of the Harbour Street Library. Facts you may use:\n"
    "- Opening hours: Monday to Friday from 9:30 to 18:00, Saturday from 10:00 to 14:00, closed on Sunday.\n"
    "- A library card costs 12 euros a year. The Wi-Fi password is QUILL-4821.\n"
    "- The reading room is on the second floor. Books may be kept for 21 days.\n"
    "- To renew a book call 555-0192 and give the number of your card.\n"
)
BLOCK_TOKENS = 16


def ask(hearth: Hearth, token: str, account_id: str, question: str, **fields: object) -> dict[str, object]:
    with hearth.client(token) as client:
        said = client.post(
            f"/client/v4/accounts/{account_id}/ai/run/{EMBER}",
            json={
                "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
                "temperature": 0,
                **fields,
            },
        )
    assert said.status_code == 200, said.text
    body = said.json()
    assert body["success"] is True
    return body["result"]


def cached(result: dict[str, object]) -> int:
    return result["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]


def test_the_credentials_file_is_only_for_its_owner(hearth: Hearth) -> None:
    path = hearth.folder / ".hearth" / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = json.loads(path.read_text())
    assert set(kept) >= {"base_url", "account_id", "token"}
    assert re.fullmatch("[0-9a-f]{32}", kept["account_id"])


def test_lines_of_json_hold_no_token(hearth: Hearth) -> None:
    assert "`hearth credentials` prints the first account" in hearth.log
    assert hearth.token not in hearth.log


def test_the_printed_curl_line_streams_when_pasted(tmp_path: Path) -> None:
    with serving(tmp_path, '[log]\nformat = "text"\n') as hearth:
        printed = hearth.log[: hearth.log.index(f"{EMBER} is ready")]
        (line,) = [line for line in printed.splitlines() if line.startswith("curl ")]
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = events(done.stdout)
    assert "".join(str(event["response"]) for event in said if event.get("response")).strip()


def test_a_real_model_answers_from_its_system_prompt(hearth: Hearth) -> None:
    answer = ask(hearth, hearth.token, hearth.account_id, "What is the Wi-Fi password?", max_tokens=60)
    assert "QUILL-4821" in str(answer["response"])


def test_tokens_arrive_one_event_after_the_other(hearth: Hearth) -> None:
    body = {"prompt": "Hello! Who are you?", "stream": True, "max_tokens": 24, "temperature": 0}
    with hearth.client() as client, client.stream("POST", f"/ai/run/{EMBER}", json=body) as said:
        assert said.headers["content-type"].startswith("text/event-stream")
        pieces = list(said.iter_raw())
    assert len(pieces) > 3
    found = events(b"".join(pieces).decode())
    assert found[-1]["usage"]["completion_tokens"] >= 1


def test_the_second_call_reuses_the_system_prompt_and_another_tenant_does_not(hearth: Hearth) -> None:
    mine, my_token = hearth.account("cache-mine")
    other, other_token = hearth.account("cache-other")
    first = ask(hearth, my_token, mine, "What does a library card cost?")
    same = ask(hearth, my_token, mine, "What does a library card cost?")
    cross = ask(hearth, other_token, other, "What does a library card cost?")
    prompt_tokens = first["usage"]["prompt_tokens"]  # type: ignore[index]
    assert cached(first) == 0
    assert cached(cross) == 0
    assert cached(same) == (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 0
    assert first["response"] == same["response"] == cross["response"]


def test_the_next_turn_of_a_conversation_hits_what_was_generated(hearth: Hearth) -> None:
    account, token = hearth.account("turns")
    first = ask(hearth, token, account, "When are you open on Saturday?", max_tokens=64)
    history = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "When are you open on Saturday?"},
        {"role": "assistant", "content": first["response"]},
        {"role": "user", "content": "And on Sunday?"},
    ]
    second = ask(hearth, token, account, "", messages=history, max_tokens=64)
    assert cached(second) >= int(first["usage"]["prompt_tokens"]) // BLOCK_TOKENS * BLOCK_TOKENS  # type: ignore[index]


def test_usage_is_counted_to_the_token(hearth: Hearth) -> None:
    account, token = hearth.account("counted")
    results = [ask(hearth, token, account, question, max_tokens=20) for question in ("Hi!", "Thanks!", "Hi!")]
    wanted = [0, 0, 0]
    for result in results:
        usage = result["usage"]
        wanted[0] += usage["prompt_tokens"]  # type: ignore[index]
        wanted[1] += cached(result)
        wanted[2] += usage["completion_tokens"]  # type: ignore[index]

    def counted() -> list[int] | None:
        from tests.end_to_end.ledger import read_totals

        found = read_totals(hearth.folder, account)
        return [found.prompt_tokens, found.cached_tokens, found.completion_tokens] if found.requests == 3 else None

    assert wait_for(counted, 5, "three usage records") == wanted


@pytest.mark.parametrize("path", ["/ai/run/@cf/hearth/ember", "/ai/run/@cf%2Fhearth%2Fember"])
def test_both_spellings_of_the_slash_are_one_route(hearth: Hearth, path: str) -> None:
    said = httpx.post(
        hearth.base_url + path,
        headers={"Authorization": f"Bearer {hearth.token}"},
        json={"prompt": "Hello", "max_tokens": 4},
        timeout=60,
    )
    assert said.status_code == 200
