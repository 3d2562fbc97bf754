"""Which GPUs this host's replicas may use, without torch and without waking the driver. It knows nothing of models."""

import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Final

ENVIRONMENT_NAME: Final = "CUDA_VISIBLE_DEVICES"
_DEVICE: Final = re.compile(r"nvidia\d+")
_HIDDEN: Final = ("", "-1", "NoDevFiles")  # the list ends at the first of these


def visible(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """A name for each, as CUDA_VISIBLE_DEVICES takes them; empty without a driver. What it says already is kept.

    A container sees its own device files, while /proc names all GPUs of the host.
    """
    said = environment.get(ENVIRONMENT_NAME)
    if said is not None:
        return list(takewhile(lambda name: name not in _HIDDEN, (name.strip() for name in said.split(","))))
    count = sum(1 for path in devices.glob("nvidia*") if _DEVICE.fullmatch(path.name))
    return [str(index) for index in range(count)]
