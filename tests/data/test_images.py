"""Image decoding: modes, orientation, broken files, and random transforms."""

from __future__ import annotations

import io
import re
import struct

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from tests import photos
from tests.conftest import PROJECT

from visavis.core.errors import DataError
from visavis.data import images
from visavis.data import random_transforms as transforms
from visavis.data.images import (
    ImageError,
    convert_image,
    decode_image,
    image_size,
    make_thumbnail,
    supported_formats,
    upright_size,
)
from visavis.data.upright_images import MAX_PIXELS
from visavis.models.retriever import read_image


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 64, height: int = 48) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def pixel(content: bytes) -> tuple[int, int, int]:
    image = decode_image(content, "x")
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


ORIENTED = {
    "JPEG": ("JPEG", {}),
    "MPO": ("MPO", {"save_all": True, "append_images": [noise(8, 8)]}),
    "PNG": ("PNG", {}),
    "WebP": ("WEBP", {"lossless": True}),
    "AVIF": ("AVIF", {}),
    "raw TIFF": ("TIFF", {}),
    "LZW TIFF": ("TIFF", {"compression": "tiff_lzw"}),
    "deflate TIFF": ("TIFF", {"compression": "tiff_adobe_deflate"}),
    "JPEG TIFF": ("TIFF", {"compression": "jpeg"}),
}


def oriented(case: str, orientation: object, image: Image.Image | None = None) -> bytes:
    kind, options = ORIENTED[case]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    metadata = (
        {"tiffinfo": {ExifTags.Base.Orientation: orientation}} if kind == "TIFF" else {"exif": exif}
    )
    return saved(image or noise(48, 32), kind, **metadata, **options)


@pytest.mark.parametrize("case", ORIENTED)
def test_images_are_turned_as_pillow_turns_them(case):
    if case == "AVIF" and "AVIF" not in supported_formats():
        pytest.skip("this Pillow was built without AVIF")
    for orientation in range(1, 9):
        content = oriented(case, orientation)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        opened = [
            decode_image(content, "x"),
            convert_image(Image.open(io.BytesIO(content)), "x"),
            make_thumbnail(content, "x", 48),
        ]
        # A decoded image is not turned again.
        opened += [
            convert_image(opened[0], "x"),
            read_image(opened[1], "x"),
            read_image(content, "x"),
        ]
        for image in opened:
            np.testing.assert_array_equal(np.asarray(image), np.asarray(upright))
        assert image_size(content, "x") == upright_size(content, "x") == upright.size
        reduced = decode_image(content, "x", min_side=8)
        assert (reduced.width < reduced.height) == (orientation > 4)


@pytest.mark.parametrize(
    "orientation", [b"\3\0\1\0\0\0\0\0\0\0", b"\3\0\1\0\0\0\x09\0\0\0", b"\2\0\2\0\0\x006\0\0\0"]
)
def test_images_ignore_unknown_orientations(orientation):
    """The numbers 0 and 9, and the text 6."""
    content = saved(
        noise(48, 32), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1" + orientation + bytes(4)
    )
    assert (
        decode_image(content, "x").size
        == upright_size(content, "x")
        == image_size(content, "x")
        == (48, 32)
    )


@pytest.mark.filterwarnings("ignore")
def test_images_ignore_damaged_metadata():
    """``ImageOps.exif_transpose`` fails on all of these, because it writes the metadata again."""
    for exif in (b"Exif\0\0garbage", b"MM\0*"):
        content = saved(noise(48, 32), "PNG", exif=exif)
        assert decode_image(content, "x").size == upright_size(content, "x") == (48, 32)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.XResolution] = 6, 72.0
    content = saved(noise(48, 32), "JPEG", exif=exif)
    # The type of the resolution becomes an integer.
    content = content.replace(b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x02")
    with pytest.raises((TypeError, AttributeError, struct.error)):
        ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert decode_image(content, "x").size == upright_size(content, "x") == (32, 48)


def test_decode_image_converts_modes_to_rgb():
    assert pixel(saved(Image.new("L", (2, 2), 100))) == (100, 100, 100)
    assert pixel(saved(Image.new("1", (2, 2), 1))) == (255, 255, 255)
    assert pixel(saved(Image.new("RGBA", (2, 2), (255, 0, 0, 0)))) == (255, 255, 255)
    assert pixel(saved(Image.new("RGBA", (2, 2), (255, 0, 0, 255)))) == (255, 0, 0)
    assert pixel(saved(Image.new("LA", (2, 2), (0, 0)))) == (255, 255, 255)
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([10, 20, 30])
    assert pixel(saved(palette)) == (10, 20, 30)
    assert pixel(saved(palette, transparency=0)) == (255, 255, 255)
    assert pixel(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF")) == (255, 0, 0)


def test_decode_image_scales_16_bit_and_float():
    for dtype, value in ((np.uint16, 32_896), (np.float32, 128 / 255), (np.float32, 128)):
        assert pixel(saved(Image.fromarray(np.full((2, 2), value, dtype=dtype)), "TIFF")) == (
            128,
            128,
            128,
        )
    assert pixel(saved(Image.fromarray(np.full((2, 2), 65_535, dtype=np.uint16)))) == (
        255,
        255,
        255,
    )


def jpeg_of(width: int, height: int, *, scans: bool = False, **options: object) -> bytes:
    """A small JPEG whose header claims another size, and a scan for each component if wanted."""
    content = bytearray(saved(noise(16, 16), "JPEG", **options))
    frame = content.index(b"\xff\xc2" if options else b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    if scans:
        scan = content.index(b"\xff\xda")
        content[scan + 2 : scan + 14] = struct.pack(">HBBBBBB", 8, 1, 1, 0, 0, 63, 0)
    return bytes(content)


JPEG, WEBP = saved(noise(), "JPEG"), saved(noise(), "WEBP")
FRAMES = [Image.new("RGB", (4, 4), color) for color in ("red", "green", "blue")]
BROKEN = {
    "empty": (b"", "truncated image", r"0 bytes\). Copy it again"),
    "half a JPEG": (JPEG[: len(JPEG) // 2], "truncated image", "truncated"),
    "JPEG without its end": (JPEG[:-200], "truncated image", "truncated"),
    "header of a JPEG": (JPEG[:20], "truncated image", "truncated"),
    "half a PNG": (saved(noise())[:3000], "truncated image", "truncated"),
    "half a WebP": (WEBP[: len(WEBP) // 2], "truncated image", "truncated"),
    "half a GIF": (saved(noise(), "GIF")[:1500], "truncated image", "truncated"),
    "text": (b"<!DOCTYPE html>", "not an image", "JPEG, .*PNG.*Convert it"),
    "zeros": (bytes(1000), "not an image", "not an image"),
    "PDF": (b"%PDF-1.7\n", "not an image", "not an image"),
    "GIF of three": (
        saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
        "animated image",
        r"3 frames\), expected a single image. Save",
    ),
    "PNG of three": (
        saved(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]),
        "animated image",
        r"3 frames\), expected a single image. Save",
    ),
    "TIFF of three": (
        saved(FRAMES[0], "TIFF", save_all=True, append_images=FRAMES[1:]),
        "animated image",
        r"3 frames\), expected a single image. Save",
    ),
    "80 million pixels": (
        photos.png_bomb(8_000, 10_000),
        "decompression bomb",
        "8000 x 10000 pixels, expected at most 64 million. Reduce",
    ),
    "2.5 billion pixels": (
        photos.png_bomb(50_000, 50_000),
        "decompression bomb",
        "50000 x 50000 pixels, expected at most 64 million. Reduce",
    ),
    "JPEG of 1.6 billion": (
        jpeg_of(40_000, 40_000),
        "decompression bomb",
        "40000 x 40000 pixels, expected at most 1,024 million",
    ),
    "progressive JPEG of 144 million": (
        jpeg_of(12_000, 12_000, progressive=True),
        "decompression bomb",
        "12000 x 12000 pixels, expected at most 128 million",
    ),
    "JPEG in scans of 144 million": (
        jpeg_of(12_000, 12_000, scans=True),
        "decompression bomb",
        "expected at most 128 million",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("opened", [decode_image, image_size])
def test_decode_image_reports_broken_images(case, opened):
    content, kind, sentence = BROKEN[case]
    with pytest.raises(ImageError, match=sentence) as broken:
        opened(content, "photos/x.jpg")
    assert broken.value.kind == kind
    assert str(broken.value).startswith("image photos/x.jpg ")
    assert "\n" not in str(broken.value)


def test_large_jpegs_are_decoded_at_a_reduced_size(recwarn):
    """Photos of 108 and 200 megapixels of phones and panoramas. Pillow warns above 89 megapixels,
    and raises an error above 179.
    """
    assert decode_image(jpeg_of(9_000, 8_000), "x").size == (4_500, 4_000)
    content = jpeg_of(16_000, 12_000)
    assert upright_size(content, "x") == image_size(content, "x") == (16_000, 12_000)
    assert decode_image(content, "x", min_side=448).size == (2_000, 1_500)
    assert make_thumbnail(content, "x", 480, max_pixels=20_000_000).size == (480, 360)
    assert not recwarn


def test_large_image_of_another_format_is_refused_silently(recwarn):
    with pytest.raises(ImageError, match="10000 x 10000 pixels, expected at most 64 million"):
        decode_image(photos.png_bomb(10_000, 10_000), "x")
    assert not recwarn


def test_decode_image_accepts_mpo_with_preview():
    content = saved(noise(), "MPO", save_all=True, append_images=[noise(8, 8)])
    assert Image.open(io.BytesIO(content)).n_frames == 2
    assert decode_image(content, "x").size == (64, 48)


def test_random_crops_stay_inside_and_are_reproducible(generator):
    for size in [(100, 60), (2, 300), (1, 1)]:
        for sample in (transforms.random_area_box, transforms.random_sides_box):
            for _ in range(20):
                left, top, right, bottom = sample(size, generator)
                assert 0 <= left < right <= size[0]
                assert 0 <= top < bottom <= size[1]
            assert sample(size, torch.Generator().manual_seed(5)) == sample(
                size, torch.Generator().manual_seed(5)
            )
    assert transforms.random_area_box((64, 64), generator, scale=(1, 1), ratio=(1, 1)) == (
        0,
        0,
        64,
        64,
    )


def test_random_horizontal_flip_has_probability_half(generator):
    image = noise(4, 4)
    flips = sum(
        transforms.random_horizontal_flip(image, generator) is not image for _ in range(1000)
    )
    assert 440 < flips < 560


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (np.zeros((4, 5), np.uint8), "got uint8 of shape [4, 5]. Convert the image"),
        (np.zeros((4, 5, 4), np.uint8), "got uint8 of shape [4, 5, 4]. Convert the image"),
        (np.ones((4, 5, 3)), "got float64 of shape [4, 5, 3]. Convert the image"),
        (torch.ones(3, 4, 5, dtype=torch.int64), "got int64 of shape [3, 4, 5]. Convert the image"),
        (torch.ones(4, 5, 3, dtype=torch.uint8), "got uint8 of shape [4, 5, 3]. Convert the image"),
        (
            torch.full((3, 4, 5), 255.0),
            "from 0 to 1 in a tensor [3, H, W], got 255 to 255",
        ),
        (torch.full((3, 4, 5), torch.nan), "expected floats from 0 to 1 in a tensor"),
    ],
)
def test_read_image_refuses_pixels_that_would_look_wrong(image, sentence):
    """Values from 0 to 255 read as 0 to 1 are a white image, and other axes another one."""
    with pytest.raises(DataError, match=re.escape(sentence)):
        read_image(image, "images[3]")


NETWORK_USES = {
    "default_model": "visavis doctor",
    "hub_files": "hf:OWNER/NAME",
    "milvus_store": "Milvus",
    "mteb": "visavis mteb",
    "parallel": "Ray",
    "pretrained_files": "pretrained models of the Hugging Face hub",
    "shards": "object storage",
    "tracking": "experiment trackers",
}
"""Modules that use the network, and words about each on the page."""


def test_security_page_has_the_limits_of_images():
    text = (PROJECT / "SECURITY.md").read_text()
    limits = (1, images._MAX_JPEG_FACTOR, images._MAX_PROGRESSIVE_FACTOR)
    single, baseline, progressive = (f"{factor * MAX_PIXELS // 10**6:,}" for factor in limits)
    assert f"Images and videos over {single} million pixels per frame are refused" in text
    assert f"JPEG may have {baseline} million pixels" in text
    assert f"progressive JPEG {progressive} million" in text


def test_security_page_names_each_use_of_the_network():
    """A new module that uses the network needs a line on the page, and then a line here."""
    packages = "huggingface_hub|pymilvus|ray|mteb|mlflow|wandb|fsspec|requests|httpx|urllib.request"
    uses = re.compile(rf"(?m)^\s*(import|from) ({packages})\b")
    source = PROJECT / "src" / "visavis"
    found = {file.stem for file in source.rglob("*.py") if uses.search(file.read_text())}
    assert found == NETWORK_USES.keys()
    _, _, text = (PROJECT / "SECURITY.md").read_text().partition("## Network")
    assert not [use for use in NETWORK_USES.values() if use not in text.partition("\n## ")[0]]
