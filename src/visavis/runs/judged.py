"""Runs and what people judged: how the best model of a run answers judged sentences."""

from __future__ import annotations

from pathlib import Path

import torch

from visavis.data.judged import JudgedPairs
from visavis.data.judgements import read_judgements
from visavis.errors import DataError, RunError
from visavis.evaluation.judged import JudgedAnswer, JudgedTest
from visavis.models.average import Average, joined
from visavis.models.encoding import device_of
from visavis.models.retriever import Retriever
from visavis.models.scoring import score_all
from visavis.progress import Progress, Silent
from visavis.runs.folder import open_peer, open_run, recipe_of
from visavis.training.inputs import open_data
from visavis.training.recipe import Recipe


def read_judged_test(file: Path, recipe: Recipe, progress: Progress) -> JudgedTest:
    """What a file of judgements says of the test split of a recipe. Raises DataError for a file of another kind, and for one of which no
    sentence fits an image of that split.
    """
    data, name = open_data(recipe, progress, skip_bad=recipe.data.skip_bad), recipe.evaluation.test
    pairs = JudgedPairs.of(
        read_judgements(file), data, name, lambda done, total: progress.work("looking for judged pictures", done, total, 0.0)
    )
    test = JudgedTest(pairs, tuple(image.name for image in data.images if image.split == name))
    if not test.asked:
        left = f": {pairs.told_left_out}" if pairs.left_out else "."
        raise DataError(
            f"{file} holds no sentence that an image of split {name} of {data.name} fits{left} Judge some of these images on the page."
        )
    return test


@torch.inference_mode()
def judged_answers(folder: Path, test: JudgedTest) -> list[JudgedAnswer]:
    """How the best model of a run, or both of its networks where its recipe averages them, answers each sentence that something fits.

    Raises RunError where the run's test split has other images.
    """
    recipe = recipe_of(folder)
    data_module, matcher = open_run(folder, recipe, Silent())
    split = data_module.data.split(recipe.evaluation.test).first_captions(1)
    if tuple(image.name for image in split.images) != test.images:
        raise RunError(
            f"{folder} is tested on other images than {test.images[0]} and those beside it: compare on one data set to ask what people judged."
        )
    networks = [matcher, open_peer(folder, matcher)] if recipe.evaluation.average else [matcher]
    items = [
        (data_module.encode(network, split)[0], Retriever(network, data_module.processor).encode_text([*test.asked]))
        for network in networks
    ]
    together = Average(networks).to(device_of(matcher)) if len(networks) > 1 else matcher
    visual, text = map(joined, zip(*items, strict=True)) if len(networks) > 1 else items[0]
    scores = score_all(together.eval(), visual, text, recipe.memory or None).T
    return [JudgedAnswer.of(row.numpy(), *said) for row, said in zip(scores, test.asked.values(), strict=True)]
