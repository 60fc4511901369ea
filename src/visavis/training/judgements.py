"""What a recipe's training learns of the judgements that people gave: the pairs, their sentences' features, and who tells them to objectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from visavis import spec, supervision
from visavis.data.dataset import Dataset
from visavis.data.judged import JudgedPairs
from visavis.data.judgements import last_words, read_judgements
from visavis.data.loader import Features
from visavis.errors import DataError, RecipeError
from visavis.models.caching import cache_features
from visavis.models.processor import Processor
from visavis.progress import Progress
from visavis.supervision import JudgedSupervision, PairSupervision
from visavis.training.recipe import Recipe


def with_judgements(recipe: Recipe) -> Recipe:
    """The recipe with phases that are told of its judgements, if it names any. Raises RecipeError for phases that are told otherwise."""
    if not recipe.data.judgements:
        return recipe
    phases = []
    for number, phase in enumerate(recipe.phases):
        told = spec.parse(phase.supervision, supervision.CATALOG)
        if told != PairSupervision() and not isinstance(told, JudgedSupervision):
            raise RecipeError(
                f"phase {number} is told who belongs together by {phase.supervision}, which knows nothing of judgements: "
                f'set phases.{number}.supervision="JudgedSupervision()", or train without --judgements.'
            )
        phases.append(phase if isinstance(told, JudgedSupervision) else phase.model_copy(update={"supervision": repr(JudgedSupervision())}))
    return recipe.model_copy(update={"phases": tuple(phases)})


def read_pairs(recipe: Recipe, data: Dataset, progress: Progress) -> JudgedPairs | None:
    """The judged pairs of the training images, said in a sentence; None for a recipe that names no judgements.

    Raises DataError for a file of another kind, or one with judgements of which none is of a sentence and a training image.
    """
    file = recipe.data.judgements
    if not file:
        return None
    lines = read_judgements(file)
    pairs = JudgedPairs.of(lines, data, on_progress=lambda done, total: progress.work("looking for judged pictures", done, total, 0.0))
    if not pairs and last_words(lines):
        raise DataError(
            f"{file} holds no judgement of a sentence and a training picture of {data.name}: {pairs.told_left_out} "
            "Name the data whose pictures were judged."
        )
    progress.say(f"{file}: {pairs or 'no judgement is in force in it, and the training is as without it.'}")
    return pairs


def sentence_features(pairs: JudgedPairs | None, data: Dataset, processor: Processor) -> Features | None:
    """The features of judged sentences, where the model reads features of captions. Raises RecipeError for stored ones."""
    if pairs is None or not pairs.sentences or processor.vocabulary is not None or processor.tokenizer is not None:
        return None
    if processor.text is None:
        raise RecipeError(
            "text.features are stored for the captions of the data alone, and judgements bring sentences of their own: name text.tower."
        )
    return cache_features(_of_texts(f"{data.name}-judged", pairs.sentences), processor.text)


def _of_texts(name: str, texts: Sequence[str]) -> Dataset:
    return Dataset(name, (), tuple(texts), np.zeros(len(texts), np.int64))
