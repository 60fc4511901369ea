"""What people said of image-caption pairs, as published.

Flickr8k (Hodosh et al., 2013): experts, three a pair, from 1 (not related) to 4 (describes the image); a crowd, three or more a
pair, yes or no. Crisscrossed Captions (Parekh et al., 2021): ratings from 0 to 5 of images and captions of MS-COCO's 5K test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from visavis import storage
from visavis.data.dataset import Dataset
from visavis.degrees.ratings import read_ratings
from visavis.errors import DataError
from visavis.evaluation.positives import coco_ids
from visavis.evaluation.rank_correlation import SEED

FILES = {"expert": "ExpertAnnotations.txt", "crowd": "CrowdFlowerAnnotations.txt"}
CRISSCROSSED = "cxc_sits_test.csv"
FORMS = {
    "expert": "an image, a caption as file#number, three ratings from 1 to 4",
    "crowd": "an image, a caption as file#number, the share of yes, the number of yes and of no",
}


@dataclass(frozen=True, eq=False)
class Judgements:
    """What people said of pairs.

    kind: "expert", "crowd", or "cxc" for Crisscrossed Captions. images, captions ``[P]``: positions in the split. own ``[P]``: the
    caption was written for the image. ratings ``[P]``: the experts' mean, the crowd's share of yes, the published rating. raters,
    others ``[R, P]``: single raters, and beside each the mean of the rest: every expert; of the crowd, whose answers are only
    counted, one answer of each pair drawn at random; none of Crisscrossed Captions, of which means alone are read.
    """

    kind: str
    images: np.ndarray
    captions: np.ndarray
    own: np.ndarray
    ratings: np.ndarray
    raters: np.ndarray
    others: np.ndarray


def judgements_beside(source: Path, data: Dataset) -> list[Judgements]:
    """What people said of a split, by the files beside the list that describes its data set.

    Raises DataError where there is none, a line is damaged, or names an image or a caption that the split does not have.
    """
    if (source.parent / CRISSCROSSED).is_file():
        return [read_crisscrossed(source.parent / CRISSCROSSED, source, data)]
    return [read_judgements(kind, source.parent, data) for kind in FILES]


def read_crisscrossed(path: Path, source: Path, data: Dataset) -> Judgements:
    """The image-caption pairs of Crisscrossed Captions. source: Karpathy's list, with the ids by which captions are named.

    Raises DataError for a damaged line, or one that names an image or a caption that the split does not have.
    """
    rows, ratings = read_ratings(path, "agg_score", ("caption", "image"))
    position = {image.name: i for i, image in enumerate(data.images)}
    _, captions_by_id = coco_ids(data, source)
    caption_of = {str(number): i for number, i in captions_by_id.items()}
    try:
        images = np.array([position[row["image"]] for row in rows])
        captions = np.array([caption_of[row["caption"].rpartition(":")[2]] for row in rows])
    except KeyError as unknown:
        raise DataError(
            f"{path} rates {unknown}, which is not among the {len(position):,} images of the split and their captions."
        ) from None
    nobody = np.empty((0, len(rows)))
    return Judgements("cxc", images, captions, data.image_of[captions] == images, ratings, nobody, nobody)


def read_judgements(kind: str, folder: Path, data: Dataset) -> Judgements:
    """The experts' or the crowd's judgements in a folder of the images and captions of Flickr8k's split.

    Raises DataError where the file is missing, a line is damaged, or names an image or a caption that the split does not have.
    """
    path = folder / FILES[kind]
    if not path.is_file():
        raise DataError(
            f"{path} does not exist: people's judgements are of Flickr8k's test images, or of MS-COCO's, with {CRISSCROSSED} beside their "
            "list; name the folder of either with --data."
        )
    position = {image.name: i for i, image in enumerate(data.images)}
    images, captions, numbers = [], [], []
    for number, line in enumerate(storage.read_text(path).splitlines(), 1):
        try:
            image, caption, *values = line.split("\t")
            file, _, place = caption.rpartition("#")
            numbers.append(_answers(kind, values))
            described, k = position[file], int(place)
            images.append(position[image])
        except KeyError as unknown:
            raise DataError(f"{path}:{number}: the split of {len(position):,} images has no image {unknown}.") from None
        except ValueError:
            raise DataError(f"{path}:{number}: {line[:80]!r} is damaged: expected {FORMS[kind]}, separated by tabs.") from None
        own = data.captions_of[described]
        if not 0 <= k < len(own):
            raise DataError(f"{path}:{number}: image {file} has {len(own)} captions, none of number {k} counted from 0.")
        captions.append(own[k])
    if not numbers:
        raise DataError(f"{path} is empty: expected lines of {FORMS[kind]}.")
    return _judgements(kind, np.array(images), np.array(captions), np.array(numbers).T, data)


def _answers(kind: str, values: list[str]) -> tuple[float, float, float]:
    """The three numbers of a line. Raises ValueError for what cannot be an answer, or where one rater has nobody to agree with."""
    first, second, third = map(float, values)
    if kind == "expert":
        valid = {first, second, third} <= {1, 2, 3, 4}
    else:
        valid = 0 <= first <= 1 and min(second, third) >= 0 and second + third > 1
    if not valid:
        raise ValueError
    return first, second, third


def _judgements(kind: str, images: np.ndarray, captions: np.ndarray, numbers: np.ndarray, data: Dataset) -> Judgements:
    own = data.image_of[captions] == images
    if kind == "expert":
        return Judgements(kind, images, captions, own, numbers.mean(0), numbers, (numbers.sum(0) - numbers) / 2)
    _, yes, no = numbers
    share = yes / (yes + no)
    one = (np.random.default_rng(SEED).random(len(share)) < share).astype(float)
    return Judgements(kind, images, captions, own, share, one[None], ((yes - one) / (yes + no - 1))[None])
