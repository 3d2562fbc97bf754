"""Which waiting sequences wait for blocks from disk: each once, when its turn has come. It knows no files."""

from engine.kv_blocks.kv_manager import KVManager
from engine.scheduling.waiting import WaitingQueue
from engine.sequences.sequence import FetchState, Sequence


class DiskReads:
    """The side of a disk tier that schedules. A sequence that waits for it holds nothing, and others pass it."""

    def __init__(self, kv: KVManager, waiting: WaitingQueue) -> None:
        self._kv = kv
        self._waiting = waiting

    def begin(self, sequence: Sequence) -> bool:
        """Begins to read what the disk has of a sequence whose turn has come. False: it may start; nothing was asked
        for, or that was done before."""
        host = self._kv.host
        if host is None or host.disk is None or sequence.fetch != FetchState.NONE:
            return False
        sequence.fetch = FetchState.DONE
        if sequence.namespace is None or sequence.terms.erase or sequence.staged is not None:
            return False  # what another replica handed over is there already
        match = self._kv.lease_prefix(sequence)
        lease = sequence.lease
        assert lease is not None
        namespace = self._kv.namespace_behind(match.pages[: match.public_blocks], sequence.namespace)
        tokens = sequence.tokens[match.public_blocks * self._kv.block_tokens : -1]
        waiting = self._waiting.fetching
        begun = host.fetch(
            sequence, lambda: sequence in waiting, self._kv.tree, lease, namespace, sequence.retention, tokens
        )
        self._kv.cancel_lease(sequence, match, short=False)
        if begun:
            sequence.fetch = FetchState.WAITING
            self._waiting.fetching[sequence] = None
        return begun

    def take_ready(self) -> None:
        """Lets sequences start whose blocks are in host memory now, or will not be."""
        host, waiting = self._kv.host, self._waiting.fetching
        for sequence in [] if host is None or host.disk is None else host.disk.take_ready():
            if sequence in waiting:
                sequence.fetch = FetchState.DONE
                del waiting[sequence]
