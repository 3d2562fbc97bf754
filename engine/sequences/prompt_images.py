"""Images of prompts in a scheduler: what stands for them among tokens, when they are to be encoded, and how steps are
cut at them. It knows no pixels' meaning and not what encodes them.

A prompt has an image as a run of elements: numbers above all tokens, the same for the same image and for no other, so
that the prefix tree compares images exactly as it compares tokens. An image's rows see each other: one step computes
all of them that are not cached. A sequence that has come to an image which is not encoded sits steps out.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.protocol.types import ImageInput, RejectReason
from engine.sequences.sequence import PromptImage, Sequence, SequenceState
from engine.sequences.validation import SubmitRejected

HELD_BYTES_MAX: Final = 512 << 20  # of all images of sequences that wait or run,
ACCOUNT_BYTES_MAX: Final = 128 << 20  # and of one account's
RETRY_MS: Final = 1000
DIGEST_BYTES: Final = 32
PLACEHOLDER: Final = 1 << 31  # what a gateway sends in an image's place is no less
NOT_ENCODED: Final = "an image of this request could not be encoded; send it again, and if that does not help, another"


@dataclass(slots=True)
class ImageOrders:
    """The images of sequences, from their queueing to their end.

    to_encode  those that are to be encoded, in the order in which they are needed.
    """

    to_encode: list[PromptImage] = field(default_factory=list)
    _bytes: Counter[bytes] = field(default_factory=Counter)  # held, by account,
    _total: int = 0  # and in all

    def refuse_too_many(self, sequence: Sequence) -> None:
        """Raises SubmitRejected where a request's images are too many beside those that are held."""
        size = sum(image.size for image in sequence.images)
        if size and (self._bytes[sequence.account] + size > ACCOUNT_BYTES_MAX or self._total + size > HELD_BYTES_MAX):
            raise SubmitRejected(RejectReason.BUSY, "too many images are waiting; try again later", RETRY_MS)

    def hold(self, sequences: Items[Sequence]) -> None:
        """Counts the images of a request that is queued."""
        for image in sequences[0].images:
            image.users = len(sequences)
            self._count(sequences[0].account, image.size)

    def start(self, sequence: Sequence) -> None:
        """Orders what of a sequence that starts is neither cached nor encoded."""
        for image in sequence.images:
            if image.end > sequence.computed and image.rows_NH is None and not image.ordered:
                image.ordered = True
                self.to_encode.append(image)

    def take(self) -> list[PromptImage]:
        """The images that are to be encoded; each is returned once."""
        images, self.to_encode = self.to_encode, []
        return images

    def end(self, sequence: Sequence) -> None:
        """Lets go of an ended sequence's images. What must not be kept of the last of its request is zeroed."""
        for image in sequence.images:
            image.users -= 1
            if image.users:
                continue
            self._count(sequence.account, -image.size)
            if image.rows_NH is not None and sequence.terms.erase:
                image.rows_NH.fill(0)
            image.rows_NH, image.pixels = None, b""

    def _count(self, account: bytes, size: int) -> None:
        self._total += size
        self._bytes[account] += size
        if not self._bytes[account]:
            del self._bytes[account]

    def check(self, sequences: Items[Sequence]) -> None:
        """Every image that is held is of a sequence that has not ended, and is counted once."""
        held = {image: sequence for sequence in sequences for image in sequence.images}
        users = Counter(image for sequence in sequences for image in sequence.images)
        assert all(image.users == count for image, count in users.items())
        sizes = Counter[bytes]()
        for image, sequence in held.items():
            sizes[sequence.account] += image.size
        assert self._bytes == sizes
        assert self._total == sizes.total()
        assert all(sequence.state != SequenceState.ENDED for sequence in held.values())


def fit_chunks(
    sequences: list[Sequence], chunks: list[int], max_rows: int, cover: Callable[[Sequence, int], int]
) -> tuple[list[Sequence], list[int]]:
    """The sequences of a step and their chunks, cut where an image is not encoded or would not be whole. The first that
    has come to an image gets all of its rows, however few the step has; others get theirs in their order while rows are
    left, and from the first on for which too few are they sit the step out. `cover` says for how many
    rows a sequence has blocks.
    """
    fitted, left, granted, full = [], max_rows - sum(chunks), False, False
    for sequence, chunk in zip(sequences, chunks, strict=True):
        own = chunk
        if sequence.images and sequence.launched < sequence.images[-1].end:
            cut, own = sequence.cut_at_images(chunk)
            full = full or (cut > chunk + left and granted)
            if cut > chunk and not full:
                own = cut if cover(sequence, cut) >= cut else 0
                granted = granted or own > 0
            left -= own - chunk
        if own:
            fitted.append((sequence, own))
    return [sequence for sequence, _ in fitted], [own for _, own in fitted]


class ImageElements:
    """What stands for images among tokens. A replica has one; it remembers the newest `kept` images, and gives one that
    it has forgotten another element, which finds nothing in the tree."""

    FIRST: Final = 1 << 30  # above all tokens, and below what an int32 holds

    def __init__(self, side: int, tokens: int, token: int, kept: int = 1 << 16) -> None:
        """Takes images of `side` pixels, which become so many `tokens` each, for which `token` stands."""
        self.tokens = tokens
        self.token = token
        self._image_bytes = 3 * side * side
        self._kept = kept
        self._elements: OrderedDict[bytes, int] = OrderedDict()
        self._next = self.FIRST

    def replace(self, tokens_T: NDArray[np.uint32], images: Items[ImageInput]) -> list[PromptImage]:
        """Puts elements where a prompt has images. Raises SubmitRejected where these are not as the model takes them,
        overlap, touch, or lie beside what stands for them."""
        places, last = [], -1
        for image in images:
            end = image.first + self.tokens
            if not last < image.first < end <= len(tokens_T):  # two that touched would see each other
                raise SubmitRejected(RejectReason.INVALID, "images must lie apart in the prompt, in their order")
            if len(image.pixels) != self._image_bytes or len(image.digest) != DIGEST_BYTES:
                raise SubmitRejected(RejectReason.INVALID, f"an image must have {self._image_bytes} bytes and a digest")
            if (tokens_T[image.first : end] < PLACEHOLDER).any():
                raise SubmitRejected(RejectReason.INVALID, "an image lies where the prompt has tokens")
            tokens_T[image.first : end] = self._element(image.digest)
            places.append(PromptImage(image.first, self.tokens, self.token, image.pixels, len(image.pixels)))
            last = end
        return places

    def _element(self, digest: bytes) -> int:
        element = self._elements.get(digest)
        if element is None:
            assert self._next < 1 << 31, "all elements are used"
            element, self._next = self._next, self._next + 1
            self._elements[digest] = element
            if len(self._elements) > self._kept:
                self._elements.popitem(last=False)
        self._elements.move_to_end(digest)
        return element
