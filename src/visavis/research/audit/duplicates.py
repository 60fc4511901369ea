"""Near-duplicates within and across splits: copies by their pixels, and images that an encoder
cannot distinguish.

The thresholds are learned from the data. Some images are recompressed, halved and cropped, and two
images of the data set count as copies if they agree as well as most of these copies agree with
their originals. This also gives the expected recall.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import torch
from PIL import Image as Pillow
from PIL.Image import Image as PILImage
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample, interpolate, normalize

from visavis.core.memory_budget import chunk_slices
from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.data.file_names import split_priority
from visavis.data.image_hashes import MAX_HAMMING_DISTANCE, dhash
from visavis.data.parallel import map_in_order
from visavis.losses.scoring import max_query_rows
from visavis.research.audit.audit_part import (
    ImageVectors,
    Issue,
    cache_path,
    cached_tensors,
    format_count,
)

THUMBNAIL_SIZE, COARSE_SIZE = 48, 8
# Pixels that the shorter side of an image keeps when it is decoded at a reduced size.
MIN_SIDE = 3 * THUMBNAIL_SIZE
# Images of which four copies each are made.
NUM_TEST_IMAGES = 40
# Copies are searched among this many nearest neighbors by coarse colors, by perceptual hashes and
# by features.
NUM_NEIGHBORS = 5
# The thresholds accept this share of the copies that are made here.
MIN_COPY_RECALL = 0.95
# Copies have at least this correlation. Different images in front of the same background have less.
MIN_CORRELATION = 0.97

_FIX_BETWEEN = "Remove these images from the training split or from the evaluation. A model may remember them, and its metrics are too high."
_FIX_WITHIN = "Merge copies into one image with all of their captions. Otherwise each is a negative for the captions of the other."
_FIX_SIMILAR = "Check some of them. Images of the same moment are negatives of one another, and across splits they make metrics too high."


PAIRS_PER_BATCH = 512
# Images are compared at a grid of this many points per side.
_GRID_SIZE = 16
# Shares of a side that the first crops leave out.
_MARGINS = (0.0, 0.08, 0.16)
# Shares of a side by which an edge of the best crop is then moved.
_STEPS = (0.03, 0.02, 0.02, 0.01, 0.01)
# Largest increase of a correlation by moving the edges of a crop.
_MAX_REFINEMENT_GAIN = 0.15
# Of 255 levels. An image that varies less has no content that could agree.
_MIN_STANDARD_DEVIATION = 4.0


def pairs_above_threshold(vectors: Tensor, threshold: float, k: int) -> np.ndarray:
    """Find pairs of rows ``[P, 2]`` with a large dot product among the k nearest neighbors of each
    row.
    """
    pairs = [np.empty((0, 2), np.int64)]
    for rows in chunk_slices(len(vectors), max_query_rows(len(vectors), 16.0)):
        scores = vectors[rows] @ vectors.T  # [block, N]
        positions = torch.arange(len(scores))
        # An image is not its own neighbor.
        scores[positions, rows.start + positions] = -torch.inf
        nearest = scores.topk(min(k, len(vectors) - 1), dim=1)
        query, neighbor = (nearest.values >= threshold).nonzero(as_tuple=True)
        pairs.append(torch.stack([rows.start + query, nearest.indices[query, neighbor]], 1).numpy())
    return unique_pairs(np.concatenate(pairs))


def unique_pairs(pairs: np.ndarray) -> np.ndarray:
    """Return each unordered pair once.

    Args:
        pairs: Pairs of indices, shape ``[P, 2]``.

    Returns:
        The sorted pairs, the smaller index first.

    Example:
        >>> unique_pairs(np.array([[3, 1], [1, 3], [0, 2]])).tolist()
        [[0, 2], [1, 3]]
    """
    return np.unique(np.sort(pairs.reshape(-1, 2), axis=1), axis=0)


def connected_groups(pairs: np.ndarray, count: int) -> np.ndarray:
    """Return the connected component of each item.

    Args:
        pairs: Connected items, shape ``[P, 2]``.
        count: Number of items.

    Returns:
        The number of the component of each item, shape ``[count]``.

    Example:
        >>> connected_groups(np.array([[0, 2], [2, 3]]), 4).tolist()
        [0, 1, 0, 0]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    groups: np.ndarray = connected_components(links, directed=False)[1]
    return groups


@dataclass(frozen=True)
class ImageThumbnails:
    """Thumbnails and perceptual hashes of images.

    Attributes:
        thumbnails: Values from 0 to 255, shape ``[N, 3, 48, 48]``.
        hashes: Bits of the perceptual hashes as -1 and 1, shape ``[N, 256]``.
    """

    thumbnails: Tensor
    hashes: Tensor

    @classmethod
    def from_images(cls, images: Sequence[PILImage]) -> ImageThumbnails:
        """Compute thumbnails and hashes."""
        return cls(*(torch.stack(column) for column in zip(*map(_thumbnail, images), strict=True)))

    def __len__(self) -> int:
        return len(self.thumbnails)

    @property
    def coarse_vectors(self) -> Tensor:
        """Unit vectors of 8 x 8 colors, shape ``[N, 192]``. They change little if an image is
        cropped a little.
        """
        # [N, 192], centered, so that the cosine ignores brightness.
        points = interpolate(
            self.thumbnails.float(), size=(COARSE_SIZE, COARSE_SIZE), mode="area"
        ).flatten(1)
        return normalize(points - points.mean(1, keepdim=True), dim=1, eps=1e-6)


def read_thumbnails(data: Dataset, progress: Progress) -> ImageThumbnails:
    """Read all images of a data set, and the first frames of videos. The result is cached."""

    def read() -> dict[str, Tensor]:
        rows = list[tuple[Tensor, Tensor]]()
        for row in map_in_order(lambda image: _thumbnail(image.preview(MIN_SIDE)), data.images):
            rows.append(row)
            progress.update("reading images", len(rows), len(data.images), 0.0)
        thumbnails, hashes = (torch.stack(column) for column in zip(*rows, strict=True))
        return {"thumbnails": thumbnails, "hashes": hashes}

    sizes = [image.location.num_bytes for image in data.images if image.location is not None]
    # Sizes of the files show a changed image without reading it.
    path = cache_path(
        "thumbnails", data.name, [image.name for image in data.images], sizes, THUMBNAIL_SIZE
    )
    return ImageThumbnails(**cached_tensors(path, read))


def make_copies(image: PILImage, random: np.random.Generator) -> list[PILImage]:
    """Make typical copies of an image: recompressed, halved, cropped by up to 8 % at each side, and
    all of these.
    """

    def crop() -> PILImage:
        left, right, top, bottom = random.uniform(0, 0.08, 4)
        width, height = image.size
        ends = (1 - right, 1 - bottom)
        box = (left * width, top * height, ends[0] * width, ends[1] * height)
        return image.crop(tuple(map(round, box)))

    def halve(image: PILImage) -> PILImage:
        size = max(image.width // 2, 1), max(image.height // 2, 1)
        return image.resize(size, Pillow.Resampling.BICUBIC)

    def recompress(image: PILImage) -> PILImage:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=60)
        return Pillow.open(buffer).convert("RGB")

    # The order of the random numbers decides the crops.
    cropped = crop()
    return [recompress(image), halve(image), cropped, recompress(halve(crop()))]


def _thumbnail(image: PILImage) -> tuple[Tensor, Tensor]:
    pixels = np.asarray(
        image.resize((THUMBNAIL_SIZE, THUMBNAIL_SIZE), Pillow.Resampling.BICUBIC, reducing_gap=3.0)
    )
    # -1 and 1, so that a dot product counts equal minus different bits.
    bits = (
        np.unpackbits(np.frombuffer(bytes.fromhex(dhash(image)), np.uint8)).astype(np.int8) * 2 - 1
    )
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous(), torch.from_numpy(bits)


@dataclass(frozen=True)
class CopyThresholds:
    """Thresholds learned from copies that are made from images of the data set.

    Attributes:
        correlation: Correlation of pixels that 95 % of the copies reach.
        coarse: Cosine of 8 x 8 colors that 99 % of the copies reach.
        cosine: Median cosine of the encoder's features. None without an encoder.
        min_cosine: Cosine of the encoder's features that 95 % of the copies reach. None without an
            encoder.
        recall: Share of the copies that are found.
    """

    correlation: float
    coarse: float
    cosine: float | None
    min_cosine: float | None
    recall: float


@dataclass(frozen=True)
class DuplicatePair:
    """Two images that are near-duplicates.

    Attributes:
        first: Name of the first image.
        second: Name of the second image.
        splits: Their splits.
        kind: "copy" if the pixels agree, "similar" if only the features of the encoder agree.
        correlation: Correlation of pixels over the best overlap. None if it was not computed.
        hamming_distance: Number of different bits of the perceptual hashes.
        cosine: Cosine of the encoder's features. None without an encoder.
    """

    first: str
    second: str
    splits: tuple[str, str]
    kind: Literal["copy", "similar"]
    correlation: float | None
    hamming_distance: int | None
    cosine: float | None

    def __str__(self) -> str:
        values = [f"correlation {self.correlation:.3f}"] if self.correlation is not None else []
        values += [f"cosine {self.cosine:.3f}"] if self.cosine is not None else []
        return f"{self.first} ({self.splits[0]}) and {self.second} ({self.splits[1]}): {', '.join(values)}"


@dataclass(frozen=True)
class Duplicates:
    """Near-duplicates of a data set.

    Attributes:
        pairs: The pairs. Copies across splits are first.
        copies: Number of images that have a copy.
        groups: Number of different images among these.
        copies_in_train: By split, the number of images with a copy in the training split.
        similar_in_train: By split, the number of images that are similar to an image of the
            training split.
        sizes: Number of images of each split.
        thresholds: The learned thresholds. None if the data set has no pixels.
    """

    pairs: tuple[DuplicatePair, ...]
    copies: int
    groups: int
    copies_in_train: dict[str, int]
    similar_in_train: dict[str, int]
    sizes: dict[str, int]
    thresholds: CopyThresholds | None

    def copy_groups(self, data: Dataset) -> np.ndarray:
        """Return the group of each image ``[N]``, equal for copies of one image."""
        index = {image.name: number for number, image in enumerate(data.images)}
        pairs = [
            (index[pair.first], index[pair.second]) for pair in self.pairs if pair.kind == "copy"
        ]
        return connected_groups(np.array(pairs, dtype=np.int64).reshape(-1, 2), len(data.images))

    def issues(self) -> list[Issue]:
        """Report copies across splits, copies within a split, and similar images as issues."""
        copies = [pair for pair in self.pairs if pair.kind == "copy"]
        between, within = (
            tuple(str(pair) for pair in copies if (pair.splits[0] != pair.splits[1]) == differ)
            for differ in (True, False)
        )
        similar = tuple(str(pair) for pair in self.pairs if pair.kind == "similar")
        leaked_copies = " and ".join(
            f"{count:,} of the {self.sizes[split]:,} {split} images"
            for split, count in self.copies_in_train.items()
        )
        leaked_similar = ", ".join(
            f"{count:,} of {self.sizes[split]:,} in {split}"
            for split, count in self.similar_in_train.items()
        )
        issues = [
            Issue(
                "copies across splits",
                len(between),
                f"{leaked_copies} have a copy in train."
                if leaked_copies
                else f"{format_count(len(between), 'pair')} of copies in val and test.",
                _FIX_BETWEEN,
                between,
                serious=True,
            ),
            Issue(
                "copies in one split",
                len(within),
                f"{self.copies:,} images are copies of one another, {self.groups:,} different images.",
                _FIX_WITHIN,
                within,
                serious=self.copies - self.groups >= 0.01 * sum(self.sizes.values()),
            ),
            Issue(
                "similar images",
                len(similar),
                "by the encoder's features, they are as similar as an image and its own copies."
                + (f" Images similar to one of train: {leaked_similar}." if leaked_similar else ""),
                _FIX_SIMILAR,
                similar,
                serious=False,
            ),
        ]
        return [issue for issue in issues if issue.count]


def find_duplicates(
    data: Dataset, thumbnails: ImageThumbnails | None, vectors: ImageVectors | None, seed: int = 0
) -> Duplicates:
    """Find near-duplicates of a data set. Without pixels (no thumbnails), none are found."""
    splits = [image.split for image in data.images]
    sizes = {split: splits.count(split) for split in data.splits}
    if thumbnails is None:
        return Duplicates((), 0, 0, {}, {}, sizes, None)
    thresholds = learn_thresholds(data, thumbnails, vectors, seed)
    features = None if vectors is None else vectors.features
    # Perceptual hashes of -1 and 1: the dot product of 256 bits falls by 2 for each different bit.
    by_hash = pairs_above_threshold(
        thumbnails.hashes.float(), 256.0 - 2 * MAX_HAMMING_DISTANCE, NUM_NEIGHBORS
    )
    # A copy that one of the three searches misses may be found by another.
    by_color = pairs_above_threshold(thumbnails.coarse_vectors, thresholds.coarse, NUM_NEIGHBORS)
    by_features = np.empty((0, 2), np.int64)
    if features is not None and thresholds.cosine is not None:
        by_features = pairs_above_threshold(features, thresholds.cosine, NUM_NEIGHBORS)
    candidates = unique_pairs(np.concatenate([by_color, by_hash, by_features]))
    first, second = (thumbnails.thumbnails[candidates[:, side]] for side in (0, 1))
    correlation = aligned_correlation(first, second, thresholds.correlation).numpy()  # [P]
    is_copy = correlation >= thresholds.correlation
    if features is not None and thresholds.min_cosine is not None:
        cosines = (features[candidates[:, 0]] * features[candidates[:, 1]]).sum(1)
        # The features of a copy agree, too, as with the copies made here.
        is_copy &= (cosines >= thresholds.min_cosine).numpy()
    by_features_set = set(map(tuple, by_features.tolist()))
    is_similar = ~is_copy & np.array(
        [pair in by_features_set for pair in map(tuple, candidates.tolist())], dtype=bool
    )
    pairs = []
    for row in np.flatnonzero(is_copy | is_similar):
        # The image of the split with the higher priority comes first.
        a, b = sorted(
            candidates[row].tolist(), key=lambda image: split_priority(data.images[image].split)
        )
        pairs.append(
            DuplicatePair(
                first=data.images[a].name,
                second=data.images[b].name,
                splits=(data.images[a].split, data.images[b].split),
                kind="copy" if is_copy[row] else "similar",
                correlation=float(correlation[row]),
                hamming_distance=int((thumbnails.hashes[a] != thumbnails.hashes[b]).sum()),
                cosine=None if features is None else float(features[a] @ features[b]),
            )
        )
    pairs.sort(
        key=lambda pair: (
            pair.kind != "copy",
            pair.splits[0] == pair.splits[1],
            -(pair.correlation or 0),
        )
    )
    copies = candidates[is_copy]  # [C, 2]
    groups = connected_groups(copies, len(data.images))[np.unique(copies)]
    return Duplicates(
        pairs=tuple(pairs),
        copies=len(groups),
        groups=len(np.unique(groups)),
        copies_in_train=_count_in_train(data, copies),
        similar_in_train=_count_in_train(data, candidates[is_similar]),
        sizes=sizes,
        thresholds=thresholds,
    )


def learn_thresholds(
    data: Dataset, thumbnails: ImageThumbnails, vectors: ImageVectors | None, seed: int = 0
) -> CopyThresholds:
    """Learn thresholds from copies of some of the images. Cosines need the encoder of the vectors."""
    random = np.random.default_rng([seed, len(data.images)])
    chosen = np.sort(
        random.choice(len(data.images), min(NUM_TEST_IMAGES, len(data.images)), replace=False)
    )
    # Four copies of each chosen image, in its order.
    images = [copy for i in chosen for copy in make_copies(data.images[i].preview(), random)]
    origin = np.repeat(chosen, len(images) // len(chosen))  # [copies], the image of each
    copies = ImageThumbnails.from_images(images)
    correlation = aligned_correlation(copies.thumbnails, thumbnails.thumbnails[origin]).numpy()
    coarse = (copies.coarse_vectors * thumbnails.coarse_vectors[origin]).sum(1).numpy()
    min_correlation = max(float(np.quantile(correlation, 1 - MIN_COPY_RECALL)), MIN_CORRELATION)
    min_coarse = float(np.quantile(coarse, 0.01))
    # [copies, neighbors]. A copy that is not among the neighbors would never be compared.
    neighbors = (
        (copies.coarse_vectors @ thumbnails.coarse_vectors.T)
        .topk(min(NUM_NEIGHBORS, len(thumbnails)), 1)
        .indices.numpy()
    )
    is_found = (
        (correlation >= min_correlation)
        & (coarse >= min_coarse)
        & (neighbors == origin[:, None]).any(1)
    )
    median = min_cosine = None
    if vectors is not None and vectors.encode is not None:
        cosines = (vectors.encode(images) * vectors.features[origin]).sum(1).numpy()
        median, min_cosine = map(float, np.quantile(cosines, [0.5, 1 - MIN_COPY_RECALL]))
        is_found &= cosines >= min_cosine
    return CopyThresholds(min_correlation, min_coarse, median, min_cosine, float(is_found.mean()))


def _count_in_train(data: Dataset, pairs: np.ndarray) -> dict[str, int]:
    """Count the images of each other split that are paired with an image of the training split."""
    paired: dict[str, set[int]] = {}
    for a, b in [*pairs, *pairs[:, ::-1]]:  # both directions of each pair
        if data.images[b].split == "train" and data.images[a].split != "train":
            paired.setdefault(data.images[a].split, set()).add(int(a))
    return {split: len(images) for split, images in paired.items()}


def aligned_correlation(first: Tensor, second: Tensor, threshold: float = 0.0) -> Tensor:
    """Compute the correlation ``[N]`` of pairs of images ``[N, 3, S, S]`` over their best overlap.
    Values far below the threshold are computed roughly.
    """
    # Each image as a whole is compared with crops of the other.
    best = [
        _best_crop_correlation(a, b, threshold - _MAX_REFINEMENT_GAIN)
        for a, b in ((first, second), (second, first))
    ]
    return torch.maximum(*best)


def _best_crop_correlation(full_images: Tensor, cropped: Tensor, min_coarse: float) -> Tensor:
    """Return the best correlation of whole images with crops of others, refined where it is at
    least ``min_coarse``.
    """
    results = [torch.zeros(0)]
    for full_batch, crop_batch in zip(
        full_images.split(PAIRS_PER_BATCH), cropped.split(PAIRS_PER_BATCH), strict=True
    ):
        # Smoothing removes details that depend on the sampling grid.
        full, image = (
            avg_pool2d(images.float(), 3, stride=1, padding=1, count_include_pad=False)
            for images in (full_batch, crop_batch)
        )
        boxes = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(len(full), 1)
        target = _unit(_sample(full, boxes))  # [N, points]
        best = torch.full((len(full),), -1.0)
        # The search starts with centered crops and crops at the edges and corners.
        for margin in _MARGINS:
            for x, y in product(sorted({0.0, margin / 2, margin}), repeat=2):
                # left, top, right, bottom
                box = torch.tensor([x, y, x + 1 - margin, y + 1 - margin]).expand(len(full), 4)
                best, boxes = _keep_better(target, image, best, boxes, box)
        # Then it moves the edges of the best crop. Few pairs get close enough to be worth that.
        promising = best >= min_coarse
        target, image, refined, boxes = (
            values[promising] for values in (target, image, best, boxes)
        )
        for step, edge, sign in product(_STEPS, range(4), (-1, 1)):
            moved = boxes.clone()
            moved[:, edge] = (moved[:, edge] + sign * step).clamp(0, 1)
            refined, boxes = _keep_better(target, image, refined, boxes, moved)
        best[promising] = refined
        results.append(best)
    return torch.cat(results)


def _keep_better(
    target: Tensor, image: Tensor, best: Tensor, boxes: Tensor, candidates: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the better correlation of the current and the candidate boxes for each pair, and its
    box.
    """
    scores = (_unit(_sample(image, candidates)) * target).sum(1)
    return torch.maximum(best, scores), torch.where((scores > best)[:, None], candidates, boxes)


def _sample(images: Tensor, boxes: Tensor) -> Tensor:
    """Sample a grid in boxes ``[N, 4]`` (left, top, right, bottom, as shares of the sides): points
    ``[N, 3 * grid * grid]``.
    """
    steps = (torch.arange(_GRID_SIZE) + 0.5) / _GRID_SIZE  # centers of cells, in (0, 1)
    x, y = (
        boxes[:, low, None] + steps * (boxes[:, high] - boxes[:, low])[:, None]
        for low, high in ((0, 2), (1, 3))
    )
    # grid_sample expects coordinates from -1 to 1.
    grid = (
        torch.stack(
            [x[:, None, :].expand(-1, _GRID_SIZE, -1), y[:, :, None].expand(-1, -1, _GRID_SIZE)], -1
        )
        * 2
        - 1
    )
    return grid_sample(images, grid, align_corners=False, padding_mode="border").flatten(1)


def _unit(points: Tensor) -> Tensor:
    """Center and scale to length 1. A flat image stays short, so that it correlates with nothing."""
    centered = points - points.mean(1, keepdim=True)
    return centered / centered.norm(dim=1, keepdim=True).clamp(
        min=_MIN_STANDARD_DEVIATION * points.shape[1] ** 0.5
    )
