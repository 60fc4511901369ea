"""Images of all formats: written from known pixels, with damaged bytes, and as bombs."""

from __future__ import annotations

import io
import random
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests import photos
from tests.inputs.cases import Case, Kind
from tests.mutation import damaged

from visavis.data.images import (
    decode_image,
    decoded_pixels,
    image_size,
    make_thumbnail,
    read_times,
    upright_size,
)

MAX_DIFFERENCE = 48
"""Largest mean difference of 8 bits of a lossy format."""


def read_everything(content: bytes, name: str) -> tuple[Image.Image, dict[str, Any]]:
    """All that commands read of an image."""
    image = decode_image(content, name, allow_animated=True)
    found = {
        "pixels": decoded_pixels(content, name),
        "times": read_times(content, name),
        "thumbnail": make_thumbnail(content, name, 32).size,
    }
    if not is_animated(content):
        found["size"] = upright_size(content, name)
        found["decoded size"] = image_size(content, name)
    return image, found


def is_animated(content: bytes) -> bool:
    """Whether Pillow finds several frames."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            return getattr(image, "n_frames", 1) > 1
    except Exception:  # noqa: BLE001 - Pillow raises errors of every kind on damaged bytes
        return False


def check_sizes(result: tuple[Image.Image, dict[str, Any]]) -> str:
    """All functions agree on an accepted image."""
    image, found = result
    if image.mode != "RGB":
        return f"the mode is {image.mode}"
    if found.get("size", image.size) != image.size:
        return f"decoded to {image.size}, the header has {found['size']}"
    if found.get("decoded size", image.size) != image.size:
        return f"decoded to {image.size}, image_size is {found['decoded size']}"
    return ""


def check_pixels(
    expected: np.ndarray, tolerance: float, result: tuple[Image.Image, dict[str, Any]]
) -> str:
    """The image has the pixels that were written."""
    image = result[0]
    if problem := check_sizes(result):
        return problem
    if image.size != (expected.shape[1], expected.shape[0]):
        return f"size {image.size}, written {expected.shape[1::-1]}"
    difference = np.abs(np.asarray(image, np.float64) - expected).mean()
    return f"the pixels differ by {difference:.1f} on average" if difference > tolerance else ""


def drawn(rng: random.Random, *, smooth: bool) -> Image.Image:
    """A small image of random size."""
    size = rng.choice([1, 2, 7, 8, 16, 33]), rng.choice([1, 3, 8, 17, 32])
    random_state = np.random.default_rng(rng.getrandbits(32))
    if smooth:
        return photos.scene(rng.getrandbits(8), (max(8, size[0]), max(8, size[1])))
    return Image.fromarray(random_state.integers(0, 256, (size[1], size[0], 3), np.uint8))


def written(rng: random.Random, format_name: str) -> tuple[bytes, np.ndarray | None, float]:
    """A valid file, the pixels that it must have, and their tolerance. None: not known here."""
    lossless = format_name in ("PNG", "TIFF", "BMP", "GIF") or (
        format_name in ("WEBP", "JXL") and rng.random() < 0.5
    )
    image = drawn(rng, smooth=not lossless)
    options: dict[str, Any] = {}
    orientation = rng.choice([1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9])
    mode = rng.choice(["RGB", "RGB", "L", "P", "1"])
    if format_name == "GIF":
        image = image.quantize(rng.choice([2, 16, 256]), dither=Image.Dither.NONE)
    elif format_name in ("PNG", "TIFF", "BMP"):
        image = image.convert(mode)
    elif format_name == "JPEG":
        image = image.convert(rng.choice(["RGB", "RGB", "L"]))
        options = {"quality": 95, "subsampling": 0, "progressive": rng.random() < 0.3}
    elif format_name in ("WEBP", "JXL"):
        options = {"lossless": lossless, "quality": 95}
    if format_name == "TIFF":
        options["compression"] = rng.choice(["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])
    expected = np.asarray(image.convert("RGB"), np.float64)
    if format_name in ("JPEG", "WEBP", "PNG", "HEIF", "JXL") and orientation != 1:
        options["exif"] = photos.exif(orientation, rng.choice(["", "2024:05:31 18:30:15"]))
        if 2 <= orientation <= 8:
            # What a reader turns back.
            inverse = {6: 8, 8: 6}.get(orientation, orientation)
            turned = photos.stored(Image.fromarray(expected.astype(np.uint8)), inverse)
            expected = np.asarray(turned, np.float64)
    content = photos.encode(image, format_name, **options)
    return content, expected, 0.0 if lossless else MAX_DIFFERENCE


def png_chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    """Kinds and contents of the chunks of a PNG."""
    chunks, place = [], 8
    while place + 8 <= len(content):
        length = int.from_bytes(content[place : place + 4], "big")
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + length]))
        place += 12 + length
    return chunks


def with_damaged_chunks(content: bytes, rng: random.Random) -> bytes:
    """A PNG whose chunks are doubled, removed, moved or changed, with right checksums."""
    chunks = png_chunks(content)
    number = rng.randrange(len(chunks))
    match rng.randrange(5):
        case 0:
            chunks.insert(rng.randrange(len(chunks) + 1), chunks[number])
        case 1:
            del chunks[number]
        case 2:
            chunks.append(chunks.pop(number))
        case 3:
            kind, inside = chunks[number]
            chunks[number] = kind, damaged(inside, rng)
        case _:
            text = zlib.compress(b"A" * rng.choice([10, 10**6, 10**8]))
            kind = rng.choice([b"zTXt", b"iCCP", b"iTXt", b"eXIf", b"acTL"])
            chunks.insert(1, (kind, b"Comment\0\0" + text))
    return content[:8] + b"".join(photos.png_chunk(kind, inside) for kind, inside in chunks)


def with_wrong_png_checksum(content: bytes, rng: random.Random) -> bytes:
    """A PNG with a changed bit in its pixels: both of its checksums are wrong."""
    place = content.index(b"IDAT") + 4
    length = int.from_bytes(content[place - 8 : place - 4], "big")
    changed = bytearray(content)
    changed[place + rng.randrange(length)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def bomb(rng: random.Random, format_name: str) -> bytes:
    """A small file that declares or unpacks to very many pixels."""
    side = rng.choice([30_000, 65_535, 100_000, 2**31 - 1])
    if format_name == "PNG":
        rows = zlib.compress(bytes(10**7), 9)
        header = struct.pack(">IIBBBBB", side, side, rng.choice([1, 8, 16]), 0, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + photos.png_chunk(b"IHDR", header)
            + photos.png_chunk(b"IDAT", rows)
            + photos.png_chunk(b"IEND", b"")
        )
    if format_name == "GIF":
        sides = struct.pack("<HH", 65_535, 65_535)
        return (
            b"GIF89a"
            + sides
            + b"\x80\0\0"
            + bytes(6)
            + b","
            + bytes(4)
            + sides
            + b"\0\x02\x02D\x01\0;"
        )
    if format_name == "TIFF":
        tags = {256: side, 257: side, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: side, 279: 4}
        entries = b"".join(
            struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())
        )
        return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    if format_name == "BMP":
        return b"BM" + struct.pack(
            "<IIIIiiHHIIiiII", 70, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0
        )
    content = bytearray(photos.encode(photos.scene(1, (16, 16)), format_name))
    if format_name == "JPEG":
        place = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2"))
        content[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    elif format_name == "WEBP":
        place = content.find(b"\x9d\x01\x2a")
        content[place + 3 : place + 7] = b"\xff\x3f\xff\x3f"
    return bytes(content)


def make_image(format_name: str, rng: random.Random, folder: Path, _: Any) -> Case:
    """A valid image, or one with damaged bytes, damaged chunks or too many pixels."""
    content, expected, tolerance = written(rng, format_name)
    way = rng.random()
    known: Any = "unknown"
    check: Any = check_sizes
    note = "damaged bytes"
    if way < 0.2 and expected is not None:
        known, check, note = "right", partial(check_pixels, expected, tolerance), "valid"
    elif way < 0.25 and format_name not in ("HEIF", "JXL", "AVIF"):
        content, note = bomb(rng, format_name), "too many pixels"
    elif way < 0.35 and format_name == "PNG":
        content, note = with_damaged_chunks(content, rng), "damaged chunks"
    elif way < 0.5 and format_name == "PNG":
        content, note = with_wrong_png_checksum(content, rng), "wrong checksum"
        known, check = "wrong", lambda _: "pixels with a wrong checksum were accepted"
    elif way < 0.4:
        size = rng.randrange(len(content))
        content, note = content[:size], f"cut after {size} bytes"
    else:
        content = damaged(content, rng)
    name = f"photo.{format_name.lower()}"
    (folder / name).write_bytes(content)
    (folder / "captions.csv").write_text(f"filename,caption,split\n{name},a dog,test\n")
    return Case(
        partial(read_everything, content, name),
        known,
        check,
        note,
        command=("data", "check", str(folder)) if known != "unknown" else (),
    )


def make_raw(rng: random.Random, folder: Path, original: bytes) -> Case:
    """A raw file of a camera, valid or damaged. Most of its bytes are pixels, so its tags are hit
    more often.
    """
    if rng.random() < 0.05:
        content, known, note = original, "right", "valid"
    else:
        head = rng.choice([len(original), 1024])
        changed = damaged(original[:head], rng)
        content, known, note = changed + original[head:], "unknown", "damaged bytes"
    (folder / "photo.dng").write_bytes(content)
    return Case(
        partial(read_everything, content, "photo.dng"),
        known,
        check_sizes,
        note,  # type: ignore[arg-type]
    )


def prepare_raw(_: Path) -> bytes:
    """A small raw file."""
    return photos.encode_dng(photos.scene(0, (96, 64)))


KINDS = [
    *(
        Kind(name, partial(make_image, format_name), inputs=inputs)
        for name, format_name, inputs in (
            ("JPEG", "JPEG", 1000),
            ("PNG", "PNG", 1000),
            ("GIF", "GIF", 750),
            ("WebP", "WEBP", 750),
            ("TIFF", "TIFF", 1000),
            ("BMP", "BMP", 250),
            ("AVIF", "AVIF", 150),
            ("HEIC", "HEIF", 250),
            ("JPEG XL", "JXL", 250),
        )
    ),
    Kind("camera raw", make_raw, prepare_raw, 250),
]
