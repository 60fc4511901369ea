"""Image decoding: modes, orientation, broken files, and random transforms."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from visavis.data import images as transforms
from visavis.data.images import ImageError, decode_image, image_size


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 64, height: int = 48) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixel(content: bytes) -> tuple[int, int, int]:
    image = decode_image(content, "x")
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_image_applies_orientation(orientation):
    upright = Image.new("RGB", (24, 16))
    upright.paste("red", (0, 0, 8, 8))
    stored = {1: [], 2: [0], 3: [3], 4: [1], 5: [5], 6: [2], 7: [6], 8: [4]}[orientation]
    turned = upright
    for turn in stored:
        turned = turned.transpose(Image.Transpose(turn))
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(turned, "PNG", exif=exif)
    np.testing.assert_array_equal(np.asarray(decode_image(content, "x")), np.asarray(upright))
    assert image_size(content, "x") == (24, 16)


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
        assert pixel(saved(Image.fromarray(np.full((2, 2), value, dtype=dtype)), "TIFF")) == (128, 128, 128)
    assert pixel(saved(Image.fromarray(np.full((2, 2), 65_535, dtype=np.uint16)))) == (255, 255, 255)


def png_of(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


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
    "80 million pixels": (png_of(8_000, 10_000), "decompression bomb", "8000 x 10000 pixels, expected at most 64 million. Reduce"),
    "2.5 billion pixels": (png_of(50_000, 50_000), "decompression bomb", "too many pixels, expected at most 64 million. Reduce"),
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
            assert sample(size, torch.Generator().manual_seed(5)) == sample(size, torch.Generator().manual_seed(5))
    assert transforms.random_area_box((64, 64), generator, scale=(1, 1), ratio=(1, 1)) == (0, 0, 64, 64)


def test_random_horizontal_flip_has_probability_half(generator):
    image = noise(4, 4)
    flips = sum(transforms.random_horizontal_flip(image, generator) is not image for _ in range(1000))
    assert 440 < flips < 560
