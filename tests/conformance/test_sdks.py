"""Every operation of the official SDKs that has a counterpart works; any other ends with an error that says so."""

from collections.abc import Iterable

import anthropic
import cloudflare
import openai
import pytest

from tests.conformance import node_sdks, python_sdks
from tests.conformance.operations import operations
from tests.conformance.row import Row, summary, table
from tests.conformance.server import Target

pytestmark = [pytest.mark.xdist_group("conformance"), pytest.mark.timeout(300)]


def check(rows: Iterable[Row]) -> None:
    found = list(rows)
    print(summary(found))
    failed = [row for row in found if row.outcome == "fail"]
    assert not failed, f"\n{table(failed)}"
    assert {row.outcome for row in found} >= {"pass", "none"}


def test_every_operation_of_the_python_sdks_works_or_says_that_it_is_not_served(hearth_target: Target) -> None:
    check(python_sdks.rows(hearth_target))


@pytest.mark.skipif(not node_sdks.ready(), reason=node_sdks.MISSING)
def test_every_operation_of_the_npm_sdks_works_or_says_that_it_is_not_served(hearth_target: Target) -> None:
    check(node_sdks.rows(hearth_target))


@pytest.mark.parametrize(
    ("client", "other"),
    [
        (openai.OpenAI(api_key="x"), openai.AsyncOpenAI(api_key="x")),
        (anthropic.Anthropic(api_key="x"), anthropic.AsyncAnthropic(api_key="x")),
        (cloudflare.Cloudflare(api_token="x"), cloudflare.AsyncCloudflare(api_token="x")),
    ],
    ids=["openai", "anthropic", "cloudflare"],
)
def test_the_async_clients_have_the_same_operations(client: object, other: object) -> None:
    """So that what the table says of one holds for the other: they share their requests and their types."""
    only = ("ai", "user", "accounts") if isinstance(client, cloudflare.Cloudflare) else ()
    mine, theirs = set(operations(client, only)), set(operations(other, only))
    assert len(mine) > 10
    assert mine ^ theirs <= {"beta.environments.work.worker", "beta.environments.work.poller"} | {
        name for name in mine ^ theirs if name.endswith(("tool_runner", "connect"))
    }
