"""Pairs of sentences with human ratings of their similarity."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from visavis import storage
from visavis.data.reading import find_file
from visavis.errors import DataError

BEST = 5.0
"""The highest rating of both collections; the lowest is 0."""


@dataclass(frozen=True)
class RatedPairs:
    """Human ratings: ``first[i]`` and ``second[i]`` are similar by ``ratings[i]``, from 0 to 5."""

    name: str
    first: Sequence[str]
    second: Sequence[str]
    ratings: np.ndarray


def read_stsb(split: Literal["train", "dev", "test"], folder: str | Path = "stsb") -> RatedPairs:
    """A split of the STS benchmark (Cer et al., 2017): ``sts-<split>.tsv``, as published. Raises DataError naming a bad line."""
    path = find_file(Path(folder) / f"sts-{split}.tsv")
    rows, ratings = read_ratings(path, "score", ("sentence1", "sentence2"), delimiter="\t", quoting=csv.QUOTE_NONE)
    return RatedPairs(f"STS-B {split}", [row["sentence1"] for row in rows], [row["sentence2"] for row in rows], ratings)


def read_crisscrossed(folder: str | Path = "coco_5k_test_text") -> RatedPairs:
    """The caption pairs of Crisscrossed Captions (Parekh et al., 2021): ``cxc_sts_test.csv``, with the captions it names by number.

    Raises DataError naming a bad line, or a caption that the list of captions does not have.
    """
    path, listed = find_file(Path(folder) / "cxc_sts_test.csv"), find_file(Path(folder) / "dataset_coco_5k_test.json")
    rows, ratings = read_ratings(path, "agg_score", ("caption1", "caption2"))
    images = storage.read_json(listed, _Captions).images
    captions = {str(sentence.sentid): sentence.raw for image in images for sentence in image.sentences}
    first, second = ([row[name].rpartition(":")[2] for row in rows] for name in ("caption1", "caption2"))
    if unknown := next((number for number in (*first, *second) if number not in captions), None):
        raise DataError(f"{path} names the caption {unknown}, which {listed} does not have.")
    return RatedPairs("Crisscrossed Captions", [captions[number] for number in first], [captions[number] for number in second], ratings)


@dataclass(frozen=True)
class _Caption:
    sentid: int
    raw: str


@dataclass(frozen=True)
class _Image:
    sentences: list[_Caption]


@dataclass(frozen=True)
class _Captions:
    images: list[_Image]


def read_ratings(path: Path, column: str, pair: tuple[str, str], **form: Any) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The rows of a table of pairs, and their ratings. Raises DataError unless each row has both of the pair and a number from 0 to 5."""
    try:
        rows = list(csv.DictReader(io.StringIO(storage.read_text(path)), **form))
    except csv.Error as error:
        raise DataError(f"{path} is no table: {error}.") from None
    ratings = np.empty(len(rows))
    for i, row in enumerate(rows):
        try:
            ratings[i] = float(row[column] or "")
        except (KeyError, ValueError):
            ratings[i] = math.nan
        if not 0 <= ratings[i] <= BEST or any(row.get(one) is None for one in pair):
            raise DataError(
                f"{path}, line {i + 2}: expected {pair[0]}, {pair[1]} and a {column} from 0 to 5, as the first line names them."
            )
    if not rows:
        raise DataError(f"{path} holds no rated pairs.")
    return rows, ratings
