"""A replica on a CPU whose ranks, or whose one process, compute each sum in as many parts as is said: replicas of the
same parts answer bit for bit alike, whatever their ranks.

python tests/support/parts_replica.py '<ReplicaSpec JSON>' PARTS
"""

import sys
from collections.abc import Sequence as Items
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.ranks import fork
from engine.replica import server


def main(argv: Items[str]) -> int:
    vars(fork)["fork_ranks"] = partial(fork.fork_ranks, parts=int(argv[1]))
    return server.main([argv[0]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
