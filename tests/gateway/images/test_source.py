"""Where images come from, and what is refused before anybody looks into one."""

import base64

import pytest

from gateway.errors import ApiError
from gateway.images.source import IMAGES_MAX, ImageSource, check_count, from_base64, from_data_uri

PNG = base64.b64encode(b"some bytes").decode()


def test_a_data_uri_is_taken_however_it_is_spelled() -> None:
    for uri in (f"data:image/png;base64,{PNG}", f"DATA:IMAGE/PNG;charset=x;BASE64,{PNG}"):
        assert from_data_uri(uri, "f") == ImageSource(b"some bytes", "image/png", "f")
    assert from_data_uri(f"data:image/jpg;base64,{PNG}", "f").media_type == "image/jpeg"


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("http://a/b.png", "no address is fetched"),
        ("https://a/b.png", "no address is fetched"),
        (PNG, "no address is fetched"),
        ("", "no address is fetched"),
        (f"data:image/png,{PNG}", "not in base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:image/png;base64,aa aa", "not valid base64"),
        ("data:image/png;base64,ä", "not valid base64"),
        (f"data:image/svg+xml;base64,{PNG}", "SVG"),
        (f"data:application/pdf;base64,{PNG}", "application/pdf"),
        (f"data:;base64,{PNG}", "not decoded here"),
    ],
)
def test_what_is_no_image_is_refused_by_its_field(uri: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        from_data_uri(uri, "messages[0].content[1].image_url")
    assert (refused.value.status, refused.value.param) == (400, "messages[0].content[1].image_url")


def test_base64_alone_needs_no_media_type() -> None:
    assert from_base64(PNG, None, "image") == ImageSource(b"some bytes", None, "image")


def test_so_many_images_are_taken_and_no_more() -> None:
    check_count(["f"] * IMAGES_MAX)
    with pytest.raises(ApiError, match=f"'last' is image {IMAGES_MAX + 1} of {IMAGES_MAX + 1}; at most {IMAGES_MAX}"):
        check_count([*["f"] * IMAGES_MAX, "last"])
