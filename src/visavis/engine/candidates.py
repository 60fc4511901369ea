"""Who is compared with whom: everybody's items and everybody's extra ones on each side, and the targets that go with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visavis.engine.facts import facts_needing_grad
from visavis.engine.items import Items, join, off_graph, parts, tensors
from visavis.engine.processes import Processes
from visavis.engine.widths import cut
from visavis.errors import ShapeError
from visavis.objectives.base import Objective
from visavis.targets import CANDIDATE_FACTS, FACTS, PAIR_FACTS, Factors, Ids, Targets, as_ids


def what_is_compared(objective: Objective, data_set: str | None, images: Items, texts: Items, targets: Targets, by: str) -> str:
    """In words, what must be equal on all processes before they can compare their items. by: how the targets were given."""
    forms = " with ".join(map(_form, (images, texts)))
    facts = "".join(f" and {fact.name}" for fact in FACTS if getattr(targets, fact.name) is not None)
    return f"{objective!r}{'' if data_set is None else f' of {data_set}'} on {forms}, {by}{facts}"


def _form(items: Items) -> str:
    """The kind of items; how long a text is, or how many regions an image has, may differ between processes."""
    if isinstance(items, Tensor) and items.dim() == 2:
        return f"{items.shape[1]} numbers of {items.dtype}"
    return ", ".join(f"{part.dim()} dimensions of {part.dtype}" for part in tensors(items))


def no_negatives(targets: Targets) -> bool:
    """Whether all queries and candidates have one single id, or there are none."""
    ids = torch.cat([targets.query_ids, targets.candidate_ids])
    return targets.relation is None and not bool((ids != ids[:1]).any())


class Extra(NamedTuple):
    """Further candidates of one side, by name.

    given: this process' own, on the graph. items, ids: those of all processes; a bank that all have in common, once. own: where
    this process' stand among them; None: they are the common ones.
    """

    name: str
    given: Items
    items: Items
    ids: Tensor
    own: slice | None


def extra_candidates(name: str, given: Items | None, ids: Ids | None, side: Items, processes: Processes) -> Extra | None:
    """The extra items of all processes on one side, where any has some. Raises ShapeError unless there is an id for each."""
    if given is None and ids is not None:
        raise ShapeError("PairLoss got ids of extra items without the items: give extra_images and extra_texts with their ids.")
    if not processes.any(given is not None):
        return None
    if given is None:
        given, ids = side[:0], []
    own_ids = as_ids([] if ids is None else ids, f"the ids of {name}").to(processes.device)
    if len(own_ids) != len(given):
        number = "no ids" if ids is None else f"{len(own_ids)} ids"
        raise ShapeError(f"{name} has {len(given)} items and {number}: give one id for each.")
    everyones = off_graph(given)
    if all(processes.agree(tensor) for tensor in (own_ids, *tensors(everyones))):
        return Extra(name, given, everyones, own_ids, None)
    everyones, own = processes.items(everyones)
    return Extra(name, given, everyones, processes.joined(own_ids), own)


def cut_extra(extra: Extra | None, width: int) -> Extra | None:
    """The first numbers of the vectors of extra items."""
    return None if extra is None else extra._replace(given=cut(extra.given, width), items=cut(extra.items, width))


class Side:
    """All candidates of one side, off the graph: the items of all processes, then the extra ones.

    own: where this process' items stand, which are its queries. needs_grad: which parts need a gradient.
    """

    def __init__(self, items: Items, extra: Extra | None, processes: Processes) -> None:
        self.given, self.extra = parts(items), extra
        everyones, self.own = processes.items(off_graph(items))
        self.shared = len(everyones)
        self.items = everyones if extra is None else join(everyones, extra.items, extra.name)
        self.needs_grad = [
            torch.is_grad_enabled() and processes.any(any(part.requires_grad for part in both))
            for both in zip(self.given, *([] if extra is None else [parts(extra.given)]), strict=True)
        ]

    def gradients(self, totals: Sequence[Tensor | None], processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor that was given, with its gradient, made so that the mean over processes is the gradient of the value."""
        extras = [None] * len(self.given) if self.extra is None else parts(self.extra.given)
        for given, extra, total in zip(self.given, extras, totals, strict=False):  # a cosine reads the vectors alone
            if total is None:
                continue
            yield given, processes.scaled(_like(processes.sum(total[: self.shared])[self.own], given))
            if self.extra is not None and extra is not None and processes.any(extra.requires_grad):
                further, own = processes.sum(total[self.shared :]), self.extra.own
                yield extra, _like(further, extra) if own is None else processes.scaled(_like(further[own], extra))


def _like(gradient: Tensor, given: Tensor) -> Tensor:
    """Without the padding that joining items of other lengths has added."""
    return gradient[:, : given.shape[1]] if given.dim() > 1 else gradient


def with_extra(targets: Targets, extra: Extra | None, *, ids_are_positions: bool) -> Targets:
    """The targets with further candidates; what is known of queries stays, facts of pairs would be unknown for the new ones.

    ids_are_positions: ids are positions that went on from process to process, which nobody could have known for an extra item.
    """
    if extra is None:
        return targets
    for fact in ("relation", *PAIR_FACTS):
        if getattr(targets, fact) is not None:
            raise ShapeError(f"{extra.name} needs targets by ids alone: their {fact} does not say what holds for an extra candidate.")
    if ids_are_positions and (extra.ids >= 0).any():
        raise ShapeError(
            f"{extra.name} have ids, but the batches of several processes have none: give image_ids and text_ids that hold "
            "over all, or extra items negative ids, which belong to nobody."
        )
    unread = {  # extras are never queries
        fact: torch.cat([given, given.new_zeros(len(extra.ids), *given.shape[1:])])
        for fact in CANDIDATE_FACTS
        if (given := getattr(targets, fact)) is not None
    }
    return replace(targets, candidate_ids=torch.cat([targets.candidate_ids, extra.ids]), columns=None, **unread)


def are_positions(both: Sequence[Tensor], processes: Processes) -> bool:
    """Whether numbers of both sides count 0, 1, 2, ... on every one of several processes."""
    return processes.number > 1 and not processes.any(
        any(not torch.equal(numbers, torch.arange(len(numbers), device=numbers.device)) for numbers in both)
    )


def across(targets: Targets, processes: Processes, *, ids_are_positions: bool) -> Targets:
    """This process' queries against the candidates of all.

    Positions that count 0, 1, 2, ... on every process are positions in its batch, and go on from process to process; so do ids
    that are ``ids_are_positions``. Other positions hold over all processes. A function is asked for its own rows and the columns of all.
    """
    if processes.number == 1:
        return targets
    for name in ("relation", *PAIR_FACTS):
        if isinstance(getattr(targets, name), Tensor):
            raise ShapeError(
                f"{name} does not say what holds for the candidates of other processes: give ids, Factors or a function, or gather=False."
            )
    if any("_vectors" in name for name in facts_needing_grad(targets)):
        raise ShapeError("Factors with a gradient cannot be gathered over processes: detach them, or give gather=False.")
    starts = [processes.sum_before(length) for length in targets.shape]
    changes: dict[str, Any] = {}
    for names in (("query_ids", "candidate_ids"), ("rows", "columns")):
        both = [getattr(targets, name) for name in names]
        if ids_are_positions if names[0] == "query_ids" else are_positions(both, processes):
            both = [numbers + start for numbers, start in zip(both, starts, strict=True)]
        changes |= {names[0]: both[0], names[1]: processes.joined(both[1])}
    for name in (*PAIR_FACTS, *CANDIDATE_FACTS):
        fact = getattr(targets, name)
        if isinstance(fact, Factors):
            changes[name] = Factors(fact.query_vectors, processes.joined(fact.candidate_vectors))
        elif isinstance(fact, Tensor):
            changes[name] = processes.joined(fact)
    everyones = replace(targets, **changes)
    _ask_functions(everyones, processes)
    return everyones


def _ask_functions(targets: Targets, processes: Processes) -> None:
    """Refuse functions that know no positions but those of their own process."""
    for name in PAIR_FACTS:
        if callable(getattr(targets, name)) and processes.any(not _answers(targets, name)):
            raise ShapeError(
                f"the function given for {name} fails at positions of other processes: give Targets(rows=, columns=) numbers that it knows "
                "and that hold over all processes, such as those in the data set; or give Factors, or gather=False."
            )


def _answers(targets: Targets, name: str) -> bool:
    try:
        return not len(targets.query_ids) or targets[:1].pairwise(name) is not None
    except LookupError:
        return False


def targets_by_ids(num_images: int, num_texts: int, image_ids: Ids | None, text_ids: Ids | None) -> Targets:
    """Of a batch; without ids pairs in order. Raises ShapeError."""
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
