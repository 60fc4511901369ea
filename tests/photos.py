"""Files of phones and cameras for tests, made with public encoders: HEIC, JPEG XL, DNG and images
with color profiles.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image
from PIL.Image import Transpose

# How a camera stores an upright scene, by the EXIF orientation that it writes.
STORED_AS = {
    1: None,
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_90,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_270,
}
D65 = (0.3127, 0.3290)
DISPLAY_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
ADOBE_RGB = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG with its length and checksum."""
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header declares a large size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(b"\0" * 100))
        + png_chunk(b"IEND", b"")
    )


def scene(seed: int = 0, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """A smooth image without symmetries, whose colors all profiles can describe."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(40, 216, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.BICUBIC)


def stored(image: Image.Image, orientation: int) -> Image.Image:
    """The pixels of an upright image as a file with an orientation stores them."""
    transpose = STORED_AS[orientation]
    return image if transpose is None else image.transpose(transpose)


def exif(orientation: int = 1, time: str = "", offset: str = "") -> bytes:
    """EXIF with an orientation, and a capture time such as ``2024:05:31 18:30:15``."""
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    if time:
        camera = tags.get_ifd(ExifTags.IFD.Exif)
        camera[ExifTags.Base.DateTimeOriginal] = time
        if offset:
            camera[ExifTags.Base.OffsetTimeOriginal] = offset
    return tags.tobytes()


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Encode an image with Pillow, pillow-heif or pillow-jxl."""
    if kind == "HEIF":
        import pillow_heif

        pillow_heif.register_heif_opener()
    elif kind == "JXL":
        import pillow_jxl  # noqa: F401 - registers itself
    file = io.BytesIO()
    image.save(file, kind, **{key: value for key, value in options.items() if value})
    return file.getvalue()


def pack_jpeg(folder: Path, content: bytes) -> bytes:
    """Pack a JPEG into JPEG XL without loss, as the program cjxl does."""
    path = write(folder / "packed.jpg", content)
    file = io.BytesIO()
    with Image.open(path) as image:
        import pillow_jxl  # noqa: F401 - registers itself

        image.save(file, "JXL", lossless_jpeg=True)
    path.unlink()
    return file.getvalue()


def rgb_to_xyz(primaries: Sequence[tuple[float, float]]) -> np.ndarray:
    """Matrix from linear RGB with white D65 to XYZ."""
    columns = [np.array([x / y, 1.0, (1 - x - y) / y]) for x, y in (*primaries, D65)]
    matrix = np.stack(columns[:3], 1)
    return matrix * np.linalg.solve(matrix, columns[3])


def convert_colors(
    image: Image.Image, primaries: Sequence[tuple[float, float]], gamma: float
) -> Image.Image:
    """The same colors as an sRGB image, as values of another RGB space. Computed in float64."""
    return _to_image(_linear(image, primaries) ** (1 / gamma))


def convert_to_srgb_curve(
    image: Image.Image, primaries: Sequence[tuple[float, float]]
) -> Image.Image:
    """As ``convert_colors``, with the curve of sRGB."""
    linear = _linear(image, primaries)
    return _to_image(
        np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    )


def to_linear(levels: np.ndarray) -> np.ndarray:
    """Light of values of sRGB with 8 bits, from 0 to 1."""
    values = levels.astype(np.float64) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _linear(image: Image.Image, primaries: Sequence[tuple[float, float]]) -> np.ndarray:
    """Light of an sRGB image in another RGB space."""
    linear = to_linear(np.asarray(image))
    return (linear @ (np.linalg.inv(rgb_to_xyz(primaries)) @ rgb_to_xyz(SRGB)).T).clip(0, 1)


def _to_image(values: np.ndarray) -> Image.Image:
    return Image.fromarray(np.rint(255 * values).astype(np.uint8))


def rgb_profile(name: str, primaries: Sequence[tuple[float, float]], gamma: float) -> bytes:
    """An ICC profile of an RGB space (ICC.1:2001-04)."""
    d50, cone = np.array([0.9642, 1.0, 0.8249]), _BRADFORD
    white = np.array([D65[0] / D65[1], 1.0, (1 - sum(D65)) / D65[1]])
    adapt = np.linalg.inv(cone) @ np.diag((cone @ d50) / (cone @ white)) @ cone
    columns = adapt @ rgb_to_xyz(primaries)
    tags = {b"wtpt": _xyz(d50)}
    tags |= {key: _xyz(columns[:, axis]) for axis, key in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), _gamma(gamma))
    return _profile(name, b"RGB ", b"XYZ ", tags)


def gray_profile(name: str, gamma: float) -> bytes:
    """An ICC profile of gray values."""
    tags = {b"wtpt": _xyz((0.9642, 1.0, 0.8249)), b"kTRC": _gamma(gamma)}
    return _profile(name, b"GRAY", b"XYZ ", tags)


def cmyk_profile(name: str = "Inks") -> bytes:
    """An ICC profile of CMYK with a table of 5 levels per ink: ink absorbs light less than ideally,
    so that colors differ from those without the profile.
    """
    levels = np.linspace(0, 1, 5)
    cyan, magenta, yellow, black = np.meshgrid(levels, levels, levels, levels, indexing="ij")
    light = np.stack([1 - 0.8 * cyan, 1 - 0.8 * magenta, 1 - 0.8 * yellow], -1)
    linear = light * (1 - 0.9 * black)[..., None]
    xyz = (
        linear
        @ np.array([[0.4361, 0.3851, 0.1431], [0.2225, 0.7169, 0.0606], [0.0139, 0.0971, 0.7141]]).T
    )
    ratio = xyz / np.array([0.9642, 1.0, 0.8249])
    root = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    lab = np.stack(
        [
            (116 * root[..., 1] - 16) * 255 / 100,
            500 * (root[..., 0] - root[..., 1]) + 128,
            200 * (root[..., 1] - root[..., 2]) + 128,
        ],
        -1,
    )
    identity = np.tile(np.arange(256, dtype=np.uint8), 4).tobytes()
    table = b"mft1\0\0\0\0" + bytes((4, 3, 5, 0)) + _fixed((1, 0, 0, 0, 1, 0, 0, 0, 1))
    table += identity + np.rint(lab).clip(0, 255).astype(np.uint8).tobytes() + identity[:768]
    return _profile(
        name, b"CMYK", b"Lab ", {b"wtpt": _xyz((0.9642, 1, 0.8249)), b"A2B0": table}, b"prtr"
    )


_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)


def _fixed(values: Sequence[float] | np.ndarray) -> bytes:
    return b"".join(struct.pack(">i", round(float(value) * 65536)) for value in values)


def _xyz(values: Sequence[float] | np.ndarray) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(values)


def _gamma(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def _profile(
    name: str, space: bytes, connection: bytes, tags: Mapping[bytes, bytes], kind: bytes = b"mntr"
) -> bytes:
    text = name.encode() + b"\0"
    description = b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + b"\0" * 78
    table, data, start = b"", b"", 128 + 4 + 12 * (len(tags) + 1)
    for key, value in {b"desc": description, **tags}.items():
        table += key + struct.pack(">II", start + len(data), len(value))
        data += value + b"\0" * (-len(value) % 4)
    header = struct.pack(
        ">I4xI4s4s4s12x4s", start + len(data), 0x02400000, kind, space, connection, b"acsp"
    )
    header = (header.ljust(68, b"\0") + _fixed((0.9642, 1.0, 0.8249))).ljust(128, b"\0")
    return header + struct.pack(">I", len(tags) + 1) + table + data


def encode_dng(
    image: Image.Image,
    orientation: int = 1,
    *,
    preview: Image.Image | bytes | None = None,
    time: str = "",
    offset: str = "",
) -> bytes:
    """Write an uncompressed DNG 1.4 with a Bayer pattern.

    Args:
        image: The scene as it is stored, with even sides.
        orientation: EXIF orientation.
        preview: Preview, or the content of its JPEG. None: there is none.
        time: Capture time.
        offset: Its offset to UTC.

    Returns:
        Content of the file.
    """
    linear = to_linear(np.asarray(image.convert("RGB")))
    bayer = np.empty(linear.shape[:2])
    for (row, column), channel in {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 2}.items():
        bayer[row::2, column::2] = linear[row::2, column::2, channel]
    raw = np.rint(bayer * 65535).astype("<u2").tobytes()
    width, height = image.size
    entries: list[tuple[int, str, Any]] = [
        (254, "I", [0]),
        *((256, "I", [width]), (257, "I", [height]), (258, "H", [16]), (259, "H", [1])),
        *((262, "H", [32803]), (271, "s", b"visavis"), (272, "s", b"test camera")),
        *((273, "I", [8]), (274, "H", [orientation]), (277, "H", [1]), (278, "I", [height])),
        *((279, "I", [len(raw)]), (284, "H", [1]), (33421, "H", [2, 2])),
        *((33422, "B", [0, 1, 1, 2]), (50706, "B", [1, 4, 0, 0]), (50708, "s", b"visavis test")),
        *((50714, "I", [0]), (50717, "I", [65535]), (50728, "r", [1.0, 1.0, 1.0])),
        # From XYZ to the sensor, which sees linear sRGB.
        (50721, "r", np.linalg.inv(rgb_to_xyz(SRGB)).ravel()),
        (50778, "H", [21]),
    ]
    content = bytearray(b"II*\0" + bytes(4) + raw)
    if preview is not None:
        jpeg = preview if isinstance(preview, bytes) else encode(preview, "JPEG", quality=95)
        size, place = Image.open(io.BytesIO(jpeg)).size, len(content)
        content += jpeg + b"\0" * (len(jpeg) % 2)
        small: list[tuple[int, str, Any]] = [
            (254, "I", [1]),
            *((256, "I", [size[0]]), (257, "I", [size[1]]), (258, "H", [8, 8, 8])),
            *((259, "H", [7]), (262, "H", [6]), (273, "I", [place]), (277, "H", [3])),
            *((278, "I", [size[1]]), (279, "I", [len(jpeg)])),
        ]
        entries.append((330, "I", [_add_directory(content, small)]))
    if time:
        camera: list[tuple[int, str, Any]] = [(36867, "s", time.encode())]
        camera += [(36881, "s", offset.encode())] if offset else []
        entries.append((34665, "I", [_add_directory(content, camera)]))
    content[4:8] = struct.pack("<I", _add_directory(content, entries))
    return bytes(content)


def _add_directory(content: bytearray, entries: list[tuple[int, str, Any]]) -> int:
    """Append a directory of a TIFF and its values. Returns its position."""
    position = len(content)
    directory, values = struct.pack("<H", len(entries)), b""
    start = position + 2 + 12 * len(entries) + 4
    for tag, code, value in sorted(entries, key=lambda entry: entry[0]):
        kind, count = {"B": 1, "s": 2, "H": 3, "I": 4, "r": 10}[code], len(value)
        if code == "s":
            packed, count = value + b"\0", count + 1
        elif code == "r":
            numbers = [part for each in value for part in (round(each * 10000), 10000)]
            packed = struct.pack(f"<{len(numbers)}i", *numbers)
        else:
            packed = struct.pack(f"<{count}{code}", *value)
        is_short = len(packed) <= 4
        field = packed.ljust(4, b"\0") if is_short else struct.pack("<I", start + len(values))
        values += b"" if is_short else packed + b"\0" * (len(packed) % 2)
        directory += struct.pack("<HHI", tag, kind, count) + field
    content += directory + bytes(4) + values
    return position


def write(path: Path, content: bytes) -> Path:
    """Write a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
