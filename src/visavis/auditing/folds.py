"""What models that have never seen a pair say of it: cross-validation over pictures, each caption beside its own and beside another one.

The pictures are divided into folds, copies of one picture always together. A model is trained on the others and scores those of the
fold; of each caption it is noted how it looks beside its own picture, and, to know how wrong pairs look, beside another one of the fold,
drawn at random, in the place of one of that picture's captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis import objectives
from visavis.auditing.fitting import Fit
from visavis.auditing.remembered import place, remembered_tensors
from visavis.auditing.siblings import Siblings, mean_of_others, other_pictures
from visavis.data.dataset import Dataset
from visavis.diagnosis import pair_weights
from visavis.diagnosis.walk import as_trained
from visavis.diagnosis.weights import HELD
from visavis.memory import spans
from visavis.models.base import evaluating
from visavis.models.scoring import score_all
from visavis.objectives import Objective
from visavis.progress import Progress
from visavis.scoring import rows_at_once
from visavis.targets import Targets
from visavis.training.data_module import DataModule

MOST = 1000
"""Pictures that are scored against one another at most: ranks in larger and smaller data sets then mean the same."""
FACTS = ("weight", "visual_score", "text_score", "image_rank", "text_rank", "agreement", "siblings_agreement", "siblings_score")
"""What is known of a pair, in columns: the log of the objective's weight; its score, standardized over the texts of the image and over
the images of the text; the logs of its shares of ranks; how the other captions of the image agree with it and with one another, and their mean score."""


@dataclass(frozen=True)
class Held:
    """facts, other ``[C, 8]``: of each caption beside its own picture, and beside another one. weight, rank, candidates ``[C]``: how much
    the objective would pull it to its own picture, its rank among so many pictures. better ``[C]``: the picture that it scores highest with.
    """

    facts: np.ndarray
    other: np.ndarray
    weight: np.ndarray
    rank: np.ndarray
    candidates: np.ndarray
    better: np.ndarray


def held_out_facts(
    data_module: DataModule, data: Dataset, texts: Tensor, groups: np.ndarray, identity: Any, folds: int, seed: int, progress: Progress
) -> Held:
    """The facts of all captions. texts ``[C, D]``: unit vectors of captions. groups ``[N]``: equal for copies of one picture."""
    random = np.random.default_rng([seed, len(data.images)])
    fold_of = random.permutation(groups.max() + 1)[groups] % folds
    parts = list[dict[str, Tensor]]()
    for fold in range(folds):
        held_out = np.flatnonzero(fold_of == fold)

        def compute(fold: int = fold, held_out: np.ndarray = held_out) -> dict[str, Tensor]:
            def on_step(done: int, total: int) -> None:
                progress.work(f"fold {fold + 1} of {folds}", done, total, 0.0)

            rest = data.take(np.flatnonzero(fold_of != fold))
            matcher = Fit(data_module, seed, on_step=on_step).run(rest, data.take(held_out))
            objective = as_trained(objectives.parse(data_module.recipe.phases[-1].objective), matcher)
            chunks = np.array_split(random_order(held_out, seed), -(-len(held_out) // MOST))
            with evaluating(matcher):
                rows = [_facts_of(data_module, matcher, objective, data.take(chunk), texts, groups, seed) for chunk in map(np.sort, chunks)]
            return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

        parts.append(remembered_tensors(place("fold", identity, folds, fold, seed, fold_of.tolist()), compute))
    joined = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    order = np.argsort(joined.pop("caption"))
    return Held(**{name: column[order] for name, column in joined.items()})


def random_order(items: np.ndarray, seed: int) -> np.ndarray:
    shuffled: np.ndarray = np.random.default_rng([seed, 1]).permutation(items)
    return shuffled


def _facts_of(
    data_module: DataModule, matcher: Any, objective: Objective, part: Dataset, texts: Tensor, groups: np.ndarray, seed: int
) -> dict[str, Tensor]:
    """The facts of all captions of a part of a data set, whose pictures are scored against one another."""
    visual, text = data_module.encode(matcher, part)
    scores = score_all(matcher, visual, text, data_module.recipe.memory or None).clone()  # weights need its gradient
    own = torch.from_numpy(part.image_of)
    other = torch.from_numpy(other_pictures(part.image_of, groups[part.image_rows], seed))
    vectors = texts[torch.from_numpy(part.caption_rows)]
    facts, extras = _columns(objective, scores, own, own, vectors)
    return {
        "caption": torch.from_numpy(part.caption_rows),
        "facts": facts,
        "other": _columns(objective, scores, other, own, vectors)[0],
        "weight": extras[0],
        "rank": extras[1],
        "candidates": torch.full((len(own),), len(scores)),
        "better": torch.from_numpy(part.image_rows)[scores.argmax(0)],
    }


def _columns(objective: Objective, scores: Tensor, image: Tensor, own: Tensor, vectors: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The facts ``[C, 8]`` of each caption beside ``image [C]``, and its weight and rank. own ``[C]``: the pictures that captions stand beside."""
    captions = torch.arange(len(image))
    weight = _weights(objective, scores, Targets(query_ids=torch.arange(len(scores)), candidate_ids=image), image)
    by_text = (scores - scores.mean(0)) / scores.std(0).clamp(min=1e-6)
    by_image = (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True).clamp(min=1e-6)
    pair = scores[image, captions]
    rank = 1 + (scores > pair).sum(0)
    text_rank = torch.cat([1 + (scores[image[part]] > pair[part, None]).sum(1) for part in spans(len(image), 1024)])
    siblings = Siblings.of(vectors, own, image)
    columns = [
        (1e-3 + weight).log(),
        by_image[image, captions],
        by_text[image, captions],
        (rank / len(scores)).log(),
        (text_rank / scores.shape[1]).log(),
        siblings.agreement,
        siblings.among,
        mean_of_others(by_text[own, captions], own, image),
    ]
    return torch.stack(columns, 1).float(), (weight.float(), rank)


def _weights(objective: Objective, scores: Tensor, targets: Targets, image: Tensor) -> Tensor:
    """How much the objective pulls each caption and ``image [C]`` together, both directions added."""
    captions, total = torch.arange(len(image)), torch.zeros(len(image))
    scores, targets = objective.prepare(scores, targets)
    for rows in spans(len(scores), rows_at_once(scores.shape[1], HELD)):
        block = -pair_weights(objective, scores[rows], targets[rows])
        inside = (image >= rows.start) & (image < rows.start + len(block))
        total[inside] += block[image[inside] - rows.start, captions[inside]]
    turned = targets.T
    for rows in spans(len(image), rows_at_once(len(scores), HELD)):
        block = -pair_weights(objective, scores.T[rows], turned[rows])
        total[rows] += block[torch.arange(len(block)), image[rows]]
    return total.clamp(min=0)
