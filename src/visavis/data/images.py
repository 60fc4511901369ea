"""Decoding of image files to upright RGB images, random transforms for training, and a perceptual hash that copies share.

Each random transform samples from the ``torch.Generator`` that is passed to it.

Example:
    >>> random_sides_box((400, 300), torch.Generator().manual_seed(0))
    (4, 2, 399, 298)
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from PIL.Image import Resampling, Transpose

from visavis import storage
from visavis.errors import DataError

MAX_PIXELS = 64_000_000

_ORIENTATION_TAG = 0x0112
_TRANSPOSE_OF_ORIENTATION = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
COPY_AGAIN = "Copy it again from its source"
"""Fix of a damaged image or video, without its period."""
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
        self.kind, self.problem = kind, problem


def decode_image(content: bytes, name: str, *, min_side: int = 0, allow_animated: bool = False) -> Image.Image:
    """Decode an image file.

    Transparency is composed over white, and 16-bit values are scaled to 8 bits. Floating-point values are read as 0 to 1 if none exceeds 1,
    else as 0 to 255.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.
        min_side: A JPEG is decoded at a half, a quarter or an eighth of its size if its shorter side keeps this number of pixels.
            0: always in full.
        allow_animated: Whether to decode the first frame of an animation, instead of raising an error.

    Returns:
        An upright RGB image (EXIF orientation applied).

    Raises:
        ImageError: If the content is truncated, not an image, animated, or has more than 64 million pixels.
    """
    with _translate_errors(name):
        image = _open(content, name, allow_animated=allow_animated)
        if min_side:
            image.draft("RGB", (min_side, min_side))
        return _to_rgb(_transpose_upright(image, _orientation(image)))


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
    with _translate_errors(name):
        return _upright_size(_open(content, name))


def image_size(content: bytes, name: str) -> tuple[int, int]:
    """Return the size of an upright image after decoding all of it. JPEG is decoded at an eighth of its size.

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
        image.draft("RGB", (1, 1))
        image.load()
        return size


def make_thumbnail(content: bytes, name: str, max_side: int, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Make a thumbnail in sRGB colors without metadata: no location, camera or comment. Of an animation, the first frame is used.

    Args:
        content: Content of the file.
        name: Name of the image, for errors.
        max_side: Largest width and height in pixels.
        max_pixels: Largest number of pixels of the original image.

    Returns:
        An upright RGB image.

    Raises:
        ImageError: If the content is truncated, not an image, or too large.
    """
    with _translate_errors(name):
        image = _open(content, name, allow_animated=True, max_pixels=max_pixels)
        profile, mode = image.info.get("icc_profile"), image.mode
        image.draft("RGB", (max_side, max_side))
        orientation = _orientation(image)
        image = _to_rgb(image)
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        if profile and mode == "RGB":
            image = _to_srgb(image, profile)
        # The copy of the pixels has no metadata.
        return Image.fromarray(np.asarray(_transpose_upright(image, orientation)))


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert the colors of an image with a color profile. An unreadable profile is ignored."""
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"))
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return image
    return converted or image


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except MemoryError:
        raise DataError(f"image {name} needs more memory than is available. Reduce its size or free memory.") from None
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
    return tuple(name for name in ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000") if name in Image.OPEN)


def _open(content: bytes, name: str, *, allow_animated: bool = False, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image without decoding it, after all checks that its header allows."""
    if not content:
        raise ImageError("truncated image", f"is truncated: the file is empty (0 bytes). {COPY_AGAIN}", name)
    try:
        image = Image.open(io.BytesIO(content), formats=supported_formats())
    except UnidentifiedImageError:
        if content.startswith(_MAGIC_BYTES):
            problem = f"is truncated or damaged in its header ({len(content)} bytes). {COPY_AGAIN}"
            raise ImageError("truncated image", problem, name) from None
        problem = f"is not an image of a known format ({', '.join(supported_formats())}). Convert it to JPEG or PNG, or remove it"
        raise ImageError("not an image", problem, name) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large("too many pixels", max_pixels, name) from None
    if image.width * image.height > max_pixels:
        raise _too_large(f"{image.width} x {image.height} pixels", max_pixels, name)
    # An MPO is a photo with previews.
    if not allow_animated and image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
        problem = f"is animated or has pages ({frames} frames), expected a single image. Save one of them as a file"
        raise ImageError("animated image", problem, name)
    return image


def _too_large(pixels: str, max_pixels: int, name: str) -> ImageError:
    problem = f"has {pixels}, expected at most {max_pixels / 1e6:.0f} million. Reduce its size"
    return ImageError("decompression bomb", problem, name)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, from 1 (upright) to 8."""
    orientation: int = image.getexif().get(_ORIENTATION_TAG, 1)
    return orientation


def _upright_size(image: Image.Image) -> tuple[int, int]:
    return image.size[::-1] if _orientation(image) > 4 else image.size


def _transpose_upright(image: Image.Image, orientation: int) -> Image.Image:
    transpose = _TRANSPOSE_OF_ORIENTATION.get(orientation)
    return image if transpose is None else image.transpose(transpose)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image)
        if image.mode == "F":
            values = values * (255 if values.max() <= 1 else 1)
        else:
            values = np.clip(values, 0, 65535) // 257
        image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image.load()
    return image.convert("RGB")


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

    If ten random crops do not fit into the image, the largest centered crop of an allowed ratio is used.

    Args:
        size: Width and height of the image.
        generator: Random generator.
        scale: Range of the crop's area, as a share of the image's area.
        ratio: Range of the crop's width divided by its height.

    Returns:
        The crop.
    """
    for _ in range(10):
        area = size[0] * size[1] * _uniform(*scale, generator)
        aspect = math.exp(_uniform(math.log(ratio[0]), math.log(ratio[1]), generator))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= size[0] and 0 < height <= size[1]:
            left = int(_uniform(0, size[0] - width + 1, generator))
            top = int(_uniform(0, size[1] - height + 1, generator))
            break
    else:
        aspect = min(max(size[0] / size[1], ratio[0]), ratio[1])
        width, height = min(size[0], round(size[1] * aspect)), min(size[1], round(size[0] / aspect))
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return left, top, left + width, top + height


def random_sides_box(size: tuple[int, int], generator: torch.Generator, *, scale: tuple[float, float] = (0.6, 1.0)) -> Box:
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
    width, height = max(1, int(side_share * size[0])), max(1, int(side_share * size[1]))
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


# Recompressed and resized copies differ in at most this many of 256 bits (measured). Some different images of one flat color do, too.
MAX_HAMMING_DISTANCE = 10
# Of 256 levels. A flat area stays flat in a recompressed copy.
_MIN_DIFFERENCE = 5
# A hash compares 16 x 16 pairs of neighbors.
_HASH_SIDE = 16


def dhash(image: Image.Image) -> str:
    """Compute a perceptual hash (dHash, N. Krawetz 2013).

    The bits are whether each of 16 x 16 pixels of a small gray copy is darker than its right neighbor. Differs from the original: a neighbor
    counts as brighter from a difference of 5 of 256 levels.

    Args:
        image: The image.

    Returns:
        256 bits in hexadecimal digits.
    """
    gray = np.asarray(image.convert("L").resize((_HASH_SIDE + 1, _HASH_SIDE), Resampling.BILINEAR), dtype=np.int16)
    return np.packbits(gray[:, 1:] >= gray[:, :-1] + _MIN_DIFFERENCE).tobytes().hex()


# Number of bits of each byte.
_NUM_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)


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
    num_bytes = max(map(len, hashes), default=0) // 2
    content = np.frombuffer(b"".join(bytes.fromhex(code or "00" * num_bytes) for code in hashes), np.uint8).reshape(len(hashes), num_bytes)
    is_known = np.array([bool(code) for code in hashes])
    distances = _NUM_BITS[content[first] ^ content[second]].sum(1, dtype=np.int64)
    return np.where(is_known[first] & is_known[second], distances, 256)
