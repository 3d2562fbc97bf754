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
# ways to say the same, of which each may stand for any other of its line
SAME: Final = tuple(tuple(line.split(";")) for line in """
Can I;May I;Could I;Am I allowed to;Is it okay if I;Is it all right if I;Is it possible to;Would it be okay to;Are we allowed to;Can we;May we;Am I permitted to;Would I be able to;Is it fine to;Could we;Is one allowed to;Can one;Are people allowed to
Do I have to;Must I;Do I need to;Am I required to;Should I;Is it necessary to;Do we have to;Am I supposed to;Will I have to;Do I really have to;Must we;Am I obliged to;Is it a must to;Do we need to
Do you have;Have you got;Do you offer;Would you have;Do you guys have;Do they have;Do you happen to have;Would you by chance have
Where can I find;Where do I find;Where would I find;How do I find;Where can one find;I'm looking for;Where exactly is;Where will I find
What time does;When does;At what time does;When exactly does;At what hour does;Around what time does
Who do I;Whom do I;Who should I;Who can I;Who must I;Which person do I;Whom should I;Whom can I;Who do we
Where do I;Where should I;Where can I;Where must I;Where am I supposed to;Where would I;Where do we;Where can we;In which place do I;Where could I
When do I have to;By when must I;When must I;When am I supposed to;By what time do I have to;When do I need to;By when should I
How do I;How can I;What do I have to do to;How does one;How would I;How should I;What must I do to;How do we;What's the way to;What is the best way to
Which number do I call;What number do I call;Whom do I call;Who do I phone;What number do I ring;Who should I phone;Which number should I dial;Who do I ring
How long does;How much time does;How many minutes does;For how long does
my child;my son;my daughter;my kid;our little one;my boy;my girl;our toddler;my nephew;my niece;my grandson;our daughter;our son;our kids
my wife;my husband;my partner;my mother;my father;my colleague;my brother;my sister;my neighbour;my grandmother;my flatmate
buy;purchase
start;begin;get going
close;shut;close the doors
allowed;permitted;okay;all right
reserve;book;make a reservation for
I lost;I mislaid;I can no longer find;I've lost;I have misplaced
ill;sick;unwell;not feeling well;down with a fever
broken;damaged;out of order;not working;defective;kaput
return;bring back;give back;hand back
I need;I want;I would like;I'd like;We need;We want;We'd like
""".strip().splitlines())  # fmt: skip
COSTS: Final = (
    "What does {x} cost?", "How much is {x}?", "What is the price of {x}?", "What do I pay for {x}?", "How much do you charge for {x}?", "What would {x} cost me?", "How much do you want for {x}?", "What's the price for {x}?", "How expensive is {x}?", "How much money is {x}?",
    "What will {x} cost?", "How much would I have to pay for {x}?", "What must I pay for {x}?", "I'd like {x}. How much is that?", "{x}: what does it cost?", "How much do we pay for {x}?", "price of {x}?", "The price of {x}, please?",
)
# fmt: on
COST: Final = re.compile(r"(?:What does|How much does) (.+) cost\?|How much is (.+)\?|What is the price of (.+)\?")
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


def reworded(draw: Draw, question: str) -> str:
    """The question with other words for up to two of its parts, or another way to ask for a price."""
    cost = COST.fullmatch(question)
    if cost is not None and draw.maybe(0.5):
        asked = draw.phrase(COSTS).format(x=next(group for group in cost.groups() if group))
        return asked[0].upper() + asked[1:]
    here = [(part, group) for group in SAME for part in group if part in question]
    for part, group in draw.few(here, 2):
        start = "(?:^|(?<=[.!?,:] ))" if part[0].isupper() else r"(?<!\w)"
        if draw.maybe(0.7):
            question = re.sub(f"{start}{re.escape(part)}(?!\\w)", draw.pick(group), question, count=1)
    return question


def indirect(draw: Draw, question: str) -> str:
    """'Where is the pool?' as 'Do you happen to know where the pool is?'; other questions as they are."""
    match = INDIRECT.fullmatch(question)
    if match is None:
        return question
    word, verb, subject = match.groups()
    return f"{draw.phrase(LEADS)} {word.lower()} {subject} {verb}{draw.pick(('?', '.'))}"


ASKED: Final = re.compile(r"(?:what|which|where|when|who|how|do|does|is|are|can|may|at|until|from)\b[^.?!]*\?", re.I)
SPENT: Final = frozenset(
    "what what's which is are was do does did can may could the a an of to for in on at with your you i we my our me it that there any some have has get be much will would must should need and know tell one".split()
)


def keyword(question: str) -> str:
    """'What is the code of the gate?' as 'code gate', as people type in haste; other questions as they are."""
    if ASKED.fullmatch(question) is None:
        return question
    asked = re.sub(r"^how much (?:is|are|does|do) (.+?)(?: cost)?\?$", r"price \1?", question, flags=re.I)
    left = [word for word in asked.rstrip("?").lower().replace(",", "").split() if word not in SPENT]
    if not re.search(r"how (?:long|old|big|late|early|often|many)", asked, re.I):
        left = [word for word in left if word != "how"]
    told = [word for word in left if word not in ("when", "where", "who", "how", "long", "price", "cost")]
    return " ".join(left) if told and len(left) < 5 else question


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
