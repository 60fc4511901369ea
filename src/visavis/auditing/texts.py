"""Captions that fit many pictures, and captions that say something else than the others of their picture.

What cosines can tell: that two captions speak of different things. That one denies what another says ("a dog", "no dog") they cannot, and
one that speaks of another part of the picture looks like one that is wrong. So these are captions to look at, not errors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.auditing.concern import Concern, counted
from visavis.auditing.mixture import Mixture, odds
from visavis.auditing.siblings import Siblings, other_pictures
from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.memory import spans
from visavis.scoring import rows_at_once

SAME = 0.99
"""Two captions say nearly the same if they are nearer to one another than this share of the pairs of captions of one picture."""
NO_SIBLINGS = 0.95
"""The cosine from which on they do where no picture has two captions."""
MANY = 5
"""A caption that says nearly the same as one of so many other pictures tells little of its own."""
AGAINST = 100_000
"""Captions that each one is compared with at most, drawn at random: each with each would take hours for millions."""
OFTEN = 0.01
LISTED = 0.5


@dataclass(frozen=True)
class Generic:
    """A caption that fits many pictures. pictures: how many others have one that says nearly the same. copies: how many have this very text."""

    caption: str
    images: tuple[str, ...]
    pictures: int
    copies: int

    def __str__(self) -> str:
        same = f"{self.copies:,} with these words" if self.copies else "none with these words"
        return f'"{self.caption}": {counted(self.pictures, "other picture")} ({same}), such as {", ".join(self.images[:3])}'


@dataclass(frozen=True)
class Odd:
    """A caption unlike the others of its picture. agreement: its mean cosine with them; among: theirs with one another."""

    image: str
    split: str
    caption: str
    agreement: float
    among: float | None
    other: str

    def __str__(self) -> str:
        return f'{self.image} ({self.split}): "{self.caption}", where another says "{self.other}" (agreement {self.agreement:.2f})'


@dataclass(frozen=True)
class Captions:
    """What captions are worth as texts. by: the sentence model, or "words". near: the cosine from which on two say nearly the same.
    shared: captions with the very words of one of another picture. share: of captions that say something else than their siblings, as
    estimated; odd: the most different first.
    """

    by: str
    near: float
    captions: int
    shared: int
    generic: tuple[Generic, ...]
    num_generic: int
    odd: tuple[Odd, ...]
    share: float
    upper: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def concerns(self) -> list[Concern]:
        concerns = []
        if self.num_generic:
            what = (
                f"{self.num_generic / self.captions:.1%} of the captions say nearly the same (cosine {self.near:.2f} by {self.by}) as one of "
                f"{MANY} or more other pictures; {self.shared:,} have the very words of another picture's caption."
            )
            alarm = self.num_generic >= OFTEN * self.captions
            concerns.append(
                Concern("captions that fit many pictures", self.num_generic, what, _SAY_MORE, tuple(map(str, self.generic)), alarm)
            )
        if self.odd:
            what = (
                f"about {self.share:.1%} of the captions agree with the others of their picture as little as with those of any other, "
                f"at most {self.upper:.1%}."
            )
            concerns.append(Concern("captions unlike their siblings", len(self.odd), what, _READ, tuple(map(str, self.odd)), alarm=False))
        return concerns


_SAY_MORE = "say what tells these pictures apart, or tell the training that they fit: their other pictures count as wrong answers now."
_READ = "read the first ones: they stand beside the wrong picture, contradict the others, or speak of what no other mentions."


def audit_captions(data: Dataset, vectors: Tensor, by: str, groups: np.ndarray, seed: int = 0) -> Captions:
    """vectors ``[C, D]``: unit vectors of captions, by a model of this name. groups ``[N]``: equal for copies of one picture."""
    own = torch.from_numpy(data.image_of)
    near = _near(vectors, own)
    pictures, copies, examples = _fits(data, vectors, groups, near, seed)
    generic = _listed(data, pictures, copies, examples)
    odd, share, upper = _odd(data, vectors, own, groups, seed)
    return Captions(by, near, len(data.captions), int((copies > 0).sum()), generic, int((pictures >= MANY).sum()), odd, share, upper)


def _near(vectors: Tensor, own: Tensor) -> float:
    """The cosine from which on two captions say nearly the same."""
    order = torch.argsort(own, stable=True)
    beside = own[order][1:] == own[order][:-1]
    cosines = (vectors[order][1:] * vectors[order][:-1]).sum(1)[beside]
    return min(float(np.quantile(cosines.numpy(), SAME)), 0.999) if len(cosines) else NO_SIBLINGS


def _fits(data: Dataset, vectors: Tensor, groups: np.ndarray, near: float, seed: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Of each caption ``[C]``: how many other pictures have one that says nearly the same, how many the same words, and a few of them."""
    picture = groups[data.image_of]
    chosen = np.arange(len(picture))
    if len(chosen) > AGAINST:
        chosen = np.sort(np.random.default_rng([seed, 3]).choice(len(picture), AGAINST, replace=False))
    of_chosen, known = picture[chosen], vectors[torch.from_numpy(chosen)]
    pictures, examples = np.zeros(len(picture), np.int64), list[list[int]]()
    for rows in spans(len(picture), rows_at_once(len(chosen), 8.0)):
        close = (vectors[rows] @ known.T >= near).numpy()
        for place, row in enumerate(close, rows.start):
            others = np.flatnonzero(row)
            others = others[of_chosen[others] != picture[place]]
            distinct, first = np.unique(of_chosen[others], return_index=True)
            pictures[place] = len(distinct)
            examples.append(data.image_of[chosen[others[np.sort(first)[:3]]]].tolist())
    return pictures, _same_words(data, picture), examples


def _same_words(data: Dataset, picture: np.ndarray) -> np.ndarray:
    """How many other pictures have a caption of the same words, punctuation and case aside ``[C]``."""
    said: dict[tuple[str, ...], set[int]] = {}
    texts = [tuple(tokenize(caption)) for caption in data.captions]
    for words, place in zip(texts, picture, strict=True):
        said.setdefault(words, set()).add(int(place))
    return np.array([len(said[words]) - 1 for words in texts], dtype=np.int64)


def _listed(data: Dataset, pictures: np.ndarray, copies: np.ndarray, examples: list[list[int]]) -> tuple[Generic, ...]:
    """Captions that fit many pictures, each text once, those that fit most first."""
    listed, seen = list[Generic](), set[tuple[str, ...]]()
    for caption in np.argsort(-pictures, kind="stable"):
        words = tuple(tokenize(data.captions[caption]))
        if pictures[caption] < MANY:
            break
        if words not in seen:
            seen.add(words)
            own = data.images[data.image_of[caption]].name
            images = (own, *(data.images[image].name for image in examples[caption]))
            listed.append(Generic(data.captions[caption], images, int(pictures[caption]), int(copies[caption])))
    return tuple(listed)


def _odd(data: Dataset, vectors: Tensor, own: Tensor, groups: np.ndarray, seed: int) -> tuple[tuple[Odd, ...], float, float]:
    """Captions unlike the others of their picture, and the share of those that are, as estimated and at most."""
    other = torch.from_numpy(other_pictures(data.image_of, groups, seed))
    beside_own, beside_other = (Siblings.of(vectors, own, image) for image in (own, other))
    facts = [torch.stack([siblings.agreement, siblings.among], 1).numpy() for siblings in (beside_own, beside_other)]
    known = [np.isfinite(columns[:, 1]) for columns in facts]  # of one sibling it cannot be told which of the two is odd
    if not known[0].any() or not known[1].any():
        return (), 0.0, 0.0
    places = np.flatnonzero(known[0])
    scores, wrong = odds(facts[0][known[0]], facts[1][known[1]])
    least = np.full(len(data.images), np.inf)
    np.minimum.at(least, data.image_of[places], facts[0][places, 0])
    scores[facts[0][places, 0] > least[data.image_of[places]]] = -np.inf  # beside a wrong caption the others agree less, too
    mixture = Mixture.of(scores, wrong)
    order = np.argsort(-scores, kind="stable")
    enough = np.flatnonzero((mixture.precision[order] >= LISTED) & np.isfinite(scores[order]))
    listed = order[: enough[-1] + 1] if len(enough) else order[:0]
    odd = tuple(_odd_caption(data, int(places[row]), *map(float, facts[0][places[row]])) for row in listed)
    return odd, mixture.share, mixture.upper


def _odd_caption(data: Dataset, caption: int, agreement: float, among: float) -> Odd:
    image = data.images[data.image_of[caption]]
    other = next(i for i in data.captions_of[data.image_of[caption]] if i != caption)
    return Odd(image.name, image.split, data.captions[caption], agreement, among, data.captions[other])
