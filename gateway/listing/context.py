"""The parts of the gateway that lists of models are made from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.catalogue.catalogue import Catalogue, Model
from gateway.cluster.fleet import ReplicaFleet


@dataclass(frozen=True, slots=True)
class ListingContext:
    """`neuron_usd` is the price of a neuron, `calendar` gives the seconds since 1970."""

    catalogue: Catalogue
    fleet: ReplicaFleet
    neuron_usd: float
    calendar: Callable[[], float]

    def find(self, models: Sequence[Model], name: str) -> Model | None:
        """The model that `name` means, where it is among those that the caller may see."""
        model = self.catalogue.find(name)
        return model if model in models else None

    def did_you_mean(self, models: Sequence[Model], name: str) -> str:
        """What an error about a name goes on with, as Catalogue.did_you_mean."""
        visible = {model.name for model in models}
        return self.catalogue.did_you_mean(name, visible.__contains__)
