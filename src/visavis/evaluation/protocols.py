"""Named protocols: the number of images and captions behind a published result, its folds and its
ties.

ECCV Caption and Crisscrossed Captions list their positives in files. A caption then matches many
images and an image many captions, far more than its own five. A pair that is not listed is
negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from visavis.core.errors import SpecError, suggest_name
from visavis.core.fields import PositiveInt, validate_fields
from visavis.evaluation.metrics.ranking import Ties
from visavis.losses.targets import Ids, Targets, equal_text_pairs, to_id_tensor


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Queries and candidates of an evaluation.

    Attributes:
        name: Name of the protocol.
        description: One sentence for the catalog.
        num_images: Required number of images. None: any.
        captions_per_image: Required number of captions per image. None: any.
        folds: Consecutive blocks of images with their captions that are ranked separately. Each
            metric is the mean over folds.
        positives_file: Prefix of the files that list the positives. None: an image and its captions
            belong together.
        ties: Tie rule of the published results.
        equal_texts: Whether images that have captions with the same text (see `visavis.data.equal_texts.text_keys`) are
            "positives" of it, or "negatives", as in the papers.

    Example:
        >>> get_protocol("flickr8k+equal-texts").equal_texts
        'positives'
    """

    name: str
    description: str
    num_images: PositiveInt | None = None
    captions_per_image: PositiveInt | None = None
    folds: PositiveInt = 1
    positives_file: str | None = None
    ties: Ties = "pessimistic"
    equal_texts: Literal["negatives", "positives"] = "negatives"

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.positives_file and self.equal_texts == "positives":
            raise SpecError(
                f"protocol {self.name}: expected equal texts as negatives, because it lists its "
                f"positives. Remove {EQUAL_TEXTS} from its name."
            )

    @property
    def takes_unpaired(self) -> bool:
        """Whether images without captions and texts without images are candidates. Protocols of
        papers fix their candidates.
        """
        return (self.num_images, self.captions_per_image, self.folds, self.positives_file) == (
            None,
            None,
            1,
            None,
        )

    def describe(
        self, unpaired_images: int = 0, unpaired_texts: int = 0, correction: str = ""
    ) -> str:
        """Name the protocol, the candidates that are not queries and the correction, so that results
        that cannot be compared have different names. `get_protocol` reads it.

        Args:
            unpaired_images: Number of images without captions.
            unpaired_texts: Number of texts without images.
            correction: Correction with its bank. Empty: the scores are not corrected.

        Returns:
            The text.

        Example:
            >>> get_protocol("plain").describe(unpaired_images=7000)
            'plain + 7,000 images without captions'
        """
        unpaired = (
            ("image", "without captions", unpaired_images),
            ("text", "without images", unpaired_texts),
        )
        added = [
            f"{number:,} {kind}{'s' * (number > 1)} {lacking}"
            for kind, lacking, number in unpaired
            if number
        ]
        return GALLERY_SEPARATOR.join([self.name, *added, *filter(None, [correction])])

    def validate(self, image_ids: Ids, text_ids: Ids) -> None:
        """Check that data match the protocol.

        Args:
            image_ids: One id per image.
            text_ids: One id per text.

        Raises:
            SpecError: If a number of images, captions or folds differs.
        """
        image_ids = to_id_tensor(image_ids, "image_ids")
        text_ids = to_id_tensor(text_ids, "text_ids")
        num_unpaired = int((image_ids == UNPAIRED).sum() + (text_ids == UNPAIRED).sum())
        if num_unpaired and not self.takes_unpaired:
            raise SpecError(
                f"protocol {self.name}: expected no images or texts without a partner, got "
                f"{num_unpaired:,}. Leave them out, or use the protocol plain."
            )
        expected = ""
        got = f"{len(image_ids)} images"
        if self.num_images is not None and len(image_ids) != self.num_images:
            expected = f"{self.num_images} images"
            got = str(len(image_ids))
        elif len(image_ids) % self.folds:
            expected = f"{self.folds} folds of equal size"
        elif self.captions_per_image is not None:
            ascending = text_ids.sort().values
            num_captions = torch.searchsorted(
                ascending, image_ids, right=True
            ) - torch.searchsorted(ascending, image_ids)
            for image in (num_captions != self.captions_per_image).nonzero()[:1, 0].tolist():
                expected = f"{self.captions_per_image} captions per image"
                got = f"{int(num_captions[image])} for image {image}"
        if expected:
            raise SpecError(
                f"protocol {self.name}: expected {expected}, got {got}. Use the split of the "
                "protocol, or the protocol plain."
            )

    def split_folds(self, image_ids: Ids, text_ids: Ids) -> list[tuple[Tensor, Tensor]]:
        """Split images and their texts into folds.

        Args:
            image_ids: One id per image.
            text_ids: One id per text.

        Returns:
            Positions of the images and of their texts in each fold.
        """
        image_ids = to_id_tensor(image_ids, "image_ids")
        text_ids = to_id_tensor(text_ids, "text_ids")
        if self.folds == 1:
            return [(torch.arange(len(image_ids)), torch.arange(len(text_ids)))]
        images = torch.arange(len(image_ids)).chunk(self.folds)  # consecutive, as published
        return [(fold, torch.isin(text_ids, image_ids[fold]).nonzero()[:, 0]) for fold in images]


UNPAIRED = -1
"""Id of an image without a text, and of a text without an image."""
EQUAL_TEXTS = "+equal-texts"
"""End of the name of a protocol whose equal texts are positives."""
GALLERY_SEPARATOR = " + "
"""Separator of the name of a protocol, the candidates that are not queries, and the correction."""

CATALOG: tuple[Protocol, ...] = (
    Protocol(name="plain", description="all images of the split against all its captions"),
    Protocol(
        name="flickr8k",
        description="the 1,000 test images of Flickr8k, 5 captions each",
        num_images=1000,
        captions_per_image=5,
    ),
    Protocol(
        name="flickr30k",
        description="the 1,000 test images of Flickr30K, 5 captions each",
        num_images=1000,
        captions_per_image=5,
    ),
    Protocol(
        name="coco-1k-5fold",
        description="the 5,000 test images of MS-COCO in five consecutive folds of 1,000, the first 5 captions of each image, means over folds",
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
        description="as coco-5k, with the positives that people confirmed for ECCV Caption (Chun et al., 2022). Queries are the "
        "1,261 images and 1,332 captions that it lists. Two listed captions are not among the "
        "25,000 and are left out",
        num_images=5000,
        captions_per_image=5,
        positives_file="coco_5k_test_text/eccv",
    ),
    Protocol(
        name="cxc",
        description="as coco-5k, with the positives of Crisscrossed Captions (Parekh et al., 2021), as ECCV Caption prepared "
        "them. Queries are the 5,000 images and 24,972 captions that it lists",
        num_images=5000,
        captions_per_image=5,
        positives_file="coco_5k_test_text/cxc",
    ),
    Protocol(
        name="msrvtt-full",
        description="the 2,990 test videos of MSR-VTT, each of their captions a query (mostly 20 per video), "
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
        description="the 670 test videos of MSVD, each of their captions a query (about 40 per video), ties by their mean rank, as CE counts",
        num_images=670,
        ties="mean",
    ),
)


def get_protocol(protocol: str | Protocol) -> Protocol:
    """Look up a protocol by its name, also with ``+equal-texts`` or as a result states it."""
    if isinstance(protocol, Protocol):
        return protocol
    by_name = {entry.name: entry for entry in CATALOG}
    full_name = protocol.partition(GALLERY_SEPARATOR)[0]
    name = full_name.removesuffix(EQUAL_TEXTS)
    if name not in by_name:
        raise SpecError(
            f"protocol: expected a known name, got {protocol!r}: {suggest_name(protocol, by_name)}"
        )
    if full_name == name:
        return by_name[name]
    return replace(by_name[name], name=full_name, equal_texts="positives")


def get_protocols(protocols: str | Protocol | Sequence[str | Protocol]) -> list[Protocol]:
    """Look up one or several protocols."""
    return [
        get_protocol(protocol)
        for protocol in ([protocols] if isinstance(protocols, str | Protocol) else protocols)
    ]


def pair_targets(image_ids: Tensor, text_ids: Tensor, keys: Tensor | None = None) -> Targets:
    """Make the targets of images against texts, ``[V, T]``. An id of -1 has no partner. With the keys
    of the texts, an image is a positive of all texts that are equal to one of its own.
    """
    # Items without a partner get an id that no other item has.
    ids = torch.cat([image_ids, text_ids])
    ids = torch.where(ids == UNPAIRED, ids.amax().clamp(min=0) + 1 + torch.arange(len(ids)), ids)
    image_ids, text_ids = ids.split([len(image_ids), len(text_ids)])
    targets = Targets(query_ids=image_ids, candidate_ids=text_ids)
    if keys is None:
        return targets
    image, text = targets.positive_pairs([])
    pairs = equal_text_pairs(image, keys[text], keys)
    return Targets.from_pairs(*pairs, len(image_ids), len(text_ids))


@dataclass(frozen=True)
class ListedPositives:
    """Listed positives of one direction.

    Attributes:
        queries: Positions of the listed queries, shape ``[Q]``.
        targets: Their positives among all candidates.
    """

    queries: Tensor
    targets: Targets
