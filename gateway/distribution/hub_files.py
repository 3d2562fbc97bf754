"""Files of one commit of a repository on the Hugging Face hub, as a source beside the peers: what it gives is compared
with the catalogue's sums like theirs."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Final

from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from gateway.distribution.transfer import TransferError
from tenants.records.catalogue import CatalogueFile

_ANSWER_S: Final = 30.0
_PIECE_BYTES: Final = 1 << 20
_PARTIAL: Final = 206


class HubFiles:
    """See FileSource. `place` is ORGANISATION/NAME@COMMIT."""

    name = "the hub"

    def __init__(self, place: str, files: Sequence[CatalogueFile]) -> None:
        self._repository, _, self._commit = place.partition("@")
        self._names = {file.sha256: file.name for file in files}

    def read(self, sha256: str, offset: int) -> Iterator[bytes]:
        """Raises TransferError."""
        request = urllib.request.Request(hf_hub_url(self._repository, self._names[sha256], revision=self._commit))
        for name, value in build_hf_headers().items():
            request.add_unredirected_header(name, value)  # the token is the hub's, not its storage's
        if offset:
            request.add_header("Range", f"bytes={offset}-")
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                left = 0 if answer.status == _PARTIAL else offset  # what is to be skipped
                while piece := answer.read(_PIECE_BYTES):
                    yield piece[left:]
                    left = max(0, left - len(piece))
        except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as error:
            raise TransferError(f"the hub: {error}") from None
