"""The KV cache of a whole model: a pool for each group of layers that see alike, and where each layer lies. It knows no
sequences and no owners."""

from collections.abc import Sequence as Items
from dataclasses import replace

from torch import Tensor

from engine.kvcache.tensors import KVPool, KVShape
from engine.step.key_span import LayerGroup


class LayerPools:
    """The pools of a model's groups of layers, in their order; all slots are alike.

    layers  each layer's tensor in its pool.
    """

    def __init__(self, groups: Items[LayerGroup], pools: Items[KVPool]) -> None:
        assert [len(group.layers) for group in groups] == [pool.shape.layers for pool in pools]
        self.pools = pools
        self.shape = pools[0].shape
        places = {
            layer: (pool, place)
            for group, pool in zip(groups, pools, strict=True)
            for place, layer in enumerate(group.layers)
        }
        self._places = [places[layer] for layer in range(len(places))]
        self.layers = [pool.layers[place] for pool, place in self._places]

    def write(self, layer: int, slots_T: Tensor, rows_TW: Tensor) -> None:
        """As KVPool.write, of a layer of the model."""
        pool, place = self._places[layer]
        pool.write(place, slots_T, rows_TW)

    def read(self, layer: int, blocks_B: Tensor, unwritten_U: Tensor, into_LW: Tensor) -> None:
        """As KVPool.read, of a layer of the model."""
        pool, place = self._places[layer]
        pool.read(place, blocks_B, unwritten_U, into_LW)


def group_shapes(shape: KVShape, groups: Items[LayerGroup]) -> list[KVShape]:
    """The shape of each group's pool, where `shape` is that of all layers."""
    return [replace(shape, layers=len(group.layers), span=group.span) for group in groups]
