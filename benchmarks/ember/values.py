"""Random values for the corpus: names, prices, codes, times. It knows nothing of sentences.

Every open-ended value belongs to one split by its checksum, so a held-out value can never have been trained on.
"""

# fmt: off  # lists of phrases read better unbroken

import enum
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from benchmarks.ember import words

HELDOUT_SHARE: Final = 8  # one value in this many is never trained on
PHRASE_SHARE: Final = 7  # the last phrasing of every so many is never trained on

T = TypeVar("T")


class Split(enum.Enum):
    TRAIN = "train"
    HELDOUT = "heldout"


def belongs(value: str, split: Split) -> bool:
    held_out = zlib.crc32(value.lower().encode()) % HELDOUT_SHARE == 0
    return held_out == (split is Split.HELDOUT)


class Draw:
    """One document's source of chance: the same seed and split give the same draws.

    `unseen_phrases` makes phrase() prefer phrasings that training never uses.
    """

    def __init__(self, seed: int | str, split: Split = Split.TRAIN, unseen_phrases: bool = False) -> None:
        self.random = random.Random(seed)
        self.split = split
        self.unseen_phrases = unseen_phrases
        self.chance = self.random.random
        self.currency = self.pick(
            ("$", "$", "$", "€", "£", " euros", " dollars", " EUR", "USD ", " CHF", "CHF ", "€ ", "¥", " kr", "£")
        )
        self.clock = self.pick(("24", "24", "12", "12", "short", "mixed", "mixed"))

    # -- choosing -------------------------------------------------------------------------------------------------

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.chance() * len(options))]

    def number(self, low: int, high: int) -> int:
        return low + int(self.chance() * (high - low + 1))

    def few(self, options: Sequence[T], count: int) -> list[T]:
        return self.random.sample(options, min(count, len(options)))

    def maybe(self, chance: float) -> bool:
        return self.chance() < chance

    def phrase(self, options: Sequence[str]) -> str:
        """A phrasing; training never sees those at PHRASE_SHARE − 1, 2 · PHRASE_SHARE − 1, …"""
        if self.unseen_phrases and len(options) >= PHRASE_SHARE:
            return options[PHRASE_SHARE * self.number(1, len(options) // PHRASE_SHARE) - 1]
        while True:
            place = int(self.chance() * len(options))
            if place % PHRASE_SHARE != PHRASE_SHARE - 1:
                return options[place]

    def own(self, make: Callable[[], str]) -> str:
        """A value of this split: made again until its checksum fits."""
        while True:
            value = make()
            if belongs(value, self.split):
                return value

    # -- words and names ------------------------------------------------------------------------------------------

    def _syllables(self) -> str:
        """A word that is none: of syllables mostly, of pieces of real words, of any letters, or with accents."""
        pick, roll = self.pick, self.chance()
        if roll < 0.25:
            first, second = pick(words.COMMON), pick(words.COMMON)
            return first[: self.number(2, 5)] + second[-self.number(2, 5) :]
        if roll < 0.32:
            return "".join(pick("abcdefghijklmnopqrstuvwxyz") for _ in range(self.number(3, 8)))
        if roll < 0.38:
            return (
                pick(words.SYLLABLE_STARTS)
                + pick("áàâäãåæçéèêëíîïñóòôöõøúùûüýßšžłńćęąőřěūīđğş")
                + pick(words.SYLLABLE_ENDS)
                + pick(("", pick(words.SYLLABLE_STARTS) + pick(words.SYLLABLE_MIDDLES)))
            )
        if roll < 0.42:
            return "".join(pick("abcdefghijklmnopqrstuvwxyzjqxzwvyk") for _ in range(self.number(5, 12)))
        if roll < 0.48:
            return "".join(
                pick(words.SYLLABLE_STARTS) + pick(words.SYLLABLE_MIDDLES) + pick(words.SYLLABLE_ENDS)
                for _ in range(self.number(3, 5))
            )
        parts = [pick(words.SYLLABLE_STARTS) + pick(words.SYLLABLE_MIDDLES)]
        parts.extend(
            pick(words.SYLLABLE_STARTS) + pick(words.SYLLABLE_MIDDLES) for _ in range(self.pick((0, 1, 1, 1, 2)))
        )
        return "".join(parts) + pick(words.SYLLABLE_ENDS)

    def invented(self) -> str:
        """A lower-case word that no dictionary has."""
        return self.own(self._syllables)

    def proper(self) -> str:
        return self.invented().capitalize()

    def person(self) -> str:
        given = self.pick(words.GIVEN_NAMES) if self.maybe(0.6) else self.proper()
        kind = self.chance()
        if kind < 0.12:
            return f"{self.pick(('Dr.', 'Mr.', 'Ms.', 'Mrs.', 'Prof.'))} {self.proper()}"
        return self.own(lambda: f"{given} {self._syllables().capitalize()}")

    def title(self) -> str:
        """The name of a business, a product or a place: one to three words."""
        kind = self.chance()
        if kind < 0.3:
            return self.proper()
        if kind < 0.5:
            return f"{self.proper()} {self.pick(words.PLACE_SUFFIXES)}"
        if kind < 0.65:
            return f"{self.pick(words.ADJECTIVES).capitalize()} {self.proper()}"
        if kind < 0.8:
            return f"The {self.pick(words.ADJECTIVES).capitalize()} {self.pick(words.THINGS).capitalize()}"
        if kind < 0.9:
            return f"{self.proper()} & {self.proper()}"
        return f"{self.pick(words.THINGS).capitalize()} {self.pick(words.PLACE_SUFFIXES)}"

    def item(self) -> str:
        """Something that can be sold, lower-case words mixed with invented names."""
        kind = self.chance()
        if kind < 0.3:
            return self.pick(words.FOODS)
        if kind < 0.5:
            return f"{self.pick(words.ADJECTIVES)} {self.pick(words.THINGS)}"
        if kind < 0.75:
            return f"{self.proper()} {self.pick(words.THINGS)}"
        if kind < 0.85:
            return f"{self.proper()} {self.number(2, 990)}"
        if kind < 0.93:
            return f"{self.invented()} {self.pick(words.THINGS)}"
        return self.proper()

    # -- values ---------------------------------------------------------------------------------------------------

    def money(self) -> str:
        kind, currency = self.chance(), self.currency
        if kind < 0.4:
            amount = str(self.number(1, 99))
        elif kind < 0.85:
            amount = self.own(lambda: f"{self.number(1, 199)}.{self.number(0, 19) * 5:02d}")
        elif kind < 0.95:
            amount = self.own(lambda: str(self.number(100, 9999)))
        else:
            amount = self.own(lambda: f"{self.number(1, 99)},{self.number(0, 999):03d}")
        return amount + currency if currency.startswith(" ") else currency + amount

    def hour(self, low: int = 5, high: int = 23) -> str:
        hour, minute = self.number(low, high), self.pick((0, 0, 0, 15, 30, 30, 45))
        clock = self.pick(("24", "12", "short")) if self.clock == "mixed" else self.clock
        if clock == "24":
            return f"{hour}:{minute:02d}"
        half = "am" if hour < 12 else "pm"
        twelve = (hour - 1) % 12 + 1
        if clock == "12" or minute:
            return f"{twelve}:{minute:02d} {half}"
        return f"{twelve} {half}"

    def span(self) -> str:
        return f"{self.hour(5, 11)} to {self.hour(12, 23)}"

    def code(self) -> str:
        return self.own(self._code)

    def _letter(self) -> str:
        return self.pick("ABCDEFGHJKLMNPQRSTUVWXYZ")

    def _digits(self, count: int) -> str:
        return "".join(self.pick("0123456789") for _ in range(count))

    def _code(self) -> str:
        kind = self.chance()
        if kind < 0.3:
            return self._digits(self.number(4, 6))
        if kind < 0.5:
            return self._letter() + self._letter() + "-" + self._digits(self.number(3, 5))
        if kind < 0.65:
            return self._letter() + self._digits(self.number(2, 4))
        if kind < 0.8:
            return self._syllables().upper() + self._digits(2)
        if kind < 0.9:
            return "-".join(
                "".join(self.pick("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(4)) for _ in range(2)
            )
        return self._digits(3) + self._letter() + self._digits(self.number(1, 3))

    def password(self) -> str:
        joint = self.pick(("", "", "-", "_", "!"))
        return self.own(
            lambda: (
                f"{self.pick((self._syllables(), self.pick(words.ADJECTIVES)))}{joint}"
                f"{self.pick((self._syllables(), self.pick(words.THINGS)))}{self.number(1, 999)}"
            )
        )

    def phone(self) -> str:
        kind = self.chance()
        if kind < 0.4:
            return self.own(lambda: f"{self._digits(3)}-{self._digits(4)}")
        if kind < 0.6:
            return self.own(lambda: f"+{self.number(1, 99)} {self._digits(2)} {self._digits(6)}")
        if kind < 0.8:
            return self.own(lambda: f"({self._digits(3)}) {self._digits(3)}-{self._digits(4)}")
        return self.own(lambda: f"0{self._digits(3)} {self._digits(3)} {self._digits(3)}")

    def email(self) -> str:
        box = self.pick(("info", "help", "office", "contact", "hello", "desk", "team", "booking"))
        return self.own(lambda: f"{self.pick((box, self._syllables()))}@{self._syllables()}.{self.pick(words.DOMAINS)}")

    def site(self) -> str:
        page = self.pick(("", "", "/help", "/book", "/menu", "/status", "/shop"))
        return self.own(
            lambda: f"{self.pick(('www.', '', 'https://'))}{self._syllables()}.{self.pick(words.DOMAINS)}{page}"
        )

    def street(self) -> str:
        return self.own(
            lambda: (
                f"{self.number(1, 299)} "
                f"{self.pick((self._syllables(), self._syllables(), self.pick(words.THINGS))).capitalize()} {self.pick(words.STREETS)}"
            )
        )

    def address(self) -> str:
        return self.street() + (f", {self.proper()}" if self.maybe(0.35) else "")

    def date(self) -> str:
        month, day, kind = self.pick(words.MONTHS), self.number(1, 28), self.chance()
        if kind < 0.4:
            return f"{month} {day}"
        if kind < 0.6:
            return f"{day} {month}"
        if kind < 0.8:
            return self.own(lambda: f"{month} {self.number(1, 28)}, {self.number(2019, 2035)}")
        return self.iso_date()

    def iso_date(self) -> str:
        return self.own(lambda: f"20{self.number(24, 39)}-{self.number(1, 12):02d}-{self.number(1, 28):02d}")

    def duration(self) -> str:
        unit, most = self.pick(
            (("minutes", 90), ("hours", 72), ("days", 90), ("weeks", 12), ("months", 36), ("years", 12))
        )
        return f"{self.number(2, most)} {unit}"

    def count(self) -> str:
        return str(self.number(2, 400)) if self.maybe(0.8) else self.own(lambda: str(self.number(400, 9999)))

    def amount_of(self) -> str:
        """A count of something, now and then per something."""
        tail = (
            f" per {self.pick(('minute', 'hour', 'day', 'person', 'month', 'user', 'week'))}" if self.maybe(0.5) else ""
        )
        return f"{self.count()} {self.pick(('requests', 'guests', 'rooms', 'books', 'people', 'seats', 'calls', 'pages', 'cars', 'tokens', 'files', 'beds', self.invented() + 's'))}{tail}"

    def loose(self) -> str:
        """A few words, of which nothing more is known."""
        adjective, thing = self.pick(words.ADJECTIVES), self.pick(words.THINGS)
        return self.pick((
            f"{adjective} {thing}", f"{thing} and {self.pick(words.THINGS)}", f"{self.proper()}, {self.proper()}", f"ask at the {adjective} {thing}", f"{self.pick(words.FOODS)} with {self.pick(words.FOODS)}", "cash only",
            f"{self.invented()} {self.invented()}", f"{self.proper()} and {self.proper()}", f"no {thing}, please", f"{adjective}", f"{self.proper()} {self.number(1, 99)}", f"https://{self.invented()}.{self.invented()}.com/{self.pick(('v1', 'v2', 'api', 'docs'))}",
            f"{self.pick(words.COMMON)} {self.pick(words.COMMON)} {self.pick(words.COMMON)}", self.proper(), self.title(), f"{self.number(2, 40)} {thing}s in the {adjective} {self.pick(words.THINGS)}",
        ))  # fmt: skip

    def measure(self) -> str:
        unit = self.pick(
            (" kg", " g", " meters", " km", " liters", " cm", " GB", " MB", " watts", " volts", " seats", " points")
        )
        amount = self.count() if self.maybe(0.7) else f"{self.number(0, 99)}.{self.number(1, 9)}"
        return amount + unit

    def percent(self) -> str:
        return f"{self.number(1, 99)}%"

    def colour(self) -> str:
        return self.pick(words.COLORS)

    def material(self) -> str:
        return self.pick(words.MATERIALS)

    def weekday(self) -> str:
        return self.pick(words.WEEKDAYS)

    def version(self) -> str:
        return self.own(lambda: f"{self.number(0, 12)}.{self.number(0, 40)}.{self.number(0, 30)}")

    def network(self) -> str:
        return self.own(lambda: f"10.{self.number(0, 255)}.{self.number(0, 255)}.{self.number(1, 254)}")

    def port(self) -> str:
        return self.own(lambda: str(self.number(1025, 65000)))

    def path(self) -> str:
        return self.own(
            lambda: f"/{self.pick(('data', 'home', 'srv', 'var', 'mnt'))}/{self._syllables()}/{self._syllables()}"
        )

    def year(self) -> str:
        return str(self.number(1850, 2026))

    def spot(self) -> str:
        """Where something is: reads well after 'is' and after 'in the prompt:'."""
        kind = self.chance()
        if kind < 0.3:
            return f"in room {self.number(1, 480)}"
        if kind < 0.5:
            return f"on the {self.pick(('ground', 'first', 'second', 'third', 'fourth', 'fifth', 'top'))} floor"
        if kind < 0.75:
            near = self.pick(("next to", "behind", "opposite", "below", "above", "near"))
            return f"{near} the {self.pick(words.ADJECTIVES)} {self.pick(words.THINGS)}"
        return f"in the {self.proper()} {self.pick(('Room', 'Hall', 'Wing', 'Building', 'Lounge', 'Garden'))}"
