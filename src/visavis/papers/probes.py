"""Robustness probes of a run: minimal pairs scored by its best model, and recall on edited captions
and images.

A minimal pair is a true caption, and the same caption with one edit that makes it false. Pairs of
synthetic scenes are written from the ground truth (``synthetic.captions``). Captions of the
user are edited with short word lists (``caption_edits``). The pairs are selected so that a model
without the image cannot solve them (``text_only``).
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
from visavis.papers.caption_edits import make_text_pairs
from visavis.papers.text_only import (
    TEXT_ONLY_LIMIT,
    NgramModel,
    learned_margins,
    select_balanced,
    share_correct,
)
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
SCENE_DRAWS = 4
"""Number of times that each kind of edit is sampled for a synthetic scene."""
IMAGE_BATCH_SIZE = 64
"""Number of images that are edited and encoded together."""


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
        text_only: Accuracy of a model that learns from the other pairs and sees no image, in
            percent. None: the pairs are not of texts.
    """

    kind: str
    num_pairs: int
    num_correct: int
    num_ties: int
    same_words: bool
    low: float
    high: float
    text_only: float | None = None

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
        """Count correct pairs, from the scores ``[N]`` of the true and of the edited captions."""
        from scipy.stats import binomtest

        tie = np.abs(true - edited) <= TIE_TOLERANCE * np.maximum(
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
        """Compare the ranks ``[Q]`` of the same queries, whose images are numbered without gaps."""
        from scipy.stats import t

        hits_before = before <= k
        hits_after = after <= k
        # [V], queries of each image.
        number = np.bincount(images)
        # [V], one value per image, because its queries are not independent.
        change = 100 * np.bincount(images, hits_after.astype(float) - hits_before) / number
        # Weighted by queries, so that the mean is the difference of the recalls.
        mean = float(change @ number / number.sum())
        # A single image has no spread.
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
        ngram_percent: Accuracy of an n-gram model of the training captions on all pairs, which sees
            no image, in percent. None: the data have no training captions, or clips are compared.
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
    ngram_percent: float | None = None

    @property
    def learned_percent(self) -> float | None:
        """Accuracy on all pairs of the model that learns from other pairs and sees no image."""
        known = [one for one in self.results if one.text_only is not None]
        if not known:
            return None
        return float(
            np.average(
                [one.text_only or 0.0 for one in known], weights=[one.num_pairs for one in known]
            )
        )

    @property
    def percent(self) -> float:
        """Accuracy on all pairs, in percent."""
        pairs = sum(one.num_pairs for one in self.results)
        return 100 * sum(one.num_correct for one in self.results) / pairs

    def _text_only_note(self) -> str:
        """Accuracy of models without the image."""
        if self.learned_percent is None:
            return ""
        ngrams = (
            "not measured, because the data have no training captions"
            if self.ngram_percent is None
            else f"{self.ngram_percent:.1f} %"
        )
        note = (
            f"All pairs: {self.percent:.1f} %. Without the image: n-grams of the training captions {ngrams}, a model "
            f"that learns from the pairs of other images {self.learned_percent:.1f} %."
        )
        highest = max(self.learned_percent, self.ngram_percent or 0.0)
        if highest > TEXT_ONLY_LIMIT:
            note += f" Above {TEXT_ONLY_LIMIT:.0f} %, the pairs also measure language."
        return note

    def tables(self) -> list[Table]:
        """Return the accuracy for each kind of edit, and the changes of recall."""
        rows = [
            (
                each.title,
                each.num_pairs,
                each.percent,
                f"{each.low:.1f} to {each.high:.1f}",
                each.num_ties,
                each.text_only,
            )
            for each in self.results
        ]
        columns = (
            Column("edit", is_text=True),
            Column("cases", "d"),
            Column("correct", ".1f", unit=" %"),
            Column("95 %"),
            Column("ties", "d"),
            Column("text only", ".1f", unit=" %"),
        )
        note = (
            "correct: the true caption scores above the edited one. A tie is not correct. Chance is "
            "50 %. * the same words in another order, which a bag of words cannot distinguish. "
            f"Edited captions are false by {self.source}."
        )
        text_only = filter(None, [self._text_only_note()])
        ending = (*self.skipped, f"{self.model}, {self.images:,} images of {self.data}.")
        notes = (note, *text_only)
        accuracies = Table(columns, tuple(rows), notes)
        if not self.recall_changes:
            return [replace(accuracies, notes=(*notes, *ending))]
        changes = [
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
        change_columns = (
            *(Column(title, is_text=True) for title in ("edit", "", "R@K")),
            Column("before", ".1f"),
            Column("after", ".1f"),
            Column("difference, 95 %", "+.1f", spread=" ({} to {})"),
        )
        change_note = (
            "Recall in percent before and after the edit, and the 95 % interval of the difference, "
            "paired over images."
        )
        return [accuracies, Table(change_columns, tuple(changes), (change_note, *ending))]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        results, changes = (
            [part.to_json() for part in parts] for parts in (self.results, self.recall_changes)
        )
        return vars(self) | {"run": str(self.run), "results": results, "recall_changes": changes}


def results_by_kind(
    pairs: Sequence[MinimalPair], true: np.ndarray, edited: np.ndarray
) -> tuple[ProbeResult, ...]:
    """Compute the accuracy for each kind of edit, in the order of the pairs, and of a model without
    the image.
    """
    learned = learned_margins(
        [pair.true for pair in pairs],
        [pair.edited for pair in pairs],
        [pair.image for pair in pairs],
    )
    results = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        index = [number for number, pair in enumerate(pairs) if pair.kind == kind]
        same_words = all(
            sorted(tokenize(pairs[i].true)) == sorted(tokenize(pairs[i].edited)) for i in index
        )
        result = ProbeResult.from_scores(kind, true[index], edited[index], same_words=same_words)
        results.append(replace(result, text_only=100 * share_correct(learned[index])))
    return tuple(results)


def recall_changes(edit: str, before: Evaluation, after: Evaluation) -> tuple[RecallChange, ...]:
    """Compute the changes of recall in both directions by an edit of all images or captions."""
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
    """Probe the best model of a run on the first images of a split, 0 for all. Runs with the same
    frozen text encoder share the inputs of edited captions through ``shared_inputs``.
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
    whole = data_module.data
    training = whole.split("train").captions if "train" in whole.splits else ()
    ngram_percent = None
    if os.path.isfile(folder / "clips.jsonl"):
        source = "the ground truth of the synthetic clips"
        results = _probe_clip_partners(inputs, ClipAnnotations.open(folder))
    else:
        pairs, source = find_pairs(probed, folder)
        results, ngram_percent = _probe_pairs(inputs, pairs, training)
    if not results:
        raise RunError(
            f"{probed.name}: expected captions that can be edited so that a text-only model does not "
            f"find the true one, got none in {len(probed.images):,} images. Probe more images."
        )
    changes, skipped = (
        _probe_edits(inputs, stored_features=bool(recipe.visual.features))
        if with_edits
        else ((), ())
    )
    kind = f"{recipe.model['kind']} on {recipe.visual.encoder or recipe.visual.features}"
    return ProbeReport(
        run,
        kind,
        probed.name,
        len(probed.images),
        source,
        results,
        changes,
        skipped,
        ngram_percent,
    )


def find_pairs(probed: Dataset, folder: Path) -> tuple[list[MinimalPair], str]:
    """Make all minimal pairs of the images of a split, from the ground truth of synthetic scenes or else
    from the captions, and name the source by which they are false.
    """
    if not os.path.isfile(folder / "scenes.jsonl"):
        return make_minimal_pairs(probed), "word lists, not checked by people"
    graphs = SceneGraphs.open(folder)
    captions = " ".join(probed.captions).lower()
    # The style whose shape names are the most frequent in the captions of the data set.
    style = max(
        STYLES.values(),
        key=lambda style: sum(
            captions.count(name) for names in style.shapes.values() for name in set(names)
        ),
    )
    # The edits of a scene do not depend on which other scenes are probed.
    pairs = [
        MinimalPair(pair.kind, image, pair.true.text, pair.edited.text)
        for image, row in enumerate(probed.image_rows)
        for draw in range(SCENE_DRAWS)
        for pair in make_scene_pairs(
            graphs.scenes[row], np.random.default_rng([int(row), draw]), style
        )
    ]
    return pairs, "the ground truth of the synthetic scenes"


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
        # Captions of the data set come first.
        encoded = [self.text]
        if new := [text for text in dict.fromkeys(texts) if text not in row_of]:
            row_of |= {text: row for row, text in enumerate(new, len(self.text))}
            encoded.append(self._encode_new_texts(new))
        return collect_batches(encoded)[torch.tensor([row_of[text] for text in texts])]

    @torch.inference_mode()
    def _encode_new_texts(self, texts: list[str]) -> Encoded:
        processor = self.model.processor
        batches = batches_by_length(texts, self.model.batch_size)
        key = processor.text, tuple(texts)
        inputs = self.shared_inputs.get(key)
        if not inputs:
            texts_of_batches = ([texts[i] for i in index] for index in batches)
            inputs = join_batches(
                [processor.process_texts(batch, self.model.device) for batch in texts_of_batches],
                batches,
            )
        # Only features of a frozen encoder are shared: tokens are read again in less time.
        if processor.text is not None:
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


def _probe_pairs(
    inputs: _ProbeInputs, candidates: list[MinimalPair], training: Sequence[str]
) -> tuple[tuple[ProbeResult, ...], float | None]:
    """Score both captions of each selected pair against its image, and compute the accuracy for each
    kind of edit. Returns also the accuracy of the n-gram model. Every text is encoded once.
    """
    pairs, ngram_percent = select_pairs(candidates, training)
    if not pairs:
        return (), None
    # Each text once, also if several pairs have it.
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.true, pair.edited)))
    number = {text: i for i, text in enumerate(texts)}
    encoded = inputs.encode_texts(texts)
    images = torch.tensor([pair.image for pair in pairs])
    true, edited = (
        inputs.score_pairs(images, encoded, torch.tensor([number[text] for text in captions]))
        for captions in ([pair.true for pair in pairs], [pair.edited for pair in pairs])
    )
    return results_by_kind(pairs, true, edited), ngram_percent


def select_pairs(
    candidates: Sequence[MinimalPair], training: Sequence[str]
) -> tuple[list[MinimalPair], float | None]:
    """Select at most one pair of each kind for each image, see `select_balanced`: without training
    captions the first one. Returns also the accuracy of the n-gram model in percent, a tie as a half.
    """
    if not training:
        first: dict[tuple[str, int], MinimalPair] = {}
        for pair in candidates:
            first.setdefault((pair.kind, pair.image), pair)
        return list(first.values()), None
    model = NgramModel.from_captions(training)
    scores = {
        text: model.log_probability(text)
        for text in dict.fromkeys(text for pair in candidates for text in (pair.true, pair.edited))
    }
    margins = np.array([scores[pair.true] - scores[pair.edited] for pair in candidates])
    selected = select_balanced(
        [pair.true for pair in candidates],
        [pair.edited for pair in candidates],
        [pair.image for pair in candidates],
        [pair.kind for pair in candidates],
        margins,
    )
    percent = 100 * share_correct(margins[selected]) if len(selected) else None
    return [candidates[number] for number in selected], percent


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
        # Captions of clips whose partner is probed, too.
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
    """Make all minimal pairs of the captions of a data set, see `make_text_pairs`."""
    return [
        MinimalPair(pair.kind, image, pair.true, pair.edited)
        for image, indices in enumerate(data.captions_of)
        for pair in make_text_pairs([data.captions[index] for index in indices], [seed, image])
    ]


def add_typo(caption: str, rng: np.random.Generator) -> str:
    """Exchange two neighboring letters inside the longest word of at least four letters, if there
    is one. The caption remains true and readable.
    """
    # Words whose letters after the first differ, so that an exchange can change them.
    words = [match for match in re.finditer(r"[A-Za-z]{4,}", caption) if len(set(match[0][1:])) > 1]
    if not words:
        return caption
    word = max(words, key=lambda match: len(match[0]))
    positions = [i for i in range(word.start() + 1, word.end() - 1) if caption[i] != caption[i + 1]]
    position = positions[int(rng.integers(len(positions)))] if positions else word.start()
    return caption[:position] + caption[position + 1] + caption[position] + caption[position + 2 :]
