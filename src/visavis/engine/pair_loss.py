"""Any objective on two sets of embeddings.

>>> import torch
>>> from visavis.objectives import Unified
>>> loss = PairLoss(Unified())
>>> loss(torch.eye(4), torch.eye(4)) < 1e-6
tensor(True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.engine.candidates import Side, across, are_places, extra_candidates, with_extra
from visavis.engine.chunks import in_chunks
from visavis.engine.facts import has_facts, learning
from visavis.engine.families import both_directions
from visavis.engine.gathering import Processes, processes
from visavis.engine.items import Items, join, tensors, vectors
from visavis.engine.kept import KeptCosines
from visavis.engine.positives import positive_counts
from visavis.engine.row_blocks import each_direction, prescribed, row_blocks
from visavis.engine.scored import Score, Scored, scores_of
from visavis.engine.scoring import Cosines, Scores
from visavis.errors import ShapeError, SpecError
from visavis.objectives.base import Objective, SummaryObjective, check_targets
from visavis.targets import Ids, Targets, as_ids
from visavis.types import Encoded

Encode = Callable[[Any], Items]
LARGEST_SCALE = 100.0
DENSE_SCORES = 2**22  # up to so many scores, the graph of one matrix is as fast as blocks of any score
FEW_SCORES = 2**18  # up to so many, also as fast as blocks of kept cosines
KEPT_SCORES = 2**24  # up to so many cosines are kept


def cosine(images: Items, texts: Items) -> Tensor:
    """Cosine of every image with every text: ``[V, D], [T, D] -> [V, T]``; lengths are taken in float32 at least."""
    visual, textual = vectors(images), vectors(texts)
    if visual.shape[1] != textual.shape[1]:
        raise ShapeError(f"images are {visual.shape[1]} wide and texts {textual.shape[1]}: a cosine needs equal widths.")
    dtype = torch.promote_types(torch.promote_types(visual.dtype, textual.dtype), torch.float32)
    return normalize(visual.to(dtype), dim=-1) @ normalize(textual.to(dtype), dim=-1).T


class PairLoss(nn.Module):
    """The value of an objective for images and texts, in both directions.

    objective: any of the catalog. score: ``(images, texts) -> [V, T]``; default: cosine. scale: a number or a tensor, learnable
    as an ``nn.Parameter`` (put back within 0..100 at each call), that multiplies the scores; only for objectives with a temperature (NTXent,
    InfoNCE), which then run with tau = 1. block_rows: how many queries are scored at once; None chooses. Value and gradient
    are exact and the same for any number; memory is that of the items and one block. A score function is called again for
    every use of a block. gather: None gathers over torch.distributed in train mode, where there are several processes; False never.

    ``loss(images, texts, image_ids, text_ids)``: images ``[V, D]``, texts ``[T, D]``; equal ids belong together. Without
    ids, image i belongs to text i and lengths must be equal. text_ids=None: image_ids for both. extra_images and
    extra_texts (a memory bank, a queue) with their ids are further candidates, never queries. targets: a Targets of
    ``[V, T]`` instead of ids, for objectives that need more than ids. Returns a scalar. Raises ShapeError.

    Gathering: a process scores its own queries against the candidates of all, extra ones included; a bank that all have in
    common counts once. Ids hold over all processes, and so do positions that are asked of functions; numbers of items may differ, and
    be 0. The value is the global one everywhere; gradients of items are scaled such that their mean over processes, which
    DistributedDataParallel forms, is the global one; those of scale and score are global already.
    """

    def __init__(
        self,
        objective: Objective,
        block_rows: int | None = None,
        score: Score | None = None,
        scale: float | Tensor | None = None,
        gather: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(objective, Objective):
            raise SpecError(f"PairLoss got {objective!r}, expected an objective: such as Unified(), or visavis.parse of a text.")
        if block_rows is not None and (isinstance(block_rows, bool) or not isinstance(block_rows, int) or block_rows < 1):
            raise SpecError(f"PairLoss got block_rows={block_rows!r}, expected a whole number above 0, or None to let it choose.")
        unscaled = objective if scale is None else objective.for_scaled_scores()
        if unscaled is None:
            raise SpecError(
                f"{objective!r} has a fixed gamma or margin, which a scale would change: give PairLoss(scale=) only to NTXent or InfoNCE."
            )
        if not _is_scale(scale):
            raise SpecError(f"PairLoss got scale={scale!r}, expected a number above 0 or an nn.Parameter of one number.")
        self.objective = unscaled
        self.block_rows = block_rows
        self.score = score or cosine
        self.scale = scale
        self.gather = gather

    def forward(
        self,
        images: Items,
        texts: Items,
        image_ids: Ids | None = None,
        text_ids: Ids | None = None,
        *,
        extra_images: Items | None = None,
        extra_image_ids: Ids | None = None,
        extra_texts: Items | None = None,
        extra_text_ids: Ids | None = None,
        targets: Targets | None = None,
    ) -> Tensor:
        for name, items in {"images": images, "texts": texts, "extra_images": extra_images, "extra_texts": extra_texts}.items():
            if items is not None and not isinstance(items, Encoded) and not (isinstance(items, Tensor) and items.dim()):
                raise ShapeError(f"PairLoss got {name} of type {type(items).__name__}, expected a tensor [N, D] or Encoded items.")
        if targets is None:
            targets = _targets_by_ids(len(images), len(texts), image_ids, text_ids)
        elif image_ids is not None or text_ids is not None:
            raise ShapeError("PairLoss got both targets and ids: give one of them.")
        check_targets(targets, torch.Size((len(images), len(texts))))
        if isinstance(self.scale, nn.Parameter):  # in place: beyond a bound, a clamped copy would have no gradient to come back by
            self.scale.data.clamp_(0, LARGEST_SCALE)
        device = _device(images)
        together, targets = processes(self.gather, device, training=self.training), targets.to(device)
        counted = image_ids is None and are_places([targets.query_ids, targets.candidate_ids], together)
        further_images = extra_candidates("extra_images", extra_images, extra_image_ids, images, together)
        further_texts = extra_candidates("extra_texts", extra_texts, extra_text_ids, texts, together)
        forth = with_extra(across(targets, together, counted=counted), further_texts, counted=counted)
        back = with_extra(across(targets.T, together, counted=counted), further_images, counted=counted)
        whole = further_images is None and further_texts is None  # the queries of a direction are the candidates of the other
        if together.number == 1 and self._is_dense(forth, back, whole=whole):
            return self._dense(images, texts, extra_images, extra_texts, forth, back)
        sides = Side(images, further_images, together), Side(texts, further_texts, together)
        return self._by_blocks(*sides, forth, back, together, whole=whole)

    def step(
        self, encode_images: Encode, encode_texts: Encode, image_chunks: Iterable[Any], text_chunks: Iterable[Any], *ids: Ids, **facts: Any
    ) -> Tensor:
        """The loss of items that are encoded in chunks, each chunk again in the backward pass: see ``in_chunks``.

        ids and facts: what the loss itself takes, for the items of all chunks.
        """
        return self(in_chunks(encode_images, image_chunks), in_chunks(encode_texts, text_chunks), *ids, **facts)

    def extra_repr(self) -> str:
        return repr(self.objective)

    def _is_dense(self, forth: Targets, back: Targets, *, whole: bool) -> bool:
        """Whether the graph of one matrix serves: under a compiler, and for few scores where blocks are not faster."""
        if torch.compiler.is_compiling():
            return True
        number = max(_num_scores(self.objective, each) for each in (forth, back))
        if self.block_rows is not None or number > DENSE_SCORES:
            return False
        kept = number > FEW_SCORES and forth.query_ids.device.type == "cpu"
        faster = self.score is cosine and whole and (kept or self.objective.summary(forth) is not None)
        return not faster or bool(learning(forth))

    def _by_blocks(self, images: Side, texts: Side, forth: Targets, back: Targets, together: Processes, *, whole: bool) -> Tensor:
        """Value and gradient at once, then put on the graph."""
        alike = whole and self.objective.summary(forth) is not None and (together.number == 1 or not has_facts(forth))
        few = whole and together.number == 1 and self.block_rows is None and math.prod(forth.shape) <= KEPT_SCORES
        arguments = images.items, texts.items, self.scale, (images.wanted, texts.wanted)
        scores: Scores
        if self.score is not cosine:
            scores = Scored(self.score, *arguments)
        else:
            scores = KeptCosines(*arguments) if few and not alike else Cosines(*arguments)
        facts = [*learning(forth), *learning(back)]
        wanted = torch.is_grad_enabled() and (any((*images.wanted, *texts.wanted)) or bool(scores.parameters or facts))
        with torch.no_grad():
            if alike:
                assert isinstance(self.objective, SummaryObjective)
                found = both_directions(self.objective, scores.window(images.own), forth, self.block_rows, together, wanted=wanted)
            else:
                windows = images.own, texts.own
                found = each_direction(self.objective, scores, windows, (forth, back), self.block_rows, together, wanted=wanted)
            if not wanted:
                return found.value
            parameters = zip(scores.parameters, found.gradients.parameters, strict=True)
            gradients = [
                *images.gradients(found.gradients.images, together),
                *texts.gradients(found.gradients.texts, together),
                *((given, together.sum(gradient)) for given, gradient in parameters if gradient is not None),
                *((given, together.scaled(gradient)) for given, gradient in found.facts),
            ]
        return prescribed(found.value, gradients)

    def _dense(
        self, images: Items, texts: Items, extra_images: Items | None, extra_texts: Items | None, forth: Targets, back: Targets
    ) -> Tensor:
        """All scores in one matrix."""
        if extra_images is None and extra_texts is None:
            return self.objective(self._scores(images, texts), forth)
        all_texts = texts if extra_texts is None else join(texts, extra_texts, "extra_texts")
        all_images = images if extra_images is None else join(images, extra_images, "extra_images")
        to_texts = self.objective.prepare(self._scores(images, all_texts), forth)
        to_images = self.objective.prepare(self._scores(all_images, texts).T, back)
        return self.objective.reduce(self.objective.terms(*to_texts), self.objective.terms(*to_images))

    def _scores(self, images: Items, texts: Items) -> Tensor:
        scores = scores_of(self.score, images, texts)
        return scores if self.scale is None else scores * self.scale


def _targets_by_ids(num_images: int, num_texts: int, image_ids: Ids | None, text_ids: Ids | None) -> Targets:
    if image_ids is None:
        if text_ids is not None:
            raise ShapeError("text_ids are given without image_ids: give both, or none for pairs in order.")
        if num_images != num_texts:
            raise ShapeError(
                f"{num_images} images and {num_texts} texts without ids: give image_ids and text_ids, or equally many of both."
            )
        return Targets.paired(num_images)
    text_ids = as_ids(image_ids if text_ids is None else text_ids, "text_ids" if text_ids is not None else "image_ids")
    image_ids = as_ids(image_ids, "image_ids")
    for kind, ids, number in (("image", image_ids, num_images), ("text", text_ids, num_texts)):
        if len(ids) != number:
            raise ShapeError(f"{len(ids)} {kind} ids for {number} {kind}s: give one id for each.")
    return Targets(query_ids=image_ids, candidate_ids=text_ids)


def _is_scale(scale: Any) -> bool:
    if isinstance(scale, Tensor):
        return scale.numel() == 1 and scale.is_floating_point()
    return scale is None or (isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < float("inf"))


def _num_scores(objective: Objective, targets: Targets) -> int:
    """How many scores the objective holds at once, in one direction."""
    rows = row_blocks(targets.shape[0], DENSE_SCORES)
    pairs = int(positive_counts(targets, rows).sum()) if objective.wide else 0
    return max(targets.shape[0], pairs) * targets.shape[1]


def _device(items: Items) -> torch.device:
    return tensors(items)[0].device
