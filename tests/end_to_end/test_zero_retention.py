"""Nothing of a request that asks for zero retention is left anywhere: not in what is written, nor in the memory of what
goes on running. Canaries in every field that takes text are looked for in every form and place."""

import contextlib
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import redis
import torch

import engine.builtin_model
from engine.kvcache.tensors import KVShape, extent_blocks
from engine.memory.virtual_memory import HostMemoryDriver
from engine.protocol.reports import MemoryReport, memory_report_path
from gateway.text.tokenizer import ModelTokenizer
from tests.end_to_end.canary import Canaries, Hit, mappings, read_memory
from tests.end_to_end.conftest import EMBER, Hearth, serving
from tests.support.otlp_collector import Collector, collecting
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read through /proc")

SEED = 7
KEEP_S = 1.0
GONE_S = KEEP_S + 2.5  # for the sweep of what was kept, and the round that overwrites what libraries keep
SETTINGS = f"""
[[models]]
name = "{EMBER}"
kv_bytes = 20_000_000
[telemetry]
otlp_url = "URL"
"""


@dataclass
class Told:
    """A Hearth that was told canaries, and what is known of where it wrote."""

    hearth: Hearth
    canaries: Canaries
    collector: Collector
    operator: str  # the token of one, who reads all metrics
    tokens: list[tuple[str, dict[str, str]]]  # a credential and the headers that ask for zero retention
    redis: RedisServer | None = None
    redis_folder: Path | None = None

    def written(self) -> list[Hit]:
        """The canaries in all that is outside the processes' memory."""
        canaries, hits = self.canaries, list[Hit]()
        hits += canaries.in_folder(self.hearth.folder)
        for process in self.hearth.processes():
            hits += canaries.in_open_files(process.pid)
        for body in self.collector.bodies:
            hits += canaries.find("a trace", body)
        with self.hearth.client(self.operator) as operator:
            metrics = operator.get("/metrics").content
        assert b"hearth_account_" in metrics, "without an operator's token no account is among them"
        hits += canaries.find("/metrics", metrics)
        if self.redis is not None:
            hits += self._in_redis(self.redis)
        return hits

    def _in_redis(self, server: RedisServer) -> Iterator[Hit]:
        server.ask("CONFIG", "SET", "rdbcompression", "no")
        server.ask("SAVE")
        assert self.redis_folder is not None
        yield from self.canaries.in_folder(self.redis_folder)
        with redis.Redis.from_url(server.url) as client:
            for key in client.scan_iter(count=1000):
                yield from self.canaries.find("a key of Redis", key)
                yield from self.canaries.find(f"Redis at {key!r}", client.dump(key) or b"")

    def gateway(self) -> psutil.Process:
        (found,) = [one for one in self.hearth.processes() if " gateway " in " ".join(one.cmdline())]
        return found


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short name: sockets are below it, also those that would go to a temporary folder."""
    return tmp_path_factory.mktemp("zero")


EMBER_FOLDER = Path(engine.builtin_model.__file__).parent
TEXT = ModelTokenizer(EMBER_FOLDER)
NEVER = {str(id): -100 for id in TEXT.stop_ids}  # the answer goes on to its max_tokens


@contextlib.contextmanager
def watched(folder: Path, settings: str) -> Iterator[Told]:
    """A Hearth in which canaries can be looked for, and that has been told none."""
    canaries = Canaries(SEED)
    canaries.watch_prompts(TEXT.encode_prompt)
    served = folder / "served"
    (served / "temporary").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("TMPDIR", str(served / "temporary"))
        patch.setenv("PYTHONFAULTHANDLER", "1")
        with serving(served, SETTINGS.replace("URL", collector.url) + settings) as hearth:
            minted = hearth.command("tokens", "mint", hearth.account_id, "--permissions", "operator", "--json")
            yield Told(hearth, canaries, collector, json.loads(minted)["token"], [])


@contextlib.contextmanager
def told(folder: Path, settings: str, store: RedisServer | None = None) -> Iterator[Told]:
    """A Hearth that has been told canaries, by an account with zero retention and by single requests."""
    with watched(folder, settings) as told:
        hearth = told.hearth
        account, token = hearth.account("zero")
        _, plain = hearth.account("plain")
        hearth.command("accounts", "settings", account, "--zero-retention", "yes", "--cache-keep", f"{KEEP_S:g}s")
        time.sleep(1.1)  # for the gateway to look the account up again
        told.tokens = [(token, {}), (plain, {"cf-aig-zdr": "true"})]
        if store is not None:
            told.redis, told.redis_folder = store, folder / "redis"
        for credential, headers in told.tokens:
            tell(told, credential, headers)
        yield told


def tell(told: Told, token: str, headers: dict[str, str]) -> None:
    """Requests of all kinds, those that fail in all ways among them."""
    text = told.canaries.text
    with told.hearth.client(token) as client:
        client.headers.update(headers)

        def status(body: Any, path: str = f"/ai/run/{EMBER}", query: str = "") -> int:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return client.post(f"{path}?{query}" if query else path, content=content).status_code

        for stream in (False, True):
            for body in bodies(text, stream):
                assert status(body) == 200, body
            chat = {**conversation(text), "model": EMBER, "max_tokens": 4, "n": 2, "stream": stream}
            assert status(chat, "/ai/v1/chat/completions") == 200
        for wrong in wrong_bodies(text):
            assert status(wrong) == 400, wrong
        assert status({"prompt": text("path")}, f"/ai/run/@cf/{text('path')}/x") in (400, 404)
        assert status({"prompt": f"so {text('query')}", "max_tokens": 2}, query=f"tags={text('query')}") == 200
        assert status({"prompt": f"so {text('absent')}"}, "/ai/nothing") == 404
        answer(told, client)
        leave_early(told, client)
    cut_short(told, token, headers)


def bodies(text: Any, stream: bool) -> Iterator[dict[str, Any]]:
    labels = {"stop": [text("stop")], "user": text("user"), "metadata": {text("key"): text("value")}}
    yield {"prompt": f"so {text('prompt')} is", "max_tokens": 4, "stream": stream, **labels}
    yield {"prompt": f"so {text('raw')} is", "raw": True, "max_tokens": 4, "stream": stream}
    yield {"prompt": f"so {text('wide')} is \u4e2d, " * 8, "max_tokens": 4, "stream": stream}
    yield {"prompt": f"so {text('astral')} is \U0001f525, " * 8, "max_tokens": 4, "stream": stream}
    yield {"prompt": f"so {text('long')} is, " + "and so on " * 420, "max_tokens": 4, "stream": stream}
    yield {**conversation(text), "max_tokens": 4, "stream": stream}


def conversation(text: Any) -> dict[str, Any]:
    arguments = {text("field"): text("argument")}
    call = {"id": text("call"), "type": "function", "function": {"name": text("tool"), "arguments": arguments}}
    parameters = {"type": "object", "properties": {text("field"): {"type": "string", "description": text("schema")}}}
    tool = {"name": text("tool"), "description": f"so {text('purpose')}", "parameters": parameters}
    return {
        "messages": [
            {"role": "system", "content": f"so {text('system')} is"},
            {"role": "user", "name": text("name"), "content": f"so {text('question')} is"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": text("call"), "content": f"so {text('outcome')} is"},
            {"role": "user", "content": [{"type": "text", "text": f"so {text('part')} is"}]},
        ],
        "tools": [{"type": "function", "function": tool}],
    }


def wrong_bodies(text: Any) -> Iterator[Any]:
    yield {"prompt": f"so {text('typed')}", "max_tokens": -1}
    yield {"prompt": f"so {text('unknown')}", text("field"): 1}
    yield {"prompt": f"so {text('twice')}", "messages": [{"role": "user", "content": text("twice")}]}
    yield {"messages": [{"role": text("role"), "content": text("content")}]}
    yield {"messages": [{"role": "user", "content": f"so {text('nested')}", text("field"): {text("field"): 1}}]}
    yield {"prompt": f"so {text('endless')} is " * 9000}
    yield {"prompt": f"so {text('bias')}", "logit_bias": {"99999999": 1}}
    yield b'{"prompt": "so %s", ' % text("open").encode()
    yield b'{"prompt": "so %s \\ud800"}' % text("surrogate").encode()
    yield b'{"prompt": "so %s", "prompt": 1}' % text("repeated").encode()
    yield f"so {text('words')}".encode("utf-16-le")


def answer(told: Told, client: httpx.Client) -> None:
    """Lets the model say what nobody else says, and looks for that too."""
    body = {
        "model": EMBER, "messages": [{"role": "user", "content": "Say anything."}], "temperature": 2, "logprobs": True,
        "max_tokens": 48, "logit_bias": NEVER,
    }  # fmt: skip
    said = client.post("/ai/v1/chat/completions", json=body).json()["choices"][0]
    ids = {TEXT.token_bytes(id): id for id in range(4096)}
    found = [ids[bytes(one["bytes"])] for one in said["logprobs"]["content"]]
    told.canaries.watch_tokens(f"answer {found[:2]}", found[8:24])
    longest = max(re.findall(r"[ -~]+", said["message"]["content"]), key=len)
    assert len(longest) > 16, longest
    told.canaries.watch_text(f"answer {found[:2]}", longest)


def leave_early(told: Told, client: httpx.Client) -> None:
    """A client that leaves in the middle of a stream."""
    body = {"prompt": f"so {told.canaries.text('leaver')} is", "stream": True, "max_tokens": 1500, "logit_bias": NEVER}
    with client.stream("POST", f"/ai/run/{EMBER}", json=body) as said:
        pieces = said.iter_raw()  # named, for the client leaves as soon as nobody holds the iterator
        next(pieces)
        assert nonzero_kv_bytes(told) > 0, "the control: KV that is in use"


def cut_short(told: Told, token: str, headers: dict[str, str]) -> None:
    """A client that leaves in the middle of its own body."""
    address = urlsplit(told.hearth.base_url)
    lines = [f"POST /ai/run/{EMBER} HTTP/1.1", f"host: {address.netloc}", f"authorization: Bearer {token}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join([*lines, "content-length: 100000", "", ""])
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as client:
        client.sendall(head.encode() + b'{"prompt": "so %s is' % told.canaries.text("cut").encode() * 20)
        time.sleep(0.1)


def crash(told: Told) -> None:
    """A replica that crashes in the middle of a stream of an account with zero retention."""
    token, _ = told.tokens[0]
    (replica,) = told.hearth.replicas()
    body = {"prompt": f"so {told.canaries.text('crash')} is", "stream": True, "max_tokens": 1500, "logit_bias": NEVER}
    with told.hearth.client(token) as client, client.stream("POST", f"/ai/run/{EMBER}", json=body) as said:
        for count, _ in enumerate(said.iter_raw()):
            if count == 1:
                replica.send_signal(signal.SIGSEGV)
    wait_for(lambda: "Segmentation fault" in machine_log(told), 10, "the crash in the log")
    wait_for(lambda: runs_another(told, replica.pid), 20, "another replica")


def runs_another(told: Told, ended: int) -> bool:
    with contextlib.suppress(psutil.Error):  # it may be seen between its end and its burial
        return any(one.pid != ended for one in told.hearth.replicas())
    return False


def machine_log(told: Told) -> str:
    return (told.hearth.folder / ".hearth" / "machine.log").read_text()


def reserved_bytes(memory: MemoryReport) -> int:
    """Of the pool's addresses, as KVPool lays it out: in each layer the extents, and one more for the empty block."""
    layers = json.loads((EMBER_FOLDER / "config.json").read_text())["num_hidden_layers"]
    width = memory.kv_bytes // memory.kv_blocks // layers // memory.kv_block_tokens
    shape = KVShape(layers, 1, width // 2, memory.kv_block_tokens, torch.uint8)
    run = extent_blocks(shape, memory.kv_blocks, HostMemoryDriver.granularity)
    return layers * (-(-memory.kv_blocks // run) + 1) * run * shape.layer_block_bytes


def nonzero_kv_bytes(told: Told) -> int:
    """How many bytes of the replica's KV pool are not zero."""
    (replica,) = told.hearth.replicas()
    (pulse,) = told.hearth.folder.rglob("*.pulse")
    memory = MemoryReport(**json.loads(memory_report_path(pulse).read_text()))
    whole = reserved_bytes(memory)
    spans = [(start, end) for _, start, end in mappings(replica.pid) if end - start == whole]
    assert len(spans) == 1, f"a KV pool of {whole} bytes, and mappings {spans}"
    return sum(len(piece) - piece.count(0) for piece in read_memory(replica.pid, *spans[0]))


def test_nothing_is_left_on_disks_nor_in_memory(folder: Path) -> None:
    with told(folder, "[server]\nscrub_memory = true\n") as after:
        time.sleep(GONE_S)
        assert nonzero_kv_bytes(after) == 0
        for process in after.hearth.processes():
            assert [str(hit) for hit in after.canaries.in_memory(process.pid)] == []
            assert re.search(r"Max core file size +1 +1 ", Path(f"/proc/{process.pid}/limits").read_text())
        crash(after)
        time.sleep(GONE_S)
        assert [str(hit) for hit in after.canaries.in_memory(after.gateway().pid)] == []
        assert [str(hit) for hit in after.written()] == []
        assert list(after.hearth.folder.rglob("core*")) == []


def test_the_search_finds_what_is_written_into_logs_traces_metrics_and_the_store(folder: Path) -> None:
    """The control of the search in what is written: a text that the product itself puts into each of these places, for
    it is a model's name."""
    model = f"@cf/{Canaries(SEED).text('acme')}/ember"
    with watched(folder, f'[[models]]\nname = "{model}"\nfolder = "{EMBER_FOLDER}"\n') as after:
        state = after.hearth.folder / ".hearth"
        planted = {f"{state}/gateway.log", f"{state}/machine.log", f"{state}/hearth.db-wal", "a trace", "/metrics"}
        with after.hearth.client() as client:
            wait_for(lambda: client.post(f"/ai/run/{model}", json={"prompt": "so"}).is_success, 20, "the model serves")

        def found() -> bool:  # the gateway settles a call, and exports its trace, after it has answered
            return planted <= {hit.place for hit in after.written()}

        wait_for(found, 20, "the text in each place")


def test_without_scrubbing_memory_keeps_what_is_written_nowhere(folder: Path) -> None:
    """The control of the search in memory; and a store that is a Redis."""
    (folder / "redis").mkdir()
    store = RedisServer(folder / "redis")
    store.start()
    try:
        with told(folder, f'[store]\nurl = "{store.url}"\n', store) as after:
            time.sleep(GONE_S)
            assert nonzero_kv_bytes(after) == 0, "this does not depend on it"
            with after.hearth.client() as client:
                ordinary = {"prompt": "One fire, many tenants. " * 20, "max_tokens": 2}
                assert client.post(f"/ai/run/{EMBER}", json=ordinary).status_code == 200
            assert nonzero_kv_bytes(after) > 0, "the control: what may be kept is"
            assert next(after.canaries.in_memory(after.gateway().pid), None) is not None
            assert next(after.canaries.in_memory(after.hearth.replicas()[0].pid), None) is not None
            crash(after)
            assert [str(hit) for hit in after.written()] == []
            after.hearth.account(after.canaries.text("account"))
            assert {hit.place.split()[0] for hit in after.written()} >= {
                "Redis",
                str(folder / "redis/appendonly.aof"),
            }
    finally:
        store.close()
