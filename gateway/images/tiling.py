"""How a picture becomes images of the model's size: as it is, or cut into tiles as Llama 4 takes them. It knows no
pixels and no requests.
"""

import math
import struct
from typing import NamedTuple


class _Bound(NamedTuple):
    """So many pixels at most for `size` of a picture; `single`: in single precision."""

    size: int
    pixels: int
    single: bool

    def scale(self, single: bool) -> float:
        exact = self.pixels / self.size
        return _single(exact) if single else exact

    def scaled(self, size: int) -> int:
        """The picture's other size by the scale of this one."""
        exact = size * self.scale(self.single)
        return math.floor(_single(exact) if self.single else exact)


def _single(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


class PictureLayout(NamedTuple):
    """Tiles of a picture.

    width, height  to which it is scaled. What is left of its tiles at the right and below is black.
    columns, rows  of tiles. Behind several comes one of the whole picture, scaled to a tile whatever its shape.
    size           which the picture must have as it is seen upright, in pixels; None: any.
    """

    width: int
    height: int
    columns: int = 1
    rows: int = 1
    size: tuple[int, int] | None = None

    @property
    def tiles(self) -> int:
        cut = self.columns * self.rows
        return cut + 1 if cut > 1 else 1


class Tiling(NamedTuple):
    """How pictures are cut, and what a prompt has around the tokens of tiles.

    side            of a tile in pixels.
    tiles_max       so many at most, beside the one of the whole picture.
    enlarges        small pictures are scaled up to as many pixels as there is room for, else to one tile's at most.
    begin, end      the ids around a picture,
    across, down    behind a tile that has one to its right, and behind the last one of each row,
    whole           and before the one of the whole picture; templates write it for a picture.
    """

    side: int
    tiles_max: int
    enlarges: bool
    begin: int
    across: int
    down: int
    whole: int
    end: int

    def layout(self, width: int, height: int) -> PictureLayout:
        """The tiles in which a picture of this size is largest: it is shrunk as little as can be, and else enlarged as
        little or, with `enlarges`, as much as can be. Where several are as good, the fewest are taken."""
        most = self.tiles_max
        grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
        scales = {grid: min(grid[0] * self.side / width, grid[1] * self.side / height) for grid in grids}
        roomy = [scale for scale in scales.values() if scale >= 1]
        best = min(roomy) if roomy and not self.enlarges else max(scales.values())
        columns, rows = min((grid for grid in grids if scales[grid] == best), key=math.prod)
        canvas = (columns * self.side, rows * self.side)
        least = math.inf if self.enlarges else self.side
        room = max(width, least), max(height, least)
        return PictureLayout(*_fitted((width, height), canvas, room), columns, rows, (width, height))

    def ids(self, layout: PictureLayout, tile: list[int]) -> list[int]:
        """What a prompt has for a picture, where `tile` is what it has for a tile."""
        row = [id for _ in range(layout.columns - 1) for id in (*tile, self.across)] + [*tile, self.down]
        return [self.begin, *(row * layout.rows if layout.tiles > 1 else ()), self.whole, *tile, self.end]


def _fitted(size: tuple[int, int], canvas: tuple[int, int], room: tuple[float, float]) -> tuple[int, int]:
    """The largest width and height of a picture's shape, in whole pixels, within a canvas and within the room.

    The reference library divides in single precision where the canvas is what bounds, else in double: so do we, for
    what is rounded down may be a pixel less by the one than by the other.
    """
    bounds = [
        _Bound(have, int(min(most, whole)), whole < most) for have, whole, most in zip(size, canvas, room, strict=True)
    ]
    across, down = bounds
    single = across.single or down.single
    if across.scale(single) < down.scale(single):
        return across.pixels, max(1, min(across.scaled(down.size), down.pixels))
    return max(1, min(down.scaled(across.size), across.pixels)), down.pixels
