"""The parts of the gateway that lists of models are made from."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.catalogue.catalogue import Catalogue
from gateway.cluster.fleet import ReplicaFleet


@dataclass(frozen=True, slots=True)
class ListingContext:
    """`neuron_usd` is the price of a neuron, `calendar` gives the seconds since 1970."""

    catalogue: Catalogue
    fleet: ReplicaFleet
    neuron_usd: float
    calendar: Callable[[], float]
