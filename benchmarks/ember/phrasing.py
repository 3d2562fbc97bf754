"""Questions and requests composed from parts, so that far more phrasings are met than anybody would list.

What a list holds out stays held out: a composed phrasing that equals a held-out one is made again.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from benchmarks.ember.values import PHRASE_SHARE, Draw

# fmt: off
LEADS: Final = (
    "Can you say", "Could you find out", "Do you happen to know", "I'd like to find out", "I want to know", "I was wondering", "I'm trying to find out", "Would you know", "Let me know", "Do you have any idea", "Can you check",
    "Please let me know", "I'm curious", "I have to find out", "Would you mind telling me", "Does anyone know", "I can't remember", "I need to find out", "Someone asked me", "I forgot", "I'm not sure", "Can you remind me", "Please explain",
    "My boss wants to know", "We would like to know", "Maybe you know", "It would help to know", "Is it known", "Please say", "Could you confirm", "Might I ask", "I should know", "Are you able to tell me", "Quickly tell me", "Would you please tell me",
    "We wonder", "You surely know", "Could I ask", "I'd be glad to hear", "Hi, can you tell me", "Somebody should tell me", "Remind me",
)
TAILS: Final = ("", "", "", "", "", "", " please", " these days", " right now", " by any chance", " for me", " if you know it", ", if I may ask", " then")
ATTRIBUTES: Final = ("{w} the {a} {is}", "{w} your {a} {is}", "the {a}", "the {a}", "about the {a}", "{w} {is} the {a}")
DIRECT: Final = (
    "What {is} the {a}{t}?", "So what {is} the {a}{t}?", "And what {is} your {a}{t}?", "The {a}{t}?", "{A}{t}?", "What do you have as the {a}{t}?", "What's our {a}{t}?", "What did you say the {a} {is}{t}?", "How about the {a}{t}?",
    "What do people use as the {a}{t}?", "I'm after the {a}{t}.", "I could use the {a}{t}.", "Say the {a}{t}.", "Show me the {a}{t}.", "Share the {a} with me{t}.", "What is written about the {a}{t}?", "Got the {a}{t}?", "Read me the {a}{t}.",
    "Which {a} applies{t}?", "Which one {is} the {a}{t}?", "I'm missing the {a}{t}.", "Send me the {a}{t}.", "I am asking for the {a}{t}.", "What {is} the {a} called{t}?", "What can you tell me about the {a}{t}?", "My question is about the {a}{t}.",
    "Write the {a}{t}.", "We need the {a}{t}.", "Who knows the {a}{t}?", "There must be a {a}. What {is} it{t}?", "What {a} is there{t}?", "What {a} do you have{t}?", "What {a} should I use{t}?", "Where do I see the {a}{t}?", "{A}, please.",
)
WORDS_FOR: Final = {"money": ("how much", "how high", "what"), "person": ("who", "who", "what"), "hour": ("when", "what", "at what time"), "span": ("when", "what"), "date": ("when", "on which day", "what"), "duration": ("how long", "what"),
                    "percent": ("how high", "what"), "count": ("how high", "what"), "weekday": ("when", "what", "on which day"), "address": ("where", "what"), "phone": ("what",)}
WHICH: Final = (("Which one", "Which item", "Which entry", "Which", "What", "Which row", "Which of these", "Which of those", "Which name", "Tell me what", "Do you know which one", "Can you see which one", "Find out which one", "Tell me which"),
                ("has", "comes with", "is listed with", "goes with", "shows", "carries", "is the one with", "stands with", "has got", "is marked with", "is there with", "belongs with", "is filed under", "would have"),
                ("the {a} {v}", "{v} as the {a}", "a {a} of {v}", "{v} as its {a}", "the {a}: {v}", "the {a} of {v}", "{v} for the {a}"))
ORDERS: Final = (
    "Could you {o}?", "I'd like you to {o}.", "Would you {o}?", "Please go ahead and {o}.", "I need somebody to {o}.", "Be so kind and {o}.", "It would be nice if you could {o}.", "Will you {o}?", "Now {o}.", "I want you to {o}.", "First, {o}.", "You can {o}.",
    "Would you mind helping me? Please {o}.", "Just {o}.", "Quickly {o}, please.", "My task for you: {o}.", "Help me {o}.", "Try to {o}.", "The next step is to {o}.", "Okay, {o}.", "Can you please {o}?", "We should {o}.", "Could somebody {o}?", "I would like to {o}.",
    "Let's {o}.", "I have to {o}.", "Make sure to {o}.", "May I ask you to {o}?", "Is it possible to {o}?", "Hey, {o}!", "Do me a favor and {o}.", "Hi, please {o}.", "Any chance you could {o}?", "I'm asking you to {o}.", "Don't forget to {o}.",
)
IMPERATIVES: Final = frozenset("tell give show book reserve check cancel stop track send email write mail text message set start count create put schedule change exchange use take find search look add play turn switch make heat open report order call get transfer pay translate restart reboot list shut update delete remove read move copy print scan lock unlock test assign register approve archive export import rename sync close".split())
BEFORE: Final = ("My day is full. ", "I'm in a hurry. ", "We talked about this. ", "I have guests tonight. ", "I just came home. ", "It's urgent. ", "As I said before: ", "You know me. ", "I'm on the phone. ", "Last thing for today. ", "It's Friday. ", "Before I forget: ", "New task. ", "Something else. ")
AFTER: Final = (" Thanks!", " That's all.", " I'm waiting.", " Thank you so much.", " It's for a friend.", " Make it quick.", " And tell me when it's done.", " I trust you.", " Now.", " It can't wait.", " That would be great.", " Can you do that?", " Is that possible?", " Please hurry.")
# fmt: on
INDIRECT: Final = re.compile(
    r"(What|Where|When|Who|How (?:much|long|high|big|expensive|old|heavy|late)) (is|are) ((?:the|your|our) [^?]*)\?"
)


def same(phrase: str) -> str:
    """What two phrasings must share to count as one."""
    return re.sub(r"[^a-z{} ]", "", phrase.lower()).strip()


def held_out(lists: Iterable[Sequence[str]]) -> frozenset[str]:
    """The phrasings of these lists that training never uses."""
    return frozenset(
        same(options[place]) for options in lists for place in range(PHRASE_SHARE - 1, len(options), PHRASE_SHARE)
    )


def attribute_form(draw: Draw, kind: str, never: frozenset[str]) -> str:
    """A question for an attribute, with {a}, {A} and {is} to fill; none of those in `never`."""
    while True:
        tail = draw.pick(TAILS)
        if draw.maybe(0.5):
            form = draw.phrase(DIRECT).replace("{t}", tail)
        else:
            word = draw.pick(WORDS_FOR.get(kind, ("what",)))
            form = f"{draw.phrase(LEADS)} {draw.pick(ATTRIBUTES).replace('{w}', word)}{tail}{draw.pick(('?', '.'))}"
        if same(form) not in never:
            return form


def which_form(draw: Draw, never: frozenset[str]) -> str:
    """A question for the thing that has a value, with {a} and {v} to fill."""
    while True:
        who, has, what = WHICH
        form = f"{draw.phrase(who)} {draw.phrase(has)} {draw.pick(what)}?"
        if same(form) not in never:
            return form


def indirect(draw: Draw, question: str) -> str:
    """'Where is the pool?' as 'Do you happen to know where the pool is?'; other questions as they are."""
    match = INDIRECT.fullmatch(question)
    if match is None:
        return question
    word, verb, subject = match.groups()
    return f"{draw.phrase(LEADS)} {word.lower()} {subject} {verb}{draw.pick(('?', '.'))}"


def ordered(draw: Draw, form: str, never: frozenset[str]) -> str:
    """A request in other words around it: an order becomes a wish, a sentence stands before or after."""
    told = form
    while True:
        first = form.split(" ", 1)[0].lower()
        if first in IMPERATIVES and draw.maybe(0.7) and form[-1] != "}":
            told = draw.phrase(ORDERS).format(o=form[0].lower() + form[1:].rstrip(".?!"))
        elif draw.maybe(0.5):
            told = draw.phrase(BEFORE) + form
        elif form[-1] in ".?!":
            told = form + draw.phrase(AFTER)
        if same(told) not in never:
            return told
