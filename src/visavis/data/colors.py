"""Conversion of images with a color profile to sRGB, with LittleCMS of Pillow."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

# Profiles of sRGB differ by rounding. A visible difference is larger.
_MAX_SRGB_DIFFERENCE = 2
# Number of levels of each channel at which a profile is compared with sRGB.
_GRID_LEVELS = 9
# Color space of the profiles that fit to the pixels of a mode.
_SPACE_OF_MODE = {"L": "GRAY", "I;16": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}
# Chromaticities of red, green and blue (ITU-T H.273) of BT.2020 and Display P3, with white D65.
_PRIMARIES = {
    9: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)),
    12: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
}
_D65 = (0.3127, 0.3290)
_D50 = np.array([0.9642, 1.0, 0.8249])
# Code points of transfer functions that are shown as sRGB: BT.709, unknown, BT.601, sRGB, BT.2020.
# The curves of high dynamic range are not among them.
_SDR_TRANSFERS = (1, 2, 6, 13, 14, 15)
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image | None:
    """Convert an image without transparency to sRGB. None: its values count as they are, as in other
    programs, because the profile is sRGB, is damaged, or does not fit to the mode.
    """
    mode = "I;16" if image.mode.startswith("I") else image.mode
    if mode not in _SPACE_OF_MODE:
        return None
    if _SPACE_OF_MODE[mode] == "GRAY":
        if (table := _gray_table(profile)) is None:
            # Some programs write gray images with the profile of their RGB images.
            return None if mode != "L" else to_srgb(image.convert("RGB"), profile)
        levels = np.clip(np.asarray(image), 0, 65535)
        # 65535 / 255 = 257: 8 bits to 16 bits.
        return Image.fromarray(table[levels.astype(np.uint16) * (257 if mode == "L" else 1)])
    if (transform := _transform(profile, mode)) is None:
        return None
    from PIL import ImageCms

    return ImageCms.applyTransform(image, transform)


# A folder of photos has few profiles. A transform takes milliseconds to build.
@lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> Any:
    """The transform of a mode to sRGB. None: see ``to_srgb``."""
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != _SPACE_OF_MODE[mode]:
            return None
        # The curves of a gray profile are evaluated for each level, because the default takes
        # curves for granted that are not steep near black.
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "I;16" else ImageCms.Flags.NONE
        target = ImageCms.createProfile("sRGB")
        transform = ImageCms.buildTransform(source, target, mode, "RGB", flags=flags)
        if mode == "RGB":
            levels = np.linspace(0, 255, _GRID_LEVELS).astype(np.uint8)
            grid = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
            converted = np.asarray(ImageCms.applyTransform(Image.fromarray(grid), transform))
            difference = np.abs(converted.astype(int) - grid)
            if difference.max() <= _MAX_SRGB_DIFFERENCE:
                return None
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    return transform


@lru_cache(maxsize=8)
def _gray_table(profile: bytes) -> np.ndarray | None:
    """RGB of each gray level of 16 bits, uint8 ``[65536, 3]``."""
    from PIL import ImageCms

    if (transform := _transform(profile, "I;16")) is None:
        return None
    levels = Image.fromarray(np.arange(2**16, dtype=np.uint16)[None])
    return np.asarray(ImageCms.applyTransform(levels, transform))[0]


@lru_cache(maxsize=8)
def profile_of_code_points(primaries: int, transfer: int) -> bytes | None:
    """Make the ICC profile of colors that a file describes by code points (ITU-T H.273). None for
    sRGB, unknown primaries, and high dynamic range, whose values count as they are.
    """
    if primaries not in _PRIMARIES or transfer not in _SDR_TRANSFERS:
        return None
    chromaticities = [*_PRIMARIES[primaries], _D65]
    columns = [np.array([x / y, 1.0, (1 - x - y) / y]) for x, y in chromaticities]
    to_xyz = np.stack(columns[:3], 1)
    white = columns[3]
    to_xyz = to_xyz * np.linalg.solve(to_xyz, white)
    # Profiles describe colors as they appear under D50.
    scale = np.diag(_BRADFORD @ _D50 / (_BRADFORD @ white))
    to_xyz = np.linalg.inv(_BRADFORD) @ scale @ _BRADFORD @ to_xyz
    # All profiles have the curve of sRGB: its parameters, of type 3 (ICC.1:2022, 10.18).
    curve = b"para\0\0\0\0" + struct.pack(">HH", 3, 0)
    curve += _fixed((2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045))
    text = "visavis".encode("utf-16-be")
    name = b"mluc\0\0\0\0" + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(text), 28) + text
    tags = {b"desc": name, b"wtpt": _xyz(_D50)}
    tags |= {key: _xyz(to_xyz[:, axis]) for axis, key in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    table = b""
    data = b""
    start = 128 + 4 + 12 * len(tags)
    for key, value in tags.items():
        table += key + struct.pack(">II", start + len(data), len(value))
        data += value + b"\0" * (-len(value) % 4)
    header = struct.pack(
        ">I4xI4s4s4s12x4s", start + len(data), 0x04300000, b"mntr", b"RGB ", b"XYZ ", b"acsp"
    )
    header = header.ljust(68, b"\0") + _fixed(_D50)
    return header.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + data


def _fixed(values: Sequence[float] | np.ndarray) -> bytes:
    return b"".join(struct.pack(">i", round(float(value) * 2**16)) for value in values)


def _xyz(values: np.ndarray) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(values)
