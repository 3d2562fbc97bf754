"""Sections made of what written/ holds: facts in several sayings, and lists of people, contacts, places, rules, times and prices.

People ask for them by name or by what they need, often in none of the words that the prompt uses; the answer is the
sentence or the line that says it, or its part where one sentence speaks of several things.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeVar

from benchmarks.ember.everyday import Style, answers_it, is_about
from benchmarks.ember.facts import Ask, Miss, capital, listed
from benchmarks.ember.values import Draw
from benchmarks.ember.written import FACTS, FRAMES, LISTS, UNKNOWN, Entry, Fact

T = TypeVar("T")

KINDS: Final = (
    *("people", "teams", "never", "plans", "denials", "mixed") * 3, *("places", "times", "howtos", "limits", "payers", "opens", "offered") * 2,
    *("rates",) * 5, "phones", "mails", "helpers", "loans", "seats", "desks", "pickups", "deliveries", "floors", "durations", "ages", "deposits", "codes", "orderby",
)  # fmt: skip
CONTACTS: Final = ("phones", "mails", "helpers")
MIXED: Final = (*CONTACTS, *CONTACTS, "people", "people", "nights")  # what a "mixed" section has: whom to turn to
LIST_OF: Final = {
    **dict.fromkeys(CONTACTS, "contacts"), **dict.fromkeys(("never", "limits"), "rules"), **dict.fromkeys(("denials", "offered"), "offers"),
}  # fmt: skip
TOGETHER: Final = {
    **dict.fromkeys(("rates", "payers", "plans", "loans", "seats", "desks", "pickups", "deliveries", "floors", "durations", "ages", "deposits", "codes", "opens"), 0.7),
    "teams": 0.75, "times": 0.5, "orderby": 0.5, "people": 0.4, "places": 0.35, "limits": 0.15, "denials": 0.2, "never": 0.1,
}  # fmt: skip
NEAR_OF: Final = {
    **dict.fromkeys(("people", "teams"), "person"), **dict.fromkeys(("rates", "deposits"), "item"), **dict.fromkeys(("seats", "opens"), "room"),
    "plans": "plan", "loans": "item", "times": "event", "durations": "event",
}  # fmt: skip  # which questions of unknown.toml ask for more about a row
TURNED_TO: Final = re.compile(r"question|thing|general|reception|info|help|contact|desk|concern|other", re.I)
FRAME_SLOT: Final = re.compile(r"\{(\w+)\}")
COLON: Final = re.compile(r"(\{[NB]\}): (.+)")
TOPICS: Final[dict[str, tuple[Fact, ...]]] = {
    topic: tuple(fact for fact in FACTS if fact.topic == topic) for topic in dict.fromkeys(fact.topic for fact in FACTS)
}
TOPIC_NAMES: Final = tuple(TOPICS)
NEAR: Final = 8
ARTICLE: Final = re.compile(r"^(?:an?|the) ")
PREPOSITIONS: Final = re.compile(r" (?:of|for|in|on|with|without|from|to|at|by|a|per|after|before|under|during) ")
MANY: Final = frozenset(("children", "people", "women", "men", "clothes"))
NAMING: Final = frozenset(("climbing", "swimming", "changing", "vending", "charging", "parking", "drinking", "skating", "sleeping", "meeting", "visiting", "opening"))  # fmt: skip
KEYS: Final = {"name": "name", "given": "name", "phone": "phone", "email": "email", "price": "price", "where": "place", "site": "site", "time": "time", "code": "code"}  # fmt: skip
AND: Final = ("And {n}?", "And what about {n}?", "and {n}?", "What about {n}?", "And for {n}?", "How about {n}?", "And {n}, please?", "Okay, and {n}?")  # fmt: skip
PLURAL_VERBS: Final = (
    ("is", "are"), ("does", "do"), *((f"{verb}s", verb) for verb in ("cost", "take", "start", "begin", "pay", "get", "travel")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """What a section says of one thing: the answer, its questions by name (`asks`, each with any of `names` in it), and
    questions of need, which `tails` may follow; `keys` are typed in haste. `values` fill the slots that a question shares
    with the answer."""

    label: str
    answer: str
    asks: tuple[str, ...]
    names: tuple[dict[str, str], ...]
    needs: tuple[str, ...]
    tails: tuple[str, ...]
    values: dict[str, str]
    keys: tuple[str, ...] = ()


def ended(text: str) -> str:
    """The sentence or line with a mark at its end."""
    return text if text.endswith((".", "!", "?")) else text + "."


def is_plural(name: str) -> bool:
    """Whether a verb after this name stands in the plural; what one does, such as 'picking flowers', is one thing."""
    first, *more = name.split()
    if first.endswith("ing") and more and first not in NAMING:
        return False
    last = PREPOSITIONS.split(name)[0].split()[-1]
    return last in MANY or (last.endswith("s") and not last.endswith(("ss", "us", "is", "gas")))


@cache
def named(name: str, second: str) -> dict[str, str]:
    """A row's name, its second column and the verbs that go with the name, as frames take them."""
    plural = is_plural(name)
    verbs = {one: many if plural else one for one, many in PLURAL_VERBS}
    bare = ARTICLE.sub("", name)
    verbs |= {"Is": capital(verbs["is"]), "Does": capital(verbs["does"]), "b": bare, "B": capital(bare)}
    return {"n": name, "N": capital(name), "s": second, "S": capital(second), **verbs}


@cache
def asks_of(kind: str, slots: tuple[str, ...]) -> tuple[str, ...]:
    """The questions by name for a row that was told with these slots."""
    return sum((FRAMES[kind].get(slot, ()) for slot in ("ask", *slots)), ())


@cache
def hides(words: str) -> re.Pattern[str]:
    """What a text must not hold if a question with these words, between ";", is not to be answered from it."""
    return re.compile(words.replace(";", "|") or "$^", re.I)


def neighbours(draw: Draw, rows: Sequence[T], count: int) -> list[T]:
    """A few rows, half the time of those that stand near each other, as what one business says does."""
    if draw.maybe(0.5):
        middle = int(draw.chance() * len(rows))
        rows = rows[max(0, middle - NEAR) : middle + NEAR]
    return draw.few(rows, count)


def to_guest(doing: str) -> str:
    """What a guest does, in the words of the house: 'wear my shoes' is 'wear your shoes'."""
    return re.sub(r"\bmy\b", "your", re.sub(r"\bI\b", "you", doing))


def framed(frame: str, names: dict[str, str]) -> str:
    return FRAME_SLOT.sub(lambda slot: names.get(slot[1], slot[0]), frame)


class Needs:
    """Things told, and the text that tells them."""

    text: str

    def __init__(self, style: Style) -> None:
        self.style = style
        self.told: list[Told] = []

    @property
    def labels(self) -> list[str]:
        return [one.label for one in self.told]

    def ask(self, draw: Draw) -> Ask:
        one = draw.pick(self.told)
        if one.keys and draw.maybe(0.08):
            question = draw.pick(one.keys)
        elif one.needs and (not one.asks or draw.maybe(0.5)):
            question = draw.pick(one.needs)
            if one.tails and not question.endswith("?") and draw.maybe(0.85):
                question += f" {draw.pick(one.tails)}"
        else:
            question = draw.pick(one.asks)
        question = framed(question, draw.pick(one.names))
        fields: dict[str, str | None] = {KEYS[slot]: value for slot, value in one.values.items() if slot in KEYS}
        return Ask(
            capital(self.style.filled(question, dict(one.values))),
            one.answer,
            fields if len(fields) == 1 else {},
            self._follows(draw, one),
        )

    def _follows(self, draw: Draw, asked: Told) -> list[tuple[str, str]]:
        """Short questions for what else was told in the same way."""
        others = [one for one in self.told if one is not asked and one.asks is asked.asks and one.label != asked.label]
        return [(draw.pick(AND).format(n=one.label), one.answer) for one in others]

    def miss(self, draw: Draw) -> Miss | None:
        """None: what these lists leave open is asked by `asked_by_name`."""
        return None


def asked_by_name(draw: Draw, kind: str = "mixed") -> tuple[str, tuple[str, ...]]:
    """A question for a row of a list, any if it is "mixed", by its name, and all that a prompt could call the row."""
    while kind in ("mixed", "nights"):
        kind = draw.pick(KINDS)
    row = draw.pick(LISTS[LIST_OF.get(kind, kind)])
    names = row.second if kind == "teams" else row.names
    name = draw.pick(names)
    second = draw.pick(row.names if kind == "teams" else row.second or row.names)
    asked = draw.pick(asks_of(kind, ("price", "num", "time")))
    return framed(asked, named(name, second)), (*row.names, *row.second)


class Facts(Needs):
    """Facts of different topics, now and then two of one topic."""

    def __init__(self, draw: Draw, style: Style, count: int, lines: bool) -> None:
        super().__init__(style)
        for topic in neighbours(draw, TOPIC_NAMES, count):
            for fact in draw.few(TOPICS[topic], 2 if draw.maybe(0.25) else 1):
                fitting = [one for one in fact.sayings if one.startswith("~") == lines] or fact.sayings
                form, values = draw.pick(fitting), dict[str, str]()
                text = capital(style.filled(form.removeprefix("~"), values))
                asks = fact.questions
                if fact.mixed:
                    asks = tuple(one for one in asks if answers_it(one, form) and is_about(fact.sayings, one, text))
                label = "hours" if topic.startswith("hours") else topic
                self.told.append(Told(label, ended(text), asks or ("Tell me about it.",), ({},), (), (), values))
        bare = lines and draw.maybe(0.8)
        self.text = "\n".join(one.answer.removesuffix(".") if bare else one.answer for one in self.told)


class Listed(Needs):
    """Rows of one list, each in a sentence or a line of its own, or several in one."""

    def __init__(self, draw: Draw, style: Style, count: int, lines: bool) -> None:
        super().__init__(style)
        self.kind = draw.pick(KINDS)
        if self.kind == "mixed":
            self.text = self._mixed(draw, lines, max(3, min(count + 1, 5)))
            return
        self.frames = FRAMES[self.kind]
        chosen = self._chosen(draw, LISTS[LIST_OF.get(self.kind, self.kind)], count)
        if len(chosen) > 1 and draw.maybe(TOGETHER.get(self.kind, 0.2)):
            in_line = draw.maybe(0.6 if lines else 0.2)
            self.text = self._line(draw, chosen) if in_line else self._sentence(draw, chosen)
            return
        forms = self.frames["line" if lines else "say"]
        shared = draw.pick(forms) if draw.maybe(0.7 if lines else 0.3) else None
        bare = lines and draw.maybe(0.85)
        texts = [self._tell(draw, row, shared or draw.pick(forms)) for row in chosen]
        self.text = "\n".join(capital(text if bare else ended(text)) for text in texts)

    def _mixed(self, draw: Draw, lines: bool, count: int) -> str:
        """Whom to turn to for what: numbers, addresses and names, each in a line or a sentence of its own."""
        texts: list[str] = []
        kinds = [draw.pick(MIXED) for _ in range(count)]
        contacts = neighbours(draw, LISTS["contacts"], count)
        for place, self.kind in enumerate(kinds):
            if self.kind == "nights" and self.kind in kinds[:place]:
                continue
            self.frames = FRAMES[self.kind]
            row = contacts[place] if self.kind in CONTACTS else draw.pick(LISTS[self.kind])
            if not any(one.label in row.names for one in self.told):
                texts.append(self._tell(draw, row, draw.pick(self.frames["line" if lines else "say"])))
        self.kind = "mixed"
        bare, joint = lines and draw.maybe(0.85), draw.pick(("\n", "\n", "\n", ". ", "; ")) if lines else "\n"
        return (
            joint.join(capital(text if bare else ended(text)) for text in texts)
            .replace(".. ", ". ")
            .replace(".; ", ". ")
        )

    def near(self, draw: Draw, text: str) -> str | None:
        """A question for more about one of the rows, of which this text of the whole prompt has no word."""
        one, part = draw.pick(self.told), NEAR_OF.get(self.kind)
        if part is None:
            return None
        question, _, told = draw.pick(UNKNOWN[part]).partition(" | ")
        name = one.values.get("name") or one.values.get("given")
        if hides(told).search(text) or ("{x}" in question and not name):
            return None
        return capital(self.style.filled(framed(question, {**one.names[0], "x": name or ""}), {}))

    def other(self, draw: Draw, text: str) -> tuple[str, tuple[str, ...]] | None:
        """A question for a row that the same list could have, and its names; None where what is told might answer it."""
        if self.kind in ("opens", "orderby", "mixed") or (self.kind in CONTACTS and TURNED_TO.search(text)):
            return None
        return asked_by_name(draw, self.kind)

    def _chosen(self, draw: Draw, rows: tuple[Entry, ...], count: int) -> list[Entry]:
        count = max(2, min(count, 4)) if draw.maybe(0.7) else 1
        if self.kind != "teams":
            return neighbours(draw, rows, count)
        team = draw.pick(rows)
        verb = (draw.pick(team.names),)
        things = draw.few(team.second, max(2, count))
        if len(things) > 2 and draw.maybe(0.4) and not any(" and " in one for one in things):  # one does two of them
            pair = tuple(things[:2])
            return [Entry((" and ".join(pair), *pair), verb, team.needs)] + [
                Entry((one,), verb, team.needs) for one in things[2:]
            ]
        return [Entry((one,), verb, team.needs) for one in things]

    def _tell(self, draw: Draw, row: Entry, form: str, answer: str | None = None) -> str:
        """The row in this form; what it says is kept with its questions. Without `answer` the form is the answer."""
        seconds = row.second or row.names
        place = 0 if self.kind == "teams" else int(draw.chance() * len(row.names))
        second = seconds[place] if len(seconds) == len(row.names) else draw.pick(seconds)
        names, values = named(row.names[place], to_guest(second)), dict[str, str]()
        text = self.style.filled(framed(form, names), values)
        said = text if answer is None else self.style.filled(framed(answer, names), values)
        if self.kind in ("rates", "payers"):  # as everyday.Prices and everyday.Payers answer
            many = next((one for one in row.names if is_plural(one) and one[:3] == names["b"][:3]), names["n"])
            said = f"The {names['b']} {names['costs']}" if self.kind == "rates" else f"{many} pay"
            said += f" {values['price']}"
        asked = tuple(named(name, one) for name in row.names for one in seconds)
        asks, tails, keys = asks_of(self.kind, tuple(values)), self.frames["tail"], self.frames.get("key", ())
        self.told.append(Told(names["n"], ended(capital(said)), asks, asked, row.needs, tails, values, keys))
        return text

    def _sentence(self, draw: Draw, rows: list[Entry]) -> str:
        """Several rows in one sentence, the later ones often without their verb."""
        place = int(draw.chance() * len(self.frames["short"]))
        full, short = self.frames["short"][place], self.frames["elided"][place]
        elided = draw.maybe(0.7)
        parts = [self._tell(draw, row, short if number and elided else full, full) for number, row in enumerate(rows)]
        joint = draw.pick((", ", ", ", "; ", " and ", ", and ")) if len(parts) == 2 or draw.maybe(0.25) else ""
        if len(parts) > 2 and "and" in joint:
            joint = ", "
        return capital(joint.join(parts) if joint else listed(parts)) + "."

    def _line(self, draw: Draw, rows: list[Entry]) -> str:
        """Several rows in one line, now and then as JSON; the answer is the row's part of it."""
        form = draw.pick(self.frames["line"])
        if draw.maybe(0.75):
            form = form.replace("{N}", "{B}")
        colon = COLON.fullmatch(form)
        if colon and draw.maybe(0.1):
            forms = (f'"{colon[1].lower()}": "{colon[2]}"', f"{colon[1]}: {colon[2]}")
            return "{" + ", ".join(self._tell(draw, row, *forms) for row in rows) + "}"
        mark = draw.pick(
            (", ", ", ", "; ", " | ", ". ", " / ", " · ", " - ") if ", " not in form else ("; ", " | ", ". ", " · ")
        )
        if mark == ", " and draw.maybe(0.7):
            form = form.replace("{N}", "{n}").replace("{B}", "{b}")
        head = draw.pick(self.frames.get("head", ("-",)))
        told = mark.join(self._tell(draw, row, form) for row in rows)
        return capital(told) if head == "-" else f"{head} {told}"
