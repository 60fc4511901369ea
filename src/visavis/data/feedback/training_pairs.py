"""Relevance judgments as training data: judged pairs of text queries and images of a split.

A text query with a relevant image becomes an additional caption of that image, so one text can
describe several images. A text query and an image that are not relevant are a known negative: the
batches bring the two together.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from visavis.core.progress import NoProgress, Progress
from visavis.data.dataset import Dataset
from visavis.data.feedback.records import (
    FeedbackRecord,
    Judgment,
    latest_judgments,
)
from visavis.data.formats.listing import MAX_CAPTION_CHARS

MAX_ADDED_NEGATIVES = 4
"""Number of known negatives that one query or image adds to its batch. If there are more, they are
sampled for each batch.
"""

_MOMENT = re.compile(r"#t=[\d.]+,[\d.]+$")


@dataclass(frozen=True)
class FeedbackPairs:
    """Judged pairs of text queries and images of one split.

    Attributes:
        queries: The text queries, in alphabetical order.
        relevant: Relevant pairs (query, image of the split), sorted, shape ``[P, 2]``.
        not_relevant: Pairs that are not relevant, sorted, shape ``[N, 2]``.
        skipped: Number of judgments that are not among the pairs, by reason.
        fingerprint: Hash of the judged queries and image names. Does not depend on the order of the
            judgments.
        split: Name of the split.
    """

    queries: tuple[str, ...]
    relevant: np.ndarray
    not_relevant: np.ndarray
    skipped: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    split: str = "train"

    @classmethod
    def from_records(
        cls,
        records: Iterable[FeedbackRecord],
        data: Dataset,
        split: str = "train",
        progress: Progress | None = None,
    ) -> FeedbackPairs:
        """Match the judgments that are in force to the images of a data set."""
        matcher = _ImageMatcher(data, split, progress or NoProgress())
        skipped = Counter[str]()
        by_pair: dict[tuple[str, int], Judgment] = {}
        captions = {
            (" ".join(caption.split()), int(image))
            for caption, image in zip(data.captions, data.image_of, strict=True)
        }
        for judgment in latest_judgments(records).values():
            query = judgment.query.plain_text
            image = matcher.find(judgment)
            if not query or len(query) > MAX_CAPTION_CHARS:
                skipped["with queries that are not plain text (images, items, excluded words)"] += 1
            elif image is None and _MOMENT.search(judgment.item):
                skipped["of moments of clips"] += 1
            elif image is None:
                skipped[f"of images that are not in {data.name} or have changed"] += 1
            elif data.images[image].split != split:
                skipped[f"of images of split {data.images[image].split}"] += 1
            elif not judgment.relevant and (query, image) in captions:
                skipped["that contradict captions of the data set"] += 1
            else:
                # The pair was also judged under another name of the image.
                if earlier := by_pair.get((query, image)):
                    skipped["replaced by later judgments of the same image"] += 1
                    # The later one counts, and at the same time the one that is "not relevant".
                    judgment = max(
                        earlier, judgment, key=lambda each: (each.timestamp, not each.relevant)
                    )
                by_pair[query, image] = judgment
        queries = tuple(sorted({query for query, _ in by_pair}))
        query_number = {query: number for number, query in enumerate(queries)}
        relevant, not_relevant = (
            _sorted_array(
                (query_number[query], matcher.row_in_split[image])
                for (query, image), judgment in by_pair.items()
                if judgment.relevant is value
            )
            for value in (True, False)
        )
        # Sorted, so that the order of the judgments does not change the hash.
        content = sorted(
            (query, data.images[image].name, bool(judgment.relevant))
            for (query, image), judgment in by_pair.items()
        )
        fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return cls(queries, relevant, not_relevant, dict(skipped), fingerprint, split)

    def __len__(self) -> int:
        return len(self.relevant) + len(self.not_relevant)

    def __str__(self) -> str:
        summary = (
            f"{len(self.queries):,} text queries with {len(self.relevant):,} relevant and "
            f"{len(self.not_relevant):,} not relevant images of "
            f"split {self.split}."
        )
        return f"{summary} {self.skipped_summary}" if self.skipped else summary

    @property
    def skipped_summary(self) -> str:
        """A sentence with the number of skipped judgments and the reasons."""
        total = sum(self.skipped.values())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items())
        return f"{total:,} of {total + len(self):,} judgments were skipped: {reasons}."


class _ImageMatcher:
    """Finds judged items among the images of a data set. Reads file contents only if paths do not
    suffice.
    """

    def __init__(self, data: Dataset, split: str, progress: Progress):
        self.data = data
        self.progress = progress
        self._by_name = {image.name: number for number, image in enumerate(data.images)}
        self._hashes: dict[int, str] = {}
        in_split = [number for number, image in enumerate(data.images) if image.split == split]
        self.row_in_split = {number: row for row, number in enumerate(in_split)}

    def find(self, judgment: Judgment) -> int | None:
        """The number of the judged image, by its path if its content is the judged one, else by its
        content. None if it is missing, or if the item is a moment of a clip.
        """
        number = self._by_name.get(judgment.item)
        if number is not None:
            content_hash = self._content_hash(number)
            # Without one of the hashes, the name decides.
            if (
                not content_hash
                or not judgment.content_hash
                or content_hash == judgment.content_hash
            ):
                return number
        if _MOMENT.search(judgment.item) or not judgment.content_hash:
            return None
        return self._by_content.get(judgment.content_hash)

    def _content_hash(self, number: int) -> str:
        """The content hash of an image. Empty if only its captions or features are available."""
        if number not in self._hashes:
            location = self.data.images[number].location
            self._hashes[number] = "" if location is None else location.content_hash
        return self._hashes[number]

    @cached_property
    def _by_content(self) -> dict[str, int]:
        """The first image with each content, preferably one outside of the split, because that one
        is held out.
        """
        order = sorted(
            range(len(self.data.images)), key=lambda number: (number in self.row_in_split, number)
        )
        first: dict[str, int] = {}
        for done, number in enumerate(order, 1):
            if content_hash := self._content_hash(number):
                first.setdefault(content_hash, number)
            self.progress.update("matching judged images", done, len(order), 0.0)
        return first


def _sorted_array(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class FeedbackSplit:
    """A training split together with its judged pairs.

    Texts are numbered: captions of the split, then queries as additional captions of their relevant
    images, then unmatched queries.

    Attributes:
        data: The split, with each query as an additional caption of every image to which it is
            relevant.
        unmatched_queries: Queries without a relevant image.
        query_of: The query that each text is, or -1, shape ``[T]``. A caption of the split can also
            be a query.
        image_of: The image of each text, shape ``[T]``. Each unmatched query has a negative number
            of its own.
        relevant: Relevant pairs (query, image), including the captions of the split, shape ``[P,
            2]``.
        not_relevant: Pairs (query, image) that are not relevant, shape ``[N, 2]``.
    """

    data: Dataset
    unmatched_queries: tuple[str, ...]
    query_of: np.ndarray
    image_of: np.ndarray
    relevant: np.ndarray
    not_relevant: np.ndarray

    @classmethod
    def from_pairs(cls, split: Dataset, pairs: FeedbackPairs) -> FeedbackSplit:
        """Add judged pairs to a split."""
        query_number = {query: number for number, query in enumerate(pairs.queries)}
        query_of = np.array(
            [query_number.get(" ".join(caption.split()), -1) for caption in split.captions],
            dtype=np.int64,
        )
        captions = np.flatnonzero(query_of >= 0)
        # A caption of the split can be a query, and then its image is relevant to it.
        caption_pairs = _sorted_array(
            {*zip(query_of[captions].tolist(), split.image_of[captions].tolist(), strict=True)}
        )
        # relevant images that do not have the query as a caption
        added = pairs.relevant[~_contained(pairs.relevant, caption_pairs)]
        # queries with a relevant image
        matched = np.unique(np.concatenate([caption_pairs, added])[:, 0])
        unmatched = np.setdiff1d(np.arange(len(pairs.queries)), matched)
        data = replace(
            split,
            captions=(*split.captions, *(pairs.queries[query] for query in added[:, 0])),
            image_of=np.concatenate([split.image_of, added[:, 1]]),
            caption_origin=np.concatenate([split.caption_rows, np.full(len(added), -1)]),
        )
        return cls(
            data,
            unmatched_queries=tuple(pairs.queries[query] for query in unmatched),
            query_of=np.concatenate([query_of, added[:, 0], unmatched]),
            # Negative numbers: no image of the split belongs to them.
            image_of=np.concatenate([data.image_of, -1 - np.arange(len(unmatched))]),
            relevant=np.unique(np.concatenate([caption_pairs, added]), axis=0),
            not_relevant=pairs.not_relevant,
        )

    def add_negatives(
        self, images: np.ndarray, captions: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add known negatives to a batch: images that are not relevant to its queries, each with a
        caption, and unmatched queries that are not relevant to its images.
        """
        if not len(self.not_relevant):
            return images, captions
        queries = np.unique(self.query_of[captions])
        # An image that is in the batch already brings its pairs with it.
        present = set(images.tolist())
        added = dict.fromkeys(
            image
            for query in queries
            for image in _sample(self._negative_images.get(int(query)), random)
            if image not in present
        )
        captions_of_added = [self.data.captions_of[image] for image in added]
        added_captions = [
            int(random.choice(numbers)) for numbers in captions_of_added if len(numbers)
        ]
        images = np.concatenate([images, np.array(list(added), dtype=np.int64)])
        unmatched = dict.fromkeys(
            text
            for image in np.unique(images)
            for text in _sample(self._negative_texts.get(int(image)), random)
        )
        return images, np.concatenate(
            [captions, np.array([*added_captions, *unmatched], dtype=np.int64)]
        )

    def batch_labels(self, images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up which pairs of a batch are relevant, and which are not: bool ``[V, T]`` each.
        Unjudged pairs are in neither.
        """
        queries = np.broadcast_to(self.query_of[texts], (len(images), len(texts)))  # [V, T]
        # [V T, 2]
        keys = np.stack([queries, np.broadcast_to(images[:, None], queries.shape)], -1).reshape(
            -1, 2
        )
        relevant, not_relevant = (
            _contained(keys, pairs).reshape(queries.shape)
            for pairs in (self.relevant, self.not_relevant)
        )
        return relevant, not_relevant

    @cached_property
    def _negative_images(self) -> dict[int, list[int]]:
        """The images that are not relevant to each query that has a relevant one."""
        unmatched = set(self.query_of[len(self.data.captions) :].tolist())
        return _grouped(
            (query, image) for query, image in self.not_relevant.tolist() if query not in unmatched
        )

    @cached_property
    def _negative_texts(self) -> dict[int, list[int]]:
        """The unmatched queries, as texts, that are not relevant to each image."""
        first_text = len(self.data.captions)
        text_of = {
            query: text
            for text, query in enumerate(self.query_of[first_text:].tolist(), first_text)
        }
        return _grouped(
            (image, text_of[query])
            for query, image in self.not_relevant.tolist()
            if query in text_of
        )


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    groups = defaultdict[int, list[int]](list)
    for key, value in pairs:
        groups[key].append(value)
    return groups


def _sample(items: list[int] | None, random: np.random.Generator) -> list[int]:
    """All items, or a random sample if there are more than `MAX_ADDED_NEGATIVES`."""
    if items is None or len(items) <= MAX_ADDED_NEGATIVES:
        return items or []
    return random.choice(items, MAX_ADDED_NEGATIVES, replace=False).tolist()


def _contained(pairs: np.ndarray, collection: np.ndarray) -> np.ndarray:
    """Which pairs ``[N, 2]`` are in a collection of pairs: bool ``[N]``."""
    # A pair as one number. A query of -1 gives a negative one, which is in no collection.
    base = 1 + max(
        (int(array[:, 1].max()) for array in (pairs, collection) if len(array)), default=0
    )
    return np.isin(pairs[:, 0] * base + pairs[:, 1], collection[:, 0] * base + collection[:, 1])
