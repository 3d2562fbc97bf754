"""The costs of a load beside its time: the cores that gateway and replicas on this host use, and what the gateway adds
to the time to first token."""

import time
import urllib.request
from itertools import chain
from typing import Final

import psutil
from prometheus_client.parser import text_string_to_metric_families

_ANSWER_S: Final = 10.0
_KINDS: Final = {"gateway": ("gateway.cli", "gateway"), "replica": ("engine.replica.server",)}


class ProcessCpu:
    """CPU time of gateways and replicas since this was made: of the processes below `pid`, or of all on this host."""

    def __init__(self, pid: int | None) -> None:
        below = psutil.process_iter() if pid is None else psutil.Process(pid).children(recursive=True)
        self._processes = [(kind, process) for process in below if (kind := _kind(process))]
        self._began_s, self._before = time.monotonic(), self._used_s()

    def used(self) -> dict[str, float]:
        """Cores by kind, on average until now; no entry for a kind that does not run here."""
        seconds = time.monotonic() - self._began_s
        return {kind: round((used - self._before[kind]) / seconds, 3) for kind, used in self._used_s().items()}

    def _used_s(self) -> dict[str, float]:
        used = dict.fromkeys((kind for kind, _ in self._processes), 0.0)
        for kind, process in self._processes:
            times = process.cpu_times()
            used[kind] += times.user + times.system
        return used


def _kind(process: psutil.Process) -> str | None:
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    return next((kind for kind, names in _KINDS.items() if all(name in words for name in names)), None)


class GatewayShare:
    """The gateway's share of the time to first token, by its own metric (hearth_gateway_seconds): from the request's
    head to the order's writing, and from the first token's arrival to its text.

    A client cannot measure it: a request that bypasses the gateway begins a moment earlier, and the engine's step that
    it catches by that counts many times as much as the moment.
    """

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url.rstrip('/')}/metrics"
        self._sum_s, self._count = self._read()

    def mean_ms(self) -> float | None:
        """Mean over the requests since this was made; None without any."""
        sum_s, count = self._read()
        return 1e3 * (sum_s - self._sum_s) / (count - self._count) if count > self._count else None

    def _read(self) -> tuple[float, float]:
        with urllib.request.urlopen(self._url, timeout=_ANSWER_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        sums = {"sum": 0.0, "count": 0.0}
        for sample in chain.from_iterable(family.samples for family in families):
            name, _, kind = sample.name.rpartition("_")
            if name == "hearth_gateway_seconds" and kind in sums:
                sums[kind] += sample.value
        return sums["sum"], sums["count"]
