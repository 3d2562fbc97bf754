"""`hearth chat`: a conversation with a model of a running server, in a terminal, or one question from standard input.
It asks as any tenant does, and keeps nothing but what /save writes.
"""

import contextlib
import json
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from cyclopts import Parameter

from gateway.commands.access.gateway_client import (
    GatewayRefused,
    GatewayUnreachable,
    OperatorRefused,
    TenantClient,
    tenant_token,
)
from gateway.commands.terminal.options import Source, command_app
from gateway.commands.terminal.output import fail

_TEACHING: Final = """\
examples:
  hearth chat                                          with the first model that writes text
  hearth chat ember --system "You answer in one word."
  hearth chat Qwen/Qwen3-0.6B --url https://hearth.example.com --token hearth_...
  echo "What is a hearth?" | hearth chat ember         one answer on stdout; what it cost on stderr

In a terminal: /system TEXT, /model NAME, /clear, /save FILE and /help; Ctrl-C stops an answer, and ends the
conversation where none runs, as Ctrl-D does. This host's own server is asked with the token of its first start; any
other one needs --token or HEARTH_TOKEN.
"""
_HELP: Final = """\
/system TEXT   what the model is told first; alone: shows it, /system none takes it back
/model NAME    goes on with another model; alone: lists them
/clear         forgets what was said, but for the system prompt
/save FILE     writes the conversation as JSON
/help          this
Ctrl-C stops an answer; Ctrl-D ends"""
_TASK: Final = "Text%20Generation"
_CONTROLS: Final = {code: "\ufffd" for code in (*range(9), *range(11, 32), 127, *range(128, 160))}

app = command_app("chat", "talk to a model of a running server", _TEACHING)


class ChatProblem(Exception):
    """The server refuses a question, or breaks an answer off; the message says why."""


@dataclass
class Conversation:
    """What was said so far to one model, and what the server is asked next."""

    client: TenantClient
    model: str
    system: str = ""
    said: list[dict[str, str]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)  # of the last answer

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.said]

    def ask(self, text: str) -> Generator[str, None, None]:
        """The pieces of the answer as they come. What came of it is kept, also where its reader stops; a question
        without an answer is not. Raises ChatProblem and GatewayUnreachable."""
        self.said.append({"role": "user", "content": text})
        self.usage = {}
        pieces: list[str] = []
        try:
            for piece in self._pieces():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.said.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.said.pop()

    def _pieces(self) -> Iterator[str]:
        body = {"model": self.model, "messages": self.messages, "stream": True}
        try:
            with contextlib.closing(
                self.client.events("v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
            ) as events:
                for event in events:
                    document = json.loads(event)
                    if "choices" not in document:
                        raise ChatProblem(_message(event))
                    self.usage = document.get("usage") or self.usage
                    for choice in document["choices"]:
                        if piece := choice["delta"].get("content"):
                            yield str(piece).translate(_CONTROLS)
        except GatewayRefused as refusal:
            raise ChatProblem(_message(refusal.content)) from None

    def cost(self, seconds: float) -> str:
        """What the last answer took, in words."""
        if not self.usage:
            return ""
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        return (
            f"{self.usage['prompt_tokens']} prompt tokens ({cached} cached), "
            f"{self.usage['completion_tokens']} of answer, {self.usage['neurons']:g} neurons, {seconds:.1f} s"
        )


def _message(content: bytes) -> str:
    """The words of an error, in whichever form."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        document = json.loads(content)
        found = document["errors"][0] if document.get("errors") else document["error"]
        return str(found["message"]).removeprefix("AiError: ")
    return content[:500].decode("utf-8", "replace") or "an empty answer"


@app.default
def chat(
    model: Annotated[str | None, Parameter(help="its name, an alias, or the end of its name")] = None,
    /,
    *,
    system: Annotated[str, Parameter(help="what the model is told first")] = "",
    url: Annotated[str | None, Parameter(help="of the gateway (default: this host's)")] = None,
    token: Annotated[
        str | None, Parameter(env_var="HEARTH_TOKEN", help="of the caller (default: that of the first start)")
    ] = None,
    source: Source,
) -> int:
    """Talk to a model of a running server."""
    config = source.load()
    try:
        client = TenantClient(config, url, tenant_token(config, url, token))
    except OperatorRefused as refusal:
        return fail(str(refusal))
    with client:
        try:
            conversation = Conversation(client, model or _models(client)[0], system)
            if not sys.stdin.isatty():
                return _answer_once(conversation)
            _require_model(client, conversation.model)
            return _converse(conversation)
        except ChatProblem as problem:
            return fail(str(problem))
        except GatewayUnreachable as problem:
            return fail(f"{problem}; `hearth serve` starts one here")


def _models(client: TenantClient) -> list[str]:
    """Names of the models that the caller may have write text. Raises ChatProblem without any."""
    try:
        found = json.loads(client.get(f"ai/models/search?task={_TASK}"))["result"]
    except GatewayRefused as refusal:
        raise ChatProblem(_message(refusal.content)) from None
    if not found:
        raise ChatProblem("the server has no model that writes text: `hearth pull` brings one")
    return [str(model["name"]) for model in found]


def _require_model(client: TenantClient, name: str) -> None:
    """Raises ChatProblem where the caller has no such model."""
    try:
        client.get(f"v1/models/{quote(name)}")
    except GatewayRefused as refusal:
        raise ChatProblem(_message(refusal.content)) from None


def _answer_once(conversation: Conversation) -> int:
    text = sys.stdin.read()
    if not text.strip():
        return fail("standard input is empty: write the question there, or start it in a terminal")
    began = time.monotonic()
    for piece in conversation.ask(text):
        print(piece, end="", flush=True)
    print()
    print(conversation.cost(time.monotonic() - began), file=sys.stderr)
    return 0


def _converse(conversation: Conversation) -> int:
    import readline  # noqa: F401  # only here: with it `input` edits lines and remembers them

    print(f"{conversation.model} at {conversation.client.url}; /help shows what there is, Ctrl-D ends")
    while True:
        try:
            line = input("› ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        try:
            if line in ("/exit", "/quit"):
                return 0
            if line.startswith("/"):
                _command(conversation, *line[1:].split(maxsplit=1))
            elif line:
                _print_answer(conversation, line)
        except (ChatProblem, GatewayUnreachable, OSError) as problem:
            print(f"! {problem}")


def _print_answer(conversation: Conversation, line: str) -> None:
    began = time.monotonic()
    pieces = conversation.ask(line)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # which ends the call
        print(" (stopped)", end="")
    print(f"\n[{conversation.cost(time.monotonic() - began) or 'stopped: nothing more is computed'}]")


def _command(conversation: Conversation, name: str = "", argument: str = "") -> None:
    """Raises ChatProblem and OSError."""
    match name:
        case "system" if argument:
            conversation.system = "" if argument == "none" else argument
        case "system":
            print(conversation.system or "no system prompt")
        case "model" if argument:
            _require_model(conversation.client, argument)
            conversation.model = argument
        case "model":
            names = _models(conversation.client)
            print("\n".join(f"{'*' if each == conversation.model else ' '} {each}" for each in names))
        case "clear":
            conversation.said.clear()
        case "save" if argument:
            document = {"model": conversation.model, "messages": conversation.messages}
            try:
                with Path(argument).expanduser().open("x", encoding="utf-8") as file:
                    file.write(msgspec.json.format(json.dumps(document, ensure_ascii=False)) + "\n")
            except FileExistsError:
                raise ChatProblem(f"{argument} is there already: name another file") from None
            print(f"saved to {argument}")
        case "help":
            print(_HELP)
        case "exit" | "quit":
            raise ChatProblem("Ctrl-D ends the conversation")
        case _:
            raise ChatProblem(
                f"there is no /{name}{' without a FILE' if name == 'save' else ''}; /help lists what there is"
            )
