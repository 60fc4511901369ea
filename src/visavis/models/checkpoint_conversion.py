"""Reading and checking of published checkpoints, for all conversions."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from visavis import storage
from visavis.errors import DataError
from visavis.models.encoders.pretrained_files import model_folder
from visavis.models.encoders.pretrained_loading import load_pretrained_tokenizer, read_torch_tensors

STATE_DICT_KEYS = ("model", "state_dict")
"""Keys of a checkpoint under which the weights may be stored."""


@dataclass(frozen=True)
class CheckpointConversion(ABC):
    """Result of a conversion.

    Attributes:
        folder: Folder of the converted model.
    """

    folder: Path

    @abstractmethod
    def to_recipe_sections(self) -> dict[str, Any]:
        """Build the sections of a recipe that starts from the converted model.

        Returns:
            Sections by name.
        """


def read_checkpoint(file: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint.

    Args:
        file: A safetensors file, or a file of ``torch.save``.

    Returns:
        Weights by their published names, without prefixes of wrappers. A text encoder has the name that fine-tuning gives it.

    Raises:
        DataError: If the file does not hold weights by name.
    """
    content = storage.read_tensors(file) if file.suffix == ".safetensors" else read_torch_tensors(file)
    wrapped = isinstance(content, Mapping) and next((name for name in STATE_DICT_KEYS if isinstance(content.get(name), Mapping)), None)
    tensors = content[wrapped] if wrapped else content
    if (
        not isinstance(tensors, Mapping)
        or not tensors
        or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items())
    ):
        raise DataError(
            f"{file}: expected the state_dict of a model, or a dict that holds one as model or state_dict, got other content. "
            "Pass a checkpoint of weights."
        )
    return {re.sub(r"^text_encoder\.bert\.", "text_encoder.", name.removeprefix("module.")): tensor for name, tensor in tensors.items()}


def check_weight_names(
    tensors: Mapping[str, Tensor], names: Collection[str], ignored: re.Pattern[str], checkpoint: Path, expected: str
) -> None:
    """Check the names of weights, and that the weights are finite.

    Args:
        tensors: Weights of the checkpoint.
        names: Expected names.
        ignored: Names that are not needed.
        checkpoint: File of the checkpoint.
        expected: Description of the expected model.

    Raises:
        DataError: If weights are missing, unknown or not finite.
    """
    unknown = sorted(name for name in tensors if name not in names and not ignored.fullmatch(name))
    missing = sorted(name for name in names if name not in tensors)
    for problem, weights in (("missing", missing), ("unknown", unknown)):
        if weights:
            more = f" and {len(weights) - 3:,} more" if len(weights) > 3 else ""
            raise DataError(
                f"{checkpoint}: expected {expected}, got {problem} weights {', '.join(weights[:3])}{more}. Pass a checkpoint of this model."
            )
    if invalid := next((name for name in names if not tensors[name].isfinite().all()), None):
        raise DataError(f"{checkpoint} is damaged: expected finite weights, got others in {invalid}. Download it again.")


def open_text_source(name: str, checkpoint: Path, reason: str) -> tuple[Path, Any]:
    """Open the text model that a checkpoint needs.

    Args:
        name: Folder or hub name of the text model.
        checkpoint: File of the checkpoint.
        reason: What the checkpoint needs it for.

    Returns:
        The folder of the text model, and its tokenizer.

    Raises:
        DataError: If the model cannot be read.
    """
    try:
        folder = model_folder(name)
        tokenizer, _ = load_pretrained_tokenizer(folder)
    except DataError as error:
        raise DataError(f"{checkpoint} {reason}, which it does not contain. Pass its folder or name as text. {error}") from None
    return folder, tokenizer
