"""Sixty files as phones and cameras write them, each with the scene that it must show."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from .. import photos as make
from ..videos import write_video

OFFSET = "+02:00"
P3 = make.rgb_profile("Display P3", make.DISPLAY_P3, 2.2)
ADOBE = make.rgb_profile("Adobe RGB", make.ADOBE_RGB, 2.19921875)
SPACES = {
    "p3": (make.DISPLAY_P3, 2.2, P3),
    "adobe": (make.ADOBE_RGB, 2.19921875, ADOBE),
}
SUFFIXES = {"HEIF": "heic", "JXL": "jxl", "JPEG": "jpg", "AVIF": "avif"}


@dataclass(frozen=True)
class DevicePhoto:
    """A file, and what must be read from it.

    expected: the upright scene in sRGB. None: a companion of the photo of the same name. time:
    capture time, or empty.
    """

    name: str
    content: bytes
    expected: Image.Image | None
    time: str = ""


class Camera:
    """Takes photos of different scenes, one per minute."""

    number = -1

    def scene(self, size: tuple[int, int] = (160, 120)) -> Image.Image:
        """The next scene."""
        self.number += 1
        return make.scene(self.number, size)

    def exif(self, orientation: int = 1) -> bytes:
        """EXIF of the current photo."""
        return make.exif(orientation, f"2024:05:31 18:{self.number:02}:15", OFFSET)

    def dng(self, image: Image.Image, orientation: int, **options: Any) -> bytes:
        """The current photo as raw image."""
        time = f"2024:05:31 18:{self.number:02}:15"
        return make.encode_dng(image, orientation, time=time, offset=OFFSET, **options)

    def photo(self, name: str, content: bytes, expected: Image.Image) -> DevicePhoto:
        """The current photo."""
        time = f"2024-05-31T18:{self.number:02}:15.000{OFFSET}"
        return DevicePhoto(name, content, expected, time)


def device_photos(folder: Path) -> list[DevicePhoto]:
    """All files. Temporary files are written into the folder."""
    camera = Camera()
    return [
        *_turned(camera),
        *_color_spaces(camera, folder),
        *_depths(camera),
        *_inks(camera),
        *_raw(camera),
        *_pairs(camera, folder),
    ]


def _turned(camera: Camera) -> Iterator[DevicePhoto]:
    for kind, suffix in SUFFIXES.items():
        for orientation in range(1, 9) if kind != "AVIF" else (6,):
            shown = camera.scene()
            exif = camera.exif(orientation)
            content = make.encode(make.stored(shown, orientation), kind, exif=exif, quality=95)
            yield camera.photo(f"turned/{orientation}.{suffix}", content, shown)


def _color_spaces(camera: Camera, folder: Path) -> Iterator[DevicePhoto]:
    for kind, suffix in SUFFIXES.items():
        for space, (primaries, gamma, profile) in SPACES.items():
            shown = camera.scene()
            image = make.convert_colors(shown, primaries, gamma)
            options = {"icc_profile": profile, "exif": camera.exif(), "quality": 95}
            if kind == "JXL":
                # The encoder takes the profile of a JPEG only, which it packs without loss.
                content = make.pack_jpeg(folder, make.encode(image, "JPEG", **options))
            else:
                content = make.encode(image, kind, **options)
            yield camera.photo(f"{space}/{suffix}.{suffix}", content, shown)
    # Colors by code points, without a profile.
    import pillow_heif

    shown, file = camera.scene(), io.BytesIO()
    pillow_heif.from_pillow(make.convert_to_srgb_curve(shown, make.DISPLAY_P3)).save(
        file, exif=camera.exif(), quality=95, color_primaries=12, transfer_characteristics=13
    )
    yield camera.photo("p3/code-points.heic", file.getvalue(), shown)


def _depths(camera: Camera) -> Iterator[DevicePhoto]:
    """Gray values with a gamma, palettes, transparency, and 10 or 16 bits."""
    for name, kind, gamma, levels, profile in (
        ("gray.heic", "HEIF", 0.0, 255, b""),
        ("gray-linear.jpg", "JPEG", 1.0, 255, make.gray_profile("linear", 1.0)),
        ("gray-16.png", "PNG", 1.8, 65535, make.gray_profile("gamma 1.8", 1.8)),
        ("gray-16.tif", "TIFF", 1.0, 65535, make.gray_profile("linear", 1.0)),
        # The encoder describes 16 bits as linear.
        ("gray-16.jxl", "JXL", 1.0, 65535, b""),
    ):
        shown = camera.scene().convert("L")
        image, values = shown, make.to_linear(np.asarray(shown))
        if gamma:
            kind_of = np.uint8 if levels == 255 else np.uint16
            image = Image.fromarray(np.rint(levels * values ** (1 / gamma)).astype(kind_of))
        content = make.encode(image, kind, icc_profile=profile, exif=camera.exif(), quality=95)
        yield camera.photo(f"depths/{name}", content, shown.convert("RGB"))
    for name, kind, profile in (("alpha.heic", "HEIF", b""), ("alpha-p3.png", "PNG", P3)):
        shown = camera.scene()
        image = make.convert_colors(shown, make.DISPLAY_P3, 2.2) if profile else shown.copy()
        # Half transparent over white.
        image.putalpha(128)
        shown = Image.blend(Image.new("RGB", shown.size, "white"), shown, 128 / 255)
        content = make.encode(image, kind, icc_profile=profile, exif=camera.exif(), quality=95)
        yield camera.photo(f"depths/{name}", content, shown)
    shown = camera.scene().quantize(64, dither=Image.Dither.NONE).convert("RGB")
    image = make.convert_colors(shown, make.DISPLAY_P3, 2.2)
    palette = image.quantize(256, dither=Image.Dither.NONE)
    content = make.encode(palette, "PNG", icc_profile=P3, exif=camera.exif())
    yield camera.photo("depths/palette-p3.png", content, shown)
    shown = camera.scene()
    image = make.convert_colors(shown, make.DISPLAY_P3, 2.2)
    content = make.encode(image, "WEBP", icc_profile=P3, exif=camera.exif(), lossless=True)
    yield camera.photo("depths/p3.webp", content, shown)
    import pillow_heif

    shown, file = camera.scene(), io.BytesIO()
    values = np.asarray(shown).astype("<u2") * 257
    heif = pillow_heif.from_bytes("RGB;16", shown.size, values.tobytes())
    heif.save(file, exif=camera.exif(), quality=95)
    yield camera.photo("depths/10-bit.heic", file.getvalue(), shown)


def _inks(camera: Camera) -> Iterator[DevicePhoto]:
    """CMYK, as Photoshop stores it. LittleCMS and Pillow are the reference."""
    for name, kind, profile in (
        ("inks.jpg", "JPEG", make.cmyk_profile()),
        ("inks.tif", "TIFF", make.cmyk_profile()),
        ("no-profile.jpg", "JPEG", b""),
    ):
        image = camera.scene().convert("CMYK")
        shown = image.convert("RGB")
        if profile:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            target = ImageCms.createProfile("sRGB")
            shown = ImageCms.profileToProfile(image, source, target, outputMode="RGB")
        content = make.encode(image, kind, icc_profile=profile, exif=camera.exif(), quality=95)
        yield camera.photo(f"cmyk/{name}", content, shown)


def _raw(camera: Camera) -> Iterator[DevicePhoto]:
    """With a preview, without, and with one that the camera has turned already."""
    for name, orientation, preview in (
        ("plain.dng", 1, "stored"),
        ("plain-6.dng", 6, "stored"),
        ("turned-8.nef", 8, "upright"),
        ("exif-3.arw", 3, "exif"),
        ("no-preview.dng", 1, ""),
        ("no-preview-6.dng", 6, ""),
        ("tiny-preview-8.dng", 8, "tiny"),
    ):
        shown = camera.scene((640, 480))
        image = make.stored(shown, orientation)
        previews = {
            "stored": image,
            "upright": shown,
            "exif": make.encode(image, "JPEG", exif=make.exif(orientation), quality=95),
            "tiny": image.resize((16, 12)),
            "": None,
        }
        content = camera.dng(image, orientation, preview=previews[preview])
        if preview in ("", "tiny"):
            import rawpy

            with rawpy.imread(io.BytesIO(content)) as raw:
                shown = Image.fromarray(raw.postprocess(half_size=True, use_camera_wb=True))
        yield camera.photo(f"raw/{name}", content, shown)


def _pairs(camera: Camera, folder: Path) -> Iterator[DevicePhoto]:
    """Two Live Photos, and two photos with their raw image."""
    starts = []
    for name, kind in (
        ("IMG_1.HEIC", "HEIF"),
        ("IMG_2.JPG", "JPEG"),
        ("IMG_3.JPG", "JPEG"),
        ("IMG_4.HEIC", "HEIF"),
    ):
        shown = camera.scene()
        content = make.encode(shown, kind, exif=camera.exif(), quality=95)
        yield camera.photo(f"pairs/{name}", content, shown)
        starts.append(f"2024-05-31T16:{camera.number:02}:14Z")
    for name, start in zip(("IMG_1.MOV", "IMG_2.mov"), starts, strict=False):
        frames = [np.asarray(make.scene(99))] * 5
        clip = write_video(folder / "clip.mov", frames, metadata={"creation_time": start})
        yield DevicePhoto(f"pairs/{name}", clip.read_bytes(), None)
        clip.unlink()
    for name in ("IMG_3.DNG", "IMG_4.dng"):
        yield DevicePhoto(f"pairs/{name}", make.encode_dng(make.scene(98)), None)
