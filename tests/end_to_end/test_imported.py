"""A real model from end to end: a GGUF file is imported, added, compressed and served by the commands that an operator
types, and answers as the reference library does.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.conftest import EMBER, Hearth, events, run_hearth, serving
from tests.support.smollm2 import gguf_file
from tests.support.waiting import wait_for

SMOL, TWELVE = "@cf/acme/smollm2", "@cf/acme/smollm2-12"
SETTINGS = f'[[models]]\nname = "{EMBER}"\nserve = false\n'
QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Write one sentence about the sea.",
    "How do I boil an egg?",
)
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "large": {"type": "boolean"},
    },
    "required": ["name", "country", "large"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearth]:
    """The model as the file has it, and the same in 12 bits, in float32 both: so does the reference library compute."""
    place = tmp_path_factory.mktemp("imported")
    printed = run_hearth(place, "models", "import", str(gguf_file()), "--to", "smol")
    assert "272 tensors (210 Q4_1, 61 F32, 1 Q8_0)" in printed
    assert "`hearth models add NAME smol`" in printed
    assert " of the weights are in 12 bits" in run_hearth(place, "models", "compress", "smol", "twelve")
    for name, folder in ((SMOL, "smol"), (TWELVE, "twelve")):
        assert "whole" in run_hearth(place, "models", "add", name, folder, "--dtype", "float32")
    with serving(place, SETTINGS) as running:
        yield running


def chat(hearth: Hearth, question: str, model: str = SMOL, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, **fields}
    with hearth.client() as client:
        answer = client.post(f"/client/v4/accounts/{hearth.account_id}/ai/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_curl_gets_an_answer_that_makes_sense_whole_and_streamed(smol: Hearth) -> None:
    url = f"{smol.base_url}/client/v4/accounts/{smol.account_id}/ai/v1/chat/completions"

    def curl(**fields: Any) -> str:
        body = {"model": SMOL, "messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, **fields}
        command = ["curl", "-sS", url, "-H", f"Authorization: Bearer {smol.token}", "-d", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    choice = json.loads(curl())["choices"][0]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
    parts = [event["choices"][0]["delta"].get("content") or "" for event in events(curl(stream=True))]
    assert "".join(parts) == "The capital of France is Paris."
    assert sum(map(bool, parts)) > 3


def test_greedy_answers_are_those_of_the_reference_library(smol: Hearth) -> None:
    folder = smol.folder / "smol"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        made = reference.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        expected = tokenizer.decode(made, skip_special_tokens=True)
        choice = chat(smol, question, max_tokens=64)
        assert choice["message"]["content"] == expected
        assert (choice["finish_reason"] == "stop") == (int(made[-1]) == tokenizer.eos_token_id)


def test_the_same_weights_in_12_bits_answer_the_same(smol: Hearth) -> None:
    for question in QUESTIONS:
        assert chat(smol, question, TWELVE, max_tokens=64) == chat(smol, question, max_tokens=64)


def test_answers_hold_to_a_schema_and_say_what_was_asked(smol: Hearth) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for seed in range(4):
        choice = chat(
            smol, "Describe Paris as JSON.", response_format=shape, max_tokens=120, temperature=0.5 * seed, seed=seed
        )
        assert choice["finish_reason"] == "stop"
        document = json.loads(choice["message"]["content"])
        jsonschema.validate(document, CITY)
        if seed == 0:
            assert document["country"].lower() == "france"


def test_an_import_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "models", "import", str(gguf_file()), "--to", "made"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    wait_for(lambda: list(tmp_path.glob("made.*/*.safetensors")), 60, "it began to write")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "hearth: stopped"
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == []
