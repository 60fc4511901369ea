"""COCOS

Bleeker, de Rijke: "Do Lessons from Metric Learning Generalize to Image-Caption Retrieval?" (ECIR 2022).
Code: MauritsBleeker/ecir-2022-reproducibility-bleeker@9800594, `shared/losses.py` and `shared/evaluation/utils.py`. All of it was released,
with notebooks and an appendix, which made the findings below possible.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from findings.base import (
    Shown,
    digits,
    embeddings,
    first_ranks,
    gradient,
    leaf,
    negatives,
    numbers,
    relative_error,
    scores_of,
    unit_rows,
)


def eq_4_denominator() -> Shown:
    """The positive is missing in the denominator of NT-Xent.

    Kind: misprint
    Where: Eq. 4.
    Found: The denominator is a sum over the negatives only.
    Correct: Over all candidates, including the positive, as in the code, in Z(q) of eq. 11 and in the cited loss.
    Effect: The printed loss can be negative and has another gradient. The experiments used the usual one.
    visavis: ``NTXent()`` has all candidates. ``NTXent(denominator="negatives")`` is eq. 4 as printed.
    """
    query, candidates = _query(4)
    similar = query @ candidates.T / 0.1
    usual = similar.logsumexp(0) - similar[0]
    printed = similar[1:].logsumexp(0) - similar[0]
    share = similar.softmax(0).detach()
    eq_11 = ((1 - share[0]) * candidates[0] - share[1:] @ candidates[1:]) / 0.1
    errors = [relative_error(-eq_11, gradient(loss, query)[0]) for loss in (usual, printed)]
    return Shown(
        bool(printed < 0 < usual) and errors[0] < 1e-10 and errors[1] > 0.01,
        f"4 candidates, tau = 0.1: loss {digits(usual)}, as printed {digits(printed)}\n"
        f"minus eq. 11 apart from its gradient by {digits(errors[0])}, from the printed one's by {digits(100 * errors[1])} %",
    )


def eqs_9_sign() -> Shown:
    """The gradients of eqs. 9a, 9b and 11 are the direction of descent.

    Kind: misprint
    Where: Eqs. 9a, 9b and 11. (Eq. 12 is the gradient of AP, which is maximized, and is correct.)
    Found: $dL/dq = v+ - v-$.
    Correct: $dL/dq = v- - v+$, the negative of the printed form.
    Effect: Nothing for counting. A gradient implemented from it increases the loss.
    visavis: Weights are $dL/ds$, positive on a negative, negative on a positive.
    """
    query, candidates = _query(8)
    similar = query @ candidates.T
    hinges = (0.2 - similar[0] + similar[1:]).clamp(min=0)
    (slope,) = gradient(hinges.sum(), query)
    printed = ((hinges > 0)[:, None] * (candidates[0] - candidates[1:])).sum(0)
    return Shown(
        relative_error(-printed, slope) < 1e-12,
        f"8 candidates: autograd apart from eq. 9b by {digits(100 * relative_error(printed, slope))} %, "
        f"from minus eq. 9b by {digits(relative_error(-printed, slope))}",
    )


def positive_weight_mean() -> Shown:
    """The mean weight of the positives is divided by the size of the data set.

    Kind: misprint
    Where: Section 4, NT-Xent, the definition of ``W^{qv+}``.
    Found: ``(1 / N) sum_{q in B} (1 - exp(s+ / tau) / Z(q))``. Section 2 defines N as the number of image-caption tuples of the data set.
    Correct: ``1 / |B|``, because the sum is over the queries of a batch.
    Effect: A slip of notation. With N = 29,000, as on Flickr30k, no batch of 128 can exceed 128 / 29,000 = 0.0044, while table 3 prints up to 0.56.
    visavis: W+ is a mean over the queries of a batch.
    """
    scores = scores_of(128, seed=0, noise=2.0, dimension=64)
    weight = 1 - (scores / 0.1).softmax(1).diag()
    right = weight.sum() / 128
    printed = weight.sum() / 29_000
    return Shown(
        bool(printed <= 128 / 29_000) and bool(right > 0.1),
        f"128 pairs, tau = 0.1: W+ {digits(right)}, as printed {digits(printed)}. Maximum as printed {digits(128 / 29_000)}",
    )


def violated_margin() -> Shown:
    """A margin is violated by a difference, not by a sum.

    Kind: misprint
    Where: Section 4, between eqs. 9b and 10.
    Found: Triplets that violate $s+ + s- < alpha$.
    Correct: $s+ - s- < alpha$, as in eqs. 9 and 10.
    Effect: A slip of one sign. Formulas and code are correct.
    visavis: The hinge counts where $s+ - s- < alpha$.
    """
    scores = scores_of(128, seed=0, noise=2.0, dimension=64)
    off = ~torch.eye(128, dtype=torch.bool)
    own = scores.diag()[:, None]
    difference, addition = ((both < 0.2)[off] for both in (own - scores, own + scores))
    numbers_of = (
        difference.sum().item(),
        addition.sum().item(),
        (difference & addition).sum().item(),
    )
    return Shown(
        numbers_of[2] < 0.9 * numbers_of[0],
        "128 pairs, alpha = 0.2: {} triplets by the difference, {} by the sum, {} by both".format(
            *numbers_of
        ),
    )


def difference_matrix_sign() -> Shown:
    """The matrix D of SmoothAP has the wrong sign.

    Kind: misprint
    Where: After eq. 6: $D_ij = s_i - s_j$ and the indicator $D_ij > 0$, before and after eq. 7.
    Found: Counts the candidates below i.
    Correct: A rank counts the candidates above: $D_ij = s_j - s_i$, as in eq. 6 and the code.
    Effect: As printed, a perfect ranking is not perfect, and maximizing AP would reverse rankings.
    visavis: ``SmoothAP`` uses $s_j - s_i$. A test compares it with the metric as $tau -> 0$.
    """
    best = numbers(0.9, 0.8, 0.3, 0.2, 0.1)
    right, printed = (_average_precision(sign * best, positives=2) for sign in (1, -1))
    return Shown(
        abs(right - 1) < 1e-12 and printed < 0.9,
        f"two positives ranked first of five: AP by eq. 6 {digits(right)}, with D as printed {digits(printed)}",
    )


def table_2_text_queries() -> Shown:
    """Triplets of a text query are counted over the wrong axis.

    Kind: bug behind published numbers
    Where: ``Triplet.gradient_counter`` (``t2i_grads.sum(dim=1)``), and table 2, the rows "Triplet loss", columns t2i.
    Found: For text queries, the hinges of a caption are in a column. The code sums rows.
    Correct: Sum over columns. The count of the whole batch is the same. Counts per query and queries without any are not. Triplet SH is
        not affected.
    Effect: Table 2 prints 1.14 queries without a gradient for t2i and 14.78 for i2t (VSE++, Flickr30K). The axis may explain the
        difference.
    visavis: ``diagnostics.contributing_samples`` counts by query. ``semantics="reference"`` gives the table's count.
    """
    scores = scores_of(128, seed=0, noise=2.0, dimension=64)
    violated = (0.2 + scores - scores.diag() > 0) & ~torch.eye(128, dtype=torch.bool)
    right = violated.sum(0)
    code = violated.sum(1)
    zero, zero_code = ((count == 0).sum().item() for count in (right, code))
    return Shown(
        bool(right.sum() == code.sum()) and zero != zero_code,
        f"128 pairs, text queries: C0 {zero}, code {zero_code}\nmean of the others {digits(right.sum() / (128 - zero))}, "
        f"code {digits(code.sum() / (128 - zero_code))}\nC^B {right.sum()} in both",
    )


def table_4_text_queries() -> Shown:
    """SmoothAP's triplets are counted for almost no text query.

    Kind: bug behind published numbers
    Where: ``SmoothAP.gradient_counter``, and table 4, columns t2i, and its reading at the end of section 5.
    Found: For query q, rows 5q to 5q + 4 are read in both directions. With texts as queries there are 128 rows, one for each image, and
        640 queries.
    Correct: The positive of caption q is row ``q // 5``. In the code, the first 26 captions read rows of other images and the other 614
        read nothing. So at least 614 queries have no gradient, whatever the model.
    Effect: Of the 636 to 637 of 640 in the rows of table 4, 614 would be there for any model. The rows do not show the correct count. So
        the conclusion that ranking with one positive is too easy may be true, but this table does not show it.
    visavis: ``diagnostics.contributing_samples`` reads the correct row. ``semantics="reference"`` gives the table's count.
    """
    images, captions = _five_captions(128, noise=3.0)
    scores = captions @ images.T
    right = torch.stack([_contributing(row, [query // 5]) for query, row in enumerate(scores)])
    code = torch.stack(
        [
            _contributing(row, range(5 * query, min(5 * query + 5, 128)))
            for query, row in enumerate(scores)
        ]
    )
    looked = sum(5 * query < 128 for query in range(640))
    zero, zero_code = ((count == 0).sum().item() for count in (right, code))
    return Shown(
        looked == 26 and zero_code >= 614 and zero < 600,
        f"640 captions, 128 images: {looked} queries examined. Without a gradient {zero}, code {zero_code}",
    )


def eq_13_slope() -> Shown:
    """The slope of the sigmoid is counted without its factor 1 / tau.

    Kind: code differs from paper
    Where: ``SmoothAP.gradient_counter`` (``D_ * (1 - D_)``) against sim of eq. 12, "the derivative of (7)". The appendix has $1 / tau$.
    Found: $sim = sigma (1 - sigma)$.
    Correct: $sim = sigma (1 - sigma) / tau$, 100 times as much at tau = 0.01, compared with the same epsilon = 0.01.
    Effect: Table 4 reports that about one triplet contributes. With the derivative there are many times more. The number depends on
        epsilon.
    visavis: ``visavis papers diagnose`` counts as the table does, in both directions, so that a run can be compared with it. With ``--with-slope``
        it counts by eqs. 12 and 13 as printed.
    """
    images, captions = _five_captions(128, noise=3.0)
    rows = [
        (image @ captions.T, range(5 * index, 5 * index + 5)) for index, image in enumerate(images)
    ]
    code, right = (
        torch.stack([_contributing(*row, epsilon) for row in rows]).double().mean() / 5
        for epsilon in (0.01, 0.01 * 0.01)
    )
    return Shown(
        bool(right > 5 * code),
        f"128 image queries, mean count per positive: {digits(code)} as in the code, {digits(right)} with 1 / tau",
    )


def map_at_5() -> Shown:
    """mAP@5 is divided by the hits found, not by the number of positives.

    Kind: ambiguity
    Where: ``average_precision`` in ``shared/evaluation/utils.py``, and table 1, column mAP@5.
    Found: The mean precision at the hits in the top 5. Missing the other captions of the image costs nothing.
    Correct: The usual AP@5 divides by min(5, number of positives) = 5. The paper does not define its metric.
    Effect: The numbers are much larger than usual ones and must not be compared with them. Within the table, the order may well be the
        same.
    visavis: ``map_at_5`` is the usual metric, ``map_at_5_hits`` the table's.
    """
    images, captions = _five_captions(128, noise=2.5)
    order = (images @ captions.T).argsort(1, descending=True)[:, :5]
    hit = (order // 5 == torch.arange(128)[:, None]).double()
    precision = (hit * hit.cumsum(1) / torch.arange(1, 6)).sum(1)
    code = (precision / hit.sum(1).clamp(min=1)).mean()
    usual = (precision / 5).mean()
    return Shown(
        bool(code > 1.2 * usual),
        f"128 images with 5 captions each: {digits(code)} over hits, {digits(usual)} over positives. One hit, at rank 1: 1 and 0.2",
    )


def semi_hard() -> Shown:
    """The negative called semi-hard is the hardest negative.

    Kind: ambiguity
    Where: Section 2, eq. 1, and throughout.
    Found: The triplet loss "with semi-hard negatives" takes the most similar negative.
    Correct: That is hard negative mining (VSE++). FaceNet's semi-hard negative is less similar than the positive, and within the margin.
    Effect: A name. But the two train differently, above all in the first epochs.
    visavis: ``TripletHN`` uses the hardest negative. visavis has no semi-hard mining.
    """
    scores = scores_of(128, seed=0, noise=2.0, dimension=64)
    harder = (negatives(scores).amax(1) >= scores.diag()).sum().item()
    return Shown(
        harder > 0,
        f"128 pairs: for {harder} images the hardest negative is above the positive, and so not semi-hard",
    )


def table_2_mean() -> Shown:
    """The mean counts are over queries that have a count.

    Kind: ambiguity
    Where: Tables 2 and 4, columns C^q, and ``gradient_counter``.
    Found: The text reports mean values over the training set.
    Correct: Queries with a count of 0 are left out, so Triplet SH prints 1 +- 0 by construction. Table 3 averages over all queries.
    Effect: C^q of tables 2 and 4 cannot be compared with that of table 3.
    visavis: ``ContributingSamples.per_moved`` and ``ContributingSamples.per_query`` are the two means.
    """
    rows = {
        "1.1": (6.79, 14.78, 768.92),
        "2.1": (3.51, 27.09, 353.82),
        "2.5": (1.21, 103.33, 29.88),
    }
    moved = {name: count * (128 - zero) / whole for name, (count, zero, whole) in rows.items()}
    everyone = {name: count * 128 / whole for name, (count, _, whole) in rows.items()}
    return Shown(
        all(abs(ratio - 1) < 0.02 for ratio in moved.values())
        and all(ratio > 1.1 for ratio in everyone.values()),
        f"rows {', '.join(rows)}, i2t: C^q (128 - C^0) / C^B = {', '.join(map(digits, moved.values()))}\n"
        f"C^q 128 / C^B = {', '.join(map(digits, everyone.values()))}",
    )


def table_1_average() -> Shown:
    """One average recall of table 1 is not the mean of its three recalls.

    Kind: tables disagree
    Where: Table 1, row 2.7 (VSRN, NT-Xent, MS-COCO), t2i.
    Found: 54.6.
    Correct: 29.5, 61.0 and 74.0 have the mean 54.8, and the row's rsum, 352.3, agrees with these. All other averages agree within 0.1, all sums within 0.2.
    Effect: Nothing beyond the cell.
    visavis: Averages are computed from the recalls.
    """
    mean = (29.5 + 61.0 + 74.0) / 3
    total = 37.9 + 69.2 + 80.7 + 29.5 + 61.0 + 74.0
    return Shown(
        abs(mean - 54.6) > 0.15 and abs(total - 352.3) < 0.1,
        f"mean {mean:.1f}, printed 54.6\nsum of the six recalls {total:.1f}, printed 352.3",
    )


def one_positive() -> Shown:
    """A sentence on one positive per query names the wrong direction.

    Kind: misprint
    Where: End of section 5, SmoothAP.
    Found: One positive candidate per query "is the case for the i2t task".
    Correct: For t2i, as the sentences before and after state.
    Effect: A slip of one word.
    visavis: Nothing to do.
    """
    image_of_text = torch.arange(10) // 5
    own = torch.arange(2)[:, None] == image_of_text[None]
    i2t = own.sum(1).tolist()
    t2i = own.sum(0).tolist()
    return Shown(
        set(i2t) == {5} and set(t2i) == {1},
        f"five captions per image, positives of a query: i2t {i2t[0]}, t2i {t2i[0]}",
    )


def protocol() -> Shown:
    """The test set of the MS-COCO evaluation is not stated.

    Kind: ambiguity
    Where: Table 1, MS-COCO.
    Found: Neither 5K nor five folds of 1K is named. The numbers fit 5K.
    Correct: Cannot be known from the text.
    Effect: The two protocols differ by far more than the methods do.
    visavis: Protocols are named objects, printed next to every number.
    """
    scores = scores_of(1000, seed=0, noise=3.0)
    whole = 100 * first_ranks(scores)
    folds = [
        100 * first_ranks(scores[fold : fold + 200, fold : fold + 200])
        for fold in range(0, 1000, 200)
    ]
    return Shown(
        sum(folds) / 5 > 2 * whole,
        f"1,000 random pairs, R@1 over all {digits(whole)}, mean of five folds of 200 {digits(sum(folds) / 5)}",
    )


def _query(number: int) -> tuple[Tensor, Tensor]:
    """A query, and as many candidates, of which the first is its own."""
    images, texts = embeddings(number, seed=0, noise=4.0)
    return leaf(images[0]), texts


def _average_precision(scores: Tensor, positives: int) -> float:
    """AP by counting above, of which the first candidates are the positives."""
    above = scores[None] > scores[:, None]
    return (
        ((1 + above[:positives, :positives].sum(1)) / (1 + above[:positives].sum(1))).mean().item()
    )


def _five_captions(number: int, noise: float) -> tuple[Tensor, Tensor]:
    """Images, and five captions of each in a row."""
    images = unit_rows(number, seed=0, dimension=64)
    return images, normalize(
        images.repeat_interleave(5, 0) + noise * unit_rows(5 * number, seed=1, dimension=64)
    )


def _contributing(
    scores: Tensor, rows: range | list[int], epsilon: float = 0.01, tau: float = 0.01
) -> Tensor:
    """How many candidates are near candidates ``rows`` of one query: eq. 13, not divided, sim without 1 / tau."""
    index = torch.tensor(list(rows), dtype=torch.long)
    above = ((scores[None] - scores[index, None]) / tau).sigmoid().scatter(1, index[:, None], 0.0)
    return (above * (1 - above) / (1 + above.sum(1, keepdim=True)) ** 2 > epsilon).sum()
