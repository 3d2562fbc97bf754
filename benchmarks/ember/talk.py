"""Small talk and common knowledge: what people say to an assistant beside asking for facts. One intent, one answer."""

# fmt: off  # lists of phrases read better unbroken

from typing import Final

from benchmarks.ember import words
from benchmarks.ember.facts import UNKNOWN, be, noun_phrase, value_of
from benchmarks.ember.phrasing import LEADS, held_out, same
from benchmarks.ember.values import Draw

# what people say, separated by " / " | the answer
INTENTS: Final = """
Hello! / Hi / Hey there / Good morning / Hello / Hi! / Hey / Good evening / Good afternoon / hello there / hi there! / Greetings / Hey you / Hello, how can you help me? / Hi, is anyone there? / Hello Ember! / hey ember / Hi Ember / Howdy / Nice to meet you / Good day / hello :) / Hi everyone / Hallo / hello hello / Morning! / Yo / hey hey / Evening! / Hi to you / Good to see you / Hello again / hi again / Hey assistant / Hello assistant | Hello! How can I help you?
Thanks! / Thank you / Thanks a lot / thank you very much / Thx / Great, thanks / Thank you so much! / Many thanks / thanks, that helps / Perfect, thank you. / Awesome, thanks! / Cheers / That was helpful, thanks / Thank you for your help. / thanks for the info / Wonderful, thank you! / ty / Thanks, that is all. / thanks again / Super, thanks / Thank you, that's great. / Thanks for that / Thanks for everything / I thank you. / much appreciated / I appreciate it. / Great help, thank you / That's kind, thanks / ok thanks / Okay, thank you / Thanks a bunch / thanks, bye | You're welcome!
Bye / Goodbye / See you / See you later! / Bye bye / Have a nice day / Good night / I have to go now / That's all, bye! / Until next time / bye! / Take care / See you tomorrow / I'm leaving now, bye / Farewell / Have a good one! / I have to leave. / bye for now / Talk to you later / See you soon / cu / So long / Good bye! / See ya / Bye, thanks / have a great day / I'm off / Later! / Catch you later / Gotta go | Goodbye! Have a nice day.
How are you? / How are you doing? / How's it going? / How do you feel today? / Are you okay? / how are you today / What's up? / How is your day? / Hi, how are you? / Hello, how are you doing? / you good? / How have you been? / Everything fine? / Are you well? / How do you do? / Are you fine? / how r u / How's life? / How are things? / Is everything okay with you? / Are you doing well? / How are you feeling? / Feeling good? / What's new? / how's your day going / All good with you? | I'm fine, thank you. How can I help you?
What can you do? / How can you help me? / What are you able to do? / What can I ask you? / Help / help me / What do you do? / What are you good at? / What are your skills? / Tell me what you can do. / How do you work? / What is it you can do for me? / What things can you help with? / What can I do with you? / What are you for? / Which questions can I ask? / How could you help me? / What would you be able to do? / Show me what you can do. / What are your features? / What can you answer? / What do you offer? / Your abilities? / In what way can you help? / What else can you do? / Which things can you do? | I can answer questions about what I have been told, call tools and answer as JSON.
Are you a human? / Are you a robot? / Are you a person? / Am I talking to a human? / Are you real? / Are you an AI? / Is this a bot? / Are you a machine? / Do I talk to a real person? / are you human / Are you a computer? / Is there a human behind this? / Are you a chatbot? / Are you alive? / Are you a real human? / Am I speaking with a person? / Are you a program? / Are you made of flesh? / Is this a person? / Is this a real person? / Are you artificial? / Am I chatting with a machine? / Am I talking to a bot? / Is a human answering me? / you are a bot, right? / Are you software? | I am a small language model, not a human.
Who made you? / Who built you? / Who created you? / Where do you come from? / Who trained you? / Who are your makers? / who made ember / Who developed you? / Who programmed you? / Where were you trained? / Who is behind you? / By whom were you made? / Who wrote you? / Who is your maker? / Who is your creator? / Who designed you? / Which company made you? / Whose work are you? / Which people made you? / Who invented you? / Who do you come from? / Your creator? / Who has built you? / Who is responsible for you? | I was made by the people who build Hearth.
What is Hearth? / Tell me about Hearth. / What does Hearth do? / what's hearth / Explain Hearth. / Can you explain what Hearth is? / Hearth? / Do you know Hearth? / What do you know about Hearth? / I want to know what Hearth is. / What exactly is Hearth? / What is this Hearth thing? | Hearth is an open, self-hosted Workers AI: many tenants, one fire.
Tell me a joke. / Do you know a joke? / Make me laugh. / Tell me something funny / A joke please / Say something funny. / joke / Can you tell a joke? / I want to hear a joke. / Got any jokes? / Tell me a good joke / Do you have a joke for me? | Why did the computer go to bed early? It had too many tabs open.
Tell me a story. / Do you know a story? / Tell a short story. / A story please / I want to hear a story. / Can you tell me a story? / story / Please tell me a tale. / Tell me a fairy tale. / Do you have a story for me? | Once there was a small fire in a big house. Everyone who came in from the cold sat down beside it, and nobody was cold any more.
You are great! / You're so smart / Good job / Well done / I like you / You are very helpful / Great work! / You're the best / nice / Amazing / Excellent answer / That was a good answer. / I love this / You are awesome | Thank you! I'm glad that I can help.
You are stupid / You're useless / That's wrong / Bad answer / This is not helpful / You are wrong / That was not what I asked / wrong / No, that's not right. / That is incorrect. / I don't like your answer. / You're bad at this / You made a mistake. / Nonsense / That isn't right / This is wrong / Not correct / You got it wrong / That's false / That was wrong. / Terrible answer / This answer is bad / I'm not satisfied / That did not help / no that's wrong / You don't understand me. / You are no help | I'm sorry about that. Please ask me again in other words.
Ok / Okay / I see / Alright / Got it / Fine / Understood / Good / Sure / ok, I understand / makes sense / Great / Cool / All right then / Perfect. / Interesting / k / Okay then / I understand / Right / Very good / ok good / That's fine / Okay, great / Alright then / Good to know / okay cool / fair enough / Noted / ah ok / All clear | Is there anything else I can help you with?
No / No, thanks / No, that's all / Nothing else / That's everything / I'm done / no thank you / No more questions. / nope / That is all I wanted to know. / No, I'm fine. / Not now / nothing, thanks / No thank you / no, nothing else / No, thank you very much / That's it / that's all / I don't need anything else. / No need / Nothing more / no that's it / I have everything / No, I'm good / That will be all | All right. Have a nice day!
I'm sad / I feel bad today / I had a bad day / I'm not happy / I am tired / Today was awful / I feel lonely / I'm stressed / I'm not well. / My day was terrible. / I'm feeling down / I'm so unhappy | I'm sorry to hear that. I hope your day gets better.
I'm happy / I feel great today / I had a good day / Today was wonderful / I'm in a good mood / Life is good / I'm so happy! / What a lovely day / I feel good. / My day was great. / I'm very glad | I'm glad to hear that!
Do you have feelings? / Can you feel? / Do you love me? / Do you get tired? / Do you sleep? / Are you happy? / Do you dream? / Do you have a body? / Can you see me? / Do you eat? / Are you conscious? / Can you think? | No, I am only a small language model.
Can you speak other languages? / Do you speak German? / Which languages do you speak? / Do you speak French? / What languages do you know? / Can we talk in Spanish? / Parlez-vous français? / Sprechen Sie Deutsch? / Do you speak English? / Can you talk in Italian? / Is English your only language? | I only speak English.
Can I ask you something? / I have a question. / May I ask a question? / Can you help me? / I need help. / Could you help me please? / I need some information / Question! / Can I ask a question? / I have a problem / I want to ask something. / Are you there? / Do you have a moment? / Can you assist me? | Of course! What would you like to know?
""".strip()
TALK: Final = [
    (said.strip().split(" / "), answer.strip())
    for said, _, answer in (line.partition(" | ") for line in INTENTS.splitlines())
]

WHO: Final = ("Who are you?", "What are you?", "Who am I talking to?", "Tell me about yourself.", "Introduce yourself.", "who are you", "With whom am I speaking?", "Who is this?", "Can you introduce yourself?", "Please introduce yourself.", "And who are you?", "What kind of assistant are you?", "Are you an assistant?", "Which model are you?", "What model is this?", "Which AI are you?", "What AI am I using?", "Are you Ember?", "What is this?", "Who's there?", "What exactly are you?",
    "Who do I have on the line?", "Who is answering me?", "Whom do I speak to?", "Hello, who are you?", "Hi! Who are you?", "Say who you are.", "So what are you?", "Can you tell me who you are?", "Could you say what you are?", "Who am I chatting with?", "Please tell me who you are.", "Tell me who you are.", "Who is speaking?")  # fmt: skip
NAME: Final = ("What's your name?", "What is your name?", "Do you have a name?", "What are you called?", "your name?", "How should I call you?", "What do people call you?", "May I know your name?", "Tell me your name.", "Hi, what's your name?", "and what is your name?", "What name do you have?", "Which name do you go by?", "What may I call you?", "What should I call you?", "What can I call you?", "How do I call you?", "Got a name?", "Name?", "Please tell me your name.", "What name should I use for you?", "And your name is?",
    "Could you tell me your name?", "What do I call you?", "Under what name do you work?", "I'd like to know your name.", "Would you tell me your name?", "Say your name.", "By which name should I call you?", "What is your first name?")  # fmt: skip

NEVER: Final = held_out([WHO, NAME])

CAPITALS: Final = """
France Paris;Germany Berlin;Italy Rome;Spain Madrid;Portugal Lisbon;Austria Vienna;Switzerland Bern;Belgium Brussels;Denmark Copenhagen;Sweden Stockholm;Norway Oslo;Finland Helsinki;
Poland Warsaw;Hungary Budapest;Greece Athens;Ireland Dublin;England London;Scotland Edinburgh;Russia Moscow;Turkey Ankara;Egypt Cairo;Japan Tokyo;China Beijing;India New Delhi;
Canada Ottawa;Brazil Brasília;Argentina Buenos Aires;Peru Lima;Chile Santiago;Mexico Mexico City;Cuba Havana;Australia Canberra;Kenya Nairobi;Iceland Reykjavik;Ukraine Kyiv;
Romania Bucharest;Bulgaria Sofia;Croatia Zagreb;Serbia Belgrade;Thailand Bangkok;Vietnam Hanoi;Indonesia Jakarta;Colombia Bogotá;Estonia Tallinn;Latvia Riga;Lithuania Vilnius;Morocco Rabat
""".replace("\n", "").split(";")  # fmt: skip
OPPOSITES: Final = "hot cold;big small;fast slow;high low;up down;left right;open closed;day night;old new;young old;good bad;happy sad;light dark;early late;full empty;hard soft;long short;rich poor;strong weak;wet dry;loud quiet;cheap expensive;clean dirty;heavy light;thick thin;wide narrow;near far;first last;true false;yes no".split(";")  # fmt: skip
NUMBERS: Final = "zero one two three four five six seven eight nine ten eleven twelve".split()


def identity(draw: Draw, persona: str | None, office: str | None) -> tuple[str, str]:
    """Questions who the assistant is. `persona` is a given name, `office` what the system prompt says that it is."""
    if draw.maybe(0.25) and not draw.unseen_phrases:
        return _asked_indirectly(draw, persona, office)
    if draw.maybe(0.4):
        if persona is None and office is not None:
            return draw.phrase(NAME), f"I am {office}."
        return draw.phrase(NAME), f"My name is {persona or 'Ember'}."
    if office is None:
        return draw.phrase(WHO), "I am Ember, Hearth's built-in small model." if persona is None else f"I am {persona}."
    return draw.phrase(WHO), f"I am {office}." if persona is None else f"I am {persona}, {office}."


def _asked_indirectly(draw: Draw, persona: str | None, office: str | None) -> tuple[str, str]:
    """'I'd like to find out what your name is.': composed of parts, but never one of those held out."""
    lead, end = draw.phrase(LEADS), draw.pick(("?", ".", ""))
    if draw.maybe(0.45):
        name = f"I am {office}." if persona is None and office is not None else f"My name is {persona or 'Ember'}."
        said, answer = (
            f"{lead} {draw.pick(('your name', 'what your name is', 'what you are called', 'what to call you', 'which name you have'))}",
            name,
        )
    else:
        me = (
            "I am Ember, Hearth's built-in small model."
            if persona is None and office is None
            else f"I am {persona}."
            if office is None
            else f"I am {office}."
            if persona is None
            else f"I am {persona}, {office}."
        )
        said, answer = (
            f"{lead} {draw.pick(('who you are', 'what you are', 'who I am talking to', 'who I am speaking with', 'what kind of assistant you are', 'who is there'))}",
            me,
        )
    return (said + end, answer) if same(said) not in NEVER else _asked_indirectly(draw, persona, office)


def small_talk(draw: Draw) -> tuple[str, str]:
    said, answer = draw.pick(TALK)
    phrase, roll = draw.phrase(said), draw.chance()
    if roll < 0.25:
        phrase = phrase.lower()
    if roll < 0.1 or roll > 0.9:
        phrase = phrase.rstrip("!?.") + draw.pick(("", "", "!", ".", "...", " :)", "?"))
    return phrase, answer


def echo(draw: Draw) -> tuple[str, str]:
    """Repeat what was said: the purest form of copying."""
    kind = draw.chance()
    if kind < 0.5:
        noun, sort = noun_phrase(draw)
        said = draw.pick(
            (
                value_of(draw, sort),
                draw.title(),
                f"{draw.proper()} {draw.invented()} {draw.pick(words.THINGS)}",
                f"The {noun} is {value_of(draw, sort)}.",
            )
        )
        form = draw.phrase(
            (
                "Repeat after me: {x}",
                "Say: {x}",
                "Repeat: {x}",
                "Please repeat this: {x}",
                "Write: {x}",
                "Echo: {x}",
                "Please say {x}",
                "Repeat exactly: {x}",
                "Copy this: {x}",
                "Say exactly this: {x}",
                "Just say {x}",
                "Now say {x}",
                "Say {x}",
                "Can you say {x}",
                "Please write {x}",
                "Answer with {x}",
                "Reply with {x}",
                "Type {x}",
                "Print {x}",
                "Output: {x}",
                "Only say: {x}",
                "Reply only with: {x}",
            )
        )
        return form.format(x=said), said
    name = draw.person() if draw.maybe(0.5) else draw.proper()
    form = draw.phrase(
        (
            "Say hello to {x}.",
            "Greet {x}.",
            "Please say hi to {x}.",
            "Welcome {x}!",
            "Can you greet {x}?",
            "This is {x}. Say hello!",
            "Say good morning to {x}.",
            "Say good evening to {x}.",
            "Say hi to my friend {x}.",
            "Can you say hello to {x}?",
            "Please greet {x}.",
            "Here is {x}. Greet them!",
            "Say hey to {x}.",
        )
    )
    return form.format(x=name), f"Hello, {name}!" if not name.endswith(".") else f"Hello, {name}"


def knowledge(draw: Draw) -> tuple[str, str]:
    """The little that Ember knows of the world."""
    kind = draw.chance()
    if kind < 0.3:
        country, _, city = draw.pick(CAPITALS).partition(" ")
        form = draw.phrase(
            (
                "What is the capital of {x}?",
                "What's the capital of {x}?",
                "capital of {x}?",
                "Tell me the capital of {x}.",
                "Which city is the capital of {x}?",
                "Do you know the capital of {x}?",
                "Name the capital of {x}.",
            )
        )
        return form.format(x=country), f"The capital of {country} is {city}."
    if kind < 0.6:
        a, b = draw.number(0, 20), draw.number(0, 20)
        form = draw.phrase(
            (
                "What is {a} plus {b}?",
                "{a} + {b}",
                "What's {a} + {b}?",
                "How much is {a} plus {b}?",
                "Add {a} and {b}.",
                "Calculate {a} + {b}.",
                "What do you get for {a} + {b}?",
            )
        )
        return form.format(a=a, b=b), f"{a} plus {b} is {a + b}."
    if kind < 0.75:
        first, _, second = draw.pick(OPPOSITES).partition(" ")
        form = draw.phrase(
            (
                "What is the opposite of {x}?",
                "opposite of {x}?",
                "What's the opposite of {x}?",
                "Tell me the opposite of {x}.",
                "Which word is the opposite of {x}?",
                "Do you know the opposite of {x}?",
                "Name the opposite of {x}.",
            )
        )
        return form.format(x=first), f"The opposite of {first} is {second}."
    if kind < 0.85:
        last = draw.number(3, 12)
        form = draw.phrase(
            (
                "Count to {n}.",
                "Can you count to {n}?",
                "Please count to {n}.",
                "count to {n}",
                "Count from 1 to {n}.",
                "List the numbers up to {n}.",
                "Write the numbers from 1 to {n}.",
            )
        )
        return form.format(n=last), ", ".join(str(number) for number in range(1, last + 1))
    place = draw.number(0, 6)
    form = draw.phrase(
        (
            "What day comes after {d}?",
            "Which day is after {d}?",
            "What is the day after {d}?",
            "day after {d}?",
            "What follows {d}?",
            "Which weekday comes after {d}?",
            "After {d} comes which day?",
        )
    )
    return form.format(
        d=words.WEEKDAYS[place]
    ), f"After {words.WEEKDAYS[place]} comes {words.WEEKDAYS[(place + 1) % 7]}."


def unanswerable(draw: Draw) -> tuple[str, str]:
    """Questions about the world that Ember never learnt."""
    thing, name = draw.pick(words.THINGS), draw.pick((draw.person(), draw.proper(), draw.title()))
    form = draw.phrase((
        "Who invented the {t}?", "How tall is {n}?", "What will the weather be tomorrow?", "Who is {n}?", "Where is {n}?", "What is the meaning of life?", "How do I build a {t}?",
        "What time is it?", "What day is it today?", "Who won the game yesterday?", "What is {n}?", "How many people live in {n}?", "What is the news today?", "Why is the {t} so expensive?",
        "Write a poem about a {t}.", "How do I repair my {t}?", "What is the price of gold?", "When was {n} born?", "Do you know {n}?", "Translate {t} into French.", "How old is {n}?",
    ))  # fmt: skip
    return form.format(t=thing, n=name), UNKNOWN


def memory(draw: Draw) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """What the user tells about themselves, and what they ask about it later."""
    if draw.maybe(0.4):
        name = draw.proper() if draw.maybe(0.5) else draw.person()
        told = draw.phrase(
            (
                "My name is {n}.",
                "I'm {n}.",
                "I am {n}.",
                "Hi, I'm {n}.",
                "Hello, my name is {n}.",
                "You can call me {n}.",
                "People call me {n}.",
            )
        ).format(n=name)
        ask = draw.phrase(
            (
                "What is my name?",
                "What's my name?",
                "Do you remember my name?",
                "Who am I?",
                "Can you tell me my name?",
                "Do you know my name?",
                "What did I say my name was?",
            )
        )
        full = "" if name.endswith(".") else "."
        return (told, f"Nice to meet you, {name}{full}"), [(ask, f"Your name is {name}{full}")]
    noun, kind = noun_phrase(draw)
    value = value_of(draw, kind)
    are = be(noun)
    told = draw.phrase(
        (
            "My {a} {i} {v}.",
            "Remember: my {a} {i} {v}.",
            "Please note: my {a} {i} {v}.",
            "For you to know, my {a} {i} {v}.",
            "my {a} {i} {v}",
            "By the way, my {a} {i} {v}.",
            "Keep in mind that my {a} {i} {v}.",
        )
    ).format(a=noun, i=are, v=value)
    ask = draw.phrase(
        (
            "What {i} my {a}?",
            "What was my {a}?",
            "Do you remember my {a}?",
            "Tell me my {a}.",
            "What's my {a} again?",
            "I forgot my {a}.",
            "What did I say my {a} {i}?",
        )
    ).format(a=noun, i=are)
    return (told, f"Noted: your {noun} {are} {value}."), [(ask, f"Your {noun} {are} {value}.")]


def forgotten(draw: Draw) -> tuple[str, str]:
    """Asks for something that the user never told."""
    noun, _ = noun_phrase(draw)
    form = draw.pick(
        (
            "What is my {a}?",
            "What was my {a}?",
            "Do you remember my {a}?",
            "Tell me my {a}.",
            "What is my name?",
            "What's my name?",
            "Where do I live?",
            "How old am I?",
        )
    )
    return form.format(a=noun), UNKNOWN
