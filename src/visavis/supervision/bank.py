"""Offline negatives: for each item the hardest wrong ones of the whole split, found once with the model of the round before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visavis.data.loader import Batch, Loader, seed_of
from visavis.errors import RecipeError
from visavis.models.base import evaluating
from visavis.models.encoding import batches_by_length, batches_of_at_most, encode
from visavis.scoring import score_by_rows
from visavis.spec import check_fields, require
from visavis.supervision.base import Supervision, TrainingContext
from visavis.supervision.preselection import scores_of_preselected
from visavis.targets import Targets
from visavis.types import Direction, Encoded

ENCODED_AT_ONCE = 512
HELD = 16.0
"""Bytes of a pair while the hardest are looked for: scores, masked scores, who belongs to whom."""


@dataclass(kw_only=True, eq=False)
class BankSupervision(Supervision):
    """What AOQ reads: scores of offline negatives, drawn from each item's hardest wrong ones in the whole split.

    The lists are made at the beginning of the phase, by the model as it then is, and kept: the first round, with another
    objective, is the phase before. For an image v: a caption t_o of its list with v, and an image of the list of one of v's own
    captions with that t_o; for a caption likewise with the roles exchanged. All four are encoded anew, with gradient.
    size: how many of the hardest are kept for each item. preselect: of a score that is no plain cosine (attention), only so many
    wrong ones of each item are scored, those of the highest cosine of mean-pooled fragments (regions, words); 0, or as many as there
    are: all, which is exact.
    Source: Chen et al., AOQ (2020): lists of 300.
    Differs from: the released code, which reads lists from files, and whose second pair of items is drawn once for both directions.
    """

    size: int = 300
    preselect: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.size > 0, self, "size", "at least 1")
        require(self.preselect == 0 or self.preselect >= self.size, self, "preselect", "0 for all, or at least size")

    def check(self, train: Loader, validation: Loader) -> None:
        for name, loader in (("training", train), ("validation", validation)):
            if len(np.unique(loader.data.image_of)) < 2:
                raise RecipeError(
                    f"BankSupervision finds no wrong caption in the {name} split, where one image alone has captions: expected at least 2."
                )

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        self._context = context
        self._lists = {
            name: (state[f"{name}.texts"], state[f"{name}.images"]) if state else self._hardest(loader)
            for name, loader in (("train", context.train), ("validation", context.validation))
        }

    def state_dict(self) -> dict[str, Tensor]:
        lists = self._lists.items()
        return {f"{name}.{side}": part for name, parts in lists for side, part in zip(("texts", "images"), parts, strict=True)}

    def handed_on(self) -> dict[str, Tensor]:
        """Nothing: each phase is a round of its own, with lists by the model as it then is."""
        return {}

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        loader, matcher = batch.loader, self._context.matcher
        texts, images = self._lists["train" if self._context.trains_on(batch) else "validation"]
        random = np.random.default_rng(seed_of(self._context.seed, batch.epoch, batch.number))

        def drawn(lists: Tensor, items: np.ndarray) -> np.ndarray:
            return lists[items, random.integers(lists.shape[1], size=len(items))].numpy()

        captions_of = loader.data.captions_of
        own = np.array([random.choice(captions_of[image]) for image in batch.images])
        t_off, t_far = drawn(texts, batch.images), drawn(texts, loader.data.image_of[batch.captions])
        v_off, v_far = drawn(images, batch.captions), drawn(images, own)
        far, off = self._visual(loader, v_far), self._visual(loader, v_off)
        near, wide = self._text(loader, t_off), self._text(loader, t_far)
        return Targets(
            query_ids=batch.image_ids,
            candidate_ids=batch.text_ids,
            query_offline_scores=torch.stack([matcher.score_pairs(visual, near), matcher.score_pairs(far, near)], 1),
            candidate_offline_scores=torch.stack([matcher.score_pairs(off, text), matcher.score_pairs(off, wide)], 1),
        )

    def _visual(self, loader: Loader, items: np.ndarray) -> Encoded:
        return self._context.matcher.encode_visual(loader.visual.read(items).to(self._context.device))

    def _text(self, loader: Loader, items: np.ndarray) -> Encoded:
        return self._context.matcher.encode_text(loader.text.read(items).to(self._context.device))

    @torch.no_grad()
    def _hardest(self, loader: Loader) -> tuple[Tensor, Tensor]:
        """For each image the captions ``[V, size]``, for each caption the images ``[T, size]``, that score highest and are wrong."""
        matcher, data = self._context.matcher, loader.data
        device = self._context.device
        visual = encode(matcher, "visual", loader.visual.read, batches_of_at_most(len(data.images), ENCODED_AT_ONCE), keep_on=device)
        text = encode(matcher, "text", loader.text.read, batches_by_length(data.captions, ENCODED_AT_ONCE), keep_on=device)
        with evaluating(matcher):
            image_of = torch.from_numpy(data.image_of).to(self._context.device)
            image = torch.arange(len(data.images), device=self._context.device)

            def hardest(way: Direction, own: Tensor, other: Tensor) -> Tensor:
                score, memory = matcher.score, self._context.memory
                wrong = len(other) - int(torch.bincount(other)[own].max())  # those that every query has

                def first(rows: slice, scores: Tensor, most: int) -> Tensor:
                    return scores.masked_fill(own[rows, None] == other, float("-inf")).topk(min(most, wrong)).indices

                if matcher.score_is_cosine or not 0 < self.preselect < wrong:
                    blocks = score_by_rows(score, visual, text, way, held=HELD, memory=memory)
                    return torch.cat([first(rows, scores, self.size).int().cpu() for rows, scores in blocks])
                listed = scores_of_preselected(
                    score, visual, text, way, lambda rows, cosines: first(rows, cosines, self.preselect), held=HELD, memory=memory
                )
                return torch.stack([items[scores.topk(self.size).indices].int().cpu() for items, scores in listed])

            return hardest("i2t", image, image_of), hardest("t2i", image_of, image)
