"""Accuracy of models that see no image on the minimal pairs of a probe, before and after selection.

    VISAVIS_DATA=... python studies/text_only.py [--data flickr8k scenes]

``scenes`` is a folder of ``visavis data scenes``. Prints one row for all pairs of the test split,
the first one of each kind and image, and one for the selected pairs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from visavis.core.errors import VisavisError
from visavis.data.data_paths import resolve_path
from visavis.data.dataset_reader import open_dataset
from visavis.papers.probes import find_pairs, results_by_kind, select_pairs
from visavis.papers.text_only import NgramModel, share_correct


def rows(name: str) -> list[str]:
    """The rows of one data set."""
    data = open_dataset(name)
    candidates, _ = find_pairs(data.split("test"), Path(resolve_path(name)))
    training = data.split("train").captions
    model = NgramModel.from_captions(training)
    lines = []
    for title, captions in (("first edit of each kind", ()), ("selected", training)):
        pairs, _ = select_pairs(candidates, captions)
        scores = np.zeros(len(pairs))
        results = results_by_kind(pairs, scores, scores)
        margins = [
            model.log_probability(pair.true) - model.log_probability(pair.edited) for pair in pairs
        ]
        learned = np.array([one.text_only for one in results])
        counts = np.array([one.num_pairs for one in results])
        highest = results[int(learned.argmax())]
        lines.append(
            f"| {data.name}, {title} | {len(pairs):,} | {100 * share_correct(np.array(margins)):.1f} % | "
            f"{np.average(learned, weights=counts):.1f} % | {highest.text_only:.1f} % ({highest.kind}) |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["flickr8k", "scenes"])
    options = parser.parse_args()
    sys.stdout.write(
        "| data | cases | n-grams | learned | highest kind, learned |\n|---|---|---|---|---|\n"
    )
    for name in options.data:
        sys.stdout.write("\n".join([*rows(name), ""]))


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"text_only: {error}")
