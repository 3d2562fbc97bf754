"""Sentences of all kinds about all kinds of things; asked about one, Ember answers with the sentence, word for word.

This is what carries to prompts that nobody foresaw: find the sentence that the question is about, and copy it.
"""

# fmt: off  # lists of phrases read better unbroken

import re
from typing import Final

from benchmarks.ember import words
from benchmarks.ember.facts import Ask, Miss, capital, value_of
from benchmarks.ember.phrasing import LEADS
from benchmarks.ember.values import Draw

NOUNS: Final = """
parking;breakfast;lunch;dinner;late check-out;early check-in;shuttle;airport shuttle;haircut;massage;laundry;gym;pool;sauna;terrace;elevator;data;support;delivery;shipping;refund;membership;
subscription;plan;ticket;tour;room;double room;single room;suite;apartment;visa;license;permit;backup;server;database;API;app;account;lesson;exam;course;class;vaccination;check-up;appointment;
prescription;cleaning;repair;rental;deposit;insurance;taxi;bus;train;ferry;bike rental;boat trip;extra bed;towel service;room service;mini bar;safe;bar;restaurant;kitchen;playground;library card;
reading room;study room;meeting room;conference room;printer;scanner;coffee machine;vending machine;locker;cloakroom;souvenir shop;ticket office;information desk;first aid;emergency exit;fire alarm;
garden;roof;basement;garage;charging station;gift wrapping;gift card;catering;birthday party;wedding;workshop;school trip;audio guide;map;catalog;newsletter;trial;free plan;basic plan;premium plan;
standard plan;family plan;student discount;senior discount;group discount;loyalty card;return;exchange;warranty;installation;maintenance;hotline;chat;documentation;update;release;mobile app;dashboard;
login;export;import;report;invoice;payment;contract;training;certificate;homework;exam fee;tuition;dormitory;canteen;sports hall;swimming lesson;dance class;yoga class;language course;guitar lesson;
blood test;X-ray;surgery;consultation;waiting room;pharmacy;dog;cat;horse;tree;river;bridge;tower;castle;church;harbor;beach;lighthouse;market;fountain;statue;museum;road;village;mountain;lake
""".replace("\n", "").split(";")
UNITS: Final = "night day week month year hour person child adult guest room piece item kilo page lesson visit trip ride user seat request order minute bottle glass head".split()
GROUPS: Final = "children;students;members;families;beginners;adults;seniors;teachers;guests;two people;groups;dogs;new customers;locals;babies;employees;visitors".split(
    ";"
)

# what a sentence says of its subject | what people ask. {s} is the subject with its article, {n} without; {is}, {does}: by number.
SAYINGS: Final = """
{costs} {money} | How much {does} {s} cost? / How much {is} {s}? / What {does} {s} cost? / What is the price of {s}? / How expensive {is} {s}? / What do I pay for {s}? / How much for {s}? / price of {n}? / What do you charge for {s}? / how much is {n}
{costs} {money} per {unit} | How much {does} {s} cost? / How much {is} {s}? / What {does} {s} cost? / What is the price of {s}? / How expensive {is} {s}? / What do I pay for {s} per {unit}? / How much {is} {s} per {unit}? / What do you charge for {s}? / {n} price?
{is} {money} per {unit} | How much {is} {s}? / What {does} {s} cost? / How much {does} {s} cost? / What is the price of {s}? / What would {s} cost me? / How much do you charge for {s}? / What do I have to pay for {s}? / How much is {n}?
{opens} at {hour} | When {does} {s} open? / What time {does} {s} open? / From when {is} {s} open? / How early {does} {s} open? / Opening time of {s}? / When can I go to {s}? / At what time {does} {s} open?
{closes} at {hour} | When {does} {s} close? / What time {does} {s} close? / Until when {is} {s} open? / How late {is} {s} open? / Closing time of {s}? / How long can I stay in {s}? / At what time {does} {s} close?
{is} open from {span} | When {is} {s} open? / When {does} {s} close? / When {does} {s} open? / What are the hours of {s}? / How long {is} {s} open? / Opening hours of {s}? / When can I use {s}? / Until when {is} {s} open? / At what time {does} {s} open?
{is} open daily from {span} | When {is} {s} open? / When {does} {s} close? / When {does} {s} open? / What are the hours of {s}? / {is} {s} open every day? / When can I visit {s}? / From when to when {is} {s} open? / What time {does} {s} close?
{is} open between {hour} and {hour} | When {is} {s} open? / When {does} {s} close? / When {does} {s} open? / What are the hours of {s}? / How late {is} {s} open? / When can I go to {s}? / Opening times of {s}? / What time {does} {s} open?
{is} served from {span} | When {is} {s} served? / When {is} {s}? / What time {is} {s}? / When can I have {s}? / Until when can I get {s}? / When do you serve {s}? / From when {is} {s} served?
{is} served {spot} between {hour} and {hour} | When {is} {s}? / Where {is} {s} served? / What time {is} {s}? / Where can I get {s}? / When {is} {s} served? / Until when {is} {s} served? / Where do I go for {s}? / Where {is} {s}?
{is} closed on {weekday} | When {is} {s} closed? / On which day {is} {s} closed? / {is} {s} ever closed? / What day {is} {s} closed? / Which day {is} {s} closed? / {is} {s} open every day? / When can I not use {s}?
{starts} at {hour} | When {does} {s} start? / What time {does} {s} start? / When {is} {s}? / At what time {is} {s}? / When {does} {s} begin? / Start of {s}? / When should I be there for {s}?
{leaves} at {hour} from {place} | When {does} {s} leave? / Where {does} {s} leave? / From where {does} {s} leave? / What time {does} {s} leave? / When {does} {s} go? / Where can I get on {s}? / When {does} {s} depart?
{leaves} every {duration} | How often {does} {s} leave? / When {does} {s} leave? / How often {does} {s} go? / How long do I wait for {s}? / When {is} the next {n}? / When {does} {s} go? / How often {does} {s} run?
{takes} {duration} | How long {does} {s} take? / How much time {does} {s} take? / How long {is} {s}? / How many hours {does} {s} take? / How long do I have to wait for {s}? / What time do I need for {s}? / Duration of {s}?
{takes} about {duration} | How long {does} {s} take? / How much time {does} {s} take? / How long {is} {s}? / Roughly how long {does} {s} take? / How long would {s} take? / About how long {is} {s}? / Will {s} take long?
{lasts} {duration} | How long {does} {s} last? / How long {is} {s}? / How long {does} {s} go on? / When {is} {s} over? / What's the length of {s}? / For how long {is} {s}? / How many days {does} {s} last?
{weighs} {number} kg | How heavy {is} {s}? / How much {does} {s} weigh? / What {does} {s} weigh? / What's the weight of {s}? / Weight of {s}? / How many kilos {is} {s}? / {is} {s} heavy?
{is} {spot} | Where {is} {s}? / Where can I find {s}? / How do I find {s}? / Where do I find {s}? / I'm looking for {s}. / How do I get to {s}? / Can you show me the way to {s}? / Where's {s}? / On which floor {is} {s}? / Which way {is} {s}?
{is} located {spot} | Where {is} {s}? / Where {is} {s} located? / Where can I find {s}? / How do I get to {s}? / In which place {is} {s}? / I am looking for {s}. / Tell me where {s} {is}. / What's the location of {s}?
{is} kept {spot} | Where {is} {s} kept? / Where do you keep {s}? / Where {is} {s}? / Where can I find {s}? / Where would I look for {s}? / Where should {s} be? / Who keeps {s} and where?
{is} stored in {proper} | Where {is} {s} stored? / Where do you store {s}? / Where {is} {s} kept? / In which place {is} {s} stored? / Where do you keep {s}? / In which city {is} {s} stored? / Where {is} {s}?
{is} stored for {duration} | How long {is} {s} stored? / How long do you store {s}? / How long do you keep {s}? / For how long {is} {s} kept? / When {is} {s} deleted? / How many days {is} {s} stored? / How long {is} {s} kept?
{belongs} to {person} | Who {does} {s} belong to? / Who owns {s}? / Whose {is} {s}? / To whom {does} {s} belong? / Who is the owner of {s}? / Who has {s}? / Whose {n} is it?
{is} {done} by {person} | Who {did} {s}? / By whom {is} {s} {done}? / Who is responsible for {s}? / Who takes care of {s}? / Who do I ask about {s}? / Who is the person for {s}? / Who {is} {s} {done} by?
{was} {made} in {year} | When was {s} {made}? / How old {is} {s}? / In which year was {s} {made}? / What year {is} {s} from? / Since when do you have {s}? / From when {is} {s}? / How long ago was {s} {made}?
{was} {made} by {person} in {year} | Who {made} {s}? / When was {s} {made}? / By whom was {s} {made}? / How old {is} {s}? / In which year was {s} {made}? / Who is behind {s}? / What year {is} {s} from?
{comes} from {proper} | Where {does} {s} come from? / From where {is} {s}? / What is the origin of {s}? / Where {is} {s} from? / Where do you get {s} from? / Which place {does} {s} come from? / Origin of {s}?
{has} {count} {things} | How many {things} {does} {s} have? / How many {things} are in {s}? / How many {things} are there? / What's the number of {things} in {s}? / How many {things} do you have? / {things} in {s}? / Count of {things} in {s}?
{has} room for {count} people | How many people fit in {s}? / How big {is} {s}? / How large {is} {s}? / For how many people {is} {s}? / What's the capacity of {s}? / How many guests fit into {s}? / How many people can use {s}?
{includes} {count} {things} | What {does} {s} include? / How many {things} {does} {s} include? / What do I get with {s}? / What is part of {s}? / How many {things} come with {s}? / What comes with {s}? / What's in {s}?
{includes} {thing} and {thing} | What {does} {s} include? / What is included in {s}? / What do I get with {s}? / What is part of {s}? / What belongs to {s}? / What comes with {s}? / What's in {s}?
{needs} {thing} | What {does} {s} need? / What do I need for {s}? / What {is} needed for {s}? / What should I bring for {s}? / What must I have for {s}? / What do you need for {s}? / Requirements for {s}?
{is} made of {material} | What {is} {s} made of? / Which material {is} {s}? / What material {is} {s}? / Out of what {is} {s} made? / What's {s} made from? / {is} {s} made of steel? / Material of {s}?
{is} called {title} | What {is} {s} called? / What's the name of {s}? / How {is} {s} called? / Which name {does} {s} have? / What do you call {s}? / What is {s}'s name? / Name of {s}?
can be booked at {phone} | How can I book {s}? / Where can I book {s}? / How do I book {s}? / What number do I call for {s}? / Can I book {s}? / Where do I reserve {s}? / Can I reserve {s}?
can be booked at {site} | How can I book {s}? / Where can I book {s}? / How do I book {s} online? / What's the page for {s}? / Can I book {s}? / Where do I reserve {s}? / Can I reserve {s} online?
can be reached at {email} | How do I reach {s}? / How can I contact {s}? / What's the email of {s}? / Where do I write to {s}? / Who can I write to about {s}? / How do I get in touch with {s}? / Contact of {s}?
can be reached at {phone} | How do I reach {s}? / How can I contact {s}? / What's the number of {s}? / How can I call {s}? / Which number {does} {s} have? / How do I get in touch with {s}? / Phone of {s}?
can be cancelled up to {duration} before | Can I cancel {s}? / How do I cancel {s}? / Until when can I cancel {s}? / When can I cancel {s}? / How late can I cancel {s}? / Is it possible to cancel {s}? / What if I want to cancel {s}?
{is} possible within {duration} | {is} {s} possible? / Can I get {a}? / Until when {is} {s} possible? / Can I have {a}? / How long {is} {s} possible? / I want {a}. / Do you offer {s}?
{is} free for {group} | {is} {s} free? / Who gets {s} for free? / For whom {is} {s} free? / How much {is} {s}? / Do I have to pay for {s}? / What {does} {s} cost for {group}? / Who does not pay for {s}?
{is} free of charge | {is} {s} free? / How much {is} {s}? / What {does} {s} cost? / Do I have to pay for {s}? / What do I pay for {s}? / Does {s} cost anything? / Is there a fee for {s}?
{is} included in the price | {is} {s} included? / How much {is} {s}? / Do I have to pay for {s}? / What {does} {s} cost? / Is {n} part of the price? / Do I pay extra for {s}? / {is} {s} extra?
{is} not available | {is} {s} available? / Do you have {a}? / Can I get {a}? / Do you offer {s}? / Is there {a}? / Can I have {s}? / I would like {a}.
{is} available on {weekday} | {is} {s} available? / When {is} {s} available? / Do you have {a}? / On which day can I get {s}? / Do you offer {s}? / When can I have {s}? / Is there {a}?
{is} only for {group} | {is} {s} for everyone? / Who can use {s}? / For whom {is} {s}? / Who is allowed to use {s}? / Can I use {s}? / Who {is} {s} for? / May anybody use {s}?
{is} not allowed | {is} {s} allowed? / Can I bring {a}? / May I bring my {n}? / Can I have {a} here? / Is it okay to have {a}? / Do you allow {a}? / May I have {a}?
{is} welcome | {is} {s} allowed? / Can I bring {a}? / May I bring my {n}? / Can I come with {a}? / {is} {s} welcome? / Do you allow {a}? / May I come with my {n}?
{is} welcome {spot} | {is} {s} allowed? / Can I bring my {n}? / May I bring my {n}? / Can I come with {a}? / Where {is} {s} welcome? / Do you allow {a}? / Can my {n} come too?
{ends} on {date} | When {does} {s} end? / Until when {does} {s} go? / When {is} {s} over? / What is the last day of {s}? / On which day {does} {s} end? / How long {does} {s} go? / When {does} {s} stop?
{is} due on {date} | When {is} {s} due? / What's the deadline of {s}? / By when do you need {s}? / Until when do I have time for {s}? / When do I have to hand in {s}? / When must {s} be done? / Due date of {s}?
{runs} on {title} | What {does} {s} run on? / Which system {does} {s} run on? / On what {does} {s} run? / What do you use for {s}? / What {is} {s} based on? / What's behind {s}? / What drives {s}?
allows {count} requests per {unit} | How many requests {does} {s} allow? / What's the limit of {s}? / How often can I use {s}? / How many requests can I send to {s}? / Is there a limit for {s}? / What's the rate limit of {s}? / How many calls {does} {s} allow?
must be paid in {payment} | How do I pay for {s}? / How can I pay for {s}? / Can I pay for {s} by card? / How must {s} be paid? / What payment do you take for {s}? / Do you take cards for {s}? / How {is} {s} paid?
{is} {colour} and {colour} | What color {is} {s}? / Which colors {does} {s} have? / What {does} {s} look like? / How {does} {s} look? / Which color {is} {s}? / What colors {is} {s}? / Color of {s}?
""".strip()
ANY: Final = (
    "What about {s}?", "Tell me about {s}.", "What do you know about {s}?", "I have a question about {s}.", "What can you tell me about {s}?", "{S}?", "What's with {s}?", "Tell me more about {s}.", "Is there {a}?",
    "Do you have {a}?", "and {s}?", "What should I know about {s}?", "Do you have any facts about {s}?", "Anything about {s}?", "I want to know about {s}.", "Please tell me about {s}.", "How is it with {s}?",
    "Could you tell me about {s}?", "Give me what you have about {s}.", "What is there to know about {s}?", "I'm asking about {s}.",
)  # fmt: skip
DONE: Final = (("cleaned", "cleans"), ("managed", "manages"), ("led", "leads"), ("run", "runs"), ("taught", "teaches"), ("checked", "checks"), ("organized", "organizes"), ("repaired", "repairs"), ("prepared", "prepares"), ("guarded", "guards"), ("sold", "sells"), ("sponsored", "sponsors"))  # fmt: skip
MADE: Final = (
    "built",
    "opened",
    "founded",
    "painted",
    "renovated",
    "introduced",
    "bought",
    "designed",
    "started",
    "planted",
    "closed",
    "moved",
)
PAYMENTS: Final = ("cash", "advance", "euros", "cash only", "two parts", "person", "coins", "full")
VERBS: Final = {"costs": "cost", "opens": "open", "closes": "close", "starts": "start", "leaves": "leave", "takes": "take", "lasts": "last", "weighs": "weigh", "belongs": "belong", "comes": "come", "has": "have", "includes": "include", "needs": "need", "ends": "end", "runs": "run", "is": "are", "was": "were", "does": "do"}  # fmt: skip
ROWS: Final = [
    (said.strip(), asked.strip().split(" / "))
    for said, _, asked in (line.partition(" | ") for line in SAYINGS.splitlines())
]
SLOT: Final = re.compile(r"{(\w+)}")


DOES: Final = re.compile(r"(.+) {does} {s} (\w+)(.*)\?")


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeou":
        return noun[:-1] + "ies"
    return noun + "s"


def indefinite(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


class Subject:
    """What a sentence is about: a noun, perhaps with words before and after it, one or many."""

    def __init__(self, draw: Draw) -> None:
        roll = draw.chance()
        noun = (
            draw.pick(NOUNS)
            if roll < 0.6
            else draw.pick(words.THINGS)
            if roll < 0.8
            else draw.invented()
            if roll < 0.88
            else draw.pick(words.PLACES)
        )
        roll = draw.chance()
        before = (
            ""
            if roll < 0.45
            else draw.pick(words.ADJECTIVES)
            if roll < 0.65
            else draw.proper()
            if roll < 0.8
            else draw.invented()
            if roll < 0.9
            else draw.pick(words.THINGS)
        )
        core = f"{before} {noun}".strip()
        self.many = draw.maybe(0.2)
        self.single = core
        self.core = plural(core) if self.many else core
        self.after = ""
        if draw.maybe(0.15):
            self.after = draw.pick((f" for {draw.pick(GROUPS)}", f" on the {draw.pick(('first', 'second', 'third', 'top', '5th', '2nd', '10th'))} floor", f" to {draw.proper()}", f" with {draw.pick(words.THINGS)}", f" near the {draw.pick(words.THINGS)}", f" of {draw.proper()}"))  # fmt: skip
        article = draw.pick(
            ("the ", "the ", "the ", "our ", "", indefinite(core)[: -len(core)] if not self.many else "all ")
        )
        self.said = article + self.core + self.after

    def asked(self, draw: Draw) -> dict[str, str]:
        """The words that a question uses for it."""
        after = self.after if self.after and draw.maybe(0.5) else ""
        bare = draw.maybe(0.15)
        subject = (
            ("" if bare or (self.many and draw.maybe(0.4)) else draw.pick(("the ", "the ", "the ", "your ")))
            + self.core
            + after
        )
        one = plural(self.single) if self.many and draw.maybe(0.5) else indefinite(self.single)
        return {"s": subject, "S": capital(subject), "n": self.core, "a": one}


class Statements:
    """Sentences about different subjects; some say two things of theirs."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.told: dict[str, tuple[Subject, list[tuple[list[str], dict[str, str]]], str]] = {}
        while len(self.told) < count:
            subject = Subject(draw)
            if any(subject.single in other or other in subject.single for other in self.told):
                continue
            rows = draw.few(ROWS, 2 if draw.maybe(0.2) else 1)
            said, asks = [], []
            for saying, questions in rows:
                filled, values = self._filled(draw, saying, subject)
                said.append(filled)
                asks.append((questions, values))
            lead = (
                draw.pick(("Please note that ", "Note: ", "Remember that ", "You should know that "))
                if draw.maybe(0.04)
                else ""
            )
            self.told[subject.single] = (subject, asks, capital(f"{lead}{subject.said} {' and '.join(said)}."))
        joint = draw.pick((" ", " ", " ", "\n", "\n- "))
        self.text = ("- " if joint == "\n- " else "") + joint.join(sentence for _, _, sentence in self.told.values())

    @staticmethod
    def _filled(draw: Draw, saying: str, subject: Subject) -> tuple[str, dict[str, str]]:
        done, did = draw.pick(DONE)
        values = {"done": done, "did": did, "made": draw.pick(MADE)}

        def fill(match: re.Match[str]) -> str:
            slot = match.group(1)
            if slot in VERBS:
                return VERBS[slot] if subject.many else slot
            if slot in values:
                return values[slot]
            made = Statements._value(draw, slot)
            if slot not in ("hour", "thing", "colour"):
                values[slot] = made
            return made

        return SLOT.sub(fill, saying), values

    @staticmethod
    def _value(draw: Draw, slot: str) -> str:
        if slot == "unit":
            return draw.pick(UNITS)
        if slot == "group":
            return draw.pick(GROUPS)
        if slot == "payment":
            return draw.pick(PAYMENTS)
        if slot == "thing":
            return indefinite(draw.pick(words.THINGS))
        if slot == "things":
            return plural(draw.pick((draw.pick(words.THINGS), draw.pick(NOUNS))))
        if slot == "number":
            return str(draw.number(1, 99))
        if slot == "place":
            return f"the {draw.pick((draw.pick(words.ADJECTIVES), draw.proper()))} {draw.pick(('gate', 'square', 'platform', 'door', 'bridge', 'pier', 'station', 'corner'))}"
        return value_of(draw, slot)

    @property
    def labels(self) -> list[str]:
        return list(self.told)

    def _question(self, draw: Draw, label: str) -> str:
        subject, asks, _ = self.told[label]
        questions, values = draw.pick(asks)
        form = draw.phrase(questions) if draw.maybe(0.8) else draw.phrase(ANY)
        match = DOES.fullmatch(form)
        if match and draw.maybe(0.2) and not draw.unseen_phrases:
            verb = (
                match[2]
                if subject.many
                else "goes"
                if match[2] == "go"
                else "has"
                if match[2] == "have"
                else match[2] + "s"
            )
            form = f"{draw.phrase(LEADS)} {match[1][0].lower()}{match[1][1:]} {{s}} {verb}{match[3]}{draw.pick(('?', '.'))}"
        number = {"is": "are", "does": "do"} if subject.many else {"is": "is", "does": "does"}
        return capital(form.format(**(values | subject.asked(draw) | number)))

    def ask(self, draw: Draw) -> Ask:
        label = draw.pick(list(self.told))
        sentence = self.told[label][2]
        others = [other for other in draw.few(list(self.told), 2) if other != label]
        follows = [
            (
                draw.pick(("And {s}?", "and {s}?", "What about {s}?", "How about {s}?", "And for {s}?")).format(
                    **self.told[other][0].asked(draw)
                ),
                self.told[other][2],
            )
            for other in others
        ]
        return Ask(self._question(draw, label), sentence, {}, follows)

    def miss(self, draw: Draw) -> Miss | None:
        other = Statements(draw, 1)
        label = other.labels[0]
        if draw.maybe(0.4):
            near = draw.pick(list(self.told)).split(" ")[-1]
            label = f"{draw.pick((draw.pick(words.ADJECTIVES), draw.proper()))} {near}"
            subject, asks, sentence = other.told.pop(other.labels[0])
            subject.single, subject.core, subject.many = label, label, False
            other.told[label] = (subject, asks, sentence)
        if any(label in known or known in label for known in self.told):
            return None
        return Miss(other._question(draw, label), label)


class Plans:
    """Rows of loose values; asked about one, Ember repeats the row."""

    def __init__(self, draw: Draw, count: int) -> None:
        self.rows: dict[str, str] = {}
        while len(self.rows) < count:
            name = draw.pick(
                (
                    draw.proper(),
                    capital(draw.pick(words.ADJECTIVES)),
                    f"{draw.proper()} {capital(draw.pick(words.THINGS))}",
                    capital(draw.pick(NOUNS)),
                    capital(draw.item()),
                )
            )
            if any(name.lower() in other.lower() or other.lower() in name.lower() for other in self.rows):
                continue
            values = [draw.pick((f"{draw.money()} per {draw.pick(UNITS)}", f"{draw.measure()} {draw.pick(words.THINGS)}", f"{draw.count()} {plural(draw.pick(words.THINGS))} per {draw.pick(UNITS)}", f"{draw.pick(words.ADJECTIVES)} {draw.pick(words.THINGS)}", draw.span(), draw.person(), f"{draw.duration()} of {draw.pick(words.COMMON)}"))
                      for _ in range(draw.number(2, 4))]  # fmt: skip
            self.rows[name] = ", ".join(values)
        mark, colon = draw.pick(("- ", "* ", "• ", "")), draw.pick((": ", ": ", " - "))
        self.kind = draw.pick(("plan", "option", "package", "room", "ticket", ""))
        head = f"{capital(plural(self.kind))}:\n" if self.kind else ""
        self.colon = colon
        self.text = head + "\n".join(f"{mark}{name}{colon}{row}" for name, row in self.rows.items())

    @property
    def labels(self) -> list[str]:
        return list(self.rows)

    def _ask(self, draw: Draw, name: str) -> str:
        form = draw.phrase(("What is in the {x}?", "How much is the {x}?", "Tell me about the {x}.", "What does the {x} cost?", "What do I get with the {x}?", "What about the {x}?", "Describe the {x}.", "What does the {x} include?", "What can you tell me about the {x}?", "Is the {x} good?",
                            "I want the {x}.", "How expensive is the {x}?", "Do you have the {x}?", "And the {x}?"))  # fmt: skip
        return form.format(x=f"{name} {self.kind}".strip())

    def ask(self, draw: Draw) -> Ask:
        name = draw.pick(list(self.rows))
        others = [other for other in draw.few(list(self.rows), 2) if other != name]
        follows = [
            (draw.pick(("And the {x}?", "and {x}?", "What about {x}?")).format(x=other), self._answer(other))
            for other in others
        ]
        return Ask(self._ask(draw, name), self._answer(name), {}, follows)

    def _answer(self, name: str) -> str:
        return f"{name}: {self.rows[name]}."

    def miss(self, draw: Draw) -> Miss | None:
        name = draw.pick((draw.proper(), capital(draw.pick(words.ADJECTIVES))))
        return None if any(name.lower() in other.lower() for other in self.rows) else Miss(self._ask(draw, name), name)
