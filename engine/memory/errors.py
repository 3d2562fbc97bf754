"""What is raised where memory ends."""


class OutOfDeviceMemory(Exception):
    """A step found too little memory on its device. Nothing of it counts; a smaller one may fit."""


class CaptureFailed(RuntimeError):
    """A computation could not be captured in a graph; it runs without one."""


class OutOfHostMemory(RuntimeError):
    """The host has too little memory left for what a replica is to keep there, or to copy by it."""
