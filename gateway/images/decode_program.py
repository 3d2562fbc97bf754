"""The program that decodes images of one request: bytes of strangers are looked into here and nowhere else.

    python -I decode_program.py SIDE RESAMPLE PIXELS_MAX SECONDS MEMORY_BYTES

reads from its input, for each image, a line and the bytes that it tells of:

    MEDIA_TYPE LENGTH                                            what size it has, decoded no further than need be
    MEDIA_TYPE LENGTH WIDTH HEIGHT COLUMNS ROWS [WIDTH HEIGHT]   its tiles, as tiling.PictureLayout has them

where the media type may be `-`. It answers the first with a line, `size` and its width and height as it is seen
upright; the second, for each tile, with a line, `ok` and the SHA-256 of what follows, SIDE · SIDE pixels of red, green
and blue. Or it answers `refused` and why, and then it ends. It imports nothing of this project, may open no files once
it runs, and has limits of memory and of processor time.
"""

import contextlib
import hashlib
import io
import resource
import sys
import warnings
from collections.abc import Iterator
from typing import IO, Final

from PIL import ExifTags, Image, ImageFile, ImageOps

FORMATS: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
_SEVERAL: Final = "MPO"  # a JPEG with further ones behind it, as cameras write them: the first is the picture
_ON_ITS_SIDE: Final = range(5, 9)  # of the orientations of Exif
RATIO_MAX: Final = 200  # of the longer side to the shorter one


class Refused(Exception):
    """Why an image is not taken."""


def measure(content: bytes, media_type: str, pixels_max: int) -> tuple[int, int]:
    """The image's width and height as it is seen upright, by what stands before its pixels. Raises Refused."""
    image = open_image(content, media_type, pixels_max)
    try:
        # Pillow's own method for a PNG decodes all of it first, to find what stands behind the pixels.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception as error:
        raise Refused("it is cut or damaged") from error
    width, height = image.size
    return (height, width) if orientation in _ON_ITS_SIDE else (width, height)


def decode(
    content: bytes, media_type: str, side: int, resample: int, pixels_max: int, layout: list[int]
) -> list[bytes]:
    """The pixels of the image's tiles. Raises Refused."""
    image = open_image(content, media_type, pixels_max)
    width, height, columns, rows, *size = layout
    try:
        image.load()
        upright = ImageOps.exif_transpose(image).convert("RGB")
        if size and upright.size != tuple(size):
            raise Refused("only behind its pixels it says how it lies; save it upright")
        tiles = cut(upright.resize((width, height), Image.Resampling(resample)), side, columns, rows)
        return [tile.tobytes() for tile in (*tiles, *overview(upright, side, resample, columns * rows))]
    except (MemoryError, Refused):
        raise
    except Exception as error:
        raise Refused("it is cut or damaged") from error


def open_image(content: bytes, media_type: str, pixels_max: int) -> Image.Image:
    """The image, not decoded yet. Raises Refused."""
    if content.lstrip()[:5].lower() in (b"<svg ", b"<?xml", b"<!doc"):
        raise Refused("it is SVG or another document, which is not drawn here")
    try:
        image = Image.open(io.BytesIO(content), formats=tuple(FORMATS))
    except Exception as error:
        raise Refused("it is no PNG, JPEG, WebP or GIF") from error
    found = FORMATS["JPEG" if image.format == _SEVERAL else image.format or ""]
    if media_type not in ("-", found):
        raise Refused(f"it is {found} and is called {media_type}")
    width, height = image.size
    if width * height > pixels_max:
        raise Refused(f"it has {width} × {height} pixels; at most {pixels_max} are taken")
    if max(width, height) > RATIO_MAX * min(width, height):
        raise Refused(f"it is {width} × {height}: one side is more than {RATIO_MAX} times the other")
    if image.format != _SEVERAL and getattr(image, "is_animated", False):
        raise Refused("it is animated; send one picture")
    return image


def cut(scaled: Image.Image, side: int, columns: int, rows: int) -> Iterator[Image.Image]:
    """Tiles of an image, row by row; what is beyond it is black."""
    for row in range(rows):
        for column in range(columns):
            left, top = column * side, row * side
            yield scaled.crop((left, top, left + side, top + side))


def overview(upright: Image.Image, side: int, resample: int, tiles: int) -> Iterator[Image.Image]:
    """The whole image as one more tile, where there are several."""
    if tiles > 1:
        yield upright.resize((side, side), Image.Resampling(resample))


def prepare() -> None:
    """Decodes a picture of each format, so that all is imported before no file can be opened any more."""
    pictures = [Image.new("P", (2, 2), color) for color in (0, 1)]
    for format, media_type in FORMATS.items():
        buffer = io.BytesIO()
        pictures[0].convert("RGB").save(buffer, format, save_all=format == "GIF", append_images=pictures[1:])
        with contextlib.suppress(Refused):  # the one that is animated
            measure(buffer.getvalue(), media_type, 4)
            decode(buffer.getvalue(), media_type, 1, Image.Resampling.BILINEAR, 4, [1, 1, 1, 1])


def limit(seconds: int, memory_bytes: int) -> None:
    """Bounds what the program may use from now on."""
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_CORE: 0,
    }
    for number, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system has each of them
            resource.setrlimit(number, (value, value))


def main(requests: IO[bytes], answers: IO[bytes], side: int, resample: int, pixels_max: int) -> None:
    while head := requests.readline():
        media_type, length, *layout = head.decode().split()
        content = requests.read(int(length))
        try:
            if not layout:
                answers.write("size {} {}\n".format(*measure(content, media_type, pixels_max)).encode())
                continue
            for pixels in decode(content, media_type, side, resample, pixels_max, list(map(int, layout))):
                answers.write(f"ok {hashlib.sha256(pixels).hexdigest()}\n".encode() + pixels)
        except Refused as refused:
            answers.write(f"refused {refused}\n".encode())
            break
        except MemoryError:
            answers.write(b"refused it takes too much memory to decode\n")
            break
    answers.flush()


if __name__ == "__main__":
    Image.MAX_IMAGE_PIXELS = None  # ours is looked at first
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    warnings.simplefilter("ignore")
    prepare()
    side_, resample_, pixels_max_, seconds_, memory_bytes_ = map(int, sys.argv[1:])
    limit(seconds_, memory_bytes_)
    main(sys.stdin.buffer, sys.stdout.buffer, side_, resample_, pixels_max_)
