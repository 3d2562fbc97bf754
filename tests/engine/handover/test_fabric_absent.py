"""A host that declares a fabric and has no NIXL: blocks go over the socket, and the log says why once."""

import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.handover.channel import MessageChannel
from engine.handover.dial import dial
from engine.handover.fabric import FabricEndpoints, FabricError
from engine.handover.messages import HANDOVER_VERSION, HandoverGrant, HandoverOffer
from engine.handover.receiver import BlockFormat, HandoverReceiver
from engine.handover.sender import HandoverPlan, HandoverState, OutgoingHandover
from engine.handover.staging import StagingArea
from engine.handover.transport import HostPiece
from engine.protocol.connection import listen
from tests.support.moving_replicas import SlowLink
from tests.support.waiting import wait_for

FORMAT = BlockFormat("7", "m", "r", "kv", 64)


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> FabricEndpoints:
    monkeypatch.setitem(sys.modules, "nixl", None)
    return FabricEndpoints("rack-1")


@pytest.fixture
def address(tmp_path: Path, endpoints: FabricEndpoints) -> Iterator[str]:
    area = StagingArea(1 << 20, time.monotonic)
    receiver = HandoverReceiver(listen(f"unix:{tmp_path / 'kv.sock'}"), area, FORMAT, 5.0, fabric=endpoints)
    yield f"unix:{tmp_path / 'kv.sock'}"
    receiver.close()
    endpoints.close()


def test_what_to_install_is_said_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    endpoints = FabricEndpoints("rack-1")
    for _ in range(2):
        with pytest.raises(FabricError, match=r"NIXL is not here.*hearth-server\[nixl\]"):
            endpoints.take()
        endpoints.say(endpoints.problem)
    assert capfd.readouterr().err.count("handover_fabric_unused") == 1


@pytest.mark.parametrize("other_host", [True, False])
def test_blocks_go_as_they_did_and_to_another_host_that_is_counted(
    address: str, endpoints: FabricEndpoints, other_host: bool
) -> None:
    link = SlowLink(address)
    plan = HandoverPlan(link.address if other_host else address, "7", secrets.token_bytes(32), 1)
    sender = OutgoingHandover(plan, FORMAT, dial, lambda: None, 5.0, fabric=endpoints)
    piece = wait_for(lambda: sender.piece(1))
    assert isinstance(piece, HostPiece)
    piece.view[:] = secrets.token_bytes(64)
    sender.push([b"n" * 32], piece)
    sender.seal()
    wait_for(lambda: sender.ended)
    assert (sender.state, sender.whole) == (HandoverState.SEALED, 1)
    assert (sender.over_fabric, sender.off_fabric) == (0, other_host)
    link.close()


def test_a_sender_that_has_nixl_is_granted_no_endpoint(address: str) -> None:
    with MessageChannel(dial(address), 5.0) as channel:
        channel.send(HandoverOffer(HANDOVER_VERSION, bytes(16), "7", "m", "r", "kv", 64, 1, False, [], "", "rack-1"))
        grant = channel.receive(HandoverGrant)
    assert (grant.endpoint, grant.address, grant.shared) == (b"", 0, False)
