"""Measures Ember on held-out conversations: greedy answers, compared letter for letter. It knows no scheduling, only transformers."""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.ember import corpus
from benchmarks.ember.tokenizer import END

SIZES: Final = (100, 300, 600, 950, 1300)  # about how many tokens the system prompts have


@dataclass(frozen=True, slots=True)
class Figure:
    """How many held-out answers of one kind and size were right. With `unseen_phrases`, no question's phrasing was ever trained on."""

    kind: str
    size: int
    unseen_phrases: bool
    right: int
    count: int
    prompt_tokens: float  # on average
    longest: int  # prompt tokens


def answers(model: Any, tokenizer: Any, examples: list[corpus.Example], most: int = 160) -> tuple[list[str], list[int]]:
    """The greedy answers to one batch, each with END behind it unless it had not ended after `most` tokens, and each
    prompt's tokens."""
    prompts = [
        tokenizer.apply_chat_template(e.messages, tools=e.tools or None, add_generation_prompt=True, tokenize=False)
        for e in examples
    ]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt").to(
        model.device
    )
    with torch.inference_mode():
        out = model.generate(
            batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=most, do_sample=False
        )
    said = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :])
    return ["".join(text.partition(END)[:2]) for text in said], batch["attention_mask"].sum(dim=1).tolist()


def measure(
    model: Any,
    tokenizer: Any,
    kind: str,
    size: int,
    count: int,
    batch: int = 128,
    shown: int = 0,
    unseen_phrases: bool = False,
) -> Figure:
    """`count` examples of one kind; prints up to `shown` wrong answers."""
    right, lengths = 0, []
    for start in range(0, count, batch):
        examples = [
            corpus.heldout(kind, seed, size, unseen_phrases) for seed in range(start, min(start + batch, count))
        ]
        said, tokens = answers(model, tokenizer, examples)
        lengths += tokens
        for example, text in zip(examples, said, strict=True):
            if text == example.answer + END:
                right += 1
            elif shown > 0:
                shown -= 1
                print(
                    f"  {kind} {size}: {example.messages[-1]['content']!r}\n    said  {text!r}\n    right {example.answer!r}",
                    flush=True,
                )
    return Figure(kind, size, unseen_phrases, right, count, sum(lengths) / len(lengths), max(lengths))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ember.measure",
        description="Measures a model folder on held-out conversations and prints a table by kind and prompt length.",
    )
    parser.add_argument("folder", type=Path, help="the model folder")
    parser.add_argument("--count", type=int, default=512, help="examples of each kind and size")
    parser.add_argument("--batch", type=int, default=128, help="examples at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shown", type=int, default=3, help="wrong answers to print of each row")
    parser.add_argument("--rows", type=Path, help="also write the figures to this JSON file")
    asked = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.folder)
    model = AutoModelForCausalLM.from_pretrained(asked.folder, dtype=torch.float32).to(asked.device).eval()
    began = time.monotonic()
    rows = [("facts", size) for size in SIZES] + [(kind, 300) for kind in corpus.KINDS if kind != "facts"]
    figures: list[Figure] = []
    print(
        "| kind | prompt tokens, average | longest | n | exact | n, unseen phrasing | exact |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for kind, size in rows:
        seen = measure(model, tokenizer, kind, size, asked.count, asked.batch, asked.shown)
        unseen = measure(model, tokenizer, kind, size, max(1, asked.count // 2), asked.batch, 0, unseen_phrases=True)
        figures += [seen, unseen]
        print(
            f"| {kind} | {seen.prompt_tokens:.0f} | {seen.longest} | {seen.count} | {seen.right / seen.count:.1%} "
            f"| {unseen.count} | {unseen.right / unseen.count:.1%} |",
            flush=True,
        )
    print(f"{time.monotonic() - began:.0f} s")
    if asked.rows is not None:
        asked.rows.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
