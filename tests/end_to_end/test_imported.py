"""A real model from end to end: a GGUF file is imported, added, compressed and served by the commands that an operator
types, and answers as the reference library does.
"""

import json
import math
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
PLACE = {
    "type": "object",
    "properties": {"country": {"type": "string", "maxLength": 20}},
    "required": ["country"],
    "additionalProperties": False,
}


TOOLS = """{% if tools %}<|im_start|>system
Answer with a call of a function: <tool_call>{"name": name, "arguments": arguments}</tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}"""


def teach_tools(folder: Path) -> None:
    """Has the template tell of tools, which the model's own does not know; without any it says what it said."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = TOOLS + settings["chat_template"]
    file.write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearth]:
    """The model as the file has it, and the same in 12 bits, in float32 both: so does the reference library compute."""
    place = tmp_path_factory.mktemp("imported")
    printed = run_hearth(place, "models", "import", str(gguf_file()), "--to", "smol")
    assert "272 tensors (210 Q4_1, 61 F32, 1 Q8_0)" in printed
    assert "`hearth models add NAME smol`" in printed
    assert " of the weights are in 12 bits" in run_hearth(place, "models", "compress", "smol", "twelve")
    teach_tools(place / "twelve")
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


@pytest.fixture(scope="module")
def tokenizer(smol: Hearth) -> Any:
    return AutoTokenizer.from_pretrained(smol.folder / "smol")


@pytest.fixture(scope="module")
def reference(smol: Hearth) -> Any:
    return AutoModelForCausalLM.from_pretrained(smol.folder / "smol", dtype=torch.float32).eval()


def test_greedy_answers_are_those_of_the_reference_library(smol: Hearth, tokenizer: Any, reference: Any) -> None:
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


def text(hearth: Hearth, question: str, model: str = SMOL, **fields: Any) -> str:
    answer: str = chat(hearth, question, model, **fields)["message"]["content"]
    return answer


def test_what_leaves_one_token_is_greedy_and_a_seed_gives_the_same_again(smol: Hearth) -> None:
    """On the distribution of a trained model, at a temperature at which it says many things."""
    greedy = text(smol, QUESTIONS[2], max_tokens=24)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert text(smol, QUESTIONS[2], max_tokens=24, temperature=1.5, seed=5, **narrow) == greedy, narrow
    assert text(smol, QUESTIONS[2], max_tokens=24, temperature=0.01, seed=5) == greedy
    drawn = [text(smol, QUESTIONS[2], max_tokens=24, temperature=1.0, seed=seed) for seed in range(2)]
    assert drawn == [text(smol, QUESTIONS[2], max_tokens=24, temperature=1.0, seed=seed) for seed in range(2)]
    assert len({greedy, *drawn}) == 3
    assert drawn[0] == text(smol, QUESTIONS[2], TWELVE, max_tokens=24, temperature=1.0, seed=0), "in 12 bits too"


def test_what_is_drawn_is_as_likely_as_bounds_ask(smol: Hearth) -> None:
    """By the logprobs beside each token, which are of the model before any bound; without one the bounds are passed."""

    def likelier(**fields: Any) -> list[tuple[int, float, float]]:
        """Of each token how many are likelier, their probability, and its own beside that of the likeliest."""
        drawn, bounds = [], {"top_p": 1, "min_p": 0, **fields}  # the folder has bounds of its own
        for seed in range(4):
            choice = chat(
                smol, QUESTIONS[2], max_tokens=12, temperature=1, seed=seed, logprobs=True, top_logprobs=8, **bounds
            )
            for part in choice["logprobs"]["content"]:
                tops = [each["logprob"] for each in part["top_logprobs"]]
                above = [math.exp(top) for top in tops if top > part["logprob"] + 1e-6]
                drawn.append((len(above), sum(above), math.exp(part["logprob"] - tops[0])))
        return drawn

    free = likelier()
    assert max(rank for rank, _, _ in likelier(top_k=3)) == 2 < max(rank for rank, _, _ in free)
    assert max(above for _, above, _ in likelier(top_p=0.6)) < 0.6 < max(above for _, above, _ in free)
    assert min(part for _, _, part in likelier(min_p=0.2)) >= 0.2 > min(part for _, _, part in free)


def test_logprobs_are_those_of_the_reference_library(smol: Hearth, tokenizer: Any, reference: Any) -> None:
    choice = chat(smol, QUESTIONS[1], max_tokens=12, temperature=1.0, seed=3, logprobs=True, top_logprobs=4)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[1]}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    parts = choice["logprobs"]["content"]
    ids = tokenizer.encode("".join(part["token"] for part in parts), add_special_tokens=False)
    assert [tokenizer.decode([id]) for id in ids] == [part["token"] for part in parts]
    with torch.no_grad():
        logits_TV = reference(torch.cat([prompt[0], torch.tensor(ids)])[None]).logits[0, prompt.shape[1] - 1 : -1]
    for part, id, logprobs_V in zip(parts, ids, torch.log_softmax(logits_TV.double(), -1), strict=True):
        assert part["logprob"] == pytest.approx(float(logprobs_V[id]), abs=1e-3)
        top = torch.topk(logprobs_V, 4)
        assert [each["logprob"] for each in part["top_logprobs"]] == pytest.approx(top.values.tolist(), abs=1e-3)
        assert [each["token"] for each in part["top_logprobs"]] == [tokenizer.decode([at]) for at in top.indices]


def test_penalties_end_repetitions_and_a_bias_forbids_a_word(smol: Hearth, tokenizer: Any) -> None:
    question = "Write the word ha one hundred times: ha ha ha ha ha ha"
    plain = text(smol, question, max_tokens=48).split()
    for penalty in ({"frequency_penalty": 1.0}, {"repetition_penalty": 1.5}):
        penalised = text(smol, question, max_tokens=48, **penalty).split()
        assert max(map(penalised.count, penalised)) < max(map(plain.count, plain)) / 2, penalty
    paris = {str(tokenizer.encode(word, add_special_tokens=False)[0]): -100 for word in (" Paris", "Paris")}
    assert "Paris" not in text(smol, QUESTIONS[0], max_tokens=16, logit_bias=paris)


def test_a_tool_that_has_to_be_called_is_called_with_what_was_asked(smol: Hearth) -> None:
    tool = {"type": "function", "function": {"name": "capital_of", "parameters": PLACE}}
    choice = chat(smol, QUESTIONS[0], TWELVE, tools=[tool], tool_choice="required", max_tokens=60)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "capital_of"
    assert json.loads(call["function"]["arguments"]) == {"country": "France"}


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
