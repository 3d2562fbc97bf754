"""A business's system prompt as a whole: an opening, then matters, prices, hours and pairs of facts in its own layout.

It has the parts of corpus.Prompt: a text, and questions that it answers or does not answer.
"""

# fmt: off  # lists of phrases read better unbroken

import re
from typing import Final

from benchmarks.ember import words
from benchmarks.ember.everyday import (
    COURSES,
    DOCS,
    EVENTS,
    FACILITIES,
    GIVENS,
    GOODS,
    PLURALS,
    ROOMS,
    SERVICES,
    STOCK,
    STOPS,
    WASTES,
    Matters,
    Payers,
    Prices,
    Style,
    stems,
)  # fmt: skip
from benchmarks.ember.facts import AND_ON, CLOSES, OPEN_ON, OPENS, Ask, Miss, Section, capital, listed
from benchmarks.ember.needs import Facts, Listed, Needs, asked_by_name, hides
from benchmarks.ember.values import Draw
from benchmarks.ember.written import UNKNOWN

OPENS_ANY: Final = (
    "When do you open?", "When does the {p} open?", "What time do you open?", "From when are you open?", "How early do you open?", "At what time does the {p} open?", "When can I come in?", "Opening time?", "What time does the {p} open in the morning?",
    "When is the {p} opening?", "When do your doors open?", "How early can I come?", "Since what time is the {p} open?", "Can you tell me when the {p} opens?", "I'd like to know when you open.",
    "What's the earliest I can come?", "Since when in the morning is somebody there?", "When do you start in the morning?", "From what time on can I drop in?", "When are the doors unlocked?", "When does your day begin?", "Is anybody there early in the morning?", "When can we come at the earliest?", "opens when?", "what time u open",
)  # fmt: skip
CLOSES_ANY: Final = (
    "When do you close?", "When does the {p} close?", "What time do you close?", "Until when are you open?", "How late are you open?", "At what time does the {p} close?", "How long is the {p} open?", "Closing time?", "Until what time can I come?", "How late can I come?",
    "What time does the {p} shut?", "When do you shut in the evening?", "When is closing time?", "How long are you there today?", "Until when can I come in the evening?", "Can you tell me when the {p} closes?", "When must I leave at the latest?",
    "What's the latest I can come?", "When does your day end?", "How late may I drop in?", "When do you lock up?", "When do you call it a day?", "I work late. Until when are you there?", "Can I still come in the evening?", "closes when?", "what time u close", "Will you still be open late in the evening?", "When are the doors locked?",
)  # fmt: skip
HOURS_ANY: Final = (
    "When are you open?",
    "What are your opening hours?",
    "When is the {p} open?",
    "What are your hours?",
    "Opening hours?",
    "When can I visit the {p}?",
    "From when to when is the {p} open?",
    "What are the hours of the {p}?",
    "When could I come by?",
    "Could you tell me your hours?",
    "At what times are you there?",
    "When is someone there?",
    "what are ur hours",
    "How long are you open each day?",
    "I'd like to drop by. When is that possible?",
    "Which hours do you keep?",
    "Tell me when you are open.",
    "When do you have open?",
    "opening hours",
    "hours",
    "opening times",
    "open when",
    "your hours please",
)
DAY_CLOSES: Final = (
    *CLOSES,
    "When do you shut on {d}?",
    "How late can I still come on a {d}?",
    "Until when are you there on {d}s?",
    "How long are you there on {d}?",
    "What time do you shut on {d}s?",
    "{d}: until when?",
    "How late is it on {d}s?",
    "Can I come in the evening on {d}?",
    "It's {d} today. How long are you open?",
    "I only have time on {d}. How late can I come?",
    "What's the latest on {d}?",
    "When are you done on {d}?",
    "By when do I have to be there on {d}?",
    "I can only come after work on {d}. Until when is that?",
    "Closing time on {d}?",
    "{d} evening, how long?",
)
DAY_OPEN: Final = (
    *OPEN_ON,
    "Can I still come at {t} on {d}?",
    "Is it all right if I come at {t} on {d}?",
    "Could I get in at {t} on a {d}?",
    "We'd be there on {d} at {t}. Is somebody there?",
    "Will you be open on {d} at {t}?",
    "I can be with you on {d} around {t}. Is that fine?",
    "{d} at {t}, does that work?",
    "Is {d} a good day to come?",
    "Can I come by this {d}?",
    "Are you open this {d}?",
    "Is the {p} open on {d}s?",
    "Is the {p} closed on {d}?",
    "I'm free on {d}. Are you open?",
    "Are you shut on {d}s?",
    "Do you have a day off on {d}?",
    "Would you be there on a {d}?",
    "Today is {d}. Are you open?",
    "Could we visit you on {d}?",
    "Does {d} work for you?",
    "I'd like to come on {d}, is that possible?",
    "Do you work on {d}s?",
    "Will I find you open on {d}?",
    "Anyone there on {d}?",
    "My only free day is {d}. Can I come then?",
    "Are the doors open on {d}?",
    "How about {d}?",
    "opening hours {d}",
    "hours {d}",
    "{d} hours",
    "open {d}",
    "{d} open",
    "{d} opening times",
    "opening times on {d}",
    "{d}, what are the hours?",
)
SHORT: Final = {day: day[:3] for day in words.WEEKDAYS}


class Week:
    """Opening hours as businesses write them, with days that share them and days that they are closed."""

    def __init__(self, draw: Draw, style: Style, place: str) -> None:
        self.style, self.place = style, place
        days = words.WEEKDAYS
        form, way = draw.pick((*range(12), 7, 7, 7, 10)), draw.pick((" to ", "-", "–", " - "))
        through = draw.pick((" to ", "-", "–"))
        early, late, early2, late2 = style.time(6, 10), style.time(15, 23), style.time(8, 12), style.time(12, 17)
        self.days: dict[str, tuple[str, str] | None] = dict.fromkeys(days, (early, late))
        self.single: tuple[str, str | None, str | None] | None = None
        shut = draw.pick(days)
        if form == 0:
            self.days[shut] = None
            rest = draw.pick(("when we stay shut", "when we are closed", "our day off", "our day of rest"))
            self.text = draw.pick(
                (
                    f"We open at {early} every {draw.pick(('morning', 'day'))} except {shut}, {rest}, and {draw.pick(('we ', ''))}close at {late}.",
                    f"Open daily except {shut} from {early} to {late}.",
                    f"We are open every day but {shut}, {early} to {late}.",
                    f"Hours: {early}{way}{late}. {shut} is our day off.",
                )
            )
        elif form == 1:
            self.text = draw.pick(
                (
                    f"Open daily from {early} to {late}.",
                    f"We are open every day from {early} to {late}.",
                    f"Open every day, {early}{way}{late}.",
                    f"Open seven days a week, {early} to {late}.",
                    f"Daily {early}{way}{late}",
                )
            )
        elif form == 2:
            first, last = draw.pick(((1, 5), (0, 4), (1, 6), (2, 6), (0, 5)))
            self.days = {day: (early, late) if first <= number <= last else None for number, day in enumerate(days)}
            span = f"{days[first]}{through if through == ' to ' else ' to '}{days[last]}"
            self.text = draw.pick(
                (
                    f"We are open from {span}, {early} to {late}.",
                    f"Open {span}, {early}{way}{late}.",
                    f"We work from {span}, {early} to {late}.",
                    f"The {place} is open from {span}, {early} to {late}.",
                )
            )
            if draw.maybe(0.4):
                special = days[draw.number(first, last)]
                longer = style.time(19, 23)
                self.days[special] = (early, longer)
                self.text += draw.pick(
                    (
                        f" On {special} until {longer}.",
                        f" {special}s until {longer}.",
                        f" On {special}s we stay open until {longer}.",
                    )
                )
        elif form == 3:
            self.days |= {"Saturday": (early2, late2), "Sunday": None}
            rest = draw.pick(
                ("Sundays we rest", "on Sundays we are closed", "closed on Sundays", "Sunday is a day of rest")
            )
            self.text = draw.pick(
                (
                    f"{draw.pick(('Opening times are', 'We open from', 'Our hours are'))} {early} to {late} on weekdays and {early2} to {late2} on Saturdays; {rest}.",
                    f"On weekdays we are open from {early} to {late}, on Saturdays from {early2} to {late2}, and {rest}.",
                    f"Weekdays {early}{way}{late}, Saturdays {early2}{way}{late2}, {rest}.",
                )
            )
        elif form == 4:
            self.days |= {"Saturday": (early2, late2), "Sunday": None}
            tail = draw.pick(("", "", ", Sun closed", ", closed on Sunday"))
            self.text = f"{draw.pick(('Hours: ', 'Opening hours: ', 'Open ', '- Hours: '))}Mon{through if through != ' to ' else '-'}Fri {early}{way}{late}, Sat {early2}{way}{late2}{tail}"
        elif form == 5:
            cut = draw.pick((3, 4))
            self.days = {
                day: (early, late) if number < cut else (early, late2) if number == cut else None
                for number, day in enumerate(days)
            }
            self.text = f"{draw.pick(('Hours: ', 'Opening hours: ', 'Open: ', '- Open: '))}{days[0]} to {days[cut - 1]} {early}{way}{late}, {days[cut]} {early}{way}{late2}"
        elif form == 6:
            self.days |= {"Saturday": (early2, late2), "Sunday": None}
            mark = draw.pick(("", "- ", "* "))
            self.text = "\n".join(
                (
                    f"{mark}Monday to Friday: {early}{way}{late}",
                    f"{mark}Saturday: {early2}{way}{late2}",
                    f"{mark}Sunday: closed",
                )
            )
        elif form == 7:
            opens, closes = draw.pick(((early, None), (None, late), (early, late)))
            it = draw.pick(("It", "We", f"The {place}", f"Our {place}"))
            ending = "" if it == "We" else "s"
            said = [f"open{ending} at {opens}"] * (opens is not None) + [f"close{ending} at {closes}"] * (
                closes is not None
            )
            self.text = f"{it} {' and '.join(said)}."
            self.single = (self.text, opens, closes)
        elif form == 8:
            one, other = draw.pick(
                (("Wednesday", "Saturday"), ("Tuesday", "Friday"), ("Monday", "Thursday"), ("Saturday", "Sunday"))
            )
            self.days = {day: (early, late) if day in (one, other) else None for day in days}
            self.text = draw.pick(
                (
                    f"The {place} is open on {one} and {other} from {early} to {late}.",
                    f"Open {one} and {other}, {early}{way}{late}.",
                    f"We open on {one}s and {other}s only, from {early} to {late}.",
                )
            )
        elif form == 10:
            self.days |= {"Saturday": (early2, late2), "Sunday": (early2, late2)}
            ends = draw.pick(("weekends", "at weekends", "Sat-Sun", "Saturday and Sunday", "Sat and Sun"))
            five = draw.pick(("Mon-Fri", "Monday to Friday", "weekdays", "on weekdays"))
            lead = draw.pick(("", "Open ", "Hours: ", "We are open "))
            self.text = capital(
                f"{lead}{five} {early}{way}{late}{draw.pick((', ', '; ', ' and '))}{ends} {early2}{way}{late2}"
                + ("." if lead.startswith("We") else "")
            )
        elif form == 11:
            month = draw.pick(words.MONTHS)
            self.text = f"{draw.pick(('Hours: ', 'Open ', 'Daily ', 'Hours '))}{early}{way}{late}" + draw.pick(
                ("", ".", f". Closed in {month}.", f", closed in {month}")
            )
        else:
            self.days |= {"Sunday": (early2, late2)}
            self.text = draw.pick(
                (
                    f"We open at {early} and close at {late}, on Sundays {early2} to {late2}.",
                    f"Monday to Saturday {early}{way}{late}, Sunday {early2}{way}{late2}.",
                    f"The {place} is open from {early} to {late}; on Sundays from {early2} to {late2}.",
                )
            )

    @property
    def labels(self) -> list[str]:
        return ["hours"]

    def _answer(self, form: str, day: str) -> str:
        hours = self.days[day]
        if hours is None:
            return f"We are closed on {day}."
        if form == "open":
            return f"On {day} we open at {hours[0]}."
        return (
            f"On {day} we close at {hours[1]}."
            if form == "close"
            else f"On {day} we are open from {hours[0]} to {hours[1]}."
        )

    def ask(self, draw: Draw) -> Ask:
        roll, place = draw.chance(), self.place
        if self.single is not None:
            text, opens, closes = self.single
            forms = (
                OPENS_ANY
                if closes is None
                else CLOSES_ANY
                if opens is None
                else draw.pick((OPENS_ANY, CLOSES_ANY, HOURS_ANY))
            )
            return Ask(draw.pick(forms).format(p=place), text)
        hours = {one for one in self.days.values() if one}
        if len(hours) == 1 and roll < 0.4:
            early, late = next(iter(hours))
            if roll < 0.13:
                return Ask(draw.pick(OPENS_ANY).format(p=place), f"We open at {early}.")
            if roll < 0.3:
                return Ask(draw.pick(CLOSES_ANY).format(p=place), f"We close at {late}.")
            return Ask(draw.pick(HOURS_ANY).format(p=place), f"We are open from {early} to {late}.")
        if roll < 0.3:
            text = (
                self.text.replace("\n- ", ", ")
                .replace("\n* ", ", ")
                .replace("\n", ", ")
                .removeprefix("- ")
                .removeprefix("* ")
            )
            return Ask(draw.pick(HOURS_ANY).format(p=place), text if text.endswith(".") else text + ".")
        closed = [day for day, span in self.days.items() if span is None]
        day = draw.pick(closed) if closed and draw.maybe(0.35) else draw.pick(words.WEEKDAYS)
        form, questions = draw.pick(
            (("span", DAY_OPEN), ("span", DAY_OPEN), ("open", OPENS), ("close", DAY_CLOSES), ("close", DAY_CLOSES))
        )
        other = draw.pick([one for one in words.WEEKDAYS if one != day])
        return Ask(
            draw.pick(questions).format(d=day, p=place, t=self.style.time(6, 22)),
            self._answer(form, day),
            {"opens": hours_[0], "closes": hours_[1]} if (hours_ := self.days[day]) else {},
            [(draw.phrase(AND_ON).format(d=other), self._answer(form, other))],
        )

    def miss(self, draw: Draw) -> Miss | None:
        if self.single is None:
            return None
        _, opens, closes = self.single
        return (
            Miss(draw.pick(CLOSES_ANY if closes is None else OPENS_ANY).format(p=self.place), "hours")
            if None in (opens, closes)
            else None
        )


PAPERS: Final = [f"{doc.split(' ', 1)[1]}s".replace("passs", "passes") for doc in DOCS[:-1]]
# what is said of each (singular; plural) | a value's slot | what is asked; {x} is the thing
CLAUSES: Final = (
    (PAPERS, "are issued | {desk}", ("Where do I get {x}?", "At which desk are {x} issued?", "Which counter is for {x}?", "I need one of the {x}. Where do I go?", "Where are {x} issued?", "To which desk do I go for {x}?", "Who issues {x}?")),
    (PAPERS, "take | {days}", ("How long do {x} take?", "When are {x} ready?", "How many days do {x} take?", "How long do I wait for {x}?", "How much time do {x} take?", "I applied for one of the {x}. When is it done?")),
    ([f"the {room}" for room in ROOMS], "seats | {num}", ("How many people fit into {x}?", "How many seats are in {x}?", "How big is {x}?", "How many does {x} seat?", "Is {x} large enough for us?", "How many people can sit in {x}?", "For how many is {x}?")),
    ([f"the {room}" for room in (*ROOMS, *FACILITIES)], "is | {where}", ("Where is {x}?", "How do I find {x}?", "Where can I find {x}?", "On which floor is {x}?", "I'm looking for {x}.", "Which way is {x}?", "How do I get to {x}?", "Which level is {x} on?")),
    ([f"the {room}" for room in FACILITIES], "closes | at {time}", ("When does {x} close?", "How late is {x} open?", "Until when is {x} open?", "What time does {x} close?", "Can I still go to {x}? It's late.", "How long is {x} open?", "By when do I have to leave {x}?")),
    (COURSES, "is | on {day}", ("When is {x}?", "On which day is {x}?", "What day is {x}?", "When do you have {x}?", "When can I do {x}?", "Which day do you offer {x}?", "On what day does {x} take place?")),
    (COURSES, "is taught | by {name}", ("Who teaches {x}?", "Who is the teacher of {x}?", "With whom is {x}?", "Who gives {x}?", "Who leads {x}?", "Which teacher does {x}?", "Who runs the {x} class?")),
    ([f"a {service}" for service in SERVICES], "takes | {mins}", ("How long does {x} take?", "How much time does {x} need?", "How long is {x}?", "How many minutes is {x}?", "How long will I wait for {x}?", "When would {x} be done?", "I'd like {x}. How long is that?")),
    (WASTES, "is collected | on {day}", ("When is {x} collected?", "On which day do they collect {x}?", "What day is {x}?", "When do you pick up {x}?", "When does the {x} go?", "When do I put out {x}?", "Which day is for {x}?")),
    (WASTES, "goes | into the {colour} bin", ("Which bin is for {x}?", "Where does {x} go?", "Into which bin goes {x}?", "Where do I throw {x}?", "What colour is the bin for {x}?", "In which bin do I put {x}?", "Where do I put {x}?")),
    (PLURALS, "cost | {price}", ("How much are {x}?", "What do {x} cost?", "How much do {x} cost?", "What is the price of {x}?", "What do I pay for {x}?", "I need {x}. How much?", "How much do you take for {x}?", "Are {x} expensive?")),
    (PLURALS, "are | {where}", ("Where are {x}?", "Where do I get {x}?", "Where can I find {x}?", "I need {x}. Where are they?", "Where do you keep {x}?", "Where would I get {x}?", "Who has {x}?")),
    (STOCK, "arrive | on {day}", ("When do {x} arrive?", "When do you get {x}?", "On which day do {x} come?", "When will you have {x}?", "When can I buy {x}?", "What day do {x} come in?", "When are {x} there?")),
    ([f"the {goods}" for goods in GOODS], "costs | {price} a day", ("How much is {x} for a day?", "What does {x} cost a day?", "How much do I pay for {x}?", "What is the price of {x}?", "I want to rent {x}. What does it cost?", "How much is {x}?", "What's {x} per day?")),
    ([f"the {event}" for event in EVENTS], "is | on {date}", ("When is {x}?", "On what date is {x}?", "When does {x} take place?", "What day is {x}?", "When do you have {x}?", "Which date is {x}?", "I want to come to {x}. When is it?")),
    ([f"the {event}" for event in EVENTS], "starts | at {time}", ("When does {x} start?", "What time does {x} begin?", "When should I be at {x}?", "At what time is {x}?", "What time is {x}?", "When do I have to be there for {x}?", "How late does {x} start?")),
    ([f"the bus to {stop}" for stop in STOPS], "leaves | at {time}", ("When does {x} leave?", "What time does {x} go?", "At what time is {x}?", "When do I have to take {x}?", "When does {x} depart?", "When is {x}?", "How late does {x} leave?")),
    (GIVENS, "is | in room {num}", ("Where is {x}?", "In which room is {x}?", "Where do I find {x}?", "Which room is {x} in?", "What is the room of {x}?", "Where does {x} sit?", "How do I find {x}?")),
    (GIVENS, "looks after | the {facility}", ("What does {x} do?", "What is {x} responsible for?", "Who is {x}?", "What does {x} look after?", "What can I ask {x}?", "Which part is {x} in charge of?", "What's the job of {x}?")),
    ([f"a {service}" for service in SERVICES], "costs | {price} and takes {mins}", ("How long does {x} take?", "What does {x} cost?", "How much is {x}?", "How much time do I need for {x}?", "How long is {x}?", "What do I pay for {x}?", "What do you charge for {x}?")),
    ([f"{kind} {what}" for kind in ("standard", "express", "night", "bulk", "pallet", "island", "weekend", "same-day") for what in ("delivery", "shipping", "post")], "is | {price} and takes {days}", ("How long does {x} take?", "What does {x} cost?", "How much is {x}?", "How many days does {x} take?", "What do I pay for {x}?", "How fast is {x}?", "When does it come with {x}?")),
    ([f"the {room}" for room in ROOMS], "is | {where} and seats {num}", ("Where is {x}?", "How many people fit into {x}?", "How many does {x} seat?", "How do I find {x}?", "How big is {x}?", "Where can I find {x}?", "Which floor is {x} on?")),
    (PAPERS, "cost | {price} and take {days}", ("What do {x} cost?", "How long do {x} take?", "How much are {x}?", "When are {x} ready?", "What is the fee for {x}?", "How many days do {x} take?", "What do I pay for {x}?")),
    ([f"the {kind} {what}" for kind in ("single", "double", "family", "attic", "garden", "corner") for what in ("room", "flat", "cabin")], "costs | {price} a night", ("What does {x} cost?", "How much is {x}?", "What do we pay for {x}?", "What is {x} per night?", "How much a night is {x}?", "What do you charge for {x}?", "I'd like {x}. What does it cost?")),
    (GIVENS, "teaches | {course}", ("What does {x} teach?", "Which course does {x} give?", "Who is {x}?", "What can I learn from {x}?", "What does {x} do?", "What is the class of {x}?", "Which class has {x}?")),
    ([f"the {goods}" for goods in GOODS], "is | {colour}", ("What colour is {x}?", "Which colour has {x}?", "What does {x} look like?", "What color is {x}?", "In which colour do you have {x}?", "How does {x} look?", "What colour does {x} have?")),
)  # fmt: skip


class Clauses:
    """The same said of two or three things in one sentence, the later ones often without their verb."""

    def __init__(self, draw: Draw, style: Style) -> None:
        things, saying, self.questions = draw.pick(CLAUSES)
        shared, _, rest = saying.partition(" | ")
        chosen = draw.few(things, draw.pick((2, 2, 3)))
        self.told: dict[str, str] = {}
        clauses = []
        elided = draw.maybe(0.55)
        for number, thing in enumerate(chosen):
            value = style.filled(rest, {})
            self.told[thing] = capital(f"{thing} {shared} {value}.")
            clauses.append(f"{thing} {value}" if number and elided else f"{thing} {shared} {value}")
        joint = draw.pick((", ", "; ", " and ", ", and ")) if len(clauses) == 2 else ""
        self.text = capital(clauses[0] + joint + clauses[1] + "." if joint else listed(clauses) + ".")

    @property
    def labels(self) -> list[str]:
        return [thing.removeprefix("the ").removeprefix("a ") for thing in self.told]

    def ask(self, draw: Draw) -> Ask:
        thing = draw.pick(list(self.told))
        return Ask(capital(draw.pick(self.questions).format(x=thing)), self.told[thing])

    def miss(self, draw: Draw) -> Miss | None:
        things, _, questions = draw.pick(CLAUSES)
        mine = draw.pick(list(self.told))
        other = [one[2] for one in CLAUSES if mine in one[0] and not set(one[2]) & set(self.questions)]
        if other and draw.maybe(0.1):
            return Miss(capital(draw.pick(draw.pick(other)).format(x=mine)), "")
        thing = draw.pick(things)
        label = thing.removeprefix("the ").removeprefix("a ")
        return None if thing in self.told else Miss(capital(draw.pick(questions).format(x=thing)), label)


class Timetable:
    """Lines or sentences of courses with their day, time and teacher."""

    def __init__(self, draw: Draw, style: Style) -> None:
        teachers = [style.given() for _ in range(3)]
        self.rows = {
            course: (draw.pick(words.WEEKDAYS), style.time(7, 21), draw.pick(teachers))
            for course in draw.few(COURSES, draw.number(2, 5))
        }
        form = draw.pick(
            (
                "{d} {t} {c} with {g}",
                "{d} {t}: {c} ({g})",
                "{c}: {d} {t}, {g}",
                "{d}, {t}, {c}, {g}",
                "{c} with {g} on {d} at {t}",
                "{g} teaches {c} on {d} at {t}",
            )
        )
        self.lines = {
            course: capital(form.format(c=course, d=day, t=time, g=given))
            for course, (day, time, given) in self.rows.items()
        }
        head = draw.pick(("", "Timetable:\n", "Courses\n", "This week:\n", "Classes:\n"))
        self.text = (
            ". ".join(self.lines.values()) + "."
            if " teaches " in form or draw.maybe(0.15)
            else head + "\n".join(self.lines.values())
        )

    @property
    def labels(self) -> list[str]:
        return list(self.rows)

    def ask(self, draw: Draw) -> Ask:
        course = draw.pick(list(self.rows))
        day, _, given = self.rows[course]
        forms = [one for _, saying, questions in CLAUSES[5:7] for one in questions]
        if sum(row[0] == day for row in self.rows.values()) == 1 and draw.maybe(0.2):
            return Ask(
                draw.pick(
                    (
                        "What is on on {d}?",
                        "Which course is on {d}?",
                        "What can I do on {d}?",
                        "What do you have on {d}?",
                        "Is there a class on {d}?",
                        "What's on the timetable for {d}?",
                        "{d}, what is on?",
                    )
                ).format(d=day),
                f"{self.lines[course]}.",
            )
        if sum(row[2] == given for row in self.rows.values()) == 1 and draw.maybe(0.15):
            return Ask(
                draw.pick(
                    (
                        "What does {g} teach?",
                        "Which class does {g} give?",
                        "When is {g} there?",
                        "Who is {g}?",
                        "When can I come to {g}?",
                        "Which course is with {g}?",
                        "When does {g} teach?",
                    )
                ).format(g=given),
                f"{self.lines[course]}.",
            )
        return Ask(
            capital(
                draw.pick(
                    (
                        *forms,
                        "What time is {x}?",
                        "When does {x} start?",
                        "When is the {x} class?",
                        "I'd like to join {x}. When is it?",
                        "Who does {x}?",
                        "Who gives the {x} class?",
                        "At what time is {x}?",
                    )
                ).format(x=course)
            ),
            f"{self.lines[course]}.",
        )

    def miss(self, draw: Draw) -> Miss | None:
        course = draw.pick(COURSES)
        return (
            None
            if course in self.rows
            else Miss(
                draw.pick(
                    (
                        "When is {x}?",
                        "Who teaches {x}?",
                        "Do you have {x}?",
                        "What time is {x}?",
                        "Is there a {x} class?",
                    )
                ).format(x=course),
                course,
            )
        )


PLANS: Final = "Basic Plus Premium Solo Team Starter Pro Family Gold Silver Light Business Student Standard Max Mini Single Duo Bronze Studio Personal Club".split()


class Tariffs:
    """Plans with a price and what they include, in sentences, lines or a table."""

    def __init__(self, draw: Draw, style: Style) -> None:
        names = draw.few(PLANS, draw.number(2, 4))
        unit = draw.pick(("a month", "a year", "per month", "a week"))
        what = draw.pick(
            ("users", "classes a week", "GB", "visits", "projects", "guests", "lessons", "hours", "rooms", "devices")
        )
        self.kind = draw.pick(("plan", "plan", "membership", "package", "subscription", "ticket"))
        self.facts = {
            name: (
                style.price(),
                draw.pick(
                    (
                        f"{style.number(2, 60)} {what}",
                        f"{style.number(2, 60)} {what}",
                        f"no {what}",
                        f"unlimited {what}",
                    )
                ),
            )
            for name in names
        }
        self.unit, roll = unit, draw.chance()
        lead = draw.pick(("costs", "is", "costs"))
        said = {
            name: f"the {name} {self.kind} {lead} {cost} {unit} {draw.pick(('with', 'for', 'and has'))} {has}"
            for name, (cost, has) in self.facts.items()
        }
        self.answers = {name: capital(f"{said[name]}.") for name in names}
        if roll < 0.5:
            self.text = draw.pick((" ".join(self.answers.values()), capital("; ".join(said.values())) + "."))
            return
        self.answers = {
            name: f"The {name} {self.kind} costs {cost} {unit} with {has}." for name, (cost, has) in self.facts.items()
        }
        if roll < 0.75:
            self.text = "\n".join(
                [
                    f"| {self.kind} | {unit} | {what} |",
                    "|---|---|---|",
                    *(f"| {name} | {cost} | {has} |" for name, (cost, has) in self.facts.items()),
                ]
            )
        else:
            self.text = "\n".join(f"- {name}: {cost} {unit}, {has}" for name, (cost, has) in self.facts.items())

    @property
    def labels(self) -> list[str]:
        return list(self.facts)

    def ask(self, draw: Draw) -> Ask:
        name = draw.pick(list(self.facts))
        form = draw.pick(
            (
                "What does the {n} {k} cost?",
                "How much is the {n} {k}?",
                "What do I get with the {n} {k}?",
                "What's in the {n} {k}?",
                "How much is {n}?",
                "What does {n} cost?",
                "How much does the {n} {k} cost a month?",
                "What's the price of the {n} {k}?",
                "Tell me about the {n} {k}.",
                "What does the {n} {k} include?",
                "I'm thinking of the {n} {k}. What do I pay?",
                "What do you charge for {n}?",
                "What would the {n} {k} be per month?",
                "How many does the {n} {k} include?",
            )
        )
        return Ask(form.format(n=name, k=self.kind), self.answers[name])

    def miss(self, draw: Draw) -> Miss | None:
        name = draw.pick(PLANS)
        return None if name in self.facts else Miss(f"What does the {name} {self.kind} cost?", name)


OPENINGS: Final = (
    "You are the {r} of {o}.", "You are the {r} of {o}, a {p}.", "You answer the questions of guests at {o}.", "You work for {o}, a {p} in {c}.", "You help customers of {o}.", "{o}, facts for the {r}", "Role: {r} of {o}.", "# {o}", "# {o}, a {p}", "Welcome to {o}!",
    "You are {g}, the {r} of {o}.", "You are {g} of {o}.", "Your name is {g}. You help the guests of {o}.", "You are {g}, the voice of {o}.", "You are called {g} and answer for {o}.", "You are {g} and take calls for the {p} {o}.", "Front desk of {o}.", "You work at the counter of {o}.", "You inform visitors of {o}.", "{o}: what people ask", "You support customers of {o}, a {p}.", "Information about {o}, a {p}.", "Internal assistant of {o}.",
    "You take questions for {o} ({p}).", "You are the chat of {o}.", "You are the phone assistant of {o} in {c}.", "You guide visitors of {o}.", "You speak for {o}, a {p}.", "House rules of {o}", "You answer families and friends of {o}.", "The {p} {o}, desk for questions.", "You work for the {o}.",
)  # fmt: skip
ROLES: Final = "assistant;help desk;receptionist;service desk;night desk;phone assistant;welcome desk;chat bot;information point;customer service;help bot;front desk".split(
    ";"
)
HEADS: Final = (
    "Rules",
    "Prices",
    "Good to know",
    "Contact",
    "FAQ",
    "House rules",
    "Service",
    "Notes",
    "Facts",
    "Details",
    "What guests ask",
    "Info",
)
PLACES: Final = (
    *words.PLACES,
    *"school;vet's practice;campsite;town council;bus line;bike rental;estate agency;hairdresser's;wine bar;ski school;riding school;boat yard;retirement home;nursery;law firm;photo studio;locksmith;optician;job centre;allotment club;choir;car park;ferry;railway;apartment house;office building;factory;online shop;mail service;app;bank branch;food truck;market hall;theatre;castle;nature reserve;youth hostel".split(
        ";"
    ),
)


ANYWHERE: Final = frozenset(
    "what when where which have does could would need must from with there your they this that much long many time take takes cost costs should about some somebody anyone here come comes like know want only will mean your also late early first".split()
)


ALIKE: Final = [hides(rf"\b(?:{words})") for words in UNKNOWN["alike"]]


def is_strange(question: str, text: str) -> bool:
    """Whether the question has words of its own, none of which stands in the text in any form or as a word like it."""
    stems = {word[:5] for word in re.findall(r"[a-z]{4,}", question.lower()) if word not in ANYWHERE}
    if not stems or any(re.search(rf"\b{stem}", text.lower()) for stem in stems):
        return False
    return not any(alike.search(question) and alike.search(text) for alike in ALIKE)


THINGS: Final = tuple(
    dict.fromkeys(
        (*FACILITIES, *ROOMS, "pool", "lift", "tower", "boat", "ferry", "hall", "garden", "kitchen", "lake", "bus", "desk", "gate", "oven", "machine", "car park", "stage", "tent", "cabin", "office", "museum", "castle", "church")
    )
)  # fmt: skip


SENTENCE_END: Final = re.compile(r"\n|(?<=[a-z0-9][.!;|]) ")


class Business:
    """A system prompt of about `size` tokens about one business, and what can be asked about it."""

    def __init__(self, draw: Draw, size: int, more_facts: float = 0.0) -> None:
        """`more_facts`: the share of its sections that are written facts beside those that chance makes so."""
        style = self.style = Style(draw)
        place, title = draw.pick(PLACES), draw.title()
        if draw.maybe(0.2):
            title = f"{draw.proper()} {capital(place)}"
        opening, role, given = draw.pick(OPENINGS), draw.pick(ROLES), style.given()
        self.persona: str | None = given if "{g}" in opening else None
        self.office: str | None = f"the {role} of {title}" if "{r}" in opening else None
        article = "an" if place[0] in "aeiou" else "a"
        lead = opening.replace("a {p}", f"{article} {place}").format(r=role, o=title, p=place, c=draw.proper(), g=given)
        lines = draw.maybe(0.45)
        self.sections: list[Section] = []
        self.labels: list[str] = []
        room, told = max(2, size // 22), list[set[str]]()
        while room > 0:
            if more_facts and draw.maybe(more_facts):
                made: Section = Facts(draw, style, min(draw.number(1, 4), room), lines)
            else:
                made = self._section(draw, style, place, lines, room)
            about = [stems(line) for line in SENTENCE_END.split(made.text)]
            if any(label and label in self.labels for label in made.labels) or any(
                len(one & other) > 1 for one in about for other in told
            ):
                room -= 1  # a question about the one might be answered by the other
                continue
            told += about
            self.sections.append(made)
            self.labels += made.labels
            room -= max(1, len(made.text) // 60)
        self.text = self._layout(draw, lead, lines)

    def _section(self, draw: Draw, style: Style, place: str, lines: bool, room: int) -> Section:
        roll = draw.chance()
        if roll < 0.2:
            return Matters(draw, style, min(draw.number(1, 5), room), lines)
        if roll < 0.44:
            return Facts(draw, style, min(draw.number(1, 4), room), lines)
        if roll < 0.78:
            return Listed(draw, style, min(draw.number(1, 4), room), lines)
        if roll < 0.83:
            return Prices(draw, style, draw.number(2, max(2, min(6, room))))
        if roll < 0.92:
            return Week(draw, style, place.split()[-1])
        if roll < 0.95:
            return Clauses(draw, style)
        if roll < 0.97:
            return Payers(draw, style)
        return Tariffs(draw, style) if roll < 0.985 else Timetable(draw, style)

    def _layout(self, draw: Draw, lead: str, lines: bool) -> str:
        """Prose runs on; lines have a mark each; what already has lines of its own stands apart."""
        if not lines:
            parts: list[str] = []
            for made in self.sections:
                apart = "\n" in made.text and not isinstance(made, (Matters, Needs))
                text = made.text.replace("\n", " ")
                ended = text if text.endswith((".", "!", "?")) else text + "."
                parts.append(f"\n{made.text}\n" if apart else ended)
            return (
                " ".join([lead if lead.endswith((".", "!")) else f"{lead}\n", *parts])
                .replace("\n ", "\n")
                .replace(" \n", "\n")
                .strip()
            )
        mark = draw.pick(("- ", "- ", "* ", "", "", "• "))
        headed = draw.maybe(0.3)
        blocks = []
        for made in self.sections:
            own = "\n" in made.text and not isinstance(made, (Matters, Needs))
            text = made.text if own else "\n".join(mark + line for line in made.text.splitlines())
            head = f"{draw.pick(('', '## '))}{draw.pick(HEADS)}{draw.pick(('', ':'))}\n" if headed else ""
            blocks.append(head + text)
        return lead + draw.pick(("\n", "\n\n")) + draw.pick(("\n", "\n\n") if headed else ("\n",)).join(blocks)

    def ask(self, draw: Draw) -> Ask:
        made = draw.random.choices(self.sections, [len(one.labels) for one in self.sections])[0]
        return made.ask(draw)

    def miss(self, draw: Draw) -> str | None:
        """A question near one of its sections that has no answer, or one that hardly any prompt answers."""
        own, roll = draw.pick(self.sections), draw.chance()
        if roll < 0.35:
            return self._near(draw, own)
        if roll < 0.5:
            question = capital(self.style.filled(draw.pick(UNKNOWN["asked"]), {}))
            return question if is_strange(question, self.text) else None
        if roll < 0.58:
            question, _, told = draw.pick(UNKNOWN["guarded"]).partition(" | ")
            return None if hides(told).search(self.text) else capital(self.style.filled(question, {}))
        if roll < 0.75:
            other = own.other(draw, self.text) if isinstance(own, Listed) else None
            question, row = other or asked_by_name(draw)
            asked = " ".join(row if other else (question, *row))
            return capital(self.style.filled(question, {})) if is_strange(asked, self.text) else None
        if isinstance(own, Needs):
            own = Matters(draw, self.style, 1, False)
        missed = own.miss(draw)
        if missed is None or (
            missed.label and any(missed.label in label or label in missed.label for label in self.labels)
        ):
            return None
        if isinstance(own, Matters) and missed.label and not is_strange(missed.question, self.text):
            return None  # the prompt may well say it in other words
        return missed.question

    def _near(self, draw: Draw, own: Section) -> str | None:
        """What nobody told of a row of this section or of a thing that the prompt speaks of."""
        if isinstance(own, Listed) and draw.maybe(0.7):
            return own.near(draw, self.text)
        text = " ".join(made.text for made in self.sections).lower()
        things = [one for one in THINGS if f" {one}" in text]
        if not things:
            return None
        question, _, told = draw.pick(UNKNOWN["near"]).partition(" | ")
        return None if hides(told).search(self.text) else question.format(x=draw.pick(things))
