"""Two models on a budget of one: every call of either is answered, and right, however they alternate."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.end_to_end.conftest import EMBER, Hearth, events, serving

OTHER: Final = "@cf/test/other"
FOLDER: Final = Path(__file__).parents[2] / "engine" / "builtin_model"
MODELS: Final = (EMBER, OTHER)
QUESTIONS: Final = ("When are you open?", "Where is the harbour?", "Who wrote this book?")
TOKENS: Final = 8
# Beside weights of 60 MiB in float32 (a CPU may choose bfloat16 otherwise): two such models are more than the budget.
KV_BYTES: Final = 32 << 20
SETTINGS: Final = f"""device_bytes = {150 << 20}
[[models]]
name = "{EMBER}"
dtype = "float32"
kv_bytes = {KV_BYTES}
resident_s = 0.2
[[models]]
name = "{OTHER}"
folder = "{FOLDER}"
dtype = "float32"
kv_bytes = {KV_BYTES}
resident_s = 0.2
"""


def said(hearth: Hearth, token: str, model: str, question: str, *, stream: bool) -> tuple[str, dict[str, Any]]:
    """The answer's text and its usage."""
    body = {"prompt": question, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
    with hearth.client(token) as client:
        answer = client.post(f"/ai/run/{model}", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        result = answer.json()["result"]
        return result["response"], result["usage"]
    found = events(answer.text)
    assert not any("errors" in event for event in found), found
    return "".join(event.get("response") or "" for event in found), found[-1]["usage"]


def machine(hearth: Hearth) -> dict[str, Any]:
    """What the operator reads of the one machine."""
    account, _ = hearth.account("landlord")
    minted = json.loads(hearth.command("tokens", "mint", account, "--permissions", "operator", "--json"))
    with hearth.client(minted["token"]) as client:
        (told,) = client.get("/client/v4/operator/machines").json()["result"]["machines"]
    return dict(told)


def test_two_models_on_the_room_of_one_answer_every_call_of_two_tenants(tmp_path: Path) -> None:
    rng = random.Random(6)
    with serving(tmp_path, SETTINGS) as hearth:
        tenants = [hearth.token, hearth.account("bob")[1]]
        alone = {
            (model, question): said(hearth, hearth.token, model, question, stream=False)[0]
            for model in MODELS
            for question in QUESTIONS
        }
        calls = [
            (rng.choice(tenants), rng.choice(MODELS), rng.choice(QUESTIONS), rng.random() < 0.5) for _ in range(18)
        ]

        def call(number: int) -> None:
            token, model, question, stream = calls[number]
            text, usage = said(hearth, token, model, question, stream=stream)
            assert text == alone[model, question]
            assert usage["completion_tokens"] <= TOKENS

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(call, range(len(calls))))
        told = machine(hearth)
        (device,) = told["devices"]
        assert device["held_bytes"] <= device["budget_bytes"] == 150 << 20
        assert sum(replica["device_bytes"] for replica in told["replicas"]) == device["held_bytes"]
        assert told["moves"]["wake"] >= 3
        assert told["moves"]["start"] == 2, "whoever slept kept its process"
        assert not [kind for kind in told["moves"] if kind.endswith("_failed")]
