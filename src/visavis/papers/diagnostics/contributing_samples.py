"""Contributing samples: how many negatives push a query, how strongly, and which queries are not
moved.

Source: Bleeker and de Rijke, "Do Lessons from Metric Learning Generalize to Image-Caption
Retrieval?" (COCOS, 2022), section 4. Here for any objective, from the weights of its pairs. A count
depends on the epsilon from which a weight counts. The effective number of negatives does not.

COCOS, or its released code, has special counting rules for Triplet and SmoothAP. For all other
objectives, pair weights are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from visavis.losses.auto_scale import number
from visavis.losses.objectives import Objective, SmoothAP, Triplet
from visavis.losses.pair_gradients import pair_weights
from visavis.losses.pair_summaries import NEG_INF, find_positive_pairs
from visavis.losses.targets import Targets

RELEASED_CAPTIONS_PER_IMAGE: dict[type[Objective], int] = {Triplet: 1, SmoothAP: 5}
"""Captions per image in the released code of COCOS, where it is a constant, for the objectives with
a special counting rule.
"""

Semantics = Literal["paper", "reference"]
"""Counts as defined in the COCOS paper, or as in its released code. Both count triplets of SmoothAP
without the factor 1 / tau, as table 4 of the paper, unless "paper" is combined with ``with_slope``.
"""


def released_targets(objective: Objective, images: int, texts: int) -> Targets | None:
    """Build the targets of a batch as in the released code of COCOS, which identifies positives by
    position. None if the code has no counting rule for it.
    """
    captions_per_image = RELEASED_CAPTIONS_PER_IMAGE.get(type(objective))
    if captions_per_image is None or texts != captions_per_image * images:
        return None
    ids = torch.arange(images)
    return Targets(query_ids=ids, candidate_ids=ids.repeat_interleave(captions_per_image))


def smooth_ap_counts(
    scores: Tensor,
    targets: Targets,
    *,
    tau: float = 0.01,
    epsilon: float = 0.01,
    with_slope: bool = False,
) -> Tensor:
    """Count the contributing samples of SmoothAP by the rule of COCOS (eq. 13): the mean over the
    positives of each query, ``[Q]``.
    """
    # $(1 / |P|) sum_{i in P} #{j != i: sim(s_j - s_i) / R_i^2 > epsilon}$ with
    # $R_i = 1 + sum_j sigmoid((s_j - s_i) / tau)$ and $sim(d) = sigma (1 - sigma)$, where
    # $sigma = sigmoid(d / tau)$. It drops two factors of the gradient and counts triplets, so it is
    # not a count of pair weights.
    query, candidate = targets.positive.nonzero(as_tuple=True)  # [P]
    # Ignored pairs are not candidates.
    is_labeled = targets.positive | targets.negative
    # With the slope, sim is divided by tau, as eqs. 12 and 13 are printed: the derivative of eq. 7.
    # The released code, and so table 4 of the paper, does not divide it.
    counts = _count_triplets(
        scores[query].masked_fill(~is_labeled[query], NEG_INF),
        candidate,
        tau,
        epsilon * (tau if with_slope else 1),
    )
    positives = targets.positive.sum(1).clamp(min=1)
    return scores.new_zeros(len(scores)).index_add_(0, query, counts.to(scores)) / positives


def released_smooth_ap_counts(
    scores: Tensor, *, tau: float = 0.01, epsilon: float = 0.01
) -> Tensor:
    """Count text queries of SmoothAP as the released code of COCOS does, ``[T, V]`` to ``[T]``."""
    texts, images = scores.shape
    captions_per_image = RELEASED_CAPTIONS_PER_IMAGE[SmoothAP]
    # For text q it uses images 5 q to 5 q + 4 as positives, as if texts were images, and adds their
    # counts. The image of text q is q // 5. No text from V / 5 on is ever counted, hence "without a
    # gradient" in table 4 of the paper.
    candidate = torch.arange(min(captions_per_image * texts, images), device=scores.device)
    query = candidate // captions_per_image
    counts = _count_triplets(scores[query], candidate, tau, epsilon)
    return scores.new_zeros(texts).index_add_(0, query, counts.to(scores))


def released_triplet_counts(
    scores: Tensor, targets: Targets, *, margin: float = 0.2
) -> dict[str, Tensor]:
    """Count the contributing samples of Triplet as the released code of COCOS does: "i2t" ``[V]``
    and "t2i" ``[T]``.
    """
    # The negatives of each positive pair whose hinge is above 0.
    image_to_text = find_positive_pairs(scores, targets)
    text_to_image = find_positive_pairs(scores.T, targets.T)
    active = [
        (margin + pairs.scores[pairs.query] - pairs.positive[:, None] > 0)
        & pairs.negative[pairs.query]
        for pairs in (image_to_text, text_to_image)
    ]
    by_query = scores.new_zeros(len(scores)).index_add_(
        0, image_to_text.query, active[0].sum(1).to(scores)
    )
    # For text queries it adds the hinges along the wrong axis: in the row of an image, not in the
    # column of a text.
    return {"i2t": by_query, "t2i": active[1].sum(0).to(scores)}


def _count_triplets(scores: Tensor, positive: Tensor, tau: float, epsilon: float) -> Tensor:
    """How many entries j of each row have $sim(s_j - s_i) / R_i^2$ above epsilon for its positive
    i: ``[N, C], [N] -> [N]``.
    """
    # The positive itself gets -inf, so its sigmoid is 0.
    gap = (scores - scores.gather(1, positive[:, None])).scatter(1, positive[:, None], NEG_INF)
    step = (gap / tau).sigmoid()
    rank = 1 + step.sum(1, keepdim=True)  # [N, 1]
    return (step * (1 - step) / rank**2 > epsilon).sum(1)


@dataclass(frozen=True)
class ContributingSamples:
    """Contributions to the gradients of the queries of one direction of a batch. All tensors have
    shape ``[Q]``. Weights are absolute values.

    Attributes:
        count: Number of negatives with a weight above epsilon, C^q of the paper.
        push: Sum of their weights, W^-.
        push_below_epsilon: Sum of the weights of the negatives below epsilon.
        pull: Sum of the weights of the positives, W^+.
        effective: `effective_number` of negatives from all weights, for any epsilon.
    """

    count: Tensor
    push: Tensor
    push_below_epsilon: Tensor
    pull: Tensor
    effective: Tensor

    @property
    def in_batch(self) -> float:
        """C^B: sum of the counts of all queries."""
        return self.count.sum().item()

    @property
    def idle(self) -> int:
        """C^0: number of queries that no negative moves."""
        return int((self.count == 0).sum())

    @property
    def per_moved(self) -> float:
        """Mean count of the queries that have one, as in tables 2 and 4 of the paper. NaN if there
        are none.
        """
        return self.in_batch / moved if (moved := len(self.count) - self.idle) else float("nan")

    @property
    def per_query(self) -> float:
        """Mean count of all queries, as in table 3 of the paper."""
        return self.count.double().mean().item()

    @property
    def effective_negatives(self) -> float:
        """Mean effective number over the queries whose negatives have any weight. NaN if there are
        none.
        """
        return self.effective[self.effective > 0].double().mean().item()


def effective_number(weights: Tensor) -> Tensor:
    """Compute the effective number of candidates that share the weight of a query.

    Formula:
        $(sum_j w_j)^2 / (sum_j w_j^2)$: 1 if one candidate has all the weight, n if n candidates
        share it equally. A factor on a row changes nothing.

    Args:
        weights: Weights of at least 0, shape ``[Q, C]``.

    Returns:
        Effective number of each query, shape ``[Q]``. 0 for a query without weight.

    Source:
        Kish, Survey Sampling (1965), the effective sample size. For shares, the inverse
        participation ratio, or Hill number of order 2.

    Example:
        >>> effective_number(torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.2, 0.0], [0.0, 0.0, 0.0]]))
        tensor([1., 2., 0.])
    """
    total = weights.sum(1)
    # Shares first: squares of tiny weights would underflow.
    concentration = (weights / total[:, None]).square().sum(1)
    return torch.where(total > 0, 1 / concentration, 0.0)


def contributing_samples(
    objective: Objective, scores: Tensor, targets: Targets, *, epsilon: float = 0.01
) -> ContributingSamples:
    """Count the contributing samples of one direction by pair weights of more than epsilon."""
    return count_contributing(pair_weights(objective, scores, targets), targets, epsilon=epsilon)


def count_contributing(
    weights: Tensor, targets: Targets, *, epsilon: float = 0.01
) -> ContributingSamples:
    """Count the contributing samples of one direction from known weights ``[Q, C]``."""
    size = weights.abs()
    push = size.masked_fill(~targets.negative, 0.0)  # [Q, C]
    above = push > epsilon
    return ContributingSamples(
        above.sum(1).to(size),
        push.masked_fill(~above, 0.0).sum(1),
        push.masked_fill(push >= epsilon, 0.0).sum(1),
        size.masked_fill(~targets.positive, 0.0).sum(1),
        effective_number(push),
    )


def contributing_by_epsilon(
    objective: Objective,
    scores: Tensor,
    targets: Targets,
    epsilons: Sequence[float],
    *,
    semantics: Semantics = "paper",
    with_slope: bool = False,
) -> list[dict[str, ContributingSamples]]:
    """Count the contributing samples of both directions, "i2t" and "t2i", for each epsilon, with
    one differentiation.
    """
    directions = {"i2t": (scores, targets), "t2i": (scores.T, targets.T)}
    weights = {
        direction: pair_weights(objective, *inputs) for direction, inputs in directions.items()
    }
    results = []
    for epsilon in epsilons:
        samples = {
            direction: count_contributing(weights[direction], inputs[1], epsilon=epsilon)
            for direction, inputs in directions.items()
        }
        # Special counting rules of COCOS or its released code.
        counts = {direction: each.count for direction, each in samples.items()}
        if type(objective) is Triplet and semantics == "reference":
            counts = released_triplet_counts(scores, targets, margin=number(objective.margin))
        elif type(objective) is SmoothAP:
            tau = number(objective.tau)
            released = semantics == "reference"
            counts = {
                direction: smooth_ap_counts(
                    *inputs, tau=tau, epsilon=epsilon, with_slope=with_slope and not released
                )
                for direction, inputs in directions.items()
            }
            if released:
                counts["t2i"] = released_smooth_ap_counts(scores.T, tau=tau, epsilon=epsilon)
        results.append({way: replace(each, count=counts[way]) for way, each in samples.items()})
    return results
