"""Mining of hard negatives with a trained model, without likely false negatives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.blocking import Score
from visavis.core.encoded import DIRECTIONS, Direction, Encoded, to_float64
from visavis.core.errors import RunError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.core.result import Result
from visavis.core.table import Column, Table
from visavis.data.dataset import Dataset
from visavis.losses.scoring import score_matrix
from visavis.models.base import Matcher
from visavis.models.batch_encoding import evaluation_mode
from visavis.models.inference import device_score
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.supervision.candidate_scores import iter_candidate_scores
from visavis.training.supervision.mined_negatives import MinedNegatives

NUM_EXAMPLES = 5
"""Number of queries whose hardest negative is shown."""


@dataclass(frozen=True)
class MinedDirection:
    """Mined negatives of the queries of one direction.

    Attributes:
        direction: "i2t" for negative captions of images, "t2i" for negative images of captions.
        queries: Number of queries.
        negatives: Mean number of negatives of a query.
        dropped: Of the candidates that are hardest by ids alone, the share that was dropped as
            likely false negatives.
        incomplete: Share of queries with fewer negatives than asked for.
    """

    direction: Direction
    queries: int
    negatives: float
    dropped: float
    incomplete: float


@dataclass(frozen=True)
class MinedExample:
    """A caption with its own image and its hardest negative image.

    Attributes:
        caption: The caption.
        image: Its image.
        negative: The negative image.
        negative_caption: A caption of the negative image.
        score: Score of the caption with the negative image.
    """

    caption: str
    image: str
    negative: str
    negative_caption: str
    score: float


@dataclass(frozen=True)
class MiningReport(Result):
    """Result of mining.

    Attributes:
        file: File of negatives, which `MinedNegativeSupervision` reads.
        split: Mined split.
        directions: Counts of both directions.
        examples: Captions with the highest scores of a negative image.
    """

    ROWS: ClassVar[str] = "directions"

    file: Path
    split: str
    directions: tuple[MinedDirection, ...]
    examples: tuple[MinedExample, ...]

    def tables(self) -> list[Table]:
        """Return the numbers of mined negatives, examples, and how to train with them."""
        rows = [
            (
                DIRECTIONS[each.direction],
                each.queries,
                each.negatives,
                100 * each.dropped,
                100 * each.incomplete,
            )
            for each in self.directions
        ]
        columns = (
            Column(is_text=True),
            Column("queries"),
            Column("negatives of a query", ".1f"),
            Column("dropped", ".1f", unit=" %"),
            Column("queries with fewer", ".1f", unit=" %"),
        )
        note = (
            "dropped: likely false negatives among the hardest candidates. The captions with the "
            "highest scores of a negative image:"
        )
        notes = [note]
        for example in self.examples:
            notes.append(f"  {example.score:.3f}  {example.image}: {example.caption}")
            notes.append(f"         {example.negative}: {example.negative_caption}")
        notes.append(f"Negatives of split {self.split}: {self.file}")
        notes.append(
            "Train with them in a phase: supervision = "
            f"\"MinedNegativeSupervision(file='{self.file}')\""
        )
        return [Table(columns, tuple(rows), tuple(notes))]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        directions = [vars(each) for each in self.directions]
        examples = [vars(each) for each in self.examples]
        return {
            "file": str(self.file),
            "split": self.split,
            "directions": directions,
            "examples": examples,
        }


def mine_run(
    run: Path,
    out: Path | None,
    *,
    data: str | None,
    split: str,
    num_negatives: int,
    max_ratio: float,
    guide: Path | None,
    preselect: int,
    memory: MemoryLimit,
    progress: Progress,
) -> MiningReport:
    """Find the hardest negatives of each image and caption of a split, and write them. Without
    ``out``, the file is a numbered one in the run folder.
    """
    if out is not None:
        storage.require_new_file(out)
    data_split, mining = _encode(run, data, split, memory, progress)
    # The guide encodes the data set of the run.
    guide_data = data or str(read_run_recipe(run).data.path)
    guide_model = None if guide is None else _encode(guide, guide_data, split, memory, progress)[1]
    if guide_model is not None:
        counts = [
            " and ".join(f"{len(part):,}" for part in model.items)
            for model in (mining, guide_model)
        ]
        if counts[0] != counts[1]:
            raise RunError(
                f"{guide}: expected as many images and captions as {run} reads, {counts[0]}, got "
                f"{counts[1]}. Use a guide that reads the same data set."
            )
    options = (num_negatives, max_ratio, preselect, memory, progress)
    captions, caption_scores, of_images = _mine(mining, guide_model, data_split, "i2t", *options)
    images, image_scores, of_captions = _mine(mining, guide_model, data_split, "t2i", *options)
    mined = MinedNegatives(captions, images, caption_scores, image_scores, data_split.fingerprint)
    if not mined.count:
        raise RunError(
            f"{run}: expected negatives below {max_ratio:g} of the score of their positives, got "
            "none. "
            "Raise max_ratio, set it to 0 to keep all, or use a better model."
        )
    folder = run if os.path.exists(RunFolder(run).recipe) else Path()
    file = storage.save_new_file(out, mined.save, stem=folder / "negatives.safetensors")
    # The captions with the highest scores of a negative image, each image once.
    examples: dict[str, MinedExample] = {}
    for caption in image_scores[:, 0].argsort(descending=True).tolist():
        negative = int(images[caption, 0])
        if negative < 0 or len(examples) == NUM_EXAMPLES:
            break
        image = data_split.images[int(data_split.image_of[caption])].name
        own = data_split.captions_of[negative]
        example = MinedExample(
            caption=data_split.captions[caption],
            image=image,
            negative=data_split.images[negative].name,
            negative_caption=data_split.captions[own[0]] if len(own) else "",
            score=float(image_scores[caption, 0]),
        )
        examples.setdefault(image, example)
    return MiningReport(file, split, (of_images, of_captions), tuple(examples.values()))


def likely_false_negatives(scores: Tensor, is_positive: Tensor, max_ratio: float) -> Tensor:
    """Find candidates that score nearly as high as the positives of their query, or higher.

    The bound of a query is the mean score p of its positives, minus ``(1 - max_ratio) |p|``.

    Args:
        scores: Scores of queries and candidates, shape ``[Q, C]``.
        is_positive: Which candidates are positives, bool, shape ``[Q, C]``.
        max_ratio: Share of the score of a positive that a negative may reach.

    Returns:
        Candidates above the bound that are not positives, bool, shape ``[Q, C]``. None for a query
        without positives.

    Source:
        TopK-PercPos of de Souza P. Moreira et al., NV-Retriever (2024), whose default is 0.95. Here
        with the mean of several positives.

    Example:
        >>> likely_false_negatives(torch.tensor([[0.8, 0.9, 0.77, 0.7]]), torch.tensor([[True, False, False, False]]), 0.95)
        tensor([[False,  True,  True, False]])
    """
    positive = torch.where(is_positive, scores, 0.0).sum(1) / is_positive.sum(1)
    bound = positive - (1 - max_ratio) * positive.abs()
    return (scores > bound[:, None]) & ~is_positive


@dataclass(frozen=True)
class _EncodedSplit:
    """Both sides of a split, encoded by one model."""

    matcher: Matcher
    score: Score
    items: tuple[Encoded, Encoded]

    def block(
        self, rows: slice, candidates: Tensor, direction: Direction, memory: MemoryLimit
    ) -> Tensor:
        """Scores of some queries with some candidates, shape ``[R, N]``."""
        visual, text = self.items
        if direction == "i2t":
            return score_matrix(self.score, visual[rows], text[candidates], memory)
        return score_matrix(self.score, visual[candidates], text[rows], memory).T


def _encode(
    run: Path, data: str | None, split: str, memory: MemoryLimit, progress: Progress
) -> tuple[Dataset, _EncodedSplit]:
    data_module, matcher = open_run(run, read_run_recipe(run, data, memory), progress)
    part = data_module.data.split(split)
    if len(part.images) < 2:
        raise RunError(
            f"{part.name}: expected at least 2 images in split {split}, got {len(part.images)}. "
            "Mine another split."
        )
    progress.message(
        f"Encoding {len(part.images):,} images and {len(part.captions):,} captions with {run}."
    )
    return part, _EncodedSplit(matcher, device_score(matcher), data_module.encode(matcher, part))


def _mine(
    mining: _EncodedSplit,
    guide_model: _EncodedSplit | None,
    data: Dataset,
    direction: Direction,
    num_negatives: int,
    max_ratio: float,
    preselect: int,
    memory: MemoryLimit,
    progress: Progress,
) -> tuple[Tensor, Tensor, MinedDirection]:
    """The hardest negatives of each query and their scores, padded, and the counts of the
    direction.
    """
    images = torch.arange(len(data.images)), torch.from_numpy(data.image_of)
    query_images, candidate_images = images if direction == "i2t" else images[::-1]
    max_negatives = min(num_negatives, len(candidate_images))
    indices = list[Tensor]()
    negative_scores = list[Tensor]()
    num_dropped = 0
    num_hardest = 0
    with (
        evaluation_mode(mining.matcher),
        evaluation_mode((guide_model or mining).matcher),
        torch.no_grad(),
    ):
        preselect = 0 if mining.matcher.score_is_cosine else preselect
        blocks = iter_candidate_scores(
            mining.score,
            *mining.items,
            direction,
            query_images,
            candidate_images,
            preselect=preselect,
            memory=memory,
        )
        for rows, candidates, scores in blocks:
            is_positive = query_images[rows, None] == candidate_images[candidates]
            negatives = scores.masked_fill(is_positive, float("-inf"))
            if max_ratio:
                guide_scores = (
                    scores
                    if guide_model is None
                    else guide_model.block(rows, candidates, direction, memory)
                )
                is_false = likely_false_negatives(guide_scores, is_positive, max_ratio)
                hardest = negatives.topk(min(num_negatives, len(candidates)))
                num_dropped += int(
                    (is_false.gather(1, hardest.indices) & hardest.values.isfinite()).sum()
                )
                num_hardest += int(hardest.values.isfinite().sum())
                negatives = negatives.masked_fill(is_false, float("-inf"))
            block_indices, block_scores = _hardest_negatives(negatives, candidates, max_negatives)
            indices.append(block_indices)
            negative_scores.append(block_scores)
            progress.update(f"mining, {DIRECTIONS[direction]}", rows.stop, len(query_images), 0.0)
    index = torch.cat(indices)
    counts = (index >= 0).sum(1)
    longest = max(int(counts.max()), 1)
    report = MinedDirection(
        direction,
        queries=len(index),
        negatives=float(to_float64(counts).mean()),
        dropped=num_dropped / max(num_hardest, 1),
        incomplete=float(to_float64(counts < num_negatives).mean()),
    )
    return (
        index[:, :longest].contiguous(),
        torch.cat(negative_scores)[:, :longest].contiguous(),
        report,
    )


def _hardest_negatives(
    negatives: Tensor, candidates: Tensor, max_negatives: int
) -> tuple[Tensor, Tensor]:
    """The candidates with the highest finite scores of each query, and these scores, padded with -1
    and -inf to ``[R, max_negatives]``.
    """
    size = min(max_negatives, len(candidates))
    scores, columns = negatives.topk(size)
    indices = candidates[columns].masked_fill(scores.isneginf(), -1)
    padding = (0, max_negatives - size)
    return torch.nn.functional.pad(indices, padding, value=-1).int(), torch.nn.functional.pad(
        scores.float(), padding, value=float("-inf")
    )
