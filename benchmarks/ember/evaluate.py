"""Asks Ember everyday questions about system prompts and judges its answers. It knows no training: the questions were
written by hand, and what an answer must hold and must not hold stands beside each."""

import argparse
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.ember.corpus import Example
from benchmarks.ember.measure import answers
from benchmarks.ember.tokenizer import END
from benchmarks.record import record

HELD_OUT: Final = Path(__file__).parent / "everyday.toml"
DEVELOPMENT: Final = Path(__file__).parent / "development.toml"
MODEL: Final = Path(__file__).parents[2] / "engine" / "builtin_model"
TARGET: Final = 0.85
BATCH: Final = 16
NOT_KNOWN: Final = re.compile(r"(?:don't|do not|cannot|can't|not) (?:know|say|tell|sure|find)|no information", re.I)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about which system prompt. Without `facts`, the prompt does not say."""

    system: str
    ask: str
    facts: tuple[str, ...]
    wrong: tuple[str, ...]


def read_questions(path: Path) -> list[Question]:
    prompts = tomllib.loads(path.read_text())["prompts"]
    return [
        Question(prompt["system"].strip(), one["ask"], tuple(one.get("facts", ())), tuple(one.get("wrong", ())))
        for prompt in prompts
        for one in prompt["questions"]
    ]


def holds(answer: str, expression: str) -> bool:
    """Whether the expression is found as whole words and whole numbers: 3 is neither in 13 nor in 3.50."""
    whole = rf"(?<![\w])(?<!\d[.,:])(?:{expression})(?!\w)(?![.,:]\d)"
    return re.search(whole, answer, re.I) is not None


def is_right(question: Question, answer: str) -> bool:
    """Whether the answer holds each fact and nothing wrong, or says that it does not know where there is no fact, and
    came to its END."""
    answer, end, _ = answer.partition(END)
    if not end:
        return False
    known = NOT_KNOWN.search(answer) is None
    if known != bool(question.facts) or any(holds(answer, wrong) for wrong in question.wrong):
        return False
    return all(holds(answer, fact) for fact in question.facts)


def ask_all(model: Any, tokenizer: Any, questions: list[Question]) -> list[str]:
    """The greedy answers, in the order of the questions, each with END behind it unless it was cut."""
    said: list[str] = []
    for start in range(0, len(questions), BATCH):
        examples = [
            Example("", [{"role": "system", "content": one.system}, {"role": "user", "content": one.ask}], [], "")
            for one in questions[start : start + BATCH]
        ]
        said += answers(model, tokenizer, examples, most=80)[0]
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ember.evaluate",
        description="Asks everyday questions about system prompts, prints each wrong answer and the share of right ones. "
        "The held-out questions asked of the built-in model are recorded as first-ember.",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="the model folder (default: the built-in model)")
    parser.add_argument(
        "--questions", type=Path, default=HELD_OUT, help="a file like everyday.toml, such as development.toml"
    )
    parser.add_argument("--quiet", action="store_true", help="print the share alone, not the wrong answers")
    asked = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    questions = read_questions(asked.questions)
    said = ask_all(model, tokenizer, questions)
    wrong = [(one, answer) for one, answer in zip(questions, said, strict=True) if not is_right(one, answer)]
    for one, answer in [] if asked.quiet else wrong:
        wanted = " and ".join(one.facts) or "that it does not know"
        print(f"asked   {one.ask}\n  said  {answer.removesuffix(END)}\n  right {wanted}")
    share = 1 - len(wrong) / len(questions)
    print(f"{len(questions) - len(wrong)} of {len(questions)} right, {share:.1%}")
    if (asked.model.resolve(), asked.questions.resolve()) == (MODEL, HELD_OUT):
        record("first_hour", "first-ember", round(share, 3), "share", bound=TARGET)


if __name__ == "__main__":
    main()
