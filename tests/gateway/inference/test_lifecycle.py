"""A call's one end, with a work that computes nothing. The whole path is in test_pipeline."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.errors import ApiError
from gateway.inference.lifecycle import InferenceCall, Work
from gateway.inference.run_options import RunOptions
from tenants.limits.reservation import CallUsage
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL


class CountingWork(Work):
    """A work that says what it used, and counts how often it was stopped."""

    def __init__(self) -> None:
        self.cancels = 0

    async def run(self, call: InferenceCall) -> None:
        await call.reserve(5, 3)

    def spent(self, began: float) -> CallUsage:
        return CallUsage(prompt_tokens=5, completion_tokens=2)

    def cancel(self) -> None:
        self.cancels += 1


class IdleExchange:
    """The part of an exchange that a call without an answer uses."""

    def __init__(self, clock: Any, request_id: str) -> None:
        self.began, self.request_id, self.headers = clock(), request_id, dict[bytes, bytes]()
        self.extra_headers: list[Any] = []

    def watching_client(self) -> asyncio.Timeout:
        return asyncio.timeout(None)


async def parts(gateway: Served, request_id: str) -> tuple[Any, ...]:
    serving, tenancy = gateway.app._serving, gateway.app._tenancy
    caller = await tenancy.accounts.verify(gateway.token)
    model = serving.endpoint.catalogue.find(MODEL)
    return serving.context, CountingWork(), IdleExchange(serving.context.clock, request_id), caller, model, RunOptions()


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [(None, "done"), (errors.busy(), "capacity_exceeded"), (TimeoutError(), "timeout"), (ValueError(), "internal")],
)
def test_whatever_ends_a_call_settles_it_once(tmp_path: Path, problem: Exception | None, outcome: str) -> None:
    @looped
    async def scenario() -> None:
        async with served(tmp_path) as gateway:
            call = InferenceCall(*(await parts(gateway, "r1")))
            try:
                async with call.live():
                    await call.work.run(call)
                    if problem is not None:
                        raise problem
            except (ApiError, ValueError):
                assert problem is not None
            (record,) = await gateway.records()
            assert (record.outcome, record.prompt_tokens, record.completion_tokens) == (outcome, 5, 2)
            assert isinstance(call.work, CountingWork)
            assert (call.work.cancels, gateway.quota.open) == (1, 0)
            with pytest.raises(AssertionError, match="ends once"):
                call.settle()

    scenario()


@looped
async def test_a_released_call_charges_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        call = InferenceCall(*(await parts(gateway, "r2")))
        await call.work.run(call)
        assert gateway.quota.open == 1
        call.release()
        assert (gateway.quota.open, await gateway.records()) == (0, [])
        with pytest.raises(AssertionError, match="ends once"):
            call.settle()
