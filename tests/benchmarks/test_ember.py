"""Ember's everyday questions: what the judge accepts, and that nothing of the held-out ones is in the corpus."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.ember import corpus, evaluate
from benchmarks.ember.average import averaged
from benchmarks.ember.businesses import is_strange
from benchmarks.ember.evaluate import DEVELOPMENT, HELD_OUT, Question, is_right, read_questions
from benchmarks.ember.everyday import ROWS, answers_it, is_about
from benchmarks.ember.phrasing import reworded
from benchmarks.ember.tokenizer import END
from benchmarks.ember.values import Draw

FOLDER = Path(evaluate.__file__).parent
DOCUMENTS = 250
RUN_WORDS = 6  # a run of so many words in both is a copy
FRAME_WORDS = 5  # a phrasing of so many words beside its slots is more than plain English
SLOTS = re.compile(r"\{[^}]*\}|<[^<>]*>")


def plain(text: str) -> str:
    """The text without case, punctuation and numbers."""
    return " ".join(re.sub(r"[^\w# ]", "", re.sub(r"\d+", "#", text.lower())).split())


@cache
def phrases() -> tuple[str, ...]:
    """Each phrasing in the corpus's modules and in what people wrote for it."""
    constants = (
        node.value
        for module in sorted(FOLDER.glob("*.py"))
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    written = (path.read_text() for path in sorted((FOLDER / "written").glob("*.toml")))
    texts = (*constants, *written)
    return tuple(part.strip() for text in texts for part in re.split(r" / |\s\|\s|;|\n", text) if part.strip())


@cache
def generated() -> tuple[str, ...]:
    """What conversations of the corpus say, turn by turn."""
    conversations = [corpus.about_business(Draw(f"seen {seed}"), 100) for seed in range(DOCUMENTS)]
    conversations += [corpus.document(Draw(f"seen {seed}"), 120) for seed in range(DOCUMENTS)]
    return tuple(message["content"] for one in conversations for message in one.messages)


def runs(text: str) -> set[tuple[str, ...]]:
    found = plain(text).split()
    return {tuple(found[start : start + RUN_WORDS]) for start in range(len(found) - RUN_WORDS + 1)}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("The bun costs £2.80.", True),
        ("It's 2.80 pounds", True),
        ("A bun is £12.80.", False),
        ("A bun is £2.80.50.", False),
        ("A loaf is £4.20, a bun £2.80.", False),
        ("I'm sorry, I don't know that.", False),
        ("", False),
    ],
)
def test_a_fact_is_accepted_in_any_phrasing_and_another_one_refused(answer: str, right: bool) -> None:
    question = Question("A loaf is £4.20, a bun £2.80.", "How much is a bun?", ("2.80",), ("4.20",))
    assert is_right(question, answer + END) == right


def test_what_the_prompt_does_not_say_must_not_be_answered() -> None:
    question = Question("We open at 9.", "Do you sell maps?", (), ())
    assert is_right(question, "I'm sorry, I don't know that." + END)
    assert is_right(question, "I do not have that: I cannot say." + END)
    assert not is_right(question, "We open at 9." + END)


def test_an_answer_that_is_cut_is_wrong_whatever_it_says() -> None:
    question = Question("A bun is £2.80.", "How much is a bun?", ("2.80",), ())
    assert not is_right(question, "The bun costs £2.80. The bun costs £2.80. The")


def test_every_fact_asked_for_must_be_there() -> None:
    question = Question("Core hours are 10:00 to 15:00.", "What are the core hours?", ("10:00", "15:00|3 pm"), ())
    assert is_right(question, "From 10:00 to 3 pm." + END)
    assert not is_right(question, "From 10:00 on." + END)


def test_the_held_out_set_is_large_and_varied() -> None:
    questions = read_questions(HELD_OUT)
    assert len(questions) >= 60
    assert len({one.system for one in questions}) >= 15
    assert sum(not one.facts for one in questions) >= 10


@pytest.mark.parametrize("path", [HELD_OUT, DEVELOPMENT])
def test_facts_that_are_asked_for_stand_in_their_prompts(path: Path) -> None:
    for one in read_questions(path):
        for fact in one.facts:
            assert any(evaluate.holds(one.system, part) for part in fact.split("|")), (one.ask, fact)


def test_no_held_out_question_occurs_in_the_corpus() -> None:
    corpus_has = {plain(text) for text in (*generated(), *phrases())}
    assert [one.ask for one in read_questions(HELD_OUT) if plain(one.ask) in corpus_has] == []


def test_no_held_out_question_is_a_phrasing_of_the_corpus_with_its_slots_filled() -> None:
    frames = []
    for phrase in phrases():
        pieces = SLOTS.split(phrase.rstrip("?."))
        if len(pieces) > 1 and len(re.findall(r"\w{2,}", " ".join(pieces))) >= FRAME_WORDS:
            frames.append(re.compile(".{1,40}".join(map(re.escape, pieces)) + r"[?.]*", re.I))
    questions = [one.ask for one in read_questions(HELD_OUT)]
    assert [ask for ask in questions if any(frame.fullmatch(ask) for frame in frames)] == []


def test_no_held_out_prompt_shares_a_run_of_words_with_the_corpus() -> None:
    corpus_has = set().union(*(runs(text) for text in (*generated(), *phrases())))
    shared = {run for one in read_questions(HELD_OUT) for run in runs(one.system) & corpus_has}
    assert {run for run in shared if sum(word.isalpha() for word in run) >= RUN_WORDS - 1} == set()


def test_no_held_out_business_is_named_in_the_corpus() -> None:
    names = [prompt["business"] for prompt in tomllib.loads(HELD_OUT.read_text())["prompts"]]
    text = "\n".join((*generated(), *phrases())).lower()
    assert [name for name in names if name.lower() in text] == []


def test_no_held_out_question_is_one_to_develop_with() -> None:
    known = {plain(one.ask) for one in read_questions(DEVELOPMENT)}
    assert [one.ask for one in read_questions(HELD_OUT) if plain(one.ask) in known] == []
    assert not {one.system for one in read_questions(DEVELOPMENT)} & {one.system for one in read_questions(HELD_OUT)}


def test_a_question_reworded_keeps_what_it_is_about() -> None:
    questions = {reworded(Draw(seed), "What does the Zorbl lamp cost?") for seed in range(300)}
    assert len(questions) >= 10
    assert all("Zorbl lamp" in one or "zorbl lamp" in one.lower() for one in questions)
    assert {reworded(Draw(seed), "Where does Wim sit?") for seed in range(20)} == {"Where does Wim sit?"}
    asked = {reworded(Draw(seed), "What do I need for the shower?") for seed in range(100)}
    assert asked == {"What do I need for the shower?"}  # "I need" begins no sentence here


@pytest.mark.parametrize(
    ("question", "sentence", "about"),
    [
        ("How many steps does the tower have?", "Candles cost 4 euros.", False),
        ("How many steps does the tower have?", "The tower has 60 steps.", True),
        ("When is mass?", "The service is on Sunday at 10.", True),
    ],
)
def test_a_question_about_another_saying_of_its_matter_is_told_apart(question: str, sentence: str, about: bool) -> None:
    sayings = next(row[1] for row in ROWS if row[0] == "service-church")
    assert is_about(sayings, question, sentence) == about


def test_each_matter_leaves_questions_for_most_of_what_it_says() -> None:
    for key, sayings, questions in ROWS:
        asked = [
            any(answers_it(one, saying) and is_about(sayings, one, saying) for one in questions) for saying in sayings
        ]
        assert sum(asked) > len(sayings) / 2, key


def test_only_what_the_prompt_has_no_word_of_counts_as_not_told() -> None:
    prompt = "Lost things wait at the desk. We open at 9."
    assert is_strange("Do you have a sauna?", prompt)
    assert not is_strange("Where do I find things that I lost?", prompt)
    assert not is_strange("What does it cost?", prompt)  # about nothing in particular


def test_an_average_weighs_each_model_by_its_share() -> None:
    one, three = ({"w": torch.full((2,), value, dtype=torch.bfloat16)} for value in (1.0, 3.0))
    mean = averaged([(one, 3.0), (three, 1.0)])["w"]
    assert mean.dtype == torch.bfloat16
    assert mean.tolist() == [1.5, 1.5]
