"""What people wrote for Ember's corpus: that it can be filled, and that sections told from it answer what they ask."""

import pytest

from benchmarks.ember.corpus import about_business, misspelt
from benchmarks.ember.everyday import Style
from benchmarks.ember.needs import Facts, Listed, is_plural, to_guest
from benchmarks.ember.values import Draw
from benchmarks.ember.written import FACTS, LISTS, UNKNOWN


def test_every_slot_of_what_was_written_can_be_filled() -> None:
    style = Style(Draw(1))
    texts = [text for fact in FACTS for text in (*fact.sayings, *fact.questions)]
    texts += [need for rows in LISTS.values() for row in rows for need in row.needs]
    texts += UNKNOWN["asked"]
    for text in texts:
        assert "{" not in style.filled(text.replace("{n}", "it").replace("{s}", "does"), {}), text


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
        assert "{" not in made.text + made.ask(draw).question + made.ask(draw).answer


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
