"""Grammars: what compiling one and its masks cost, how much of the JSON Schema Test Suite is supported, and the same of
xgrammar, which was not chosen; and what an engine of 32 constrained sequences loses on a CPU.

    python -m benchmarks.scheduling.structured_output [--suite FOLDER] [--peer FOLDER]

The suite is a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite; --peer is where
`pip install --no-deps --target FOLDER xgrammar==0.2.8 apache-tvm-ffi` went. Times are of this process' own processor
time, so that others on the machine count less. Vocabularies are made up, of a true size; texts are random, which is
harder than what a model writes. A share of the suite is that of all schemas, in all drafts, each once; jsonschema
decides. Where it cannot read a pattern, or reads \\W by another standard than ECMA's, that counts against the library.
"""

import argparse
import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.record import record
from engine.bench.session import BenchEngine, BenchSession
from engine.bench.shapes import grammar_source
from engine.bench.vocabulary import write_tokenizer
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Grammar, GrammarKind, RejectReason
from engine.sequences.sequence import GrammarMatcher
from engine.sequences.validation import SubmitRejected
from engine.step.layout import Int32s
from engine.structured_output.lark_grammar import LarkMatcher
from engine.structured_output.llguidance_backend import open_tokenizer
from engine.structured_output.manager import StructuredOutputManager
from tests.engine.structured_output.texts import EMBER, Judgement, Scribe, compiled, judge

VOCABULARY = 128256
SOURCE = json.dumps(json.loads(grammar_source(1))["items"])
DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
STOP_ID = 1  # of the built-in model
STEPS, TEXTS, SEEDS = 200, 6, 2
SEQUENCES, DECODED = 32, 24
INVOICES, INVOICE_TOKENS = 8, 300
FIRST_BOUND_MS, LATER_BOUND_MS, COST_BOUND = 50.0, 1.0, 10.0


class PeerMatcher:
    """xgrammar's, as a GrammarMatcher."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.finished = False
        self.mask_us = 0.0

    def forced(self, tokens: "array[int]") -> list[int]:
        return []

    def accept(self, token: int) -> str:
        if not self.inner.accept_token(token):
            return "it does not match"
        self.finished = bool(self.inner.is_terminated())
        return ""


class PeerCompilation:
    done = True

    def __init__(self, peer: "Peer", schema: Any) -> None:
        self._peer = peer
        try:
            self._grammar = peer.compile(schema)
        except Exception as error:
            self._refused = str(error).partition("\n")[0]
            self._grammar = None

    def new_matcher(self, stop_ids: frozenset[int], given: Items[int] = ()) -> PeerMatcher:
        assert not given, "texts begin here"
        if self._grammar is None:
            raise SubmitRejected(RejectReason.GRAMMAR, self._refused)
        return self._peer.matcher(self._grammar)


class Peer:
    """xgrammar with the spellings of a vocabulary."""

    def __init__(self, spellings: list[bytes], stop_id: int) -> None:
        import xgrammar

        self._library = xgrammar
        information = xgrammar.TokenizerInfo(spellings, stop_token_ids=[stop_id])
        self._compiler = xgrammar.GrammarCompiler(information, max_threads=1, cache_enabled=False)
        self._words = -(-len(spellings) // 32)

    def compile(self, schema: Any) -> Any:
        source = json.dumps(schema)
        return self._compiler.compile_json_schema(source, strict_mode=False, max_whitespace_cnt=4)

    def matcher(self, grammar: Any) -> PeerMatcher:
        return PeerMatcher(self._library.GrammarMatcher(grammar, terminate_without_stop_token=False))

    def masks(self, matchers: Items[GrammarMatcher | None]) -> Int32s:
        masks_MW = np.full((len(matchers), self._words), -1, np.int32)
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, PeerMatcher)
            matcher.inner.fill_next_token_bitmask(masks_MW, row)
        return masks_MW


def processor_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def walk(
    masks: Callable[[list[GrammarMatcher | None]], Int32s], matcher: GrammarMatcher, seed: int, end: int
) -> list[float]:
    """The µs of each mask of one random text."""
    rng, took_us = np.random.default_rng(seed), []
    for _ in range(STEPS):
        began = time.thread_time()
        mask_1W = masks([matcher])
        took_us.append(1e6 * (time.thread_time() - began))
        allowed = np.flatnonzero(np.unpackbits(mask_1W.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != end]
        if not len(allowed) or matcher.accept(int(allowed[rng.integers(len(allowed))])) or matcher.finished:
            break
    return took_us


def tell_masks(name: str, took_us: list[float], peer: str | None) -> None:
    cuts = statistics.quantiles(took_us, n=100)
    record("grammars", f"mask p50, {name}, {VOCABULARY} tokens", cuts[49], "µs", peer=peer)
    record("grammars", f"mask p99, {name}, {VOCABULARY} tokens", cuts[98], "µs", peer=peer)


@contextlib.contextmanager
def large_model() -> Iterator[Path]:
    """A folder with config.json and tokenizer.json of a large vocabulary."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = json.loads((EMBER / "config.json").read_text()) | {"vocab_size": VOCABULARY}
        config["eos_token_id"] = VOCABULARY - 1
        (folder / "config.json").write_text(json.dumps(config))
        write_tokenizer(folder, VOCABULARY)
        yield folder


def measure_ours(folder: Path) -> None:
    before_mb = resident_mb()
    with contextlib.closing(StructuredOutputManager(folder, 1)) as grammars:
        grammars.wait_ready()
        record("grammars", f"memory of a vocabulary of {VOCABULARY}", resident_mb() - before_mb, "MB")
        compiled(grammars, '{"const": 0}')  # the trials have started
        took_ms, later_ms = [], []
        before_mb = resident_mb()
        for number in range(9):
            source = SOURCE.replace("field_0", f"other_{number}")
            began = time.perf_counter()
            compilation = compiled(grammars, source)
            compilation.new_matcher(frozenset({VOCABULARY - 1}))
            took_ms.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            compiled(grammars, source).new_matcher(frozenset({VOCABULARY - 1}))
            later_ms.append(1e3 * (time.perf_counter() - began))
        size = f"schema of {len(SOURCE)} bytes"
        record(
            "grammars", f"first use of a {size}, off the loop", statistics.median(took_ms), "ms", bound=FIRST_BOUND_MS
        )
        record("grammars", f"later use of a {size}", statistics.median(later_ms), "ms", bound=LATER_BOUND_MS)
        record("grammars", f"memory of a compiled {size}", (resident_mb() - before_mb) / 9, "MB")
        for name, source in (("object", '{"type": "object"}'), (size, SOURCE)):
            took_us = []
            for seed in range(TEXTS):
                matcher = compiled(grammars, source).new_matcher(frozenset({VOCABULARY - 1}))
                took_us += walk(grammars.masks, matcher, seed, VOCABULARY - 1)
            tell_masks(name, took_us, None)


def measure_peer(folder: Path, name: str) -> None:
    tokenizer = open_tokenizer(folder)
    spellings = [tokenizer.decode_bytes([token]) for token in range(VOCABULARY)]
    before_mb = resident_mb()
    peer, size = Peer(spellings, VOCABULARY - 1), f"schema of {len(SOURCE)} bytes"
    record("grammars", f"memory of a vocabulary of {VOCABULARY}", resident_mb() - before_mb, "MB", peer=name)
    before_mb = resident_mb()
    retained, took_ms = [], []
    for number in range(5):
        schema = json.loads(SOURCE.replace("field_0", f"other_{number}"))
        took_ms.append(processor_ms(lambda schema=schema: retained.append(peer.compile(schema))))  # type: ignore[misc]
    record("grammars", f"first use of a {size}, off the loop", statistics.median(took_ms), "ms", peer=name)
    record("grammars", f"memory of a compiled {size}", (resident_mb() - before_mb) / 5, "MB", peer=name)
    for shape, schema in (("object", {"type": "object"}), (size, json.loads(SOURCE))):
        grammar, took_us = peer.compile(schema), []
        for seed in range(TEXTS):
            took_us += walk(peer.masks, peer.matcher(grammar), seed, VOCABULARY - 1)
        tell_masks(shape, took_us, name)


def schemas(suite: Path) -> list[Any]:
    """The schemas of all drafts, each once."""
    cases: dict[str, Any] = {}
    for draft in DRAFTS:
        for path in sorted((suite / "tests" / draft).rglob("*.json")):
            cases |= {json.dumps(case["schema"]): case["schema"] for case in json.loads(path.read_text())}
    return list(cases.values())


def count(judged: Counter[Judgement], peer: str | None) -> None:
    supported = sum(judged.values()) - judged[Judgement.REFUSED]
    record("grammars", "suite: schemas", sum(judged.values()), "schemas", peer=peer)
    record("grammars", "suite: refused", judged[Judgement.REFUSED], "schemas", peer=peer)
    record("grammars", "suite: wrong", judged[Judgement.WRONG], "schemas", peer=peer)
    share = 100 * judged[Judgement.ACCEPTED] / supported
    record("grammars", "suite: accepted of those supported", share, "%", bound=95, peer=peer)


def measure_suite(suite: Path, peer_name: str | None) -> None:
    suite_schemas = schemas(suite)
    with contextlib.closing(StructuredOutputManager(EMBER, 1)) as grammars:
        grammars.wait_ready()
        scribe, judged = Scribe(grammars, STOP_ID), Counter[Judgement]()
        for schema in suite_schemas:
            each = judge(scribe, schema, compiled(grammars, json.dumps(schema), cache=False), SEEDS)
            judged[each.judgement] += 1
            if each.judgement == Judgement.WRONG:
                print(f"  wrong: {json.dumps(schema)[:150]}: {each.told[:150]}")
        count(judged, None)
        if peer_name is not None:
            peer = Peer(scribe.bytes, STOP_ID)
            scribe = Scribe(peer, STOP_ID)
            judgements = (judge(scribe, schema, PeerCompilation(peer, schema), SEEDS) for schema in suite_schemas)
            count(Counter(each.judgement for each in judgements), peer_name)


def measure_engine() -> None:
    """Steps with and without a grammar in every row, in turn; the processor's time of the whole process."""
    torch.set_num_threads(1)
    model = ModelSpec(name="ember", folder=str(EMBER), kv_bytes=256 << 20)
    engine, grammar = BenchEngine(model, "cpu"), Grammar(GrammarKind.JSON_SCHEMA, grammar_source(1000))
    took_ms: dict[Grammar | None, list[float]] = {grammar: [], None: []}
    with contextlib.closing(engine.grammars()) as grammars:
        for format_ in (grammar, None) * 5:
            with BenchSession(engine, gap_ms=60_000, grammars=grammars) as session:
                for number in range(SEQUENCES):
                    session.submit([2, 3, 40 + number], 4 * DECODED, temperature=1.0, grammar=format_)
                session.run_until_all_stream()
                took_ms[format_].append(processor_ms(lambda session=session: session.steps_ms(DECODED)) / DECODED)  # type: ignore[misc]
    on_ms, off_ms = (statistics.median(took_ms[format_]) for format_ in (grammar, None))
    record("grammars", f"engine, {SEQUENCES} sequences, built-in model, without a grammar", off_ms, "ms per step")
    record("grammars", f"engine, {SEQUENCES} sequences, built-in model, with one", on_ms, "ms per step")
    record(
        "grammars", f"engine, {SEQUENCES} sequences: throughput lost", 100 * (1 - off_ms / on_ms), "%", bound=COST_BOUND
    )


def invoice() -> Grammar:
    """Names that are longer than most values."""
    text, number, date = {"type": "string", "maxLength": 24}, {"type": "number"}, {"type": "string", "format": "date"}
    line = _closed(description=text, quantity={"type": "integer"}, unit_price=number, total_amount=number)
    lines = {"type": "array", "items": line, "minItems": 2, "maxItems": 2}
    dates = {"issue_date": date, "due_date": date}
    schema = _closed(invoice_number=text, **dates, line_items=lines, total_amount=number)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def measure_forced() -> None:
    """The same number of tokens with and without appending what is forced, in turn."""
    torch.set_num_threads(1)
    engine, grammar = BenchEngine(ModelSpec(name="ember", folder=str(EMBER), kv_bytes=256 << 20), "cpu"), invoice()
    steps, forced, took_ms = {}, 0, dict[bool, list[float]]({True: [], False: []})
    with contextlib.closing(engine.grammars()) as grammars:
        for forcing in (True, False) * 5:
            off = contextlib.nullcontext() if forcing else mock.patch.object(LarkMatcher, "forced", return_value=[])
            with off, BenchSession(engine, gap_ms=60_000, grammars=grammars) as session:
                for number in range(INVOICES):
                    session.submit([2, 3, 40 + number], INVOICE_TOKENS, temperature=1.0, grammar=grammar)
                took_ms[forcing].append(processor_ms(session.run) / INVOICES)
                load = session.scheduler.load(draining=False)
                steps[forcing], forced = load.steps, max(forced, load.counters.get("forced_tokens", 0))
    for forcing, name in ((False, "sampled"), (True, "forced tokens appended")):
        record("grammars", f"{INVOICES} invoices of {INVOICE_TOKENS} tokens, {name}: steps", steps[forcing], "steps")
        each_ms = statistics.median(took_ms[forcing])
        record("grammars", f"{INVOICES} invoices of {INVOICE_TOKENS} tokens, {name}: an invoice", each_ms, "ms")
    record("grammars", "forced tokens of invoices", 100 * forced / INVOICES / INVOICE_TOKENS, "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--peer", type=Path)
    options = parser.parse_args()
    peer_name = None
    if options.peer is not None:
        sys.path.append(str(options.peer))
        peer_name = "xgrammar 0.2.8"
    measure_engine()
    measure_forced()
    with large_model() as folder:
        measure_ours(folder)
        if peer_name is not None:
            measure_peer(folder, peer_name)
    if options.suite is not None:
        measure_suite(options.suite, peer_name)


if __name__ == "__main__":
    main()
