"""Named protocols: how many images and captions a published number was measured on, and over how many folds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visavis.errors import SpecError, nearest, shown
from visavis.metrics.arguments import Ties, checked
from visavis.spec import check_fields, require


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is ranked against what.

    num_images, captions_per_image: what the protocol demands (None: whatever there is). folds: consecutive blocks of
    images with their captions, ranked apart; every metric is the mean over folds. positives: where the right answers are listed
    (see evaluation.positives); None: an image and its captions belong together. ties: the rule by which its published numbers count.
    """

    name: str
    description: str
    num_images: int | None = None
    captions_per_image: int | None = None
    folds: int = 1
    positives: str | None = None
    ties: Ties = "pessimistic"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_images", "captions_per_image", "folds"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, self, name, "a number from 1 up")

    @checked
    def check(self, image_ids: Tensor, text_ids: Tensor) -> None:
        """Raises SpecError, one sentence, where the data are not those of the protocol."""
        remedy = "give the split it is defined on, or use the protocol plain"
        if self.num_images is not None and len(image_ids) != self.num_images:
            raise SpecError(f"protocol {self.name} is defined on {self.num_images} images, here are {len(image_ids)}: {remedy}.")
        if len(image_ids) % self.folds:
            raise SpecError(f"protocol {self.name} needs {self.folds} folds of equal size, here are {len(image_ids)} images: {remedy}.")
        if self.captions_per_image is not None:
            texts = text_ids.sort().values
            number = torch.searchsorted(texts, image_ids, right=True) - torch.searchsorted(texts, image_ids)
            for image in (number != self.captions_per_image).nonzero()[:1, 0].tolist():
                demand = f"protocol {self.name} has {self.captions_per_image} captions for each image"
                raise SpecError(f"{demand}, image {image} has {int(number[image])}: {remedy}.")

    @checked
    def split(self, image_ids: Tensor, text_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The positions of images and of their texts in each fold."""
        images = torch.arange(len(image_ids)).chunk(self.folds)
        return [(fold, torch.isin(text_ids, image_ids[fold]).nonzero()[:, 0]) for fold in images]


CATALOG: tuple[Protocol, ...] = (
    Protocol(name="plain", description="all images of the split against all its captions"),
    Protocol(name="flickr8k", description="the 1,000 test images of Flickr8k, 5 captions each", num_images=1000, captions_per_image=5),
    Protocol(name="flickr30k", description="the 1,000 test images of Flickr30K, 5 captions each", num_images=1000, captions_per_image=5),
    Protocol(
        name="coco-1k-5fold",
        description="the 5,000 test images of MS-COCO in five consecutive folds of 1,000, the first 5 captions of each image; means over folds",
        num_images=5000,
        captions_per_image=5,
        folds=5,
    ),
    Protocol(
        name="coco-5k",
        description="the 5,000 test images of MS-COCO at once, the first 5 captions of each image",
        num_images=5000,
        captions_per_image=5,
    ),
    Protocol(
        name="eccv-caption",
        description="as coco-5k, with the right answers that people confirmed for ECCV Caption (Chun et al., 2022); queries are the "
        "1,261 images and 1,332 captions that it lists; two listed captions are not among the 25,000 and are left out",
        num_images=5000,
        captions_per_image=5,
        positives="coco_5k_test_text/eccv",
    ),
    Protocol(
        name="cxc",
        description="as coco-5k, with the right answers of Crisscrossed Captions (Parekh et al., 2021), as ECCV Caption prepared "
        "them; queries are the 5,000 images and 24,972 captions that it lists",
        num_images=5000,
        captions_per_image=5,
        positives="coco_5k_test_text/cxc",
    ),
    Protocol(
        name="msrvtt-full",
        description="the 2,990 test videos of MSR-VTT, each of their captions a query (20 a video, now and then fewer), "
        "ties by their mean rank, as CE counts (r1_mean_ties, ...)",
        num_images=2990,
        ties="mean",
    ),
    Protocol(
        name="msrvtt-1ka",
        description="1k-A: 1,000 test videos of MSR-VTT, one caption each (Yu et al., 2018), ties by their mean rank, as CE and MMT count",
        num_images=1000,
        captions_per_image=1,
        ties="mean",
    ),
    Protocol(
        name="msvd",
        description="the 670 test videos of MSVD, each of their captions a query (about 40 a video), ties by their mean rank, as CE counts",
        num_images=670,
        ties="mean",
    ),
)


def named(protocol: str | Protocol) -> Protocol:
    """A protocol of the CATALOG by its name; one that is a protocol already stays as it is. Raises SpecError for an unknown name."""
    if isinstance(protocol, Protocol):
        return protocol
    by_name = {known.name: known for known in CATALOG}
    if not isinstance(protocol, str) or protocol not in by_name:
        raise SpecError(f"there is no protocol {shown(protocol)}: {nearest(protocol if isinstance(protocol, str) else '', by_name)}")
    return by_name[protocol]


def all_named(protocols: str | Protocol | Sequence[str | Protocol]) -> list[Protocol]:
    """One protocol, or several, as ``named`` finds them."""
    return [named(protocol) for protocol in ([protocols] if isinstance(protocols, str | Protocol) else protocols)]
