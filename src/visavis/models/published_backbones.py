"""The image encoders of the papers with their published weights: tensors by name, read as such and never unpickled."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from visavis.errors import DataError
from visavis.models.foreign import read_tensors_alone
from visavis.models.preprocessing import Preprocessing
from visavis.models.published_files import CATALOG, PublishedBackbone, published_name, weights_file

PREPROCESSING = Preprocessing(resize=(256,), crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Of all of them: 224 pixels of the middle of a picture whose shorter edge is 256."""
COUNTS = "num_batches_tracked"
"""What older files do not have of a batch norm, and nobody needs."""


def open_published(name: str, *, with_weights: bool = True) -> nn.Module:
    """The encoder of a name in the catalog, or of the path of its file, in evaluation mode. Raises DataError for a file that is not its own.

    with_weights: False for weights at random, without any file.
    """
    backbone = CATALOG[published_name(name) or name]
    model = backbone.build() if not with_weights else _with_weights(backbone, weights_file(name))
    return model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _with_weights(backbone: PublishedBackbone, file: Path) -> nn.Module:
    tensors = _read(file)
    with torch.device("meta"):
        model = backbone.build()
    expected = model.state_dict()
    found = {key: tensor for key, tensor in tensors.items() if not key.startswith(backbone.classes)}
    for key in sorted({*expected, *found}):
        if key not in found and key.endswith(COUNTS):
            found[key] = torch.zeros((), dtype=torch.long)
        elif key not in found or key not in expected:
            raise DataError(f"{file} {'lacks' if key in expected else 'holds'} {key}: it is not {backbone.files[0]}, or is incomplete.")
        elif found[key].shape != expected[key].shape:
            raise DataError(
                f"{file}: {key} is of shape {list(found[key].shape)}, expected {list(expected[key].shape)}: it is not {backbone.files[0]}."
            )
        elif not found[key].isfinite().all():
            raise DataError(f"{file} is damaged: {key} holds values that are not finite.")
    model.load_state_dict({key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in found.items()}, assign=True)
    return model.requires_grad_()


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Raises DataError if it holds anything else."""
    content = read_tensors_alone(file)
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise DataError(f"{file} holds no tensors by name: expected the published file.")
    return content
