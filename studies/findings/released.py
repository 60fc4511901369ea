"""Released code of other papers

SSP, NCR, AOQ, VSRN and VSE++, VSE-infinity, CE and MMT. Only their code was examined. The papers were not searched for misprints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from findings.base import Shown, digits, gradient, leaf, negatives, numbers, scores_of


def ssp_saturated_positive() -> Shown:
    """SSP: a positive at similarity 1 stops the program.

    Kind: behavior of the code
    Where: wayne980/PolyLoss@05da003, ``ContrastiveLoss.polyloss``.
    Found: Positives at or above 1 - 1e-5 are removed. The code then takes the minimum of the rest, which is empty, before it checks its
        size.
    Correct: An anchor without a remaining positive is skipped, as the next lines intend.
    Effect: Identical embeddings of a pair stop the training. This is rare with SCAN's averaged scores and certain in a collapse.
    visavis: ``SSP`` skips such an anchor.
    """
    outcomes = []
    for similarity in (0.9, 1.0):
        positives = numbers(similarity)
        try:
            outcomes.append(f"least of the kept {min(positives[positives < 1 - 1e-5]):g}")
        except (ValueError, RuntimeError) as error:
            outcomes.append(type(error).__name__)
    return Shown(
        outcomes[0].startswith("least") and outcomes[1].endswith("Error"),
        f"s_ii = 0.9: {outcomes[0]}\ns_ii = 1: {outcomes[1]}",
    )


def ssp_negative_gradient() -> Shown:
    """SSP: negatives of small similarity are pulled closer.

    Kind: behavior of the code
    Where: wayne980/PolyLoss@05da003, the polynomial $[0.9 s_n^2 - 0.4 s_n + 0.03]_+$ of the negative.
    Found: It falls up to its zero at 0.0955, is 0 to 0.3489, and rises from there.
    Correct: A negative should not be pulled. The coefficients were chosen for SCAN's scores on Flickr30K. Other scores need others.
    Effect: With scores around 0, as those of global embeddings at the start, hardest negatives are pulled toward their anchors.
    visavis: ``SSP(negative=(0.03, -0.4, 0.9))`` is the released polynomial, as its docstring states.
    """
    similar = leaf(numbers(0.0, 0.2, 0.5))
    (slope,) = gradient((0.9 * similar**2 - 0.4 * similar + 0.03).clamp(min=0).sum(), similar)
    roots = [(0.4 + sign * (0.16 - 4 * 0.9 * 0.03) ** 0.5) / 1.8 for sign in (-1, 1)]
    return Shown(
        bool(slope[0] < 0 == slope[1] < slope[2])
        and abs(roots[0] - 0.0955) < 1e-4
        and abs(roots[1] - 0.3489) < 1e-4,
        f"gradient on s_n at 0, 0.2, 0.5: {', '.join(map(digits, slope))}\nzeros of the polynomial {roots[0]:.4f} and {roots[1]:.4f}",
    )


def ssp_jump() -> Shown:
    """SSP: the loss jumps where a negative becomes active.

    Kind: behavior of the code
    Where: wayne980/PolyLoss@05da003: the term is added if $s_n + 0.2 > s_p$.
    Found: On one side the loss of the anchor is 0, on the other both polynomials, which are not 0 there.
    Correct: The paper does not state whether this is intended. A hinge is continuous at its corner.
    Effect: The value of the loss is not a measure of progress, and rounding decides about anchors at the corner.
    visavis: ``SSP`` keeps the jump, and the strict comparison in the released order of operations.
    """
    before, after = (_ssp(0.6, 0.4 + step) for step in (-1e-9, 1e-9))
    return Shown(
        before == 0 and after > 0.1,
        f"s_p = 0.6, s_n just below and above 0.4: {digits(before)} and {digits(after)}",
    )


def ncr_row_margins() -> Shown:
    """NCR: a text anchor gets the margin of the compared image.

    Kind: code differs from paper
    Where: XLearning-SCU/2021-NeurIPS-NCR@60256ba, ``ContrastiveLoss.forward`` with labels ``[B, 1]`` (the unlabeled set,
        ``targets_u.view(-1, 1)``).
    Found: One column of margins is added to the matrix in both directions: the row's, which is the image's.
    Correct: The margin of the anchor's pair, as in eq. 27 of the unified loss: the row's for images, the column's for texts.
    Effect: A pair with a noisy label still has its own text trained with the full margins of other images.
    visavis: ``NCR()`` takes the anchor's margin, ``NCR(semantics="reference")`` with ``pair_margin`` the code's.
    """
    scores = scores_of(16, seed=0, noise=2.0)
    labels = torch.linspace(0, 1, 16, dtype=torch.float64)[
        torch.randperm(16, generator=torch.Generator().manual_seed(1))
    ]
    margin = 0.2 * (10**labels - 1) / 9
    code, right = (_hardest(scores.T, one) for one in (margin[None], margin[:, None]))
    chosen = negatives(scores.T + margin[None]).argmax(1)
    return Shown(
        bool((code - right).abs() > 0.01),
        f"16 texts as anchors, hardest negatives: {digits(right)} with their own margins, {digits(code)} in the code. "
        f"The noisiest text (margin 0) is trained with margin {digits(margin[chosen[labels.argmin()]])}",
    )


def ncr_noisy_half() -> Shown:
    """NCR: noisy pairs have no loss in the first half of the epochs.

    Kind: behavior of the code
    Where: XLearning-SCU/2021-NeurIPS-NCR@60256ba, ``train`` in ``NCR/co_train.py``, and the commands of its README.
    Found: ``loss_u`` is 0 while ``epoch < num_epochs // 2``. The README warms up for 5 epochs on Flickr30K and 10 on MS-COCO and CC152K. The
        default of the script is 1.
    Correct: Nothing printed contradicts it. A comparison that follows only the defaults trains another method.
    Effect: With 40 epochs, clean pairs alone are trained for 20, and a noisy pair is never a negative of a clean one, because both come from
        separate loaders.
    visavis: ``NoisySupervision(warmup_epochs=5, noisy_pairs_from_epoch=26)`` in the recipe of the table row. The defaults are 1 and 1.
    """
    warmup, epochs = 5, 40
    without = sum(epoch < epochs // 2 for epoch in range(epochs))
    return Shown(
        without == 20,
        f"{warmup} epochs of warm-up and {epochs} of training: {without} without a loss for noisy pairs, first with one {warmup + without + 1}",
    )


def ncr_margin_matrix() -> Shown:
    """NCR: refined labels become a matrix.

    Kind: code differs from paper
    Where: XLearning-SCU/2021-NeurIPS-NCR@60256ba, ``train`` in ``NCR/co_train.py``: clean probability ``[B, 1]``, prediction ``[B]``.
    Found: $w y + (1 - w) p$ broadcasts to ``[B, B]``: entry (i, j) mixes the probability of pair i with the prediction of pair j.
    Correct: One label for each pair, $w_i + (1 - w_i) p_i$. These labels are on the diagonal, which the loss sets to 0.
    Effect: No margin of the labeled set is the intended one. They are near it where clean probabilities are near 1. It cannot be proved
        from here that published models were trained with this line. The released script has no other.
    visavis: Labels and margins are one number per pair.
    """
    probability = numbers(0.6, 0.8, 0.99)[:, None]
    prediction = numbers(0.1, 0.5, 0.9)
    code = probability * torch.ones(3, 1) + (1 - probability) * prediction
    right = probability[:, 0] + (1 - probability[:, 0]) * prediction
    used = code[0, ~torch.eye(3, dtype=torch.bool)[0]]
    return Shown(
        code.shape == (3, 3)
        and bool((code.diag() - right).abs().max() < 1e-12)
        and bool((used - right[0]).abs().min() > 0.1),
        f"3 pairs give labels {list(code.shape)}. The first pair's is {digits(right[0])}, the values used in its row are {', '.join(map(digits, used))}",
    )


def aoq_negative_weight() -> Shown:
    """AOQ: a weight can be negative, and its term then pushes the own pair apart.

    Kind: behavior of the code
    Where: sunnychencool/AOQ@5bfe620, ``ContrastiveLoss.forward``: $beta - (offline - online) / alpha$, alpha = 0.3, beta = 1.5.
    Found: No bound: the weight is negative where the offline negative is more than 0.45 above the online one.
    Correct: Whether a bound was intended is not stated. 0 would be one.
    Effect: The hinge of the same offline negative, which is always open there, pulls the pair together with weight 1. The sum of the two
        has the wrong sign where the offline negative is more than 0.75 above the online one.
    visavis: ``AOQ`` keeps the weight as released, as its docstring states.
    """
    results = {}
    for offline in (0.6, 0.9):
        own = leaf(numbers(0.2))
        online = 0.1
        weight = 1.5 - (offline - online) / 0.3
        loss = weight * (0.2 + online - own).clamp(min=0) + (offline - own).clamp(min=0)
        results[offline] = (weight, gradient(loss.sum(), own)[0].item())
    return Shown(
        results[0.6][0] < 0 and results[0.6][1] < 0 < results[0.9][1],
        "own pair 0.2, online negative 0.1\n"
        + "\n".join(
            f"offline {o}: weight {digits(weight)}, gradient on the own pair {slope:+.3g}"
            for o, (weight, slope) in results.items()
        ),
    )


def aoq_offline_pull() -> Shown:
    """AOQ: the gradient through the weight can pull an offline negative closer.

    Kind: behavior of the code
    Where: sunnychencool/AOQ@5bfe620, the same lines: the weight is not detached.
    Found: The offline similarity has the gradient $1 - hinge / alpha$ where its own hinge is open, and $-hinge / alpha$ where it is
        not, with hinge the online one.
    Correct: A weight that only measures how hard a batch is would be a constant.
    Effect: Where the online hinge exceeds 0.3, or is open while the offline one is closed, the offline negative is pulled toward the
        anchor.
    visavis: ``AOQ`` keeps the gradient as released. Its docstring gives $dL/ds$.
    """
    results = {}
    for values in ((0.2, 0.5, 0.3), (0.7, 0.6, 0.4)):
        offline = leaf(numbers(values[2]))
        online = max(0.2 + values[1] - values[0], 0)
        loss = (1.5 - (offline - values[1]) / 0.3) * online + (offline - values[0]).clamp(min=0)
        results[values] = gradient(loss.sum(), offline)[0].item()
    return Shown(
        all(slope < -0.2 for slope in results.values()),
        "\n".join(
            f"own pair {own}, online {online}, offline {offline}: gradient on the offline similarity {digits(slope)}"
            for (own, online, offline), slope in results.items()
        ),
    )


def vsrn_normalization() -> Shown:
    """VSRN: regions are normalized over the regions, not over the features.

    Kind: code differs from paper
    Where: KunpengLi1994/VSRN@777ae74, ``l2norm`` (``sum(dim=1)``), as in fartashf/vsepp@abe382f and sunnychencool/AOQ@5bfe620.
    Found: VSE++ gives it ``[B, D]``, where dimension 1 holds features. VSRN gives it ``[B, K, D]``, where it holds regions.
    Correct: The last dimension.
    Effect: Each feature is scaled over the regions of an image, and regions keep different lengths. Trained weights belong to this scaling.
    visavis: Embeddings are normalized over features, the last dimension, throughout.
    """
    regions = torch.randn(
        2, 36, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    regions = regions * torch.linspace(0.5, 2, 36, dtype=torch.float64)[:, None]
    code = regions / regions.square().sum(1, keepdim=True).sqrt()
    lengths = code.norm(dim=2)
    over_regions = code.norm(dim=1)
    return Shown(
        bool((over_regions - 1).abs().max() < 1e-12) and bool(lengths.max() > 2 * lengths.min()),
        f"36 regions of 64 features: lengths of regions {digits(lengths.min())} to {digits(lengths.max())}, of features over regions 1",
    )


def vse_infinity_warm_up() -> Shown:
    """VSE-infinity: the "mean" of the warm-up is a sum.

    Kind: ambiguity
    Where: woodfrog/vse_infty@29df9d6, ``vse_mean_warmup_epochs`` and ``ContrastiveLoss.forward`` (``max_violation`` off).
    Found: In these epochs the hinges of all negatives are added, not averaged.
    Correct: The sum. A reimplementation that follows the name trains with a gradient B - 1 times smaller.
    Effect: One epoch in both scripts. A gradient clip of 2 follows, which compensates part of the scale.
    visavis: ``Triplet()`` is the sum, ``Triplet(reduction="mean")`` a mean.
    """
    scores = scores_of(128, seed=0, noise=2.0, dimension=64)
    hinges = torch.stack(
        [(0.2 + negatives(way) - way.diag()[:, None]).clamp(min=0) for way in (scores, scores.T)]
    )
    total = hinges.sum()
    mean = hinges.sum() / 127
    hardest = sum(
        (0.2 + negatives(way).amax(1) - way.diag()).clamp(min=0).sum() for way in (scores, scores.T)
    )
    return Shown(
        bool(total > 10 * mean),
        f"128 pairs, margin 0.2: sum {digits(total)}, mean over negatives {digits(mean)}, hardest {digits(hardest)}",
    )


def ce_tied_captions() -> Shown:
    """CE, MMT: a video whose two best captions are its own and tie has no hit at rank 1.

    Kind: behavior of the code
    Where: albanie/collaborative-experts@7eb3b9d and gabeur/mmt@8f53717, ``v2t_metrics``, whose comment names the degenerate case of all
        scores equal.
    Found: The rank of a caption is the mean position of all captions that tie with it, including its own siblings. A video has the
        minimum of these. R@1 requires 0.
    Correct: The first caption is correct in either order of two correct captions.
    Effect: With real scores, ties are rare. A caption that a video has twice ties exactly.
    visavis: A caption is never ranked against another correct one. Ties with wrong ones count against the model by default.
    """
    order = numbers(0.9, 0.9, 0.1, 0.1).neg()
    positions = [
        (order.sort().values == distance).nonzero().double().mean().item() for distance in order[:2]
    ]
    return Shown(
        min(positions) == 0.5,
        f"own captions 0.9 and 0.9, others 0.1: 0-based rank {min(positions):g}, R@1 {100 * (min(positions) == 0):g}, not 100",
    )


def twins_in_a_batch() -> Shown:
    """VSE++ and its descendants: another caption of the same image is a negative.

    Kind: behavior of the code
    Where: fartashf/vsepp@abe382f, ``ContrastiveLoss``. Also VSRN, VSE-infinity, SCAN, BFAN, SGRAF, AOQ, NCR, GOAL, the Ladder loss.
    Found: Batches are sampled from captions, and everything except the diagonal is a negative. The image is equally similar to the twin's
        text, so this hinge is always the margin.
    Correct: Leave it out. X-VLM, for example, does.
    Effect: The smaller the data set, the more twins.
    visavis: Ids define which items belong together, and positives are never negatives. ``Targets.paired`` and the recipes of paper rows
        follow the released code.
    """
    expected = {
        name: 128 * 127 / 2 * 4 / (5 * images - 1)
        for name, images in (("Flickr8k", 6000), ("Flickr30K", 29_000), ("MS-COCO", 113_287))
    }
    image_of_caption = (
        torch.randint(0, 6000 * 5, (2000, 128), generator=torch.Generator().manual_seed(0)) // 5
    )
    mean_twins = (image_of_caption[:, :, None] == image_of_caption[:, None]).sum((1, 2)).sub(
        128
    ).double().mean().item() / 2
    return Shown(
        abs(mean_twins - expected["Flickr8k"]) < 0.5,
        "expected twins in a batch of 128 captions: "
        + ", ".join(f"{name} {digits(number)}" for name, number in expected.items()),
    )


def _ssp(positive: float, negative: float) -> float:
    """The term of one anchor, by the released rule."""
    if negative + 0.2 <= positive:
        return 0.0
    return max(0.2 * positive**2 - 0.7 * positive + 0.5, 0) + max(
        0.9 * negative**2 - 0.4 * negative + 0.03, 0
    )


def _hardest(scores: Tensor, margin: Tensor) -> Tensor:
    return (negatives(scores + margin).amax(1) - scores.diag()).clamp(min=0).sum()
