"""Who is compared with whom: everybody's items and a process' extra ones on each side, and the targets that go with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visavis.engine.facts import learning
from visavis.engine.gathering import Processes
from visavis.engine.items import Items, join, off_graph, parts
from visavis.errors import ShapeError
from visavis.targets import PAIR_FACTS, QUERY_FACTS, Factors, Ids, Targets, as_ids


class Side:
    """All candidates of one side, off the graph: the items of all processes, then this one's extra ones.

    own: where this process' items stand, which are its queries. wanted: which parts have a gradient to be found.
    """

    def __init__(self, items: Items, extra: Items | None, name: str, processes: Processes) -> None:
        self.given, self.extra = parts(items), [None] * len(parts(items)) if extra is None else parts(extra)
        everyones, self.own = processes.items(off_graph(items))
        self.shared = len(everyones)
        self.items = everyones if extra is None else join(everyones, off_graph(extra), name)
        self.wanted = [
            torch.is_grad_enabled() and processes.any(any(each is not None and each.requires_grad for each in both))
            for both in zip(self.given, self.extra, strict=True)
        ]

    def gradients(self, totals: Sequence[Tensor | None], processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor that was given, with its gradient, made so that the mean over processes is the gradient of the value."""
        for given, extra, total in zip(self.given, self.extra, totals, strict=False):  # a cosine reads the vectors alone
            if total is None:
                continue
            yield given, processes.scaled(_like(processes.sum(total[: self.shared])[self.own], given))
            if extra is not None:
                yield extra, processes.scaled(_like(total[self.shared :], extra))


def _like(gradient: Tensor, given: Tensor) -> Tensor:
    """Without the padding that joining items of other lengths has added."""
    return gradient[:, : given.shape[1]] if given.dim() > 1 else gradient


def with_extra(targets: Targets, number: int, extra_ids: Ids | None, name: str) -> Targets:
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
        for fact in QUERY_FACTS.values()
        if (given := getattr(targets, fact)) is not None
    }
    return replace(targets, candidate_ids=torch.cat([own, ids.to(own.device)]), columns=None, **unread)


def across(targets: Targets, processes: Processes, *, ids_hold: bool) -> Targets:
    """This process' queries against the candidates of all.

    Positions that count 0, 1, 2, ... on every process are places in its batch, and go on from process to process; so do ids, unless
    they hold over all processes (``ids_hold``).
    """
    if processes.number == 1:
        return targets
    for name in ("relation", *PAIR_FACTS):
        if isinstance(getattr(targets, name), Tensor):
            raise ShapeError(
                f"{name} does not say what holds for the candidates of other processes: give ids, Factors or a function, or gather=False."
            )
    if any("_vectors" in name for name in learning(targets)):
        raise ShapeError("Factors with a gradient cannot be gathered over processes: detach them, or give gather=False.")
    starts = [processes.sum_before(length) for length in targets.shape]
    changes: dict[str, Any] = {}
    for names, places in ((("query_ids", "candidate_ids"), not ids_hold), (("rows", "columns"), True)):
        both = [getattr(targets, name) for name in names]
        if places and not processes.any(any(not torch.equal(each, torch.arange(len(each), device=each.device)) for each in both)):
            both = [each + start for each, start in zip(both, starts, strict=True)]
        changes |= {names[0]: both[0], names[1]: processes.joined(both[1])}
    for name in (*PAIR_FACTS, *QUERY_FACTS.values()):
        fact = getattr(targets, name)
        if isinstance(fact, Factors):
            changes[name] = Factors(fact.query_vectors, processes.joined(fact.candidate_vectors))
        elif isinstance(fact, Tensor):
            changes[name] = processes.joined(fact)
    return replace(targets, **changes)
