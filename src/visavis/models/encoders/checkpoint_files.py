"""Reading of checkpoints of others as tensors only, and checks of the names and shapes of their weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis import storage
from visavis.data.conversion.safe_pickle import check_torch_pickles
from visavis.errors import DataError

STATE_DICT_KEYS = ("model", "state_dict")
"""Keys of a checkpoint under which the weights may be stored."""
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def read_torch_tensors(file: Path) -> Any:
    """Read a file of ``torch.save`` as tensors and plain values only.

    Args:
        file: The file.

    Returns:
        Its content.

    Raises:
        DataError: If the file is damaged, or holds other objects.
    """
    with storage.reading_regular_file(file):
        try:
            check_torch_pickles(file)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(file, map_location="cpu", weights_only=True)
        except DataError:
            raise
        except Exception:  # noqa: BLE001 - torch raises errors of every kind on damaged files
            raise DataError(
                f"{file}: expected a checkpoint of tensors and plain values, got a damaged file or one with other objects, which could run "
                "code. Download a complete copy of the published file."
            ) from None


def read_checkpoint(file: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint.

    Args:
        file: A safetensors file, or a file of ``torch.save``.

    Returns:
        Weights by their published names, without prefixes of wrappers.

    Raises:
        DataError: If the file does not hold weights by name.
    """
    content: Any = storage.read_tensors(file) if file.suffix == ".safetensors" else read_torch_tensors(file)
    tensors = content
    if isinstance(content, Mapping):
        tensors = next((content[key] for key in STATE_DICT_KEYS if isinstance(content.get(key), Mapping)), content)
    if not _is_state_dict(tensors):
        raise DataError(
            f"{file}: expected the state_dict of a model, or a dict that holds one as model or state_dict, got other content. "
            "Pass a checkpoint of weights."
        )
    if unsupported := next((name for name, tensor in tensors.items() if not _is_plain(tensor)), None):
        raise DataError(
            f"{file}: expected dense weights of real numbers, got {unsupported!r} of another kind. Convert it before it is saved."
        )
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def _is_state_dict(tensors: Any) -> bool:
    if not isinstance(tensors, Mapping) or not tensors:
        return False
    return all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items())


def _is_plain(tensor: Tensor) -> bool:
    """Report whether a tensor is dense and real, and all of its elements are in the file. An expanded tensor repeats a few elements."""
    if (
        tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.device.type != "cpu"
        or tensor.dtype not in _FLOAT_DTYPES + _INTEGER_DTYPES
    ):
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


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


def check_weight_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], checkpoint: Path, advice: str) -> None:
    """Check the shapes of weights.

    Args:
        tensors: Weights of the checkpoint.
        shapes: Expected shapes by name.
        checkpoint: File of the checkpoint.
        advice: End of the error message.

    Raises:
        DataError: Naming the first weight with another shape.
    """
    for name, shape in shapes.items():
        if (actual := list(tensors[name].shape)) != list(shape):
            raise DataError(f"{checkpoint}: expected {name} of shape {list(shape)}, got {actual}. {advice}")
