"""Commands on a machine's host, which has no store and no secret of its cluster."""

from pathlib import Path

import pytest

from gateway.cli import main
from gateway.identity.host_identity import HostRole
from gateway.porter.settings import ClusterNews, news_path, write_news
from gateway.settings.config import load_config
from tests.support.hosts import host_maker

IN_THE_STORE = (
    "accounts create acme",
    "accounts list",
    "plans list",
    "tokens list acme",
    "usage acme",
    "audit list",
    "cluster init",
    "cluster members",
    "cluster token",
    "cluster remove m3",
    "models add notes models/notes",
    "models set notes --price-input 1",
    "models remove notes",
)


def become(role: HostRole, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is a member of this role from now on."""
    monkeypatch.chdir(folder)
    made = host_maker(folder / "hosts").host(role, "m2")
    state = load_config().state
    state.mkdir()
    made.paths.certificate.parent.rename(state / "identity")


@pytest.mark.parametrize("words", IN_THE_STORE)
def test_what_needs_the_store_is_refused_on_a_machine_s_host_and_says_where_to_run_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    become(HostRole.MACHINE, tmp_path, monkeypatch)
    state = load_config().state
    write_news(news_path(state), ClusterNews(gateways=["10.0.0.1:8790"]))
    assert main(words.split()) == 1
    refused = capsys.readouterr().err
    assert "this host is the machine m2 of a cluster" in refused
    assert "run this on a gateway's host, such as 10.0.0.1" in refused
    assert not list(state.glob("*.db")), "it made no store of its own"
    assert not (state / "secret").exists(), "nor a secret"


def test_a_gateway_s_host_goes_on_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    become(HostRole.GATEWAY, tmp_path, monkeypatch)
    assert main(["accounts", "create", "acme"]) == 0
    assert main(["cluster", "members"]) == 0
