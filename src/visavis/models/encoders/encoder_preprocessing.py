"""Preprocessing of the images of an encoder, by its specification, without the encoder."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from visavis.models.encoders.cnn_backbones import SMALL_CNN, SmallCNN, published_backbone_name
from visavis.models.encoders.preprocessing import ImageConverter, Preprocessing
from visavis.models.encoders.pretrained_files import local_model_folder, model_folder
from visavis.models.encoders.pretrained_loading import IMAGENET_PREPROCESSING
from visavis.synthetic.scene_encoder import SceneEncoder

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageSpec(Protocol):
    """The fields of ``EncoderSpec`` that define the preprocessing, see there."""

    @property
    def side(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def granularity(self) -> str: ...
    @property
    def crops(self) -> int: ...
    @property
    def frames_per_second(self) -> float: ...
    @property
    def image_size(self) -> int: ...
    @property
    def random_crops(self) -> bool: ...


def open_preprocessing(spec: ImageSpec, folder: Path | None = None, *, already_cropped: bool = False) -> ImageConverter:
    """Open the preprocessing of an image encoder, without the encoder.

    Args:
        spec: Specification.
        folder: Folder of the model's files. None: found by the name.
        already_cropped: Whether the images are crops, which are not cropped again.

    Returns:
        Function of images that returns pixels.

    Raises:
        DataError: If no such model is found.
    """
    preprocessing = spec_preprocessing(spec, folder)
    return image_converter(preprocessing.for_crops if already_cropped else preprocessing, spec)


def current_preprocessing_config(spec: ImageSpec) -> dict[str, Any] | None:
    """Read the preprocessing that the folder of an image encoder currently defines.

    Args:
        spec: Specification.

    Returns:
        Settings as in ``preprocessing_config``. None without a local folder.
    """
    if spec.side == "text" or (folder := local_model_folder(spec.name)) is None:
        return None
    return spec_preprocessing_config(spec_preprocessing(spec, folder), spec)


def spec_preprocessing_config(preprocessing: Preprocessing, spec: ImageSpec) -> dict[str, Any]:
    """Describe the preprocessing of an encoder, as stored with features.

    Args:
        preprocessing: Preprocessing of the encoder.
        spec: Specification.

    Returns:
        Settings by name.
    """
    config = {"custom": spec.name} if spec.name == "scenes" else asdict(preprocessing)
    config |= {"random_crops": True} if spec.random_crops else {}
    return config | {"frames_per_second": spec.frames_per_second} if spec.granularity == "frames" else config


def image_converter(preprocessing: Preprocessing, spec: ImageSpec) -> ImageConverter:
    """Build the function that converts images to pixels, with the crops of an encoder.

    Args:
        preprocessing: Preprocessing of the encoder.
        spec: Specification.

    Returns:
        Function of images that returns pixels.
    """
    return ImageConverter(preprocessing, spec.crops, spec.random_crops)


def visible_part(spec: ImageSpec, image: Image) -> Image:
    """Return the part of an image that an encoder with one crop reads.

    Args:
        spec: Specification.
        image: The image.

    Returns:
        The visible part, larger than the encoder reads it.

    Raises:
        DataError: If no such model is found.
    """
    return image.resize((384, 384)) if spec.name == "scenes" else spec_preprocessing(spec).visible_part(image, 2)


OWN_PREPROCESSING = {
    "scenes": Preprocessing(resize=(SceneEncoder.image_size,) * 2, crop=None, resample=3, scale=1.0),
    SMALL_CNN: SmallCNN.preprocessing,
}
"""Preprocessing of the encoders that visavis defines."""


def spec_preprocessing(spec: ImageSpec, folder: Path | None = None) -> Preprocessing:
    """Return the preprocessing of an image encoder.

    Args:
        spec: Specification.
        folder: Folder of the model's files. None: found by the name.

    Returns:
        The preprocessing, with the image size of the specification.

    Raises:
        DataError: If no such model is found.
    """
    if (preprocessing := OWN_PREPROCESSING.get(spec.name)) is None:
        published = published_backbone_name(spec.name)
        preprocessing = IMAGENET_PREPROCESSING if published else Preprocessing.read(folder or model_folder(spec.name))
    return replace(preprocessing, resize=(spec.image_size, spec.image_size), crop=None) if spec.image_size else preprocessing
