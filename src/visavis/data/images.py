"""Decoding of image files to upright sRGB images, random transforms for training, and a perceptual
hash that copies share.

Each random transform samples from the ``torch.Generator`` that is passed to it.

Example:
    >>> random_sides_box((400, 300), torch.Generator().manual_seed(0))
    (4, 2, 399, 298)
"""

from __future__ import annotations

import base64
import io
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

import numpy as np
import PIL
import torch
from PIL import ExifTags, Image, JpegImagePlugin
from PIL.Image import Resampling, Transpose

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

# Maximum size of an image file: 64 megapixels of eight bytes each.
MAX_IMAGE_BYTES = 2**29
# Size of a JPEG file, as a multiple of the pixels in memory. A reduced baseline JPEG is decoded row
# by row: 400 million pixels take 0.4 s and 53 MiB. A progressive one needs all its coefficients, 6
# bytes per pixel: 400 million take 2.3 GiB (Pillow 13.0, libjpeg-turbo 3.1).
_MAX_JPEG_FACTOR = 16
_MAX_PROGRESSIVE_FACTOR = 2
# Increase it after each change of the images that can be decoded.
_DECODING_VERSION = 3

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
    """Decode an image file.

    Colors are converted to sRGB with the color profile of the file. Transparency is composed over white, and 16-bit values are scaled to 8 bits. Floating-point
    values are read as 0 to 1 if none exceeds 1, else as 0 to 255. NaN and infinity are black.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.
        min_side: A JPEG is decoded at a half, a quarter or an eighth of its size if its shorter
            side keeps this number of pixels. HEIF, JPEG XL and raw images are reduced alike. 0: in
            full, unless a JPEG has more than 64 million pixels.
        allow_animated: Whether to decode the first frame of an animation, instead of raising an
            error.
        max_pixels: Largest number of pixels of the decoded image. A larger JPEG is decoded at a
            reduced size.

    Returns:
        An upright RGB image (EXIF orientation applied). Its ``info`` has the capture time as
        ``taken``, see ``exif_times``.

    Raises:
        ImageError: If the content is truncated, not an image, animated, or has too many pixels:
            more than 64 million, or 1,024 million of a JPEG (128 million of a progressive one), or
            256 million of a raw image, which is decoded at half its size.
        MissingExtra: If the file is a HEIF, JPEG XL or raw image, and its decoder is not installed.
    """
    with _translate_errors(name):
        image = _open(
            content, name, allow_animated=allow_animated, min_side=min_side, max_pixels=max_pixels
        )
        reduce_jpeg(image, min_side, max_pixels)
        return _to_upright_rgb(image)


def convert_image(image: Image.Image, name: str, *, min_side: int = 0) -> Image.Image:
    """Convert an opened image as ``decode_image`` converts its file.

    Args:
        image: Pillow image of any mode. Of an animation, its current frame is used.
        name: Name of the image, for errors.
        min_side: As for ``decode_image``, of a JPEG that was not decoded yet.

    Returns:
        An upright RGB image.

    Raises:
        ImageError: If the image cannot be decoded, or its file is closed.
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
    """Return the size of an upright image from its header, without decoding it.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.

    Returns:
        Width and height in pixels.

    Raises:
        ImageError: If the header is damaged, or the image is animated or too large.
    """
    from visavis.data.photo_decoder import photo_format, read_header

    with _translate_errors(name):
        if (kind := photo_format(content, name)) is not None:
            return _read_photo(
                kind, name, lambda: read_header(content, kind, name, MAX_PIXELS)
            ).size
        return _upright_size(_open(content, name))


# A media type, a parameter or the content follows the colon: "data: a new oil" is a text.
_DATA_URL = re.compile(r"\s*data:(?:[\w.+-]+/|[;,]|[^,]{0,100};\s*base64\s*,)", re.IGNORECASE)
_BASE64 = re.compile(r";\s*base64\s*", re.IGNORECASE)


def is_data_url(text: str) -> bool:
    """Check whether a text begins as a data URL, which is never the description of an image.

    Args:
        text: The text.

    Returns:
        Whether it is a data URL, of any media type or none, also a damaged one.

    Example:
        >>> is_data_url(" DATA:;BASE64,aGk="), is_data_url("data: a new oil, perhaps")
        (True, False)
    """
    return _DATA_URL.match(text) is not None


def read_data_url(text: str) -> bytes:
    """Read the content of a data URL.

    Args:
        text: A text for which ``is_data_url`` holds.

    Returns:
        The content. Its media type is ignored, because browsers send a general one for HEIC.

    Raises:
        DataError: If it is not in base64, or empty.

    Example:
        >>> read_data_url("data:image/png;base64,aGk=")
        b'hi'
    """
    header, _, content = text.partition(",")
    if not _BASE64.search(header):
        raise DataError(
            f"expected data:image/...;base64,..., got {header.strip()[:40]!r}. Encode an image in "
            "base64"
        )
    return read_base64(unquote(content) if "%" in content else content)


def read_base64(text: str) -> bytes:
    """Read a file in base64.

    Args:
        text: The characters, with or without line breaks.

    Returns:
        Content of the file.

    Raises:
        DataError: If there are other characters, or none.

    Example:
        >>> read_base64("aG k=")
        b'hi'
    """
    problem = "an empty text"
    content = b""
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        problem = f"a text that is not base64 ({str(error).lower()})"
    if not content:
        raise DataError(
            f"expected an image in base64, got {problem}. Encode the content of the image file in "
            "base64"
        )
    return content


def decoded_pixels(
    content: bytes, name: str, *, min_side: int = 0, max_pixels: int = MAX_PIXELS
) -> int:
    """Return how many pixels ``decode_image`` decodes, from the header of an image.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.
        min_side: As for ``decode_image``. HEIF, JPEG XL and raw images count in full.
        max_pixels: As for ``decode_image``.

    Returns:
        Number of pixels.

    Raises:
        ImageError: If the header is damaged, or the image is too large.
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
    """Read the capture time of an image without decoding it.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.

    Returns:
        The time, as ``exif_times``. Empty if there is none.

    Raises:
        ImageError: If the header is damaged, or the image is too large.
    """
    from visavis.data.capture_time import exif_times

    return exif_times(read_exif(content, name))


def read_exif(content: bytes, name: str) -> Image.Exif:
    """Read the EXIF of an image without decoding it. Of a photo of a phone or camera, it has the
    capture time and the note of an Apple phone only.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.

    Returns:
        The EXIF. Empty if there is none, or it is damaged.

    Raises:
        ImageError: If the header is damaged, or the image is too large.
    """
    from visavis.data.photo_decoder import photo_format, read_header

    with _translate_errors(name):
        if (kind := photo_format(content, name)) is None:
            return _exif(_open(content, name, allow_animated=True))
        header = _read_photo(kind, name, lambda: read_header(content, kind, name, MAX_PIXELS))
        exif = Image.Exif()
        exif.load(header.exif)
        return exif


def maker_note(exif: Image.Exif) -> bytes:
    """Return the note that a phone or camera wrote into EXIF.

    Args:
        exif: The EXIF.

    Returns:
        The note in the form of its maker. Empty if there is none, or it is damaged.
    """
    try:
        note = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.MakerNote, b"")
    except Exception:  # noqa: BLE001 - damaged metadata raises errors of every kind
        return b""
    return note if isinstance(note, bytes) else b""


def image_size(content: bytes, name: str) -> tuple[int, int]:
    """Return the size of an upright image after decoding all of it. JPEG is decoded at an eighth of
    its size.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.

    Returns:
        Width and height in pixels.

    Raises:
        ImageError: As for ``decode_image``.
    """
    with _translate_errors(name):
        image = _open(content, name)
        size = _upright_size(image)
        reduce_jpeg(image, 1)
        image.load()
        return size


def make_thumbnail(
    content: bytes, name: str, max_side: int, *, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """Make a thumbnail in sRGB colors without metadata: no location, camera or comment. Of an
    animation, the first frame is used.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.
        max_side: Largest width and height in pixels.
        max_pixels: Largest number of pixels of the decoded image. A larger JPEG is decoded at a
            reduced size.

    Returns:
        An upright RGB image.

    Raises:
        ImageError: If the content is truncated, not an image, or too large.
    """
    with _translate_errors(name):
        image = _open(content, name, allow_animated=True, max_pixels=max_pixels, min_side=max_side)
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
    """Return the image formats for which this installation of Pillow has a decoder.

    Returns:
        Names of formats.
    """
    Image.init()
    return tuple(
        name
        for name in ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
        if name in Image.OPEN
    )


def readable_formats() -> tuple[str, ...]:
    """Return the image formats that this installation reads.

    Returns:
        Names of the formats that Pillow or an installed package for photos decodes.
    """
    from visavis.data.photo_decoder import PACKAGES, is_installed

    return (*supported_formats(), *(kind for kind in PACKAGES if is_installed(kind)))


def decoder_version() -> str:
    """Return a text that changes with the decoders, so that an image that they could not decode is
    tried again.

    Returns:
        Versions of the decoding, of Pillow and of the packages for photos, and the supported
        formats.
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
        max_pixels *= _MAX_PROGRESSIVE_FACTOR if _is_progressive(content) else _MAX_JPEG_FACTOR
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


def _is_progressive(content: bytes) -> bool:
    """Whether a JPEG has several scans, which are all decoded before the first row of pixels."""
    file = io.BytesIO(content)
    image = JpegImagePlugin.JpegImageFile(file)
    # Pillow stops after the header of the first scan, which begins with its own length and its
    # number of components.
    length = 6 + 2 * image.layers
    start = file.tell() - length
    return "progressive" in image.info or content[start : start + 3] != struct.pack(
        ">HB", length, image.layers
    )


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


Box = tuple[int, int, int, int]
"""Left, top, right and bottom of a part of an image, in pixels."""


def random_area_box(
    size: tuple[int, int],
    generator: torch.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Sample a crop by its area and aspect ratio.

    If ten random crops do not fit into the image, the largest centered crop of an allowed ratio is
    used.

    Args:
        size: Width and height of the image.
        generator: Random generator.
        scale: Range of the crop's area, as a share of the image's area.
        ratio: Range of the crop's width divided by its height.

    Returns:
        The crop.
    """
    for _ in range(10):
        # The order of the calls of the generator is a part of a seed.
        area = size[0] * size[1] * _uniform(*scale, generator)
        aspect = math.exp(_uniform(math.log(ratio[0]), math.log(ratio[1]), generator))
        width = round(math.sqrt(area * aspect))
        height = round(math.sqrt(area / aspect))
        if 0 < width <= size[0] and 0 < height <= size[1]:
            left = int(_uniform(0, size[0] - width + 1, generator))
            top = int(_uniform(0, size[1] - height + 1, generator))
            break
    else:
        aspect = min(max(size[0] / size[1], ratio[0]), ratio[1])
        width = min(size[0], round(size[1] * aspect))
        height = min(size[1], round(size[0] / aspect))
        left = (size[0] - width) // 2
        top = (size[1] - height) // 2
    return left, top, left + width, top + height


def random_sides_box(
    size: tuple[int, int], generator: torch.Generator, *, scale: tuple[float, float] = (0.6, 1.0)
) -> Box:
    """Sample a crop with the aspect ratio of the image.

    Args:
        size: Width and height of the image.
        generator: Random generator.
        scale: Range of the crop's sides, as a share of the image's sides.

    Returns:
        The crop.

    Source:
        The code of VSE-infinity (Chen et al., 2021).
    """
    side_share = _uniform(*scale, generator)
    width = max(1, int(side_share * size[0]))
    height = max(1, int(side_share * size[1]))
    left = int(_uniform(0, size[0] - width + 1, generator))
    top = int(_uniform(0, size[1] - height + 1, generator))
    return left, top, left + width, top + height


def random_horizontal_flip(image: Image.Image, generator: torch.Generator) -> Image.Image:
    """Flip an image horizontally with probability 1/2.

    Args:
        image: The image.
        generator: Random generator.

    Returns:
        The image, flipped or not.
    """
    return image.transpose(Transpose.FLIP_LEFT_RIGHT) if _uniform(0, 1, generator) < 0.5 else image


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


# Recompressed and resized copies differ in at most this many of 256 bits (measured). Some different
# images of one flat color do, too.
MAX_HAMMING_DISTANCE = 10
# Of 256 levels. A flat area stays flat in a recompressed copy.
_MIN_DIFFERENCE = 5
# A hash compares 16 x 16 pairs of neighbors.
_HASH_SIDE = 16


def dhash(image: Image.Image) -> str:
    """Compute a perceptual hash (dHash, N. Krawetz 2013).

    The bits are whether each of 16 x 16 pixels of a small gray copy is darker than its right
    neighbor. Differs from the original: a neighbor counts as brighter from a difference of 5 of 256
    levels.

    Args:
        image: The image.

    Returns:
        256 bits in hexadecimal digits.
    """
    gray = np.asarray(
        image.convert("L").resize((_HASH_SIDE + 1, _HASH_SIDE), Resampling.BILINEAR), dtype=np.int16
    )
    return np.packbits(gray[:, 1:] >= gray[:, :-1] + _MIN_DIFFERENCE).tobytes().hex()


def hamming_distances(hashes: Sequence[str], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Count the bits in which pairs of perceptual hashes differ.

    Args:
        hashes: Hashes of one length, or empty texts for unknown ones.
        first: Index of the first hash of each pair, shape ``[P]``.
        second: Index of the second hash.

    Returns:
        Number of bits, shape ``[P]``. 256 if a hash is unknown.

    Example:
        >>> hamming_distances(["0f", "1e", ""], np.array([0, 0]), np.array([1, 2])).tolist()
        [2, 256]
    """
    # Whole words of 64 bits, whose bits are counted at once.
    num_digits = -(-max(map(len, hashes), default=0) // 16) * 16
    content = bytes.fromhex("".join(code.ljust(num_digits, "0") for code in hashes))
    words = np.frombuffer(content, np.uint64).reshape(len(hashes), num_digits // 16).T
    # Unknown hashes are compared, too, and their distance is replaced afterwards.
    is_known = np.array([bool(code) for code in hashes])
    distances = np.zeros(len(first), np.int64)
    for word in words:
        distances += np.bitwise_count(word[first] ^ word[second])
    return np.where(is_known[first] & is_known[second], distances, 256)
