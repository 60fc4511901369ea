"""Preprocessing of images with Pillow and torch, as the ``preprocessor_config.json`` of an encoder
defines it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from PIL.Image import Resampling
from pydantic import Field, FiniteFloat
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import DataError, requires_extra

if TYPE_CHECKING:
    from PIL.Image import Image


PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
"""Files with the preprocessing. transformers 5 saves it in the second one, as ``IMAGE_PROCESSOR``,
which it then prefers.
"""
IMAGE_PROCESSOR = "image_processor"
MAX_RESIZED_PIXELS = 16_000_000
"""Maximum pixels of a resized image. Of a longer image, such as 1 x 20,000 with a shorter edge of
224, the middle is used.
"""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the channels, as CLIP and X-VLM were trained."""
IMAGE_PREPROCESSING = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": list(CLIP_MEAN),
    "image_std": list(CLIP_STD),
}
"""Preprocessing of CLIP and X-VLM, without the image size."""
REDUCED_SIZE_MARGIN = 2
"""A JPEG is decoded at a reduced size with at least this number of pixels for each pixel of the
resized image. ``benchmarks/data_path.py`` compares its embeddings with full decoding.
"""
MAX_JPEG_SIDE = 65_535
"""Maximum pixels of a side of a JPEG. A file that must keep this number is decoded in full."""
TEN_CROP_MARGIN = 8 / 7
"""Minimum ratio of an image's shorter edge to the crop, for ten crops: 256 for 224."""


_Edge = Annotated[int, Field(gt=0, le=10_000)]
_Size = _Edge | dict[str, _Edge]
_ThreeChannels = Annotated[list[FiniteFloat], Field(min_length=3, max_length=3)]


@dataclass(frozen=True)
class PreprocessorConfig:
    """Known part of the ``preprocessor_config.json`` of a transformers folder, with its names.

    Attributes:
        do_resize: Whether to resize.
        size: Size after resizing.
        do_center_crop: Whether to crop the center.
        crop_size: Size of the crop.
        crop_pct: Ratio of the crop to the resized image.
        resample: Pillow's number of the interpolation.
        do_rescale: Whether to scale bytes.
        rescale_factor: Factor of the bytes.
        do_normalize: Whether to normalize channels.
        image_mean: Mean of each channel.
        image_std: Standard deviation of each channel.
        max_num_patches: Number of patches of an image that keeps its aspect ratio.
        patch_size: Edge of a patch in pixels.
    """

    do_resize: bool | None = True
    size: _Size | None = None
    do_center_crop: bool | None = False
    crop_size: _Size | None = None
    crop_pct: Annotated[float, Field(gt=0, le=1)] | None = None
    resample: Annotated[int, Field(ge=0, le=5)] = 2
    do_rescale: bool | None = True
    rescale_factor: FiniteFloat = 1 / 255
    do_normalize: bool | None = True
    image_mean: _ThreeChannels | None = None
    image_std: (
        Annotated[list[Annotated[FiniteFloat, Field(gt=0)]], Field(min_length=3, max_length=3)]
        | None
    ) = None
    max_num_patches: _Edge | None = None
    patch_size: _Size | None = None

    def __post_init__(self) -> None:
        if self.do_normalize and (self.image_mean is None or self.image_std is None):
            raise ValueError(
                "image_mean, image_std: expected both for do_normalize, got one of them or none"
            )


@dataclass(frozen=True)
class TimmPreprocessing:
    """Known part of the ``pretrained_cfg`` of a timm model, with its names.

    Attributes:
        input_size: Channels, height and width.
        crop_pct: Ratio of the crop to the resized image.
        crop_mode: "center" resizes the shorter edge, "squash" both edges.
        interpolation: Pillow's name of the interpolation, or "random" for bilinear.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """

    input_size: Annotated[list[_Edge], Field(min_length=3, max_length=3)]
    crop_pct: Annotated[float, Field(gt=0, le=1)] = 0.875
    crop_mode: Literal["center", "squash"] = "center"
    interpolation: Literal[
        "nearest", "bilinear", "bicubic", "lanczos", "box", "hamming", "random"
    ] = "bicubic"
    mean: _ThreeChannels = field(default_factory=lambda: [0.485, 0.456, 0.406])
    std: _ThreeChannels = field(default_factory=lambda: [0.229, 0.224, 0.225])


@dataclass(frozen=True)
class TimmConfig:
    """Known part of the ``config.json`` of a timm model.

    Attributes:
        pretrained_cfg: Settings of the preprocessing.
    """

    pretrained_cfg: TimmPreprocessing


@dataclass(frozen=True)
class Preprocessing:
    """Resize, crop the center, scale and normalize. A step without a value is skipped.

    Attributes:
        resize: ``(height, width)``, or ``(shorter edge,)``, in pixels.
        crop: ``(height, width)`` in pixels.
        resample: Pillow's number of the interpolation.
        scale: Factor of the bytes. None: pixels stay bytes.
        mean: Mean of each scaled channel.
        std: Standard deviation of each scaled channel.
    """

    resize: tuple[int, ...] | None
    crop: tuple[int, int] | None
    resample: int = 2
    scale: float | None = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @classmethod
    def from_config(cls, config: PreprocessorConfig) -> Preprocessing:
        """Convert a config of transformers."""
        resize = _size(config.size) if config.do_resize else None
        crop = _square(_size(config.crop_size)) if config.do_center_crop else None
        # ConvNeXt: crop_pct applies to crops below 384 pixels.
        if config.crop_pct and resize and len(resize) == 1:
            if resize[0] < 384:
                resize, crop = (int(resize[0] / config.crop_pct),), _square(resize)
            else:
                resize = _square(resize)
                crop = None
        return cls(
            resize=resize,
            crop=crop,
            resample=config.resample,
            scale=config.rescale_factor if config.do_rescale else 1.0,
            mean=tuple(config.image_mean)
            if config.do_normalize and config.image_mean
            else cls.mean,
            std=tuple(config.image_std) if config.do_normalize and config.image_std else cls.std,
        )

    @classmethod
    def from_timm(cls, config: TimmPreprocessing) -> Preprocessing:
        """Convert the preprocessing of a timm model: its evaluation transform at the size of its
        training.
        """
        crop = (config.input_size[1], config.input_size[2])
        resize = tuple(int(edge / config.crop_pct) for edge in crop)
        if config.crop_mode == "center" and crop[0] == crop[1]:
            resize = resize[:1]
        resample = (
            Resampling[config.interpolation.upper()]
            if config.interpolation != "random"
            else Resampling.BILINEAR
        )
        return cls(
            resize=resize,
            crop=crop,
            resample=resample.value,
            mean=tuple(config.mean),
            std=tuple(config.std),
        )

    @property
    def for_crops(self) -> Preprocessing:
        """The same preprocessing for images that are crops already. They are resized to the crop
        size.
        """
        return replace(self, resize=self.crop or _square(self.resize), crop=None)

    @property
    def to_bytes(self) -> Preprocessing:
        """The steps before ``normalize``. They need a quarter of the memory."""
        return Preprocessing(self.resize, self.crop, self.resample, scale=None)

    @property
    def pads(self) -> bool:
        """Whether small images are padded. Padding is zero after normalization, which no byte can
        represent.
        """
        height, width = _square(self.resize) or (0, 0)
        return self.crop is not None and (height < self.crop[0] or width < self.crop[1])

    def normalize(self, pixels: Tensor) -> Tensor:
        """Scale and normalize bytes ``[..., 3, H, W]`` on their device, equal to ``__call__``."""
        assert self.scale is not None
        mean, std = (
            torch.tensor(value, device=pixels.device)[:, None, None]
            for value in (self.mean, self.std)
        )
        return pixels.mul(float(self.scale)).sub_(mean).div_(std)

    def __call__(self, image: Image, crops: int = 1, *, random_crops: bool = False) -> Tensor:
        """Convert an image to pixels ``[3, H, W]``, or ``[10, 3, H, W]`` for ten crops."""
        if crops == 1:
            image = self._resized(image)
            return (
                self._pixels(image)
                if self.crop is None
                else self._window(image, self.crop, 0.5, 0.5)
            )
        crop = self.crop or _square(self.resize) or (min(image.size),) * 2
        if random_crops:
            # As in Zhou et al., Ladder loss (2020), in a square of 8/7 of the crop. The paper
            # samples them again at each use. Here the image's own pixels seed them, so that they do
            # not depend on when and where they are computed.
            image = image.convert("RGB").resize(
                (round(TEN_CROP_MARGIN * crop[1]), round(TEN_CROP_MARGIN * crop[0])), self.resample
            )
            seed = int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:7])
            generator = torch.Generator().manual_seed(seed)
            # A window has margin + 1 positions in each direction.
            margin = (image.height - crop[0], image.width - crop[1])
            offsets = torch.stack(
                [torch.randint(pixels + 1, (crops,), generator=generator) for pixels in margin], 1
            )
            # Vertical and horizontal, from 0 to 1.
            positions = (offsets + 0.5) / torch.tensor(margin).clamp(min=1)
            return self._windows(image, crop, positions.tolist())
        # The center, the corners, and their mirror images.
        views = self._windows(
            self._resized(image, crop), crop, [(0.5, 0.5), (0, 0), (0, 1), (1, 0), (1, 1)]
        )
        return torch.cat([views, views.flip(-1)])

    def visible_part(self, image: Image, zoom: int) -> Image:
        """Return the part of an image that an encoder reads, ``zoom`` times as large."""
        from PIL.Image import fromarray

        def zoomed(size: tuple[int, ...] | None) -> Any:
            return size and tuple(zoom * edge for edge in size)

        without_scaling = Preprocessing(
            zoomed(self.resize), zoomed(self.crop), self.resample, scale=None
        )
        return fromarray(without_scaling(image).permute(1, 2, 0).numpy())

    def _resized(self, image: Image, ten_crop_size: tuple[int, int] | None = None) -> Image:
        resize = self.resize
        if ten_crop_size is not None:
            resize = (max(round(TEN_CROP_MARGIN * max(ten_crop_size)), min(resize or (0,))),)
        if resize is None:
            return image
        if len(resize) == 2:
            size = resize[1], resize[0]
        else:
            # The longer edge is rounded down, as in torchvision and transformers.
            edge = resize[0]
            width, height = image.size
            size = (
                (edge, int(edge * height / width))
                if width <= height
                else (int(edge * width / height), edge)
            )
        size, box = _limit_size(size, image.size)
        return image if size == image.size else image.resize(size, self.resample, box=box)

    def _windows(
        self, image: Image, crop: tuple[int, int], positions: Sequence[tuple[float, float]]
    ) -> Tensor:
        return torch.stack(
            [self._window(image, crop, vertical, horizontal) for vertical, horizontal in positions]
        )

    def _window(
        self, image: Image, crop: tuple[int, int], vertical: float, horizontal: float
    ) -> Tensor:
        """Return the pixels of a window of size ``crop``, at a position from 0 (top, left) to 1. A
        smaller image is padded with zeros around it.
        """
        height = min(crop[0], image.height)
        width = min(crop[1], image.width)
        # Rounded down, as in transformers.
        top = int(vertical * (image.height - height))
        left = int(horizontal * (image.width - width))
        pixels = self._pixels(image.crop((left, top, left + width, top + height)))
        # Padding on both sides, the larger half after the image.
        rows = crop[0] - height
        columns = crop[1] - width
        if not rows and not columns:
            return pixels
        return torch.nn.functional.pad(
            pixels, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
        )

    def _pixels(self, image: Image) -> Tensor:
        # NumPy instead of torch, which would start a team of threads in each reader thread.
        # Channels first: the values of a channel are adjacent, which makes the arithmetic four
        # times as fast.
        values = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        if self.scale is None:
            return torch.from_numpy(np.array(values, order="C"))
        mean, std = (
            np.array(value, dtype=np.float32)[:, None, None] for value in (self.mean, self.std)
        )
        pixels = np.multiply(values, np.float32(self.scale), order="C")
        pixels -= mean
        pixels /= std
        return torch.from_numpy(pixels)


@dataclass(frozen=True)
class PatchPreprocessing:
    """Patches of an image that keeps its aspect ratio, as SigLIP 2 with NaFlex reads them. Each
    image has the size at which it fills at most ``max_num_patches`` patches.

    The image processor of transformers resizes and normalizes. Its three results become one tensor:
    each row is a patch, followed by the numbers of its row and column in the image, starting at 1.
    Both are 0 for padding.

    Attributes:
        max_num_patches: Number of patches, including padding.
        patch_size: Edge of a patch in pixels.
        resample: Pillow's number of the interpolation.
        scale: Factor of the bytes.
        mean: Mean of each scaled channel.
        std: Standard deviation of each scaled channel.

    Source:
        Tschannen et al., SigLIP 2 (2025), section 2.4.2.
    """

    max_num_patches: int
    patch_size: int
    resample: int = 2
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    pads = True
    """As of ``Preprocessing``: patches are normalized at once, because padding is zero."""

    @cached_property
    def processor(self) -> Any:
        """Image processor of transformers with these settings."""
        with requires_extra("hf", "the image processor of SigLIP 2"):
            import transformers

        # The backend of Pillow, whichever others are installed, so that vectors do not depend on
        # the machine.
        return transformers.Siglip2ImageProcessorPil(
            max_num_patches=self.max_num_patches,
            patch_size=self.patch_size,
            resample=self.resample,
            rescale_factor=self.scale,
            image_mean=list(self.mean),
            image_std=list(self.std),
        )

    @property
    def for_crops(self) -> PatchPreprocessing:
        """The same preprocessing: a crop keeps its aspect ratio, too."""
        return self

    def __call__(self, image: Image, crops: int = 1, *, random_crops: bool = False) -> Tensor:
        """Convert an image to patches with their positions, ``[P, 3 * patch_size**2 + 2]``. It has
        one crop.
        """
        # NumPy for the reason in Preprocessing.
        inputs = self.processor(images=[image.convert("RGB")], return_tensors="np")
        (patches,) = inputs["pixel_values"]
        (shape,) = inputs["spatial_shapes"]
        positions = np.zeros((len(patches), 2), patches.dtype)
        positions[: shape.prod()] = 1 + np.indices(shape).reshape(2, -1).T
        return torch.from_numpy(np.concatenate([patches, positions], 1))

    def visible_part(self, image: Image, zoom: int) -> Image:
        """Return the image, which an encoder reads as a whole, ``zoom`` times as large."""
        # The last numbers of row and column are the size in patches.
        height, width = self(image)[:, -2:].amax(0).int().tolist()
        edge = zoom * self.patch_size
        return image.resize((edge * width, edge * height), self.resample)


def patch_inputs(patches: Tensor) -> dict[str, Tensor]:
    """Convert patches ``[N, P, 3 * patch_size**2 + 2]`` to the arguments of SigLIP 2."""
    positions = patches[..., -2:].long()
    return {
        "pixel_values": patches[..., :-2],
        "pixel_attention_mask": (positions[..., 0] > 0).int(),
        "spatial_shapes": positions.amax(1),
    }


def read_preprocessing(folder: Path) -> Preprocessing | PatchPreprocessing:
    """Read the preprocessing of a folder of transformers or timm."""
    file = folder / PROCESSOR_FILE
    content = None
    if os.path.exists(file):
        content = storage.read_json(file, dict[str, Any]).get(IMAGE_PROCESSOR)
    if content is None and os.path.exists(file := folder / PREPROCESSOR_FILE):
        content = storage.read_json(file, dict[str, Any])
    if content is None:
        config = storage.read_json(folder / "config.json", dict[str, Any])
        if "pretrained_cfg" in config:
            return Preprocessing.from_timm(
                storage.read_json(folder / "config.json", TimmConfig).pretrained_cfg
            )
        raise DataError(
            f"{folder}: expected a preprocessor_config.json with the size and normalization of "
            "images, got none. Add the file."
        )
    settings = storage.parse_json(json.dumps(content).encode(), PreprocessorConfig, str(file))
    whole = Preprocessing.from_config(settings)
    if settings.max_num_patches is None or not isinstance(settings.patch_size, int):
        return whole
    return PatchPreprocessing(
        settings.max_num_patches,
        settings.patch_size,
        whole.resample,
        1.0 if whole.scale is None else whole.scale,
        whole.mean,
        whole.std,
    )


def _size(value: int | dict[str, int] | None) -> tuple[int, ...] | None:
    """Convert a size of a config: a number, ``{"shortest_edge": n}`` or ``{"height": h, "width":
    w}``.
    """
    if value is None:
        return None
    if isinstance(value, int):
        return (value,)
    if "shortest_edge" in value:
        return (value["shortest_edge"],)
    if "height" in value and "width" in value:
        return value["height"], value["width"]
    raise DataError(
        "preprocessor_config.json: expected an image size with shortest_edge, or with height and "
        f"width, got {value}. Fix the file."
    )


def _square(size: tuple[int, ...] | None) -> tuple[int, int] | None:
    return None if size is None else (size[0], size[-1])


def _limit_size(
    size: tuple[int, int], image_size: tuple[int, int]
) -> tuple[tuple[int, int], tuple[float, float, float, float] | None]:
    """Limit a size to ``MAX_RESIZED_PIXELS``, and return the box in the middle of the image that is
    scaled to it (None: the whole image).
    """
    if size[0] * size[1] <= MAX_RESIZED_PIXELS:
        return size, None
    # The shorter side stays, and the longer one is cut to the limit.
    bounded = tuple(min(edge, max(min(size), MAX_RESIZED_PIXELS // min(size))) for edge in size)
    box = (bounded[0] / size[0] * image_size[0], bounded[1] / size[1] * image_size[1])
    left, top = ((edge - box_edge) / 2 for edge, box_edge in zip(image_size, box, strict=True))
    return (bounded[0], bounded[1]), (left, top, left + box[0], top + box[1])


def blank_image() -> Image:
    """Create a black image of 224 x 224 pixels to test an encoder with."""
    from PIL.Image import new

    return new("RGB", (224, 224))


@dataclass(frozen=True)
class ImageConverter:
    """Converts images to pixels.

    Attributes:
        preprocessing: Preprocessing of an image.
        crops: Number of crops per image, 1 or 10.
        random_crops: Whether ten crops have random positions.
        full_decoding: Whether JPEG files are decoded in full.
    """

    preprocessing: Preprocessing | PatchPreprocessing
    crops: int = 1
    random_crops: bool = False
    full_decoding: bool = False

    def __call__(self, images: Iterable[Image]) -> Tensor:
        """Convert images to pixels ``[N, 3, H, W]``, or ``[N, 10, 3, H, W]`` for ten crops, or to
        patches ``[N, P, D]``.
        """
        pixels = [
            self.preprocessing(image, self.crops, random_crops=self.random_crops)
            for image in images
        ]
        return torch.stack(pixels) if len(pixels) > 1 else pixels[0][None]

    @property
    def to_bytes(self) -> ImageConverter:
        """The same converter without normalization, which ``normalize`` does later. Unchanged if
        small images are padded.
        """
        preprocessing = self.preprocessing
        if isinstance(preprocessing, PatchPreprocessing) or preprocessing.pads:
            return self
        return replace(self, preprocessing=preprocessing.to_bytes)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalize pixels of ``to_bytes`` on their device."""
        preprocessing = self.preprocessing
        # These are normalized already, see to_bytes.
        if isinstance(preprocessing, PatchPreprocessing) or preprocessing.pads:
            return pixels
        return preprocessing.normalize(pixels)

    @property
    def min_side(self) -> int:
        """Shorter side that an image needs, in pixels, if a JPEG is decoded at a reduced size. 0:
        the preprocessing needs all pixels.
        """
        if isinstance(self.preprocessing, PatchPreprocessing):
            # The numbers of rows and columns depend on the exact aspect ratio.
            return MAX_JPEG_SIDE
        resize = self.preprocessing.resize or ()
        crop = self.preprocessing.crop or _square(self.preprocessing.resize)
        # The positions of random crops depend on every pixel.
        if self.random_crops or crop is None or not (resize or self.crops > 1):
            return 0
        if self.full_decoding:
            return MAX_JPEG_SIDE
        edge = max(*resize, *crop, round(TEN_CROP_MARGIN * max(crop)) if self.crops > 1 else 0)
        return REDUCED_SIZE_MARGIN * edge


IMAGENET_PREPROCESSING = Preprocessing(
    resize=(256,), crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
"""Preprocessing of all published encoders: the middle 224 pixels of an image with a shorter edge of
256.
"""
