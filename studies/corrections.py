"""Corrections for hubs with a fixed bank of texts: gains by bank, and what the check of an index
leaves on.

    python studies/corrections.py runs/flickr-0 runs/flickr-1 runs/flickr-2 [--words dog man]

All runs are of one data set with a validation and a test split, and a model that encodes texts. The
bank never sees a test query. Only text to image is corrected, so a gain in RSUM is a gain in the
sum of its three recalls.

- Gains: each correction with its own training captions, with those of another domain (COCO), and
  with one caption a hundred times. Mean over runs of the gain in RSUM on the test split, the range
  over runs, and the mean 95 % interval over test images (paired bootstrap). Also with the
  temperature or k of the largest validation gain of each run, if another than the default.
- Check: twelve shifted banks, and the own bank with six kinds of test queries. The rule of
  ``visavis indexes correct`` reads only the validation split: on if its interval is above 0. Printed:
  how many of all settings are on, the smallest test gain of those, and of all.
- Transductive: the same with the test queries as the bank.

Data: VISAVIS_DATA with coco_5k_test_text, flickr30k_text and stsb.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.data.data_paths import resolve_path
from visavis.evaluation import rank_scores
from visavis.evaluation.bootstrap import BootstrapEstimate, bootstrap_images
from visavis.evaluation.query_ranks import QueryRanks
from visavis.losses.corrections import (
    CSLS,
    Correction,
    DualSoftmax,
    InvertedSoftmax,
    QueryBankNorm,
)
from visavis.losses.scoring import score_direction
from visavis.models.batch_encoding import evaluation_mode
from visavis.models.inference import device_score
from visavis.models.retriever import Retriever
from visavis.training.runs.open_run import open_run, read_run_recipe

BANK_SIZE = 1_000
DEFAULTS = (InvertedSoftmax(), DualSoftmax(), QueryBankNorm(), CSLS())
TEMPERATURES, KS = (0.01, 0.02, 0.05, 0.1, 0.2), (1, 5, 10, 50)
LONG, SHORT = 0.8, 0.2
"""Quantiles of the numbers of words of long and short captions."""


class Study:
    """One run with its encoded validation and test split."""

    def __init__(self, run: Path):
        module, self.matcher = open_run(run, read_run_recipe(run), NoProgress())
        self.data, self.model = module.data, Retriever(self.matcher, module.processor)
        self.validation = module.recipe.evaluation.validation
        self.test = module.recipe.evaluation.test
        self.visual, self.image_of, self.scores = {}, {}, {}
        for name in (self.validation, self.test):
            split = self.data.split(name)
            with evaluation_mode(self.matcher):
                self.visual[name], text = module.encode(self.matcher, split)
            self.image_of[name] = split.image_of
            self.scores[name] = self.text_scores(name, text)
        plain = rank_scores(self.scores[self.test].T, range(len(split.images)), split.image_of)
        self.rsum = plain.metrics["rsum"]
        self.recalls = sum(plain.metrics[f"t2i_r{k}"] for k in (1, 5, 10))

    def text_scores(self, split: str, text: Encoded) -> torch.Tensor:
        """Scores of texts with the images of a split, ``[texts, images]``."""
        with evaluation_mode(self.matcher):
            return score_direction(device_score(self.matcher), self.visual[split], text, "t2i")

    def bank(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Scores of a bank with the images of both splits. Texts of unknown words only are left
        out.
        """
        known = []
        for text in texts:
            with suppress(VisavisError):
                self.model.unknown_words(text)
                known.append(text)
        if not known:
            return {}
        # Repeated texts are encoded once.
        different, row = np.unique(known, return_inverse=True)
        with evaluation_mode(self.matcher):
            encoded = self.model.encode_text(different.tolist())
        return {
            split: self.text_scores(split, encoded)[row] for split in (self.validation, self.test)
        }

    def gain(
        self,
        split: str,
        correction: Correction,
        bank: dict[str, torch.Tensor] | None,
        queries: Sequence[int] | None = None,
    ) -> BootstrapEstimate:
        """Gain of a correction in the sum of the recalls of text to image. None: the bank is the
        test queries.
        """
        rows = slice(None) if queries is None else queries
        scores, image_of = self.scores[split][rows], self.image_of[split][rows]
        bias = correction.fit([scores if bank is None else bank[split]])
        ranks = {
            name: {0: text_ranks(values, image_of)}
            for name, values in (("after", bias.correct(scores)), ("before", scores.double()))
        }
        return bootstrap_images(ranks).difference("after", "before")

    def best_of(
        self, corrections: Sequence[Correction], bank: dict[str, torch.Tensor]
    ) -> Correction:
        """The correction with the largest validation gain."""
        return max(corrections, key=lambda each: self.gain(self.validation, each, bank).value)


def text_ranks(scores: torch.Tensor, image_of: np.ndarray) -> QueryRanks:
    """Ranks of the images of texts. The ranks of texts for images are equal everywhere."""
    own = scores[torch.arange(len(scores)), torch.from_numpy(image_of)]
    images = np.unique(image_of)
    ranks = (scores >= own[:, None]).sum(1).numpy()
    return QueryRanks(np.ones(len(images), int), ranks, images, image_of)


def bank_is_empty(encoded: Sequence[dict[str, dict[str, torch.Tensor]]], name: str) -> bool:
    """Whether a model knows no word of a bank."""
    return any(name in banks and not banks[name] for banks in encoded)


def candidates(kind: Any) -> list[Correction]:
    """A correction with each temperature or k."""
    if kind is CSLS:
        return [CSLS(k=k) for k in KS]
    return [kind(temperature=temperature) for temperature in TEMPERATURES]


def sample(texts: Sequence[str], count: int = BANK_SIZE) -> list[str]:
    """Sample texts without replacement."""
    texts = list(texts)
    chosen = np.random.default_rng(0).choice(len(texts), min(count, len(texts)), replace=False)
    return [texts[number] for number in np.sort(chosen)]


def captions_of(name: str) -> list[str]:
    """All captions of a list in the format of Karpathy's splits."""
    images = storage.read_json(resolve_path(name), dict)["images"]
    return [sentence["raw"] for image in images for sentence in image["sentences"]]


def news() -> list[str]:
    """Sentences of news, which describe no photo."""
    with resolve_path("stsb/sts-train.tsv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row["sentence1"] for row in rows if row["genre"] == "main-news"]


def shifted_banks(captions: Sequence[str], words: Sequence[str]) -> dict[str, list[str]]:
    """Banks with another distribution than the test queries, by name."""
    random = np.random.default_rng(0)
    own, vocabulary = sample(captions), sorted({word for text in captions for word in text.split()})
    lengths = np.array([len(text.split()) for text in captions])
    short, long = np.quantile(lengths, (SHORT, LONG))
    by_length = list(zip(captions, lengths, strict=True))
    return {
        "own captions": own,
        "other domain: COCO": sample(captions_of("coco_5k_test_text/dataset_coco_5k_test.json")),
        "one caption 100 times": own[:1] * 100,
        "other domain: Flickr30K": sample(
            captions_of("flickr30k_text/dataset_flickr30k_val_test.json")
        ),
        "news": sample(news()),
        "random words": [" ".join(random.choice(vocabulary, 10)) for _ in own],
        "random letters": ["".join(random.choice(list("abcdefghij kl"), 40)) for _ in own],
        "single words": sample(vocabulary),
        "10 captions": own[:10],
        "20 captions 100 times": own[:20] * 100,
        "short captions": sample([text for text, length in by_length if length <= short]),
        "long captions": sample([text for text, length in by_length if length >= long]),
        f"only {words[0]}": sample([text for text in captions if words[0] in text.split()]),
        "half of it one caption": own[: len(own) // 2] + own[:1] * (len(own) // 2),
    }


def shifted_queries(captions: Sequence[str], words: Sequence[str]) -> dict[str, list[int]]:
    """Test queries with another distribution than the validation captions, by name."""
    lengths = np.array([len(text.split()) for text in captions])
    short, long = np.quantile(lengths, (SHORT, LONG))
    chosen = {
        "short queries": np.flatnonzero(lengths <= short),
        "long queries": np.flatnonzero(lengths >= long),
    }
    for word in words:
        has_word = np.array([word in text.split() for text in captions])
        chosen[f"queries with {word}"] = np.flatnonzero(has_word)
        chosen[f"queries without {word}"] = np.flatnonzero(~has_word)
    return {name: rows.tolist() for name, rows in chosen.items() if len(rows)}


def show(gains: Sequence[BootstrapEstimate]) -> str:
    """Mean over runs, the range over runs, and the mean interval over images."""
    values = [gain.value for gain in gains]
    ends = [(gain.interval.low, gain.interval.high) for gain in gains if gain.interval]
    interval = "none" if not ends else "{:+.1f} to {:+.1f}".format(*np.mean(ends, axis=0))
    return f"{np.mean(values):+5.1f} [{min(values):+.1f}, {max(values):+.1f}] ({interval})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--words", nargs="+", default=["dog", "man"])
    options = parser.parse_args()
    studies = [Study(run) for run in options.runs]
    first = studies[0]
    banks = shifted_banks(first.data.split("train").captions, options.words)
    encoded = [{name: each.bank(texts) for name, texts in banks.items()} for each in studies]
    rsum, recalls = (
        np.mean([getattr(each, name) for each in studies]) for name in ("rsum", "recalls")
    )
    print(
        f"{first.data.name}, {len(studies)} runs: RSUM {rsum:.1f}, text to image {recalls:.1f}",
        flush=True,
    )

    print("\nGain in RSUM on the test split: mean [runs] (95 % interval)")
    corrections: list[list[Correction]] = [[kind] * len(studies) for kind in DEFAULTS]
    for default in DEFAULTS:
        chosen = [
            study.best_of(candidates(type(default)), bank["own captions"])
            for study, bank in zip(studies, encoded, strict=True)
        ]
        if any(each != default for each in chosen):
            corrections.append(chosen)
    for row in corrections:
        label = " / ".join(dict.fromkeys(map(repr, row)))
        for name in [*list(banks)[:3], "test queries"]:
            if bank_is_empty(encoded, name):
                continue
            gains = [
                study.gain(study.test, correction, bank.get(name))
                for study, correction, bank in zip(studies, row, encoded, strict=True)
            ]
            kind = "transductive" if name == "test queries" else "fixed-bank"
            print(f"{label:60} {name:22} {kind:13} {show(gains)}", flush=True)

    print("\nCheck on validation, result on test: smallest gain in RSUM")
    print(f"{'shift':28} {'on':>7} {'smallest, on':>13} {'smallest, all':>14}")
    worst_on, settings = np.inf, 0
    is_own_on = {}
    for name in banks:
        on, every = [], []
        if bank_is_empty(encoded, name):
            print(f"{name:28} no known words")
            continue
        for number, (study, bank) in enumerate(zip(studies, encoded, strict=True)):
            for correction in DEFAULTS:
                checked = study.gain(study.validation, correction, bank[name])
                is_on = checked.interval is not None and checked.interval.low > 0
                gain = study.gain(study.test, correction, bank[name]).value
                every.append(gain)
                on += [gain] * is_on
                if name == "own captions":
                    is_own_on[number, correction] = is_on
        worst_on, settings = min([worst_on, *on]), settings + len(every)
        lowest = f"{min(on):+.1f}" if on else "off"
        print(f"{name:28} {len(on):3}/{len(every):<3} {lowest:>13} {min(every):+14.1f}", flush=True)
    for name, queries in shifted_queries(
        first.data.split(first.test).captions, options.words
    ).items():
        on, every = [], []
        for number, (study, bank) in enumerate(zip(studies, encoded, strict=True)):
            for correction in DEFAULTS:
                gain = study.gain(study.test, correction, bank["own captions"], queries).value
                every.append(gain)
                on += [gain] * is_own_on[number, correction]
        worst_on, settings = min([worst_on, *on]), settings + len(every)
        lowest = f"{min(on):+.1f}" if on else "off"
        label = f"{name} ({len(queries):,})"
        print(
            f"{label:28} {len(on):3}/{len(every):<3} {lowest:>13} {min(every):+14.1f}", flush=True
        )
    print(f"Smallest gain of a correction that is on, of {settings} settings: {worst_on:+.1f}")


if __name__ == "__main__":
    main()
