"""Names of weights in published checkpoints, and the result of a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from visavis.core.errors import DataError, VisavisError
from visavis.models.encoders.preprocessing import CLIP_MEAN, CLIP_STD
from visavis.models.encoders.pretrained_files import model_folder
from visavis.models.encoders.pretrained_loading import load_pretrained_tokenizer

IMAGE_PREPROCESSING = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": list(CLIP_MEAN),
    "image_std": list(CLIP_STD),
}
"""Preprocessing of CLIP and X-VLM, without the image size."""
WeightNames = tuple[str, tuple[str, ...]]
"""Published name of a weight, and its new names: several for a tensor that is split into equal
parts.
"""


@dataclass(frozen=True)
class CheckpointConversion:
    """Result of a conversion.

    Attributes:
        folder: Folder of the converted model.
        sections: Sections of a recipe that starts from the converted model, by name.
    """

    folder: Path
    sections: dict[str, Any]

    def to_recipe_sections(self) -> dict[str, Any]:
        """Return the sections of a recipe that starts from the converted model.

        Returns:
            Sections by name.
        """
        return self.sections


def weight_and_bias(
    names: Iterable[tuple[str, str]], source: str = "", target: str = ""
) -> Iterator[WeightNames]:
    """Yield the names of the weight and the bias of modules.

    Args:
        names: Published and new names of modules.
        source: Prefix of the published names.
        target: Prefix of the new names.

    Yields:
        Published and new names of weights.
    """
    for published, name in names:
        for end in ("weight", "bias"):
            yield f"{source}{published}.{end}", (f"{target}{name}.{end}",)


@contextmanager
def matching_shapes(checkpoint: Path) -> Iterator[None]:
    """Convert the errors of tensors whose shapes do not belong together in this block.

    Args:
        checkpoint: File of the checkpoint.

    Yields:
        Nothing.

    Raises:
        DataError: If the shapes do not belong together.
    """
    try:
        yield
    except (VisavisError, UnicodeError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())[:200].rstrip(". ")
        raise DataError(
            f"{checkpoint}: expected weights whose shapes belong together, got others: {reason}. "
            "Download it again."
        ) from None


def rename_weights(
    tensors: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]]
) -> dict[str, Tensor]:
    """Rename weights, and convert them to float32.

    Args:
        tensors: Weights by their published names.
        names: New names by published name. Several for a tensor that is split into equal parts.

    Returns:
        Weights by their new names.
    """
    renamed: dict[str, Tensor] = {}
    for name, targets in names.items():
        tensor = tensors[name].float()
        renamed |= zip(
            targets, tensor.chunk(len(targets)) if len(targets) > 1 else [tensor], strict=True
        )
    return renamed


def open_text_source(name: str, checkpoint: Path, reason: str) -> tuple[Path, Any]:
    """Open the text model that a checkpoint needs.

    Args:
        name: Folder or hub name of the text model.
        checkpoint: File of the checkpoint.
        reason: Its use in the checkpoint.

    Returns:
        The folder of the text model, and its tokenizer.

    Raises:
        DataError: If the model cannot be read.
    """
    try:
        folder = model_folder(name)
        tokenizer, _ = load_pretrained_tokenizer(folder, has_own_model=False)
    except DataError as error:
        raise DataError(
            f"{checkpoint} {reason}, which it does not contain. Pass its folder or name as text. "
            f"{error}"
        ) from None
    return folder, tokenizer
