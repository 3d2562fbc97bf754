"""Tools, requests for them and their results. A call is one line of JSON: {"name": …, "arguments": {…}}.

Half of the tools are what people really offer, half are invented, so that choosing and filling a tool is learnt
from its description and not by heart.
"""

# fmt: off  # lists of phrases read better unbroken

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.ember import words
from benchmarks.ember.facts import capital, listed, value_of
from benchmarks.ember.phrasing import held_out, ordered
from benchmarks.ember.values import Draw


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    type: str  # as in JSON schema
    kind: str  # what Draw makes, or the choices of an enum with '/' between them
    required: bool
    description: str

    def parsed(self, said: str) -> Any:
        """The value as the call has it."""
        if self.type == "integer" or (self.type == "number" and "." not in said):
            return int(said)
        return float(said) if self.type == "number" else said


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]  # with {parameter} for each parameter that a request fills

    def schema(self, draw: Draw) -> dict[str, Any]:
        """As callers send it; descriptions of parameters are sometimes missing."""
        bare = draw.maybe(0.35)
        properties: dict[str, Any] = {}
        for parameter in self.parameters:
            told: dict[str, Any] = {"type": parameter.type}
            if "/" in parameter.kind:
                told["enum"] = parameter.kind.split("/")
            if not bare and parameter.description:
                told["description"] = parameter.description
            properties[parameter.name] = told
        required = [parameter.name for parameter in self.parameters if parameter.required]
        function: dict[str, Any] = {
            "name": self.name,
            "parameters": {"type": "object", "properties": properties, "required": required},
        }
        if self.description and not draw.maybe(0.05):
            function["description"] = self.description
        return {"type": "function", "function": function} if draw.maybe(0.5) else function


# name | description | parameters: name type kind required(!) description | requests
OFFERED: Final = """
get_weather | Get the current weather in a city. | city string town ! Name of the city | What's the weather in {city}? / How is the weather in {city}? / Is it raining in {city}? / weather {city} / Tell me the weather in {city}. / Do I need an umbrella in {city}? / How warm is it in {city}? / Is it cold in {city} today? / What's it like outside in {city}?
get_forecast | Get the weather forecast for a city. | city string town ! Name of the city; days integer small ! Number of days | What will the weather be in {city} for the next {days} days? / Give me the {days} day forecast for {city}. / Forecast for {city}, {days} days. / How will the weather in {city} be over {days} days? / I need a forecast of {days} days for {city}. / Show me {days} days of forecast for {city}. / What's the outlook for {city} in the next {days} days?
book_table | Book a table in the restaurant. | name string person ! Name for the booking; guests integer small ! Number of guests; time string hour ! When | Book a table for {guests} at {time} for {name}. / I'd like a table for {guests} people at {time}, my name is {name}. / Reserve a table at {time} for {guests} under the name {name}. / Table for {guests}, {time}, {name}. / Can I book a table at {time}? We are {guests} and my name is {name}. / My name is {name}, please reserve for {guests} at {time}. / Please book for {name}: {guests} people at {time}.
book_room | Book a hotel room. | guest string person ! Name of the guest; date string iso_date ! Day of arrival; nights integer small ! Number of nights | Book a room for {guest} from {date} for {nights} nights. / I need a room on {date} for {nights} nights, name {guest}. / {guest} would like a room for {nights} nights from {date}. / Reserve a room for {nights} nights starting {date} for {guest}. / Room for {guest}, {date}, {nights} nights please. / Please book {nights} nights from {date} under {guest}. / Can {guest} get a room on {date} for {nights} nights?
order_status | Look up the status of an order. | order_id string code ! The order number | Where is my order {order_id}? / What's the status of order {order_id}? / Has order {order_id} been shipped? / Check order {order_id} please. / I'm waiting for order {order_id}. / Can you look up my order? The number is {order_id}. / When does order {order_id} arrive? / status of {order_id}? / Please track order {order_id}.
cancel_order | Cancel an order. | order_id string code ! The order number | Cancel order {order_id}. / Please cancel my order {order_id}. / I don't want order {order_id} any more. / Can you cancel {order_id}? / I'd like to cancel the order {order_id}. / Stop order {order_id} please. / My order {order_id} must be cancelled.
send_email | Send an email. | to string email ! Address of the receiver; subject string headline ! Subject line | Send an email to {to} with the subject {subject}. / Email {to} about {subject}. / Write to {to}, subject: {subject}. / Please send a mail to {to}, the subject is {subject}. / Mail {to} with subject {subject}. / I want to send {to} an email about {subject}. / Can you email {to}? Subject {subject}.
send_message | Send a text message to a person. | person string person ! Who gets it; text string headline ! What it says | Tell {person}: {text} / Send {person} the message: {text} / Text {person}: {text} / Message {person} with: {text} / Write {person} a message that says: {text} / Let {person} know: {text} / Send a text to {person}: {text}
set_timer | Start a timer. | minutes integer count_small ! How many minutes | Set a timer for {minutes} minutes. / Start a timer of {minutes} minutes. / Timer {minutes} minutes please. / Wake me in {minutes} minutes. / Can you set a {minutes} minute timer? / I need a timer, {minutes} minutes. / Count down {minutes} minutes.
set_alarm | Set an alarm. | time string hour ! When it rings | Wake me up at {time}. / Set an alarm for {time}. / Alarm at {time} please. / I have to get up at {time}. / Can you set the alarm to {time}? / Please set my alarm for {time}. / I need an alarm at {time}.
create_reminder | Create a reminder. | text string headline ! What to remember; date string iso_date ! The day | Remind me on {date}: {text} / On {date}, remind me: {text} / Create a reminder for {date}: {text} / I need a reminder on {date} that says: {text} / Set a reminder on {date}: {text} / Please make a reminder for {date} with the text: {text} / Don't let me forget on {date}: {text}
create_event | Add an event to the calendar. | title string headline ! Title of the event; date string iso_date ! The day; time string hour ? When it starts | Add {title} to my calendar on {date}. / Put {title} in the calendar on {date} at {time}. / Create an event {title} on {date}. / New event: {title}, {date}, {time}. / Schedule {title} for {date} at {time}. / I have {title} on {date}, please add it. / Calendar: {title} on {date} at {time}.
convert_currency | Convert money from one currency to another. | amount number amount ! How much; source string money_code ! Currency to convert from; target string money_code ! Currency to convert to | Convert {amount} {source} to {target}. / How much is {amount} {source} in {target}? / What are {amount} {source} in {target}? / {amount} {source} in {target}? / I have {amount} {source}. How much {target} is that? / Please change {amount} {source} into {target}. / Exchange {amount} {source} for {target}.
calculate | Calculate with two numbers. | a number amount ! First number; operation string add/subtract/multiply/divide ! What to do; b number amount ! Second number | {operation} {a} and {b} / Please {operation} {a} and {b}. / Can you {operation} {a} and {b}? / I want to {operation} {a} and {b}. / Use the calculator to {operation} {a} and {b}. / Take {a} and {b} and {operation} them. / Now {operation} {a} and {b}, please.
search | Search the web. | query string headline ! What to look for | Search for {query}. / Look up {query} on the web. / Find something about {query}. / Search the web for {query}. / Can you search {query}? / I want to find {query}. / Please search for {query}. / web search: {query}
search_products | Search the shop for products. | query string item ! What to look for; max_price integer count_small ? Highest price | Find a {query} for at most {max_price}. / Do you have a {query}? / I'm looking for a {query}. / Show me a {query} under {max_price}. / Search the shop for {query}. / I want to buy a {query}, not more than {max_price}. / Is there a {query} for less than {max_price}?
add_to_cart | Put a product into the shopping cart. | product string item ! Name of the product; quantity integer small ! How many | Put {quantity} {product} into my cart. / Add {quantity} {product} to the cart. / I'll take {quantity} {product}. / I want {quantity} of the {product}. / {quantity} {product} please. / Add the {product} {quantity} times. / Please put the {product} in the cart, {quantity} pieces.
play_music | Play music by an artist. | artist string title ! Name of the artist | Play something by {artist}. / Play {artist}. / I want to hear {artist}. / Put on some {artist}. / Can you play {artist}? / Music by {artist} please. / Let me listen to {artist}.
turn_on | Turn a device on. | device string device ! Name of the device | Turn on the {device}. / Switch the {device} on. / Please turn the {device} on. / {device} on! / Can you switch on the {device}? / I need the {device} on. / Start the {device}.
turn_off | Turn a device off. | device string device ! Name of the device | Turn off the {device}. / Switch the {device} off. / Please turn the {device} off. / {device} off! / Can you switch off the {device}? / I don't need the {device} any more, turn it off. / Shut off the {device}.
set_temperature | Set the temperature of a room. | room string room ! Which room; degrees integer degrees ! Temperature | Set the {room} to {degrees} degrees. / Make the {room} {degrees} degrees warm. / I want {degrees} degrees in the {room}. / Heat the {room} to {degrees} degrees. / {room}: {degrees} degrees please. / Change the temperature in the {room} to {degrees}. / Please set {degrees} degrees in the {room}.
set_light | Set the light of a room. | room string room ! Which room; color string red/green/blue/white/yellow/orange ! Color of the light | Make the light in the {room} {color}. / Set the {room} light to {color}. / I want {color} light in the {room}. / Turn the {room} light {color}. / {color} light in the {room} please. / Change the light in the {room} to {color}. / Can the light in the {room} be {color}?
find_flight | Find flights between two cities. | origin string town ! Where it starts; destination string town ! Where it goes; date string iso_date ! Day of the flight | Find a flight from {origin} to {destination} on {date}. / I want to fly from {origin} to {destination} on {date}. / Flights {origin} to {destination}, {date}. / On {date} I fly to {destination} from {origin}. Find me a flight. / Is there a flight to {destination} from {origin} on {date}? / Search flights on {date} from {origin} to {destination}. / I need to get from {origin} to {destination} by plane on {date}.
find_train | Find trains between two cities. | origin string town ! Where it starts; destination string town ! Where it goes | When does the next train from {origin} to {destination} leave? / Find a train from {origin} to {destination}. / Trains from {origin} to {destination}? / I need a train to {destination} from {origin}. / How do I get from {origin} to {destination} by train? / Next train {origin} to {destination}. / Is there a train to {destination} leaving from {origin}?
translate | Translate a text. | text string headline ! The text; language string German/French/Spanish/Italian/Polish/Japanese ! Target language | Translate {text} into {language}. / What is {text} in {language}? / How do you say {text} in {language}? / {text} in {language}? / Please translate this into {language}: {text} / I need {text} in {language}. / Say {text} in {language}.
get_stock_price | Get the price of a stock. | symbol string ticker ! Ticker symbol | What's the price of {symbol}? / How is {symbol} doing? / Stock price of {symbol}? / Look up the stock {symbol}. / How much is one share of {symbol}? / {symbol} price please. / What does {symbol} trade at?
get_user | Look up a user by email. | email string email ! Email address | Who has the email {email}? / Look up the user {email}. / Find the user with the address {email}. / Get the user {email}. / Which user belongs to {email}? / Show me the account of {email}. / I need the user with the email {email}.
create_ticket | Open a support ticket. | subject string headline ! What it is about; priority string low/normal/high/urgent ! How important | Open a {priority} ticket: {subject} / Create a ticket about {subject} with {priority} priority. / New {priority} priority ticket: {subject} / Please open a ticket for {subject}, priority {priority}. / I need a ticket with {priority} priority about {subject}. / Ticket: {subject}, {priority}. / Report {subject} as a {priority} ticket.
call_taxi | Order a taxi. | address string street ! Where to pick up; time string hour ? When | I need a taxi at {address}. / Order a taxi to {address} at {time}. / Taxi to {address} please. / Send a cab to {address} at {time}. / Can a taxi pick me up at {address}? / Please call a taxi for {time} at {address}. / Get me a taxi from {address}.
get_balance | Get the balance of an account. | account string code ! Account number | What's the balance of account {account}? / How much money is in {account}? / Show the balance of {account}. / Balance of {account}? / How much do I have in account {account}? / Check account {account}. / Tell me what is left in {account}.
transfer_money | Transfer money to someone. | recipient string person ! Who gets it; amount number amount ! How much | Send {amount} to {recipient}. / Transfer {amount} to {recipient}. / Pay {recipient} {amount}. / {recipient} gets {amount} from me. / Please send {recipient} {amount}. / I owe {recipient} {amount}, please pay. / Make a transfer of {amount} to {recipient}.
get_time | Get the current time in a city. | city string town ! Name of the city | What time is it in {city}? / Time in {city}? / How late is it in {city}? / Tell me the time in {city}. / What's the local time in {city}? / Which time do they have in {city}? / current time {city}
check_stock | Check how many pieces of a product are in stock. | product string item ! Name of the product | How many {product} are in stock? / Is the {product} in stock? / Check the stock of {product}. / Do we have any {product} left? / Stock of {product}? / Are there still {product} in the warehouse? / How many pieces of {product} do we have?
restart_server | Restart a server. | server string host ! Name of the server | Restart {server}. / Please reboot the server {server}. / {server} hangs, restart it. / Can you restart {server}? / Reboot {server} now. / The server {server} must be restarted. / I want you to restart {server}.
list_files | List the files in a folder. | path string path ! The folder | List the files in {path}. / What is in {path}? / Show me {path}. / Which files are in {path}? / ls {path} / Give me the files of {path}. / What files does {path} contain?
get_current_user | Get the name of the current user. | | Who am I logged in as? / Which user is this? / What's the current user? / Show the current user. / Who is logged in? / Tell me which user I am. / current user?
list_orders | List all open orders. | | Show me all open orders. / Which orders are open? / List the orders. / What orders do I have? / Are there open orders? / Give me all my orders. / open orders please
""".strip()


def _offered() -> tuple[Tool, ...]:
    tools = []
    for line in OFFERED.splitlines():
        name, description, told, requests = (part.strip() for part in line.split("|"))
        parameters = []
        for part in told.split(";") if told else []:
            parameter, kind, made, needed, text = part.strip().split(" ", 4)
            parameters.append(Parameter(parameter, kind, made, needed == "!", text))
        tools.append(Tool(name, description, tuple(parameters), tuple(requests.split(" / "))))
    return tuple(tools)


TOOLS: Final = _offered()
SLOT: Final = re.compile(r"{(\w+)}")
ACTIONS: Final = "get set find list create delete update send open close start stop check add remove read write move copy book cancel order print scan lock unlock test count show assign reserve register approve archive export import rename sync".split()  # fmt: skip
PARAMETERS: Final = (
    ("name", "string", "title"), ("id", "string", "code"), ("code", "string", "code"), ("date", "string", "iso_date"), ("time", "string", "hour"), ("amount", "integer", "count"),
    ("quantity", "integer", "small"), ("price", "number", "amount"), ("email", "string", "email"), ("phone", "string", "phone"), ("address", "string", "street"),
    ("owner", "string", "person"), ("customer", "string", "person"), ("city", "string", "town"), ("color", "string", "colour"), ("material", "string", "material"),
    ("day", "string", "weekday"), ("size", "string", "small/medium/large"), ("mode", "string", "fast/normal/slow"), ("level", "integer", "small"), ("limit", "integer", "count"),
    ("port", "integer", "port"), ("version", "string", "version"), ("path", "string", "path"), ("room", "string", "room"), ("target", "string", "host"), ("format", "string", "pdf/csv/json/txt"),
    ("department", "string", "sales/support/finance/legal"), ("year", "integer", "year"), ("weight", "number", "amount"),
)  # fmt: skip
FILLED: Final = (
    "{v} the {n} with {p}.", "Please {v} the {n}: {p}.", "{v} a {n} with {p}", "I want to {v} the {n} with {p}.", "Can you {v} the {n}? {p}.", "Could you please {v} a {n} with {p}?", "I need you to {v} the {n}, {p}.",
    "{v} {n}: {p}", "Time to {v} the {n} with {p}.", "Let's {v} the {n} with {p}.", "We have to {v} the {n}: {p}.", "Go and {v} the {n} with {p}.", "Would you {v} the {n} with {p}?", "You should {v} the {n}. {p}.",
)  # fmt: skip


def _extra(draw: Draw, kind: str) -> str:
    """Kinds of values that only tools have."""
    if kind == "town":
        return draw.proper() if draw.maybe(0.6) else draw.pick(CITIES)
    if kind == "small":
        return str(draw.number(1, 12))
    if kind == "count_small":
        return str(draw.number(2, 240))
    if kind == "degrees":
        return str(draw.number(14, 28))
    if kind == "amount":
        return str(draw.number(1, 999)) if draw.maybe(0.6) else f"{draw.number(1, 999)}.{draw.number(1, 9)}"
    if kind == "money_code":
        return draw.pick(("USD", "EUR", "GBP", "JPY", "CHF", "SEK", "PLN", "CAD", "AUD", "INR"))
    if kind == "ticker":
        return draw.own(lambda: draw.invented().upper()[: draw.number(3, 4)])
    if kind == "device":
        return draw.pick(
            (
                f"{draw.pick(words.ADJECTIVES)} {draw.pick(words.THINGS)}",
                draw.pick(words.THINGS),
                f"{draw.invented()} {draw.pick(words.THINGS)}",
            )
        )
    if kind == "room":
        return draw.pick(
            (
                "kitchen",
                "living room",
                "bedroom",
                "bathroom",
                "office",
                "hallway",
                "garage",
                f"{draw.pick(words.ADJECTIVES)} room",
                f"{draw.invented()} room",
            )
        )
    if kind == "host":
        return draw.own(lambda: f"{draw.invented()}-{draw.number(1, 99)}")
    if kind == "headline":
        return draw.pick((
            f"{draw.pick(words.ADJECTIVES)} {draw.pick(words.THINGS)}", f"{draw.pick(words.COMMON)} {draw.pick(words.COMMON)} {draw.pick(words.THINGS)}",
            f"{draw.proper()} {draw.pick(words.THINGS)}", f"the {draw.pick(words.THINGS)} is {draw.pick(words.ADJECTIVES)}", f"call {draw.person()}", f"{draw.invented()} {draw.invented()}",
            f"buy {draw.number(2, 20)} {draw.pick(words.THINGS)}s", f"meeting with {draw.proper()}", f"{draw.proper()}",
        ))  # fmt: skip
    return value_of(draw, kind)


CITIES: Final = "Paris Berlin London Rome Madrid Vienna Lisbon Oslo Dublin Prague Warsaw Athens Tokyo Boston Chicago Toronto Sydney Zurich Hamburg Munich Lyon Milan Porto Seattle Denver Austin Bergen Ghent".split()  # fmt: skip


def invented_tool(draw: Draw) -> Tool:
    """A verb, a thing and one to four parameters. Requests name each parameter before its value."""
    verb = draw.pick(ACTIONS)
    thing = draw.pick((draw.pick(words.THINGS), draw.invented(), draw.pick(words.COMMON)))
    if draw.maybe(0.3):
        thing = f"{draw.pick((draw.pick(words.ADJECTIVES), draw.invented()))} {thing}"
    chosen = draw.few(PARAMETERS, draw.pick((0, 1, 1, 2, 2, 3, 4)))
    parameters = []
    for name, kind, made in chosen:
        if draw.maybe(0.25):
            name = f"{draw.pick((draw.invented(), draw.pick(words.THINGS), draw.pick(words.ADJECTIVES)))}_{name}"
        said = name.replace("_", " ")
        parameters.append(
            Parameter(
                name,
                kind,
                made,
                draw.maybe(0.7),
                draw.pick((f"The {said}", f"{capital(said)} of the {thing}", said, "")),
            )
        )
    styles = draw.few(range(len(FILLED)), 14)
    requests = []
    for style in sorted(styles):
        told = [parameter for parameter in parameters if parameter.required or draw.maybe(0.5)]
        joint = draw.pick(("{p} {v}", "{p} {v}", "the {p} {v}", "{p}: {v}", "{p} = {v}", "{p} is {v}"))
        filled = (
            listed(
                [joint.format(p=parameter.name.replace("_", " "), v="{" + parameter.name + "}") for parameter in told]
            )
            if told
            else ""
        )
        form = FILLED[style]
        if not told:
            form = form.replace(" with {p}", "").replace(": {p}", "").replace(", {p}", "").replace(" {p}.", "")
        requests.append(
            capital(form.format(v=verb, n=thing, p=filled))
            if draw.maybe(0.7)
            else form.format(v=verb, n=thing, p=filled)
        )
    joint = draw.pick(("_", "_", "_", "camel"))
    plain = f"{verb} {thing}"
    name = (
        "".join(part if place == 0 else capital(part) for place, part in enumerate(plain.split()))
        if joint == "camel"
        else plain.replace(" ", "_")
    )
    if draw.maybe(0.15):
        name = draw.pick(
            (
                f"{draw.invented()}_{name}",
                f"{name}_{draw.invented()}",
                f"{name}_v{draw.number(1, 9)}",
                name.replace("_", "-"),
                f"{draw.invented().upper()}_{name}",
            )
        )
    description = draw.pick(
        (
            f"{capital(verb)} a {thing}.",
            f"{capital(verb)} the {thing}",
            f"Use this to {verb} a {thing}.",
            f"{capital(verb)}s the {thing}.",
            "",
        )
    )
    return Tool(name, description, tuple(parameters), tuple(requests))


# what people call the same parameter
SYNONYMS: Final = {
    "city": ("city", "location", "place", "town", "city_name", "q", "where"), "days": ("days", "num_days", "day_count", "n"), "name": ("name", "customer_name", "guest_name", "customer", "on_name"),
    "guests": ("guests", "people", "party_size", "persons", "seats"), "time": ("time", "at", "when", "start_time", "hour"), "date": ("date", "day", "on", "start_date", "due", "when"), "guest": ("guest", "name", "traveler", "customer"),
    "nights": ("nights", "stay", "duration", "num_nights"), "order_id": ("order_id", "id", "orderId", "order", "number", "order_number"), "to": ("to", "recipient", "address", "email", "receiver"), "subject": ("subject", "title", "topic", "about", "summary"),
    "person": ("person", "contact", "recipient", "to", "name"), "text": ("text", "message", "content", "body", "note"), "minutes": ("minutes", "duration", "length", "mins", "duration_minutes"), "title": ("title", "name", "event", "summary"),
    "amount": ("amount", "value", "sum", "total"), "source": ("source", "from_currency", "from", "base"), "target": ("target", "to_currency", "to", "quote"), "query": ("query", "q", "search", "term", "keywords"), "product": ("product", "item", "name", "product_name"),
    "quantity": ("quantity", "count", "amount", "qty", "number"), "artist": ("artist", "band", "musician", "query"), "device": ("device", "name", "device_name", "appliance"), "room": ("room", "zone", "location", "area"), "degrees": ("degrees", "temperature", "value", "target"),
    "origin": ("origin", "from_city", "start", "departure"), "destination": ("destination", "to_city", "end", "arrival"), "email": ("email", "address", "user_email", "mail"), "account": ("account", "account_id", "iban", "id"), "symbol": ("symbol", "ticker", "stock", "code"),
    "server": ("server", "host", "hostname", "machine"), "path": ("path", "folder", "directory", "dir"), "language": ("language", "lang", "target_language", "into"), "recipient": ("recipient", "to", "payee", "name"), "priority": ("priority", "level", "urgency"),
}  # fmt: skip
EXTRAS: Final = (
    Parameter("unit", "string", "celsius/fahrenheit", False, "Unit of temperature"), Parameter("lang", "string", "en/de/fr", False, "Language of the answer"), Parameter("limit", "integer", "small", False, "At most so many results"),
    Parameter("note", "string", "headline", False, "A note"), Parameter("verbose", "boolean", "true/false", False, "Whether to say more"), Parameter("format", "string", "short/long", False, "Format of the answer"),
)  # fmt: skip


def variant(draw: Draw, tool: Tool) -> Tool:
    """The tool as somebody else would have named it and its parameters; perhaps with one more that may be filled."""
    names: dict[str, str] = {}
    for parameter in tool.parameters:
        name = draw.pick(SYNONYMS.get(parameter.name, (parameter.name,)))
        if draw.maybe(0.15):
            name = f"{draw.pick((draw.invented(), draw.pick(words.ADJECTIVES)))}_{name}"
        names[parameter.name] = name if name not in names.values() else parameter.name
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    parameters = tuple(
        Parameter(
            names[p.name],
            p.type,
            p.kind,
            p.required,
            draw.pick((p.description, p.description, capital(names[p.name].replace("_", " ")), "")),
        )
        for p in tool.parameters
    )
    requests = tuple(SLOT.sub(lambda match: "{" + names[match.group(1)] + "}", form) for form in tool.requests)
    extra = draw.pick(EXTRAS)
    if draw.maybe(0.2) and extra.name not in names.values():
        parameters += (extra,)
        if extra.type == "string" and "/" in extra.kind and draw.maybe(0.4):
            tail = draw.pick(
                (
                    f" In {{{extra.name}}}, please.",
                    f" ({extra.name} {{{extra.name}}})",
                    f" Use {{{extra.name}}} for the {extra.name}.",
                    f" {capital(extra.name)}: {{{extra.name}}}.",
                )
            )
            requests = tuple(form + tail for form in requests)
    parts = tool.name.split("_")
    roll = draw.chance()
    if roll < 0.25:
        name = parts[0] + "".join(capital(part) for part in parts[1:])
    elif roll < 0.45 and len(parts) > 1:
        name = draw.pick(
            (
                f"{draw.invented()}_{draw.invented()}",
                f"{tool.name}_v{draw.number(1, 9)}",
                f"{draw.invented()}-{parts[0]}",
                f"{draw.invented().upper()}_{tool.name}",
                f"{parts[0]}_{draw.pick(('current', 'my', 'one', 'new', draw.invented()))}_{'_'.join(parts[1:])}",
                "_".join([*parts[1:], parts[0]]),
                "_".join(parts[1:]),
                f"{draw.invented()}_{tool.name}",
                "-".join(parts),
            )
        )
    else:
        name = tool.name
    return Tool(name, tool.description, parameters, requests)


def some_tools(draw: Draw, count: int) -> list[Tool]:
    """Up to `count` tools of different names and purposes."""
    tools: dict[str, Tool] = {}
    offered = draw.few(TOOLS, count)
    while len(tools) < count:
        if draw.maybe(0.55):
            tool = offered.pop()
            tool = variant(draw, tool) if draw.maybe(0.7) else tool
        else:
            tool = invented_tool(draw)
        tools.setdefault(tool.name, tool)
        if not offered:
            break
    return list(tools.values())


@dataclass(frozen=True, slots=True)
class Request:
    """What the user says, which tool that wants and with what arguments."""

    said: str
    tool: Tool
    arguments: dict[str, Any]


def request(draw: Draw, tool: Tool) -> Request:
    form = draw.phrase(tool.requests)
    if draw.maybe(0.35) and not draw.unseen_phrases:
        form = ordered(draw, form, held_out([tool.requests]))
    said = {
        parameter.name: _said(draw, parameter) for parameter in tool.parameters if "{" + parameter.name + "}" in form
    }
    if len(set(said.values())) < len(said):
        return request(draw, tool)
    arguments = {
        parameter.name: parameter.parsed(said[parameter.name])
        for parameter in tool.parameters
        if parameter.name in said
    }
    return Request(form.format(**said), tool, arguments)


def _said(draw: Draw, parameter: Parameter) -> str:
    return draw.pick(parameter.kind.split("/")) if "/" in parameter.kind else _extra(draw, parameter.kind)


def call_line(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


RESULT_KEYS: Final = (
    ("status", "status"), ("price", "money"), ("temperature", "count_small"), ("condition", "condition"), ("id", "code"), ("reference", "code"), ("total", "money"), ("time", "hour"),
    ("date", "date"), ("location", "spot"), ("name", "title"), ("amount", "count"), ("humidity", "percent"), ("duration", "duration"), ("owner", "person"), ("table", "code"), ("room", "code"),
    ("gate", "code"), ("platform", "small"), ("stock", "count"), ("message", "headline"), ("confirmation", "code"), ("balance", "money"), ("result", "count"), ("email", "email"), ("version", "version"),
)  # fmt: skip
CONDITIONS: Final = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear")
STATUSES: Final = (
    "shipped",
    "delivered",
    "confirmed",
    "open",
    "closed",
    "ready",
    "pending",
    "cancelled",
    "on the way",
    "done",
    "running",
    "booked",
)


def result(draw: Draw) -> tuple[str, str]:
    """(what a tool gives back, what Ember says about it)."""
    roll = draw.chance()
    if roll < 0.1:
        problem = draw.pick(
            (
                f"{draw.pick(words.THINGS)} not found",
                "permission denied",
                "timeout",
                f"unknown id {draw.code()}",
                "service is not available",
                f"the {draw.pick(words.THINGS)} is full",
            )
        )
        key = draw.pick(("error", "error", "error_message"))
        return json.dumps({key: problem}), f"That did not work: {problem}."
    if roll < 0.25:
        thing, value = (
            draw.pick(words.THINGS),
            draw.pick((draw.code(), draw.money(), draw.hour(), draw.title(), draw.date())),
        )
        text = draw.pick(
            (
                f"The {thing} is {value}.",
                f"Your number is {value}.",
                f"Booked: {value}.",
                f"It costs {value}.",
                f"Done, the {thing} has the number {value}.",
                f"{value} is free.",
            )
        )
        return text, text
    chosen = dict(draw.few(RESULT_KEYS, draw.pick((1, 1, 2, 2, 3))))
    fields: dict[str, Any] = {}
    for key, kind in chosen.items():
        value = (
            draw.pick(CONDITIONS)
            if kind == "condition"
            else draw.pick(STATUSES)
            if kind == "status"
            else _extra(draw, kind)
        )
        name = (
            f"{draw.pick((draw.pick(words.THINGS), draw.pick(words.ADJECTIVES), draw.invented()))}_{key}"
            if draw.maybe(0.25)
            else key
        )
        fields[name] = int(value) if value.isdigit() and value[0] != "0" and draw.maybe(0.6) else value
    told = listed([f"the {key.replace('_', ' ')} is {value}" for key, value in fields.items()])
    return json.dumps(fields, ensure_ascii=False), capital(told) + "."


def missing(draw: Draw, tool: Tool) -> tuple[str, str] | None:
    """A request that names nothing, and the question back; None for a tool that needs nothing."""
    needed = [parameter for parameter in tool.parameters if parameter.required]
    if not needed:
        return None
    plain = "".join(" " + letter.lower() if letter.isupper() else letter for letter in tool.name).replace("_", " ")
    form = draw.phrase(
        (
            "Please {p}.",
            "Can you {p}?",
            "I want to {p}.",
            "{p}",
            "I'd like to {p}.",
            "Could you {p} for me?",
            "I need to {p}.",
        )
    )
    return form.format(
        p=plain
    ), f"Please tell me the {listed([parameter.name.replace('_', ' ') for parameter in needed])}."
