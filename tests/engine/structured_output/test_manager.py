"""engine/structured_output/manager.py: whose grammars are kept, whose turn it is, and what matchers let through."""

import gc
import itertools
import json
import random
import re
import time
from array import array
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from engine.protocol.types import Grammar, GrammarKind, RejectReason
from engine.sequences.sequence import FORCED_MAX, GrammarMatcher
from engine.sequences.validation import SubmitRejected
from engine.structured_output import lark_grammar
from engine.structured_output import manager as module
from engine.structured_output.lark_grammar import PARSERS_MAX, TOKEN_MS_MAX, LarkCompilation, LarkMatcher
from engine.structured_output.llguidance_backend import open_tokenizer
from engine.structured_output.manager import (
    CACHED_PER_ACCOUNT_MAX,
    PENDING_PER_ACCOUNT_MAX,
    StructuredOutputManager,
)
from tests.engine.structured_output.test_sandbox import ENDLESS
from tests.engine.structured_output.texts import ACCOUNT, EMBER, Scribe, compiled

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
        "id": {"type": "string", "format": "uuid"},
        "nested": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {"type": "boolean"}}]},
    },
    "required": ["name", "age", "tags", "id", "nested"],
    "additionalProperties": False,
}
END, TOOL, PAD = 1, 5, 7  # the built-in model's <|end|>, <|tool|> and <|pad|>
STOPS = frozenset({END})


def problem(
    grammars: StructuredOutputManager, source: str, kind: GrammarKind = GrammarKind.JSON_SCHEMA
) -> tuple[str, str]:
    with pytest.raises(SubmitRejected) as refused:
        compiled(grammars, source, kind).new_matcher(STOPS)
    return refused.value.reason, refused.value.message


def matcher_of(grammars: StructuredOutputManager, lark: str, stop_ids: frozenset[int] = STOPS) -> LarkMatcher:
    return compiled(grammars, lark, GrammarKind.LARK).new_matcher(stop_ids)


def allowed(grammars: StructuredOutputManager, matcher: GrammarMatcher) -> set[int]:
    mask = np.unpackbits(grammars.begin_masks([matcher])().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(mask).tolist())


def is_a_person(text: str) -> bool:
    Draft202012Validator(PERSON).validate(json.loads(text))
    return True


CHECKED = [
    (GrammarKind.JSON_SCHEMA, json.dumps(PERSON), is_a_person),
    (GrammarKind.REGEX, r"[a-f]{2,6}-\d{1,3}(x|yy)?", re.compile(r"[a-f]{2,6}-[0-9]{1,3}(x|yy)?").fullmatch),
    (
        GrammarKind.LARK,
        'start: "<" NAME ("," NAME){0,2} ">"\nNAME: /[A-Z][a-z]{0,9}/',
        re.compile(r"<[A-Z][a-z]{0,9}(,[A-Z][a-z]{0,9}){0,2}>").fullmatch,
    ),
]


def test_random_texts_always_match_their_grammars_whatever_their_company(scribe: Scribe) -> None:
    """A hundred and fifty texts, in batches of mixed rows; a row's text is the same alone and beside others."""
    compilations = [compiled(scribe.grammars, source, kind) for kind, source, _ in CHECKED]
    for seed in range(10):
        matchers: list[GrammarMatcher | None] = [compilations[row % 3].new_matcher(STOPS) for row in range(15)]
        texts = scribe.write([*matchers, None], seed, temperature=(seed % 2) * 0.8)
        for row, (text, end) in enumerate(texts[:-1]):
            assert end == "stop", (text, end)
            assert CHECKED[row % 3][2](text), text
        alone = scribe.write([compilations[0].new_matcher(STOPS)], seed, temperature=(seed % 2) * 0.8)
        assert alone[0] == texts[0]


def test_what_is_forced_is_all_that_masks_allow(scribe: Scribe) -> None:
    """Along random texts: each allowed token begins what is forced, or goes on behind it; no text may end there."""
    forced_tokens = 0
    for seed in range(12):
        kind, source, _ = CHECKED[seed % 3]
        matcher, dice = compiled(scribe.grammars, source, kind).new_matcher(STOPS), random.Random(seed)
        written = array("I", [PAD])
        while not matcher.finished and len(written) < 80:
            choice, forced = allowed(scribe.grammars, matcher), matcher.forced(written)
            text = b"".join(scribe.bytes[token] for token in forced)
            forced_tokens += len(forced)
            if forced:
                assert len(forced) <= FORCED_MAX
                assert END not in choice
                for token in choice:
                    spelled = scribe.bytes[token]
                    assert text.startswith(spelled) or spelled.startswith(text), (text, spelled)
            for token in forced or [dice.choice(sorted(choice))]:
                assert matcher.accept(token) == ""
                written.append(token)
    assert forced_tokens > 100


def test_forced_tokens_are_those_of_the_text_as_the_tokenizer_writes_it(grammars: StructuredOutputManager) -> None:
    tokenizer = open_tokenizer(EMBER)
    fields = ("first_name", "last_name", "postal_address")
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in fields}, "required": list(fields)}
    wanted = array("I", tokenizer.tokenize_str(json.dumps(dict.fromkeys(fields, "Ada Lovelace"))))
    compilation = compiled(grammars, json.dumps({**schema, "additionalProperties": False}))
    matcher, at, forced_tokens = compilation.new_matcher(STOPS), 0, 0
    while at < len(wanted):
        forced = matcher.forced(wanted[:at])
        assert forced == wanted[at : at + len(forced)].tolist()
        forced_tokens += len(forced)
        for token in forced or [wanted[at]]:
            assert matcher.accept(token) == ""
        at += max(1, len(forced))
    assert forced_tokens >= len(wanted) // 4


def test_a_long_constant_is_forced_a_little_at_a_time_and_charged(grammars: StructuredOutputManager) -> None:
    text = "lorem ipsum dolor " * 600
    matcher, written = matcher_of(grammars, f'start: "{text}"'), array("I")
    allowed(grammars, matcher)
    while not matcher.finished:
        before_us = matcher.mask_us
        forced = matcher.forced(written)
        assert matcher.mask_us > before_us
        assert len(forced) <= FORCED_MAX
        for token in forced or sorted(allowed(grammars, matcher))[-1:]:
            assert matcher.accept(token) == ""
            written.append(token)
    assert open_tokenizer(EMBER).decode_str(list(written)) == text


def test_unsupported_parts_are_refused_by_name(grammars: StructuredOutputManager) -> None:
    for schema, named in (
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"if"'),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.com/x"}, "https://example.com/x"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "nsatisfiable"),
    ):
        reason, message = problem(grammars, json.dumps(schema))
        assert reason == RejectReason.GRAMMAR
        assert named in message, message
        assert "\n" not in message
    assert "backreferences" in problem(grammars, r"(a)\1", GrammarKind.REGEX)[1]
    assert "look-around" in problem(grammars, r"(?<!a)b", GrammarKind.REGEX)[1]
    assert "nobody" in problem(grammars, "start: nobody", GrammarKind.LARK)[1]
    placed = problem(grammars, 'start: "a" b\nb: %json {"type": "strange"}', GrammarKind.LARK)[1]
    assert placed.startswith("at 2("), "of the caller's own lines"
    assert placed.endswith("): Invalid type: strange")
    assert "0.5 s" in problem(grammars, ENDLESS, GrammarKind.LARK)[1]


def test_special_tokens_are_reached_by_name_and_by_no_text(grammars: StructuredOutputManager) -> None:
    assert allowed(grammars, matcher_of(grammars, 'start: <|tool|> "a"')) == {TOOL}
    text = allowed(grammars, matcher_of(grammars, r"start: /(.|\n)*/"))
    assert text & set(range(8)) == {END}, "only where it ends"
    matcher = matcher_of(grammars, r"start: /(.|\n)*/ <|tool|> /[a-z]+/")
    assert allowed(grammars, matcher) & set(range(8)) == {TOOL}
    assert matcher.accept(TOOL) == ""
    assert not allowed(grammars, matcher) & set(range(8))


def test_a_text_is_over_where_only_its_end_may_follow(grammars: StructuredOutputManager) -> None:
    matcher = matcher_of(grammars, 'start: "a" | "ab"')
    a = next(iter(allowed(grammars, matcher_of(grammars, 'start: "a"'))))
    assert matcher.accept(a) == ""
    assert not matcher.finished
    assert END in allowed(grammars, matcher)
    matcher = matcher_of(grammars, 'start: "a"')
    assert matcher.accept(a) == ""
    assert matcher.finished


def test_a_requests_own_stop_tokens_come_where_the_text_is_whole_and_nowhere_else(
    grammars: StructuredOutputManager,
) -> None:
    a, b = (next(iter(allowed(grammars, matcher_of(grammars, f'start: "{letter}"')))) for letter in "ab")
    matcher = matcher_of(grammars, 'start: ("a" | "b") "b"*', STOPS | {b, PAD})
    assert a in allowed(grammars, matcher)
    assert b not in allowed(grammars, matcher), "it would end the text before it is whole"
    assert matcher.accept(a) == ""
    assert {END, b, PAD} <= allowed(grammars, matcher)
    assert matcher.accept(PAD) == ""
    matcher = matcher_of(grammars, 'start: "a" <|pad|> "b"', STOPS | {PAD})
    assert matcher.accept(a) == ""
    assert allowed(grammars, matcher) == {PAD}
    assert "goes on" in matcher.accept(PAD)
    matcher = matcher_of(grammars, 'start: "a" <|pad|>', STOPS | {PAD})
    assert (matcher.accept(a), matcher.accept(PAD)) == ("", "")


def test_what_does_not_match_is_a_problem_and_stays_one(grammars: StructuredOutputManager) -> None:
    matcher = matcher_of(grammars, 'start: "a" "c"')
    assert matcher.accept(TOOL)
    assert matcher.accept(END), "an end behind a failure is no end"


def test_a_text_that_passes_a_limit_fails_and_the_next_one_starts_anew(grammars: StructuredOutputManager) -> None:
    source = r"(\p{L}\w{1,200}\s?){1,200}"
    compilation = compiled(grammars, source, GrammarKind.REGEX)
    matcher = compilation.new_matcher(STOPS)
    rng, end = np.random.default_rng(1), ""
    for _ in range(60):
        end = matcher.accept(int(rng.choice(sorted(allowed(grammars, matcher)))))
        if end:
            break
    assert "too many expressions" in end
    again = compiled(grammars, source, GrammarKind.REGEX)
    assert again is not compilation
    assert len(allowed(grammars, again.new_matcher(STOPS))) > 100


def test_no_forced_text_is_tokenized_for_each_mask(grammars: StructuredOutputManager) -> None:
    """A constant of 24 KB: the mask of each token takes as long as any other."""
    matcher = compiled(grammars, json.dumps({"const": "abc def " * 3000})).new_matcher(STOPS)
    took = []
    for _ in range(30):
        began = time.process_time()
        tokens = allowed(grammars, matcher)
        took.append(time.process_time() - began)
        assert matcher.accept(max(tokens)) == ""
    assert min(took) < 2e-3


AMBIGUOUS = 'start: s\ns: s s | "(" s ")" | /./'
PLAIN = "start: /[a-z]*/"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_grammar_whose_masks_cost_too_much_is_ended_by_name_and_its_company_is_not(threads: int) -> None:
    """Which of them costs is measured beside others, and by a thread's own time: no busy machine ends a text."""
    with closing(StructuredOutputManager(EMBER, threads)) as grammars:
        costly, cheap = matcher_of(grammars, AMBIGUOUS), matcher_of(grammars, PLAIN)
        ends = ""
        for _ in range(200):
            masks_MW = np.unpackbits(
                grammars.begin_masks([cheap, costly, None])().view(np.uint8), axis=1, bitorder="little"
            )
            token, letter = (int(np.flatnonzero(masks_MW[row, 2:])[-1]) + 2 for row in (1, 0))
            assert cheap.accept(letter) == ""
            if ends := costly.accept(token):
                break
        assert re.fullmatch(
            r"its masks take \d+\.\d ms of a processor for each token, and at most 5 are taken; .*", ends
        )
        assert costly.mask_us > 5 * cheap.mask_us
        assert cheap.mask_us < 1e3 * TOKEN_MS_MAX


def test_a_mask_written_in_a_threads_own_time_is_the_same(grammars: StructuredOutputManager) -> None:
    matchers = [matcher_of(grammars, source) for source in (AMBIGUOUS, PLAIN, 'start: "a"')]
    at_once = grammars.begin_masks(matchers)()
    assert len({matcher.mask_us for matcher in matchers}) == 1, "a share each"
    grammars.writer._timing = True
    assert (grammars.begin_masks(matchers)() == at_once).all()
    assert len({matcher.mask_us for matcher in matchers}) == 3
    assert not grammars.writer._timing, "they took no time"


def test_masks_of_several_threads_take_no_longer_together_than_a_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of a processor each, by these clocks, is not what others wait for."""
    with closing(StructuredOutputManager(EMBER, 2)) as grammars:
        matchers = [matcher_of(grammars, source) for source in (AMBIGUOUS, PLAIN, 'start: "a"')]
        grammars.writer._timing = True
        monkeypatch.setattr(time, "thread_time", itertools.count().__next__)
        began = time.perf_counter()
        grammars.begin_masks(matchers)()
        assert 0 < sum(matcher.mask_us for matcher in matchers) <= 1e6 * (time.perf_counter() - began)
        assert grammars.writer._timing


@pytest.mark.parametrize("count", [900, 1200])
def test_a_schema_of_30_kb_with_as_many_optional_properties_is_held_to(
    scribe: Scribe, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lark_grammar, "TOKEN_MS_MAX", 100.0)  # slow processors take longer than that allows
    schema = {"type": "object", "properties": {f"n{number}": {"type": "null"} for number in range(count)}}
    compilation = compiled(scribe.grammars, json.dumps(schema))
    texts = scribe.write([compilation.new_matcher(STOPS) for _ in range(2)], seed=1)
    assert {end for _, end in texts} <= {"stop", "length"}, texts


def test_a_grammar_is_kept_for_its_account_alone(grammars: StructuredOutputManager) -> None:
    source = json.dumps({"const": "kept"})
    first = compiled(grammars, source)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, source)
    assert grammars.compile(grammar, ACCOUNT, cache=True) is first
    with grammars._changed:  # no thread takes up a compilation meanwhile
        other = grammars.compile(grammar, b"b" * 16, cache=True)
        assert other is not first
        assert not other.done, "it takes its time for another account"
    for account, cache in ((ACCOUNT, False), (b"", True)):
        once = compiled(grammars, source, account=account, cache=cache)
        assert once is not first
        assert grammars.compile(grammar, account, cache) is not once
    assert grammars.compile(grammar, ACCOUNT, cache=True) is first


def test_what_was_not_used_for_longest_is_forgotten_of_the_account_that_has_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LarkCompilation, "bytes", 10)
    monkeypatch.setattr(module, "CACHED_BYTES_MAX", 10 * (CACHED_PER_ACCOUNT_MAX + 2))
    with closing(StructuredOutputManager(Path("/nowhere"), 1)) as grammars:

        def ask(account: bytes, number: int) -> int:
            return id(grammars.compile(Grammar(GrammarKind.REGEX, str(number)), account, cache=True))

        first = [ask(b"a", number) for number in range(CACHED_PER_ACCOUNT_MAX)]
        assert [ask(b"a", number) for number in range(CACHED_PER_ACCOUNT_MAX)] == first
        others = [ask(b"b", number) for number in range(2)]
        assert ask(b"a", 0) == first[0], "used last"
        ask(b"c", 0)
        assert [ask(b"b", number) for number in range(2)] == others
        assert sum(map(len, grammars._cache.values())) == CACHED_PER_ACCOUNT_MAX + 2
        assert Grammar(GrammarKind.REGEX, "1") not in grammars._cache[b"a"]
        assert Grammar(GrammarKind.REGEX, "0") in grammars._cache[b"a"]


def test_grammars_that_learned_more_than_all_may_take_go_but_never_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CACHED_BYTES_MAX", 5000)
    with closing(StructuredOutputManager(Path("/nowhere"), 1)) as grammars:
        kept = {
            name: grammars.compile(Grammar(GrammarKind.REGEX, "a"), name, cache=True) for name in (b"a", b"b", b"c")
        }
        kept[b"b"].tokens, kept[b"c"].tokens = 9, 20  # 200 bytes each
        assert grammars.compile(Grammar(GrammarKind.REGEX, "a"), b"c", cache=True) is kept[b"c"]
        assert {*grammars._cache} == {b"c"}, "those that were used before it went"
        kept[b"c"].tokens = 30  # more than all may take
        assert grammars.compile(Grammar(GrammarKind.REGEX, "a"), b"c", cache=True) is kept[b"c"]
        assert {*grammars._cache} == {b"c"}
        grammars.compile(Grammar(GrammarKind.REGEX, "a"), b"d", cache=True)
        assert {*grammars._cache} == {b"d"}


def test_who_keeps_little_loses_nothing_to_one_who_keeps_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LarkCompilation, "bytes", 10)
    monkeypatch.setattr(module, "CACHED_BYTES_MAX", 100)
    with closing(StructuredOutputManager(Path("/nowhere"), 1)) as grammars:
        for account, count in ((b"little", 2), (b"some", 4), (b"much", 9)):
            for number in range(count):
                grammars.compile(Grammar(GrammarKind.REGEX, str(number)), account, cache=True)
        kept = {account: len(cached) for account, cached in grammars._cache.items()}
        assert kept[b"little"] == 2
        assert sum(kept.values()) == 10
        assert kept[b"some"] >= 3


def test_bytes_of_a_grammar_grow_with_its_source_and_what_it_learned(grammars: StructuredOutputManager) -> None:
    small = compiled(grammars, json.dumps({"const": "x"}))
    large = compiled(grammars, json.dumps({"enum": [f"value {number}" for number in range(500)]}))
    parsers = len(small._parsers)
    assert parsers * 150_000 < small.bytes < parsers * 152_000
    assert large.bytes / len(large._parsers) > 2 * small.bytes / parsers
    before = small.bytes
    small.tokens = 1000
    assert small.bytes == before + 200_000
    small.tokens = 10**6
    assert small.bytes == before + (2 << 20)


def test_a_grammar_that_has_served_many_tokens_is_compiled_anew(
    grammars: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECOMPILE_TOKENS", 2)
    first = compiled(grammars, 'start: "wwww"', GrammarKind.LARK)
    matcher = first.new_matcher(STOPS)
    for _ in range(2):
        assert grammars.compile(first.grammar, ACCOUNT, cache=True) is first
        matcher.accept(min(allowed(grammars, matcher)))
    assert compiled(grammars, 'start: "wwww"', GrammarKind.LARK) is not first


def test_accounts_take_turns_and_none_may_have_many_pending(grammars: StructuredOutputManager) -> None:
    slow = [f"{ENDLESS}\n// {number}" for number in range(PENDING_PER_ACCOUNT_MAX + 2)]
    mine = [grammars.compile(Grammar(GrammarKind.LARK, source), b"s" * 16, cache=False) for source in slow]
    assert mine[-1].done
    with pytest.raises(SubmitRejected) as refused:
        mine[-1].new_matcher(STOPS)
    assert refused.value.reason == RejectReason.BUSY
    compiled(grammars, json.dumps({"const": "mine"}), account=b"t" * 16, cache=False).new_matcher(STOPS)
    assert not all(compilation.done for compilation in mine)
    with grammars._changed:
        grammars._pending.clear()


def test_texts_of_one_grammar_at_once_have_its_parsers_in_turn_which_learn_apart(
    grammars: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lark_grammar, "PARSERS_S", 60.0)
    compilation = compiled(grammars, r"x(a|b|ab){10,900}y(aa|bb){3,70}", GrammarKind.REGEX)
    matchers = [compilation.new_matcher(STOPS) for _ in range(2 * PARSERS_MAX)]
    token = next(iter(allowed(grammars, matchers[0])))
    assert matchers[0].accept(token) == ""
    for matcher in matchers:
        assert allowed(grammars, matcher), "a mask of another text changes none of this one"
    assert [len(copies) for _, copies in compilation._parsers] == [2] * PARSERS_MAX
    del matcher, matchers
    gc.collect()
    for _ in range(3):
        assert allowed(grammars, compilation.new_matcher(STOPS))
        assert not any(copies for _, copies in compilation._parsers[1:]), "one text alone has what learned most"


def test_a_trial_that_ends_is_replaced_and_costs_no_grammar() -> None:
    with closing(StructuredOutputManager(EMBER, 1)) as grammars:
        compiled(grammars, '{"const": 1}')
        for trial in grammars._sandboxes:
            trial._process.kill()
        for number in range(4):
            compiled(grammars, json.dumps({"const": number}), account=bytes([number]) * 16).new_matcher(STOPS)


def test_a_grammar_that_ends_every_trial_is_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = module.GrammarSandbox.check

    def check(sandbox: module.GrammarSandbox, lark: str) -> str:
        if "deadly" in lark:
            sandbox._process.kill()
        return checked(sandbox, lark)

    monkeypatch.setattr(module.GrammarSandbox, "check", check)
    with closing(StructuredOutputManager(EMBER, 1)) as grammars:
        with pytest.raises(SubmitRejected) as refused:
            compiled(grammars, '{"const": "deadly"}').new_matcher(STOPS)
        assert refused.value.reason is RejectReason.BUSY
        compiled(grammars, '{"const": 1}').new_matcher(STOPS)


@pytest.mark.parametrize("error", [OSError("no process left"), KeyError("a bug")])
def test_what_nobody_foresaw_ends_no_compiler(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Else the account's grammars wait for it for ever, and once it struck each compiler everybody's do."""
    place = (module, "GrammarSandbox") if isinstance(error, OSError) else (LarkCompilation, "compile")

    def broken(*_: object) -> None:
        raise error

    with closing(StructuredOutputManager(EMBER, 1)) as grammars, monkeypatch.context() as patched:
        compiled(grammars, '{"const": 0}').new_matcher(STOPS)
        for trial in grammars._sandboxes:
            trial.end()
        patched.setattr(*place, broken)
        for number in range(2 * module.COMPILER_THREADS):
            assert problem(grammars, json.dumps({"const": number + 1}))[0] is RejectReason.BUSY
        patched.undo()
        compiled(grammars, '{"const": 9}').new_matcher(STOPS)


@pytest.mark.parametrize("content", [None, "{}", "nonsense"])
def test_without_a_tokenizer_that_can_be_used_every_grammar_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "config.json").write_text((EMBER / "config.json").read_text())
    with closing(StructuredOutputManager(tmp_path, None)) as grammars:
        grammars.wait_ready()
        assert "tokenizer.json" in problem(grammars, "{}")[1]


def test_rows_without_a_grammar_may_become_anything(grammars: StructuredOutputManager) -> None:
    matcher = matcher_of(grammars, 'start: "a"')
    masks_MW = grammars.begin_masks([None, matcher, None])()
    assert (masks_MW[[0, 2]] == -1).all()
    assert np.bitwise_count(masks_MW[1].view(np.uint32)).sum() == 1


def test_a_text_that_was_begun_elsewhere_goes_on_within_its_grammar(grammars: StructuredOutputManager) -> None:
    compilation = compiled(grammars, json.dumps({"type": "array", "items": {"type": "integer"}}))
    whole = open_tokenizer(EMBER).tokenize_str("[1,22,333]")
    for count in (1, len(whole) // 2, len(whole) - 1):
        resumed, known = compilation.new_matcher(STOPS, whole[:count]), compilation.new_matcher(STOPS)
        for token in whole[:count]:
            assert known.accept(token) == ""
        assert allowed(grammars, resumed) == allowed(grammars, known)
    with pytest.raises(SubmitRejected, match="no beginning of such a text"):
        compilation.new_matcher(STOPS, whole[1:])
    with pytest.raises(SubmitRejected, match="it has ended"):
        compiled(grammars, json.dumps({"const": "a"})).new_matcher(STOPS, open_tokenizer(EMBER).tokenize_str('"a"'))
