"""The image encoders of the papers by their published weights: files of tensors by name, read as such and never unpickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visavis import storage
from visavis.errors import DataError
from visavis.models.preprocessing import Preprocessing
from visavis.models.residual_network import ResidualNetwork
from visavis.models.vgg import VGG19

PREPROCESSING = Preprocessing(resize=(256,), crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Of all of them: 224 pixels of the middle of a picture whose shorter edge is 256."""
COUNTS = "num_batches_tracked"
"""What older files do not have of a batch norm, and nobody needs."""


@dataclass(frozen=True)
class PublishedBackbone:
    """An image encoder whose weights are published as one file.

    files: its names, the usual one first; all of one training. url: where the first lies. classes: how the names of the last layer begin, which
    says classes and is left out. build: the encoder, its weights at random.
    """

    build: Callable[[], nn.Module]
    files: tuple[str, ...]
    url: str
    classes: str = "fc."


_TORCHVISION = "https://download.pytorch.org/models"
CATALOG = {
    "resnet50": PublishedBackbone(
        lambda: ResidualNetwork((3, 4, 6, 3)), ("resnet50-0676ba61.pth", "resnet50-19c8e357.pth"), f"{_TORCHVISION}/resnet50-0676ba61.pth"
    ),
    "resnet152": PublishedBackbone(
        lambda: ResidualNetwork((3, 8, 36, 3)),
        ("resnet152-394f9c45.pth", "resnet152-b121ed2d.pth"),
        f"{_TORCHVISION}/resnet152-394f9c45.pth",
    ),
    "vgg19": PublishedBackbone(VGG19, ("vgg19-dcbb9e9d.pth",), f"{_TORCHVISION}/vgg19-dcbb9e9d.pth", "classifier.6."),
    "resnext101-32x8d-wsl": PublishedBackbone(
        lambda: ResidualNetwork((3, 4, 23, 3), groups=32, group_width=8),
        ("ig_resnext101_32x8-c38310e5.pth",),
        f"{_TORCHVISION}/ig_resnext101_32x8-c38310e5.pth",
    ),
}
"""By the names that recipes use: torchvision's first weights (V1) of ImageNet, and those learned from hashtags (WSL)."""


def published_name(name: str) -> str | None:
    """The name in the catalog that a tower's name stands for: itself, or the path of a published file; None: it is of another kind."""
    if name in CATALOG:
        return name
    if not name.endswith(".pth"):
        return None
    known = {file: entry for entry, backbone in CATALOG.items() for file in (*backbone.files, f"{entry}.pth")}
    if (file := Path(name).name) not in known:
        raise DataError(f"{name} is a file of weights of an unknown network: expected one of the published files {', '.join(known)}.")
    return known[file]


def weights_file(name: str) -> Path:
    """The file of a published backbone: a path, or in the folder ``backbones`` of the cache. Raises DataError where there is none."""
    places = _places(name)
    for place in places:
        if place.is_file():
            return place
    entry = published_name(name) or name
    raise DataError(f"{places[0]} is not there, the weights of {entry}: fetch {CATALOG[entry].url} and put it there.")


def is_at_hand(name: str) -> bool:
    """Whether the weights of a name in the catalog are in the cache."""
    return any(place.is_file() for place in _places(name))


def _places(name: str) -> list[Path]:
    folder = storage.cache_folder() / "backbones"
    return [folder / file for file in (*CATALOG[name].files, f"{name}.pth")] if name in CATALOG else [Path(name)]


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
    with storage.regular_file(file):
        pass
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - torch raises errors of every kind on damaged files
        raise DataError(
            f"{file} holds more than tensors by name, or is damaged: expected the published file; nothing else is read."
        ) from None
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise DataError(f"{file} holds no tensors by name: expected the published file.")
    return content
