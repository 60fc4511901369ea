"""Any objective on two sets of embeddings.

>>> import torch
>>> from visavis.objectives import Unified
>>> loss = PairLoss(Unified())
>>> loss(torch.eye(4), torch.eye(4)) < 1e-6
tensor(True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visavis.engine.candidates import (
    Extra,
    Side,
    across,
    are_positions,
    cut_extra,
    extra_candidates,
    no_negatives,
    targets_by_ids,
    what_is_compared,
    with_extra,
)
from visavis.engine.chunks import in_chunks
from visavis.engine.facts import facts_needing_grad
from visavis.engine.items import Items, join, tensors
from visavis.engine.logits import Logits, Number, for_logits, logits_now
from visavis.engine.plan import Plan
from visavis.engine.planner import Planner
from visavis.engine.processes import Processes, processes_for
from visavis.engine.scale import Scale
from visavis.engine.scores import CosineBlocks, FunctionScores, KeptCosines, Score, Scores, cosine
from visavis.engine.walks import on_graph, walk_rows, walk_shared_blocks
from visavis.engine.widths import checked_widths, cut, narrower
from visavis.errors import ShapeError, SpecError, say, shown
from visavis.memory import Memory, ScoreCost, scores_of
from visavis.objectives.base import Objective, SummaryObjective, check_targets
from visavis.targets import Ids, Targets
from visavis.types import Encoded

Encode = Callable[[Any], Items]
ENOUGH_TO_SAY = 2
"""Batches without a negative."""


class PairLoss(nn.Module):
    """The value of an objective for images and texts, in both directions.

    objective: any of the catalog. score: ``(images, texts) -> [V, T]``; None: cosine. scale: multiplies the scores; a number, a
    ``LearnedScale``, or an ``nn.Parameter``, which learns as it stands (put back within 0..100 at each call); only for objectives with a
    temperature or scale (NTXent, InfoNCE, Sigmoid), which then run with 1. bias: added after the scale; a number or an ``nn.Parameter``;
    only for Sigmoid, in place of its own. block_rows: how many queries are scored at once; None chooses. Value and
    gradient are exact and the same for any number. A score function is called again for every use of a block.

    gather: None gathers over torch.distributed in train mode where there are several processes, and all call the same objective on the
    same data_set and kind of items (else it says so and compares each process' own items alone); True refuses anything else; False never
    gathers. data_set: the name of what the batches come from, where each step of a process may come from another.

    memory: what may be used beyond the items, for their gradients and blocks of scores: bytes, "2GiB", or None, a share of what is free
    for blocks. score_cost: the bytes of a pair by ``score``; without it the owner of the score is asked (``score_cost(visual, text)`` of
    a matcher or of the callable), else a block of a few items is measured. ``plan`` says which way will be taken.

    widths: the first so many numbers of the vectors are compared too, each width as vectors of their own, and the whole ones always; the
    value is the sum over widths, one walked after the other. For cosines.

    ``loss(images, texts, image_ids, text_ids)``: images ``[V, D]``, texts ``[T, D]``; equal ids belong together. Without
    ids, image i belongs to text i and lengths must be equal. text_ids=None: image_ids for both. extra_images and
    extra_texts (a memory bank, a queue) with their ids are further candidates, never queries. targets: a Targets of
    ``[V, T]`` instead of ids, for objectives that need more than ids. scale, bias: of this call in place of the loss' own, for models
    that own them. Returns a scalar. Raises ShapeError. Says once where no pair is negative, so that nothing can be learned.

    Gathering: a process scores its own queries against the candidates of all, extra ones included; a bank that all have in
    common counts once. Ids hold over all processes, and so do positions that are asked of functions; numbers of items may differ, and
    be 0. The value is the global one everywhere; gradients of items are scaled such that their mean over processes, which
    DistributedDataParallel forms, is the global one; those of scale, bias and score are global already.
    """

    def __init__(
        self,
        objective: Objective,
        block_rows: int | None = None,
        score: Score | None = None,
        scale: Scale = None,
        gather: bool | None = None,
        *,
        memory: Memory = None,
        score_cost: ScoreCost | None = None,
        data_set: str | None = None,
        bias: Number = None,
        widths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if not isinstance(objective, Objective):
            raise SpecError(f"PairLoss got {shown(objective)}, expected an objective: such as Unified(), or visavis.parse of a text.")
        if block_rows is not None and (isinstance(block_rows, bool) or not isinstance(block_rows, int) or block_rows < 1):
            raise SpecError(f"PairLoss got block_rows={block_rows!r}, expected a whole number above 0, or None to let it choose.")
        unscaled, scale, bias = for_logits(objective, scale, bias)
        if not (gather is None or isinstance(gather, bool)):
            raise SpecError(f"PairLoss got gather={gather!r}, expected True, False, or None to gather where that is possible.")
        self.widths = checked_widths(widths)
        if self.widths and score not in (None, cosine):
            raise SpecError("PairLoss got widths with a score function: only cosines are scores of the first numbers of vectors alone.")
        self.objective = unscaled
        self.block_rows = block_rows
        self.score = score or cosine
        self.scale, self.bias = scale, bias
        self.gather = gather
        self.data_set = data_set
        self.without_negatives: int | None = 0  # batches so far; None: no longer counted
        self.planner = Planner(unscaled, None if self.score is cosine else self.score, block_rows, memory, score_cost)

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
        scale: Number = None,
        bias: Number = None,
    ) -> Tensor:
        for name, items in {"images": images, "texts": texts, "extra_images": extra_images, "extra_texts": extra_texts}.items():
            if items is not None and not isinstance(items, Encoded) and not (isinstance(items, Tensor) and items.dim()):
                raise ShapeError(f"PairLoss got {name} of type {type(items).__name__}, expected a tensor [N, D] or Encoded items.")
        logits = logits_now((self.scale, self.bias), (scale, bias))
        by = "in order" if targets is None and image_ids is None else "by ids" if targets is None else "by targets"
        if targets is None:
            targets = targets_by_ids(len(images), len(texts), image_ids, text_ids)
        elif image_ids is not None or text_ids is not None:
            raise ShapeError("PairLoss got both targets and ids: give one of them.")
        check_targets(targets, torch.Size((len(images), len(texts))))
        if self.widths and targets.query_offline_scores is not None:
            raise ShapeError("PairLoss got widths with offline scores, which are those of whole vectors: leave out one of them.")
        by += f" at widths {self.widths}" if self.widths else ""
        device = tensors(images)[0].device
        targets = targets.to(device)
        processes = processes_for(
            self.gather,
            device,
            training=self.training,
            holds=lambda: what_is_compared(self.objective, self.data_set, images, texts, targets, by),
        )
        ids_are_positions = image_ids is None and are_positions([targets.query_ids, targets.candidate_ids], processes)
        extra = (
            extra_candidates("extra_images", extra_images, extra_image_ids, images, processes),
            extra_candidates("extra_texts", extra_texts, extra_text_ids, texts, processes),
        )
        forth = with_extra(across(targets, processes, ids_are_positions=ids_are_positions), extra[1], ids_are_positions=ids_are_positions)
        back = with_extra(across(targets.T, processes, ids_are_positions=ids_are_positions), extra[0], ids_are_positions=ids_are_positions)
        value = self._value(images, texts, extra, (forth, back), logits, processes)
        for width in narrower(self.widths, images):
            cut_extras = cut_extra(extra[0], width), cut_extra(extra[1], width)
            value = value + self._value(cut(images, width), cut(texts, width), cut_extras, (forth, back), logits, processes)
        if self.training and self.without_negatives is not None and not torch.compiler.is_compiling():
            self._say_if_nothing_is_learned(value, forth, back)
        return value

    def from_chunks(
        self, encode_images: Encode, encode_texts: Encode, image_chunks: Iterable[Any], text_chunks: Iterable[Any], *ids: Ids, **facts: Any
    ) -> Tensor:
        """The loss of items that are encoded in chunks, each chunk again in the backward pass: see ``in_chunks``.

        ids and facts: what the loss itself takes, for the items of all chunks.
        """
        return self(in_chunks(encode_images, image_chunks), in_chunks(encode_texts, text_chunks), *ids, **facts)

    def plan(
        self,
        num_images: int,
        num_texts: int,
        *,
        width: int = 512,
        targets: Targets | None = None,
        images: Items | None = None,
        texts: Items | None = None,
        device: torch.device | str = "cpu",
    ) -> Plan:
        """The way that so many images and texts would go, and the memory it expects; ``print`` says both in words.

        width: of the vectors, for cosines. targets: what will be known, where that is more than ids (default: captions spread evenly).
        images, texts: a few items, by which the cost of a score function is known. Raises SpecError where these are needed and absent.

        >>> from visavis.objectives import TripletHN
        >>> print(PairLoss(TripletHN()).plan(65536, 65536))
        tiles of 1024 x 1024 scores for both directions at once; about 264.0 MiB beside items and gradients
        """
        return self.planner.ahead((num_images, num_texts), width, targets, images, texts, torch.device(device))

    def extra_repr(self) -> str:
        return repr(self.objective)

    def _say_if_nothing_is_learned(self, value: Tensor, *directions: Targets) -> None:
        """Asked until a batch has negatives: later ones may be as small as they like; and one alone may be the rest of a data set."""
        assert self.without_negatives is not None
        self.without_negatives = self.without_negatives + 1 if all(map(no_negatives, directions)) else None
        if self.without_negatives == ENOUGH_TO_SAY:
            self.without_negatives = None
            if float(value.detach()) != 0:
                return
            say(
                f"every batch so far had no more than one id, the last one for {len(directions[0].query_ids)} images and "
                f"{len(directions[1].query_ids)} texts: no pair is negative, {self.objective!r} is 0, and nothing is learned; "
                "give different things different ids, or larger batches."
            )

    def _value(
        self,
        images: Items,
        texts: Items,
        extra: tuple[Extra | None, Extra | None],
        targets: tuple[Targets, Targets],
        logits: Logits,
        processes: Processes,
    ) -> Tensor:
        """By the path that is planned."""
        if torch.compiler.is_compiling() and processes.number == 1:
            return self._dense(images, texts, extra, targets, logits)
        plan = self.planner.of(images, texts, targets, extra=any(extra), processes=processes.number, training=self.training)
        if plan.path == "dense":
            return self._dense(images, texts, extra, targets, logits)
        return self._walk(plan, Side(images, extra[0], processes), Side(texts, extra[1], processes), targets, logits, processes)

    def _walk(
        self,
        plan: Plan,
        images: Side,
        texts: Side,
        targets: tuple[Targets, Targets],
        logits: Logits,
        processes: Processes,
    ) -> Tensor:
        """Value and gradients at once, as planned, then put on the graph."""
        arguments = images.items, texts.items, logits.scale, (images.needs_grad, texts.needs_grad)
        scores: Scores
        if self.score is not cosine:
            scores = FunctionScores(self.score, *arguments, plan.columns)
        else:
            scores = KeptCosines(*arguments) if plan.path == "kept" else CosineBlocks(*arguments)
        facts, biases = [*facts_needing_grad(targets[0]), *facts_needing_grad(targets[1])], logits.learned_bias
        needs_grad = torch.is_grad_enabled() and (
            any((*images.needs_grad, *texts.needs_grad)) or bool(scores.parameters or facts or biases)
        )
        with torch.no_grad():
            if plan.path == "tiles":
                assert isinstance(self.objective, SummaryObjective)
                queries = scores.window(images.own)
                outcome = walk_shared_blocks(
                    self.objective, queries, targets[0], plan.tile, processes, kept_bytes=plan.kept_bytes, needs_grad=needs_grad
                )
            else:
                windows = images.own, texts.own
                outcome = walk_rows(self.objective, scores, windows, targets, plan.rows, processes, bias=logits.bias, needs_grad=needs_grad)
            if not needs_grad:
                return outcome.value
            parameters = zip(scores.parameters, outcome.gradients.parameters, strict=True)
            gradients = [
                *images.gradients(outcome.gradients.images, processes),
                *texts.gradients(outcome.gradients.texts, processes),
                *((given, processes.sum(gradient)) for given, gradient in parameters if gradient is not None),
                *((given, processes.scaled(gradient)) for given, gradient in outcome.facts),
                *((given, processes.sum(torch.as_tensor(outcome.bias))) for given in biases),
            ]
        return on_graph(outcome.value, gradients)

    def _dense(
        self,
        images: Items,
        texts: Items,
        extra: tuple[Extra | None, Extra | None],
        targets: tuple[Targets, Targets],
        logits: Logits,
    ) -> Tensor:
        """All scores in one matrix."""
        if not any(extra):
            return self.objective(self._scores(images, texts, logits), targets[0])
        all_images, all_texts = (
            items if more is None else join(items, more.given, more.name) for items, more in zip((images, texts), extra, strict=True)
        )
        to_texts = self.objective.prepare(self._scores(images, all_texts, logits), targets[0])
        to_images = self.objective.prepare(self._scores(all_images, texts, logits).T, targets[1])
        return self.objective.reduce(self.objective.terms(*to_texts), self.objective.terms(*to_images))

    def _scores(self, images: Items, texts: Items, logits: Logits) -> Tensor:
        return logits.of(scores_of(self.score, images, texts))
