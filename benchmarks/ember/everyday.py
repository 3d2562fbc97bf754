"""System prompts as businesses write them, in everyday words, and what their guests ask; matters.py has the phrasings.

Answers follow the corpus's rules: a sentence or a line is said word for word, a price is "The T costs V.", opening
hours are "On Monday we close at 18:00." What the prompt does not say has the answer that Ember does not know.
"""

# fmt: off  # lists of phrases read better unbroken

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Final

from benchmarks.ember import words
from benchmarks.ember.facts import HOW_MUCH, Ask, Miss, capital, listed
from benchmarks.ember.matters import MATTERS
from benchmarks.ember.values import Draw
from benchmarks.ember.written import WORDS


def _list(text: str) -> list[str]:
    return text.strip().replace("\n", "").split(";")


TASKS: Final = _list("""
private parties;school visits;catering;group tours;lost keys;new contracts;the garden;guided walks;repairs;refunds;orders of wine;wedding cakes;music lessons;holiday requests;allergies;deliveries;the newsletter;tax questions;press questions;
insurance;complaints;season tickets;volunteering;job applications;room keys;the archive;spare parts;test drives;mortgages;swimming lessons;the choir;costumes;lighting;sound;school meals;the school bus;homework club;donations;memberships;large orders;
returns;invoices;gift baskets;flowers for funerals;translations;visas;building plans;noise complaints;stray animals;street lamps;graves;marriages;business cards;printing;bookings for groups;airport transfers;boat licences;fishing permits;surf lessons;
the sauna;massages;hearing aids;glasses;vaccinations;lab results;home visits;physiotherapy;adoptions;dog training;horse rides;the greenhouse;compost;trees;wood;paint;tools;tyres;brakes;used cars;bike repairs;ski hire;the website;laptops;passwords;
the network;badges;travel bookings;expenses;payroll;training;security;cleaning;heating;the roof;the lift;rent;moving in;moving out;the cellar;deposits;packaging;customs;pallets;forklifts;recycling;pest control;tickets for students;subtitles;projectors
""")
DISHES: Final = _list("""
goulash;fish and chips;ramen;paella;pancakes;beef stew;ravioli;gnocchi;onion tart;vegetable soup;chili;couscous;pad thai;falafel;schnitzel;tacos;burrito;moussaka;sushi;dumplings;roast chicken;trout;salmon;steak;mushroom risotto;spinach pie;
potato soup;cheese toast;fruit salad;apple crumble;cheesecake;chocolate mousse;waffles;ice cream sundae;pretzel;rye loaf;poppy seed roll;almond croissant;rhubarb cake;plum tart;hot chocolate;chai;green tea;filter coffee;americano;iced latte;
ginger beer;lemonade;apple juice;tomato juice;glass of red wine;pint of cider;mineral water;kids' meal;soup of the day;cheese board;side salad;garlic bread;bruschetta;calzone;pizza Funghi;pizza Napoli;pizza Capricciosa;pizza Hawaii
""")
GOODS: Final = _list("""
rose bush;tulip bulb;fern;cactus;garden hose;bag of soil;watering can;hammer;drill;ladder;pot of paint;brush;notebook;fountain pen;calendar;postcard;poster;puzzle;board game;kite;teddy bear;doll;wooden train;novel;cookbook;atlas;road map;second-hand novel;
raincoat;scarf;pair of gloves;woollen hat;leather belt;handbag;umbrella;backpack;tent;air mattress;head torch;camping chair;paddle board;wetsuit;surfboard;kayak;pair of skis;snowboard;sledge;ice skates;tandem;mountain bike;cargo bike;scooter;moped;
minibus;van;small car;trailer;rowing boat;pedal boat;sailing boat;bird feeder;dog lead;cat tree;fish tank;phone case;charger;headset;keyboard;mouse;monitor;desk lamp;office chair;bookcase;mattress;duvet;pillow;candle;vase;tea set;frying pan
""")
SERVICES: Final = _list("""
haircut;shave;perm;manicure;pedicure;facial;back massage;foot massage;hot stone massage;sauna visit;tanning session;tooth cleaning;filling;crown;X-ray;eye test;hearing test;flu shot;blood test;home visit;claw trim;ear cleaning;neutering;grooming;
car wash;brake check;wheel alignment;battery change;windscreen repair;puncture repair;full service;bike check;key copy;shoe repair;zip repair;dry cleaning of a coat;shirt ironing;watch battery;passport photo;portrait;photo book;driving lesson;
piano lesson;guitar lesson;riding lesson;diving course;sailing course;pottery course;cooking class;dance class;language course;guided tour;boat tour;audio guide;day ticket;season ticket;evening ticket;family ticket;single ride;return ticket;night bus;
tent pitch;caravan pitch;cabin;dorm bed;single room;double room;family room;suite;extra bed;parking space;late check-out;airport transfer;meeting room;birthday party;moving van;birth certificate;driving licence;fishing licence;dog licence;resident's permit
""")
PETS: Final = _list(
    "cat;kitten;rabbit;parrot;hamster;guinea pig;budgie;tortoise;ferret;snake;mouse;canary;goldfish;lizard;pony;small dog;puppy"
)
OBJECTS: Final = _list(
    "umbrella;scarf;jacket;wallet;phone;charger;glasses case;hat;glove;bag;purse;teddy;ring;watch;laptop;keyring;water bottle;book;camera;backpack;coat;earring;notebook;rucksack"
)
TO_BRING: Final = _list(
    "your passport;a towel;your ID card;two photos;warm clothes;a water bottle;sun cream;good shoes;your contract;the letter;your vaccination card;a bank card;a proof of address;the old passport;swimwear;a pencil;your own mug;rain gear;a signed form;gloves;your ticket;a lunch box;a cushion;your driving licence;slippers;a sleeping bag;the receipt;your student card;last year's papers;a torch"
)
PLURALS: Final = _list(
    "towels;helmets;mats;blankets;skates;rackets;gloves;aprons;headphones;umbrellas;bathrobes;life jackets;wetsuits;climbing shoes;lab coats;paddles;bed sheets;sleeping bags;balls;clubs;poles;strollers;wheelchairs;cups;tools;pens;child seats;locks;torches;binoculars"
)
STOCK: Final = _list(
    "wedding cakes;birthday cakes;large bouquets;wreaths;turkeys;cheese platters;party trays;hats;boots;raincoats;lamps;batteries;stamps;envelopes;notebooks;magazines;newspapers;maps;toys;games;tulips;roses;herbs;seeds;eggs;oysters;candles;curtains;carpets;contact lenses;spare tyres;gas bottles;firewood bundles;light bulbs;nails;screws;bread rolls;fresh figs;crutches;hearing aids"
)
FACILITIES: Final = _list(
    "sauna;gym;bar;café;swimming pool;terrace;roof garden;library;reading room;kiosk;shop;museum shop;steam bath;tennis court;bowling alley;games room;smoking room;canteen;cloakroom;chapel;archive;climbing wall;pharmacy;nursery;workshop;darkroom;boat house;ski room;wine cellar;herb garden;aviary;study hall;computer room;cinema;ticket office;information desk;mini golf course;bakery counter;recycling yard;quiet carriage;buffet car;sun deck;duty-free shop;playroom;reptile house"
)
ROOMS: Final = _list(
    "blue room;great hall;garden room;attic;library;winter garden;conference room;chapel;upper hall;tower room;studio;cellar bar;breakfast room;music room;lounge;assembly hall;lecture room;staff room;map room;greenhouse;ballroom;courtyard;barn;gallery;red salon;mirror room;nursery;engine room;treasury"
)
COURSES: Final = _list(
    "yoga;pilates;judo;karate;ballet;salsa;tap dance;aqua fitness;spinning;zumba;boxing;tai chi;chess;pottery;painting;knitting;sewing;photography;drama;choir;Spanish;Italian;Polish;English for beginners;first aid;baby swimming;gymnastics;trampoline;fencing;archery;guitar;violin;drums;cooking;bread baking;robotics;coding;creative writing;meditation;stretching;circus"
)
EVENTS: Final = _list(
    "summer party;flea market;wine tasting;open day;book fair;parents' evening;school play;concert;quiz night;film night;poetry evening;general meeting;blood donation;fire drill;staff meeting;harvest festival;lantern walk;bake sale;ski trip;class trip;prize giving;carol concert;charity run;regatta;spring fair;science night;puppet show;auction;author's reading;jazz brunch;karaoke night;plant swap"
)
DOCS: Final = _list(
    "a passport;an identity card;a birth certificate;a driving licence;a building permit;a fishing licence;a parking permit;a marriage certificate;a residence permit;a dog licence;a work permit;a student card;a library card;a bus pass;a visa;a bank account;a credit card;a loan;a rental contract;a tax number;a voting card;a stall at the market"
)
GROUPS: Final = _list(
    "students;pensioners;families;children;locals;members;nurses;teachers;seniors;apprentices;the unemployed;large groups;residents;new customers;couples;disabled guests;firefighters;regular guests"
)
WASTES: Final = _list(
    "paper;plastic;glass;garden waste;food waste;old clothes;bulky waste;cardboard;metal;household rubbish;organic waste;Christmas trees;packaging;batteries"
)
PAYMENTS: Final = _list(
    "cash;Visa;Mastercard;PayPal;debit card;bank transfer;Apple Pay;cheques;American Express;Maestro;credit card;invoice;vouchers;gift cards;contactless card;foreign coins;large notes;Google Pay;direct debit"
)
DEEDS: Final = _list(
    "repair watches;frame pictures;sharpen knives;cut keys;clean carpets;wash curtains;bind books;tune pianos;string rackets;wax skis;paint nails;pierce ears;trim hedges;fell trees;mow lawns;build fences;clean windows;sweep chimneys;lay tiles;install ovens;deliver on Sundays;bake to order;cater for weddings;rent out cars;sell used books;buy gold;change money;print posters;scan letters;copy films;ship abroad;store furniture;tow cars;change tyres;charge batteries;recycle phones;train dogs;shear sheep;breed cats;board horses;give advice by phone;teach at home;translate letters;write invoices;check tax returns;host concerts;lend umbrellas;wrap presents;engrave rings;make puppets;roast coffee;smoke fish;brew beer;press juice;refill bottles;grind coffee;take photos;develop films;mend shoes;alter dresses;iron shirts;dye hair;treat burns;test eyes;draw blood;pull teeth;set bones"
)
DOINGS: Final = _list(
    "swim in the lake;feed the ducks;climb the wall;ride on the lawn;play football in the yard;use the piano;touch the exhibits;lean on the glass;sit on the stairs;sleep in the car;cook in the room;light candles;hang up posters;paint the walls;drill holes;keep chickens;fly a drone;play loud music;pick flowers;pick apples;take plants home;dive from the pier;fish from the bridge;skate in the hall;use the lift alone;open the windows;move the tables;borrow the projector;copy whole books;bring a pram;wear outdoor shoes;chew gum;drink wine;record the show;stand up during the ride;use the kitchen;hold a meeting;park a camper;put up a tent;wash a car;use the sauna;grill sausages;dance on the tables;ring the bell;take the stairs;feed the horses;stroke the animals"
)
DUTIES: Final = _list(
    "sign the list;show your ticket;wear a life jacket;take a shower first;switch off the light;close the gate;lock the door;return the key;register online;wash your hands;fasten your seat belt;stay on the path;keep the receipt;print your ticket;fill in a form;pay in advance;tidy the kitchen;take your rubbish home;stamp your ticket;wait for the guide;speak quietly;stay with the group;clean the grill;strip the beds;tell the driver;switch off your phone;bring back the cups;check the oil;carry an ID;book a time"
)
COLOURS: Final = _list("red;blue;green;yellow;black;white;grey;brown;orange;purple;navy;dark blue")
CLOTHES: Final = _list(
    "smart casual;no shorts;jacket and tie;black trousers;sports shoes;white shirts;warm layers;costumes welcome;no jeans;barefoot"
)
MENUS: Final = _list(
    "Settings > Privacy;Profile > Account;Billing > History;Tools > Backup;Admin > Users;My Files > Share;Help > Contact;Preferences > Data;Reports > Monthly;Team > Members;Home > Downloads;Options > Advanced;Menu > Orders"
)
COINS: Final = _list(
    "one-euro coin;two-euro coin;50 cent coin;pound coin;quarter;token;one-dollar coin;two-franc coin;20 cent coin"
)
NEAR: Final = _list(
    "next to the town hall;opposite the station;behind the church;near the harbour;by the river;at the old mill;on the market square;across from the hospital;beside the cinema;near the university;at the north gate"
)
WHERE: Final = _list("""
behind the house;in front of the building;in the back yard;at the front desk;in the cellar;on the ground floor;on the first floor;on the second floor;on the third floor;upstairs;downstairs;next to the lift;next to the bar;beside the main entrance;by the stairs;
at the back;in the courtyard;under the stairs;opposite the café;near the kitchen;in the hall;in the corridor;in the basement;on the roof;on the terrace;in the garden;at the end of the corridor;to the left of the entrance;to the right of the door;at the ticket desk;
at the kiosk;at counter {n};at desk {n};in room {n};in hall {n};on level {n};on floor {n};on deck {n};at gate {n};on platform {n};in the {room};behind the {room};across the street;on {street};at the till;in the shed;beside the pool;at the petrol station;on the car park;
at the information point;in the lobby;at reception;in the office;in the entrance;at the jetty;by the gate;on the balcony;in the barn;outside;at the side door;in the changing room;next to the toilets;at the bus stop;in the red box;on the lower deck;on the upper floor
""")
SURNAMES: Final = _list(
    "Abel;Ahmed;Baker;Bauer;Becker;Berg;Blake;Borg;Brown;Burke;Carter;Castillo;Chen;Clark;Costa;Cruz;Dahl;Diaz;Dunn;Evans;Farrell;Fischer;Ford;Garcia;Gray;Haas;Hall;Hansen;Hill;Holm;Hughes;Ito;Jansen;Jones;Kaya;Keller;Khan;Kim;King;Klein;Kovac;Kumar;Lang;Lee;Lopez;Lund;Marino;Martin;Meyer;Mills;Moore;Moreau;Nagy;Ng;Novak;O'Brien;Olsen;Park;Patel;Perez;Petit;Quinn;Reed;Ricci;Roy;Russo;Sato;Schmidt;Silva;Singh;Stone;Tanaka;Torres;Varga;Walsh;Ward;Weber;White;Wolf;Wood;Yilmaz;Young"
)
GIVENS: Final = (
    *words.GIVEN_NAMES,
    *_list(
        "Agnes;Albert;Alma;Amara;Anders;Andrea;Angus;Annika;Astrid;Bea;Bernard;Bridget;Callum;Camille;Cecilia;Conrad;Dagmar;Damien;Dario;Deborah;Dermot;Dolores;Edith;Eileen;Enzo;Esther;Fabian;Farid;Fergus;Flora;Gareth;Gemma;Gerda;Gilbert;Giulia;Gwen;Hamid;Hilda;Imogen;Ingo;Isla;Ivo;Jasmin;Jorge;Judith;Katja;Keith;Lars;Leila;Lorenzo;Lotte;Mabel;Malik;Marcel;Margot;Matilda;Mehmet;Miriam;Moritz;Nell;Nils;Noemi;Odette;Orla;Oskar;Pascal;Penelope;Pierre;Quentin;Rafael;Ramona;Rhys;Rosa;Rupert;Sabine;Salma;Selma;Silas;Sinead;Tariq;Tessa;Tomas;Ulla;Valerie;Vikram;Wilma;Winston;Xavier;Yusuf;Zara"
    ),
)
JOBS: Final = (
    *words.JOBS,
    *_list(
        "chef;cook;headmaster;school nurse;plumber;electrician;janitor;gardener;mayor;vet;dentist;hairdresser;pilot;ticket inspector;choir leader;coach;swimming teacher;music teacher;midwife;optician;baker;butcher;florist;tailor;warehouse manager;shift leader;head of accounting;IT officer;HR manager;site manager;park ranger;ship's doctor;first mate;zookeeper;conductor;stage manager;editor;landlord;building manager;night guard;tax adviser;lawyer;notary;estate agent;branch manager;personal trainer;yoga teacher;ski instructor;driving instructor;head waiter;barman;cleaner;tenants' speaker;safety officer;social worker;deputy head;class teacher"
    ),
)
NUMBERS: Final = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
ORDINALS: Final = _list("1st;2nd;5th;10th;15th;20th;25th;28th;first;third;fifth;last day")
STOPS: Final = _list(
    "Town Hall;Central Station;Market Square;Harbour;Old Bridge;University;Church Street;Airport;Hospital;Park Lane;North Pier;Castle;Mill Road;Stadium;Water Tower"
)

ROWS: Final = [
    (key.strip(), tuple(sayings.strip().split(" / ")), questions.strip().split(" / "))
    for key, sayings, questions in (line.split(" | ") for line in MATTERS.splitlines())
]
LISTS: Final[dict[str, Sequence[str]]] = {
    **WORDS,
    "task": TASKS, "dish": DISHES, "pet": PETS, "goods2": PLURALS, "goods3": STOCK, "facility": FACILITIES, "room": ROOMS, "course": COURSES, "event": EVENTS, "doc": DOCS,
    "group": GROUPS, "waste": WASTES, "pay": PAYMENTS, "colour": COLOURS, "deed": DEEDS, "doing": DOINGS, "duty": DUTIES, "goods": GOODS, "clothes": CLOTHES, "menu": MENUS, "coin": COINS, "near": NEAR, "job": JOBS, "ordinal": ORDINALS, "month": words.MONTHS, "day": words.WEEKDAYS, "service": SERVICES,
}  # fmt: skip
LEADING: Final = re.compile(r"\{([A-Z])(\w*)\}")
SLOT: Final = re.compile(r"\{(\w+)\}")
CHOICE: Final = re.compile(r"<([^<>]*)>")


class Style:
    """How one prompt writes prices and times, and the values of its slots."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.money = draw.pick(
            (
                "£{}",
                "£{}",
                "${}",
                "${}",
                "€{}",
                "{} €",
                "{} €",
                "{} euros",
                "{} euros",
                "{} dollars",
                "{} EUR",
                "{} CHF",
                "{} francs",
                "{} pounds",
                "{}",
                "{}",
                "{} kr",
                draw.pick(("{} zł", "{} Kč", "{}.-", "Fr. {}", "A${}", "{} SEK", "GBP {}", "₹{}", "EUR {}", "{}€")),
            )
        )
        self.cents = draw.pick((0.15, 0.5, 0.9))
        self.clock = draw.pick(("24", "24", "24", "pad", "dot", "12", "12", "bare", "bare", "words", "mixed"))

    def price(self) -> str:
        draw = self.draw
        if draw.maybe(0.03):
            return f"{draw.number(1, 9) * 10} cents"
        amount = str(draw.pick((draw.number(1, 30), draw.number(1, 30), draw.number(30, 150), draw.number(150, 990))))
        if draw.maybe(self.cents) and len(amount) < 3:
            amount += f".{draw.pick((draw.number(1, 9) * 10, draw.number(1, 19) * 5, draw.number(1, 99))):02d}"
        return self.money.format(amount)

    def time(self, low: int = 5, high: int = 23) -> str:
        draw = self.draw
        hour, minute = draw.number(low, high), draw.pick((0, 0, 0, 0, 15, 30, 30, 45, draw.number(1, 11) * 5))
        clock = draw.pick(("24", "12", "bare", "words", "dot")) if self.clock == "mixed" else self.clock
        twelve = (hour - 1) % 12 + 1
        if clock == "bare" and not minute:
            return str(hour)
        if clock == "12":
            return (
                f"{twelve}{f':{minute:02d}' if minute else ''}{draw.pick((' ', ' ', ''))}{'am' if hour < 12 else 'pm'}"
            )
        if clock == "words" and minute in (0, 30):
            if draw.maybe(0.15) and not minute:
                return "noon" if hour == 12 else f"{twelve} o'clock"
            part = (
                "in the morning"
                if hour < 12
                else "in the afternoon"
                if hour < 18
                else "at night"
                if hour > 21
                else "in the evening"
            )
            name = NUMBERS[twelve] if draw.maybe(0.6) else str(twelve)
            return f"half past {name}" if minute else f"{name} {part}"
        return f"{hour:02d}:{minute:02d}" if clock == "pad" else f"{hour}{'.' if clock == 'dot' else ':'}{minute:02d}"

    def number(self, low: int, high: int) -> str:
        value = self.draw.number(low, high)
        return NUMBERS[value] if value < len(NUMBERS) and self.draw.maybe(0.4) else str(value)

    def span(self, *units: tuple[str, int]) -> str:
        """A length of time, such as 'three days' or '40 minutes'."""
        draw = self.draw
        unit, most = draw.pick(units)
        if draw.maybe(0.08) and unit in ("minute", "hour"):
            return draw.pick(
                (
                    "half an hour",
                    "an hour",
                    "1 hour 20 minutes",
                    "two and a half hours",
                    "an hour and a half",
                )
            )
        if unit == "minute":
            return f"{draw.pick((5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 75, 90))} minutes"
        value = draw.number(1, most)
        return f"{NUMBERS[value] if value < len(NUMBERS) and draw.maybe(0.55) else value} {draw.pick(('working ', '', '', '')) if unit == 'day' else ''}{unit}{'s' if value > 1 else ''}"

    def name(self) -> str:
        draw, roll = self.draw, self.draw.chance()
        last = draw.pick(SURNAMES) if draw.maybe(0.6) else draw.proper()
        if roll < 0.25:
            return f"{draw.pick(('Mr.', 'Mrs.', 'Ms.', 'Dr.', 'Dr.'))} {last}"
        return f"{'Dr. ' if roll > 0.92 else ''}{self.given()} {last}"

    def given(self) -> str:
        return self.draw.pick(GIVENS) if self.draw.maybe(0.75) else self.draw.proper()

    def where(self) -> str:
        return self.draw.pick(WHERE).format(n=self.draw.number(1, 40), room=self.draw.pick(ROOMS), street=self.street())

    def street(self) -> str:
        draw = self.draw
        name = draw.pick(
            (draw.pick(words.THINGS), draw.pick(words.ADJECTIVES), draw.pick(SURNAMES), draw.invented())
        ).capitalize()
        return f"{name} {draw.pick(words.STREETS)}"

    def value(self, slot: str) -> str:
        """A value for a slot, named without its number."""
        draw = self.draw
        if slot in LISTS:
            return draw.pick(LISTS[slot])
        if slot in ("where", "price", "time", "name", "given"):
            made: str = getattr(self, slot)()
            return made
        if slot == "street":
            return f"{draw.number(1, 220)} {self.street()}" if draw.maybe(0.7) else self.street()
        if slot in ("days", "hrs", "weeks", "years", "mins"):
            units = {
                "days": (("day", 30), ("day", 12), ("week", 4)),
                "hrs": (("hour", 48), ("day", 5)),
                "weeks": (("week", 8), ("month", 6)),
                "years": (("year", 6), ("month", 36)),
                "mins": (("minute", 0), ("minute", 0), ("hour", 6)),
            }[slot]
            return self.span(*units)
        if slot == "num":
            return self.number(2, 30)
        if slot == "age":
            return self.number(3, 18)
        if slot == "desk":
            return draw.pick(
                (
                    f"at desk {draw.number(1, 20)}",
                    f"at counter {draw.number(1, 20)}",
                    f"in room {draw.number(1, 300)}",
                    f"on floor {draw.number(1, 9)}",
                    f"by {self.name()}",
                )
            )
        if slot in ("adults", "children"):
            return draw.pick(PAYERS)
        if slot == "stop":
            return draw.pick(STOPS)
        if slot == "network":
            return draw.pick(
                (
                    draw.proper(),
                    draw.proper().upper() + "-GUEST",
                    f"{draw.proper()}_{draw.pick(('Free', 'Net', 'WLAN', 'guests'))}",
                )
            )
        if slot == "code":
            return draw.code()
        if slot == "pass":
            return draw.pick(
                (
                    draw.password(),
                    draw.code(),
                    f"{draw.pick(words.THINGS)}{draw.pick(words.THINGS)}{draw.number(1, 99)}",
                )
            )
        made = getattr(draw, slot)()
        return made

    def filled(self, form: str, values: dict[str, str]) -> str:
        """The form with a choice taken for each <a;b> and a value for each {slot}; new values are added to `values`."""
        form = CHOICE.sub(lambda match: self.draw.pick(match.group(1).split(";")), form)

        def fill(match: re.Match[str]) -> str:
            slot = match.group(1).lower()
            if slot not in values:
                values[slot] = self._fresh(slot)
            return capital(values[slot]) if match.group(1)[0].isupper() else values[slot]

        return SLOT.sub(fill, form)

    def _fresh(self, slot: str) -> str:
        kind = slot.rstrip("0123456789") or slot
        special = {
            "goods": GOODS,
            "goods4": GOODS,
            "object": OBJECTS,
            "kit": TO_BRING,
            "kit2": TO_BRING,
            "goods2": PLURALS,
            "goods3": STOCK,
        }
        if slot in special:
            return self.draw.pick(special[slot])
        if slot == "time2":
            return self.time(12, 23)
        if slot in ("early", "late"):
            return self.time(5, 11) if slot == "early" else self.time(14, 23)
        if slot == "time" and self.draw.maybe(0.5):
            return self.time(5, 11)
        if slot == "num3":
            return str(self.draw.number(5, 60))
        if slot == "age3":
            return self.draw.pick(("two", "three", "four", "2", "3", "4", "five", "one"))
        return self.value("where" if kind == "where" else kind)


# -- matters ----------------------------------------------------------------------------------------------------------

ASKS: Final = (
    ("money", re.compile(r"\b(?:costs?|price|fee|expensive|tax|tip)\b|how much (?:is|are|does|do|for|holiday)|\b(?:what|how much) (?:do|does|will|would|must) .*\bpay|do .* pay\b|have to pay|must i pay|cheaper|for free|is .* free|are .* free", re.I)),
    ("degrees", re.compile(r"how warm|temperature", re.I)),
    ("deep", re.compile(r"how deep", re.I)),
    ("every", re.compile(r"how often", re.I)),
    ("size", re.compile(r"how (?:big|large|heavy|high|small)|how many (?:people|seats|lanes|bags|books|characters)|maximum|how much (?:space|storage)", re.I)),
    ("duration", re.compile(r"^(?:for )?how (?:long|many (?:days|years|minutes|hours|weeks)|much time|fast|far|early)", re.I)),
    ("who", re.compile(r"\b(?:who|whom|whose)\b|name of", re.I)),
    ("phone", re.compile(r"\b(?:number|phone you|dial)\b|telephone|how (?:do|can) i (?:reach|contact)", re.I)),
    ("where", re.compile(r"\bwhere\b|which (?:street|room|desk|floor)|what desk|address", re.I)),
    ("when", re.compile(r"\b(?:when|what time|what day|which day|what date|until|how late|by what time|how early)\b", re.I)),
)  # fmt: skip
HOLDS: Final = {
    "money": re.compile(r"\{price|\{percent|free|included|half|nothing|never", re.I),
    "degrees": re.compile("degrees"),
    "deep": re.compile("deep"),
    "every": re.compile("every|once"),
    "size": re.compile(r"\{num|\{percent|\{price"),
    "duration": re.compile(r"\{(?:days|hrs|weeks|years|mins|time|date|num|month|percent|ordinal|num3)|never", re.I),
    "who": re.compile(r"\{(?:name|given|group|job|phone|email)|only for", re.I),
    "phone": re.compile(r"\{phone|\{email|\bdial\b", re.I),
    "where": re.compile(
        r"\{(?:where|street|room|desk|menu|site|stop|near|email|phone|street2)|outside|inside|door", re.I
    ),
    "when": re.compile(r"\{(?:time|day|date|days|hrs|mins|month|ordinal|year|weeks)|never|in winter|January", re.I),
}


def answers_it(question: str, saying: str) -> bool:
    """Whether a saying of the same matter holds what the question asks for."""
    for kind, asked in ASKS:
        if asked.search(question):
            return HOLDS[kind].search(saying) is not None
    return True


def stems(text: str) -> set[str]:
    """The beginnings of its words, without slots and small words."""
    return {word[:4] for word in re.findall(r"[a-z]{3,}", SLOT.sub(" ", text).lower())} - SMALL


SMALL: Final = frozenset(
    "the and you can for are how who may get has not our any out one per its all was too way day say had her his him she did yes use due let what when wher whic have does coul woul need must from with ther your they this that much long many time take cost shou abou some here come like know want only will mean also than them then been were into each very more most anyb".split()
)


@cache
def telling_stems(sayings: tuple[str, ...]) -> frozenset[str]:
    """Stems that few of the sayings have: what sets one of them apart from the others."""
    counted = Counter(stem for saying in sayings for stem in stems(saying))
    return frozenset(stem for stem, count in counted.items() if count <= max(1, 0.4 * len(sayings)))


def is_about(sayings: tuple[str, ...], question: str, sentence: str) -> bool:
    """Whether the question is not plainly about another one of these sayings than this sentence."""
    telling = stems(question) & telling_stems(sayings)
    return not telling or bool(telling & stems(sentence))


ODD: Final = (
    "How old is the {x}?", "Who built the {x}?", "What colour is the {x}?", "How many people work in the {x}?", "What is the phone number of the {x}?", "How many windows does the {x} have?", "Who cleans the {x}?", "What is the {x} made of?", "How deep is the {x}?",
    "How warm is the {x}?", "Who invented the {x}?", "What is the history of the {x}?", "How many steps lead to the {x}?", "What does the {x} smell of?", "Who paid for the {x}?", "Is the {x} insured?", "Which music do they play at the {x}?", "How far is the {x} from the sea?",
)  # fmt: skip


class Matters:
    """Sentences or lines about one matter each; the answer is the sentence or the line."""

    def __init__(self, draw: Draw, style: Style, count: int, lines: bool) -> None:
        self.style = style
        self.told: dict[str, tuple[str, str, dict[str, str], list[str]]] = {}
        for key, sayings, questions in draw.few(ROWS, count):
            fitting = [one for one in sayings if one.startswith("~") == (lines and draw.maybe(0.75))] or sayings
            form = draw.pick(fitting)
            values: dict[str, str] = {}
            sentence = capital(style.filled(form.removeprefix("~"), values))
            if form.startswith("~") and draw.maybe(0.1):
                sentence = sentence.replace(": ", " - ", 1)
            fit = [one for one in questions if answers_it(one, form) and is_about(sayings, one, sentence)]
            self.told[key] = (form, sentence, values, fit)
        self.text = "\n".join(sentence for _, sentence, _, _ in self.told.values())

    @property
    def labels(self) -> list[str]:
        return list(self.told)

    def ask(self, draw: Draw) -> Ask:
        keys = [key for key, one in self.told.items() if one[3]]
        _, sentence, values, questions = self.told[draw.pick(keys or list(self.told))]
        question = capital(self.style.filled(draw.pick(questions or ["Tell me about it."]), dict(values)))
        return Ask(question, sentence if sentence.endswith((".", "!")) else sentence + ".")

    def miss(self, draw: Draw) -> Miss | None:
        """A question about another matter; seldom one of a place or an event that nobody would tell."""
        near = [
            values[slot]
            for _, _, values, _ in self.told.values()
            for slot in ("facility", "room", "event", "course", "goods")
            if slot in values
        ]
        if near and draw.maybe(0.1):
            return Miss(draw.pick(ODD).format(x=draw.pick(near)), "")
        key, _, questions = draw.pick(ROWS)
        if key in self.told:
            return None
        return Miss(capital(self.style.filled(draw.pick(questions), {})), key)


# -- prices ------------------------------------------------------------------------------------------------------------

PRICES: Final = (
    *HOW_MUCH, "What would the {t} cost me?", "How much would the {t} be?", "What do you want for the {t}?", "I'd like the {t}. What do I pay?", "And the {t}, what is the price?", "What's the {t}?", "the {t} please, how much?",
    "How much do you take for the {t}?", "What will I pay for the {t}?", "What does one {t} cost?", "How much is one {t}?", "How much does a {t} cost?", "What does a {t} cost?", "How much is a {t}?", "What is a {t}?", "price for a {t}?",
    "I want a {t}. How much would that be?", "What's the price of a {t}?", "How much would I pay for a {t}?", "Is a {t} expensive?", "What are you charging for a {t}?", "What's a {t} going to be?", "Could you tell me the price of a {t}?",
)  # fmt: skip
PAIRS: Final = (
    (
        ("day", "week"),
        (
            "How much is the {t} for a {c}?",
            "What does the {t} cost per {c}?",
            "I need the {t} for one {c}. How much is it?",
            "What do I pay for a {c} with the {t}?",
            "{t} for a {c}, how much?",
            "What's the price of the {t} for a {c}?",
        ),
        "The {t} costs {p} per {c}.",
    ),
    (
        ("hour", "day"),
        (
            "How much is the {t} for an {c}?",
            "What does the {t} cost per {c}?",
            "What is the price per {c} for the {t}?",
            "How much do I pay per {c} for the {t}?",
            "{t} per {c}?",
        ),
        "The {t} costs {p} per {c}.",
    ),
    (
        ("month", "year"),
        (
            "How much is the {t} a {c}?",
            "What does the {t} cost per {c}?",
            "What do I pay per {c} for the {t}?",
            "{t} for a {c}?",
        ),
        "The {t} costs {p} per {c}.",
    ),
    (
        ("small", "large"),
        (
            "How much is a {c} {t}?",
            "What does the {c} {t} cost?",
            "I'd like a {c} {t}, what do I pay?",
            "{c} {t}, how much?",
            "What's the price of a {c} {t}?",
        ),
        "The {c} {t} costs {p}.",
    ),
    (
        ("month", "deposit"),
        (
            "What is the {c} for the {t}?",
            "How much is the {t}? I mean the {c}.",
            "{t}, {c}?",
            "How high is the {c} of the {t}?",
            "What do I pay as the {c} for the {t}?",
        ),
        "The {c} for the {t} is {p}.",
    ),
    (
        ("single", "return"),
        (
            "How much is a {c} with the {t}?",
            "What does the {t} cost as a {c}?",
            "{t}, {c}, how much?",
            "I need a {c} for the {t}.",
            "What's the {c} price of the {t}?",
        ),
        "The {t} costs {p} as a {c}.",
    ),
    (
        ("weekdays", "weekends"),
        (
            "How much is the {t} on {c}?",
            "What does the {t} cost on {c}?",
            "What do we pay for the {t} on {c}?",
            "{t} on {c}?",
            "I'd like the {t} on {c}. How much?",
        ),
        "The {t} costs {p} on {c}.",
    ),
    (
        ("summer", "winter"),
        (
            "How much is the {t} in {c}?",
            "What does the {t} cost in {c}?",
            "We come in {c}. What is the {t}?",
            "{t} in {c}, price?",
            "What would the {t} be in {c}?",
        ),
        "The {t} costs {p} in {c}.",
    ),
    (
        ("half a day", "a full day"),
        (
            "How much is the {t} for {c}?",
            "What does the {t} cost for {c}?",
            "I need the {t} for {c}. What's that?",
            "What do I pay for {c} with the {t}?",
            "{t}, {c}?",
        ),
        "The {t} costs {p} for {c}.",
    ),
    (
        ("members", "guests"),
        (
            "How much is the {t} for {c}?",
            "What do {c} pay for the {t}?",
            "What does the {t} cost for {c}?",
            "{t} for {c}?",
        ),
        "The {t} costs {p} for {c}.",
    ),
    (
        ("adults", "children"),
        (
            "How much is the {t} for {c}?",
            "What do {c} pay for the {t}?",
            "What does the {t} cost for {c}?",
            "Price of the {t} for {c}?",
        ),
        "The {t} costs {p} for {c}.",
    ),
)


class Prices:
    """Things and their prices: in one sentence, in lines, on one line, or in a table of one or two columns."""

    def __init__(self, draw: Draw, style: Style, count: int) -> None:
        self.pool = draw.pick((DISHES, DISHES, GOODS, SERVICES, SERVICES, words.FOODS))
        count = max(2, min(count, 7))
        self.names = draw.few(self.pool, count) if draw.maybe(0.85) else [draw.item() for _ in range(count)]
        self.names = [name for name in self.names if not any(name != other and name in other for other in self.names)]
        self.sized: tuple[str, ...] = ()
        if draw.maybe(0.2):
            sizes = draw.pick(
                (
                    ("small", "large"),
                    ("short", "long"),
                    ("hot", "cold"),
                    ("half", "whole"),
                    ("old", "new"),
                    ("red", "white"),
                    ("single", "double"),
                )
            )
            self.names = [f"{size} {self.names[0]}" for size in sizes] + self.names[1:3]
            self.sized = tuple(self.names[: len(sizes)]) if draw.maybe(0.5) else ()
        self.costs = {name: style.price() for name in self.names}
        self.pair = draw.pick(PAIRS) if draw.maybe(0.22) else None
        self.second = {name: style.price() for name in self.names}
        self.text = self._table(draw) if self.pair else self._text(draw)

    def _table(self, draw: Draw) -> str:
        assert self.pair is not None
        first, second = self.pair[0]
        if draw.maybe(0.5):
            rows = [f"| {draw.pick(('item', 'what', 'offer', ''))} | {first} | {second} |", "|---|---|---|"]
            return "\n".join(rows + [f"| {name} | {self.costs[name]} | {self.second[name]} |" for name in self.names])
        colon = draw.pick((": ", " - "))
        return "\n".join(
            f"{draw.pick(('- ', ''))}{capital(name)}{colon}{first} {self.costs[name]}, {second} {self.second[name]}"
            for name in self.names
        )

    def _text(self, draw: Draw) -> str:
        roll, costs = draw.chance(), self.costs
        if roll < 0.45:
            verb = draw.pick((" is ", " costs ", " is ", " for "))
            parts = [
                f"{draw.pick(('a ', 'a ', 'one ', 'the '))}{name}{verb if number == 0 or draw.maybe(0.4) else ' '}{costs[name]}"
                for number, name in enumerate(self.names[:4])
            ]
            self.names = self.names[:4]
            head = "we offer " if verb == " for " else ""
            return capital(f"{head}{listed(parts)}.")
        if roll < 0.8:
            mark, colon = draw.pick(("- ", "* ", "", "", "")), draw.pick((": ", " - ", " ", " ", " ... ", ", "))
            shown = capital if draw.maybe(0.7) else str
            head = draw.pick(
                ("", "", "Prices\n", "Prices:\n", "MENU\n", "Price list:\n", "## Prices\n", "What we charge:\n")
            )
            return head + "\n".join(
                f"{mark}{shown(self._shown(name))}{colon}{draw.pick(('', '', '', 'from '))}{costs[name]}"
                for name in self.names
            )
        if roll < 0.9:
            return draw.pick((" | ", " / ", "; ", ", ")).join(
                f"{capital(self._shown(name))} {costs[name]}" for name in self.names
            )
        return "\n".join(["| name | price |", "|---|---|", *(f"| {name} | {costs[name]} |" for name in self.names)])

    def _shown(self, name: str) -> str:
        """The name as a price list has it: "tea small" for a small tea."""
        size, _, thing = name.partition(" ")
        return f"{thing} {size}" if name in self.sized else name

    @property
    def labels(self) -> list[str]:
        return self.names

    def ask(self, draw: Draw) -> Ask:
        name = draw.pick(self.names)
        if self.pair is not None:
            place = draw.number(0, 1)
            column, cost = self.pair[0][place], (self.costs, self.second)[place][name]
            form = draw.pick(self.pair[1])
            return Ask(
                capital(form.format(t=name, c=column)), self.pair[2].format(t=name, c=column, p=cost), {"price": cost}
            )
        short = (
            name.split(" of ")[0]
            if draw.maybe(0.3) and sum(name.split(" of ")[0] in other for other in self.names) == 1
            else name
        )
        others = [other for other in draw.few(self.names, 2) if other != name]
        follows = [
            (
                draw.pick(("And the {t}?", "and a {t}?", "What about the {t}?", "And a {t}?")).format(t=other),
                self._answer(other),
            )
            for other in others
        ]
        return Ask(
            capital(draw.phrase(PRICES).format(t=short)), self._answer(name), {"price": self.costs[name]}, follows
        )

    def _answer(self, name: str) -> str:
        return f"The {name} costs {self.costs[name]}."

    def miss(self, draw: Draw) -> Miss | None:
        name = draw.pick(self.pool if draw.maybe(0.6) else draw.pick((DISHES, GOODS, SERVICES)))
        if any(name in other or other in name for other in self.names):
            return None
        question = draw.pick((draw.phrase(PRICES), "Do you have a {t}?", "Do you sell a {t}?", "Can I get a {t}?"))
        return Miss(capital(question.format(t=name)), name)


PAYERS: Final = _list(
    "foot passengers;cars;motorbikes;caravans;lorries;cyclists;dogs;under tens;over 65s;day visitors;campers;one person;large dogs;small boats;trailers;walkers;hotel guests;non-members;nurses;soldiers;unemployed people;adults;children;students;families;pensioners;members;groups;locals;under fives;teenagers;children under 12;children under 6;school classes;visitors;seniors;couples;beginners;residents;guests;apprentices;two people;babies"
)
SINGLES: Final = {
    "foot passengers": "a foot passenger", "cars": "a car", "motorbikes": "a motorbike", "caravans": "a caravan", "cyclists": "a cyclist", "dogs": "a dog", "day visitors": "a day visitor", "non-members": "a non-member", "nurses": "a nurse", "trailers": "a trailer",
    "adults": "an adult", "children": "a child", "students": "a student", "families": "a family", "pensioners": "a pensioner", "members": "a member", "groups": "a group", "locals": "a local", "teenagers": "a teenager", "visitors": "a visitor", "seniors": "a senior",
    "couples": "a couple", "beginners": "a beginner", "residents": "a resident", "guests": "a guest", "apprentices": "an apprentice", "school classes": "a school class", "babies": "a baby",
}  # fmt: skip
PAY_AS_ONE: Final = (
    "What does {s} pay?", "How much is it for {s}?", "How much does {s} pay?", "What is the price for {s}?", "As {s}, what do I pay?", "I come as {s}. How much is it?", "What would {s} have to pay?", "Entry for {s}?", "What do you charge {s}?",
    "How much money is that for {s}?", "Does {s} pay less?", "one ticket for {s}, how much?", "What's it for {s}?", "Is it cheap for {s}?",
)  # fmt: skip
PAY: Final = (
    "How much do {g} pay?",
    "What do {g} pay?",
    "How much is it for {g}?",
    "What does it cost for {g}?",
    "What is the price for {g}?",
    "Do {g} pay less?",
    "What's the ticket for {g}?",
    "How much for {g}?",
    "What would {g} pay?",
    "How much is a ticket for {g}?",
    "What is it for {g}?",
    "And {g}, what do they pay?",
    "What's the fare for {g}?",
    "How much do you take for {g}?",
    "What do you charge for {g}?",
    "Price for {g}?",
    "{g}: how much?",
    "How expensive is it for {g}?",
    "What's the price for {g}, please?",
    "What does it come to for {g}?",
)


class Payers:
    """What which people pay, in one sentence or in lines."""

    def __init__(self, draw: Draw, style: Style) -> None:
        chosen = draw.few(PAYERS, draw.number(2, 4))
        self.costs = {
            one: "nothing" if draw.maybe(0.1) else style.price()
            for one in chosen
            if not any(one != other and one in other for other in chosen)
        }
        parts = [
            f"{one} {draw.pick(('pay ', 'pay ', '')) if number else 'pay '}{cost}"
            for number, (one, cost) in enumerate(self.costs.items())
        ]
        bare = [f"{one} {cost if cost != 'nothing' else 'free'}" for one, cost in self.costs.items()]
        self.text = draw.pick(
            (
                capital(listed(parts)) + ".",
                self._verbs(draw),
                "Tickets: " + ", ".join(bare) + ".",
                "Entry: " + ", ".join(bare) + ".",
                "\n".join(
                    f"{capital(one)}: {cost if cost != 'nothing' else 'free'}" for one, cost in self.costs.items()
                ),
                f"Tickets cost {listed([f'{cost} for {one}' for one, cost in self.costs.items()])}.",
            )
        )

    def _verbs(self, draw: Draw) -> str:
        """'Adults swim for 5.50 and children for 3.'"""
        verb = draw.pick(("swim", "travel", "get in", "play", "ski", "skate", "ride", "eat", "camp", "stay", "enter"))
        return (
            capital(
                listed(
                    [
                        f"{one}{'' if number else ' ' + verb} {'for ' if cost != 'nothing' else ''}{cost.replace('nothing', 'free')}"
                        for number, (one, cost) in enumerate(self.costs.items())
                    ]
                )
            )
            + "."
        )

    @property
    def labels(self) -> list[str]:
        return list(self.costs)

    def ask(self, draw: Draw) -> Ask:
        one = draw.pick(list(self.costs))
        question = capital(draw.pick(PAY).format(g=one))
        if one in SINGLES and draw.maybe(0.4):
            question = capital(draw.pick(PAY_AS_ONE).format(s=SINGLES[one]))
        return Ask(question, capital(f"{one} pay {self.costs[one]}."), {"price": self.costs[one]})

    def miss(self, draw: Draw) -> Miss | None:
        one = draw.pick(PAYERS)
        return (
            None
            if any(one in other or other in one for other in self.costs)
            else Miss(capital(draw.pick(PAY).format(g=one)), one)
        )
