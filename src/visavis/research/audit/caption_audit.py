"""Audit of captions as texts: captions that fit many images, and captions unlike the other captions
of their image. The share of wrong items is estimated from scores.

Cosine similarities show that two captions describe different things. They do not show that one
caption negates another ("a dog", "no dog"), and a caption about another part of the image looks
like a wrong one. So the results are candidates for inspection, not errors.

The estimate needs scores of items that are known to be wrong, such as captions next to random
images. Higher scores look more wrong. Let O(t) be the share of the data with a score of at least t,
and W(t) the same share of known wrong items. If a share p of the data is wrong in the same way,
O(t) >= p W(t) for each t, so p <= min O(t) / W(t). Near the highest scores, which only wrong items
reach, this bound is about p.

Source: C. Scott, G. Blanchard, M. Handy, "Classification with Asymmetric Label Noise" (2013): the
bound on a known mixture component.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visavis.core.memory_budget import chunk_slices
from visavis.data.dataset import Dataset
from visavis.data.words import tokenize
from visavis.losses.scoring import max_query_rows
from visavis.research.audit.audit_part import Issue, format_count

# Two captions are near-identical if their cosine exceeds this quantile of the cosines of two
# captions of one image.
NEAR_QUANTILE = 0.99
# The threshold if no image has two captions.
DEFAULT_NEAR_COSINE = 0.95
# A caption that is near-identical to one of this many other images is generic.
MIN_OTHER_IMAGES = 5
# Captions that each caption is compared with, sampled at random. All pairs would take hours for
# millions of captions.
MAX_COMPARED_CAPTIONS = 100_000
SERIOUS_GENERIC_RATIO = 0.01

_FIX_GENERIC = "Describe what distinguishes these images, or add the other images as positives: training counts them as negatives of the caption."
_FIX_OUTLIERS = "Check the first ones: they belong to another image, contradict the other captions, or mention something that no other mentions."


# Thresholds whose bounds can be distinguished, roughly. The bound with the best threshold is
# corrected for this choice (Bonferroni).
NUM_TAILS = 20
# A threshold is used only if at least this share of the known wrong items reaches it.
MIN_TAIL = 0.05
# Items are listed as long as at least this share of the list is expected to be wrong.
MIN_LIST_PRECISION = 0.5


def sibling_agreement(vectors: Tensor, image_of: Tensor, assigned: Tensor) -> Tensor:
    """Compute the mean cosine of each caption with the other captions of its assigned image, and of
    these with one another, ``[C, 2]``. NaN if there are too few of them.
    """
    sibling_sum, count = _sum_siblings(vectors, image_of, assigned)  # [C, D], [C]
    agreement = (sibling_sum * vectors).sum(1) / count
    # |sum of n unit vectors|^2 = n + sum of the cosines of all n(n - 1) ordered pairs.
    of_siblings = (sibling_sum.square().sum(1) - count) / (count * (count - 1))
    return torch.stack(
        [agreement.where(count > 0, torch.nan), of_siblings.where(count > 1, torch.nan)], 1
    )


def sibling_mean(values: Tensor, image_of: Tensor, assigned: Tensor) -> Tensor:
    """Average a value ``[C]`` over the other captions of an image, as in ``sibling_agreement``. NaN
    if there are none.
    """
    sibling_sum, count = _sum_siblings(values[:, None], image_of, assigned)
    return (sibling_sum[:, 0] / count).where(count > 0, torch.nan)


def _sum_siblings(values: Tensor, image_of: Tensor, assigned: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of values ``[C, D]`` over the siblings of each caption in its assigned image,
    and the number of siblings ``[C]``.
    """
    num_images = int(torch.cat([image_of, assigned]).max()) + 1
    total = values.new_zeros(num_images, values.shape[1]).index_add_(0, image_of, values)  # [N, D]
    # Of several assignments to one index, numpy keeps the last.
    last = np.full(num_images, -1)
    last[image_of.numpy()] = np.arange(len(image_of))
    # The caption of the assigned image that is not a sibling, -1 for none: the caption itself in
    # its own image. In another image it replaces the last caption, so that the numbers are
    # comparable.
    excluded = torch.where(
        image_of == assigned, torch.arange(len(image_of)), torch.from_numpy(last)[assigned]
    )
    count = torch.bincount(image_of, minlength=num_images)[assigned] - (excluded >= 0).long()
    return total[assigned] - torch.where(
        (excluded >= 0)[:, None], values[excluded], 0.0
    ), count.float()


def sample_other_images(image_of: np.ndarray, copy_groups: np.ndarray, seed: int) -> np.ndarray:
    """Sample another image for each caption, and not a copy of its own image, which has the same
    group, if possible.
    """
    random = np.random.default_rng([seed, len(image_of), len(copy_groups)])
    other_image = random.integers(len(copy_groups), size=len(image_of))  # [C]
    # Redrawing ends even if all images are copies of one another.
    for _ in range(100):
        is_copy = copy_groups[other_image] == copy_groups[image_of]
        if not is_copy.any():
            break
        other_image[is_copy] = random.integers(len(copy_groups), size=int(is_copy.sum()))
    return other_image


@dataclass(frozen=True)
class GenericCaption:
    """A caption that fits many images.

    Attributes:
        caption: Its text.
        images: Its image, and examples of other images.
        num_other_images: Number of other images that have a near-identical caption.
        num_exact_copies: Number of other images that have a caption of the same words.
    """

    caption: str
    images: tuple[str, ...]
    num_other_images: int
    num_exact_copies: int

    def __str__(self) -> str:
        same = (
            f"{self.num_exact_copies:,} with the same words"
            if self.num_exact_copies
            else "none with the same words"
        )
        return f'"{self.caption}": {format_count(self.num_other_images, "other image")} ({same}), such as {", ".join(self.images[:3])}'


@dataclass(frozen=True)
class OutlierCaption:
    """A caption unlike the other captions of its image.

    Attributes:
        image: Name of the image.
        split: Split of the image.
        caption: Text of the caption.
        agreement: Mean cosine with the other captions.
        sibling_agreement: Mean cosine of the other captions with one another.
        sibling: Text of one of the other captions.
    """

    image: str
    split: str
    caption: str
    agreement: float
    sibling_agreement: float | None
    sibling: str

    def __str__(self) -> str:
        return f'{self.image} ({self.split}): "{self.caption}", another caption: "{self.sibling}" (agreement {self.agreement:.2f})'


@dataclass(frozen=True)
class CaptionAudit:
    """Audit of the captions of a data set.

    Attributes:
        encoder: Name of the sentence encoder, or "words" for tf-idf.
        near_cosine: Cosine from which two captions are near-identical.
        captions: Number of captions.
        num_shared: Number of captions with the same words as a caption of another image.
        generic: Captions that fit many images, each text once.
        num_generic: Number of captions that fit many images.
        outliers: Captions unlike their siblings, the most different first.
        outlier_ratio: Estimated share of such captions.
        max_outlier_ratio: Upper bound of this share with 95 % confidence.
    """

    encoder: str
    near_cosine: float
    captions: int
    num_shared: int
    generic: tuple[GenericCaption, ...]
    num_generic: int
    outliers: tuple[OutlierCaption, ...]
    outlier_ratio: float
    max_outlier_ratio: float

    def issues(self) -> list[Issue]:
        """Report generic captions and outliers as issues."""
        issues = [
            Issue(
                "captions that fit many images",
                self.num_generic,
                f"{self.num_generic / self.captions:.1%} of the captions are nearly identical "
                f"(cosine {self.near_cosine:.2f}, {self.encoder}) to captions of "
                f"{MIN_OTHER_IMAGES} or more other images. {self.num_shared:,} have the same words "
                "as a caption of another image.",
                _FIX_GENERIC,
                examples=tuple(map(str, self.generic)),
                serious=self.num_generic >= SERIOUS_GENERIC_RATIO * self.captions,
            ),
            Issue(
                "captions unlike their siblings",
                len(self.outliers),
                f"about {self.outlier_ratio:.1%} of the captions (at most "
                f"{self.max_outlier_ratio:.1%}) agree with the other captions of their image as "
                "little as with those of a random image.",
                _FIX_OUTLIERS,
                examples=tuple(map(str, self.outliers)),
                serious=False,
            ),
        ]
        return [issue for issue in issues if issue.count]


def audit_captions(
    data: Dataset, vectors: Tensor, encoder: str, copy_groups: np.ndarray, seed: int = 0
) -> CaptionAudit:
    """Find generic captions and outliers by the unit vectors ``[C, D]`` of the captions."""
    image_of = torch.from_numpy(data.image_of)
    # Cosines of captions of one image that follow each other.
    order = torch.argsort(image_of, stable=True)
    same_image = image_of[order][1:] == image_of[order][:-1]
    cosines = (vectors[order][1:] * vectors[order][:-1]).sum(1)[same_image]
    near_cosine = DEFAULT_NEAR_COSINE
    if len(cosines):
        near_cosine = min(float(np.quantile(cosines.numpy(), NEAR_QUANTILE)), 0.999)
    num_other_images, examples = _count_similar_images(
        data, vectors, copy_groups, near_cosine, seed
    )
    # Other images with a caption of the same words, ignoring punctuation and case.
    words_of = [tuple(tokenize(caption)) for caption in data.captions]
    groups_with = defaultdict[tuple[str, ...], set[int]](set)
    for words, group in zip(words_of, copy_groups[data.image_of].tolist(), strict=True):
        groups_with[words].add(group)
    num_exact_copies = [len(groups_with[words]) - 1 for words in words_of]
    # Captions that fit many images, each text once, those that fit the most first.
    generic = dict[tuple[str, ...], GenericCaption]()
    for caption in np.argsort(-num_other_images, kind="stable").tolist():
        if num_other_images[caption] < MIN_OTHER_IMAGES:
            break
        images = (data.image_of[caption], *examples[caption])
        generic.setdefault(
            words_of[caption],
            GenericCaption(
                data.captions[caption],
                tuple(data.images[image].name for image in images),
                int(num_other_images[caption]),
                num_exact_copies[caption],
            ),
        )
    outliers, outlier_ratio, max_outlier_ratio = _find_outliers(
        data, vectors, image_of, copy_groups, seed
    )
    return CaptionAudit(
        encoder=encoder,
        near_cosine=near_cosine,
        captions=len(data.captions),
        num_shared=sum(count > 0 for count in num_exact_copies),
        generic=tuple(generic.values()),
        num_generic=int((num_other_images >= MIN_OTHER_IMAGES).sum()),
        outliers=outliers,
        outlier_ratio=outlier_ratio,
        max_outlier_ratio=max_outlier_ratio,
    )


def _count_similar_images(
    data: Dataset, vectors: Tensor, copy_groups: np.ndarray, near_cosine: float, seed: int
) -> tuple[np.ndarray, list[list[int]]]:
    """Count the other images with a near-identical caption, for each caption, and name up to three
    of them.
    """
    group_of = copy_groups[data.image_of]
    compared = np.arange(len(group_of))
    if len(compared) > MAX_COMPARED_CAPTIONS:
        compared = np.sort(
            np.random.default_rng([seed, 3]).choice(
                len(group_of), MAX_COMPARED_CAPTIONS, replace=False
            )
        )
    compared_groups = group_of[compared]
    compared_vectors = vectors[torch.from_numpy(compared)]
    counts = np.zeros(len(group_of), np.int64)
    examples = list[list[int]]()
    for rows in chunk_slices(len(group_of), max_query_rows(len(compared), 8.0)):
        is_near = (vectors[rows] @ compared_vectors.T >= near_cosine).numpy()  # [block, compared]
        for caption, row in enumerate(is_near, rows.start):
            others = np.flatnonzero(row)
            # Copies of the image share its captions.
            others = others[compared_groups[others] != group_of[caption]]
            # Each other image once, however many of its captions are near.
            distinct, first = np.unique(compared_groups[others], return_index=True)
            counts[caption] = len(distinct)
            examples.append(data.image_of[compared[others[np.sort(first)[:3]]]].tolist())
    return counts, examples


def _find_outliers(
    data: Dataset, vectors: Tensor, image_of: Tensor, copy_groups: np.ndarray, seed: int
) -> tuple[tuple[OutlierCaption, ...], float, float]:
    """List captions unlike the other captions of their image, with their estimated share and its
    upper bound.
    """
    other = torch.from_numpy(sample_other_images(data.image_of, copy_groups, seed))
    matched, mismatched = (
        sibling_agreement(vectors, image_of, assigned).numpy() for assigned in (image_of, other)
    )
    # With a single sibling it is unknown which of the two captions is the outlier.
    is_known, is_known_mismatched = (
        np.isfinite(columns[:, 1]) for columns in (matched, mismatched)
    )
    if not is_known.any() or not is_known_mismatched.any():
        return (), 0.0, 0.0
    captions = np.flatnonzero(is_known)
    # Higher looks more wrong.
    scores, wrong = mismatch_log_odds(matched[is_known], mismatched[is_known_mismatched])
    # A wrong caption lowers the agreement of its siblings, too: only the caption with the lowest
    # agreement of an image counts.
    lowest = np.full(len(data.images), np.inf)
    # [N], the lowest agreement of each image
    np.minimum.at(lowest, data.image_of[captions], matched[captions, 0])
    scores[matched[captions, 0] > lowest[data.image_of[captions]]] = -np.inf
    estimate = NoiseEstimate.from_scores(scores, wrong)
    outliers = []
    for caption in captions[estimate.listed].tolist():
        image = data.images[data.image_of[caption]]
        sibling = next(i for i in data.captions_of[data.image_of[caption]] if i != caption)
        agreement, of_siblings = map(float, matched[caption])
        outliers.append(
            OutlierCaption(
                image.name,
                image.split,
                data.captions[caption],
                agreement,
                of_siblings,
                data.captions[sibling],
            )
        )
    return tuple(outliers), estimate.noise_ratio, estimate.max_noise_ratio


@dataclass(frozen=True)
class NoiseEstimate:
    """Estimated noise of a data set.

    Attributes:
        noise_ratio: Estimated share of wrong items.
        min_noise_ratio: Lower bound of this share with 95 % confidence, if no correct item scores
            as high as the best threshold. Otherwise it is too high.
        max_noise_ratio: Upper bound of this share with 95 % confidence.
        precision: For each item, the expected share of wrong items among all items that look at
            least as wrong, shape ``[N]``.
        recall: For each item, the share of known wrong items that look at least as wrong, shape
            ``[N]``.
        listed: Indices of the items that are likely wrong, the most suspicious first.
    """

    noise_ratio: float
    min_noise_ratio: float
    max_noise_ratio: float
    precision: np.ndarray
    recall: np.ndarray
    listed: np.ndarray

    @classmethod
    def from_scores(cls, scores: np.ndarray, wrong: np.ndarray) -> NoiseEstimate:
        """Estimate the noise from the scores of the data ``[N]`` and of known wrong items ``[M]``.
        Higher looks more wrong, and an item with -inf is never listed.
        """
        from scipy.stats import beta

        above = _count_at_least(scores, scores)
        recall = _count_at_least(wrong, scores) / len(wrong)
        usable = recall >= MIN_TAIL
        # Clopper-Pearson bounds of the shares, divided by the recall of the threshold.
        upper = np.where(
            above < len(scores),
            beta.ppf(1 - 0.05 / NUM_TAILS, above + 1, np.maximum(len(scores) - above, 1)),
            1.0,
        ) / np.maximum(recall, MIN_TAIL)
        best = int(np.argmin(np.where(usable, upper, np.inf)))
        noise_ratio = (
            float(min(above[best] / len(scores) / recall[best], 1.0)) if usable[best] else 0.0
        )
        # At least one item reaches the threshold, its own score.
        lower = beta.ppf(0.05, above[best], len(scores) - above[best] + 1)
        precision = np.minimum(noise_ratio * recall * len(scores) / np.maximum(above, 1), 1.0)
        # The best precision of all lists that are at least as long: estimates of very short lists
        # are too noisy.
        longest_first = np.argsort(scores, kind="stable")
        precision[longest_first] = np.maximum.accumulate(precision[longest_first])
        order = np.argsort(-scores, kind="stable")  # the most suspicious first
        precise = np.flatnonzero(
            (precision[order] >= MIN_LIST_PRECISION) & np.isfinite(scores[order])
        )
        listed = order[: precise[-1] + 1] if len(precise) else order[:0]
        bounds = (
            float(min(lower / max(recall[best], MIN_TAIL), noise_ratio)),
            float(min(upper[best], 1.0)),
        )
        return cls(noise_ratio, *bounds, precision, recall, listed)


def _count_at_least(values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Count the values that are at least each limit."""
    count: np.ndarray = len(values) - np.searchsorted(np.sort(values), limits, side="left")
    return count


def mismatch_log_odds(data: np.ndarray, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Combine the features of the data ``[N, F]`` and of known wrong items ``[M, F]`` into one
    score each with logistic regression: the log-odds of being wrong.
    """
    from scipy.optimize import minimize

    features = np.concatenate([data, wrong]).astype(np.float64)
    is_known = np.isfinite(features)
    mean = np.where(is_known, features, 0.0).sum(0) / np.maximum(is_known.sum(0), 1)
    # A missing feature (NaN) is replaced by its mean.
    features = np.where(is_known, features - mean, 0.0)
    # [N + M, 1 + F], with an intercept and features of unit variance.
    design = np.concatenate(
        [np.ones((len(features), 1)), features / np.maximum(features.std(0), 1e-9)], 1
    )
    is_wrong = np.repeat([0.0, 1.0], [len(data), len(wrong)])
    # Both classes weigh the same.
    weight = np.where(is_wrong > 0, 0.5 / len(wrong), 0.5 / len(data)) * len(features)

    def loss(coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        log_odds = design @ coefficients
        # The ridge penalty is 1. The intercept has none.
        value = (weight * (np.logaddexp(0, log_odds) - is_wrong * log_odds)).sum() + 0.5 * (
            coefficients[1:] ** 2
        ).sum()
        # The sigmoid by tanh does not overflow.
        error = weight * (0.5 * (1 + np.tanh(log_odds / 2)) - is_wrong)
        return value, design.T @ error + np.r_[0.0, coefficients[1:]]

    fit = minimize(loss, np.zeros(design.shape[1]), jac=True, method="L-BFGS-B")
    scores: np.ndarray = design @ fit.x
    return scores[: len(data)], scores[len(data) :]
