"""The official SDKs, unchanged: clients of a Hearth that try nothing again, and a gateway in this process with one."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from tests.support.served_gateway import Served, served
from tests.support.stub_replica import MODEL

# Each SDK's path below the server and the name of its credential.
_BASES: Final = {"openai": ("/v1", "api_key"), "anthropic": ("", "api_key"), "cloudflare": ("/client/v4", "api_token")}
Client = TypeVar("Client")


class Weather(BaseModel):
    """What answers are parsed into."""

    city: str
    rain: bool


def client_of(sdk: type[Client], base_url: str, token: str) -> Client:
    """`sdk` is a class of openai, anthropic or cloudflare, for one thread or asynchronous."""
    path, credential = _BASES[sdk.__module__.partition(".")[0]]
    options: dict[str, Any] = {"base_url": f"{base_url}{path}", credential: token, "max_retries": 0}
    return sdk(**options)


@contextlib.asynccontextmanager
async def talking(sdk: type[Client], folder: Path, **options: Any) -> AsyncIterator[tuple[Served, Client]]:
    """A gateway, as `served` makes it, and an asynchronous client of it."""
    async with served(folder, **options) as gateway:
        client: Any = client_of(sdk, gateway.base_url, gateway.token)
        async with client:
            yield gateway, client


def script(gateway: Served, text: str) -> None:
    """What every answer says from now on, before it stops."""
    model = gateway.app._serving.endpoint.catalogue.find(MODEL)
    assert model is not None
    gateway.behaviour.script = model.tokenizer.encode_prompt(text)
