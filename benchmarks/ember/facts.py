"""What a system prompt can say and what can be asked about it: sections of facts, each with questions and answers.

The answers follow few rules, so that they hold for facts nobody thought of: an attribute is answered "The A is V.",
a thing's attribute "The A of T is V.", and a rule, an event or a story with its own sentence, word for word.
"""

# fmt: off  # lists of phrases read better unbroken

import json
import re
from dataclasses import dataclass, field
from typing import Final, Protocol

from benchmarks.ember import words
from benchmarks.ember.phrasing import attribute_form, held_out, which_form
from benchmarks.ember.values import Draw

UNKNOWN: Final = "I'm sorry, I don't know that."


@dataclass(frozen=True, slots=True)
class Ask:
    """A question and its answer. `fields` are the same as JSON; `follows` are short questions that lean on this one."""

    question: str
    answer: str
    fields: dict[str, str | None] = field(default_factory=dict)
    follows: list[tuple[str, str]] = field(default_factory=list)
    unique: str = ""  # what must stand only once in the whole prompt for the question to have one answer


@dataclass(frozen=True, slots=True)
class Miss:
    """A question without an answer, and what it is about."""

    question: str
    label: str


class Section(Protocol):
    """A part of a system prompt. No label of another section may overlap with its `labels`."""

    text: str

    @property
    def labels(self) -> list[str]:
        """What its facts are about, in the words of the text."""

    def ask(self, draw: Draw) -> Ask:
        """A question that the text answers."""

    def miss(self, draw: Draw) -> Miss | None:
        """A question that sounds like it but has no answer in the text; None where there is none."""


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def be(phrase: str) -> str:
    """'are' after a plural noun phrase, else 'is'; in 'number of rooms' the number counts."""
    last = phrase.partition(" of ")[0].split()[-1]
    return "are" if last.endswith("s") and not last.endswith(("ss", "us", "address", "is")) else "is"


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


# -- attributes: "the west parking fee is $12" ----------------------------------------------------------------------

KINDS: Final = {
    "money": "fee;price;charge;deposit;rate;fare;cost;surcharge;fine;budget;rent;reward;ticket price;entry fee;delivery fee;daily rate;salary;prize",
    "code": "code;PIN;access code;door code;gate code;ID;serial number;reference;reference number;voucher code;coupon code;discount code;safe code;"
    "order number;customer number;booking number;ticket number;invoice number;tax number;flight number;article number;license plate;alarm code;key",
    "phone": "phone number;hotline;emergency number;fax number;support line;mobile number;telephone number;extension",
    "email": "email address;email;contact address;mail address;support email",
    "site": "website;web page;booking page;status page;web address;link",
    "address": "address;postal address;street address;location;delivery address;billing address",
    "person": "manager;director;owner;contact;contact person;supervisor;teacher;coach;trainer;chef;doctor;author;architect;host;speaker;mayor;captain",
    "hour": "check-in time;check-out time;closing time;opening time;departure time;arrival time;starting time;breakfast time;curfew;start;end;cut-off time",
    "span": "hours;opening hours;office hours;visiting hours;breakfast hours;quiet hours;service hours;lunch hours",
    "date": "date;deadline;start date;end date;due date;expiry date;birthday;launch date;closing date;release date;anniversary",
    "count": "capacity;limit;number of seats;number of rooms;number of employees;maximum number of guests;group size;number of floors;quota;maximum",
    "duration": "warranty;notice period;loan period;waiting time;duration;delivery time;trial period;return period;retention period;travel time;timeout",
    "percent": "discount;tax rate;commission;interest rate;service charge;humidity;share;success rate",
    "measure": "weight;weight limit;size;length;height;storage limit;depth;width;distance;speed;weight allowance;power;memory",
    "password": "password;Wi-Fi password;network password;passphrase;guest password;username;login",
    "title": "name;network name;team name;project name;sponsor;supplier;brand;partner;motto;code name;provider;model",
    "version": "version;current version;latest version;minimum version;firmware version",
    "port": "port;server port;port number",
    "network": "IP address;server address;gateway address;host address",
    "path": "folder;data folder;backup folder;log folder;home folder",
    "colour": "color;flag color;wall color;badge color;zone color",
    "material": "material;surface;cover material",
    "weekday": "cleaning day;delivery day;closing day;market day;pickup day;day off;meeting day;weekly holiday",
    "amount_of": "limit;rate limit;stock;quota;staff;daily limit;storage;fleet;size;equipment;allowance;collection",
    "loose": "dress code;payment;language;policy;theme;topic;diet;format;method;reason;purpose;slogan;motto;view;style;goal;special;dish of the day;soup of the day;next step;"
    "currency;industry;base URL;region;time zone;platform;operating system;author;genre;ingredient;main ingredient;allergy;hobby;favorite food;department;status;transport",
    "year": "founding year;year of construction;opening year;model year",
}  # fmt: skip
NOUNS: Final = [(noun, kind) for kind, nouns in KINDS.items() for noun in nouns.split(";")]

STATE: Final = (
    "The {a} {is} {v}.", "Our {a} {is} {v}.", "The {a} {is} {v}.", "{A}: {v}.", "Please note that the {a} {is} {v}.", "The {a} here {is} {v}.",
    "The current {a} {is} {v}.", "As for the {a}, use {v}.", "Use {v} as the {a}.", "{V} {is} the {a}.", "The {a}, as of today, {is} {v}.",
    "If someone asks for the {a}, say {v}.", "The {a} was set to {v}.", "We have set the {a} to {v}.", "For the {a}, tell people {v}.",
    "You should know that the {a} {is} {v}.", "Guests often ask about the {a}: {v}.", "Remember: the {a} {is} {v}.", "When asked about the {a}, answer {v}.",
    "Customers need to know the {a}, which {is} {v}.", "This year the {a} {is} {v}.",
)  # fmt: skip
QUESTIONS: Final = (
    "What {is} the {a}?", "What {is} the {a}?", "What {is} your {a}?", "Can you tell me the {a}?", "Tell me the {a}.", "{A}?", "What would the {a} be?",
    "I need the {a}.", "Do you know the {a}?", "Could you give me the {a}?", "Give me the {a}, please.", "I forgot the {a}.", "I would like to know the {a}.",
    "Please look up the {a} for me.", "Which {a} do you have?", "May I have the {a}?", "What was the {a} again?", "Let me know the {a}.", "Any idea what the {a} {is}?",
    "Would you tell me the {a}?", "I am looking for the {a}.", "What's the {a}?", "Remind me of the {a}.", "What exactly {is} the {a}?", "Look up the {a}.", "Look up the {a}, please.", "Please tell me the {a}.", "Please check the {a} for me.", "Can you check the {a}?", "Do you have any {a}?", "Is there a {a}?", "What {is} the correct {a}?", "What {is} the right {a}?", "Find the {a} for me.", "Please find the {a}.", "Can you find the {a}?", "Is the {a} known?", "What {is} the {a} at the moment?", "Do you have the {a}?",
    "I have to know the {a}.", "Where can I find the {a}?", "Could you please tell me what the {a} {is}?", "Can you look up the {a}?", "the {a}?", "Help me with the {a}.",
    "My colleague asked me for the {a}.", "What do I need to know about the {a}?", "What should I write down as the {a}?", "Can I get the {a}?",
)  # fmt: skip
KIND_QUESTIONS: Final = {
    "money": ("How much {is} the {a}?", "How high {is} the {a}?", "How much do I pay for the {a}?", "What does the {a} come to?", "How big {is} the {a}?", "How many {cur} {is} the {a}?", "How expensive {is} the {a}?"),
    "person": ("Who {is} the {a}?", "Who's the {a}?", "Who {is} your {a}?", "Who works as the {a}?", "What's the name of the {a}?", "Who do you have as {a}?", "Tell me who the {a} {is}."),
    "hour": ("When {is} the {a}?", "What time {is} the {a}?", "At what time {is} the {a}?", "When exactly {is} the {a}?", "What hour {is} the {a}?", "How late {is} the {a}?", "When would the {a} be?"),
    "span": ("When {is} the {a}?", "What {is} the {a}?", "From when to when {is} the {a}?", "Tell me about the {a}.", "When exactly {is} the {a}?", "What about the {a}?", "Which times {is} the {a}?"),
    "date": ("When {is} the {a}?", "What day {is} the {a}?", "On which date {is} the {a}?", "When exactly {is} the {a}?", "What date {is} the {a}?", "When do we have the {a}?", "Which day {is} the {a}?"),
    "count": ("How high {is} the {a}?", "How large {is} the {a}?", "How big {is} the {a}?", "What exactly {is} the {a}?", "How much {is} the {a}?", "What number {is} the {a}?", "What {is} the exact {a}?"),
    "duration": ("How long {is} the {a}?", "How long does the {a} last?", "How long {is} your {a}?", "What length {is} the {a}?", "How much time {is} the {a}?", "How long exactly {is} the {a}?", "How many days {is} the {a}?"),
    "percent": ("How high {is} the {a}?", "How much {is} the {a}?", "How many percent {is} the {a}?", "How large {is} the {a}?", "What percentage {is} the {a}?", "How big {is} the {a}?", "How low {is} the {a}?"),
    "phone": ("What number {is} the {a}?", "How do I reach the {a}?", "Which number {is} the {a}?", "What do I dial for the {a}?", "Where do I call for the {a}?", "How can I call the {a}?", "What {is} the number of the {a}?"),
    "weekday": ("When {is} the {a}?", "Which day {is} the {a}?", "On which day {is} the {a}?", "What day {is} the {a}?", "What weekday {is} the {a}?", "When do you have the {a}?", "Which weekday {is} the {a}?"),
    "address": ("Where {is} the {a}?", "What {is} the {a}?", "Where exactly {is} the {a}?", "What exactly {is} the {a}?", "Which street {is} the {a}?", "Where would the {a} be?", "In which street {is} the {a}?"),
}  # fmt: skip


NEVER_ASKED: Final = held_out([QUESTIONS, *KIND_QUESTIONS.values()])
COUNTS: Final = (
    "We have {v} {x}.",
    "There are {v} {x}.",
    "The place has {v} {x}.",
    "You find {v} {x} here.",
    "Our house has {v} {x}.",
    "It has {v} {x}.",
    "With {v} {x} there is room for all.",
    "{v} {x} are here for you.",
    "We offer {v} {x}.",
)
HOW_MANY: Final = (
    "How many {x} do you have?", "How many {x} are there?", "How many {x}?", "What's the number of {x}?", "Tell me how many {x} you have.", "How many {x} does it have?", "How many {x} can I count on?",
    "Do you know how many {x} there are?", "how many {x} do you have", "How many {x} have you got?", "How many {x} are available?", "Can you tell me how many {x} there are?", "How many {x} do we have?", "Count of {x}?",
    "Exactly how many {x} are there?", "How many {x} would that be?", "How many {x} can I find there?", "What number of {x} do you have?", "Do you have many {x}?", "How many {x} exist?", "How many {x} do you have in all?",
)  # fmt: skip


def noun_phrase(draw: Draw) -> tuple[str, str]:
    """An attribute and the kind of its value; half of them with a modifier that makes thousands of them."""
    noun, kind = draw.pick(NOUNS)
    roll = draw.chance()
    if draw.maybe(0.04):
        return (
            f"number of {draw.pick((draw.pick(words.THINGS), draw.pick(words.COUNTED), draw.pick(words.COUNTED))).removesuffix('s')}s",
            "count",
        )
    if roll < 0.2:
        return noun, kind
    if roll < 0.4:
        modifier = draw.pick(words.ADJECTIVES)
    elif roll < 0.6:
        modifier = draw.pick(words.THINGS)
    elif roll < 0.7:
        modifier = draw.pick(words.COMMON)
    elif roll < 0.82:
        modifier = draw.invented()
    elif roll < 0.9:
        modifier = draw.proper()
    else:
        modifier = f"{draw.pick(words.ADJECTIVES)} {draw.pick(words.THINGS)}"
    return f"{modifier} {noun}", kind


def value_of(draw: Draw, kind: str) -> str:
    """A value of one of Draw's kinds; prices now and then with what they are for."""
    if kind == "money" and draw.maybe(0.15):
        return f"{draw.money()} per {draw.pick(('night', 'day', 'month', 'person', 'hour', 'year', 'item', 'week', 'guest', 'kilo'))}"
    made: str = getattr(draw, kind)()
    return made


def generic_question(draw: Draw, attribute: str, kind: str) -> str:
    own = KIND_QUESTIONS.get(kind)
    if draw.maybe(0.3):
        form = attribute_form(draw, kind, NEVER_ASKED)
    else:
        form = draw.phrase(own) if own and draw.maybe(0.4) else draw.phrase(QUESTIONS)
    if attribute.startswith("number of ") and draw.maybe(0.6):
        return draw.phrase(HOW_MANY).format(x=attribute.removeprefix("number of "))
    plural = be(attribute)
    currency = {"$": "dollars", "€": "euros", "£": "pounds"}.get(draw.currency, "euros")
    return form.format(a=attribute, A=capital(attribute), cur=currency, **{"is": plural})


class Attributes:
    """Single facts, as prose, as a list of keys and values, or as JSON."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.facts: dict[str, tuple[str, str]] = {}
        while len(self.facts) < count:
            attribute, kind = noun_phrase(draw)
            self.facts.setdefault(attribute, (kind, value_of(draw, kind)))
        form = draw.chance()
        if form < 0.5:
            self.text = draw.pick((" ", " ", "\n")).join(self._sentences(draw))
        elif form < 0.9:
            mark, colon = draw.pick(("- ", "* ", "", "", "• ")), draw.pick((": ", ": ", ": ", " = ", " - ", " is "))
            shown = capital if draw.maybe(0.7) else str
            head = draw.pick(("", "", "Facts:\n", "Good to know:\n", "Details:\n", "## Facts\n", "Key facts:\n"))
            self.text = head + "\n".join(f"{mark}{shown(a)}{colon}{v}" for a, (_, v) in self.facts.items())
        else:
            joint = draw.pick((" ", "_"))
            told = {a.replace(" ", joint): v for a, (_, v) in self.facts.items()}
            self.text = json.dumps(told, ensure_ascii=False, indent=draw.pick((None, None, 1, 2)))

    def _sentences(self, draw: Draw) -> list[str]:
        """A sentence for each fact; in some sections two or three facts share one."""
        left, told = list(self.facts), []
        shares = draw.pick((0.0, 0.0, 0.5, 0.9))
        while left:
            count = draw.pick((2, 2, 3)) if draw.maybe(shares) else 1
            taken, left = left[:count], left[count:]
            if len(taken) == 1:
                told.append(self._sentence(draw, taken[0]))
                continue
            form = draw.pick(
                (
                    "the {a} {i} {v}",
                    "the {a} {i} {v}",
                    "our {a} {i} {v}",
                    "{v} {i} the {a}",
                    "use {v} as the {a}",
                    "the {a} {v}",
                )
            )
            parts = [form.format(a=a, i=be(a), v=self.facts[a][1]) for a in taken]
            joint = draw.pick((" and ", ", and ", ", while ", "; ", ", but ", " and "))
            told.append(
                capital(
                    draw.pick(("", "", "", "please note that ", "here "))
                    + ", ".join(parts[:-1])
                    + joint
                    + parts[-1]
                    + "."
                )
            )
        return told

    def _sentence(self, draw: Draw, attribute: str) -> str:
        value = self.facts[attribute][1]
        if attribute.startswith("number of ") and draw.maybe(0.8):
            return draw.pick(COUNTS).format(v=value, x=attribute.removeprefix("number of "))
        form = draw.phrase(STATE)
        return form.format(a=attribute, A=capital(attribute), v=value, V=capital(value), **{"is": be(attribute)})

    @property
    def labels(self) -> list[str]:
        return list(self.facts)

    def ask(self, draw: Draw) -> Ask:
        attribute = draw.pick(list(self.facts))
        kind, value = self.facts[attribute]
        follows = [
            (draw.phrase(ALSO).format(a=other), self._answer(other))
            for other in draw.few(list(self.facts), 3)
            if other != attribute
        ]
        if kind == "person" and draw.maybe(0.25):
            form = draw.phrase(
                (
                    "Who is {v}?",
                    "Who's {v}?",
                    "What does {v} do?",
                    "Tell me who {v} is.",
                    "Do you know {v}?",
                    "What is the role of {v}?",
                    "And who is {v}?",
                )
            )
            return Ask(form.format(v=value), f"{value} is the {attribute}.", unique=value)
        return Ask(generic_question(draw, attribute, kind), self._answer(attribute), {attribute: value}, follows)

    def _answer(self, attribute: str) -> str:
        return f"The {attribute} {be(attribute)} {self.facts[attribute][1]}."

    def miss(self, draw: Draw) -> Miss | None:
        """Half of them share a word with a fact: the other half of its attribute differs."""
        for _ in range(20):
            attribute, kind = noun_phrase(draw)
            if draw.maybe(0.6):
                near = draw.pick(list(self.facts))
                if " " in near:
                    modifier, noun = near.split(" ", 1)
                    attribute = (
                        f"{modifier} {attribute.split(' ')[-1]}"
                        if draw.maybe(0.5)
                        else f"{draw.pick(words.ADJECTIVES)} {noun}"
                    )
                    kind = self.facts[near][0] if attribute.endswith(noun) else kind
            if not any(attribute in known or known in attribute for known in self.facts):
                return Miss(generic_question(draw, attribute, kind), attribute)
        return None


ALSO: Final = (
    "And the {a}?", "and the {a}?", "What about the {a}?", "How about the {a}?", "And what is the {a}?", "And your {a}?", "Also the {a}, please.", "And also the {a}.",
    "Okay, and what is the {a}?", "Then the {a}?", "Fine, and the {a}?", "What's the {a} then?", "Also the {a}?", "And how about the {a}?", "Good. What about the {a}?", "Okay, and the {a}?", "Thanks. And the {a}?", "the {a} too?", "And for the {a}?", "Now the {a}.", "Great, and what about the {a}?",
)  # fmt: skip


# -- facts that people ask about in their own words -----------------------------------------------------------------

# attribute | kind | statements | questions. The answer is "The {attribute} is {value}." like every attribute's.
WELL_KNOWN: Final = """
Wi-Fi password | password | The Wi-Fi password is {v}. / Our Wi-Fi uses the password {v}. / Guests log in to the Wi-Fi with {v}. / Wi-Fi password: {v}. / To get online, use the password {v}. | What's the Wi-Fi password? / How do I get online? / How can I use the Wi-Fi? / What's the password for the wifi? / Which password do I need for the internet? / How do I connect to the internet? / What do I type in to use the Wi-Fi?
address | address | You find us at {v}. / We are at {v}. / Our address is {v}. / Address: {v}. / Come and see us at {v}. / We are located at {v}. / The shop is at {v}. | Where are you? / Where can I find you? / Where are you located? / What's your address? / How do I find you? / In which street are you? / Where do I have to go? / Where is the place? / Can you tell me where you are? / Where can I come to see you?
phone number | phone | You can call us at {v}. / Our phone number is {v}. / Phone: {v}. / Reach us by phone at {v}. / Call {v} for help. / The number to call is {v}. | How can I call you? / What's your phone number? / What number can I call? / How do I reach you by phone? / Can I call you? / Which number do I dial? / Do you have a telephone number? / What is the number to call?
email address | email | Write to {v}. / Our email address is {v}. / Send an email to {v}. / Email: {v}. / You can reach us by email at {v}. / Mail goes to {v}. | What's your email? / Where can I write to? / How do I reach you by email? / Which email address do you have? / Where do I send an email? / To which address can I send my mail? / How can I write to you? / What is your email address?
website | site | Our website is {v}. / Visit {v}. / Everything is online at {v}. / Website: {v}. / See {v} for more. / We are on the web at {v}. | What's your website? / Do you have a website? / Where can I read more online? / Where are you on the web? / What is the web address? / Which page can I visit? / What is your page on the internet?
manager | person | {v} is the manager. / The manager is {v}. / The place is run by {v}. / Manager: {v}. / {v} runs the place. / Our manager is called {v}. | Who is the manager? / Who runs the place? / Who is in charge? / Who's the boss here? / What is the manager called? / What's the name of the manager? / Who manages this? / Who is your manager?
owner | person | {v} owns the place. / The owner is {v}. / It belongs to {v}. / Owner: {v}. / The owner's name is {v}. / We belong to {v}. | Who is the owner? / Who owns the place? / Who does it belong to? / Whose place is this? / What is the owner called? / What's the owner's name? / Who has owned this?
check-in time | hour | Check-in is from {v}. / Guests can check in from {v}. / You may check in at {v}. / Check-in: {v}. / Rooms are ready at {v}. / Check-in starts at {v}. | When can I check in? / What time is check-in? / From when can I check in? / When is the room ready? / How early can I check in? / At what time can we check in? / When do you let guests check in?
check-out time | hour | Check-out is until {v}. / Guests must check out by {v}. / Please leave the room by {v}. / Check-out: {v}. / You must check out before {v}. / Check-out ends at {v}. | When do I have to check out? / What time is check-out? / Until when can I stay? / When must I leave the room? / How late can I check out? / By what time do we check out? / What is the latest time to check out?
breakfast time | span | Breakfast is served from {v}. / You get breakfast from {v}. / Breakfast: {v}. / There is breakfast from {v}. / We serve breakfast {v}. / The breakfast is on from {v}. | When is breakfast? / What time is breakfast? / When can I have breakfast? / When do you serve breakfast? / At what time is breakfast served? / From when to when is breakfast? / When can we eat in the morning?
delivery fee | money | Delivery costs {v}. / We deliver for {v}. / Delivery fee: {v}. / The fee for a delivery is {v}. / We charge {v} for delivery. / Shipping is {v}. | How much is delivery? / What does delivery cost? / What do you charge for delivery? / How much do I pay for shipping? / How much is shipping? / What's the fee for delivery? / What does it cost to have it delivered?
delivery time | duration | Delivery takes {v}. / We deliver within {v}. / Orders arrive in {v}. / Delivery time: {v}. / It takes {v} to deliver an order. / Your parcel arrives after {v}. | How long does delivery take? / When will my order arrive? / How fast do you deliver? / How long does shipping take? / How long until my parcel arrives? / How many days does delivery take? / How soon do I get my order?
return period | duration | You can return items within {v}. / Returns are accepted for {v}. / Return period: {v}. / Goods may be sent back within {v}. / We take things back for {v}. / You have {v} to return an item. | How long can I return items? / Until when can I send something back? / What's your return policy? / How long do I have to return something? / Within how many days can I return things? / How much time do I have for a return? / For how long do you take things back?
warranty | duration | Our warranty lasts {v}. / There is a warranty of {v}. / Warranty: {v}. / We give {v} of warranty. / Everything has {v} warranty. / The warranty covers {v}. | How long is the warranty? / What warranty do you give? / How long does the warranty last? / Is there a warranty? / For how long is it covered? / How many months of warranty do I get? / How much warranty do you offer?
parking fee | money | Parking costs {v}. / You can park for {v}. / Parking fee: {v}. / We charge {v} for parking. / A parking spot is {v}. / The parking lot costs {v}. | How much is parking? / What does parking cost? / What do you charge for parking? / How much do I pay to park? / Is parking expensive? / What is the price of parking? / What does it cost to park here?
entry fee | money | Entry costs {v}. / Admission is {v}. / Entry fee: {v}. / Tickets are {v}. / You pay {v} to get in. / A visit costs {v}. | How much is a ticket? / What does entry cost? / How much is admission? / What do I pay to get in? / What's the entry fee? / How expensive is a visit? / What does it cost to get in?
founding year | year | We were founded in {v}. / Founded in {v}. / The company was started in {v}. / We have been here since {v}. / It all began in {v}. / Established {v}. | When were you founded? / Since when do you exist? / How old is the company? / In which year were you founded? / When was it founded? / What year did it start? / Since when have you been here?
founder | person | It was founded by {v}. / The founder is {v}. / {v} started the company. / Founder: {v}. / {v} founded us. / The founder's name is {v}. | Who founded it? / Who is the founder? / Who started the company? / Who began all this? / What is the founder called? / What's the founder's name? / By whom was it founded?
door code | code | The door code is {v}. / To open the door, type {v}. / Door code: {v}. / Enter {v} at the door. / The door opens with {v}. / Use {v} at the front door. | What's the door code? / How do I open the door? / What do I type at the door? / Which code opens the door? / How do I get in? / What is the code for the door? / How can I open the front door?
discount code | code | Use {v} for a discount. / The discount code is {v}. / Discount code: {v}. / With the code {v} you pay less. / Customers save money with the code {v}. / Enter {v} to get a discount. | Do you have a discount code? / What's the discount code? / How do I get a discount? / Which code gives me a discount? / Is there a voucher code? / How can I save money? / What code do I enter to pay less?
loan period | duration | Books can be borrowed for {v}. / The loan period is {v}. / You may keep books for {v}. / Loan period: {v}. / Every loan lasts {v}. / Items are lent for {v}. | How long can I borrow a book? / How long is the loan period? / How long may I keep a book? / When do I have to bring a book back? / For how long can I borrow things? / How long does a loan last? / How many weeks can I keep a book?
capacity | count | There is room for {v} people. / We have space for {v} guests. / Capacity: {v}. / The place holds {v} people. / At most {v} people fit in. / We seat {v} people. | How many people fit in? / How many guests can you take? / How big is the place? / How many people can come? / What is the capacity? / For how many people do you have space? / How many can you seat?
minimum age | count | You must be at least {v} years old. / The minimum age is {v}. / Minimum age: {v}. / Only people over {v} may enter. / Nobody under {v} is let in. / Visitors have to be {v} or older. | How old do I have to be? / What is the minimum age? / Is there an age limit? / From what age can I come? / How old must visitors be? / At what age is it allowed? / How old do you have to be to get in?
meeting point | spot | The meeting point is {v}. / We meet {v}. / Meeting point: {v}. / Everyone meets {v}. / The group gathers {v}. / Please wait for us {v}. | Where do we meet? / Where is the meeting point? / Where should I go to meet you? / Where does the group meet? / Where do I find the group? / Where does everyone meet? / Where are we going to meet?
toilet | spot | The toilet is {v}. / You find the toilet {v}. / Toilet: {v}. / There is a toilet {v}. / Toilets are {v}. / The bathroom is {v}. | Where is the toilet? / Where is the bathroom? / Where can I find a toilet? / Is there a toilet? / Where are the toilets? / Where can I wash my hands? / Which way is the toilet?
lost and found | spot | The lost and found is {v}. / Lost items are kept {v}. / Lost and found: {v}. / Things that were found are {v}. / We keep lost things {v}. / Found objects wait for you {v}. | Where is the lost and found? / I lost my bag. Where can I look? / Where are lost items kept? / Where do you keep lost things? / I have lost something. Where do I go? / I left my umbrella here. Where is it? / Where can I get back what I lost?
current version | version | The current version is {v}. / The latest release is {v}. / Current version: {v}. / We are on version {v}. / Version {v} is out now. / The software is at version {v}. | What's the current version? / Which version is the latest? / What version are you on? / What is the latest release? / Which version should I install? / What's the newest version? / Which release is current?
default port | port | The server listens on port {v}. / The default port is {v}. / Default port: {v}. / It runs on port {v}. / Connect to port {v}. / By default it uses port {v}. | What port does it use? / Which port is the default? / On which port does it run? / What port does the server listen on? / What is the port? / Which port do I connect to? / What port do I need?
head chef | person | The head chef is {v}. / {v} cooks for us. / Head chef: {v}. / Our kitchen is led by {v}. / {v} leads the kitchen. / In the kitchen, {v} is in charge. | Who is the head chef? / Who cooks? / Who is in the kitchen? / Who leads the kitchen? / What is the chef called? / What's the chef's name? / Who makes the food?
cancellation period | duration | You can cancel up to {v} before. / Cancel at least {v} in advance. / Cancellation period: {v}. / Bookings can be cancelled until {v} before. / Free cancellation up to {v} before. / A booking is cancelled for free {v} before. | How long before can I cancel? / What's your cancellation policy? / When can I still cancel? / Can I cancel my booking? / Until when is cancelling free? / How late can I cancel? / By when do I have to cancel?
monthly fee | money | It costs {v} per month. / The monthly fee is {v}. / Monthly fee: {v}. / Members pay {v} a month. / A membership is {v} per month. / The plan is {v} a month. | What does it cost per month? / How much is it a month? / What is the monthly fee? / How much do members pay? / How much is a membership? / What do I pay every month? / What does a membership cost?
""".strip()


def _well_known() -> list[tuple[str, str, list[str], list[str]]]:
    rows = []
    for line in WELL_KNOWN.splitlines():
        attribute, kind, states, questions = (part.strip() for part in line.split(" | "))
        rows.append((attribute, kind, states.split(" / "), questions.split(" / ")))
    return rows


KNOWN: Final = _well_known()


CONTACTS: Final = {
    "address": "find us at {v}",
    "phone number": "call {v}",
    "email address": "write to {v}",
    "website": "visit {v}",
}
REACHED: Final = (
    "You can reach us at {v}.",
    "Contact: {v}.",
    "Reach us at {v}.",
    "We are at {v}.",
    "Questions? {v}.",
    "Contact us at {v}.",
    "Get in touch: {v}.",
    "For questions use {v}.",
)


class Everyday:
    """Facts that most places have, with the questions that people really ask."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.chosen = draw.few(KNOWN, count)
        if draw.maybe(0.3):
            near = draw.few([row for row in KNOWN if row[0] in CONTACTS], draw.number(2, 4))
            self.chosen = draw.few([*near, *(row for row in self.chosen if row[0] not in CONTACTS)], len(KNOWN))
        self.told = {attribute: value_of(draw, kind) for attribute, kind, _, _ in self.chosen}
        kind = draw.chance()
        if kind < 0.75:
            joint = draw.pick((" ", " ", "\n", "\n- "))
            lines = self._lines(draw)
            self.text = ("- " if joint == "\n- " else "") + joint.join(lines)
        else:
            colon = draw.pick((": ", " = ", " - "))
            self.text = "\n".join(f"{capital(attribute)}{colon}{value}" for attribute, value in self.told.items())

    @property
    def labels(self) -> list[str]:
        return list(self.told)

    def ask(self, draw: Draw) -> Ask:
        attribute, kind, _, questions = draw.pick(self.chosen)
        question = draw.phrase(questions) if draw.maybe(0.8) else generic_question(draw, attribute, kind)
        follows = [
            (draw.phrase(ALSO).format(a=other), self._answer(other))
            for other in draw.few(list(self.told), 3)
            if other != attribute
        ]
        return Ask(question, self._answer(attribute), {attribute: self.told[attribute]}, follows)

    def _lines(self, draw: Draw) -> list[str]:
        """A sentence for each fact; now and then the ways to reach the place, or any two facts, share one."""
        rows, lines = list(self.chosen), []
        near = [attribute for attribute, _, _, _ in rows if attribute in CONTACTS]
        if len(near) > 1 and draw.maybe(0.7):
            rows = [row for row in rows if row[0] not in near]
            if draw.maybe(0.5):
                values, joint = (
                    [self.told[attribute] for attribute in near],
                    draw.pick((" or ", " and ", ", ", " / ", " or at ")),
                )
                lines.append(draw.pick(REACHED).format(v=", ".join(values[:-1]) + joint + values[-1]))
            else:
                parts = [CONTACTS[attribute].format(v=self.told[attribute]) for attribute in near]
                lines.append(
                    draw.pick(("You can {p}.", "To reach us, {p}.", "Please {p}.", "Guests may {p}.")).format(
                        p=", ".join(parts[:-1]) + draw.pick((" or ", " and ", ", or ")) + parts[-1]
                    )
                )
        for attribute, _, states, _ in rows:
            line = draw.pick(states).format(v=self.told[attribute])
            if lines and ": " not in line and ": " not in lines[-1] and draw.maybe(0.2):
                small = line if line.startswith(self.told[attribute]) else line[:1].lower() + line[1:]
                lines[-1] = lines[-1].removesuffix(".") + draw.pick((" and ", ", and ", ", ", "; ")) + small
            else:
                lines.append(line)
        return draw.few(lines, len(lines))

    def _answer(self, attribute: str) -> str:
        return f"The {attribute} {be(attribute)} {self.told[attribute]}."

    def miss(self, draw: Draw) -> Miss | None:
        absent = [row for row in KNOWN if row[0] not in self.told]
        attribute, _, _, questions = draw.pick(absent)
        return Miss(draw.phrase(questions), attribute)


# -- opening hours ---------------------------------------------------------------------------------------------------

OPEN_ON: Final = (
    "When are you open on {d}?", "What are your hours on {d}?", "When are you open on {d}s?", "Opening hours on {d}?", "What are the opening hours on {d}?",
    "How long are you open on {d}?", "Which hours do you have on {d}?", "Can I come on {d}?", "Are you open on {d}?", "Are you open on {d}s?", "{d} hours?",
    "Are you there on {d}?", "What times on {d}?", "When could I visit on {d}?", "Is {d} fine for a visit?", "Do you work on {d}?", "Would {d} be possible?", "Tell me the hours for {d}.", "I'd like to visit on {d}.", "Could I come on {d}?",
    "From when to when are you open on {d}?", "Are you closed on {d}?", "Is it open on {d}?", "Do you open on {d}?", "Can I visit you on {d}?", "I want to come on {d}. When are you open?", "When can I come on {d}?",
)  # fmt: skip
YES_NO: Final = ("Can ", "Are ", "Is ", "Do ")
OPENS: Final = ("When can I come in on {d}?", "Opening time on {d}?", "When is the earliest time to come on {d}?", "What is the opening time on {d}?", "When do the doors open on {d}?", "How early can I come on {d}?", "On {d}, when do you open?", "When do you open on {d}?", "What time do you open on {d}?", "From when are you open on {d}?", "When does it open on {d}?", "How early do you open on {d}?", "At what time do you open on {d}?", "When do you start on {d}?")  # fmt: skip
CLOSES: Final = ("When do I have to leave on {d}?", "Closing time on {d}?", "How long can I stay on {d}?", "What is the closing time on {d}?", "When do the doors close on {d}?", "How late can I come on {d}?", "On {d}, when do you close?", "When do you close on {d}?", "What time do you close on {d}?", "Until when are you open on {d}?", "When does it close on {d}?", "How late are you open on {d}?", "At what time do you close on {d}?", "When do you shut on {d}?")  # fmt: skip
ALL_HOURS: Final = ("When are you open?", "What are your opening hours?", "When can I come?", "What are your hours?", "Opening hours?", "Which days are you open?", "Tell me your hours.")  # fmt: skip
AND_ON: Final = ("So what about {d}?", "Okay. And {d}?", "Then on {d}?", "And then on {d}?", "Also {d}?", "And how about {d}?", "Now {d}?", "And on {d}?", "and on {d}?", "What about {d}?", "And {d}?", "How about {d}?", "And on {d}s?", "Okay, and on {d}?", "{d}?", "Thanks, and {d}?", "and {d}?", "Also on {d}?", "And for {d}?", "What about on {d}?", "Then what about {d}?")  # fmt: skip


class Hours:
    """A week of opening hours, told in runs of days that share them."""

    def __init__(self, draw: Draw) -> None:
        cuts = sorted(draw.few(range(1, 7), draw.pick((1, 1, 2, 2, 3))))
        runs = [list(words.WEEKDAYS[a:b]) for a, b in zip([0, *cuts], [*cuts, 7], strict=True)]
        self.days: dict[str, tuple[str, str] | None] = {}
        for run in runs:
            hours = None if draw.maybe(0.25) else (draw.hour(5, 11), draw.hour(13, 23))
            self.days.update(dict.fromkeys(run, hours))
        if draw.maybe(0.35):
            self.days[draw.pick(words.WEEKDAYS)] = None
        if not any(self.days.values()):
            self.days["Friday"] = (draw.hour(5, 11), draw.hour(13, 23))
        runs = []
        for day in words.WEEKDAYS:
            if runs and self.days[runs[-1][-1]] == self.days[day]:
                runs[-1].append(day)
            else:
                runs.append([day])
        through, to = draw.pick((" to ", "–", "-", " through ")), draw.pick((" to ", "–", " - ", "-", " until "))
        short = draw.maybe(0.2)
        at = draw.pick((" ", ": ", " from ")) if to != " to " else " from "
        style = draw.chance()
        parts = []
        for run in runs:
            names = [day[:3] if short else day for day in run]
            label = (
                names[0]
                if len(run) == 1
                else f"{names[0]}{through}{names[-1]}"
                if len(run) > 2
                else f"{names[0]} and {names[1]}"
            )
            hours = self.days[run[0]]
            if hours is not None:
                parts.append(f"{label}{at}{hours[0]}{to}{hours[1]}")
            elif style >= 0.35 or draw.maybe(0.6):
                parts.append(f"{label}: closed" if style >= 0.35 else f"closed on {label}")
        self.listing = (
            listed(parts)
            if style < 0.35
            else "\n".join(parts)
            if style < 0.6
            else ", ".join(parts)
            if style < 0.8
            else "; ".join(parts)
        )
        if style < 0.35:
            head = draw.pick(
                (
                    "We are open ",
                    "Opening hours: ",
                    "Our opening hours are ",
                    "The place is open ",
                    "Hours: ",
                    "We open ",
                )
            )
        elif style < 0.6:
            head = draw.pick(("Opening hours:\n", "Hours:\n", "## Opening hours\n", "When we are open:\n"))
        else:
            head = draw.pick(("Opening hours: ", "Hours: ", "Open: ", "Our hours are as follows: "))
        self.text = head + self.listing + ("." if style < 0.35 or (draw.maybe(0.3) and style >= 0.6) else "")

    def _answer(self, form: str, day: str) -> str:
        hours = self.days[day]
        if hours is None:
            return f"We are closed on {day}."
        if form == "open":
            return f"On {day} we open at {hours[0]}."
        if form == "close":
            return f"On {day} we close at {hours[1]}."
        return f"On {day} we are open from {hours[0]} to {hours[1]}."

    @property
    def labels(self) -> list[str]:
        return ["hours", "opening", "closing time"]

    def ask(self, draw: Draw) -> Ask:
        day, roll = draw.pick(words.WEEKDAYS), draw.chance()
        if roll < 0.12:
            listing = self.listing.replace("\n", ", ")
            return Ask(draw.phrase(ALL_HOURS), f"Our opening hours: {listing}.", {"opening hours": listing})
        form, questions = ("span", OPEN_ON) if roll < 0.6 else ("open", OPENS) if roll < 0.8 else ("close", CLOSES)
        others = [other for other in draw.few(words.WEEKDAYS, 3) if other != day]
        follows = [(draw.phrase(AND_ON).format(d=other), self._answer(form, other)) for other in others]
        hours = self.days[day]
        fields: dict[str, str | None] = {"opens": hours[0], "closes": hours[1]} if hours else {}
        return Ask(draw.phrase(questions).format(d=day), self._answer(form, day), fields, follows)

    def miss(self, draw: Draw) -> Miss | None:
        form = draw.phrase(
            (
                "Are you open on {x}?",
                "What are your hours on {x}?",
                "When do you close on {x}?",
                "Do you open on {x}?",
                "Are you closed on {x}?",
                "When are you open on {x}?",
                "Can I come on {x}?",
            )
        )
        day = draw.pick(
            (
                "Christmas",
                "New Year's Day",
                "public holidays",
                "Easter",
                "the national holiday",
                "Christmas Eve",
                "bank holidays",
            )
        )
        return Miss(form.format(x=day), day)


# -- a catalogue: things with attributes -----------------------------------------------------------------------------

COLUMNS: Final = (
    ("price", "money"), ("price", "money"), ("code", "code"), ("color", "colour"), ("weight", "measure"), ("stock", "count"), ("material", "material"),
    ("shelf", "code"), ("delivery time", "duration"), ("size", "measure"), ("supplier", "title"), ("warranty", "duration"), ("article number", "code"),
    ("discount", "percent"), ("rating", "count"), ("location", "spot"), ("release date", "date"), ("version", "version"), ("limit", "count"), ("status", "status"),
)  # fmt: skip
PEOPLE_COLUMNS: Final = (
    ("extension", "code"), ("phone number", "phone"), ("email", "email"), ("room", "code"), ("birthday", "date"), ("day off", "weekday"), ("role", "job"),
    ("office", "spot"), ("start date", "date"), ("badge number", "code"), ("department", "department"), ("login", "password"), ("team", "title"),
)  # fmt: skip
EVENT_COLUMNS: Final = (("date", "date"), ("start", "hour"), ("room", "code"), ("host", "person"), ("price", "money"), ("place", "spot"), ("length", "duration"), ("speaker", "person"), ("capacity", "count"))  # fmt: skip
EVENTS: Final = "concert workshop lecture reading course tour lesson meeting seminar exhibition party market class trip game tournament dinner rehearsal film show".split()  # fmt: skip
DEPARTMENTS: Final = (
    "sales support finance research marketing logistics legal purchasing security design engineering training".split()
)
STATUSES: Final = (
    "available",
    "sold out",
    "in transit",
    "delayed",
    "delivered",
    "reserved",
    "on hold",
    "ready",
    "cancelled",
    "active",
    "paused",
)

HOW_MUCH: Final = (
    "How much is the {t}?", "What does the {t} cost?", "How much does the {t} cost?", "Price of the {t}?", "What do you charge for the {t}?", "What's the price of the {t}?",
    "How expensive is the {t}?", "Do you have the {t}?", "I would like the {t}. How much is it?", "What is the price for the {t}?", "How much do you want for the {t}?",
    "How much for the {t}?", "Do you sell the {t}?", "What would I pay for the {t}?", "how much is the {t}", "Tell me the price of the {t}.", "the {t}, how much?",
)  # fmt: skip
OF_THING: Final = (
    "What is the {a} of the {t}?", "What's the {a} of the {t}?", "Tell me the {a} of the {t}.", "Which {a} does the {t} have?", "What {a} does the {t} have?", "{t}: {a}?",
    "I need the {a} of the {t}.", "Can you tell me the {a} of the {t}?", "What about the {a} of the {t}?", "The {a} of the {t}, please.", "What is the {t}'s {a}?",
    "What {a} is the {t}?", "For the {t}, what is the {a}?", "Do you know the {a} of the {t}?", "Give me the {a} of the {t}.", "Look up the {a} of the {t}.",
)  # fmt: skip
WHICH: Final = ("Search for the {a} {v}.", "Look up the {a} {v}.", "What is the name of the one with the {a} {v}?", "Which name goes with the {a} {v}?", "Who has the {a} {v}?", "There is one with the {a} {v}. Which?", "To what does the {a} {v} belong?", "What is the one with the {a} {v}?", "Which one is it that has the {a} {v}?", "Which has the {a} {v}?", "Show me the one with the {a} {v}.", "What do you have with the {a} {v}?", "I need the one with the {a} {v}.", "Name the one with the {a} {v}.",
    "Who or what has the {a} {v}?", "{v} is the {a} of what?", "Where do I see the {a} {v}?", "What goes with the {a} {v}?", "The {a} {v} belongs to which one?", "Tell me which one has the {a} {v}.", "Look for the {a} {v}.", "Which one has the {a} {v}?", "What has the {a} {v}?", "Which of them has the {a} {v}?", "Whose {a} is {v}?", "Find the one with the {a} {v}.", "Which entry has the {a} {v}?", "What is listed with the {a} {v}?")  # fmt: skip
NEVER_WHICH: Final = held_out([WHICH])
ITS: Final = ("And its {a}?", "And the {a}?", "What is its {a}?", "and the {a}?", "What's its {a}?", "And what about the {a}?", "Which {a} does it have?", "What about its {a}?", "Its {a}?", "And what is the {a}?", "The {a} too, please.", "the {a}?", "Okay, and its {a}?", "And tell me its {a}.")  # fmt: skip
HOW_MUCH_IS_IT: Final = ("How much is it?", "And how much is it?", "What does it cost?", "how much is it", "And what does it cost?", "How much does it cost?", "And how much?", "What do I pay for it?", "Is it expensive?", "And what is the price?", "how much does it cost?", "What would it cost me?", "And the price?", "How expensive is it?")  # fmt: skip
AND_THING: Final = ("Also the {t}?", "also the {t}", "And also the {t}?", "Then the {t}?", "Fine, and the {t}?", "And how about the {t}?", "Also, the {t}?", "And the {t}?", "and the {t}?", "What about the {t}?", "How about the {t}?", "And for the {t}?", "the {t}?", "Also for the {t}?", "And that of the {t}?", "Okay, and the {t}?", "Thanks. And the {t}?", "Now the {t}.", "And of the {t}?", "What about that of the {t}?", "And what about the {t}?")  # fmt: skip


class Catalogue:
    """Things, people or events in rows; each column is one attribute. Names of people take no article."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.kind = draw.pick(("things", "things", "things", "people", "events"))
        pool = {"things": COLUMNS, "people": PEOPLE_COLUMNS, "events": EVENT_COLUMNS}[self.kind]
        columns = dict(draw.few(pool, draw.pick((1, 1, 2, 2, 3, 4))))
        if self.kind == "things" and draw.maybe(0.4):
            columns = {"price": "money"} | columns
        self.columns = columns
        self.rows: dict[str, dict[str, str]] = {}
        while len(self.rows) < count:
            name = self._name(draw)
            if not any(name in other or other in name for other in self.rows):
                self.rows[name] = {column: self._value(draw, kind) for column, kind in columns.items()}
        self.text = self._text(draw)

    def _name(self, draw: Draw) -> str:
        if self.kind == "people":
            return draw.person()
        if self.kind == "events":
            first = draw.pick((draw.pick(words.ADJECTIVES), draw.proper(), draw.pick(words.THINGS), draw.invented()))
            return f"{first} {draw.pick(EVENTS)}"
        return draw.item()

    def _value(self, draw: Draw, kind: str) -> str:
        if kind == "status":
            return draw.pick(STATUSES)
        if kind == "job":
            return draw.pick(words.JOBS)
        if kind == "department":
            return draw.pick(DEPARTMENTS)
        return value_of(draw, kind)

    def the(self, name: str) -> str:
        return name if self.kind == "people" else f"the {name}"

    def _text(self, draw: Draw) -> str:
        names, columns, roll = list(self.rows), list(self.columns), draw.chance()
        head = draw.pick(("", "", "List:\n", "## List\n", "What we have:\n", "Here is the list.\n")) if self.kind == "things" else draw.pick(("", "Team:\n", "Staff:\n", "People:\n")) if self.kind == "people" else draw.pick(("", "Program:\n", "Events:\n", "What is on:\n"))  # fmt: skip
        shown = capital if draw.maybe(0.6) else str
        if len(columns) == 1 and roll < 0.5:
            mark, colon = draw.pick(("- ", "* ", "", "• ")), draw.pick((": ", ": ", " - ", " – ", " = "))
            title = (
                f"{capital(columns[0])} list:\n"
                if columns[0] != "price" or draw.maybe(0.5)
                else draw.pick(("Menu:\n", "Prices:\n", "Price list:\n"))
            )
            return title + "\n".join(f"{mark}{shown(name)}{colon}{self.rows[name][columns[0]]}" for name in names)
        if roll < 0.3:
            mark, colon, comma = draw.pick(("- ", "* ", "")), draw.pick((": ", " - ")), draw.pick((", ", "; "))
            return head + "\n".join(
                f"{mark}{shown(name)}{colon}" + comma.join(f"{a} {v}" for a, v in self.rows[name].items())
                for name in names
            )
        if roll < 0.45:
            lines = ["| name | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
            return head + "\n".join(
                lines + [f"| {name} | " + " | ".join(self.rows[name].values()) + " |" for name in names]
            )
        if roll < 0.55:
            comma = draw.pick((", ", ";", "\t", " | "))
            return head + "\n".join(
                [comma.join(["name", *columns])] + [comma.join([name, *self.rows[name].values()]) for name in names]
            )
        if roll < 0.65:
            return head + json.dumps(
                [{"name": name} | self.rows[name] for name in names],
                ensure_ascii=False,
                indent=draw.pick((None, None, 1)),
            )
        joint = draw.pick((" ", "\n"))
        return joint.join(self._sentence(draw, name) for name in names)

    def _sentence(self, draw: Draw, name: str) -> str:
        parts = []
        for attribute, value in self.rows[name].items():
            if attribute == "price":
                parts.append(draw.pick((f"costs {value}", f"is {value}", f"costs {value}", f"has the price {value}")))
            else:
                parts.append(f"has the {attribute} {value}")
        told = capital(f"{self.the(name)} {listed(parts)}.")
        if len(parts) == 1 and draw.maybe(0.5):
            attribute, value = next(iter(self.rows[name].items()))
            told = draw.pick(
                (
                    f"The {attribute} of {self.the(name)} is {value}.",
                    f"For {self.the(name)}, the {attribute} is {value}.",
                )
            )
        return told

    def _answer(self, name: str, attribute: str) -> str:
        value = self.rows[name][attribute]
        if attribute == "price":
            return capital(f"{self.the(name)} costs {value}.")
        return f"The {attribute} of {self.the(name)} is {value}."

    def _question(self, draw: Draw, name: str, attribute: str) -> str:
        form = draw.phrase(HOW_MUCH) if attribute == "price" and draw.maybe(0.7) else draw.phrase(OF_THING)
        return self._filled(form, name, attribute)

    def _filled(self, form: str, name: str, attribute: str = "", value: str = "") -> str:
        if self.kind == "people":
            form = form.replace("the {t}", "{t}")
        return (
            capital(form.format(t=name, a=attribute, v=value))
            if not form.startswith(("how", "the", "and"))
            else form.format(t=name, a=attribute, v=value)
        )

    @property
    def labels(self) -> list[str]:
        return list(self.rows)

    def ask(self, draw: Draw) -> Ask:
        name, attribute = draw.pick(list(self.rows)), draw.pick(list(self.columns))
        value = self.rows[name][attribute]
        if draw.maybe(0.28):
            form = which_form(draw, NEVER_WHICH) if draw.maybe(0.4) else draw.phrase(WHICH)
            question = form.format(a=attribute, v=value)
            return Ask(
                question, capital(f"{self.the(name)} has the {attribute} {value}."), {"name": name}, unique=value
            )
        first = name.split()[0]
        if self.kind == "people" and "." not in first and draw.maybe(0.4):
            return Ask(self._question(draw, first, attribute), self._answer(name, attribute), unique=first)
        follows = [
            (
                draw.phrase(HOW_MUCH_IS_IT if other == "price" and draw.maybe(0.6) else ITS).format(a=other),
                self._answer(name, other),
            )
            for other in self.columns
            if other != attribute
        ]
        others = [other for other in draw.few(list(self.rows), 3) if other != name]
        follows += [(self._filled(draw.phrase(AND_THING), other), self._answer(other, attribute)) for other in others]
        fields: dict[str, str | None] = {"name": name, **self.rows[name]}
        return Ask(self._question(draw, name, attribute), self._answer(name, attribute), fields, draw.few(follows, 3))

    def miss(self, draw: Draw) -> Miss | None:
        if draw.maybe(0.4):
            pool = {"things": COLUMNS, "people": PEOPLE_COLUMNS, "events": EVENT_COLUMNS}[self.kind]
            absent = [attribute for attribute, _ in pool if attribute not in self.columns]
            name, attribute = draw.pick(list(self.rows)), draw.pick(absent)
            return Miss(self._question(draw, name, attribute), f"{attribute} {name}")
        for _ in range(10):
            name = self._name(draw)
            if draw.maybe(0.5) and self.kind != "people":
                near = draw.pick(list(self.rows))
                name = (
                    f"{draw.pick((draw.proper(), draw.pick(words.ADJECTIVES)))} {near.split()[-1]}"
                    if " " in near
                    else name
                )
            if not any(name in other or other in name for other in self.rows):
                return Miss(self._question(draw, name, draw.pick(list(self.columns))), name)
        return None


# -- rules, events and stories: answered with their own sentence -----------------------------------------------------

SUBJECTS: Final = """
dogs;cats;pets;bicycles;strollers;wheelchairs;children under 12;babies;teenagers;drones;cameras;phones;tripods;skateboards;food and drinks;hot drinks;
visitors;guests;members;students;large bags;suitcases;umbrellas;musical instruments;balloons;scooters;motorcycles;trucks;groups of more than 10 people;
school classes;gift cards;credit cards;checks;vouchers;deliveries;returns;refunds;complaints;cancellations;parcels;invoices;exams;homework papers;
late arrivals;reservations;phone orders;special orders;wet shoes;flowers;candles;open fires;loud music;private parties;flash photos;video calls;
backups;updates;old passwords;test accounts;free samples;used books;library cards;locker keys;spare keys;towels;bathrobes;allergies;vegetarian meals
""".replace("\n", "").split(";")  # fmt: skip
RULES: Final = """
are welcome {spot};are allowed {spot} only;are not allowed {spot};must be left {spot};are free of charge;cost {money} extra;need a permit from {person};
can be borrowed {spot} for {money};are handled by {person};must be registered by {date};are accepted until {hour};are possible on {weekday} only;
have to be announced {duration} before;are forbidden after {hour};may enter before {hour} only;are checked every {weekday};are kept for {duration};
must be signed by {person};are limited to {count} per day;can be ordered at {phone};should be sent to {email};are never accepted;are always accepted;
get a discount of {percent};are charged {money} per day;are stored {spot};must stay outside;have to wait {spot};are welcome every {weekday};
are only for members;need the code {code};are not our business, so send them to {person};are paid back within {duration};can be picked up {spot} from {hour}
""".replace("\n", "").split(";")  # fmt: skip
ASK_RULE: Final = (
    "Are {s} allowed?", "What about {s}?", "What is the rule for {s}?", "How do you handle {s}?", "What do I need to know about {s}?", "What is your policy on {s}?", "Do you have a rule about {s}?",
    "Tell me about {s}.", "Can I bring {s}?", "Are there rules for {s}?", "I have a question about {s}.", "{S}?", "How is it with {s}?", "Is there anything I should know about {s}?",
    "Do you take {s}?", "What happens with {s}?", "Are {s} okay?", "Are {s} possible?", "and {s}?", "Do you accept {s}?", "May I ask about {s}?",
)  # fmt: skip


class Rules:
    """What is allowed and what is not; each rule is one sentence about one subject."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.rules: dict[str, str] = {}
        while len(self.rules) < count:
            subject = (
                draw.pick(SUBJECTS)
                if draw.maybe(0.6)
                else f"{draw.pick((draw.pick(words.ADJECTIVES), draw.invented()))} {draw.pick(words.THINGS).removesuffix('s')}s"
            )
            if any(subject in other or other in subject for other in self.rules):
                continue
            rule = draw.pick(RULES)
            filled = rule.format(**{kind: value_of(draw, kind) for kind in re.findall(r"{(\w+)}", rule)})
            self.rules[subject] = capital(f"{subject} {filled}.")
        joint = draw.pick((" ", " ", "\n", "\n- "))
        self.text = ("- " if joint == "\n- " else "") + joint.join(self.rules.values())

    @property
    def labels(self) -> list[str]:
        return list(self.rules)

    def ask(self, draw: Draw) -> Ask:
        subject = draw.pick(list(self.rules))
        others = [other for other in draw.few(list(self.rules), 3) if other != subject]
        follows = [
            (
                draw.pick(("And {s}?", "and {s}?", "What about {s}?", "How about {s}?")).format(s=other),
                self.rules[other],
            )
            for other in others
        ]
        return Ask(draw.phrase(ASK_RULE).format(s=subject, S=capital(subject)), self.rules[subject], {}, follows)

    def miss(self, draw: Draw) -> Miss | None:
        for _ in range(10):
            subject = draw.pick(SUBJECTS)
            if not any(subject in other or other in subject for other in self.rules):
                return Miss(draw.phrase(ASK_RULE).format(s=subject, S=capital(subject)), subject)
        return None


DEEDS: Final = """
opened/open the {x};closed/close the {x};built/build the {x};bought/buy the {x};sold/sell the {x};painted/paint the {x};found/find the {x};lost/lose the {x};
repaired/repair the {x};designed/design the {x};won/win the {x};invented/invent the {x};borrowed/borrow the {x};renamed/rename the {x};moved/move the {x};
wrote/write a book about the {x};gave/give a talk about the {x};visited/visit the {x};cleaned/clean the {x};tested/test the {x};ordered/order the {x};
broke/break the {x};stole/steal the {x};presented/present the {x};planned/plan the {x};photographed/photograph the {x};inherited/inherit the {x}
""".replace("\n", "").split(";")  # fmt: skip


class Stories:
    """Stories: who did what, when and where. The answer to any question about one is its sentence."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.stories: list[tuple[str, str, str, str, str, str]] = []
        while len(self.stories) < count:
            person = draw.person() if draw.maybe(0.7) else f"the {draw.pick(words.JOBS)}"
            past, plain = draw.pick(DEEDS).split("/", 1)
            plain, tail = plain.split(" ", 1)
            thing = tail.format(
                x=f"{draw.pick((draw.pick(words.ADJECTIVES), draw.proper(), draw.invented()))} {draw.pick(words.THINGS)}"
            )
            if any(person in story[0] or thing == story[3] for story in self.stories):
                continue
            when = draw.pick(
                (
                    f"in {draw.year()}",
                    f"on {draw.date()}",
                    f"on {draw.weekday()}",
                    f"at {draw.hour()}",
                    "last summer",
                    "yesterday",
                )
            )
            where = draw.pick(("", f" {draw.spot()}", f" in {draw.proper()}"))
            first = draw.maybe(0.3)
            sentence = capital(
                f"{when}, {person} {past} {thing}{where}."
                if first
                else f"{person} {past} {thing} {when}{where}.".replace(" in room", ", in room")
            )
            self.stories.append((person, past, plain, thing, sentence, where))
        self.text = " ".join(story[4] for story in self.stories)

    @property
    def labels(self) -> list[str]:
        return [story[3] for story in self.stories]

    def ask(self, draw: Draw) -> Ask:
        person, past, plain, thing, sentence, where = draw.pick(self.stories)
        forms = [f"Who {past} {thing}?", f"When did {person} {plain} {thing}?", f"What did {person} {plain}?", f"What do you know about {person}?", f"What did {person} do?",
                 f"Tell me about {person}.", f"By whom was {thing} {past}?", f"What is known about {thing}?", f"What happened to {thing.removeprefix('a book about ').removeprefix('a talk about ')}?",
                 f"What did you hear about {person}?", f"What about {thing}?", f"Do you know what {person} did?", f"Who was it that {past} {thing}?", f"Is there anything about {person}?"]  # fmt: skip
        if where:
            forms.insert(0, f"Where did {person} {plain} {thing}?")
        return Ask(draw.phrase(forms), sentence)

    def miss(self, draw: Draw) -> Miss | None:
        other = Stories(draw, 1).stories[0]
        if any(other[0] == story[0] or other[3] == story[3] for story in self.stories):
            return None
        question = draw.pick(
            (
                f"Who {other[1]} {other[3]}?",
                f"What did {other[0]} {other[2]}?",
                f"When did {other[0]} {other[2]} {other[3]}?",
            )
        )
        return Miss(question, other[3])


HAPPENINGS: Final = ("takes place", "starts", "is", "begins", "will be held", "happens")


class Happenings:
    """Events told in one sentence each, with a date and mostly a time and a place."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.events: dict[str, str] = {}
        while len(self.events) < count:
            first = draw.pick((draw.pick(words.ADJECTIVES), draw.proper(), draw.pick(words.THINGS), draw.invented()))
            name = f"{first} {draw.pick(EVENTS)}"
            day = draw.pick(
                (
                    f"on {draw.date()}",
                    f"every {draw.weekday()}",
                    f"on {draw.weekday()}",
                    f"on {draw.weekday()}, {draw.date()}",
                )
            )
            tail = draw.pick(("", f" at {draw.hour()}", f" from {draw.span()}")) + draw.pick(
                ("", "", f" {draw.spot()}", f" and costs {draw.money()}")
            )
            self.events[name] = f"The {name} {draw.pick(HAPPENINGS)} {day}{tail}."
        self.text = draw.pick((" ", "\n")).join(self.events.values())

    @property
    def labels(self) -> list[str]:
        return list(self.events)

    def ask(self, draw: Draw) -> Ask:
        name = draw.pick(list(self.events))
        form = draw.phrase(("When is the {n}?", "Where and when is the {n}?", "Tell me about the {n}.", "What day is the {n}?", "When does the {n} start?", "What do you know about the {n}?", "What about the {n}?",
                            "Is there a {n}?", "I want to go to the {n}. When is it?", "When can I see the {n}?", "On which day is the {n}?", "What can you tell me about the {n}?", "How do I get to the {n}?", "When will the {n} be?"))  # fmt: skip
        others = [other for other in draw.few(list(self.events), 2) if other != name]
        follows = [(draw.phrase(AND_THING).format(t=other), self.events[other]) for other in others]
        return Ask(form.format(n=name), self.events[name], {}, follows)

    def miss(self, draw: Draw) -> Miss | None:
        name = f"{draw.pick((draw.proper(), draw.pick(words.ADJECTIVES)))} {draw.pick(EVENTS)}"
        return None if name in self.events else Miss(f"When is the {name}?", name)
