"""Human ratings of the similarity of caption pairs: STS benchmark and Crisscrossed Captions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset_reader import resolve_path
from visavis.data.formats.caption_table import parse_table

MAX_RATING = 5.0
"""Highest rating of both collections. The lowest is 0."""


@dataclass(frozen=True)
class RatedCaptionPairs:
    """Caption pairs with human ratings of their similarity.

    Attributes:
        name: Name of the collection.
        first: First caption of each pair.
        second: Second caption of each pair.
        ratings: Ratings from 0 to 5, shape ``[P]``.
    """

    name: str
    first: Sequence[str]
    second: Sequence[str]
    ratings: np.ndarray


def read_stsb(
    split: Literal["train", "dev", "test"], folder: str | Path = "stsb"
) -> RatedCaptionPairs:
    """Read a split of the STS benchmark from ``sts-<split>.tsv``.

    Args:
        split: Name of the split.
        folder: Folder of the files, or its name under ``VISAVIS_DATA``.

    Returns:
        The rated pairs.

    Raises:
        DataError: If the file is missing or a line is invalid.

    Source:
        Cer et al., SemEval-2017 task 1 (2017).
    """
    path = resolve_path(Path(folder) / f"sts-{split}.tsv")
    rows, ratings = read_ratings(path, "score", ("sentence1", "sentence2"), has_quotes=False)
    return RatedCaptionPairs(
        f"STS-B {split}",
        [row["sentence1"] for row in rows],
        [row["sentence2"] for row in rows],
        ratings,
    )


def read_crisscrossed_captions(folder: str | Path = "coco_5k_test_text") -> RatedCaptionPairs:
    """Read the caption pairs of Crisscrossed Captions from ``cxc_sts_test.csv`` and
    ``dataset_coco_5k_test.json``.

    Args:
        folder: Folder of the files, or its name under ``VISAVIS_DATA``.

    Returns:
        The rated pairs.

    Raises:
        DataError: If a file is missing, a line is invalid, or a rated caption is not in the list of
            captions.

    Source:
        Parekh et al., Crisscrossed Captions (2021).
    """
    path, listed = (
        resolve_path(Path(folder) / "cxc_sts_test.csv"),
        resolve_path(Path(folder) / "dataset_coco_5k_test.json"),
    )
    rows, ratings = read_ratings(path, "agg_score", ("caption1", "caption2"))
    images = storage.read_json(listed, _Captions).images
    captions = {
        str(sentence.sentid): sentence.raw for image in images for sentence in image.sentences
    }
    first, second = (
        [row[name].rpartition(":")[2] for row in rows] for name in ("caption1", "caption2")
    )
    if unknown := next((number for number in (*first, *second) if number not in captions), None):
        raise DataError(
            f"{path}: expected captions of {listed}, got the unknown caption {unknown}. Download "
            "both files again."
        )
    return RatedCaptionPairs(
        "Crisscrossed Captions",
        [captions[number] for number in first],
        [captions[number] for number in second],
        ratings,
    )


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


def read_ratings(
    path: Path, column: str, item_columns: tuple[str, str], *, has_quotes: bool = True
) -> tuple[list[dict[str, str]], np.ndarray]:
    """Read a table of rated pairs.

    Args:
        path: Path of a table with a header line.
        column: Name of the column of ratings.
        item_columns: Names of the two columns that identify a pair.
        has_quotes: Whether cells may be in double quotes.

    Returns:
        Rows of the table, and their ratings of shape ``[P]``.

    Raises:
        DataError: If the table is empty, or a row has no pair or no rating from 0 to 5.
    """
    expected = f"{item_columns[0]}, {item_columns[1]} and {column}"
    table = parse_table(storage.read_text(path), path, (column,), expected, has_quotes=has_quotes)
    rows = table.require_rows(path)
    ratings = np.empty(len(rows))
    for i, (line, row) in enumerate(rows):
        try:
            ratings[i] = float(row[column])
        except (KeyError, ValueError):
            ratings[i] = math.nan
        if not 0 <= ratings[i] <= MAX_RATING or any(name not in row for name in item_columns):
            raise DataError(
                f"{path}, line {line}: expected {item_columns[0]}, {item_columns[1]} and a "
                f"{column} from 0 to 5. Fix this line."
            )
    if not rows:
        raise DataError(f"{path}: expected rated pairs, got an empty table.")
    return [row for _, row in rows], ratings
