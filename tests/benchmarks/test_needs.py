"""What people wrote for Ember's corpus: that it can be filled, and that sections told from it answer what they ask."""

import re

import pytest

from benchmarks.ember.businesses import is_strange
from benchmarks.ember.corpus import about_business, misspelt
from benchmarks.ember.everyday import Style
from benchmarks.ember.needs import KINDS, LIST_OF, Facts, Listed, framed, hides, is_plural, named, to_guest
from benchmarks.ember.phrasing import keyword
from benchmarks.ember.values import Draw
from benchmarks.ember.written import FACTS, FRAMES, LISTS, UNKNOWN


def test_every_slot_of_what_was_written_can_be_filled() -> None:
    style = Style(Draw(1))
    texts = [text for fact in FACTS for text in (*fact.sayings, *fact.questions)]
    texts += [need for rows in LISTS.values() for row in rows for need in row.needs]
    texts += [text.partition(" | ")[0] for part in ("asked", "guarded", "person", "event") for text in UNKNOWN[part]]
    verbs = named("it", "does")
    for text in texts:
        assert "{" not in style.filled(framed(text, {**verbs, "x": "Ann"}), {}), text


def test_every_fact_has_sayings_and_questions_and_no_topic_is_empty() -> None:
    assert len(FACTS) > 200
    for fact in FACTS:
        assert fact.sayings, fact
        assert len(fact.questions) >= 4, fact


@pytest.mark.parametrize("section", [Facts, Listed])
def test_answers_of_a_section_stand_in_its_text_or_are_put_together_from_it(
    section: type[Facts] | type[Listed],
) -> None:
    for seed in range(300):
        draw = Draw(f"section {seed}")
        made = section(draw, Style(draw), 3, draw.maybe(0.5))
        for one in made.told:
            assert one.asks or one.needs
            told = [value for value in one.values.values() if value in one.answer]
            assert all(value in made.text for value in told), (one.answer, made.text)
            whole = one.answer.rstrip(".").lower() in made.text.lower()
            assert whole or told or one.label in made.text.lower(), (one.answer, made.text)
        assert not re.search(r"\{\w", made.text + made.ask(draw).question + made.ask(draw).answer)  # JSON has braces


def test_a_verb_follows_the_number_of_its_name() -> None:
    assert is_plural("climbing shoes")
    assert not is_plural("picking flowers")  # what one does is one thing
    assert not is_plural("a pitch for tents")
    assert is_plural("children")


def test_what_a_guest_says_of_himself_is_said_to_him() -> None:
    assert to_guest("wear my shoes") == "wear your shoes"
    assert to_guest("eat what I brought") == "eat what you brought"


def test_haste_changes_one_plain_word_and_no_name() -> None:
    asked = {misspelt(Draw(seed), "Where does Wilhelmina store every large umbrella tonight?") for seed in range(60)}
    assert len(asked) > 5
    assert all("Wilhelmina" in one for one in asked)
    assert misspelt(Draw(1), "Who is it?") == "Who is it?"


def test_most_turns_to_a_business_have_an_answer_and_some_have_none() -> None:
    said = [
        message["content"]
        for seed in range(200)
        for message in about_business(Draw(f"turn {seed}"), 70).messages
        if message["role"] == "assistant"
    ]
    unknown = sum(one.startswith("I'm sorry") for one in said) / len(said)
    assert 0.05 < unknown < 0.15


def listed(kind: str, lines: bool = False, count: int = 40) -> list[Listed]:
    """Sections of this kind."""
    made: list[Listed] = []
    seed = 0
    while len(made) < count:
        draw = Draw(f"{kind} {seed}")
        one = Listed(draw, Style(draw), 3, lines)
        made += [one] * (one.kind == kind)
        seed += 1
    return made


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"mixed"}))
def test_a_kind_of_row_has_its_list_and_as_many_short_parts_as_whole_ones(kind: str) -> None:
    assert LISTS[LIST_OF.get(kind, kind)]
    assert len(FRAMES[kind]["short"]) == len(FRAMES[kind]["elided"])
    assert all(FRAMES[kind][part] for part in ("say", "line", "ask"))


def test_a_row_of_several_is_answered_alone_and_with_its_own_value() -> None:
    for made in listed("payers"):
        for one in made.told:
            assert one.answer == f"{one.answer.split(' pay ')[0]} pay {one.values['price']}."
            assert one.label.lower()[:3] in one.answer.lower() or one.label.startswith(("a ", "an "))


def test_a_question_for_a_value_is_asked_of_rows_that_tell_it() -> None:
    for made in listed("plans"):
        for one in made.told:
            assert ("How big is {n}?" in one.asks) == ("num3" in one.values)


def test_one_section_tells_several_people_and_addresses_to_turn_to() -> None:
    sections = listed("mixed", lines=True)
    assert sum(len(made.told) > 2 for made in sections) > len(sections) / 2
    assert all(len({one.answer for one in made.told}) == len(made.told) for made in sections)
    assert {"phone", "email", "name"} <= {slot for made in sections for one in made.told for slot in one.values}


def test_more_about_a_row_is_asked_only_where_the_prompt_has_no_word_of_it() -> None:
    for made in listed("people"):
        question = made.near(
            Draw(made.text), made.text + " Room 3, 555-0123, open on Monday from 9:00, mail a@b.example"
        )
        assert question is None or not re.search(r"phone|mail|room|which days", question), question


def test_guards_are_regular_expressions_and_hide_what_a_prompt_may_say() -> None:
    for part in ("guarded", "near", "person", "item", "room", "plan", "event"):
        for line in UNKNOWN[part]:
            question, mark, words = line.partition(" | ")
            assert question
            assert mark
            assert all(hides(words).search(word) for word in words.split(";") if word.isalpha()), line


def test_what_a_prompt_says_in_a_word_alike_is_not_strange_to_it() -> None:
    assert not is_strange("Are dogs allowed?", "Pets: 12 € a night")
    assert not is_strange("Where can I leave my motorhome?", "Parking: behind the barn")
    assert is_strange("Are dogs allowed?", "A pitch: 12 € a night")


@pytest.mark.parametrize(
    ("question", "typed"),
    [
        ("What is the code of the gate?", "code gate"),
        ("How much is a cappuccino?", "price cappuccino"),
        ("When do you open on Sunday?", "when open sunday"),
        ("I'm cold.", "I'm cold."),
        ("Where is it?", "Where is it?"),
    ],
)
def test_in_haste_only_the_words_that_tell_are_typed(question: str, typed: str) -> None:
    assert keyword(question) == typed
