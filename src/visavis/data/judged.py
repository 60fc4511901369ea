"""Judgements as facts of a split: sentences that people asked for, the images that fit each, and those that do not.

Facts of training: a sentence that fits an image is a further caption of it; one text may thus fit several images. A sentence and an image of which
somebody said that they do not fit are a sure negative: they meet in a batch, whichever of them is drawn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from visavis.data.dataset import Dataset
from visavis.data.judgements import Judgement, Line, last_words
from visavis.data.listing import LONGEST_CAPTION

MET = 4
"""Images that a sentence brings into its batch, and sentences that an image brings, of those that do not fit: drawn anew each time."""
_MOMENT = re.compile(r"#t=[\d.]+,[\d.]+$")

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class JudgedPairs:
    """Judged sentences with images of a split, "train" to learn from.

    sentences: in alphabetical order. fits, wrong ``[P, 2]``: (sentence, image of the split), sorted. left_out: the number of judgements that
    are not among them, by the reason. fingerprint: of sentences, images by name, and what was said, in no order.
    """

    sentences: tuple[str, ...]
    fits: np.ndarray
    wrong: np.ndarray
    left_out: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    split: str = "train"

    @classmethod
    def of(cls, lines: Iterable[Line], data: Dataset, split: str = "train", on_progress: OnProgress | None = None) -> JudgedPairs:
        """The last words of people about a split. An image is found by its path if its content is what was judged, else by its content;
        where a query and an image were judged under two names, the later answer counts. Raises DataError for images that cannot be read.
        """
        places, left_out = _Places(data, split, on_progress), Counter[str]()
        said: dict[tuple[str, int], Judgement] = {}
        own = {(" ".join(caption.split()), int(image)) for caption, image in zip(data.captions, data.image_of, strict=True)}
        for judgement in last_words(lines).values():
            sentence, image = judgement.query.sentence, places.find(judgement)
            if not sentence or len(sentence) > LONGEST_CAPTION:
                left_out["of queries that are no sentence (pictures, items, words with a minus)"] += 1
            elif image is None and _MOMENT.search(judgement.item):
                left_out["of moments of clips"] += 1
            elif image is None:
                left_out[f"of pictures that are not in {data.name}, or not as they were judged"] += 1
            elif data.images[image].split != split:
                left_out[f"of pictures of split {data.images[image].split}"] += 1
            elif not judgement.fits and (sentence, image) in own:
                left_out["against captions of the data set"] += 1
            else:
                before = said.get((sentence, image))
                if before is not None:
                    left_out["that later ones of the same picture replace"] += 1
                said[sentence, image] = max((one for one in (before, judgement) if one), key=lambda one: (one.at, not one.fits))
        sentences = tuple(sorted({sentence for sentence, _ in said}))
        number, place = {sentence: i for i, sentence in enumerate(sentences)}, places.in_split
        pairs = {True: list[tuple[int, int]](), False: list[tuple[int, int]]()}
        for (sentence, image), judgement in said.items():
            pairs[bool(judgement.fits)].append((number[sentence], place[image]))
        facts = sorted((sentence, data.images[image].name, bool(judgement.fits)) for (sentence, image), judgement in said.items())
        fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return cls(sentences, _rows(pairs[True]), _rows(pairs[False]), dict(left_out), fingerprint, split)

    def __len__(self) -> int:
        return len(self.fits) + len(self.wrong)

    def __str__(self) -> str:
        told = f"{len(self.sentences):,} sentences with {len(self.fits):,} images of split {self.split} that fit and {len(self.wrong):,} that do not"
        return f"{told}; {self.told_left_out}" if self.left_out else f"{told}."

    @property
    def told_left_out(self) -> str:
        """How many of all judgements are not among the pairs, and why, in words."""
        left = sum(self.left_out.values())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{left:,} of {left + len(self):,} judgements are left out: {reasons}."


class _Places:
    """Where judged items are among the images of a data set; contents are read only where a path does not tell."""

    def __init__(self, data: Dataset, split: str, on_progress: OnProgress | None):
        self.data, self.split, self.on_progress = data, split, on_progress
        self._by_name = {image.name: place for place, image in enumerate(data.images)}
        self._contents: dict[int, str] = {}
        inside = [place for place, image in enumerate(data.images) if image.split == split]
        self.in_split = {place: row for row, place in enumerate(inside)}

    def find(self, judgement: Judgement) -> int | None:
        """The image of a judgement; None where it is not here, or a moment of one."""
        place = self._by_name.get(judgement.item)
        if place is not None and self._content(place) in ("", judgement.content or self._content(place)):
            return place
        if _MOMENT.search(judgement.item) or not judgement.content:
            return None
        return self._by_content.get(judgement.content)

    def _content(self, place: int) -> str:
        """That of an image; empty where only its captions or features are here."""
        if place not in self._contents:
            where = self.data.images[place].bytes
            self._contents[place] = "" if where is None else where.content
        return self._contents[place]

    @cached_property
    def _by_content(self) -> dict[str, int]:
        """By content the first image, of several the first that is not of the split: it is held out."""
        order = sorted(range(len(self.data.images)), key=lambda place: (place in self.in_split, place))
        found: dict[str, int] = {}
        for number, place in enumerate(order, 1):
            if content := self._content(place):
                found.setdefault(content, place)
            if self.on_progress is not None:
                self.on_progress(number, len(order))
        return found


def _rows(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class JudgedSplit:
    """A split with what was judged of it.

    data: the split, each sentence added as a further caption of every image that it fits. alone: sentences that no image fits; as texts they
    are numbered after the captions. sentence_of ``[T]``: the judged sentence that each text is, also where it was a caption before, or -1.
    image_of ``[T]``: the image of each text, another number below 0 for each of ``alone``. fits, wrong ``[P, 2]``: (sentence, image), with what
    captions say.
    """

    data: Dataset
    alone: tuple[str, ...]
    sentence_of: np.ndarray
    image_of: np.ndarray
    fits: np.ndarray
    wrong: np.ndarray

    @classmethod
    def of(cls, split: Dataset, pairs: JudgedPairs) -> JudgedSplit:
        """A split with the pairs judged of it."""
        number = {sentence: i for i, sentence in enumerate(pairs.sentences)}
        sentence_of = np.array([number.get(" ".join(caption.split()), -1) for caption in split.captions], dtype=np.int64)
        captions = np.flatnonzero(sentence_of >= 0)
        own = _rows(list({*zip(sentence_of[captions].tolist(), split.image_of[captions].tolist(), strict=True)}))
        new = pairs.fits[~_among(pairs.fits, own)]
        fitting = np.unique(np.concatenate([own, new])[:, 0])
        alone = np.setdiff1d(np.arange(len(pairs.sentences)), fitting)
        data = replace(
            split,
            captions=(*split.captions, *(pairs.sentences[i] for i in new[:, 0])),
            image_of=np.concatenate([split.image_of, new[:, 1]]),
            caption_origin=np.concatenate([split.caption_rows, np.full(len(new), -1)]),
        )
        return cls(
            data,
            tuple(pairs.sentences[i] for i in alone),
            np.concatenate([sentence_of, new[:, 0], alone]),
            np.concatenate([data.image_of, -1 - np.arange(len(alone))]),
            np.unique(np.concatenate([own, new]), axis=0),
            pairs.wrong,
        )

    def meet(self, images: np.ndarray, captions: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A batch with those that do not fit what is in it: images, each with a caption of its own, and sentences that nothing fits."""
        if not len(self.wrong):
            return images, captions
        asked = np.unique(self.sentence_of[captions])
        there = set(images.tolist())
        brought = dict.fromkeys(
            image for sentence in asked for image in _some(self._wrong_images.get(int(sentence)), random) if image not in there
        )
        own = [int(random.choice(texts)) for image in brought if len(texts := self.data.captions_of[image])]
        images = np.concatenate([images, np.array(list(brought), dtype=np.int64)])
        alone = dict.fromkeys(text for image in np.unique(images) for text in _some(self._wrong_texts.get(int(image)), random))
        return images, np.concatenate([captions, np.array([*own, *alone], dtype=np.int64)])

    def facts(self, images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which pairs of a batch fit, and which do not, as far as it was said: two of bool ``[V, T]``."""
        sentences = np.broadcast_to(self.sentence_of[texts], (len(images), len(texts)))
        keys = np.stack([sentences, np.broadcast_to(images[:, None], sentences.shape)], -1).reshape(-1, 2)
        return tuple(_among(keys, pairs).reshape(sentences.shape) for pairs in (self.fits, self.wrong))  # type: ignore[return-value]

    @cached_property
    def _wrong_images(self) -> dict[int, list[int]]:
        """Of each sentence that fits something, the images that it does not fit."""
        alone = set(self.sentence_of[len(self.data.captions) :].tolist())
        return _grouped((sentence, image) for sentence, image in self.wrong.tolist() if sentence not in alone)

    @cached_property
    def _wrong_texts(self) -> dict[int, list[int]]:
        """Of each image, the texts that do not fit it and nothing else either."""
        first = len(self.data.captions)
        text_of = {sentence: first + i for i, sentence in enumerate(self.sentence_of[first:].tolist())}
        return _grouped((image, text_of[sentence]) for sentence, image in self.wrong.tolist() if sentence in text_of)


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for first, second in pairs:
        groups.setdefault(first, []).append(second)
    return groups


def _some(items: list[int] | None, random: np.random.Generator) -> list[int]:
    """A few of them, drawn if there are more."""
    return [] if items is None else items if len(items) <= MET else random.choice(items, MET, replace=False).tolist()


def _among(pairs: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which pairs ``[N, 2]`` are among known ones: bool ``[N]``."""
    width = 1 + max((int(part[:, 1].max()) for part in (pairs, known) if len(part)), default=0)
    mark = pairs[:, 0] * width + pairs[:, 1]
    return np.isin(mark, known[:, 0] * width + known[:, 1])
