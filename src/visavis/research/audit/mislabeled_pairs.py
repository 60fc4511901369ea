"""Likely mislabeled pairs, found by cross-validation with models that were not trained on them.

The images are divided into folds, and copies of one image are in the same fold. A model is trained
on the other folds and scores the pairs of its fold. Each caption is also scored as a caption of a
random other image of the fold. These known mismatches show what mislabeled pairs look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.core.memory_budget import chunk_slices
from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.evaluation.metrics.ranking import count_before
from visavis.losses.objectives import Objective
from visavis.losses.pair_gradients import BYTES_PER_PAIR, pair_weights
from visavis.losses.scoring import max_query_rows
from visavis.losses.targets import Targets
from visavis.models import Matcher
from visavis.models.batch_encoding import evaluation_mode
from visavis.models.inference import score_all_pairs
from visavis.research.audit.audit_part import (
    CachedModel,
    Issue,
    cache_path,
    cached_tensors,
    count_steps,
    fit_model,
    max_epoch_factor,
)
from visavis.research.audit.caption_audit import (
    NoiseEstimate,
    mismatch_log_odds,
    sample_other_images,
    sibling_agreement,
    sibling_mean,
)
from visavis.training.recipes.data_module import DataModule
from visavis.training.runs.open_run import at_learned_scale

# Images that are ranked against one another. A limit makes ranks of small and large data sets
# comparable.
MAX_IMAGES = 1000
# A lower share of mislabeled pairs has little effect on a training. Compared with the lower bound,
# because some correct pairs look wrong.
SERIOUS_NOISE_RATIO = 0.01

_FIX = "Check the first ones and fix or remove wrong pairs. If there are too many to check, train with NoisySupervision()."


@dataclass(frozen=True)
class SuspectPair:
    """A pair that is likely mislabeled.

    Attributes:
        image: Name of the image.
        split: Split of the image.
        caption: Text of the caption.
        weight: Weight with which the objective would pull the pair together, both directions added.
        rank: Rank of the image for this caption, from 1.
        candidates: Number of ranked images.
        best_image: Name of the best-scored image.
        precision: Expected share of mislabeled pairs in the list down to this pair.
    """

    image: str
    split: str
    caption: str
    weight: float
    rank: int
    candidates: int
    best_image: str
    precision: float

    def __str__(self) -> str:
        better = f", better match: {self.best_image}" if self.rank > 1 else ""
        return f'{self.image} ({self.split}): "{self.caption}" (rank {self.rank:,} of {self.candidates:,}{better})'


@dataclass(frozen=True)
class MislabeledPairs:
    """Likely mislabeled pairs of a data set.

    Attributes:
        suspects: The pairs, the most suspicious first.
        captions: Number of captions.
        noise_ratio: Estimated share of mislabeled pairs.
        min_noise_ratio: Lower bound of this share, as in ``NoiseEstimate``.
        max_noise_ratio: Upper bound of this share with 95 % confidence.
        recall: Expected share of captions with a random image that would be listed.
        objective: Objective of the models.
        folds: Number of folds.
    """

    suspects: tuple[SuspectPair, ...]
    captions: int
    noise_ratio: float
    min_noise_ratio: float
    max_noise_ratio: float
    recall: float
    objective: str
    folds: int

    def issues(self) -> list[Issue]:
        """Report the suspects as one issue."""
        if not self.suspects:
            return []
        description = (
            f"about {self.noise_ratio:.1%} of the {self.captions:,} pairs "
            f"({self.min_noise_ratio:.1%} to {self.max_noise_ratio:.1%}) look "
            "mislabeled to models that were not trained on them. "
            f"{self.suspects[-1].precision:.0%} of the listed pairs are expected to be "
            f"mislabeled, and the list is expected to contain {self.recall:.0%} of all mislabeled "
            "pairs."
        )
        serious = self.min_noise_ratio >= SERIOUS_NOISE_RATIO
        return [
            Issue(
                "likely mislabeled pairs",
                len(self.suspects),
                description,
                _FIX,
                tuple(map(str, self.suspects)),
                serious,
            )
        ]


def find_mislabeled_pairs(
    data_module: DataModule,
    text_vectors: Tensor,
    copy_groups: np.ndarray,
    identity: Any,
    folds: int,
    progress: Progress,
) -> MislabeledPairs:
    """List the pairs that look more like known mismatches than like the data."""
    data = data_module.data
    parts = [
        model.result(progress)
        for model in fold_models(data_module, text_vectors, copy_groups, identity, folds)
    ]
    joined = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    order = np.argsort(joined["caption"])  # from the order of the folds to that of the captions
    pairs = {name: column[order] for name, column in joined.items()}
    scores, wrong = mismatch_log_odds(pairs["features"], pairs["mismatched_features"])
    estimate = NoiseEstimate.from_scores(scores, wrong)
    suspects = [
        SuspectPair(
            image=data.images[data.image_of[caption]].name,
            split=data.images[data.image_of[caption]].split,
            caption=data.captions[caption],
            weight=float(pairs["weight"][caption]),
            rank=int(pairs["rank"][caption]),
            candidates=int(pairs["candidates"][caption]),
            best_image=data.images[pairs["best_image"][caption]].name,
            precision=float(estimate.precision[caption]),
        )
        for caption in estimate.listed
    ]
    recall = float(estimate.recall[estimate.listed[-1]]) if suspects else 0.0
    objective = repr(data_module.recipe.phases[-1].objective)
    ratios = estimate.noise_ratio, estimate.min_noise_ratio, estimate.max_noise_ratio
    return MislabeledPairs(tuple(suspects), len(data.captions), *ratios, recall, objective, folds)


def fold_models(
    data_module: DataModule,
    text_vectors: Tensor,
    copy_groups: np.ndarray,
    identity: Any,
    folds: int,
) -> list[CachedModel[dict[str, Tensor]]]:
    """List the models of the cross-validation, each trained on all folds except one. Their results
    are `_pair_features` of the captions of that fold.
    """
    data = data_module.data
    seed = data_module.recipe.seed
    random = np.random.default_rng([seed, len(data.images)])
    # Copies of one image are in one fold, or a model would have seen them.
    fold_of = random.permutation(copy_groups.max() + 1)[copy_groups] % folds

    def make(fold: int) -> CachedModel[dict[str, Tensor]]:
        train = data.take(np.flatnonzero(fold_of != fold))
        held_out = np.flatnonzero(fold_of == fold)
        epoch_factor = min(1.0, max_epoch_factor(data_module.recipe, train))
        cache = cache_path("fold", identity, folds, fold, seed, fold_of.tolist(), epoch_factor)

        def score_fold(progress: Progress) -> dict[str, Tensor]:
            def on_step(_: Matcher, done: int, total: int) -> None:
                progress.update(f"fold {fold + 1} of {folds}", done, total, 0.0)

            matcher = fit_model(
                data_module, train, data.take(held_out), seed, on_step, epoch_factor
            )
            objective = at_learned_scale(data_module.recipe.phases[-1].objective, matcher)
            shuffled = np.random.default_rng([seed, 1]).permutation(held_out)
            # At most MAX_IMAGES images each.
            chunks = map(np.sort, np.array_split(shuffled, -(-len(held_out) // MAX_IMAGES)))
            with evaluation_mode(matcher):
                rows = [
                    _pair_features(
                        data_module, matcher, objective, data.take(chunk), text_vectors, copy_groups
                    )
                    for chunk in chunks
                ]
            return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

        steps = count_steps(data_module.recipe, train, epoch_factor)
        return CachedModel(
            cache.with_suffix(".safetensors"),
            steps,
            lambda progress: cached_tensors(cache, partial(score_fold, progress)),
        )

    return [make(fold) for fold in range(folds)]


def _pair_features(
    data_module: DataModule,
    matcher: Matcher,
    objective: Objective,
    fold: Dataset,
    text_vectors: Tensor,
    copy_groups: np.ndarray,
) -> dict[str, Tensor]:
    """Return features of all captions of a part, whose images are ranked against one another."""
    visual, text = data_module.encode(matcher, fold)
    # The clone is a normal tensor: weights need its gradient.
    scores = score_all_pairs(matcher, visual, text, data_module.recipe.memory or None).clone()
    image_of = torch.from_numpy(fold.image_of)
    other_image = torch.from_numpy(
        sample_other_images(fold.image_of, copy_groups[fold.image_rows], data_module.recipe.seed)
    )
    vectors = text_vectors[torch.from_numpy(fold.caption_rows)]
    features, weight, rank = _feature_columns(objective, scores, image_of, image_of, vectors)
    mismatched_features, _, _ = _feature_columns(objective, scores, other_image, image_of, vectors)
    # Features are [C, 8], with the own image and with a random other one. The other columns are
    # [C]: indices in the data set, ranks from 1, and weights with which the objective pulls the
    # pair together.
    return {
        "caption": torch.from_numpy(fold.caption_rows),
        "features": features,
        "mismatched_features": mismatched_features,
        "weight": weight,
        "rank": rank,
        "candidates": torch.full((len(image_of),), len(scores)),
        "best_image": torch.from_numpy(fold.image_rows)[scores.argmax(0)],
    }


def _feature_columns(
    objective: Objective, scores: Tensor, assigned: Tensor, image_of: Tensor, vectors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return features ``[C, 8]``, weights ``[C]`` and ranks ``[C]`` of each caption with its
    assigned image.
    """
    captions = torch.arange(len(assigned))
    weight = _pulling_weights(  # [C]
        objective,
        scores,
        Targets(query_ids=torch.arange(len(scores)), candidate_ids=assigned),
        assigned,
    )
    # [V, C], over the images of each text
    by_text = (scores - scores.mean(0)) / scores.std(0).clamp(min=1e-6)
    by_image = (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True).clamp(min=1e-6)
    pair = scores[assigned, captions]
    image_rank = 1 + count_before(scores.T, pair[:, None], "optimistic")[:, 0].long()  # [C]
    text_rank = torch.cat(
        [
            1 + count_before(scores[assigned[part]], pair[part, None], "optimistic")[:, 0].long()
            for part in chunk_slices(len(assigned), 1024)
        ]
    )
    # Weight of the pair, its score among the texts of the image and among the images of the text,
    # its relative ranks in both directions, agreement of the caption with its siblings and of these
    # with one another, and the mean score of the siblings.
    columns = [
        (1e-3 + weight).log(),  # a weight of 0 stays finite
        by_image[assigned, captions],
        by_text[assigned, captions],
        (image_rank / len(scores)).log(),
        (text_rank / scores.shape[1]).log(),
        *sibling_agreement(vectors, image_of, assigned).T,
        sibling_mean(by_text[image_of, captions], image_of, assigned),
    ]
    return torch.stack(columns, 1).float(), weight.float(), image_rank


def _pulling_weights(
    objective: Objective, scores: Tensor, targets: Targets, assigned: Tensor
) -> Tensor:
    """Return the weight with which the objective pulls each caption to its assigned image, both
    directions added.
    """
    captions = torch.arange(len(assigned))
    total = torch.zeros(len(assigned))
    scores, targets = objective.prepare(scores, targets)
    for rows in chunk_slices(len(scores), max_query_rows(scores.shape[1], BYTES_PER_PAIR)):
        block = -pair_weights(objective, scores[rows], targets[rows])
        # Captions whose image is in this block.
        inside = (assigned >= rows.start) & (assigned < rows.start + len(block))
        total[inside] += block[assigned[inside] - rows.start, captions[inside]]
    transposed = targets.T
    for rows in chunk_slices(len(assigned), max_query_rows(len(scores), BYTES_PER_PAIR)):
        block = -pair_weights(objective, scores.T[rows], transposed[rows])
        total[rows] += block[torch.arange(len(block)), assigned[rows]]
    return total.clamp(min=0)
