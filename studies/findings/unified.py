"""Unified loss of pair similarity

Li, Guo, Wang, Feng, Hwang, Du: "Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval" (2022). No code was released.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from findings.base import (
    Shown,
    digits,
    embeddings,
    gradient,
    leaf,
    negatives,
    numbers,
    relative_error,
    scores_of,
    tangent,
    unit_rows,
)


def eq_2_arg_max() -> Shown:
    """The hardest negatives are printed as numbers and used as items.

    Kind: misprint
    Where: Eqs. 2 and 22.
    Found: $T^_i = max_j s(V_i, T_j)$ and $V^_i = max_j s(V_j, T_i)$, over j other than i.
    Correct: ``arg max``, and the item it selects: eqs. 1 and 21 take $s(V_i, T^_i)$, the similarity of an image and a text. $s^_ij$
        of eqs. 25 and 27 would be the maximum itself.
    Effect: A slip of notation. The meaning is not in doubt.
    visavis: ``TripletHN`` takes the largest score of a negative.
    """
    images, texts = embeddings(12, seed=0)
    others = negatives(images @ texts.T)
    named = (images * texts[others.argmax(1)]).sum(1)
    return Shown(
        relative_error(named, others.amax(1)) < 1e-12,
        f"first image: max_j s = {digits(others[0].max())}, a number. arg max names text {others[0].argmax()}. "
        f"s(V_i, T of arg max) - max over 12 images {digits((named - others.amax(1)).abs().max())}",
    )


def eq_15_denominator() -> Shown:
    """The denominator of the gradient of a negative text is too small.

    Kind: misprint
    Where: Eq. 15, section 3.3 (gamma = 1).
    Found: $dL/dt_j = v_i D_j / (1 + D_j)$, as if $t_j$ were the only negative.
    Correct: $dL/dt_j = v_i D_j / (1 + sum_k D_k)$, k over all negatives of the image, the denominator of eq. 14. The gradient of the
        positive text, $-v_i sum_j D_j / (1 + sum_k D_k)$, is not printed. Eq. 18 is correct with this form.
    Effect: For a batch of 12 the printed weight is about five times too large. The factor grows with the batch. It enters the paper's
        argument, not its experiments.
    visavis: ``Unified`` is differentiated by autograd. ``diagnostics.pair_gradients.tangent_norms`` uses the correct form.
    """
    scores = leaf(scores_of(12, seed=0))
    excess = negatives(scores - scores.diag()[:, None] + 0.2).exp()
    (weights,) = gradient(excess.sum(1).log1p().sum(), scores)
    off = ~torch.eye(12, dtype=torch.bool)
    ratio = ((excess / (1 + excess)) / weights)[off]
    right = relative_error((excess / (1 + excess.sum(1, keepdim=True)))[off], weights[off])
    return Shown(
        bool(ratio.min() > 3) and right < 1e-12,
        f"B = 12: printed / true weight of a negative {digits(ratio.min())} to {digits(ratio.max())}\nerror of the right form {digits(right)}",
    )


def eq_17_sum_of_norms() -> Shown:
    """The norm of a sum is printed as a sum of norms.

    Kind: misprint
    Where: Eq. 17, section 3.3.
    Found: $||g(v_i)|| = sum_j w_j ||t_j - t_i|| sin(v_i, t_j - t_i)$, with the weights of eq. 14.
    Correct: $||g(v_i)|| = ||P sum_j w_j (t_j - t_i)||$, P the projection onto the tangent plane at $v_i$. The printed form is an
        upper bound: the directions of different negatives partly cancel.
    Effect: The bound stays large where the gradient itself is small. The text states that this bound does not vanish.
    visavis: ``diagnostics.pair_gradients.tangent_norms`` computes the norm of the sum.
    """
    images, texts = embeddings(12, seed=0)
    moved = leaf(images)
    scores = moved @ texts.T
    excess = negatives(scores - scores.diag()[:, None] + 0.2).exp()
    (slope,) = gradient(excess.sum(1).log1p().sum(), moved)
    true = tangent(slope, images).norm(dim=1)
    weights = (excess / (1 + excess.sum(1, keepdim=True))).detach()
    toward = tangent(texts[None] - texts[:, None], images[:, None])
    printed = (weights * toward.norm(dim=-1)).sum(1)
    right = (weights[..., None] * toward).sum(1).norm(dim=1)
    return Shown(
        bool((printed > 1.1 * true).all()) and relative_error(right, true) < 1e-12,
        f"first image: printed {digits(printed[0])}, true {digits(true[0])}\nover 12 images printed / true "
        f"{digits((printed / true).min())} to {digits((printed / true).max())}\nerror of the right form {digits(relative_error(right, true))}",
    )


def larger_gradient() -> Shown:
    """A gradient larger than that of VLC holds for one query and without the factors 1 / gamma.

    Kind: claim
    Where: After eq. 19, section 3.3.
    Found: Under the same conditions, the unified loss contributes a larger gradient than VLC.
    Correct: Take one query in one direction, with both losses divided by gamma or neither. The gradient of Unified is then exactly $c$
        times that of VLC, $c = e^(gamma m) (1 + sum D) / (1 + e^(gamma m) sum D)$, between 1 and $e^(gamma m)$. It does not hold for
        the whole batch, where an embedding sums the gradients of several queries, each with another c. It does not hold for the losses as
        printed in eqs. 3 and 5, of which only the second is divided by gamma.
    Effect: Where similarities are all alike, as at the start of training, c is near 1, and VLC as printed has gamma times the gradient.
    visavis: ``diagnostics.pair_gradients`` compares any two objectives at the same point, with the factors as defined.
    """
    images, texts = embeddings(12, seed=0)
    single = _norms(images, texts, margin=0.2, gamma=1, both=False) / _norms(
        images, texts, margin=0.0, gamma=1, both=False
    )
    batches = [embeddings(4, seed, dimension=4) for seed in range(100)]
    whole = torch.stack(
        [
            (_norms(*few, margin=0.2, gamma=50) / _norms(*few, margin=0.0, gamma=50)).min()
            for few in batches
        ]
    )
    alike = (
        normalize(unit_rows(1, seed=1) + 0.02 * unit_rows(128, seed=2)),
        normalize(unit_rows(1, seed=1) + 0.02 * unit_rows(128, seed=3)),
    )
    printed = (
        _norms(*alike, margin=0.2, gamma=50) / (50 * _norms(*alike, margin=0.0, gamma=50))
    ).mean()
    return Shown(
        bool((single > 1).all() and (single < torch.tensor(0.2).exp()).all())
        and bool(whole.min() < 0.9)
        and bool(printed < 0.1),
        f"one query, gamma = 1: ratio {digits(single.min())} to {digits(single.max())}, below e^0.2 = 1.22\n"
        f"whole batches of 4, gamma = 50, both / gamma: below 1 for some image in {(whole < 1).sum()} of 100, down to {digits(whole.min())}\n"
        f"the losses as printed, 128 nearly equal embeddings: {digits(printed)}",
    )


def gradient_that_does_not_vanish() -> Shown:
    """The gradient of the unified loss also vanishes where embeddings collapse.

    Kind: claim
    Where: After eq. 18, section 3.3, and section 4.4.
    Found: Because all negatives take part, the gradient does not vanish, unlike that of Triplet-HN.
    Correct: The argument needs one negative that is not near the positive. Where all embeddings approach one point, the tangent gradient
        of every loss of cosines goes to 0 in proportion to their spread. The unified loss has no lower bound.
    Effect: Averaging over negatives helps while some are apart. It does not prevent a full collapse.
    visavis: ``diagnostics.pair_gradients.tangent_norms`` gives 0 there for every objective.
    """
    results = {}
    for spread in (0.1, 0.01, 0.0):
        images, texts = (
            normalize(unit_rows(1, seed=1) + spread * unit_rows(32, seed=seed)) for seed in (2, 3)
        )
        results[spread] = [
            _norms(images, texts, margin=0.2, gamma=gamma).mean().item() for gamma in (50.0, 1e6)
        ]
    shrunk = [results[0.01][loss] / results[0.1][loss] for loss in (0, 1)]
    lines = "\n".join(
        f"spread {spread}: {digits(unified)}, {digits(hardest)}"
        for spread, (unified, hardest) in results.items()
    )
    return Shown(
        max(shrunk) < 0.2 and max(results[0.0]) < 1e-7,
        "mean tangent gradient on an image, Unified (gamma = 50) and Triplet-HN:\n" + lines,
    )


def eq_24_weights() -> Shown:
    """Weights that multiply scores shift all scores, unless both sides of a difference have the same weight.

    Kind: claim
    Where: Eq. 24, appendix A.4.1: weighting "can be included in our unified loss, but the similarities of the sample pairs are multiplied
        by the weights".
    Found: $w_ij s_ij - w_ii s_ii + m$ in place of $s_ij - s_ii + m$.
    Correct: The terms of a query have the slope $sum_j p_ij (w_ij - w_ii)$ along a common shift of its scores. If negatives have larger
        weights, every score is pulled down, and a model that cannot separate pairs closes every margin. If positives do, every score is
        pulled up. Below 0, a weight also has the opposite effect: a negative at -0.4 with weight 2 counts as one at -0.8, so it is easier
        the larger its weight. A weight on a pair's slope, or the same weight on both scores of a difference, does neither.
    Effect: Negatives of weight 2 cost more than half of the RSUM below. Weights of positives that are 1 in the mean do little harm.
    visavis: ``Unified`` reads ``targets.weight`` as printed. ``LearnedWeights`` leaves the weight of negatives at 1 and that of positives
        at 1 in the mean.
    """
    constant = (
        numbers(1, 2) - numbers(2, 1)
    ) * -0.5 + 0.2  # all scores -0.5: negatives weigh 1 and positives 2, then 2 and 1
    even, heavy = (_trained(weight) for weight in (1.0, 2.0))
    return Shown(
        bool(constant[0] > 0.5)
        and bool(constant[1] < -0.2)
        and heavy[0] < 0.7 * even[0]
        and heavy[1] < -0.05 < even[1],
        f"all scores -0.5: w_ij s_ij - w_ii s_ii + 0.2 = {digits(constant[0])} for weights 1, 2 and {digits(constant[1])} for 2, 1\n"
        + "\n".join(
            f"negatives weigh {weight}: test RSUM {recalls:.0f}, mean score {digits(mean)}, of right pairs {digits(own)}"
            for weight, (recalls, mean, own) in (("1", even), ("2", heavy))
        ),
    )


def eq_25_limit() -> Shown:
    """The limit of the soft RSP loss is not its hinge unless the polynomial increases.

    Kind: misprint
    Where: Eq. 25, appendix A.4.1.
    Found: $[G(s^ - s_ii) + m]_+$, with $s^$ the most similar negative, is the limit $gamma -> infinity$ of $(1/gamma) log(1 + sum_j
        e^(gamma (G(s_ij - s_ii) + m)))$.
    Correct: The limit is $[max_j G(s_ij - s_ii) + m]_+$. The two are equal where G increases over the differences that occur. Otherwise
        the limit takes the negative with the largest G, which need not be the most similar.
    Effect: The coefficients of G are not given, so this paper does not show which of the two was trained.
    visavis: ``RSP(coefficients=...)`` is the hinge, ``RSP(..., gamma=...)`` the soft form. Neither replaces the other.
    """
    apart_from_positive = numbers(-0.1, -0.8)
    results = {}
    for name, polynomial in {
        "G(d) = d^2": lambda d: d**2,
        "G(d) = d + d^3": lambda d: d + d**3,
    }.items():
        soft = (
            torch.cat([numbers(0), 1e4 * (polynomial(apart_from_positive) + 0.2)]).logsumexp(0)
            / 1e4
        )
        results[name] = (
            soft.item(),
            (polynomial(apart_from_positive.max()) + 0.2).clamp(min=0).item(),
        )
    (limit, hinge), (same, as_hinge) = results.values()
    return Shown(
        abs(limit - 0.84) < 1e-6 and abs(hinge - 0.21) < 1e-9 and abs(same - as_hinge) < 1e-6,
        "differences -0.1 and -0.8, m = 0.2, soft form at gamma = 1e4 and hinge:\n"
        + "\n".join(
            f"{name}: {digits(soft)}, {digits(hard)}" for name, (soft, hard) in results.items()
        ),
    )


def table_6_sum() -> Shown:
    """One RSUM of table 6 is not the sum of its row.

    Kind: tables disagree
    Where: Table 6 (MS-COCO 5K), row SGRAF* + Unified.
    Found: RSUM 429.5.
    Correct: The six recalls of the row sum to 435.8. In every other row of tables 1, 2, 5, 6 and 7 sum and RSUM agree within 0.2, which
        is rounding.
    Effect: The paper does not show which of the two numbers is the slip. Report both if you compare with this row.
    visavis: RSUM is always computed from the recalls next to it.
    """
    rows = [[float(number) for number in row.split()] for row in _TABLE_6.strip().splitlines()]
    errors = [abs(sum(row[:6]) - row[6]) for row in rows]
    return Shown(
        errors[-1] > 6 and max(errors[:-1]) < 0.25,
        f"its columns sum to {sum(rows[-1][:6]):.1f}, printed {rows[-1][6]}\nlargest difference in the other {len(rows) - 1} rows {max(errors[:-1]):.1f}",
    )


def table_4_directions() -> Shown:
    """The directions of the MMT baseline may be exchanged. Not verified.

    Kind: tables disagree
    Where: Table 4 (MSR-VTT, split 1k-A), row MMT.
    Found: Video to text 24.6, 54.0, 67.1, text to video 24.4, 56.0, 67.8.
    Correct: Reported, but not verified: the MMT paper has 24.6 for text to video. Its text was not available for this page. Check it
        before you quote this row.
    Effect: If so, the gain in R@1 is 2.9 for video to text and 4.0 for text to video, instead of 2.7 and 4.2. The gain in RSUM is the same.
    visavis: The row is stored as printed.
    """
    printed = numbers(24.6, 54.0, 67.1, 24.4, 56.0, 67.8)
    own = numbers(27.3, 57.5, 69.6, 28.6, 57.1, 69.5)
    exchanged = printed.roll(3)
    gains = [own - other for other in (printed, exchanged)]
    return Shown(
        bool((gains[0].sum() - gains[1].sum()).abs() < 1e-9),
        f"gain in R@1, video to text and text to video: {gains[0][0]:.1f} and {gains[0][3]:.1f} as printed, {gains[1][0]:.1f} and "
        f"{gains[1][3]:.1f} if exchanged. RSUM {gains[0].sum():.1f} in both",
    )


def points_and_percent() -> Shown:
    """Differences in RSUM are printed as percent.

    Kind: misprint
    Where: Sections 4.2.1, 4.2.2 and 4.3: "improves RSUM by 7.0%" and the like.
    Found: 7.0%, 3.1%, 7.8%, 4.0%, 15.7%, 17.2%.
    Correct: These are points of RSUM, a number between 0 and 600. As percentages, they are a fraction of that.
    Effect: An improvement reads several times as large as it is.
    visavis: Differences are printed in points.
    """
    printed = {
        7.0: (499.6, 506.6),
        3.1: (524.3, 527.4),
        7.8: (547.4, 555.2),
        4.0: (439.5, 443.5),
        15.7: (293.9, 309.6),
        17.2: (191.9, 209.1),
    }
    points = all(
        abs(after - before - claimed) < 0.05 for claimed, (before, after) in printed.items()
    )
    percent = [100 * (after / before - 1) for before, after in printed.values()]
    return Shown(
        points
        and all(found < 0.6 * claimed for claimed, found in zip(printed, percent, strict=True)),
        "printed as percent: "
        + ", ".join(map(str, printed))
        + "\nin percent: "
        + ", ".join(f"{found:.1f}" for found in percent),
    )


def settings() -> Shown:
    """The settings leave some values open.

    Kind: ambiguity
    Where: Sections 4.1 and 4.5, table 2, appendix B.
    Found: gamma of "CLIP + VLC" is not given, nor whether CLIP's encoders are frozen. VSE++ (BUTD) has a GRU in B.1.1 and a Bi-GRU in
        B.2.1. Flickr30K's validation set has 1,000 images in the text, 1,014 in the usual split. The same m and gamma are given for BFAN,
        whose scores (a sum of two cosines) reach 2. Section 4.5 compares m and gamma by RSUM on the test set.
    Correct: Cannot be known without code. A reproduction has to choose, and to state its choice.
    Effect: Numbers of those rows can be matched only approximately. Hyperparameters should be chosen on validation data.
    visavis: Recipes state every setting. The checkpoint is chosen on validation data.
    """
    cosines = scores_of(12, seed=0)
    of_sum, of_mean = (_loss(factor * cosines, margin=0.2, gamma=60.0) for factor in (2, 1))
    same = _loss(cosines, margin=0.1, gamma=120.0)
    return Shown(
        bool(abs(of_sum - same) < 1e-9 and relative_error(of_mean, of_sum) > 0.1),
        f"12 pairs, m = 0.2, gamma = 60: sum of two equal cosines {digits(of_sum)}, their mean {digits(of_mean)}\n"
        f"the mean with m = 0.1, gamma = 120 {digits(same)}",
    )


def _loss(scores: Tensor, *, margin: float, gamma: float) -> Tensor:
    """gamma times the unified loss of one direction."""
    return (
        (1 + (gamma * (negatives(scores) - scores.diag()[:, None] + margin)).exp().sum(1))
        .log()
        .sum()
    )


def _norms(
    images: Tensor, texts: Tensor, *, margin: float, gamma: float, both: bool = True
) -> Tensor:
    """Tangent norms of the gradient on each image, of the unified loss in one or both directions. gamma = 1e6 is Triplet-HN."""
    moved = leaf(images)
    scores = moved @ texts.T
    loss = scores.new_zeros(())
    for way in (scores, scores.T)[: 1 + both]:
        gaps = negatives(
            gamma * (way - way.diag()[:, None] + margin), 0.0
        )  # the 1 of the logarithm stands on the diagonal
        loss = loss + gaps.logsumexp(1).sum() / gamma
    return tangent(gradient(loss, moved)[0], images).norm(dim=1)


_TABLE_6 = """
50.4 82.2 90.0 38.6 69.3 80.4 410.9
53.0 81.1 89.4 40.5 70.6 81.1 415.7
53.7 83.2 91.0 39.7 69.1 79.8 416.5
56.6 83.6 91.4 39.3 69.9 81.1 421.9
49.8 79.5 88.5 36.5 66.2 77.9 398.4
50.6 79.4 88.6 36.1 66.6 78.4 399.8
52.9 82.8 90.6 38.3 67.8 79.3 411.7
54.8 82.3 90.8 38.9 68.0 79.0 413.9
59.2 85.5 92.7 43.2 72.7 82.5 429.5
"""


def _trained(weight: float, pairs: int = 64) -> tuple[float, float, float]:
    """RSUM, mean score and mean score of right pairs on new pairs, after linear maps were trained by eq. 24 with this weight of negatives."""
    world = unit_rows(2 * pairs, seed=1, dimension=8)
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    sides = [
        torch.cat([world @ draw(8, 32) + draw(2 * pairs, 32), torch.ones(2 * pairs, 1)], 1)
        for _ in range(2)
    ]
    maps = [leaf(draw(33, 16) / 6) for _ in range(2)]
    descent = torch.optim.Adam(maps, lr=0.02)
    weights = torch.full((pairs, pairs), weight, dtype=torch.float64).fill_diagonal_(1.0)

    def score(rows: slice) -> Tensor:
        images, texts = (
            normalize(side[rows] @ mapped, dim=1) for side, mapped in zip(sides, maps, strict=True)
        )
        return images @ texts.T

    for _ in range(60):
        weighted = weights * score(slice(pairs))
        excess = torch.cat(
            [negatives(one - weighted.diag()[:, None] + 0.2) for one in (weighted, weighted.T)]
        )
        loss = (50 * torch.cat([torch.zeros(2 * pairs, 1), excess], 1)).logsumexp(1).sum() / 50
        descent.zero_grad()
        loss.backward()
        descent.step()
    scores = score(slice(pairs, None)).detach()
    ranks = torch.cat([(one >= one.diag()[:, None]).sum(1) for one in (scores, scores.T)])
    return (
        sum(200 * (ranks <= k).double().mean().item() for k in (1, 5, 10)),
        scores.mean().item(),
        scores.diag().mean().item(),
    )
