"""From a picture to a frozen encoder's pixels, as its ``preprocessor_config.json`` says, with Pillow and torch alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from visavis import storage
from visavis.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_RESIZED = 16_000_000
"""Pixels of a resized picture: of a longer one, such as 1 x 20,000 whose shorter edge becomes 224, the middle is taken."""
TEN_CROP_MARGIN = 8 / 7
"""For ten crops a picture's shorter edge is at least this multiple of the crop: 256 for 224."""


_Edge = Annotated[int, Field(gt=0, le=10_000)]
_Size = _Edge | dict[str, _Edge]
_Three = Annotated[list[FiniteFloat], Field(min_length=3, max_length=3)]


@dataclass(frozen=True)
class PreprocessorConfig:
    """The ``preprocessor_config.json`` of a transformers folder: what of it is known, by its own names."""

    do_resize: bool | None = True
    size: _Size | None = None
    do_center_crop: bool | None = False
    crop_size: _Size | None = None
    crop_pct: Annotated[float, Field(gt=0, le=1)] | None = None
    resample: Annotated[int, Field(ge=0, le=5)] = 2
    do_rescale: bool | None = True
    rescale_factor: FiniteFloat = 1 / 255
    do_normalize: bool | None = True
    image_mean: _Three | None = None
    image_std: Annotated[list[Annotated[FiniteFloat, Field(gt=0)]], Field(min_length=3, max_length=3)] | None = None

    def __post_init__(self) -> None:
        if self.do_normalize and (self.image_mean is None or self.image_std is None):
            raise ValueError("it normalizes, and lacks image_mean or image_std")


@dataclass(frozen=True)
class Preprocessing:
    """Resize, crop the center, scale, normalize; each step only where its value is given.

    resize: ``(height, width)``, or ``(shorter edge,)``. crop: ``(height, width)``. resample: Pillow's number.
    scale: multiplies the bytes. mean, std: of the scaled channels.
    """

    resize: tuple[int, ...] | None
    crop: tuple[int, int] | None
    resample: int = 2
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @classmethod
    def read(cls, folder: Path) -> Preprocessing:
        """That of a transformers folder. Raises DataError if it has none."""
        if not (folder / "preprocessor_config.json").exists():
            raise DataError(f"{folder} has no preprocessor_config.json: it does not say how pictures are resized and normalized.")
        return cls.of(storage.read_json(folder / "preprocessor_config.json", PreprocessorConfig))

    @classmethod
    def of(cls, config: PreprocessorConfig) -> Preprocessing:
        """The steps that a config asks for. Raises DataError for a size of an unknown kind."""
        resize = _size(config.size) if config.do_resize else None
        crop = _square(_size(config.crop_size)) if config.do_center_crop else None
        if (part := config.crop_pct) and resize and len(resize) == 1:  # ConvNeXt: below 384 the shorter edge is that of the crop
            resize, crop = ((int(resize[0] / part),), _square(resize)) if resize[0] < 384 else (_square(resize), None)
        return cls(
            resize=resize,
            crop=crop,
            resample=config.resample,
            scale=config.rescale_factor if config.do_rescale else 1.0,
            mean=tuple(config.image_mean) if config.do_normalize and config.image_mean else cls.mean,
            std=tuple(config.image_std) if config.do_normalize and config.image_std else cls.std,
        )

    @property
    def of_crops(self) -> Preprocessing:
        """The same for pictures that are crops already: of the size that the crop has, and nothing more is cut off them."""
        return replace(self, resize=self.crop or _square(self.resize), crop=None)

    def __call__(self, picture: Picture, crops: int = 1, *, drawn: bool = False) -> Tensor:
        """Pixels ``[3, H, W]``; for ten crops ``[10, 3, H, W]``: center, corners, and their mirror images.

        drawn: ten crops at random places of the picture as a square of 8/7 of their size, which its own pixels draw, so that they are the
        same whenever and wherever they are computed. Source: Zhou et al., Ladder loss (2020), who draw them anew each time.
        """
        if crops == 1:
            picture = self._resized(picture, 1.0)
            return self._pixels(picture) if self.crop is None else self._window(picture, self.crop, 0.5, 0.5)
        crop = self.crop or _square(self.resize) or (min(picture.size),) * 2
        if drawn:
            picture = picture.convert("RGB").resize((round(TEN_CROP_MARGIN * crop[1]), round(TEN_CROP_MARGIN * crop[0])), self.resample)
            seed = int.from_bytes(hashlib.sha256(picture.tobytes()).digest()[:7])
            generator, spare = torch.Generator().manual_seed(seed), (picture.height - crop[0], picture.width - crop[1])
            corners = torch.stack([torch.randint(pixels + 1, (crops,), generator=generator) for pixels in spare], 1)
            shares = ((corners + 0.5) / torch.tensor(spare).clamp(min=1)).tolist()
            return torch.stack([self._window(picture, crop, down, right) for down, right in shares])
        picture = self._resized(picture, TEN_CROP_MARGIN, crop)
        places = [(0.5, 0.5), (0, 0), (0, 1), (1, 0), (1, 1)]
        views = torch.stack([self._window(picture, crop, down, right) for down, right in places])
        return torch.cat([views, views.flip(-1)])

    def seen(self, picture: Picture, enlarged: int = 1) -> Picture:
        """The part of a picture that is left of it, as a picture, at a multiple of the size that the encoder reads."""
        from PIL import Image

        def larger(size: tuple[int, ...] | None) -> Any:
            return size and tuple(enlarged * edge for edge in size)

        plain = Preprocessing(larger(self.resize), larger(self.crop), self.resample, scale=1.0)
        return Image.fromarray(plain(picture).permute(1, 2, 0).numpy().astype(np.uint8))

    def _resized(self, picture: Picture, margin: float, crop: tuple[int, int] | None = None) -> Picture:
        width, height = picture.size
        if crop is not None:
            smallest = round(margin * max(crop))
            shorter = max(smallest, min(self.resize) if self.resize else smallest)
            size = _shorter_edge(width, height, shorter)
        elif self.resize is None:
            return picture
        else:
            size = _shorter_edge(width, height, self.resize[0]) if len(self.resize) == 1 else (self.resize[1], self.resize[0])
        size, part = _bounded(size, picture.size)
        return picture if size == picture.size else picture.resize(size, self.resample, box=part)

    def _window(self, picture: Picture, crop: tuple[int, int], down: float, right: float) -> Tensor:
        """The pixels of a window of the size ``crop``; a picture smaller than it is padded with zeros around it."""
        height, width = min(crop[0], picture.height), min(crop[1], picture.width)
        top, left = int(down * (picture.height - height)), int(right * (picture.width - width))
        pixels = self._pixels(picture.crop((left, top, left + width, top + height)))
        short = (crop[0] - height, crop[1] - width)
        return torch.nn.functional.pad(pixels, (short[1] // 2, short[1] - short[1] // 2, short[0] // 2, short[0] - short[0] // 2))

    def _pixels(self, picture: Picture) -> Tensor:
        values = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).float()
        mean, std = (torch.tensor(value)[:, None, None] for value in (self.mean, self.std))
        return (values * self.scale - mean) / std


def _size(value: int | dict[str, int] | None) -> tuple[int, ...] | None:
    """A size of a config: a number, ``{"shortest_edge": n}`` or ``{"height": h, "width": w}``."""
    if value is None:
        return None
    if isinstance(value, int):
        return (value,)
    if "shortest_edge" in value:
        return (value["shortest_edge"],)
    if "height" in value and "width" in value:
        return value["height"], value["width"]
    raise DataError(
        f"the picture size {value} of a preprocessor_config.json is of an unknown kind: expected shortest_edge, or height and width."
    )


def _square(size: tuple[int, ...] | None) -> tuple[int, int] | None:
    return None if size is None else (size[0], size[-1])


def _shorter_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    return (edge, int(edge * height / width)) if width <= height else (int(edge * width / height), edge)


def _bounded(size: tuple[int, int], picture: tuple[int, int]) -> tuple[tuple[int, int], tuple[float, float, float, float] | None]:
    """A size of at most MAX_RESIZED pixels, and the part of the picture in its middle that is scaled to it (None: all)."""
    if size[0] * size[1] <= MAX_RESIZED:
        return size, None
    kept = tuple(min(edge, max(min(size), MAX_RESIZED // min(size))) for edge in size)
    shares = (kept[0] / size[0] * picture[0], kept[1] / size[1] * picture[1])
    left, top = ((whole - share) / 2 for whole, share in zip(picture, shares, strict=True))
    return (kept[0], kept[1]), (left, top, left + shares[0], top + shares[1])
