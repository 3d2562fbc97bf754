"""A picture is decoded as the library does that models are trained with, and nothing that a decoder does outlives or
outweighs its request."""

import asyncio
import io
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from gateway.errors import ApiError
from gateway.images.decoder import ImageDecoder
from gateway.images.source import ImageSource
from gateway.images.tiling import PictureLayout
from tests.support.served_gateway import looped
from tests.support.waiting import until

SIDE, BILINEAR = 8, 2
WHOLE = PictureLayout(SIDE, SIDE)


def source(content: bytes, media_type: str | None = None, field: str = "image") -> ImageSource:
    return ImageSource(content, media_type, field)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(mode: str = "RGB", size: tuple[int, int] = (20, 12)) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


@looped
async def test_pictures_of_every_kind_are_scaled_as_the_library_does() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # lies on its side
    contents = [
        *(encoded(noise(mode)) for mode in ("RGB", "RGBA", "L", "1", "P", "LA")),
        *(encoded(noise(), format) for format in ("JPEG", "WEBP", "GIF")),
        encoded(noise("CMYK"), "JPEG"),
        encoded(noise(), "JPEG", exif=turned),
    ]
    decoded = await ImageDecoder().decode(
        [source(content) for content in contents], [WHOLE] * len(contents), SIDE, BILINEAR
    )
    for content, (digest, pixels) in zip(contents, decoded, strict=True):
        whole = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        assert pixels == whole.resize((SIDE, SIDE), Image.Resampling.BILINEAR).tobytes()
        assert digest == sha256(pixels).digest()


def turned_behind_its_pixels() -> bytes:
    """A PNG that says only at its end that it lies on its side."""
    orientation = Image.Exif()
    orientation[0x0112] = 6
    whole = encoded(noise(), exif=orientation)
    start = whole.index(b"eXIf") - 4
    chunk = whole[start : start + 12 + int.from_bytes(whole[start : start + 4])]
    rest, end = whole[:start] + whole[start + len(chunk) : -12], whole[-12:]
    assert end[4:8] == b"IEND"
    return rest + chunk + end


@looped
async def test_sizes_are_those_that_are_seen() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    contents = [
        encoded(noise()),
        *(encoded(noise(), format, exif=turned) for format in ("JPEG", "PNG", "WEBP")),
        encoded(noise("P", (7, 9)), "GIF"),
    ]
    sizes = await ImageDecoder().measure([source(content) for content in contents])
    assert sizes == [(20, 12), *[(12, 20)] * 3, (7, 9)]
    cut = encoded(noise())[:-40]
    assert await ImageDecoder().measure([source(cut)]) == [(20, 12)], "its pixels were looked at"


@looped
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"GIF89a", "no PNG, JPEG, WebP or GIF"),
        (encoded(Image.new("1", (6400, 6400))), "6400 × 6400 pixels; at most 40000000"),
        (encoded(noise(size=(402, 2))), "times the other"),
    ],
    ids=["none", "large", "long"],
)
async def test_what_is_no_picture_has_no_size(content: bytes, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        await ImageDecoder().measure([source(encoded(noise())), source(content, field="second")])
    assert (refused.value.status, refused.value.param) == (400, "second")


@looped
async def test_tiles_come_row_by_row_with_the_whole_behind_them_and_black_beside_them() -> None:
    image = noise(size=(20, 12))
    layouts = [PictureLayout(20, 12, 3, 2, (20, 12)), PictureLayout(5, 3, 1, 1, (20, 12))]
    decoded = await ImageDecoder().decode([source(encoded(image))] * 2, layouts, SIDE, BILINEAR)
    assert [digest for digest, _ in decoded] == [sha256(pixels).digest() for _, pixels in decoded]
    tiles = np.stack([np.frombuffer(pixels, np.uint8).reshape(SIDE, SIDE, 3) for _, pixels in decoded])
    assert len(tiles) == 6 + 1 + 1
    canvas = np.zeros((16, 24, 3), np.uint8)
    canvas[:12, :20] = np.asarray(image)
    for index, tile in enumerate(tiles[:6]):
        row, column = divmod(index, 3)
        assert np.array_equal(tile, canvas[8 * row : 8 * row + 8, 8 * column : 8 * column + 8])
    assert np.array_equal(tiles[6], np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))
    small = np.zeros((SIDE, SIDE, 3), np.uint8)
    small[:3, :5] = np.asarray(image.resize((5, 3), Image.Resampling.BILINEAR))
    assert np.array_equal(tiles[7], small)


@looped
async def test_a_picture_that_turns_out_to_lie_otherwise_is_refused_where_its_shape_counts() -> None:
    turned, decoder = source(turned_behind_its_pixels()), ImageDecoder()
    (size,) = await decoder.measure([turned])
    assert size == (20, 12)
    with pytest.raises(ApiError, match="save it upright"):
        await decoder.decode([turned], [PictureLayout(20, 12, 3, 2, size)], SIDE, BILINEAR)
    ((_, pixels),) = await decoder.decode([turned], [WHOLE], SIDE, BILINEAR)
    upright = noise().transpose(Image.Transpose.ROTATE_270)
    assert pixels == upright.resize((SIDE, SIDE), Image.Resampling.BILINEAR).tobytes()


@looped
async def test_the_first_that_is_no_picture_is_named() -> None:
    good = encoded(noise())
    bad = (b"GIF89a", good[:100], b"<?xml version='1.0'?><svg/>")
    decoder = ImageDecoder()
    refusals = await asyncio.gather(
        *(decoder.decode([source(good), source(each, field="second")], [WHOLE] * 2, SIDE, BILINEAR) for each in bad),
        return_exceptions=True,
    )
    for refused in refusals:
        assert isinstance(refused, ApiError)
        assert "'second' is not taken" in refused.message
        assert (refused.status, refused.param) == (400, "second")


@looped
async def test_pixels_are_counted_before_they_are_decoded() -> None:
    bomb = encoded(Image.new("1", (6400, 6400)))  # a few KB
    with pytest.raises(ApiError, match="6400 × 6400 pixels; at most 40000000"):
        await ImageDecoder().decode([source(bomb)], [WHOLE], SIDE, BILINEAR)


@looped
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "has ended over it"),
        ("import sys; sys.stdout.write('ok 00\\nfew')", "has ended over it"),
        ("import sys; sys.stdout.write('ok zz\\n' + 'x' * 192)", "has ended over it"),
        ("while True: pass", "took longer than"),
    ],
    ids=["crash", "cut answer", "rubbish", "hang"],
)
async def test_a_decoder_that_crashes_or_hangs_is_a_refusal(program: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    decoder = ImageDecoder(decode_s=0.4, program=tmp_path / "program.py")
    with pytest.raises(ApiError, match=why) as refused:
        await decoder.decode([source(bytes(1 << 20))], [WHOLE], SIDE, BILINEAR)
    assert refused.value.status == 400


@looped
async def test_a_caller_that_leaves_takes_the_process_along(tmp_path: Path) -> None:
    marker = tmp_path / "alive"
    (tmp_path / "program.py").write_text(f"import time\nopen({str(marker)!r}, 'w').close()\ntime.sleep(60)")
    decoder = ImageDecoder(program=tmp_path / "program.py")
    task = asyncio.create_task(decoder.decode([source(b"x")], [WHOLE], SIDE, BILINEAR))
    await until(marker.exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert decoder.idle


@pytest.mark.skipif(sys.platform != "linux", reason="a limit that other systems lack")
@looped
async def test_the_program_may_open_no_file_and_take_no_more_memory(tmp_path: Path) -> None:
    program = Path(__file__).parents[3] / "gateway" / "images" / "decode_program.py"
    source_text = program.read_text()
    assert "limit(seconds_, memory_bytes_)" in source_text
    for attempt in ("open('/etc/hostname')", "bytearray(2 << 30)"):
        tried = f"try:\n        {attempt}\n    except (OSError, MemoryError):\n        import os; os._exit(9)\n    "
        (tmp_path / "program.py").write_text(
            source_text.replace(
                "    main(sys.stdin", f"    {tried}print('ok', '00' * 32, 'x' * 999)\n    main(sys.stdin"
            )
        )
        with pytest.raises(ApiError, match="has ended over it"):
            await ImageDecoder(program=tmp_path / "program.py").decode(
                [source(encoded(noise()))], [WHOLE], SIDE, BILINEAR
            )
