"""The connection to one machine: its reports come in, demand for its models goes out."""

from collections.abc import Callable

from engine.protocol import frames
from gateway.cluster.connection import FrameProtocol


class MachineConnection(FrameProtocol):
    """`models` are those that the machine reported last to have replicas of."""

    def __init__(self, on_report: Callable[["MachineConnection", frames.MachineState], None]) -> None:
        super().__init__()
        self.models: frozenset[str] = frozenset()
        self._on_report = on_report

    def receive(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.MachineState):
            self._on_report(self, frame)

    def send_demand(self, demand: frames.ModelDemand) -> None:
        """Left out where the machine does not read: demand is sent again and again."""
        if not self.congested:
            self.send(demand)
