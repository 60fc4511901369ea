"""Specification of an encoder, and the preprocessing of its images without the encoder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.core.encoded import Granularity, Modality
from visavis.core.errors import SpecError
from visavis.models.encoders.cnn_backbones import SMALL_CNN, SmallCNN, published_backbone_name
from visavis.models.encoders.preprocessing import (
    IMAGENET_PREPROCESSING,
    ImageConverter,
    PatchPreprocessing,
    Preprocessing,
    read_preprocessing,
)
from visavis.models.encoders.pretrained_files import (
    HUB_NAME,
    MINILM,
    is_embedding_model,
    local_model_folder,
    model_folder,
)

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_NAME_LENGTH = 160
"""Characters of one part of an encoder's name, which becomes part of a folder name."""


@dataclass(frozen=True)
class EncoderSpec:
    """Specification of an encoder: the part of a model's config that identifies its features.

    Attributes:
        side: "visual" or "text".
        name: Name of the encoder.
        granularity: ``pooled`` ``[N, D]``, ``regions`` ``[N, R, D]`` (visual), ``words`` ``[N, L,
            D]`` with a mask (text), or ``frames`` ``[N, F, D]`` with a mask (clips).
        crops: 1, or 10 for the corners and the center of a larger image and their mirror images,
            ``[N, 10, ...]``.
        frames_per_second: Frames per second of clips.
        image_size: Edge of the squares to which images are scaled, in pixels. 0: as in the
            encoder's preprocessing.
        random_crops: Sample the ten crops at random positions.
        full_decoding: Decode JPEG files in full, instead of at a reduced size.
        max_num_patches: Number of patches of an encoder that keeps the aspect ratio of images, such
            as SigLIP 2 with NaFlex. 0: as in its preprocessing.

    Raises:
        SpecError: If a value is invalid, or if two of them do not fit together.
    """

    side: Modality
    name: str
    granularity: Granularity = "pooled"
    crops: int = 1
    frames_per_second: float = 0.0
    image_size: int = 0
    random_crops: bool = False
    full_decoding: bool = False
    max_num_patches: int = 0

    def __post_init__(self) -> None:
        name = self.name
        is_visual = self.side == "visual"
        if (
            not name.isprintable()
            or len(name) > 1000
            or max(map(len, name.split("/"))) > MAX_NAME_LENGTH
        ):
            raise SpecError(
                "encoder: expected a folder or a name of the Hugging Face hub, got "
                f"{name[:60]!r}. Set a valid name."
            )
        # An encoder that visavis names is used on its own side.
        reads_texts_only = name in (MINILM, "vocabulary")
        reads_images_only = name in ("scenes", SMALL_CNN) or (
            not is_visual and published_backbone_name(name) is not None
        )
        granularities = ("pooled", "regions", "frames") if is_visual else ("pooled", "words")
        # Clips are read as whole frames, and texts have no crops.
        has_crops = is_visual and self.granularity != "frames"
        problem = ""
        if reads_texts_only if is_visual else reads_images_only:
            expected, actual = ("images", "texts") if is_visual else ("texts", "images")
            problem = (
                f"{self.side}.encoder: expected a model that reads {expected}, got {name}, which "
                f"reads {actual} only. Name another model."
            )
        elif self.granularity not in granularities:
            problem = (
                f"granularity of a {self.side} encoder: expected {' or '.join(granularities)}, got "
                f"{self.granularity!r}. Set one of them."
            )
        elif (self.granularity == "frames") != (self.frames_per_second > 0):
            problem = (
                "frames_per_second: expected a rate above 0, such as 1, for granularity frames, "
                f"and 0 for others, got {self.frames_per_second:g} for {self.granularity}. Change "
                "one of them."
            )
        elif self.crops != 1 and not (has_crops and self.crops == 10):
            problem = (
                f"crops: expected 1, or 10 for images, got {self.crops} for a {self.side} encoder "
                f"with granularity {self.granularity}. Set crops to 1."
            )
        elif (self.crops != 1 or self.image_size) and name == "scenes":
            problem = (
                "crops, image_size: expected 1 and 0 for the encoder scenes, which reads whole "
                f"images of its own size, got {self.crops} and {self.image_size}. Remove both "
                "settings."
            )
        if problem:
            raise SpecError(problem)

    @property
    def to_config(self) -> dict[str, Any]:
        """Entries of ``config.json``. The fingerprint of a model contains them, so that a later
        field is left out at its default.
        """
        later_fields = ("full_decoding", "max_num_patches")
        return {
            name: value for name, value in asdict(self).items() if value or name not in later_fields
        }


def open_preprocessing(
    spec: EncoderSpec, folder: Path | None = None, *, already_cropped: bool = False
) -> ImageConverter:
    """Open the preprocessing of an image encoder, without the encoder. No folder: by its name."""
    preprocessing = spec_preprocessing(spec, folder)
    return image_converter(preprocessing.for_crops if already_cropped else preprocessing, spec)


def reads_with_own_processor(spec: EncoderSpec) -> bool:
    """Report whether sentence-transformers converts the images of an encoder, which may have any
    size.
    """
    if spec.name in OWN_PREPROCESSING or published_backbone_name(spec.name):
        return False
    if local_model_folder(spec.name) is None and not HUB_NAME.fullmatch(spec.name):
        # A removed folder. A model that was saved with its encoder does not need it.
        return False
    return is_embedding_model(model_folder(spec.name))


def current_preprocessing_config(spec: EncoderSpec) -> dict[str, Any] | None:
    """Read the preprocessing that the local folder of an image encoder defines. None: no folder."""
    if spec.side == "text" or (folder := local_model_folder(spec.name)) is None:
        return None
    if is_embedding_model(folder):
        # Its processor belongs to its files, see weights_fingerprint.
        return None
    return spec_preprocessing_config(spec_preprocessing(spec, folder), spec)


def spec_preprocessing_config(
    preprocessing: Preprocessing | PatchPreprocessing, spec: EncoderSpec
) -> dict[str, Any]:
    """Describe the preprocessing of an encoder, as stored with features."""
    config: dict[str, Any] = (
        {"custom": spec.name} if spec.name == "scenes" else asdict(preprocessing)
    )
    config |= {name: True for name in ("random_crops", "full_decoding") if getattr(spec, name)}
    if spec.granularity == "frames":
        config["frames_per_second"] = spec.frames_per_second
    return config


def image_converter(
    preprocessing: Preprocessing | PatchPreprocessing, spec: EncoderSpec
) -> ImageConverter:
    """Build the function that converts images to pixels, with the crops of an encoder."""
    return ImageConverter(preprocessing, spec.crops, spec.random_crops, spec.full_decoding)


def visible_part(spec: EncoderSpec, image: Image) -> Image:
    """Return the part of an image that an encoder with one crop reads, larger than it reads it."""
    return (
        image.resize((384, 384))
        if spec.name == "scenes"
        else spec_preprocessing(spec).visible_part(image, 2)
    )


OWN_PREPROCESSING = {
    # 96 pixels are SceneEncoder.image_size.
    "scenes": Preprocessing(resize=(96, 96), crop=None, resample=3, scale=1.0),
    SMALL_CNN: SmallCNN.preprocessing,
}
"""Preprocessing of the encoders that visavis defines."""


def spec_preprocessing(
    spec: EncoderSpec, folder: Path | None = None
) -> Preprocessing | PatchPreprocessing:
    """Return the preprocessing of an image encoder, with the size that the specification sets."""
    preprocessing: Preprocessing | PatchPreprocessing | None
    if (preprocessing := OWN_PREPROCESSING.get(spec.name)) is None:
        published = published_backbone_name(spec.name)
        folder = None if published else folder or model_folder(spec.name)
        preprocessing = read_preprocessing(folder) if folder else IMAGENET_PREPROCESSING
        if isinstance(preprocessing, PatchPreprocessing):
            problem = ""
            if spec.image_size:
                problem = f"visual.image_size: expected none, got {spec.image_size}"
            elif spec.crops != 1:
                problem = f"visual.crops: expected 1, got {spec.crops}"
            if problem:
                raise SpecError(
                    f"{problem}, because {spec.name} reads patches of images in their own aspect "
                    "ratio. Change it, and set visual.max_num_patches for another size."
                )
            max_num_patches = spec.max_num_patches or preprocessing.max_num_patches
            return replace(preprocessing, max_num_patches=max_num_patches)
        if folder and spec.image_size:
            from visavis.models.encoders.pretrained_loading import (
                check_image_size,
                load_pretrained_config,
            )

            check_image_size(load_pretrained_config(folder), spec.image_size, spec.name)
    if spec.max_num_patches:
        raise SpecError(
            "visual.max_num_patches: expected an encoder that keeps the aspect ratio of images, "
            f"such as SigLIP 2 with NaFlex, got {spec.name}. Set visual.image_size."
        )
    return (
        replace(preprocessing, resize=(spec.image_size, spec.image_size), crop=None)
        if spec.image_size
        else preprocessing
    )


def image_size_note(spec: EncoderSpec) -> str | None:
    """Describe the interpolation of position embeddings to another image size. None: not needed."""
    if not spec.image_size or spec.name in OWN_PREPROCESSING or published_backbone_name(spec.name):
        return None
    from visavis.models.encoders.pretrained_loading import (
        is_vision_transformer,
        load_pretrained_config,
        native_image_size,
    )

    config = load_pretrained_config(model_folder(spec.name))
    native = native_image_size(config)
    size = (spec.image_size, spec.image_size)
    if native is None or native == size or not is_vision_transformer(config):
        return None
    sizes = [f"{height} x {width}" for height, width in (native, size)]
    return f"{spec.name}: position embeddings for {sizes[0]} pixels are interpolated to {sizes[1]} pixels (visual.image_size)."
