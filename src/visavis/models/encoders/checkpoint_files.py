"""Checkpoints of others: they are read as tensors only, the names and shapes of their weights are
checked, and the weights are renamed.
"""

from __future__ import annotations

import itertools
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import MAX_LISTED_NAMES, DataError, VisavisError
from visavis.data.safe_pickle import check_torch_pickles

# Prefixes of DistributedDataParallel, Lightning, Fabric, and of torch.compile and FSDP, which also
# wrap inner modules.
_WRAPPER_PREFIXES = re.compile(
    r"^(?:(?:module|model|_orig_mod|_forward_module|_fsdp_wrapped_module)\.)+|(?<=\.)(?:_orig_mod|_fsdp_wrapped_module)\."
)
# Numbers that OpenAI's checkpoints store next to the weights. The shapes of the weights define
# them.
_SIZES = frozenset({"input_resolution", "context_length", "vocab_size"})
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def read_torch_tensors(file: Path) -> Any:
    """Read a file of ``torch.save`` as tensors and plain values only."""
    with storage.reading_regular_file(file):
        try:
            if zipfile.is_zipfile(file):
                _refuse_torchscript(file)
            # torch.load(weights_only=True) refuses code, but hashes nested keys of a dict, which
            # can take unlimited time. So the keys are checked first.
            check_torch_pickles(file)
            with warnings.catch_warnings():
                # torch warns about storages of old versions of its format.
                warnings.simplefilter("ignore")
                return torch.load(file, map_location="cpu", weights_only=True)
        except DataError:
            raise
        except Exception:  # noqa: BLE001 - torch raises errors of every kind on damaged files
            reason, fix = "a damaged file", "Download a complete copy of the published file"
            with suppress(Exception):
                if objects := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)):
                    reason = f"objects of {', '.join(objects[:3])}, which could run code"
                    fix = "If you trust it, open it in Python, save its state_dict alone with torch.save, and pass that file"
            raise DataError(
                f"{file}: expected a checkpoint of tensors and plain values, got {reason}. {fix}."
            ) from None


def _refuse_torchscript(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        is_torchscript = any(name.endswith("/constants.pkl") for name in archive.namelist())
    if is_torchscript:
        raise DataError(
            f"{file}: expected the weights of a model, got a TorchScript archive, which "
            "holds code. If you trust it, open it with torch.jit.load(file, "
            "map_location='cpu') in Python, save its state_dict() with torch.save, and "
            "pass that file."
        )


def read_checkpoint(file: Path, key: str = "") -> dict[str, Tensor]:
    """Read the weights of a checkpoint by name. ``key`` selects one of several models in a file."""
    content: Any = (
        storage.read_tensors(file) if file.suffix == ".safetensors" else read_torch_tensors(file)
    )
    content = content if isinstance(content, Mapping) else {}
    models = {
        name: value
        for name, value in content.items()
        if isinstance(value, Mapping) and _is_state_dict(value)
    }
    tensors: Mapping[str, Tensor] = {}
    problem = ""
    if _is_state_dict(content) and not key:
        tensors = content
    elif key in models or (len(models) == 1 and not key):
        (tensors,) = (models[key],) if key else models.values()
    elif models:
        names = ", ".join(map(str, models))
        problem = (
            f"the key of one model, got {key or 'no key'} for the weights {names}. Pass --key "
            f"{next(iter(models))}, or another one."
        )
    else:
        names = ", ".join(map(repr, itertools.islice(content, MAX_LISTED_NAMES)))
        problem = (
            "the state_dict of a model, or a dict that holds one, got "
            f"{f'values without weights: {names}' if names else 'no values by name'}. Pass a "
            "checkpoint of weights."
        )
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _SIZES}
    for name, tensor in tensors.items():
        # An expanded tensor repeats a few elements, so that its file is smaller than it.
        is_plain = (
            tensor.layout == torch.strided
            and not tensor.is_nested
            and tensor.device.type == "cpu"
            and tensor.dtype in _FLOAT_DTYPES + _INTEGER_DTYPES
            and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
        )
        if not is_plain:
            problem = (
                f"dense weights of real numbers, got {name!r} of another kind. Convert it before "
                "it is saved."
            )
            break
    if problem:
        raise DataError(f"{file}: expected {problem}")
    # A model may have a module that is named like a wrapper. Names that would coincide stay.
    unwrapped = {_WRAPPER_PREFIXES.sub("", name): tensor for name, tensor in tensors.items()}
    return unwrapped if len(unwrapped) == len(tensors) else tensors


def wrapper_of(names: Iterable[str]) -> str:
    """Return the prefix that a wrapper added to all names, such as ``module.``. Empty: none."""
    prefixes = [match[0] if (match := _WRAPPER_PREFIXES.match(name)) else "" for name in names]
    # The shortest, because a prefix must belong to all names.
    return min(prefixes, key=len, default="")


def _is_state_dict(tensors: Mapping[Any, Any]) -> bool:
    weights = [(name, value) for name, value in tensors.items() if name not in _SIZES]
    return bool(weights) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in weights
    )


def check_weight_names(
    tensors: Mapping[str, Tensor],
    names: Collection[str],
    ignored: re.Pattern[str],
    checkpoint: Path,
    expected: str,
) -> None:
    """Check that the weights are ``names``, apart from ``ignored`` ones, and are finite."""
    # An unknown weight belongs to another architecture.
    unknown = sorted(name for name in tensors if name not in names and not ignored.fullmatch(name))
    missing = sorted(name for name in names if name not in tensors)
    for problem, weights in (("missing", missing), ("unknown", unknown)):
        if weights:
            more = f" and {len(weights) - 3:,} more" if len(weights) > 3 else ""
            raise DataError(
                f"{checkpoint}: expected {expected}, got {problem} weights "
                f"{', '.join(weights[:3])}{more}. Pass a checkpoint of this model."
            )
    check_finite_weights(((name, tensors[name]) for name in names), checkpoint)


def check_finite_weights(weights: Iterable[tuple[str, Tensor]], source: Path) -> None:
    """Check that weights are finite."""
    for name, weight in weights:
        # NaN is both the smallest and the largest value. No copy of the size of the weights is
        # made, as isfinite() of a whole tensor does.
        if weight.numel() and not all(bound.isfinite() for bound in weight.aminmax()):
            raise DataError(
                f"{source} is damaged: expected finite weights, got NaN or infinity in {name}. "
                "Download it again."
            )


def check_weight_shapes(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    checkpoint: Path,
    advice: str,
) -> None:
    """Check the shapes of weights."""
    for name, shape in shapes.items():
        if (actual := list(tensors[name].shape)) != list(shape):
            raise DataError(
                f"{checkpoint}: expected {name} of shape {list(shape)}, got {actual}. {advice}"
            )


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
        """Return the sections of a recipe that starts from the converted model."""
        return self.sections


def weight_and_bias(
    names: Iterable[tuple[str, str]], source: str = "", target: str = ""
) -> Iterator[WeightNames]:
    """Yield the published and the new names of the weight and the bias of modules."""
    for published, name in names:
        for end in ("weight", "bias"):
            yield f"{source}{published}.{end}", (f"{target}{name}.{end}",)


@contextmanager
def matching_shapes(checkpoint: Path) -> Iterator[None]:
    """Convert the errors of tensors whose shapes do not belong together in this block."""
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
    """Rename weights, in float32. A tensor with several new names is split into equal parts."""
    renamed: dict[str, Tensor] = {}
    for name, targets in names.items():
        tensor = tensors[name].float()
        renamed |= zip(
            targets, tensor.chunk(len(targets)) if len(targets) > 1 else [tensor], strict=True
        )
    return renamed
