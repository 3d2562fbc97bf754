"""The operations a model is made of; `pick` is the one place that chooses an implementation for a device."""

from types import ModuleType

from engine.kernels import reference


def pick(device: str) -> ModuleType:
    """The module whose functions run on `device`. Raises ValueError where there is none yet."""
    if device == "cpu":
        return reference
    raise ValueError(f"device {device!r} is not supported; cpu is")
