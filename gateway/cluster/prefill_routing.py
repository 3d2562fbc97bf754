"""Which replica computes a call's prompt for the one that answers it, among those whose role that is: it gathers what
connections know, has the cost decided, and remembers what went wrong. It opens no streams."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import xxhash

from gateway.cluster.client import PrefillPlace, ReplicaConnection
from gateway.cluster.prefill_choice import PrefillReason, PrefillSite, choose_prefill
from gateway.cluster.replica_entry import ReplicaEntry
from gateway.cluster.route import KEY_TOKENS, ReplicaRing

SITES_MAX: Final = 8  # that are compared for one prompt, those with the least to do
TRY_S: Final = 10.0  # what nobody knows is tried at most so often
FAILED_S: Final = 5.0  # for so long nothing goes between two replicas after a handover between them failed
_TRIED_MAX: Final = 4096
_TOKEN_BYTES: Final = 4


class PrefillRouter:
    """The routes of one model. `counters` are of calls that another replica could have computed the prompt of, by why
    which did."""

    def __init__(self, counters: Counter[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters
        self._clock = clock
        self._tried: dict[tuple[str, str], float] = {}

    def site(
        self, ring: ReplicaRing[ReplicaEntry], answers: ReplicaConnection, held: Mapping[ReplicaEntry, float],
        tokens: bytes, copies: int,
    ) -> PrefillPlace | None:  # fmt: skip
        """The replica of a ring that is to compute a prompt (packed u32); None: `answers` itself. `held` says how many
        of its tokens replicas have cached."""
        cached = {entry.connection: count for entry, count in held.items()}
        local = _site(answers, self._clock(), cached.get(answers, 0.0))
        sites = self._sites(ring, answers, cached, tokens)
        if local is None or not sites:
            return None
        choice = choose_prefill(local, [site for _, site in sites], len(tokens) // _TOKEN_BYTES, copies)
        self.counters[choice.reason] += 1
        if choice.site is None:
            return None
        connection = sites[choice.site][0]
        if choice.reason is PrefillReason.LEARN:
            if len(self._tried) >= _TRIED_MAX:
                self._tried.clear()
            self._tried[connection.address, answers.address] = self._clock()
        return PrefillPlace(connection, self._clock() + choice.arrives_s)

    def _sites(
        self, ring: ReplicaRing[ReplicaEntry], answers: ReplicaConnection,
        cached: Mapping[ReplicaConnection | None, float], tokens: bytes,
    ) -> list[tuple[ReplicaConnection, PrefillSite]]:  # fmt: skip
        """The replicas that could hand a prompt over, as far as they say what they take: some of many, the same for
        prompts that begin alike."""
        now, sites = self._clock(), []
        _, entries = ring.candidates(xxhash.xxh3_64_intdigest(tokens[: _TOKEN_BYTES * KEY_TOKENS]))
        connections = [entry.connection for entry in entries if entry.connection is not None]
        for connection in sorted(connections, key=lambda each: each.pending_tokens)[:SITES_MAX]:
            place = answers.handover_from(connection)
            failed_s = connection.failed_handovers.get(place, -FAILED_S)
            tried_s = self._tried.get((connection.address, answers.address), -TRY_S)
            if not place or connection.congested or now < failed_s + FAILED_S:
                continue
            site = _site(connection, now, cached.get(connection, 0.0), place, answers.resume_s, now >= tried_s + TRY_S)
            if site is not None:
                sites.append((connection, site))
        return sites


def _site(
    connection: ReplicaConnection, now: float, cached: float, place: str = "", resume_s: float = 0.0,
    untried: bool = False,
) -> PrefillSite | None:  # fmt: skip
    """The replica as the choice sees it; None where it does not say what prompts take."""
    load = None if connection.load is None else connection.load.prefill
    if load is None:
        return None
    queued = connection.queued_prompts, connection.queued_tokens, connection.queued_keys
    bytes_s = load.links.get(place, 0.0)
    age_s, coming_s = max(0.0, now - connection.load_s), connection.coming_s(now)
    return PrefillSite(load, age_s, cached, *queued, coming_s, bytes_s, resume_s, untried)
