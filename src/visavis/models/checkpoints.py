"""Published checkpoints, read as weights by name alone: what converting any of them has in common."""

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
from visavis.models.foreign import open_tokenizer, read_tensors_alone
from visavis.models.pretrained import model_folder

WRAPPED_IN = ("model", "state_dict")
"""The entries of a checkpoint under which weights lie, if they are not all of it."""


@dataclass(frozen=True)
class ConvertedModel(ABC):
    """Where a checkpoint lies now, and what a recipe says to begin with it."""

    folder: Path

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The sections of a recipe."""


def read_checkpoint(file: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint by their published names, without what wraps a model around them. Raises DataError.

    A text encoder goes by the name that fine-tuning gives it.
    """
    content = storage.read_tensors(file) if file.suffix == ".safetensors" else read_tensors_alone(file)
    wrapped = isinstance(content, Mapping) and next((name for name in WRAPPED_IN if isinstance(content.get(name), Mapping)), None)
    tensors = content[wrapped] if wrapped else content
    if (
        not isinstance(tensors, Mapping)
        or not tensors
        or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items())
    ):
        raise DataError(
            f"{file} holds no weights by name, expected the state_dict of a model, or a table with one as its entry model or state_dict."
        )
    return {re.sub(r"^text_encoder\.bert\.", "text_encoder.", name.removeprefix("module.")): tensor for name, tensor in tensors.items()}


def check_weights(
    tensors: Mapping[str, Tensor], names: Collection[str], left_out: re.Pattern[str], checkpoint: Path, expected: str
) -> None:
    """Raise DataError naming which of the names are missing, what is unknown, or not finite. left_out: what is not needed."""
    unknown = sorted(name for name in tensors if name not in names and not left_out.fullmatch(name))
    missing = sorted(name for name in names if name not in tensors)
    for what, some in (("lacks", missing), ("holds, beyond what is known,", unknown)):
        if some:
            more = f" and {len(some) - 3:,} more" if len(some) > 3 else ""
            raise DataError(f"{checkpoint} {what} the weights {', '.join(some[:3])}{more}: expected {expected}.")
    if broken := next((name for name in names if not tensors[name].isfinite().all()), None):
        raise DataError(f"{checkpoint} is damaged: its weights {broken} hold values that are not finite.")


def text_donor(name: str, checkpoint: Path, what: str) -> tuple[Path, Any]:
    """The folder of a text model, and its tokenizer. Raises DataError saying what of them a checkpoint needs."""
    try:
        folder = model_folder(name)
        tokenizer, _ = open_tokenizer(folder)
    except DataError as error:
        raise DataError(f"{checkpoint} {what}, which it does not hold: name it as text; {error}") from None
    return folder, tokenizer
