"""From the bytes of an image file to an upright RGB picture, or one sentence that says why not."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

from visavis.errors import DataError

MAX_PIXELS = 64_000_000

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
_TOO_LARGE = "has {} than the {:.0f} million allowed, as decompression bombs do"
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")


class BrokenPicture(DataError):
    """An image cannot be used; ``kind`` is the kind of finding that ``visavis data check`` lists it under."""

    def __init__(self, kind: str, what: str, name: str):
        super().__init__(f"image {name} {what}.")
        self.kind, self.what = kind, what


def open_picture(content: bytes, name: str) -> Image.Image:
    """The picture in RGB, upright (EXIF orientation applied), transparency laid over white, 16 bit scaled to 8.

    Floating-point pixels are read as 0 to 1 if none exceeds 1, else as 0 to 255. Raises BrokenPicture for content
    that is truncated, no image, animated, or of more than 64 million pixels.
    """
    with _one_sentence(name):
        return _rgb(_upright(_opened(content, name)))


def picture_size(content: bytes, name: str) -> tuple[int, int]:
    """Width and height of an upright picture after decoding all of it, JPEG at an eighth of its size; raises as ``open_picture``."""
    with _one_sentence(name):
        picture = _opened(content, name)
        width, height = picture.size
        picture.draft("RGB", (1, 1))
        picture.load()
        return (height, width) if picture.getexif().get(_ORIENTATION_TAG, 1) > 4 else (width, height)


def small_copy(content: bytes, name: str, side: int, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A picture as ``open_picture`` gives it, scaled down to at most ``side`` pixels, its colors in sRGB; of an animated one the first.

    It carries nothing but pixels: no place, no camera, no comment. max_pixels: of the whole picture. Raises BrokenPicture.
    """
    with _one_sentence(name):
        picture = _opened(content, name, first=True, max_pixels=max_pixels)
        profile, mode = picture.info.get("icc_profile"), picture.mode
        picture.draft("RGB", (side, side))
        turned = picture.getexif().get(_ORIENTATION_TAG, 1)
        picture = _rgb(picture)
        picture.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        picture = _in_srgb(picture, profile) if profile and mode == "RGB" else picture
        picture = picture.transpose(_UPRIGHT[turned]) if turned in _UPRIGHT else picture
        return Image.fromarray(np.asarray(picture))


def _in_srgb(picture: Image.Image, profile: bytes) -> Image.Image:
    """The picture with the colors that its profile means; as it is where the profile cannot be read."""
    from PIL import ImageCms

    try:
        given = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        turned = ImageCms.profileToProfile(picture, given, ImageCms.createProfile("sRGB"))
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return picture
    return turned or picture


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    try:
        yield
    except BrokenPicture:
        raise
    except MemoryError:
        raise DataError(f"image {name} needs more memory than is free.") from None
    except Exception as error:  # noqa: BLE001 - decoders raise errors of every kind on damaged bytes
        what = f"is truncated or damaged: {str(error).rstrip('.') or type(error).__name__}"
        raise BrokenPicture("truncated image", what, name) from None


@cache
def known_formats() -> tuple[str, ...]:
    """The formats that are read, as far as this installation of Pillow has their decoders."""
    Image.init()
    return tuple(name for name in ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000") if name in Image.OPEN)


def _opened(content: bytes, name: str, *, first: bool = False, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture before its pixels are decoded, after every check that the header allows. first: an animated one is its first picture."""
    if not content:
        raise BrokenPicture("truncated image", "is truncated: the file is empty (0 bytes)", name)
    try:
        picture = Image.open(io.BytesIO(content), formats=known_formats())
    except UnidentifiedImageError:
        if content.startswith(_BEGINNINGS):
            raise BrokenPicture("truncated image", f"is truncated or damaged in its header ({len(content)} bytes)", name) from None
        raise BrokenPicture("not an image", f"is not an image of a known format ({', '.join(known_formats())})", name) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BrokenPicture("decompression bomb", _TOO_LARGE.format("far more pixels", max_pixels / 1e6), name) from None
    if picture.width * picture.height > max_pixels:
        what = _TOO_LARGE.format(f"{picture.width} x {picture.height} pixels, more", max_pixels / 1e6)
        raise BrokenPicture("decompression bomb", what, name)
    if not first and picture.format != "MPO" and (frames := getattr(picture, "n_frames", 1)) > 1:  # an MPO is a photo with previews
        raise BrokenPicture("animated image", f"is animated or has pages ({frames} frames); expected a single picture", name)
    return picture


def _upright(picture: Image.Image) -> Image.Image:
    turn = _UPRIGHT.get(picture.getexif().get(_ORIENTATION_TAG, 1))
    return picture if turn is None else picture.transpose(turn)


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith(("I", "F")):
        values = np.asarray(picture)
        if picture.mode == "F":
            values = values * (255 if values.max() <= 1 else 1)
        else:
            values = np.clip(values, 0, 65535) // 257
        picture = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    picture.load()
    return picture.convert("RGB")
