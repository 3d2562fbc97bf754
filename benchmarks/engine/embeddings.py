"""An encoder's vectors on a CPU beside sentence-transformers: MiniLM, calls of 1 and of 32 texts of mixed lengths.

    python -m benchmarks.engine.embeddings [--threads 1] [--rounds 9]

Both read the same texts from the start: tokenizing, the model in float32, mean pooling, length 1. Ours is what a
gateway and a replica do, without the sockets between them. The two take turns; each figure is the median of the rounds.
On a machine that does other work, the ratio is what counts: the median of the rounds' ratios.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.record import record
from engine.execution.open import inference_mode, open_model
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling
from engine.step.encoder_layout import pack_texts
from gateway.text.tokenizer import ModelTokenizer
from tests.support import minilm

WORDS = ["the", "small", "house", "stands", "by", "river", "people", "walk", "market", "when", "sun", "quiet"]
Encode = Callable[[list[str]], NDArray[np.float32]]


def texts(count: int, seed: int) -> list[str]:
    """Texts of 4 to 60 words, more short ones than long ones."""
    pick = random.Random(seed)
    return [" ".join(pick.choices(WORDS, k=int(4 * 15 ** pick.random()))) for _ in range(count)]


def ours(threads: int) -> Encode:
    text = ModelTokenizer(minilm.folder())
    model = ModelSpec(name="minilm", folder=str(minilm.folder()))
    runner = open_model(model, "cpu", threads, lambda: None)

    def encode(sentences: list[str]) -> NDArray[np.float32]:
        ids = [text.special_tokens.single(text.encode_text(each)) for each in sentences]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        rows = []
        for first in range(0, len(order), 1024):
            some = [ids[index] for index in order[first : first + 1024]]
            rows.append(runner.executor.launch(pack_texts(some, [Pooling.MEAN] * len(some))).wait().vectors_RH)
        vectors = np.empty_like(np.concatenate(rows))
        vectors[order] = np.concatenate(rows)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return encode


def theirs(threads: int) -> Encode:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm.folder()), device="cpu")
    torch.set_num_threads(threads)

    def encode(sentences: list[str]) -> NDArray[np.float32]:
        return model.encode(sentences, batch_size=32, normalize_embeddings=True, show_progress_bar=False)

    return encode


def measure(encode: Encode, batch: int, calls: list[list[str]]) -> float:
    """Texts per second."""
    began = time.perf_counter()
    for sentences in calls:
        encode(sentences)
    return batch * len(calls) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    inference_mode().__enter__()
    own, peer = ours(options.threads), theirs(options.threads)
    trial = texts(50, seed=1)
    apart = np.abs(own(trial) - peer(trial)).max()
    assert apart < 1e-4, f"the vectors are {apart} apart"
    for batch in (1, 32):
        rates: list[tuple[float, float]] = []
        for number in range(options.rounds + 1):
            calls = [texts(batch, seed=100 * number + index) for index in range(64 if batch == 1 else 6)]
            rates.append((measure(own, batch, calls), measure(peer, batch, calls)))
        rates = rates[1:]  # the first warms up
        shape = f"MiniLM, calls of {batch}, 4 to 60 words, {options.threads} threads"
        record("vectors", shape, statistics.median(rate for rate, _ in rates), "texts/s")
        record(
            "vectors", shape, statistics.median(other for _, other in rates), "texts/s", peer="sentence-transformers"
        )
        ratio = statistics.median(rate / other for rate, other in rates)
        record("vectors", f"{shape}: ours ÷ sentence-transformers", ratio, "×")


if __name__ == "__main__":
    main()
