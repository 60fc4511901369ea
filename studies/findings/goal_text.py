"""GOAL: equivalences, text and tables

The same paper, sections 3.2 to 4.4. T and P are as there. s_p is the positive of an anchor, s_n its hardest negative.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from findings.base import (
    Shown,
    digits,
    gradient,
    leaf,
    negatives,
    numbers,
    relative_error,
    scores_of,
)

ALPHA = 2.0
BETA = 10.0
LAM = 0.5
EPSILON = 0.1
TAU = 10.0


def eq_7_scale() -> Shown:
    """The gradient of eq. 6 is tau times the weight of eq. 7.

    Kind: misprint
    Where: Eqs. 6 and 7.
    Found: $T_nca = 1 / (1 + e^(tau (s_p - s_n)))$ as the scalar in the gradient of ``l_nca``.
    Correct: The scalar is $tau T_nca$.
    Effect: The direction is correct. Combined with a fixed gradient clip or another loss, the factor 10 counts.
    visavis: ``Goal(triplet="nca", pair="con")`` is eq. 7. A test checks that it is tau times less than the loss of eq. 6.
    """
    pair = leaf(numbers(0.6, 0.5))
    (slope,) = gradient(-(TAU * pair).log_softmax(0)[0], pair)
    weight = (TAU * (pair[1] - pair[0])).sigmoid().item()
    return Shown(
        abs(slope[1].item() / weight - TAU) < 1e-9,
        f"s_p = 0.6, s_n = 0.5, tau = 10: gradient of eq. 6 on s_n {digits(slope[1])}, eq. 7 {digits(weight)}\nratio {digits(slope[1] / weight)}",
    )


def eq_12_relative_weight() -> Shown:
    """The text reverses the relative weight of a negative.

    Kind: misprint
    Where: The second paragraph after eq. 12.
    Found: $m- > 1$ means that the selected negative is closer than others and raises its weight. $m- < 1$ cannot occur with hard
        mining.
    Correct: By eq. 12, $m- = mean e^(-beta (s_n - R)) > 1$ means that it is farther than others, and a larger $m-$ lowers $P- = 1 / (m-
        + ...)$. With hard mining $s_n >= R$, so $m- <= 1$ always: $m- > 1$ is the case that cannot occur. The paragraph on $m+$ is
        correct.
    Effect: Under hard mining, sig-ms raises the weight of a negative, and more so the more it stands out.
    visavis: ``Goal(pair="sig_ms")`` is eq. 12. A test checks that $m-$ is at most 1.
    """
    scores = scores_of(64, seed=0, noise=2.0)
    hardest = negatives(scores).amax(1)
    others = negatives(scores).scatter(1, negatives(scores).argmax(1, keepdim=True), -torch.inf)
    kept = others >= scores.diag().min() - EPSILON
    relative = _mean((-BETA * (hardest[:, None] - others)).exp(), kept)[kept.any(1)]
    farther = (-BETA * numbers(0.4 - 0.5)).exp()
    weight = 1 / (numbers(0.5, 1.0, 2.0) + 1)
    return Shown(
        bool((relative <= 1).all())
        and bool(farther > 1)
        and bool(weight[0] > weight[1] > weight[2]),
        f"{len(relative)} anchors with other near negatives: m- from {digits(relative.min())} to {digits(relative.max())}\n"
        f"s_n = 0.4 below R = 0.5: m- = {digits(farther)}\n"
        f"P- at s_n = 0.5 for m- = 0.5, 1, 2: {', '.join(map(digits, weight))}",
    )


def eq_12_names() -> Shown:
    """The relative similarities of eq. 12 change their names.

    Kind: misprint
    Where: Section 3.3, eq. 12 and the lines around it.
    Found: They are ``R^{x,y}_i`` and ``R^{x,y'}_j`` in the sets P and N, and ``R^{ap}_i`` and ``R^{an}_j`` in the means $m+$ and $m-$.
        Anchor, positive and negative have no symbols a, p and n in this paper.
    Correct: One name each, as in eq. 13: ``R^{x,y}_i`` and ``R^{x,y'}_j``.
    Effect: A slip of notation, from the multi-similarity paper. The meaning is not in doubt: with these names, equal similarities give
        $m+ = m- = 1$ and eq. 12 becomes eq. 11, as the text states.
    visavis: ``Goal(pair="sig_ms")`` uses the names of eq. 13.
    """
    positive = numbers(0.6)
    negative = numbers(0.5)
    relative = [
        (ALPHA * (positive - positive)).exp(),
        (-BETA * (negative - negative)).exp(),
    ]
    of_12 = torch.cat([_sig(positive, relative[0], ALPHA), _sig(negative, relative[1], -BETA)])
    of_11 = torch.cat([_sig(positive, 1.0, ALPHA), _sig(negative, 1.0, -BETA)])
    return Shown(
        torch.equal(of_12, of_11),
        f"s_p = 0.6, s_n = 0.5, all others equal to these: P+ {digits(of_12[0])}, P- {digits(of_12[1])} by eq. 12, apart from eq. 11 by "
        f"{digits(relative_error(of_12, of_11))}",
    )


def table_1_binomial_deviance() -> Shown:
    """(T_con, P_sig) is binomial deviance only with both halves rescaled, and without a margin.

    Kind: claim
    Where: Table 1 and eq. 11.
    Found: This cell is named binomial deviance.
    Correct: As the multi-similarity paper writes that loss, the gradient of $log(1 + e^(-alpha (s_p - lam))) + log(1 + e^(beta (s_n -
        lam)))$ is $-alpha P+$ and $beta P-$. The cell is its gradient after division by $alpha$ and by $beta$, and where the Heaviside
        of $T_con$ is 1.
    Effect: With $alpha = 2$ and $beta = 10$, the gradient of the loss on a negative, relative to that on the positive, is five times that of
        the cell.
    visavis: ``BinomialDeviance`` has the divisions, so that it is the potential of ``Goal(triplet="con", pair="sig")`` with all hinges
        open.
    """
    pair = leaf(numbers(0.6, 0.5))
    exponents = torch.stack([-ALPHA * (pair[0] - LAM), BETA * (pair[1] - LAM)])
    (slope,) = gradient(exponents.exp().log1p().sum(), pair)
    (divided,) = gradient((exponents.exp().log1p() / numbers(ALPHA, BETA)).sum(), pair)
    cell = torch.stack([-_sig(pair[0], 1.0, ALPHA), _sig(pair[1], 1.0, -BETA)]).detach()
    ratios = [(-push / pull).item() for pull, push in (slope, cell)]
    return Shown(
        relative_error(divided, cell) < 1e-12 and abs(ratios[0] / ratios[1] - BETA / ALPHA) < 1e-9,
        f"s_p = 0.6, s_n = 0.5: push / pull {digits(ratios[0])} of the loss, {digits(ratios[1])} of the cell. "
        f"The divided loss apart from the cell by {digits(relative_error(divided, cell))}",
    )


def table_1_multi_similarity() -> Shown:
    """(T_con, P_sig-ms) is not the multi-similarity loss.

    Kind: claim
    Where: Table 1, and "MS loss (P_sig-ms, T_con)" in section 4.3.
    Found: This cell is named MS loss.
    Correct: With one positive and the hardest negative, MS gives exactly (con, sig). With all mined negatives, MS distributes the
        gradient over them, with a sum in the denominator that includes the negative itself. GOAL uses only the hardest negative, with a
        mean over the others, and takes the positives of other anchors where MS has the anchor's own.
    Effect: The rows of the tables compare GOAL with its own cell, not with the published MS loss.
    visavis: ``MultiSimilarity`` is the published loss, ``Goal(triplet="con", pair="sig_ms")`` the cell.
    """
    scores = leaf(scores_of(32, seed=0))
    positive = scores.diag()
    hardest = negatives(scores).amax(1)
    p = positive.detach()
    n = hardest.detach()
    at = negatives(scores).argmax(1)
    (of_two,) = gradient(
        (_soft(-ALPHA, positive[:, None]) + _soft(BETA, hardest[:, None])).sum(), scores
    )
    sig = torch.diag(-_sig(p, 1.0, ALPHA)).scatter(1, at[:, None], _sig(n, 1.0, -BETA)[:, None])
    mined = negatives(scores).masked_fill(negatives(scores) <= (p - EPSILON)[:, None], -torch.inf)
    lacking = p < n + EPSILON
    (published,) = gradient(
        (_soft(BETA, mined) + lacking * _soft(-ALPHA, positive[:, None])).sum(), scores
    )
    relative = [
        _mean(
            torch.exp(ALPHA * (p[:, None] - p)),
            (p <= n[:, None] + EPSILON) & ~torch.eye(32, dtype=torch.bool),
        )
    ]
    others = negatives(scores).detach().scatter(1, at[:, None], -torch.inf)
    relative.append(_mean(torch.exp(-BETA * (n[:, None] - others)), others >= p.min() - EPSILON))
    cell = torch.diag(-_sig(p, relative[0], ALPHA)).scatter(
        1, at[:, None], _sig(n, relative[1], -BETA)[:, None]
    )
    cosine = torch.nn.functional.cosine_similarity(cell.flatten(), published.flatten(), dim=0)
    return Shown(
        relative_error(sig, of_two) < 1e-12
        and relative_error(cell, published) > 0.3
        and bool(cosine < 0.95),
        f"dL/ds of 32 anchors: MS of the hardest negative against (con, sig), apart by {digits(relative_error(sig, of_two))}\n"
        f"MS against (con, sig-ms): apart by {digits(100 * relative_error(cell, published))} %, cosine {digits(cosine)}",
    )


def table_1_circle() -> Shown:
    """(T_cir, P_lin) is not the circle loss in any setting.

    Kind: claim
    Where: Table 1 and eq. 8.
    Found: This cell is named circle loss.
    Correct: The triplet weight of the circle loss with margin m is $1 / (1 + e^(tau (2 m^2 - (1 - s_p)^2 - s_n^2)))$: eq. 8 if $m =
        1/sqrt(2)$, the code's weight if $m = 1 / 2$. Its pair weights are then $1 + m - s_p$ and $s_n + m$, not $1 - s_p$ and
        $s_n$, which need $m = 0$. The cell is the exact gradient of $softplus(tau (s_n^2 - s_p (2 - s_p))) / (2 tau)$.
    Effect: The cell is a good objective of its own. Its numbers are not those of the published circle loss.
    visavis: ``Circle`` is the published loss, ``Goal(triplet="cir", pair="lin")`` the cell. A test compares it with its potential.
    """
    pair = leaf(numbers(0.5, 0.6))
    p, n = pair.detach()
    printed, code = (torch.sigmoid(TAU * (n**2 + shift - p * (2 - p))) for shift in (0, 0.5))
    results = {}
    for name, margin, weight in (("1/sqrt(2)", 0.5**0.5, printed), ("1/2", 0.5, code)):
        lack = 1 + margin - p
        excess = n + margin
        (slope,) = gradient(
            (TAU * (excess * (pair[1] - margin) - lack * (pair[0] - 1 + margin))).exp().log1p(),
            pair,
        )
        results[name] = (slope[1] / (TAU * excess), weight, slope[1] / TAU, weight * n)
    (potential,) = gradient(
        (TAU * (pair[1] ** 2 - pair[0] * (2 - pair[0]))).exp().log1p() / (2 * TAU), pair
    )
    cell = torch.stack([-printed * (1 - p), printed * n])
    return Shown(
        all(
            abs(circle - own) < 1e-12 and push > 1.5 * own_push
            for circle, own, push, own_push in results.values()
        )
        and relative_error(potential, cell) < 1e-12,
        "s_p = 0.5, s_n = 0.6, tau = 10, circle loss / tau and cell: "
        + "\n".join(
            f"m = {m}: weight {digits(w)}, {digits(v)}, push {digits(q)}, {digits(r)}"
            for m, (w, v, q, r) in results.items()
        )
        + f"\nthe cell against the gradient of its potential: apart by {digits(relative_error(potential, cell))}",
    )


def combinations_without_loss() -> Shown:
    """Some combinations are not the gradient of a loss.

    Kind: claim
    Where: Section 3.4: combinations are "possibly impossible" to train through a loss, if not integrable.
    Found: The paper does not state which ones.
    Correct: Without the Heaviside: (nca, lin), (nca, sig), (cir, con) and (cir, sig) have a curl and so no loss. (con, con), (con, lin),
        (con, sig), (nca, con) and (cir, lin) have one. With the Heaviside of eq. 5, only (con, con) of the T_con column keeps its loss:
        around a closed path across the margin, the work of the others is not 0. The ms weights read the whole batch and are not a field
        of the two similarities.
    Effect: Without a loss, no number shows whether training still makes progress.
    visavis: ``Goal.integrable`` is False for the family. Its value is only a monitor, as documented.
    """
    points = torch.linspace(-0.9, 0.9, 19, dtype=torch.float64)
    grid = leaf(torch.cartesian_prod(points, points))
    curls = {
        f"({triplet}, {pair})": _curl(triplet, pair, grid)
        for triplet, pair in product(TRIPLETS, PAIRS)
    }
    turning = {name for name, curl in curls.items() if curl > 1e-3}
    still = max(curl for name, curl in curls.items() if name not in turning)
    around = {pair: _circulation(pair) for pair in PAIRS}
    return Shown(
        turning == {"(nca, lin)", "(nca, sig)", "(cir, con)", "(cir, sig)"}
        and still < 1e-10
        and abs(around["con"]) < 1e-3 < min(abs(around["lin"]), abs(around["sig"])),
        "largest curl: "
        + ", ".join(f"{name} {digits(curls[name])}" for name in sorted(turning))
        + f"\nof the other five {digits(still)}\n"
        "once around a square across the margin, with the Heaviside: "
        + ", ".join(f"(con, {pair}) {value:.3f}" for pair, value in around.items()),
    )


def tables_2_to_6() -> Shown:
    """The same configuration has different numbers in different tables.

    Kind: tables disagree
    Where: Tables 2, 3, 5 and 6, R@1 on MS-COCO 5K, image to text / text to image.
    Found: (con, con) on VSE++ fine-tuned: 41.0 in table 2, 40.8 in table 3. On VSE-infinity (BUTD): 58.3 and 58.9. "Ours" in table 6,
        labeled (cir, sig-ms): 44.3/31.0, 63.2/44.4, 71.9/53.7. That row of tables 3 and 5: 43.8/31.1, 63.2/44.9, 71.4/53.6.
    Correct: Cannot be known. Table 6 may hold single runs, while tables 3 and 5 hold means of three. (In section 4.4 the third of the
        three methods named is VSE-infinity (WSL), not BUTD twice.)
    Effect: Half a point, as much as between neighboring rows.
    visavis: A published number is quoted with paper, table and row.
    """
    pairs = {
        "(con, con) VSE++ i2t": (41.0, 40.8),
        "(con, con) BUTD i2t": (58.3, 58.9),
        "best VSE++": (44.3, 43.8),
        "best VSE++ t2i": (31.0, 31.1),
        "best BUTD t2i": (44.4, 44.9),
        "best WSL": (71.9, 71.4),
        "best WSL t2i": (53.7, 53.6),
    }
    return Shown(
        all(abs(one - other) > 0.05 for one, other in pairs.values()),
        "differences: "
        + ", ".join(f"{name} {one - other:+.1f}" for name, (one, other) in pairs.items()),
    )


def best_combination() -> Shown:
    """Some statements about the tables have exceptions in the tables.

    Kind: tables disagree
    Where: Sections 4.3 and 5, against tables 3 to 5.
    Found: The pair weights lin, sig, lin-ms and sig-ms improve on con. All losses of table 1 are better than the triplet loss in both
        steps. MS is the best of them in the fine-tuning step. (cir, sig-ms) is generally best.
    Correct: Lin is below con in table 3 (nca, first step, image to text 34.5 and 34.9), in table 4 (nca, image to text, 38.3 and 38.8, fine-tuned
        49.4 and 49.6; con, fine-tuned, text to image 36.4 and 36.5) and in table 5 (BUTD, image to text, all three triplet weights: 58.1 and
        58.9, 60.7 and 61.2, 60.1 and 60.3). Table 3, first step, text to image: (nca, con) 22.7, triplet 22.8. Fine-tuning, text to image:
        (con, sig) 31.1, (con, sig-ms) 30.8. Table 5, WSL: (nca, sig-ms) 71.5 / 54.2, (cir, sig-ms) 71.4 / 53.6.
    Effect: All are within or near the printed standard deviations. The sentences are summaries, not rules.
    visavis: Comparisons print intervals and paired tests, which decide the ranking.
    """
    exceptions = {
        "con over lin, table 3": 34.9 - 34.5,
        "con over lin, table 4": min(38.8 - 38.3, 49.6 - 49.4, 36.5 - 36.4),
        "con over lin, table 5": min(58.9 - 58.1, 61.2 - 60.7, 60.3 - 60.1),
        "triplet over (nca, con)": 22.8 - 22.7,
        "(con, sig) over (con, sig-ms)": 31.1 - 30.8,
        "(nca, sig-ms) over (cir, sig-ms)": 54.2 - 53.6,
    }
    return Shown(
        all(value > 0.05 for value in exceptions.values()),
        ", ".join(f"{name}: {value:+.1f}" for name, value in exceptions.items()),
    )


TRIPLETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "con": lambda p, _n: torch.ones_like(p),
    "nca": lambda p, n: (TAU * (n - p)).sigmoid(),
    "cir": lambda p, n: (TAU * (n**2 - p * (2 - p))).sigmoid(),
}
PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "con": (torch.ones_like, torch.ones_like),
    "lin": (lambda p: 1 - p, lambda n: n),
    "sig": (lambda p: (-ALPHA * (p - LAM)).sigmoid(), lambda n: (BETA * (n - LAM)).sigmoid()),
}


def _curl(triplet: str, pair: str, grid: Tensor) -> float:
    """The largest |d(T P-)/ds_p + d(T P+)/ds_n| over pairs ``[N, 2]`` of s_p and s_n."""
    p, n = grid.T
    pull, push = PAIRS[pair]
    weight = TRIPLETS[triplet](p, n) + 0 * grid.sum(1)  # constants, too, are functions of the grid
    (of_push,) = gradient((weight * push(n)).sum(), grid)
    (of_pull,) = gradient((weight * pull(p)).sum(), grid)
    return (of_push[:, 0] + of_pull[:, 1]).abs().max().item()


def _circulation(pair: str, steps: int = 20_000) -> float:
    """The work of the field with T_con and margin 0.2 once around the square with corners 0.1 and 0.6."""
    pull, push = PAIRS[pair]
    along = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps * 0.5 + 0.1
    low = torch.full_like(along, 0.1)
    high = torch.full_like(along, 0.6)
    sides = [
        (-pull(along), along, low),
        (push(along), high, along),
        (pull(along), along, high),
        (-push(along), low, along),
    ]
    return sum(0.5 * (force * (0.2 + n - p > 0)).mean().item() for force, p, n in sides)


def _soft(factor: float, scores: Tensor) -> Tensor:
    """$(1 / |factor|) log(1 + sum e^(factor (s - lam)))$ of each row: the two halves of the multi-similarity loss."""
    one = scores.new_zeros(len(scores), 1)
    return torch.cat([one, factor * (scores - LAM)], 1).logsumexp(1) / abs(factor)


def _sig(scores: Tensor, relative: Tensor | float, factor: float) -> Tensor:
    """Eq. 12. With relative 1, it is eq. 11."""
    return 1 / (relative + torch.exp(factor * (scores - LAM)))


def _mean(values: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, values, 0.0).sum(1) / kept.sum(1).clamp(min=1)
