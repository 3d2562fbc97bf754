"""What the store keeps of the models that all hosts of a cluster serve: one catalogue with a revision, and what each
host has of it. It knows neither settings nor files, only what they are said to be."""

from typing import Any, Final

import msgspec

MODELS_MAX: Final = 256  # of a catalogue
CATALOGUE_BYTES_MAX: Final = 512 << 10  # as the store keeps it, so that one message between hosts carries it


class CatalogueFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a model, by its name below the model's folder, and what is in it."""

    name: str
    bytes: int
    sha256: str


class CatalogueModel(msgspec.Struct, frozen=True, array_like=True):
    """A model as a whole cluster serves it.

    settings  as [[models]] has them, without a folder.
    files     of its folder; a host has the model once it has all that it needs of them.
    hub       ORGANISATION/NAME@COMMIT where the Hugging Face hub has the same files; empty where it is not known to.
    """

    name: str
    settings: dict[str, Any]
    files: list[CatalogueFile]
    hub: str = ""


class ClusterCatalogue(msgspec.Struct, frozen=True, array_like=True):
    """All models of a cluster. `revision` is NUMBER-EDITION, and differs between any two catalogues, also where a store
    that failed over has lost one and another took its number; empty before the first change."""

    revision: str = ""
    models: list[CatalogueModel] = []

    @property
    def number(self) -> int:
        """How many changes led to it."""
        return int(self.revision.partition("-")[0] or 0)


class ModelProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a host is with one model: `state` in a word or two, `bytes` that it has of `bytes_total`, and `problem`,
    why it gets no further, in words."""

    name: str
    state: str
    bytes: int = 0
    bytes_total: int = 0
    problem: str = ""


class HostCatalogue(msgspec.Struct, frozen=True, array_like=True):
    """What a member of the cluster, ROLE/NAME, said last of the catalogue: which revision it follows, and of each model
    that it should have how far it is; `said_at` is when."""

    member_id: str
    revision: str
    models: list[ModelProgress]
    said_at: int = 0


class CatalogueTooLarge(ValueError):
    """A catalogue that no store takes."""


def encode_catalogue(catalogue: ClusterCatalogue) -> bytes:
    """The document of a catalogue, as a store keeps it. Raises CatalogueTooLarge, which names the limit."""
    if len(catalogue.models) > MODELS_MAX:
        raise CatalogueTooLarge(f"a cluster has {MODELS_MAX} models at the most: remove one first")
    document = msgspec.msgpack.encode(catalogue)
    if len(document) > CATALOGUE_BYTES_MAX:
        raise CatalogueTooLarge(
            f"the catalogue would take {len(document)} bytes, and has {CATALOGUE_BYTES_MAX} at the most: remove a "
            "model first, or take one of fewer files"
        )
    return document


decode_catalogue = msgspec.msgpack.Decoder(ClusterCatalogue).decode
