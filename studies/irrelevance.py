"""Irrelevant items by people: two rules for relevance values compared with the expert judgments of Flickr8k's test images.

python studies/irrelevance.py ["CBoW()" ...]     needs flickr8k with ExpertAnnotations.txt under VISAVIS_DATA, half a minute

The bound is one for all pairs, or one for each caption among all images. Both are the median relevance. Three numbers are printed for
each rule: how well relevance values separate pairs that experts rate 1 on average (not related, of 1 to 4) from the others (AUC), the
share of those pairs that are at most the bound, and the share of pairs rated 3 or more that are at most the bound, which is an error.
An image's own captions are left out. Then the script prints the share of all images below one bound for all pairs, for short and for
long captions.
"""

from __future__ import annotations

import sys
from typing import get_args

import numpy as np
import torch
from scipy.stats import mannwhitneyu

from visavis.core.spec import parse
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.words import tokenize
from visavis.papers.relevance import CATALOG
from visavis.papers.relevance.base import CaptionAggregation


def expert_judgments(data: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Image and caption indices and the mean rating of every rated pair, without an image's own
    captions.
    """
    image = {each.name: i for i, each in enumerate(data.images)}
    caption = {
        f"{name}#{k}": c for name, i in image.items() for k, c in enumerate(data.captions_of[i])
    }
    rows = [
        line.split()
        for line in resolve_path("flickr8k/ExpertAnnotations.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    images, captions = (
        np.array([index_of[row[column]] for row in rows])
        for column, index_of in ((0, image), (1, caption))
    )
    ratings = np.array([[int(rating) for rating in row[2:]] for row in rows]).mean(1)
    foreign = data.image_of[captions] != images
    return images[foreign], captions[foreign], ratings[foreign]


def main() -> None:
    data = open_dataset("flickr8k").split("test")
    images, captions, ratings = expert_judgments(data)
    unrelated = ratings == 1
    related = ratings >= 3
    print(
        f"{len(ratings):,} pairs of a test image and another's caption: {unrelated.sum():,} "
        f"unrelated, {related.sum():,} rated 3 or more"
    )
    print(
        f"{'relevance':18}{'image':8}{'bound':14}{'AUC':>6}{'unrelated marked':>20}{'related marked':>18}"
    )
    for text in sys.argv[1:] or ["CBoW()"]:
        for image in get_args(CaptionAggregation):
            relevance = parse(text, CATALOG).for_dataset(data, image)
            unique_captions, column_of_pair = np.unique(captions, return_inverse=True)
            block = relevance(
                torch.arange(len(data.images)), torch.from_numpy(unique_captions)
            ).numpy()
            values = block[images, column_of_pair]
            relevance_quantiles = np.array(
                [
                    (block[:, column] <= value).mean()
                    for value, column in zip(values, column_of_pair, strict=True)
                ]
            )
            for bound, values_to_bound, limit in (
                ("all pairs", values, np.median(block)),
                ("each caption", relevance_quantiles, 0.5),
            ):
                auc = mannwhitneyu(
                    values_to_bound[~unrelated], values_to_bound[unrelated]
                ).statistic / (unrelated.sum() * (~unrelated).sum())
                marked = values_to_bound <= limit
                print(
                    f"{text:18}{image:8}{bound:14}{auc:6.3f}{marked[unrelated].mean():20.1%}{marked[related].mean():18.1%}"
                )
        lengths = np.array([len(tokenize(caption)) for caption in data.captions])
        block = (
            parse(text, CATALOG)
            .for_dataset(data, "max")(
                torch.arange(len(data.images)), torch.arange(len(data.captions))
            )
            .numpy()
        )
        below = (block <= np.median(block)).mean(0)
        for words, selected in (("up to 4", lengths <= 4), ("15 or more", lengths >= 15)):
            print(
                f"{text}, image max, all pairs: {below[selected].mean():.0%} of images for the "
                f"{selected.sum()} captions of {words} words"
            )


if __name__ == "__main__":
    main()
