"""Program that decodes photos of phones and cameras: HEIF, JPEG XL and camera raw.

``photo_decoder`` starts it as a process of its own, because a damaged file can crash these
decoders, or let them run without end. It imports nothing of visavis, so that it starts in a fraction
of a second.

A request is a header in JSON and the content of a file. A reply is a header in JSON, then pixels,
color profile and EXIF. Each header has its length in front. The program ends when its input ends.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from PIL import ExifTags, Image
from PIL.Image import Transpose

# A decoder of one image must not take all cores: several decoders run at once.
_THREADS = 2
# A preview whose shorter side has fewer pixels loses details that models see. 640 x 480 is enough.
MIN_PREVIEW_SIDE = 480
# A half-size image has a quarter of the sensor's pixels.
_RAW_FACTOR = 4
_MAX_METADATA_BYTES = 2**22
# EXIF orientation of each flip of LibRaw: bit 0 mirrors columns, bit 1 rows, bit 2 transposes.
_ORIENTATION_OF_FLIP = {0: 1, 1: 2, 3: 3, 2: 4, 4: 5, 6: 6, 7: 7, 5: 8}
# As in ImageOps.exif_transpose, which fails where it cannot write the other metadata of a photo.
TRANSPOSE_OF_ORIENTATION = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
# The last change, original and digitized time, with offset and fraction of a second.
_BASE_TIME_TAGS = (ExifTags.Base.DateTime,)
_TIME_TAGS = (
    ExifTags.Base.DateTimeOriginal,
    ExifTags.Base.DateTimeDigitized,
    ExifTags.Base.OffsetTime,
    ExifTags.Base.OffsetTimeOriginal,
    ExifTags.Base.OffsetTimeDigitized,
    ExifTags.Base.SubsecTime,
    ExifTags.Base.SubsecTimeOriginal,
    ExifTags.Base.SubsecTimeDigitized,
)
# The note of an Apple phone has the identifier of a Live Photo.
_APPLE_NOTE = b"Apple iOS\0"
_GPS_TIME_TAGS = (ExifTags.GPS.GPSTimeStamp, ExifTags.GPS.GPSDateStamp)


class TooLargeError(Exception):
    """An image has more pixels than are allowed.

    Args:
        size: Width and height in pixels.
        limit: Largest number of pixels.
    """

    def __init__(self, size: tuple[int, int], limit: int):
        super().__init__(f"{size}")
        self.size = size
        self.limit = limit


@dataclass(frozen=True)
class Photo:
    """A photo whose header was read.

    Attributes:
        size: Width and height of the decoded image, before it is turned.
        load: Decodes the image. The argument is the shorter side to keep, 0: all pixels.
        orientation: EXIF orientation of the decoded image.
        profile: ICC profile.
        exif: EXIF, or empty.
        color: Code points of primaries and transfer function (ITU-T H.273) without a profile.
    """

    size: tuple[int, int]
    load: Callable[[int], Image.Image]
    orientation: int = 1
    profile: bytes = b""
    exif: bytes = b""
    color: tuple[int, int] | None = None


def _require_size(size: tuple[int, int], limit: int) -> None:
    if size[0] * size[1] > limit:
        raise TooLargeError(size, limit)


def _open_heif(content: bytes, max_pixels: int) -> Photo:
    """HEIF stores its own rotation and mirroring, which libheif applies. The EXIF orientation only
    repeats it.
    """
    import pillow_heif

    options = pillow_heif.options
    options.DECODE_THREADS = _THREADS
    options.THUMBNAILS = options.DEPTH_IMAGES = options.AUX_IMAGES = False
    file = pillow_heif.open_heif(io.BytesIO(content), convert_hdr_to_8bit=True)
    image = file[file.primary_index]
    _require_size(image.size, max_pixels)
    info: dict[str, Any] = dict(image.info)
    nclx = info.get("nclx_profile") or {}
    return Photo(
        image.size,
        lambda _: image.to_pillow(),
        profile=info.get("icc_profile") or b"",
        exif=_times_of(_load_exif(info.get("exif") or b"")),
        color=(nclx["color_primaries"], nclx["transfer_characteristics"])
        if {"color_primaries", "transfer_characteristics"} <= nclx.keys()
        else None,
    )


def _open_jxl(content: bytes, max_pixels: int) -> Photo:
    """The decoder applies the orientation of the codestream. It is an error to repeat it in EXIF."""
    # The header is read here, because the package decodes a file when it opens it.
    size, orientation = _read_jxl_header(content)
    _require_size(size, max_pixels)
    from pillow_jxl import JpegXLImagePlugin

    JpegXLImagePlugin.DECODE_THREADS = _THREADS
    image = JpegXLImagePlugin.JXLImageFile(io.BytesIO(content), "")
    # A JPEG that was packed into JPEG XL is unpacked as it was.
    is_turned = orientation != 1 and not image.jpeg
    return Photo(
        image.size,
        lambda _: image,
        # Encoders that ignore the orientation of an image (Pillow, libvips) write it to EXIF only,
        # so it counts if the codestream has none.
        1 if is_turned else exif_orientation(image),
        image.info.get("icc_profile") or b"",
        _times_of(image.getexif()),
    )


def _read_jxl_header(content: bytes) -> tuple[tuple[int, int], int]:
    """Size and orientation of a JPEG XL (ISO/IEC 18181-1, annex D.2 and D.3)."""
    start = content
    position = 0
    while start[:2] != b"\xff\x0a":
        # A container: boxes of a length, a type and data.
        length, kind = struct.unpack_from(">I4s", content, position)
        begin = position + 8
        if length == 1:
            [length] = struct.unpack_from(">Q", content, begin)
            begin += 8
        if kind in (b"jxlc", b"jxlp"):
            start = content[begin + 4 * (kind == b"jxlp") :][:64]
            if start[:2] != b"\xff\x0a":
                raise ValueError("the image has no header")
        position += length if length >= 8 else len(content)
    bits = int.from_bytes(start[2:64], "little")

    def read(count: int) -> int:
        nonlocal bits
        value = bits & ((1 << count) - 1)
        bits = bits >> count
        return value

    def read_side(is_small: int) -> int:
        return 8 * (read(5) + 1) if is_small else 1 + read((9, 13, 18, 30)[read(2)])

    is_small = read(1)
    height = read_side(is_small)
    ratio = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
    number = read(3)
    width = height * ratio[number - 1][0] // ratio[number - 1][1] if number else read_side(is_small)
    has_orientation = not read(1) and read(1)
    return (width, height), 1 + read(3) if has_orientation else 1


def _open_raw(content: bytes, max_pixels: int) -> Photo:
    """The embedded preview, which the camera has developed, or else the half-size image."""
    import rawpy

    raw = rawpy.RawPy()
    raw.open_buffer(io.BytesIO(content))
    sizes = raw.sizes
    exif = _read_raw_exif(content, raw)
    _require_size((sizes.raw_width, sizes.raw_height), _RAW_FACTOR * max_pixels)
    half = (sizes.width + 1) // 2, (sizes.height + 1) // 2
    flip = _ORIENTATION_OF_FLIP.get(sizes.flip, 1)
    preview = None
    # A preview that is missing, damaged or of another kind is replaced by the image itself.
    with suppress(rawpy.LibRawError, rawpy.NotSupportedError, OSError, SyntaxError, ValueError):
        thumbnail = raw.extract_thumb()
        preview = (
            Image.open(io.BytesIO(thumbnail.data), formats=["JPEG"])
            if isinstance(thumbnail.data, bytes)
            else Image.fromarray(thumbnail.data)
        )
    if preview is not None and min(preview.size) >= min(MIN_PREVIEW_SIDE, *half):
        # The orientation of the preview, which LibRaw adds where it is missing, or of the raw image.
        own = exif_orientation(preview)
        orientation = flip if own == 1 else own
        # A preview whose sides differ from the sensor's is turned already.
        is_same = (preview.width >= preview.height) == (half[0] >= half[1])
        return Photo(
            preview.size,
            partial(_load_preview, preview, max_pixels),
            orientation if orientation <= 4 or is_same else 1,
            preview.info.get("icc_profile") or b"",
            exif,
        )

    def develop(_: int) -> Image.Image:
        pixels = raw.postprocess(half_size=True, use_camera_wb=True, output_bps=8)
        return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)

    # LibRaw turns the image.
    return Photo(half[::-1] if flip > 4 else half, develop, exif=exif)


def _load_preview(preview: Image.Image, max_pixels: int, min_side: int) -> Image.Image:
    """Decode a preview, a JPEG at a reduced size where that suffices."""
    factor = max(1, min(preview.size) // min_side) if min_side else 1
    while preview.width * preview.height > max_pixels * factor**2:
        factor *= 2
    if factor > 1:
        preview.draft("RGB", (preview.width // factor, preview.height // factor))
    preview.load()
    return preview


def _read_raw_exif(content: bytes, raw: Any) -> bytes:
    """EXIF with the capture time. Most raw formats are variants of TIFF, whose tags contain the
    offset to UTC. LibRaw reads the time of all others.
    """
    exif = b""
    if content[:2] in _TIFF_ORDERS:
        # Olympus and Panasonic use other numbers in place of 42.
        exif = _times_of(_load_exif(_TIFF_ORDERS[content[:2]] + content[4:]))
    if not exif:
        tags = Image.Exif()
        # LibRaw converts the time of the camera as if it were local time. So does rawpy back.
        with suppress(OSError, ValueError, OverflowError):
            if (time := raw.other.timestamp).year > 1971:
                camera = tags.get_ifd(ExifTags.IFD.Exif)
                camera[ExifTags.Base.DateTimeOriginal] = time.strftime("%Y:%m:%d %H:%M:%S")
                exif = tags.tobytes()
    return exif


_TIFF_ORDERS = {b"II": b"II*\0", b"MM": b"MM\0*"}


def _load_exif(content: bytes) -> Image.Exif:
    exif = Image.Exif()
    with suppress(Exception):
        exif.load(content if content.startswith(b"Exif\0\0") else b"Exif\0\0" + content)
    return exif


def _times_of(exif: Image.Exif) -> bytes:
    """EXIF with the capture time and the note of an Apple phone: no orientation, because the image
    is turned.
    """
    kept = Image.Exif()
    with suppress(Exception):
        kept.update(_select(exif, _BASE_TIME_TAGS))
        for directory, tags in (
            (ExifTags.IFD.Exif, _TIME_TAGS),
            (ExifTags.IFD.GPSInfo, _GPS_TIME_TAGS),
        ):
            if found := _select(exif.get_ifd(directory), tags):
                kept[directory] = found
        note = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.MakerNote, b"")
        if isinstance(note, bytes) and note.startswith(_APPLE_NOTE):
            kept[ExifTags.IFD.Exif] = {
                **kept.get(ExifTags.IFD.Exif, {}),
                ExifTags.Base.MakerNote: note,
            }
        return kept.tobytes() if len(kept) else b""
    return b""


def _select(values: Any, tags: Sequence[int]) -> dict[int, Any]:
    """Values of some tags."""
    return {int(tag): values[tag] for tag in tags if tag in values}


def exif_orientation(image: Image.Image) -> int:
    """Read the EXIF orientation, from 1 (upright) to 8. 1 for unreadable metadata, which other
    programs ignore, too.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - damaged metadata raises errors of every kind
        return 1
    return orientation if orientation in TRANSPOSE_OF_ORIENTATION else 1


_OPENERS = {"HEIF": _open_heif, "JPEG XL": _open_jxl, "camera raw": _open_raw}


def _answer(request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Decode an image, or report its problem."""
    try:
        photo = _OPENERS[request["format"]](content, request["max_pixels"])
        size = photo.size[::-1] if photo.orientation > 4 else photo.size
        if request["header_only"]:
            return {"size": size}, [photo.exif[:_MAX_METADATA_BYTES]]
        min_side = request["min_side"]
        image = photo.load(min_side)
        # A crop of HEIF that does not fit is cut without an error.
        if request["format"] == "HEIF" and image.size != photo.size:
            return {
                "problem": "damage",
                "reason": f"expected {photo.size} pixels as in its header, got {image.size}",
            }, []
        if min_side and (factor := min(image.size) // min_side) > 1:
            image = image.reduce(factor)
        if photo.orientation > 1:
            image = image.transpose(TRANSPOSE_OF_ORIENTATION[photo.orientation])
        profile, exif = (
            value if len(value) <= _MAX_METADATA_BYTES else b""
            for value in (photo.profile, photo.exif)
        )
        reply = {"size": image.size, "mode": image.mode, "color": photo.color}
        return reply, [image.tobytes(), profile, exif]
    except TooLargeError as error:
        return {"problem": "size", "size": error.size, "limit": error.limit}, []
    except MemoryError:
        return {"problem": "memory"}, []
    except ImportError as error:
        return {"problem": "import", "reason": f"{error.name}: {error}"}, []
    except Exception as error:  # noqa: BLE001 - decoders raise errors of every kind on damaged bytes
        text = " ".join(str(error).split()) or type(error).__name__
        return {"problem": "damage", "reason": text[:300]}, []


def _read_exactly(file: BinaryIO, count: int) -> bytes:
    content = file.read(count)
    if len(content) < count:
        raise EOFError
    return content


def main() -> None:
    """Answer requests until the input ends."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # A decoder that prints must not disturb the replies.
    os.dup2(2, 1)
    # Limit the private memory of this process. Windows has no such limit.
    limit = int(sys.argv[1])
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    while True:
        try:
            [length] = struct.unpack(">I", _read_exactly(requests, 4))
            request = json.loads(_read_exactly(requests, length))
            content = _read_exactly(requests, request["length"])
        except EOFError:
            break
        reply, parts = _answer(request, content)
        header = json.dumps({**reply, "parts": list(map(len, parts))}).encode()
        replies.write(struct.pack(">I", len(header)) + header + b"".join(parts))
        replies.flush()


if __name__ == "__main__":
    main()
