"""Ladder loss

Zhou, Niu, Wang, Gao, Zhang, Hua: "Ladder Loss for Coherent Visual-Semantic Embedding" (AAAI 2020).
Code: cdluminate/ladderloss@b37ad78, `Code/ladderloss.py`.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from findings.base import (
    Shown,
    digits,
    embeddings,
    first_ranks,
    gradient,
    leaf,
    numbers,
    scores_of,
    unit_rows,
)

MARGINS = (0.2, 0.01, 0.01)
THRESHOLDS = (0.63, 0.56)
BETAS = (1.0, 0.25, 0.125)


def eq_8_margin() -> Shown:
    """The hard-sampled second level is printed with the margin of the first.

    Kind: misprint
    Where: Eq. 8.
    Found: L^2-HC is $[alpha_1 - s(v, h_{i*}) + s(v, h_{j*})]_+$.
    Correct: $alpha_2$, as in eq. 7 and the code: hard sampling takes one summand of eq. 7, and every summand there has $alpha_2$.
    Effect: With the paper's values, 0.2 against 0.01: as printed, the second level has a margin twenty times as large.
    visavis: ``Ladder`` uses the margin of each level.
    """
    scores = scores_of(16, seed=4)
    relevance = _relevance(16, seed=5)
    up = _level(relevance, 0.63, torch.inf)
    down = relevance < 0.63
    both = up[:, :, None] & down[:, None, :]
    gaps = scores[:, None, :] - scores[:, :, None]
    largest = (MARGINS[1] + gaps).clamp(min=0).masked_fill(~both, 0).amax((1, 2))
    hard = _hardest_gap(scores, up, down)
    printed, right = ((margin + hard).clamp(min=0) for margin in MARGINS[:2])
    return Shown(
        bool((right - largest).abs().max() < 1e-12) and bool((printed - largest).abs().max() > 0.1),
        f"largest summand of eq. 7 against eq. 8, 16 queries: with alpha_2 apart by {digits((right - largest).abs().max())}, "
        f"with alpha_1 by up to {digits((printed - largest).abs().max())}",
    )


def code_upper_set() -> Shown:
    """The released code takes the least similar item of all higher levels, including the own pair.

    Kind: code differs from paper
    Where: ``LadderLoss.forward`` (``simmask``) against eqs. 7 and 8.
    Found: $i* = argmin$ over all items with relevance at or above the threshold: every level up to l - 1, and the query's own pair.
    Correct: Eq. 7 pairs neighboring levels: $i* = argmin$ only over $N_{l-1}$.
    Effect: With L = 2, the setting of most tables, it matters only where the own pair is less similar than the whole first level. With L
        = 3 (table 4) the third level differs often.
    visavis: ``Ladder`` follows the paper, ``Ladder(semantics="reference")`` the code.
    """
    scores = scores_of(16, seed=4, noise=0.7)
    relevance = _relevance(16, seed=5)
    paper = [_level_terms(scores, relevance, levels, all_higher=False) for levels in (2, 3)]
    code = [_level_terms(scores, relevance, levels, all_higher=True) for levels in (2, 3)]
    return Shown(
        abs(paper[0] - code[0]) < 1e-12 and abs(paper[1] - code[1]) > 0.01,
        f"one direction, B = 16, nothing else changed: L = 2 paper {digits(paper[0])}, code {digits(code[0])}\n"
        f"L = 3 paper {digits(paper[1])}, code {digits(code[1])}",
    )


def code_fill() -> Shown:
    """In the released code the most similar of the lower levels is never below 0.

    Kind: code differs from paper
    Where: ``LadderLoss.forward``: ``scores * dismask``, then the maximum, and ``scores * simmask + 1.0 * dismask``, then the minimum.
    Found: Items outside a set count as similarity 1 in the minimum and 0 in the maximum.
    Correct: They do not count (eq. 8). As a cosine is at most 1, the 1 is harmless. The 0 is not harmless: it is above every negative
        similarity.
    Effect: Where all less relevant items already have negative similarity, the level keeps pulling its upper item up, without an item to
        separate it from.
    visavis: ``Ladder`` leaves non-members out. ``Ladder(semantics="reference")`` keeps the fill.
    """
    scores = numbers(0.5, -0.1, -0.2, -0.4)
    relevance = numbers(1.0, 0.7, 0.3, 0.2)
    code, slope = _filled(scores, relevance)
    paper = (MARGINS[1] - scores[1] + scores[2:].max()).clamp(min=0)
    return Shown(
        paper.item() == 0 and code > 0.1 and slope[1].item() == -1 and bool((slope[2:] == 0).all()),
        f"own pair 0.5, one relevant item at -0.1, others at -0.2 and -0.4: second level {digits(paper)} by eq. 8, {digits(code)} in the code.\n"
        f"Its gradient there: {digits(slope[1])} on the relevant item, {digits(slope[2:].abs().max())} on the others",
    )


def code_empty_lower_set() -> Shown:
    """In the released code an empty lower level still has a hinge.

    Kind: code differs from paper
    Where: ``LadderLoss.forward``, a query whose every item reaches the threshold.
    Found: The maximum over nothing is the fill, 0, so $[alpha_l - min s]_+$ is added.
    Correct: A sum over no pair is 0 (eq. 7).
    Effect: Only small batches and low thresholds. For such a query, the loss requires the least similar relevant item to reach
        $alpha_l$.
    visavis: ``Ladder`` gives 0, ``Ladder(semantics="reference")`` the code's value.
    """
    code, slope = _filled(numbers(0.5, -0.1, -0.2), numbers(1.0, 0.7, 0.7))
    return Shown(
        abs(code - 0.21) < 1e-12 and slope[2].item() == -1,
        f"all of three items relevant, the least similar at -0.2: 0 by eq. 7, {digits(code)} in the code, gradient {digits(slope[2])} on that item",
    )


def coherent_score_ties() -> Shown:
    """Ties in relevance: the definition does not count them, the code uses tau-b.

    Kind: ambiguity
    Where: Section Coherent Score. The code calls ``scipy.stats.kendalltau``.
    Found: Concordant and discordant pairs are defined. Tied pairs are not mentioned. Kendall (1945), which is cited, is about ties.
    Correct: With ties, tau-a (divide by all pairs) and tau-b (leave tied pairs out of the norm) differ. The code prints tau-b.
    Effect: Quantized relevance, such as human ratings or the 0 below a threshold, has many ties. Real-valued relevance has none.
    visavis: ``metrics.graded_metrics`` is tau-b. A query whose relevance is constant in the top K is NaN.
    """
    from scipy.stats import kendalltau

    scores = [4.0, 3.0, 2.0, 1.0]
    relevance = [1.0, 0.5, 0.5, 0.0]
    concordant = [
        relevance[i] > relevance[j] for i, j in combinations(range(4), 2)
    ]  # the scores descend
    tau_a = sum(concordant) / len(concordant)
    tau_b = kendalltau(scores, relevance).statistic
    return Shown(
        abs(tau_a - 5 / 6) < 1e-12 and abs(tau_b - 5 / 30**0.5) < 1e-12,
        f"relevance 1, 0.5, 0.5, 0 in the best possible order: tau-a {digits(tau_a)}, tau-b {digits(tau_b)}",
    )


def relevance_in_code() -> Shown:
    """Relevance: the description and the configurations differ.

    Kind: code differs from paper
    Where: Section Experiments, Relevance Degree, against ``config.ladder.py``, ``config.hybrid.py`` and ``EcoSTSMatrix``.
    Found: The paper gives every pair a CBoW value and replaces it by BERT's where it exceeds 0.8. The default configuration uses only
        CBoW (spaCy vectors, nouns doubled). The hybrid one sets pairs below 0.8 to 0 instead of leaving their CBoW value. Its server and
        weights were not released. The comment of ``_wcbow_`` states that it skips stop words, but its sum is over all words.
    Correct: The paper does not state which relevance gave which table.
    Effect: Thresholds such as 0.63 have a meaning only for one relevance. Under the hybrid one, the level 0.63 to 0.8 holds only refined
        pairs.
    visavis: Any relevance is accepted, as a matrix, as factors or as a function. Recipes name theirs.
    """
    bag_of_words = _relevance(64, seed=0)
    refined = _relevance(64, seed=1)
    described = torch.where(bag_of_words > 0.8, refined, bag_of_words)
    configured = torch.where(bag_of_words > 0.8, refined, 0.0)
    counts = [int(((values >= 0.63) & (values < 0.8)).sum()) for values in (described, configured)]
    from_refined = int(((refined >= 0.63) & (refined < 0.8) & (bag_of_words > 0.8)).sum())
    return Shown(
        counts[0] > 2 * counts[1] and counts[1] == from_refined,
        f"random relevance of 64 x 64 pairs, level 0.63 to 0.8: {counts[0]} pairs as described, {counts[1]} by the hybrid configuration, "
        f"all of them refined ({from_refined})",
    )


def protocol() -> Shown:
    """The protocol of "1000 Test Samples" and of CS@K is open.

    Kind: ambiguity
    Where: Table 1, and ``CS@K`` in the code.
    Found: The paper does not state whether five folds are averaged. CS@K in the code ranks N images against N captions, the first of each
        image, while R@K uses all five.
    Correct: Cannot be known from the text.
    Effect: Recalls of one fold and of the mean of five are different numbers. The same holds for scores over one caption and over five.
    visavis: Protocols are named objects, printed next to every number.
    """
    folds = [100 * first_ranks(scores_of(100, seed, noise=3.0)) for seed in range(5)]
    images, captions = embeddings(100, seed=0, noise=3.0)
    five = torch.cat(
        [captions, *(embeddings(100, seed=0, noise=3.0 + number)[1] for number in (1, 2, 3, 4))]
    )
    one, all_five = (
        100 * float(((images @ texts.T).argmax(1) % 100 == torch.arange(100)).double().mean())
        for texts in (captions, five)
    )
    return Shown(
        folds[0] != sum(folds) / 5 and one != all_five,
        f"R@1 of 100 images: first fold {digits(folds[0])}, mean of five {digits(sum(folds) / 5)}\none caption per image {digits(one)}, "
        f"five {digits(all_five)}",
    )


def without_degrading() -> Shown:
    """Some recalls fall with the ladder loss.

    Kind: claim
    Where: Conclusion: "improves the ranking quality of all top-N results without degrading the ranking positions of the ground-truth candidates".
    Found: Tables 1 and 2, image to sentence, VSE++ and CVSE++: R@10 95.5 and 94.0 (Res152, MS-COCO 1K), 97.4 and 96.1 (Res152, FT, MS-COCO
        1K), R@5 73.3 and 73.1 (VGG19, FT, Flickr30K), 78.9 and 78.8 (Res152, Flickr30K).
    Correct: R@1 rises in every row. R@5 and R@10 fall in some, by up to 1.5. The section Results on MS-COCO is more careful: "roughly
        comparable or marginally better".
    Effect: A summary that is stronger than its tables. With one run per row, the spread is unknown.
    visavis: Claim L2 allows a loss of 3 RSUM, and states it.
    """
    falls = {
        "MS-COCO 1K, Res152, R@10": 95.5 - 94.0,
        "MS-COCO 1K, Res152, FT, R@10": 97.4 - 96.1,
        "Flickr30K, VGG19, FT, R@5": 73.3 - 73.1,
        "Flickr30K, Res152, R@5": 78.9 - 78.8,
    }
    return Shown(
        min(falls.values()) > 0.05,
        "VSE++ minus CVSE++, image to sentence: "
        + ", ".join(f"{name} {fall:.1f}" for name, fall in falls.items()),
    )


def state_of_the_art() -> Shown:
    """The state of the art in R@K is claimed next to a note that SCAN is better.

    Kind: claim
    Where: Conclusion: "state-of-the-art performance in terms of both CS@K and R@K", against Experiments: "SCAN (Lee et al. 2018) achieves
        better performance".
    Found: Both sentences.
    Correct: The best in R@K among models of one vector per image and sentence, as Experiments limits the comparison. No other
        paper reports CS@K.
    Effect: On the 5,000 test images of MS-COCO, R@1 of CVSE++ (Res152, FT) is 43.2 and 32.4. The GOAL paper (table 6) quotes SCAN with
        50.4 and 38.6.
    visavis: Rows are compared with the published row of the same model.
    """
    cvse = (43.2, 32.4)
    scan = (50.4, 38.6)
    gaps = [other - own for own, other in zip(cvse, scan, strict=True)]
    return Shown(
        min(gaps) > 5,
        f"MS-COCO 5K, R@1 of SCAN minus that of CVSE++: image to sentence {gaps[0]:.1f}, sentence to image {gaps[1]:.1f}",
    )


def third_level() -> Shown:
    """Sentence to image, a third level helps CS@100 as much as CS@200.

    Kind: tables disagree
    Where: "The Scope-of-interest for Ladder Loss", against table 4.
    Found: With L = 3, CS@100 gains only marginally, while CS@200 can be further improved.
    Correct: Image to sentence, CS@100 gains 0.002 and CS@200 0.022. Sentence to image, both gain 0.005.
    Effect: The sentence describes one direction.
    visavis: Claim L6 tests the mean of both directions, and states the exception.
    """
    gains = {
        "image to sentence": (0.267 - 0.265, 0.274 - 0.252),
        "sentence to image": (0.261 - 0.256, 0.258 - 0.253),
    }
    first, second = gains.values()
    return Shown(
        first[1] > 10 * first[0] and abs(second[1] - second[0]) < 1e-9,
        ", ".join(
            f"{name}: CS@100 {gain[0]:+.3f}, CS@200 {gain[1]:+.3f}" for name, gain in gains.items()
        ),
    )


def _relevance(number: int, seed: int) -> Tensor:
    """Symmetric relevance values in [0, 1], 1 for a pair itself."""
    topics = unit_rows(number, seed, dimension=6)
    return (0.55 + 0.3 * topics @ topics.T).fill_diagonal_(1.0)


def _level(relevance: Tensor, low: float, high: float) -> Tensor:
    """The other items with low <= relevance < high."""
    return (relevance >= low) & (relevance < high) & ~torch.eye(len(relevance), dtype=torch.bool)


def _hardest_gap(scores: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return scores.masked_fill(~down, -torch.inf).amax(1) - scores.masked_fill(~up, torch.inf).amin(
        1
    )


def _level_terms(scores: Tensor, relevance: Tensor, levels: int, *, all_higher: bool) -> float:
    """Terms of levels 2 to L, hard-sampled, images as queries. With ``all_higher``, the upper set is defined as in the code."""
    total = 0.0
    bounds = (torch.inf, *THRESHOLDS)
    for level in range(1, levels):
        up = (
            relevance >= bounds[level]
            if all_higher
            else _level(relevance, bounds[level], bounds[level - 1])
        )
        gap = _hardest_gap(scores, up, relevance < bounds[level])
        total += BETAS[level] * (MARGINS[level] + gap).clamp(min=0).sum().item()
    return total


def _filled(scores: Tensor, relevance: Tensor) -> tuple[float, Tensor]:
    """The term of the second level of one query by the rule of the code, and its gradient."""
    scores = leaf(scores)
    similar = relevance >= THRESHOLDS[0]
    term = (
        MARGINS[1]
        - torch.where(similar, scores, 1.0).min()
        + torch.where(similar, 0.0, scores).max()
    )
    return term.item(), gradient(term, scores)[0]
