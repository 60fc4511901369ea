"""Evaluation of runs: the best model of a run on a split, or the mean of the scores of several
runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core.blocking import Score
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RunError, SpecError, format_value
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.data.equal_texts import unseen_texts
from visavis.evaluation import Evaluation
from visavis.evaluation.protocols import get_protocols
from visavis.evaluation.trec import write_trec
from visavis.losses.corrections import CorrectedScore, Correction, QueryBank
from visavis.losses.scoring import select_items
from visavis.models.base import Matcher
from visavis.models.batch_encoding import device_of, evaluation_mode
from visavis.models.inference import ScoreEnsemble, device_score, join_member_encodings
from visavis.training.evaluation.evaluate_dataset import evaluate_dataset, rank_dataset
from visavis.training.evaluation.ranked_split import (
    first_images,
    select_captions,
    with_distractors,
    without_images,
)
from visavis.training.evaluation.result_sections import ResultSection
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.published_tables import with_published
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.open_run import (
    expand_ensembles,
    open_peer_network,
    open_run,
    pretrained_dual_encoder,
    read_ensemble_recipe,
    read_run_recipe,
)

# Keys of recipes that options of an evaluation replace.
EVALUATION_OPTIONS = {
    "evaluation.test": "split",
    "evaluation.protocol": "protocol",
    "evaluation.sections": "section",
}
TEST_QUERIES = "queries"
"""Bank of a correction that consists of the test queries."""
MAX_BANK = 10_000
"""Maximum number of captions of a split in the bank of a correction."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of an evaluation. None: as in the recipes of the runs.

    Attributes:
        protocol: Protocol or protocols.
        split: Name of the split. None: the test split.
        data: Data set. None: the runs' own.
        sections: Further parts of the result.
        memory: Memory limit of score blocks.
        average_networks: Whether to average both networks of a run.
        max_images: Evaluate the first images of the split only. 0: all.
        trec: Folder for TREC files of both directions. One subfolder per protocol if there are
            several. None: not written.
        distractors: Images and texts that are candidates and not queries.
        correction: Correction of the scores. None: there is none.
        bank: Queries that the correction learns from: the name of another split, texts, or
            ``TEST_QUERIES``.
    """

    protocol: str | Sequence[str] | None = None
    split: str | None = None
    data: str | None = None
    sections: Sequence[ResultSection] | None = None
    memory: MemoryLimit = None
    average_networks: bool | None = None
    max_images: int = 0
    trec: Path | None = None
    distractors: Sequence[Dataset] = ()
    correction: Correction | None = None
    bank: str | Sequence[str] = "train"


def read_run_recipes(
    folders: Sequence[Path], data: str | None = None, memory: MemoryLimit = None
) -> dict[Path, Recipe]:
    """Read the recipes of runs and of the members of ensembles, by folder."""
    if not folders:
        raise RunError("runs: expected at least one run folder, got none. Name a run folder.")
    recipes = {
        folder: read_run_recipe(folder, data, memory) for folder in expand_ensembles(folders)
    }
    # A pretrained model without data uses the data set of the first run that has one.
    default = next((recipe.data.path for recipe in recipes.values() if recipe.data.path), None)
    return {
        folder: recipe if recipe.data.path else read_run_recipe(folder, default, memory)
        for folder, recipe in recipes.items()
    }


def common_value(recipes: Mapping[Path, Recipe], key: str, override: Any) -> Any:
    """Return ``override``, or else the value of a key that the recipes of all trained runs share."""
    if override is not None:
        return override
    trained = {folder: recipe for folder, recipe in recipes.items() if recipe.phases} or recipes
    values = {folder: reduce(getattr, key.split("."), recipe) for folder, recipe in trained.items()}
    first, value = next(iter(values.items()))
    for folder, other in values.items():
        if other != value:
            raise RunError(
                f"{key}: expected one value for all runs, got {value!r} in {first} and {other!r} "
                f"in {folder}. "
                f"Choose one with --{EVALUATION_OPTIONS[key]}."
            )
    return value


def check_same_captions(splits: Mapping[Path, Dataset]) -> None:
    """Check that all runs are evaluated on the same captions of the same images, in the same order."""
    first, expected = next(iter(splits.items()))
    for folder, split in splits.items():
        numbers, expected_numbers = (
            [len(each.unpaired_images), len(each.unpaired_texts)] for each in (split, expected)
        )
        if numbers != expected_numbers:
            raise RunError(
                f"{folder}: expected the {expected_numbers[0]:,} images without captions and "
                f"{expected_numbers[1]:,} texts without images of {first}, got {numbers[0]:,} and "
                f"{numbers[1]:,}. Name one data set for all with --data."
            )
        # Names of images are not compared, because they differ between formats of the same data.
        if split.captions != expected.captions or not np.array_equal(
            split.image_of, expected.image_of
        ):
            raise RunError(
                f"{folder}: expected the same images and captions as {first}, got "
                f"{_difference(split, expected)}. Name runs on the same "
                "data and split, or one data set for all with --data."
            )


def evaluate_runs(
    folders: Sequence[Path], options: EvaluationOptions, progress: Progress
) -> Evaluation:
    """Evaluate the best model of a run, or the mean of the scores of several runs, each of which
    encodes its own inputs.
    """
    recipes = read_run_recipes(folders, options.data, options.memory)
    split = common_value(recipes, "evaluation.test", options.split)
    is_own_test = options.data is None and all(
        recipe.evaluation.test == split for recipe in recipes.values()
    )
    # Other data may have no such protocol as the recipe's.
    protocol = options.protocol or (None if is_own_test else "plain")
    protocols = get_protocols(common_value(recipes, "evaluation.protocol", protocol))
    sections = common_value(recipes, "evaluation.sections", options.sections)
    for one in protocols:
        if options.distractors and not one.takes_unpaired:
            raise SpecError(
                f"--distractors: expected a protocol that takes other candidates, got {one.name}, "
                "which fixes them. Pass --protocol plain."
            )

    # The same items for all runs.
    opened = {folder: open_run(folder, recipe, progress) for folder, recipe in recipes.items()}
    splits = {
        folder: select_captions(
            first_images(data_module.data.split(split), options.max_images), protocols
        )
        for folder, (data_module, _) in opened.items()
    }
    for added in options.distractors:
        for folder, (data_module, _) in opened.items():
            splits[folder], left_out = with_distractors(splits[folder], data_module.data, added)
        for kind, count in left_out.items():
            if count:
                progress.message(f"{added.name}: left out {count:,} {kind} that the split has, too")
    check_same_captions(splits)

    # All networks encode them. One run may have two networks.
    members = list[tuple[DataModule, Matcher, Dataset]]()
    for folder, (data_module, matcher) in opened.items():
        members.append((data_module, matcher, splits[folder]))
        average = options.average_networks
        if recipes[folder].evaluation.average_networks if average is None else average:
            members.append((data_module, open_peer_network(folder, matcher), splits[folder]))
    scorer, visual, text = encode_by_networks(members)

    ranked = next(iter(splits.values()))
    limit = next(iter(recipes.values())).memory or None
    score: Score = device_score(scorer)
    name = "+".join(os.path.basename(os.path.realpath(folder)) for folder in folders)
    if (correction := options.correction) is not None:
        bank = _encode_bank(members, options.bank, split, progress)
        score = CorrectedScore(score, correction, bank)
        # The files of --trec have no other place that names the correction.
        name += f"+{type(correction).__name__}-{score.kind}"
    with evaluation_mode(scorer):
        if (trec := options.trec) is not None:
            for one in protocols:
                lists = rank_dataset(visual, text, score, ranked, one, memory=limit)
                write_trec(trec / one.name if len(protocols) > 1 else trec, name, lists)
        result = evaluate_dataset(
            visual, text, score, ranked, protocols, sections=sections, memory=limit
        )
    if not is_own_test or len(folders) > 1:
        return result
    return with_published(result, read_ensemble_recipe(folders[0]) or recipes[folders[0]])


def _encode_bank(
    members: Sequence[tuple[DataModule, Matcher, Dataset]],
    bank: str | Sequence[str],
    evaluated: str,
    progress: Progress,
) -> QueryBank | None:
    """Encode the queries that a correction learns from by the networks of an evaluation. None: the
    test queries.
    """
    if bank == TEST_QUERIES:
        return None
    if bank == evaluated:
        raise RunError(
            f"--bank: expected another split than the evaluated {evaluated}, got the same. Pass "
            f"--bank {TEST_QUERIES} for a transductive correction."
        )
    banks = list[tuple[DataModule, Matcher, Dataset]]()
    if isinstance(bank, str):
        for module, network, _ in members:
            split = replace(module.data.split(bank), unpaired=())
            count = max(1, MAX_BANK * len(split.images) // max(len(split.captions), 1))
            if count < len(split.images):
                sample = np.random.default_rng(0).choice(len(split.images), count, replace=False)
                split = split.take(np.sort(sample))
            banks.append((module, network, split))
        if any(split.captions != banks[0][2].captions for _, _, split in banks):
            raise RunError(
                f"--bank: expected the same captions of {bank} for all runs, got others. Their seeds "
                "or recipes took other images. Pass "
                f"--bank {TEST_QUERIES}, or a file of texts."
            )
        _, images, texts = encode_by_networks(banks)
        return QueryBank(
            f"{len(texts):,} captions and {len(images):,} images of {bank}", texts, images
        )
    unseen = exclude_texts(bank, members[0][2].captions, progress)
    for module, network, split in members:
        # One item of the split, because encoders read whole data sets.
        first = split.take(np.arange(1))
        banks.append((module, network, replace(first, unpaired=(without_images("bank", unseen),))))
    _, _, texts = encode_by_networks(banks)
    texts = select_items(texts, slice(len(texts) - len(unseen), None))
    return QueryBank(f"{len(unseen):,} texts", texts)


def exclude_texts(bank: Sequence[str], queries: Sequence[str], progress: Progress) -> list[str]:
    """Leave out the texts of a bank that are test queries, so that it is known without them."""
    unseen = unseen_texts(bank, queries)
    if len(unseen) < len(bank):
        progress.message(
            f"--bank: left out {len(bank) - len(unseen):,} texts that are test queries."
        )
    if not unseen:
        raise DataError(
            "--bank: expected texts that are not test queries, got none. Pass other texts, or "
            f"--bank {TEST_QUERIES} for a transductive correction."
        )
    return unseen


def encode_by_networks(
    networks: Sequence[tuple[DataModule, Matcher, Dataset]],
) -> tuple[Matcher, Encoded, Encoded]:
    """Encode the same images and captions, with unpaired ones, by one or several networks."""
    encoded = [
        data_module.encode_gallery(network, split) for data_module, network, split in networks
    ]
    if len(networks) == 1:
        return networks[0][1], *encoded[0]
    scorer = ScoreEnsemble([network for _, network, _ in networks]).to(device_of(networks[0][1]))
    visual, text = map(join_member_encodings, zip(*encoded, strict=True))
    return scorer, visual, text


def with_base_model(
    result: Evaluation, folders: Sequence[Path], options: EvaluationOptions, progress: Progress
) -> Evaluation:
    """Add the result of the pretrained model that the runs fine-tuned, on the same items and
    protocols.
    """
    recipes = read_run_recipes(folders, options.data, options.memory)
    models = {pretrained_dual_encoder(recipe) for recipe in recipes.values()}
    pretrained = next(iter(models)) if len(models) == 1 else None
    if pretrained is None:
        given = " and ".join(sorted(f"runs of {model or 'another kind'}" for model in models))
        raise RunError(
            f"{', '.join(map(str, folders))}: expected runs that fine-tune one and the same CLIP "
            f"or SigLIP model, got {given}. Remove --pretrained."
        )
    of_base = replace(
        options,
        protocol=list(result.by_protocol),
        split=common_value(recipes, "evaluation.test", options.split),
        data=options.data or next(iter(recipes.values())).data.path,
        sections=(),
        trec=None,
    )
    return replace(result, pretrained=evaluate_runs([Path(pretrained)], of_base, progress))


def _difference(split: Dataset, expected: Dataset) -> str:
    """Describe the first difference of two splits."""
    sizes = [
        f"{len(part.images):,} images with {len(part.captions):,} captions"
        for part in (split, expected)
    ]
    if sizes[0] != sizes[1]:
        return f"{sizes[0]} instead of {sizes[1]}"
    pairs = zip(split.captions, expected.captions, split.image_of, expected.image_of, strict=True)
    number, caption, other = next(
        (i, one, two)
        for i, (one, two, *images) in enumerate(pairs)
        if one != two or images[0] != images[1]
    )
    if caption == other:
        return f"caption {number} of another image"
    return f"caption {number} {format_value(caption)} instead of {format_value(other)}"
