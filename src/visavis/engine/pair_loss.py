"""Any objective on two sets of embeddings.

>>> import torch
>>> from visavis.objectives import Unified
>>> loss = PairLoss(Unified())
>>> loss(torch.eye(4), torch.eye(4)) < 1e-6
tensor(True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from visavis.errors import ShapeError, SpecError, VisavisError
from visavis.objectives.base import Objective
from visavis.targets import PAIR_FACTS, Ids, Targets, as_ids
from visavis.types import Encoded, concatenate

Items = Tensor | Encoded
Score = Callable[[Any, Any], Tensor]
LARGEST_SCALE = 100.0


def cosine(images: Items, texts: Items) -> Tensor:
    """Cosine of every image with every text: ``[V, D], [T, D] -> [V, T]``; lengths are taken in float32 at least."""
    visual, textual = _vectors(images), _vectors(texts)
    if visual.shape[1] != textual.shape[1]:
        raise ShapeError(f"images are {visual.shape[1]} wide and texts {textual.shape[1]}: a cosine needs equal widths.")
    dtype = torch.promote_types(torch.promote_types(visual.dtype, textual.dtype), torch.float32)
    return normalize(visual.to(dtype), dim=-1) @ normalize(textual.to(dtype), dim=-1).T


class PairLoss(nn.Module):
    """The value of an objective for images and texts, in both directions.

    objective: any of the catalog. score: ``(images, texts) -> [V, T]``; default: cosine. scale: a number, or a learnable
    ``nn.Parameter`` (put back within 0..100 at each call), that multiplies the scores; only for objectives with a temperature (NTXent,
    InfoNCE), which then run with tau = 1. block_rows, gather: row blocks and gathering over processes are not available
    yet; asking for either says so.

    ``loss(images, texts, image_ids, text_ids)``: images ``[V, D]``, texts ``[T, D]``; equal ids belong together. Without
    ids, image i belongs to text i and lengths must be equal. text_ids=None: image_ids for both. extra_images and
    extra_texts (a memory bank, a queue) with their ids are further candidates, never queries. targets: a Targets of
    ``[V, T]`` instead of ids, for objectives that need more than ids. Returns a scalar. Raises ShapeError.
    """

    def __init__(
        self,
        objective: Objective,
        block_rows: int | None = None,
        score: Score | None = None,
        scale: float | nn.Parameter | None = None,
        gather: bool | None = None,
    ) -> None:
        super().__init__()
        if block_rows is not None:
            raise VisavisError(
                "PairLoss cannot work by row blocks yet: leave block_rows=None, which holds the whole score matrix in memory."
            )
        if gather:
            raise VisavisError("PairLoss cannot gather over processes yet: leave gather=None and train in one process.")
        if not isinstance(objective, Objective):
            raise SpecError(f"PairLoss got {objective!r}, expected an objective: such as Unified(), or visavis.parse of a text.")
        if scale is not None and not objective.scalable:
            raise SpecError(
                f"{objective!r} has a fixed gamma or margin, which a scale would change: give PairLoss(scale=) only to NTXent or InfoNCE."
            )
        if not _is_scale(scale):
            raise SpecError(f"PairLoss got scale={scale!r}, expected a number above 0 or an nn.Parameter of one number.")
        self.objective = objective if scale is None else replace(objective, tau=1.0)  # type: ignore[type-var]
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
        self._refuse_processes()
        for name, items in {"images": images, "texts": texts, "extra_images": extra_images, "extra_texts": extra_texts}.items():
            if items is not None and not isinstance(items, Encoded) and not (isinstance(items, Tensor) and items.dim()):
                raise ShapeError(f"PairLoss got {name} of type {type(items).__name__}, expected a tensor [N, D] or Encoded items.")
        if targets is None:
            targets = _targets_by_ids(len(images), len(texts), image_ids, text_ids)
        elif image_ids is not None or text_ids is not None:
            raise ShapeError("PairLoss got both targets and ids: give one of them.")
        if (extra_images is None and extra_image_ids is not None) or (extra_texts is None and extra_text_ids is not None):
            raise ShapeError("PairLoss got ids of extra items without the items: give extra_images and extra_texts with their ids.")
        if extra_images is None and extra_texts is None:
            return self.objective(self._scores(images, texts), targets)
        forth = self._terms(images, texts, targets, extra_texts, extra_text_ids, "extra_texts", transpose=False)
        back = self._terms(texts, images, targets.T, extra_images, extra_image_ids, "extra_images", transpose=True)
        return self.objective.reduce(forth, back)

    def extra_repr(self) -> str:
        return repr(self.objective)

    def _scores(self, images: Items, texts: Items) -> Tensor:
        scores = self.score(images, texts)
        if scores.shape != (len(images), len(texts)):
            raise ShapeError(f"score returned shape {list(scores.shape)} for {len(images)} images and {len(texts)} texts.")
        if isinstance(self.scale, nn.Parameter):  # in place: beyond a bound, a clamped copy would have no gradient to come back by
            self.scale.data.clamp_(0, LARGEST_SCALE)
        return scores if self.scale is None else scores * self.scale

    def _terms(
        self, queries: Items, candidates: Items, targets: Targets, extra: Items | None, extra_ids: Ids | None, name: str, *, transpose: bool
    ) -> Tensor:
        """One direction, with extra candidates behind the batch's own."""
        if extra is not None:
            targets = _with_extra(targets, len(extra), extra_ids, name)
            candidates = _join(candidates, extra, name)
        scores = self._scores(candidates, queries).T if transpose else self._scores(queries, candidates)
        return self.objective.terms(*self.objective.prepare(scores, targets))

    def _refuse_processes(self) -> None:
        many = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if many and self.training and self.gather is None:
            raise VisavisError("PairLoss cannot gather over processes yet: train in one process, or give gather=False for local batches.")


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


def _with_extra(targets: Targets, number: int, extra_ids: Ids | None, name: str) -> Targets:
    """The targets with further candidates; what is known of queries stays, facts of pairs would be unknown for the new ones."""
    ids = as_ids([] if extra_ids is None else extra_ids, f"the ids of {name}")
    if len(ids) != number:
        found = "no ids" if extra_ids is None else f"{len(ids)} ids"
        raise ShapeError(f"{name} has {number} items and {found}: give one id for each.")
    for fact in ("relation", *PAIR_FACTS):
        if getattr(targets, fact) is not None:
            raise ShapeError(f"{name} needs targets by ids alone: their {fact} does not say what holds for an extra candidate.")
    own = targets.candidate_ids
    unread = {  # extras are never queries
        fact: torch.cat([given, given.new_zeros(number, *given.shape[1:])])
        for fact in ("candidate_margin", "candidate_offline_scores")
        if (given := getattr(targets, fact)) is not None
    }
    return replace(targets, candidate_ids=torch.cat([own, ids.to(own.device)]), columns=None, **unread)


def _is_scale(scale: Any) -> bool:
    if isinstance(scale, Tensor):
        return scale.numel() == 1 and scale.is_floating_point()
    return scale is None or (isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < float("inf"))


def _vectors(items: Items) -> Tensor:
    vectors = items.vectors if isinstance(items, Encoded) else items
    if not isinstance(vectors, Tensor) or vectors.dim() != 2 or not vectors.is_floating_point():
        raise ShapeError(
            "cosine scores need one floating-point vector an item, [N, D]: give PairLoss(score=...) for regions, words or named parts."
        )
    return vectors


def _join(items: Items, extra: Items, name: str) -> Items:
    if isinstance(items, Encoded) and isinstance(extra, Encoded):
        return concatenate([items, extra])
    if isinstance(items, Encoded) or isinstance(extra, Encoded) or items.shape[1:] != extra.shape[1:]:
        raise ShapeError(f"{name} must be of the same kind and width as the batch's own: both tensors [N, D], or both Encoded.")
    return torch.cat([items, extra])
