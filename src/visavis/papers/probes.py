"""Robustness probes of a run: minimal pairs scored by its best model, and recall on edited captions
and images.

A minimal pair is a true caption, and the same caption with one edit that makes it false. Pairs of
synthetic scenes are written from the ground truth (``synthetic.captions``). Captions of the
user are edited with short word lists, only where the words leave little doubt, and never into
another caption of the image. It is not guaranteed that the edited caption is false, because nobody
checks the image.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image as Pillow
from PIL.Image import Image
from PIL.ImageFilter import GaussianBlur
from torch import Tensor

from visavis.core.encoded import DIRECTIONS, Encoded, collect_batches, concatenate
from visavis.core.errors import RunError
from visavis.core.fields import validate_int
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Cell, Column, Table
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.synthetic import ClipAnnotations, SceneGraphs
from visavis.data.synthetic.captions import make_scene_pairs
from visavis.data.synthetic.lexicon import STYLES
from visavis.data.words import tokenize
from visavis.evaluation import Evaluation, evaluate
from visavis.models.batch_encoding import evaluation_mode
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.inference import (
    batches_by_length,
    device_score,
    encode_items,
    join_batches,
    score_indexed_pairs,
)
from visavis.models.retriever import Retriever
from visavis.training.evaluation.ranked_split import first_images
from visavis.training.runs.open_run import open_run, read_run_recipe

CHANCE_PERCENT = 50.0
"""Expected accuracy of random scores, in percent."""
# Sums in another order differ by less than this.
TIE_TOLERANCE = 1e-6
"""Scores are equal if they differ by at most this share of their size, or of 1."""
KS = (1, 10)
"""Cutoffs of recall."""
BLUR_RADIUS = 0.02
"""Standard deviation of the blur, as a share of the shorter side."""
CROPPED_SIDE = 0.8
"""Share of both sides that a central crop keeps."""
JPEG_QUALITY = 10
"""JPEG quality, from 1 to 95."""
IMAGE_BATCH_SIZE = 64
"""Number of images that are edited and encoded together."""


COLORS = (
    "red",
    "blue",
    "green",
    "yellow",
    "black",
    "white",
    "brown",
    "orange",
    "purple",
    "pink",
    "gray",
)
"""Color words."""
NUMBERS = ("two", "three", "four", "five", "six")
"""Number words."""
OPPOSITES = {
    "above": "below",
    "below": "above",
    "behind": "in front of",
    "in front of": "behind",
    "inside": "outside",
    "outside": "inside",
    "on top of": "underneath",
    "over a": "under a",
    "over the": "under the",
    "under": "over",
    "underneath": "on top of",
}
"""Each relation with its opposite."""
ACTORS = (
    "man",
    "woman",
    "boy",
    "girl",
    "dog",
    "cat",
    "horse",
    "child",
    "baby",
    "person",
    "lady",
    "bird",
    "bike",
    "ball",
)
"""People, animals and things that can exchange roles."""
ASYMMETRIC_WORDS = (
    "behind",
    "in front of",
    "on top of",
    "under",
    "above",
    "below",
    "chases",
    "chasing",
    "carries",
    "carrying",
    "holds",
    "holding",
    "rides",
    "riding",
    "follows",
    "following",
    "throws",
    "throwing",
    "pulls",
    "pulling",
    "pushes",
    "pushing",
    "feeds",
    "feeding",
)
"""Relations that hold between two actors in one direction only."""
SYMMETRIC_WORDS = frozenset(
    {"and", "with", "while", "other", "together", "near", "beside", "as"}
)  # language: quoted
"""Words that suggest a symmetric relation, in which an exchange of roles changes nothing."""


def _crop(image: Image) -> Image:
    left, top = (round((1 - CROPPED_SIDE) / 2 * length) for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top))


def _compress(image: Image) -> Image:
    raw = io.BytesIO()
    image.convert("RGB").save(raw, "jpeg", quality=JPEG_QUALITY)
    return Pillow.open(raw).convert("RGB")


IMAGE_EDITS: dict[str, Callable[[Image], Image]] = {
    "blurred": lambda image: image.filter(GaussianBlur(BLUR_RADIUS * min(image.size))),
    "cropped": _crop,
    "JPEG": _compress,
    "gray": lambda image: image.convert("L").convert("RGB"),
}
"""Edits that keep images recognizable, by name."""


@dataclass(frozen=True)
class ProbeResult:
    """Accuracy on the minimal pairs of one kind of edit.

    Attributes:
        kind: Kind of edit.
        num_pairs: Number of minimal pairs.
        num_correct: Number of pairs whose true caption scores higher. A tie is not correct.
        num_ties: Number of pairs with equal scores.
        same_words: Whether both captions always have the same words in another order, which a bag
            of words cannot distinguish.
        low: Lower bound of the 95 % interval of the accuracy (Wilson), in percent.
        high: Upper bound of the interval, in percent.
    """

    kind: str
    num_pairs: int
    num_correct: int
    num_ties: int
    same_words: bool
    low: float
    high: float

    @property
    def percent(self) -> float:
        """Accuracy in percent."""
        return 100 * self.num_correct / self.num_pairs

    @property
    def title(self) -> str:
        """The kind of edit, with a star if both captions have the same words."""
        return f"{self.kind} *" if self.same_words else self.kind

    @classmethod
    def from_scores(
        cls, kind: str, true: np.ndarray, edited: np.ndarray, *, same_words: bool
    ) -> ProbeResult:
        """Count correct pairs.

        Args:
            kind: Kind of edit.
            true: Scores of the true captions, shape ``[N]``.
            edited: Scores of the edited captions, shape ``[N]``.
            same_words: Whether both captions always have the same words.

        Returns:
            The accuracy.
        """
        from scipy.stats import binomtest

        tie = np.abs(true - edited) <= TIE_TOLERANCE * np.maximum(  # [N]
            1, np.maximum(np.abs(true), np.abs(edited))
        )
        num_correct = int(((true > edited) & ~tie).sum())
        interval = binomtest(num_correct, len(true)).proportion_ci(method="wilson")
        return cls(
            kind,
            len(true),
            num_correct,
            int(tie.sum()),
            same_words,
            100 * interval.low,
            100 * interval.high,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"percent": self.percent, "chance": CHANCE_PERCENT}


@dataclass(frozen=True)
class RecallChange:
    """Change of recall by an edit that keeps captions true, or images recognizable.

    Attributes:
        edit: Name of the edit.
        direction: "i2t" or "t2i".
        k: Cutoff of recall.
        before: Recall without the edit, in percent.
        after: Recall with the edit, in percent.
        low: Lower bound of the 95 % interval of the difference, paired over images
            (t-distribution).
        high: Upper bound of the interval.
    """

    edit: str
    direction: str
    k: int
    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """Difference of the recalls, in percentage points."""
        return self.after - self.before

    @classmethod
    def from_ranks(
        cls,
        edit: str,
        direction: str,
        k: int,
        before: np.ndarray,
        after: np.ndarray,
        images: np.ndarray,
    ) -> RecallChange:
        """Compare the ranks of the same queries.

        Args:
            edit: Name of the edit.
            direction: "i2t" or "t2i".
            k: Cutoff of recall.
            before: Rank of each query without the edit, shape ``[Q]``.
            after: Rank of each query with the edit, shape ``[Q]``.
            images: Image of each query, numbered from 0 without gaps, shape ``[Q]``.

        Returns:
            The change of recall.
        """
        from scipy.stats import t

        hits_before = before <= k
        hits_after = after <= k
        number = np.bincount(images)  # [V], queries of each image
        # [V], one value per image, because its queries are not independent
        change = 100 * np.bincount(images, hits_after.astype(float) - hits_before) / number
        mean = float(change @ number / number.sum())
        error = float(change.std(ddof=1) / np.sqrt(len(change))) if len(change) > 1 else np.inf
        half_width = float(t.ppf(0.975, max(len(change) - 1, 1))) * error
        return cls(
            edit,
            direction,
            k,
            before=float(100 * hits_before.mean()),
            after=float(100 * hits_after.mean()),
            low=mean - half_width,
            high=mean + half_width,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"difference": self.difference}


@dataclass(frozen=True)
class ProbeReport(Result):
    """Results of all probes of a run.

    Attributes:
        run: Run folder.
        model: Kind of the model and its image encoder.
        data: Name of the data set.
        images: Number of images.
        source: By what the edited captions are false.
        results: Accuracy by kind of edit.
        recall_changes: Changes of recall by harmless edits.
        skipped: Sentences about probes that were not possible.
    """

    ROWS: ClassVar[str] = "results"

    run: Path
    model: str
    data: str
    images: int
    source: str
    results: tuple[ProbeResult, ...]
    recall_changes: tuple[RecallChange, ...]
    skipped: tuple[str, ...] = ()

    def tables(self) -> list[Table]:
        """Return the accuracy for each kind of edit, and the changes of recall."""
        rows = [
            (
                each.title,
                each.num_pairs,
                each.percent,
                f"{each.low:.1f} to {each.high:.1f}",
                each.num_ties,
            )
            for each in self.results
        ]
        columns = (
            Column("edit", is_text=True),
            Column("cases", "d"),
            Column("correct", ".1f", unit=" %"),
            Column("95 %"),
            Column("ties", "d"),
        )
        note = (
            "correct: the true caption scores above the edited one. A tie is not correct. Chance is "
            "50 %. * the same words in another order, which a bag of words cannot distinguish. "
            f"Edited captions are false by {self.source}."
        )
        ending = (*self.skipped, f"{self.model}, {self.images:,} images of {self.data}.")
        accuracies = Table(columns, tuple(rows), (note,))
        if not self.recall_changes:
            return [replace(accuracies, notes=(note, *ending))]
        return [accuracies, self._change_table(ending)]

    def _change_table(self, ending: tuple[str, ...]) -> Table:
        rows = [
            (
                each.edit,
                DIRECTIONS[each.direction],
                f"R@{each.k}",
                each.before,
                each.after,
                Cell(each.difference, (each.low, each.high)),
            )
            for each in self.recall_changes
        ]
        columns = (
            *(Column(title, is_text=True) for title in ("edit", "", "R@K")),
            Column("before", ".1f"),
            Column("after", ".1f"),
            Column("difference, 95 %", "+.1f", spread=" ({} to {})"),
        )
        note = (
            "Recall in percent before and after the edit, and the 95 % interval of the difference, "
            "paired over images."
        )
        return Table(columns, tuple(rows), (note, *ending))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        results, changes = (
            [part.to_json() for part in parts] for parts in (self.results, self.recall_changes)
        )
        return vars(self) | {"run": str(self.run), "results": results, "recall_changes": changes}


def results_by_kind(
    pairs: Sequence[MinimalPair], true: np.ndarray, edited: np.ndarray
) -> tuple[ProbeResult, ...]:
    """Compute the accuracy for each kind of edit.

    Args:
        pairs: Minimal pairs.
        true: Scores of the true captions, shape ``[N]``.
        edited: Scores of the edited captions, shape ``[N]``.

    Returns:
        Accuracies, in the order of the pairs.
    """
    results = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        index = [number for number, pair in enumerate(pairs) if pair.kind == kind]
        same_words = all(
            sorted(tokenize(pairs[i].true)) == sorted(tokenize(pairs[i].edited)) for i in index
        )
        results.append(
            ProbeResult.from_scores(kind, true[index], edited[index], same_words=same_words)
        )
    return tuple(results)


def recall_changes(edit: str, before: Evaluation, after: Evaluation) -> tuple[RecallChange, ...]:
    """Compute the changes of recall by an edit of all images, or of all captions.

    Args:
        edit: Name of the edit.
        before: Evaluation without the edit.
        after: Evaluation with the edit.

    Returns:
        Changes for both directions and all cutoffs.
    """
    ranks = before.query_ranks
    ranks_after = after.query_ranks
    directions = {
        "i2t": (ranks.image_ranks, ranks_after.image_ranks, ranks.image_ids),
        "t2i": (ranks.text_ranks, ranks_after.text_ranks, ranks.text_ids),
    }
    return tuple(
        RecallChange.from_ranks(edit, direction, k, *queries)
        for direction, queries in directions.items()
        for k in KS
    )


TextInputs = dict[tuple[EncoderSpec | None, tuple[str, ...]], Encoded]
"""Features of texts, by their frozen encoder and the texts."""


def probe_run(
    run: Path,
    images: int,
    progress: Progress,
    data: str | None = None,
    split: str | None = None,
    memory: MemoryLimit = None,
    *,
    with_edits: bool = True,
    shared_inputs: TextInputs | None = None,
) -> ProbeReport:
    """Probe the best model of a run.

    Args:
        run: Run folder.
        images: Number of images, the first ones of the split. 0 for all.
        progress: Receives the progress.
        data: Data set in place of the one of the run.
        split: Name of the split. Default: the test split of the recipe.
        memory: Memory for blocks of scores.
        with_edits: Also measure recall after edits that keep captions true and images recognizable.
        shared_inputs: Inputs of earlier runs, to which this run adds its own. Runs with the
            same frozen text encoder then encode the same edited captions once.

    Returns:
        The results.

    Raises:
        RunError: If the model cannot read new captions, or no caption can be edited.
    """
    recipe = read_run_recipe(run, data, memory)
    data_module, matcher = open_run(run, recipe, progress)
    if data_module.processor.stored_text_features:
        raise RunError(
            f"{run}: expected a model that encodes captions, got one that reads stored text "
            "features. Probe another run."
        )
    probed = first_images(
        data_module.data.split(split or recipe.evaluation.test), validate_int(images, "images", 0)
    )
    model = Retriever(matcher, data_module.processor, memory=recipe.memory or None)
    shared_inputs = {} if shared_inputs is None else shared_inputs
    encoded = data_module.encode(matcher, probed)
    inputs = _ProbeInputs(model, probed, *encoded, progress, shared_inputs)
    folder = resolve_path(recipe.data.path)
    if os.path.isfile(folder / "clips.jsonl"):
        source = "the ground truth of the synthetic clips"
        results = _probe_clip_partners(inputs, ClipAnnotations.open(folder))
    elif os.path.isfile(folder / "scenes.jsonl"):
        source = "the ground truth of the synthetic scenes"
        graphs = SceneGraphs.open(folder)
        captions = " ".join(probed.captions).lower()
        # The style whose shape names are the most frequent in the captions of the data set.
        style = max(
            STYLES.values(),
            key=lambda style: sum(
                captions.count(name) for names in style.shapes.values() for name in set(names)
            ),
        )
        pairs = [
            MinimalPair(pair.kind, image, pair.true.text, pair.edited.text)
            for image, row in enumerate(probed.image_rows)
            for pair in make_scene_pairs(graphs.scenes[row], np.random.default_rng(int(row)), style)
        ]
        results = _probe_pairs(inputs, pairs)
    else:
        source = "word lists, not checked by people"
        results = _probe_pairs(inputs, make_minimal_pairs(probed))
    if not results:
        raise RunError(
            f"{probed.name}: expected a caption that can be edited, got none in "
            f"{len(probed.images):,} images. Probe more images."
        )
    changes, skipped = (
        _probe_edits(inputs, stored_features=bool(recipe.visual.features))
        if with_edits
        else ((), ())
    )
    kind = f"{recipe.model['kind']} on {recipe.visual.encoder or recipe.visual.features}"
    return ProbeReport(
        run, kind, probed.name, len(probed.images), source, results, changes, skipped
    )


@dataclass(frozen=True, eq=False)
class _ProbeInputs:
    """A model with the probed data set, encoded without edits."""

    model: Retriever
    data: Dataset
    visual: Encoded
    text: Encoded
    progress: Progress
    shared_inputs: TextInputs

    def encode_texts(self, texts: list[str]) -> Encoded:
        """Encode texts. Those that are captions of the data set are encoded already, and half of
        the texts of a probe are.
        """
        row_of = {caption: row for row, caption in enumerate(self.data.captions)}
        encoded = [self.text]  # captions of the data set come first
        if new := [text for text in dict.fromkeys(texts) if text not in row_of]:
            row_of |= {text: row for row, text in enumerate(new, len(self.text))}
            encoded.append(self._encode_new_texts(new))
        return collect_batches(encoded)[torch.tensor([row_of[text] for text in texts])]

    @torch.inference_mode()
    def _encode_new_texts(self, texts: list[str]) -> Encoded:
        processor = self.model.processor
        batches = batches_by_length(texts, self.model.batch_size)
        key = processor.text, tuple(texts)

        def read_texts(index: np.ndarray) -> Encoded:
            return processor.process_texts([texts[i] for i in index], self.model.device)

        inputs = self.shared_inputs.get(key) or join_batches(
            [read_texts(index) for index in batches], batches
        )
        if processor.text is not None:  # tokens are read again in less time
            self.shared_inputs[key] = inputs
        return encode_items(
            self.model.matcher,
            "text",
            (inputs[torch.from_numpy(index)] for index in batches),
            batches,
            on_batch=lambda done, total: self.progress.update("captions", done, total, 0.0),
        )

    def encode_images(self, name: str) -> Encoded:
        """Encode all images with an edit of `IMAGE_EDITS`, or "unchanged"."""
        parts = []
        edit = IMAGE_EDITS.get(name, lambda image: image)
        for start in range(0, len(self.data.images), IMAGE_BATCH_SIZE):
            batch = self.data.images[start : start + IMAGE_BATCH_SIZE]
            parts.append(self.model.encode_visual([edit(image.open()) for image in batch]))
            self.progress.update(f"images, {name}", start + len(batch), len(self.data.images), 0.0)
        return concatenate(parts)

    def score_pairs(self, images: Tensor, text: Encoded, texts: Tensor) -> np.ndarray:
        with evaluation_mode(self.model.matcher):
            scores = score_indexed_pairs(
                self.model.matcher, self.visual, text, images, texts, self.model.memory
            )
        return scores.double().numpy()

    def evaluate(self, visual: Encoded, text: Encoded, data: Dataset) -> Evaluation:
        ids = torch.arange(len(data.images)), torch.from_numpy(data.image_of)
        with evaluation_mode(self.model.matcher):
            return evaluate(
                visual, text, device_score(self.model.matcher), *ids, memory=self.model.memory
            )


def _probe_pairs(inputs: _ProbeInputs, pairs: list[MinimalPair]) -> tuple[ProbeResult, ...]:
    """Score both captions of each minimal pair against its image, and compute the accuracy for each
    kind of edit. Every text is encoded once.
    """
    if not pairs:
        return ()
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.true, pair.edited)))
    number = {text: i for i, text in enumerate(texts)}
    encoded = inputs.encode_texts(texts)
    images = torch.tensor([pair.image for pair in pairs])
    true, edited = (
        inputs.score_pairs(images, encoded, torch.tensor([number[text] for text in captions]))
        for captions in ([pair.true for pair in pairs], [pair.edited for pair in pairs])
    )
    return results_by_kind(pairs, true, edited)


def _probe_clip_partners(inputs: _ProbeInputs, truth: ClipAnnotations) -> tuple[ProbeResult, ...]:
    """Score each caption against its clip and the partner clip, which shows the same frames in
    another order.
    """
    data = inputs.data
    probed = {image.name: i for i, image in enumerate(data.images)}
    annotated = {name: i for i, name in enumerate(truth.names)}
    # [V], -1 if the partner is not probed.
    partner = np.array(
        [
            probed.get(truth.names[truth.partner_of[annotated[image.name]]], -1)
            for image in data.images
        ]
    )
    subsets = np.array([truth.subset[annotated[image.name]] for image in data.images])
    image_of = data.image_of
    results = []
    for subset, title in (("order", "order of events"), ("direction", "direction")):
        captions = np.flatnonzero((partner[image_of] >= 0) & (subsets[image_of] == subset))
        if len(captions):
            scores, partner_scores = (
                inputs.score_pairs(torch.from_numpy(clips), inputs.text, torch.from_numpy(captions))
                for clips in (image_of[captions], partner[image_of[captions]])
            )
            results.append(ProbeResult.from_scores(title, scores, partner_scores, same_words=True))
    return tuple(results)


def _probe_edits(
    inputs: _ProbeInputs, *, stored_features: bool
) -> tuple[tuple[RecallChange, ...], tuple[str, ...]]:
    """Recall changes by typos and image edits, and a sentence if images cannot be edited."""
    rng = np.random.default_rng(0)
    first = inputs.data.first_captions(1)
    texts = inputs.encode_texts(
        [*first.captions, *(add_typo(caption, rng) for caption in first.captions)]
    )
    correct, with_typos = (
        inputs.evaluate(inputs.visual, part, first)
        for part in (texts[: len(first.captions)], texts[len(first.captions) :])
    )
    changes = recall_changes("typos in captions", correct, with_typos)
    if stored_features or inputs.model.processor.visual is None:
        return changes, (
            "Images were not edited: the model reads stored image features (visual.features).",
        )
    if any(image.location is None or image.is_video for image in inputs.data.images):
        return changes, (
            f"Images were not edited: {inputs.data.name} has no image files, or clips.",
        )
    # Both evaluations encode pixels: stored features can differ from those of the encoder.
    before = inputs.evaluate(inputs.encode_images("unchanged"), inputs.text, inputs.data)
    for edit in IMAGE_EDITS:
        after = inputs.evaluate(inputs.encode_images(edit), inputs.text, inputs.data)
        changes += recall_changes(f"{edit} images", before, after)
    return changes, ()


@dataclass(frozen=True)
class MinimalPair:
    """A true and a false caption of an image.

    Attributes:
        kind: Kind of edit.
        image: Index of the image.
        true: The true caption.
        edited: The edited caption, which is false.
    """

    kind: str
    image: int
    true: str
    edited: str


def make_minimal_pairs(data: Dataset, seed: int = 0) -> list[MinimalPair]:
    """Edit captions of a data set.

    Args:
        data: The data set.
        seed: Random seed.

    Returns:
        At most one pair for each image and kind of edit, from the first caption that can be edited.
    """
    pairs = []
    for image, indices in enumerate(data.captions_of):
        captions = [data.captions[index] for index in indices]
        existing = {" ".join(tokenize(caption)) for caption in captions}
        # Words of any caption of the image may be true of it.
        words = {word for caption in existing for word in caption.split()}
        for number, (kind, edit) in enumerate(EDITS.items()):
            # Independent of which other captions could be edited.
            rng = np.random.default_rng([seed, number, image])
            for caption in captions:
                edited = edit(caption[:1].lower() + caption[1:], words, rng)
                if edited and " ".join(tokenize(edited)) not in existing:
                    pairs.append(
                        MinimalPair(
                            kind,
                            image,
                            caption,
                            edited if caption[0].islower() else edited[0].upper() + edited[1:],
                        )
                    )
                    break
    return pairs


def replace_word(
    caption: str, words: tuple[str, ...], excluded: set[str], rng: np.random.Generator
) -> str:
    """Replace the only listed word of a caption by another one.

    Args:
        caption: The caption.
        words: Listed words, such as colors.
        excluded: Words of all captions of the image, which are not used.
        rng: Samples the new word.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> replace_word("a red ball", ("red", "blue"), {"a", "red", "ball"}, np.random.default_rng(0))
        'a blue ball'
    """
    match = _find_single(caption, words)
    candidates = [
        word
        for word in words
        if match and word not in excluded and _article(word) == _article(match[0])
    ]
    return (
        _replace(match, candidates[int(rng.integers(len(candidates)))])
        if match and candidates
        else ""
    )


def swap_colors(caption: str) -> str:
    """Exchange two colors, if a different word follows each: not in "a black and white dog".

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> swap_colors("a red ball on a blue box")
        'a blue ball on a red box'
    """
    matches = _find_words(caption, COLORS)
    # In "a black and white dog" both colors describe one thing.
    followers = {
        word[1] for color in matches if (word := re.match(r" ([a-z]+)", caption[color.end() :]))
    }
    if len(matches) != 2 or len(followers) != 2 or followers & {*COLORS, "and", "or"}:
        return ""
    first, second = (match[0] for match in matches)
    return (
        _swap(caption, *matches) if first != second and _article(first) == _article(second) else ""
    )


def swap_roles(caption: str) -> str:
    """Exchange the two actors of an asymmetric relation.

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> swap_roles("a dog behind a man")
        'a man behind a dog'
    """
    matches = _find_words(caption, ACTORS)
    if len(matches) != 2 or matches[0][0] == matches[1][0]:
        return ""
    # the relation must stand between the actors
    between = caption[matches[0].end() : matches[1].start()]
    if not _find_words(between, ASYMMETRIC_WORDS) or SYMMETRIC_WORDS & set(tokenize(caption)):
        return ""
    return _swap(caption, *matches)


def replace_relation(caption: str) -> str:
    """Replace the only relation of a caption by its opposite.

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> replace_relation("a dog under the table")
        'a dog over the table'
    """
    match = _find_single(caption, sorted(OPPOSITES, key=len, reverse=True))
    return _replace(match, OPPOSITES[match[0]]) if match else ""


def negate(caption: str) -> str:
    """Negate the only "is" or "are" of a caption.

    Args:
        caption: The caption.

    Returns:
        The edited caption. Empty if it cannot be edited.

    Example:
        >>> negate("a dog is running")
        'a dog is not running'
    """
    match = _find_single(caption, ("is", "are"))
    return (
        _replace(match, f"{match[0]} not")
        if match and {"not", "no"}.isdisjoint(tokenize(caption))
        else ""
    )


def add_typo(caption: str, rng: np.random.Generator) -> str:
    """Exchange two neighboring letters inside the longest word. The caption remains true and
    readable.

    Args:
        caption: The caption.
        rng: Samples the letters.

    Returns:
        The caption with the typo. Unchanged without a word of at least four letters.
    """
    words = [match for match in re.finditer(r"[A-Za-z]{4,}", caption) if len(set(match[0][1:])) > 1]
    if not words:
        return caption
    word = max(words, key=lambda match: len(match[0]))
    positions = [i for i in range(word.start() + 1, word.end() - 1) if caption[i] != caption[i + 1]]
    position = positions[int(rng.integers(len(positions)))] if positions else word.start()
    return caption[:position] + caption[position + 1] + caption[position] + caption[position + 2 :]


EDITS: dict[str, Callable[[str, set[str], np.random.Generator], str]] = {
    "color replaced": lambda caption, excluded, rng: replace_word(caption, COLORS, excluded, rng),
    "colors swapped": lambda caption, *_: swap_colors(caption),
    "relation replaced": lambda caption, *_: replace_relation(caption),
    "roles swapped": lambda caption, *_: swap_roles(caption),
    "number replaced": lambda caption, excluded, rng: replace_word(caption, NUMBERS, excluded, rng),
    "negated": lambda caption, *_: negate(caption),
}
"""Edits that make a caption false, by name. An edit returns an empty text if it is not possible."""


def _find_words(text: str, words: Sequence[str]) -> list[re.Match[str]]:
    return list(re.finditer(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])", text))


def _find_single(text: str, words: Sequence[str]) -> re.Match[str] | None:
    matches = _find_words(text, words)
    return matches[0] if len(matches) == 1 else None


def _replace(match: re.Match[str], text: str) -> str:
    return match.string[: match.start()] + text + match.string[match.end() :]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _swap(caption: str, first: re.Match[str], second: re.Match[str]) -> str:
    between = caption[first.end() : second.start()]
    return caption[: first.start()] + second[0] + between + first[0] + caption[second.end() :]
