"""Near-duplicates within and across splits: pictures that agree by their pixels, and others that an encoder cannot tell apart.

What counts as a copy is learned from the data: some of the pictures are recompressed, halved and cropped here, and what most of these
copies reach is asked of two pictures of the data set. So it is also known how many of such copies are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from visavis.auditing.alignment import aligned
from visavis.auditing.concern import Concern, counted
from visavis.auditing.neighbors import groups_of, pairs_above, unique_pairs
from visavis.auditing.pictures import Pictures, own_copies
from visavis.data.dataset import Dataset
from visavis.data.listing import evaluation_first
from visavis.data.looks import SAME_LOOK

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

TRIED = 40
"""Pictures of which copies are made; a picture has four."""
NEAREST = 5
"""A copy is looked for among so many nearest neighbors, by coarse colors, perceptual hashes and features."""
KEPT = 0.95
"""The share of the copies made here that agree well enough with their originals."""
LEAST = 0.97
"""A correlation that copies have in any case: different pictures before the same background reach less."""


@dataclass(frozen=True)
class Thresholds:
    """What copies made here have in common with their originals. correlation: by pixels, of 95 % of them at least. coarse: the same of 8 x 8
    colors, of 99 %. cosine: of an encoder's features, of half of them, and of 95 % of them (``least_cosine``); None without an encoder.
    found: the share that is found.
    """

    correlation: float
    coarse: float
    cosine: float | None
    least_cosine: float | None
    found: float


@dataclass(frozen=True)
class Pair:
    """Two images. kind: "copy", the same picture by its pixels, or "alike", by an encoder alone. correlation: of pixels, over the best
    overlap; None where it was not computed. bits: in which their perceptual hashes differ. cosine: of an encoder's features.
    """

    first: str
    second: str
    splits: tuple[str, str]
    kind: Literal["copy", "alike"]
    correlation: float | None
    bits: int | None
    cosine: float | None

    def __str__(self) -> str:
        facts = [f"correlation {self.correlation:.3f}"] if self.correlation is not None else []
        facts += [f"cosine {self.cosine:.3f}"] if self.cosine is not None else []
        return f"{self.first} ({self.splits[0]}) and {self.second} ({self.splits[1]}): {', '.join(facts)}"


@dataclass(frozen=True)
class Duplicates:
    """Near-duplicates of a data set. pairs: across splits first. copies: images that have a copy; groups: how many pictures these are.
    leaked, alike_across: by split, how many images of it have a copy, or look like an image, in the training split.
    """

    pairs: tuple[Pair, ...]
    copies: int
    groups: int
    leaked: dict[str, int]
    alike_across: dict[str, int]
    sizes: dict[str, int]
    thresholds: Thresholds | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def groups_in(self, data: Dataset) -> np.ndarray:
        """The group of each image ``[N]``: equal for copies of one picture."""
        place = {image.name: number for number, image in enumerate(data.images)}
        pairs = [(place[pair.first], place[pair.second]) for pair in self.pairs if pair.kind == "copy"]
        return groups_of(np.array(pairs, dtype=np.int64).reshape(-1, 2), len(data.images))

    def concerns(self) -> list[Concern]:
        copies = [pair for pair in self.pairs if pair.kind == "copy"]
        across, inside = ([str(pair) for pair in copies if (pair.splits[0] != pair.splits[1]) == apart] for apart in (True, False))
        alike = [pair for pair in self.pairs if pair.kind == "alike"]
        concerns = []
        if across:
            leaked = " and ".join(f"{count:,} of the {self.sizes[split]:,} {split} images" for split, count in self.leaked.items())
            what = f"{leaked} have a copy in train" if leaked else f"{counted(len(across), 'pair')} of copies in val and test"
            concerns.append(Concern("copies across splits", len(across), f"{what}.", _LEAK, tuple(across), alarm=True))
        if inside:
            what = f"{self.copies:,} images are copies of one another, {self.groups:,} different pictures."
            many = self.copies - self.groups >= 0.01 * sum(self.sizes.values())
            concerns.append(Concern("copies in one split", len(inside), what, _INSIDE, tuple(inside), alarm=many))
        if alike:
            leaked = ", ".join(f"{count:,} of {self.sizes[split]:,} in {split}" for split, count in self.alike_across.items())
            what = "the encoder finds them as like one another as a picture and its own copies" + (
                f"; images that look so like one of train: {leaked}." if leaked else "."
            )
            concerns.append(Concern("look alike", len(alike), what, _ALIKE, tuple(map(str, alike)), alarm=False))
        return concerns


_LEAK = "take these out of train, or out of the evaluation: a model may remember them, and its figures are too high."
_INSIDE = "give copies one row with all of their captions: else each is a wrong answer for the captions of the other."
_ALIKE = "look at some: shots of one moment count as wrong answers for one another, and across splits make figures too high."


def find_duplicates(
    data: Dataset,
    pictures: Pictures | None,
    features: Tensor | None,
    encode: Callable[[Sequence[Picture]], Tensor] | None,
    seed: int = 0,
) -> Duplicates:
    """Near-duplicates of a data set.

    pictures: None where a data set has no pixels. features ``[N, D]``: unit vectors, None without an encoder. encode: the same of new
    pictures; without it, or without pictures, what looks alike is not known.
    """
    thresholds = None if pictures is None else learn_thresholds(data, pictures, features, encode, seed)
    if pictures is None or thresholds is None:
        return Duplicates((), 0, 0, {}, {}, _sizes(data), None)
    close, alike = [_close(pictures, thresholds)], np.empty((0, 2), np.int64)
    if features is not None and thresholds.cosine is not None:
        alike = pairs_above(features, thresholds.cosine, NEAREST)
        close.append(alike)
    candidates = unique_pairs(np.concatenate(close))
    correlation = aligned(pictures.small[candidates[:, 0]], pictures.small[candidates[:, 1]], thresholds.correlation).numpy()
    is_copy = (correlation >= thresholds.correlation) & _alike_enough(features, candidates, thresholds)
    known_alike = {(int(a), int(b)) for a, b in alike}
    pairs = [
        _pair(data, pictures, features, int(a), int(b), "copy" if copy else "alike", float(value))
        for (a, b), copy, value in zip(candidates, is_copy, correlation, strict=True)
        if copy or (int(a), int(b)) in known_alike
    ]
    pairs.sort(key=lambda pair: (pair.kind != "copy", pair.splits[0] == pair.splits[1], -(pair.correlation or 0)))
    copies, only_alike = candidates[is_copy], candidates[~is_copy][[(int(a), int(b)) in known_alike for a, b in candidates[~is_copy]]]
    groups = groups_of(copies, len(data.images))[np.unique(copies)]
    return Duplicates(
        tuple(pairs),
        len(groups),
        len(np.unique(groups)),
        _beside_train(data, copies),
        _beside_train(data, only_alike),
        _sizes(data),
        thresholds,
    )


def learn_thresholds(
    data: Dataset,
    pictures: Pictures,
    features: Tensor | None,
    encode: Callable[[Sequence[Picture]], Tensor] | None,
    seed: int = 0,
) -> Thresholds | None:
    """What copies of some of the pictures, made here, have in common with their originals."""
    random = np.random.default_rng([seed, len(data.images)])
    chosen = np.sort(random.choice(len(data.images), min(TRIED, len(data.images)), replace=False))
    made = [copy for i in chosen for copy in own_copies(data.images[i].preview(), random)]
    origin = np.repeat(chosen, len(made) // len(chosen))
    copies = Pictures.of(made)
    correlation = aligned(copies.small, pictures.small[origin]).numpy()
    coarse = (copies.coarse * pictures.coarse[origin]).sum(1).numpy()
    cosines = None if features is None or encode is None else (encode(made) * features[origin]).sum(1).numpy()
    half, most = (None, None) if cosines is None else map(float, np.quantile(cosines, [0.5, 1 - KEPT]))
    enough = max(float(np.quantile(correlation, 1 - KEPT)), LEAST)
    least = float(np.quantile(coarse, 0.01))
    near = (copies.coarse @ pictures.coarse.T).topk(min(NEAREST, len(pictures)), 1).indices.numpy()
    found = (correlation >= enough) & (coarse >= least) & (near == origin[:, None]).any(1)
    found &= True if cosines is None else cosines >= most
    return Thresholds(enough, least, half, most, float(found.mean()))


def _close(pictures: Pictures, thresholds: Thresholds) -> np.ndarray:
    """Pairs to be compared closely, by coarse colors and by perceptual hashes."""
    by_color = pairs_above(pictures.coarse, thresholds.coarse, NEAREST)
    by_hash = pairs_above(pictures.bits.float(), 256.0 - 2 * SAME_LOOK, NEAREST)
    return unique_pairs(np.concatenate([by_color, by_hash]))


def _alike_enough(features: Tensor | None, pairs: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Which pairs an encoder, where there is one, does not find more different than a picture and its copy."""
    if features is None or thresholds.least_cosine is None:
        return np.ones(len(pairs), dtype=bool)
    return ((features[pairs[:, 0]] * features[pairs[:, 1]]).sum(1) >= thresholds.least_cosine).numpy()


def _pair(
    data: Dataset, pictures: Pictures, features: Tensor | None, a: int, b: int, kind: Literal["copy", "alike"], correlation: float
) -> Pair:
    if evaluation_first(data.images[b].split) < evaluation_first(data.images[a].split):
        a, b = b, a
    one, other = data.images[a], data.images[b]
    bits = int((pictures.bits[a] != pictures.bits[b]).sum())
    cosine = None if features is None else float(features[a] @ features[b])
    return Pair(one.name, other.name, (one.split, other.split), kind, correlation, bits, cosine)


def _beside_train(data: Dataset, pairs: np.ndarray) -> dict[str, int]:
    """How many images of each other split have one in the training split beside them."""
    beside: dict[str, set[int]] = {}
    for a, b in [*pairs, *pairs[:, ::-1]]:
        if data.images[b].split == "train" and data.images[a].split != "train":
            beside.setdefault(data.images[a].split, set()).add(int(a))
    return {split: len(images) for split, images in beside.items()}


def _sizes(data: Dataset) -> dict[str, int]:
    splits = [image.split for image in data.images]
    return {split: splits.count(split) for split in data.splits}
