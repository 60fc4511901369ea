"""The image encoders of the papers whose weights are published as one file each: their names, and where the files lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from visavis import storage
from visavis.errors import DataError
from visavis.models.residual_network import ResidualNetwork
from visavis.models.vgg import VGG19


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
