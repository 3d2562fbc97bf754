"""Frames about KV that replicas hold: what is to be forgotten, what is there, what moves; members of frames.Frame."""

import msgspec


class RaiseEpochs(msgspec.Struct, frozen=True, array_like=True, tag="epochs"):
    """gateway → replica: what it caches of these accounts or scopes, by their opaque ids, from before these epochs is
    to be found no more, and erased. Only replicas whose Hello says so know it."""

    ids: list[bytes]
    epochs: list[int]


class RouteKey(msgspec.Struct, frozen=True, array_like=True, tag="route_key"):
    """gateway → replica: tell me by names under this key (protocol/prefix_names.py) which prefixes you have, all now,
    and what changes. Only replicas whose Hello says so know it; another key ends the names under one before it."""

    key: bytes


class HeldPrefixes(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """replica → gateway: prefixes that came, left, or are in another tier, by names one behind the other, and the
    PrefixTier of each."""

    names: bytes
    tiers: bytes


class HandOver(msgspec.Struct, frozen=True, array_like=True, tag="hand_over"):
    """gateway → replica: move sequence `id` to the replica whose handovers go to `address`, and that is in its start
    `boot`. It goes on meanwhile, and ends as MOVED once its KV is held there under `key`: 32 random bytes, which open
    it to whoever Submits the same tokens in the same scope. To replicas alone whose Hello names such an address."""

    id: int
    address: str
    boot: str
    key: bytes


class HandOverFailed(msgspec.Struct, frozen=True, array_like=True, tag="hand_over_failed"):
    """replica → gateway: sequence `id` was not moved, for this reason, and goes on here."""

    id: int
    message: str
