"""Decoding of image files to upright sRGB images."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import PIL
from PIL import ExifTags, Image, JpegImagePlugin

from visavis.core import storage
from visavis.core.errors import DataError, MissingExtra
from visavis.data.upright_images import (
    JPEG_FORMATS,
    MAX_PIXELS,
    encoded_jpeg,
    reduce_jpeg,
    to_upright_rgb,
)

if TYPE_CHECKING:
    from visavis.data.photo_decoder import PhotoFormat

T = TypeVar("T")

# Size of a JPEG file, as a multiple of the pixels in memory. A reduced baseline JPEG is decoded row
# by row: 400 million pixels take 0.4 s and 53 MiB. A progressive one needs all its coefficients, 6
# bytes per pixel: 400 million take 2.3 GiB (Pillow 13.0, libjpeg-turbo 3.1).
_MAX_JPEG_FACTOR = 16
_MAX_PROGRESSIVE_FACTOR = 2
# Increase it after each change of the images that can be decoded.
_DECODING_VERSION = 4

# Fix of a damaged image or video, without its period.
COPY_AGAIN = "Copy it again from its source"
_MAGIC_BYTES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")


class ImageError(DataError):
    """An image is unusable.

    Args:
        kind: Kind of the finding of ``visavis data check``.
        problem: End of the sentence "image NAME ...", and the fix.
        name: Name of the image.
    """

    def __init__(self, kind: str, problem: str, name: str):
        super().__init__(f"image {name} {problem}.")
        self.kind = kind
        self.problem = problem


def _require(condition: object, kind: str, problem: str, name: str) -> None:
    """Raise ImageError unless a condition holds."""
    if not condition:
        raise ImageError(kind, problem, name)


def decode_image(
    content: bytes,
    name: str,
    *,
    min_side: int = 0,
    allow_animated: bool = False,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Decode an image file to an upright RGB image, whose ``info`` has the capture time as
    ``exif_times``. ``allow_animated``: the first frame of an animation is decoded.
    """
    with _translate_errors(name):
        image = _open(
            content, name, allow_animated=allow_animated, min_side=min_side, max_pixels=max_pixels
        )
        _check_png(image, content, name)
        # To a half, a quarter or an eighth whose shorter side has `min_side` pixels or more. Photos
        # that Pillow cannot decode are reduced by then.
        reduce_jpeg(image, min_side, max_pixels)
        return _to_upright_rgb(image)


def convert_image(image: Image.Image, name: str, *, min_side: int = 0) -> Image.Image:
    """Convert an opened image of any mode as ``decode_image`` converts its file. Of an animation,
    its current frame is used.
    """
    with _translate_errors(name):
        with _DECODING[hash((id(image),)) % len(_DECODING)]:
            _require(
                not getattr(image, "tile", None) or getattr(image, "fp", None) is not None,
                "closed image",
                "is closed, expected an open one. Pass its path, or close it later",
                name,
            )
            content = encoded_jpeg(image)
            if content is None:
                image.load()
        return (
            _to_upright_rgb(image)
            if content is None
            else decode_image(content, name, min_side=min_side)
        )


# An opened image that occurs twice in a batch is not decoded by two threads at once, which damages
# it.
_DECODING = tuple(threading.Lock() for _ in range(64))


def upright_size(content: bytes, name: str) -> tuple[int, int]:
    """Return width and height of an upright image from its header, without decoding it."""
    from visavis.data.photo_decoder import photo_format, read_header

    with _translate_errors(name):
        if (kind := photo_format(content, name)) is not None:
            return _read_photo(
                kind, name, lambda: read_header(content, kind, name, MAX_PIXELS)
            ).size
        return _upright_size(_open(content, name))


def decoded_pixels(
    content: bytes, name: str, *, min_side: int = 0, max_pixels: int = MAX_PIXELS
) -> int:
    """Return how many pixels ``decode_image`` decodes, from the header of an image. HEIF, JPEG XL and
    raw images count in full.
    """
    from visavis.data.photo_decoder import photo_format, read_header

    with _translate_errors(name):
        if (kind := photo_format(content, name)) is not None:
            size = _read_photo(
                kind, name, lambda: read_header(content, kind, name, max_pixels)
            ).size
        else:
            image = _open(content, name, allow_animated=True, max_pixels=max_pixels)
            reduce_jpeg(image, min_side, max_pixels)
            size = image.size
        return size[0] * size[1]


def read_times(content: bytes, name: str) -> dict[str, str]:
    """Read the capture time of an image without decoding it, as ``exif_times``."""
    from visavis.data.capture_time import exif_times

    return exif_times(read_exif(content, name))


def read_exif(content: bytes, name: str) -> Image.Exif:
    """Read the EXIF of an image without decoding it, empty if it is missing or damaged. Of a photo
    of a phone or camera, it has the capture time and the note of an Apple phone only.
    """
    from visavis.data.photo_decoder import photo_format, read_header

    with _translate_errors(name):
        if (kind := photo_format(content, name)) is None:
            return _exif(_open(content, name, allow_animated=True))
        header = _read_photo(kind, name, lambda: read_header(content, kind, name, MAX_PIXELS))
        exif = Image.Exif()
        exif.load(header.exif)
        return exif


def image_size(content: bytes, name: str) -> tuple[int, int]:
    """Return width and height of an upright image after decoding all of it. JPEG is decoded at an
    eighth of its size.
    """
    with _translate_errors(name):
        image = _open(content, name)
        _check_png(image, content, name)
        size = _upright_size(image)
        reduce_jpeg(image, 1)
        image.load()
        return size


def make_thumbnail(
    content: bytes, name: str, max_side: int, *, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """Make a thumbnail in sRGB colors without metadata: no location, camera or comment. Of an
    animation, the first frame is used.
    """
    with _translate_errors(name):
        image = _open(content, name, allow_animated=True, max_pixels=max_pixels, min_side=max_side)
        _check_png(image, content, name)
        reduce_jpeg(image, max_side, max_pixels)
        image = _to_upright_rgb(image)
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        # The copy of the pixels has no metadata.
        return Image.fromarray(np.asarray(image))


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (DataError, MissingExtra):
        raise
    except MemoryError:
        raise DataError(
            f"image {name} needs more memory than is available. Reduce its size or free memory."
        ) from None
    except Exception as error:  # noqa: BLE001 - decoders raise errors of every kind on damaged bytes
        problem = f"is truncated or damaged: {storage.error_reason(error)}. {COPY_AGAIN}"
        raise ImageError("truncated image", problem, name) from None


@cache
def supported_formats() -> tuple[str, ...]:
    """Return the image formats for which this installation of Pillow has a decoder."""
    Image.init()
    return tuple(
        name
        for name in ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
        if name in Image.OPEN
    )


def readable_formats() -> tuple[str, ...]:
    """Return the image formats that Pillow or an installed package for photos decodes."""
    from visavis.data.photo_decoder import PACKAGES, is_installed

    return (*supported_formats(), *(kind for kind in PACKAGES if is_installed(kind)))


def decoder_version() -> str:
    """Return a text that changes with the decoders, so that an image that they could not decode is
    tried again.
    """
    from visavis.core.environment import installed_version
    from visavis.data.photo_decoder import PACKAGES

    packages = (package for package, _ in PACKAGES.values())
    photos = (f"{package} {installed_version(package)}" for package in packages)
    return " ".join((str(_DECODING_VERSION), PIL.__version__, *supported_formats(), *photos))


def _open(
    content: bytes,
    name: str,
    *,
    allow_animated: bool = False,
    max_pixels: int = MAX_PIXELS,
    min_side: int = 0,
) -> Image.Image:
    """Open an image after all checks that its header allows. Pillow decodes it later. A photo that
    Pillow cannot decode is decoded at once.
    """
    from visavis.data.colors import profile_of_code_points
    from visavis.data.photo_decoder import decode_photo, photo_format

    _require(
        content, "truncated image", f"is truncated: the file is empty (0 bytes). {COPY_AGAIN}", name
    )
    if (kind := photo_format(content, name)) is not None:
        photo = _read_photo(
            kind, name, lambda: decode_photo(content, kind, name, max_pixels, min_side)
        )
        if photo.color is not None and (profile := profile_of_code_points(*photo.color)):
            photo.image.info.setdefault("icc_profile", profile)
        return photo.image
    image = _identify(content)
    if image is None:
        _require(
            not content.startswith(_MAGIC_BYTES),
            "truncated image",
            f"is truncated or damaged in its header ({len(content)} bytes). {COPY_AGAIN}",
            name,
        )
        formats = ", ".join(readable_formats())
        problem = f"is not an image of a known format ({formats}). Convert it to JPEG or PNG, or remove it"
        raise ImageError("not an image", problem, name)
    if image.width * image.height > max_pixels and image.format in JPEG_FORMATS:
        # A JPEG with several scans, which are all decoded before the first row of pixels. Pillow
        # stops after the header of the first scan, which begins with its own length and its number
        # of components.
        file = io.BytesIO(content)
        jpeg = JpegImagePlugin.JpegImageFile(file)
        length = 6 + 2 * jpeg.layers
        start = file.tell() - length
        is_progressive = "progressive" in jpeg.info or content[start : start + 3] != struct.pack(
            ">HB", length, jpeg.layers
        )
        max_pixels *= _MAX_PROGRESSIVE_FACTOR if is_progressive else _MAX_JPEG_FACTOR
    _require(
        image.width * image.height <= max_pixels,
        "decompression bomb",
        f"has {image.width} x {image.height} pixels, expected at most {max_pixels / 1e6:,.0f} "
        "million. Reduce its size",
        name,
    )
    # An MPO is a photo with previews.
    is_single = allow_animated or image.format == "MPO"
    frames = 1 if is_single else getattr(image, "n_frames", 1)
    _require(
        frames <= 1,
        "animated image",
        f"is animated or has pages ({frames} frames), expected a single image. Save one of them as "
        "a file",
        name,
    )
    return image


def _check_png(image: Image.Image, content: bytes, name: str) -> None:
    """Compare the pixels of a PNG with their checksums, which Pillow does not: it would show other
    pixels. 1 GB takes 0.6 s.
    """
    if image.format != "PNG":
        return
    view = memoryview(content)
    start = 8
    while start + 8 <= len(view):
        end = start + 8 + int.from_bytes(view[start : start + 4], "big")
        if bytes(view[start + 4 : start + 8]) == b"IDAT":
            checksum = zlib.crc32(view[start + 4 : end]).to_bytes(4, "big")
            _require(
                bytes(view[end : end + 4]) == checksum,
                "truncated image",
                f"is truncated or damaged: its pixels have another checksum. {COPY_AGAIN}",
                name,
            )
        start = end + 4


def _read_photo(kind: PhotoFormat, name: str, read: Callable[[], T]) -> T:
    """Read a photo that Pillow cannot decode."""
    from visavis.data.photo_decoder import DamagedPhotoError, LargePhotoError

    try:
        return read()
    except LargePhotoError as error:
        width, height = error.size
        problem = (
            f"has {width} x {height} pixels, expected at most {error.limit / 1e6:,.0f} million. "
            "Reduce its size"
        )
        raise ImageError("decompression bomb", problem, name) from None
    except DamagedPhotoError as error:
        problem = f"is damaged, or not a {kind} image that can be decoded: {error}. {COPY_AGAIN}"
        raise ImageError("truncated image", problem, name) from None


def _identify(content: bytes) -> Image.Image | None:
    """Open an image as ``Image.open``, without its limit of pixels. It warns on stderr, and it also
    holds for a reduced JPEG.
    """
    for name in supported_formats():
        factory, accept = Image.OPEN[name]
        is_accepted = accept is None or accept(content[:16])
        # Pillow returns a text if it was built without the decoder.
        if not is_accepted or isinstance(is_accepted, str):
            continue
        try:
            return factory(io.BytesIO(content), "")
        except (SyntaxError, IndexError, TypeError, struct.error):
            continue
    return None


def _exif(image: Image.Image) -> Image.Exif:
    """EXIF of an opened image. Empty for unreadable metadata."""
    try:
        return image.getexif()
    except Exception:  # noqa: BLE001 - damaged metadata raises errors of every kind
        return Image.Exif()


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Size of an opened image, as it is after decoding."""
    from visavis.data.photo_worker import exif_orientation

    width, height = image.size
    if image.format == "TIFF":
        # Some versions of Pillow exchange the sides of a TIFF when they open it, others when they
        # decode it.
        tags = image.tag_v2  # type: ignore[attr-defined]
        width = tags[ExifTags.Base.ImageWidth]
        height = tags[ExifTags.Base.ImageLength]
    return (height, width) if exif_orientation(image) > 4 else (width, height)


def _to_upright_rgb(image: Image.Image) -> Image.Image:
    """Convert to upright sRGB, with the capture time in ``info``."""
    from visavis.data.capture_time import exif_times

    rgb = to_upright_rgb(image)
    rgb.info.update(exif_times(_exif(image)))
    return rgb
