"""Which candidates are right for which queries, and what else an objective may read about a pair or an item.

Memory is O(Q + C): ids instead of masks; facts of pairs as a tensor, as factors, or as a function of positions.
A mask ``[Q, C]`` is computed only for the selected rows: ``targets[rows].positive``.

>>> targets = Targets(query_ids=[7, 8], candidate_ids=[7, 7, 8])      # image 7 has two captions
>>> targets.positive.tolist()
[[True, True, False], [False, False, True]]
>>> targets.T.positive.shape
torch.Size([3, 2])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from visavis.errors import MissingSupervision, ShapeError
from visavis.spec import whole_number

Ids = Tensor | np.ndarray | Sequence[int]


@dataclass(frozen=True)
class Factors:
    """A fact of pairs as a product: ``query_vectors [Q, E] @ candidate_vectors.T [E, C]``, computed by blocks."""

    query_vectors: Tensor
    candidate_vectors: Tensor


PairFact = Tensor | Factors | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Fact:
    """A field of Targets beside ids, declared once: slicing, transposing, gathering, checks and error messages follow from it.

    name: the field. shape: "pairwise" ``[Q, C]`` (a tensor, Factors or a function), or one entry per "query" or "candidate", with
    further ``axes``. other_side: the name of the fact when queries and candidates exchange roles. supplier: the supervision that
    provides it.
    """

    name: str
    shape: Literal["pairwise", "query", "candidate"] = "pairwise"
    axes: tuple[str, ...] = ()
    other_side: str = ""
    supplier: str = ""

    @property
    def turned(self) -> str:
        return self.other_side or self.name


FACTS = (
    Fact("relevance", supplier="GradedSupervision"),
    Fact("weight", supplier="LearnedWeights"),
    Fact("ignore"),
    Fact("pair_margin", supplier="NoisySupervision"),
    Fact("query_margin", "query", other_side="candidate_margin", supplier="NoisySupervision"),
    Fact("query_offline_scores", "query", ("K",), other_side="candidate_offline_scores", supplier="BankSupervision"),
    Fact("candidate_margin", "candidate", other_side="query_margin", supplier="NoisySupervision"),
    Fact("candidate_offline_scores", "candidate", ("K",), other_side="query_offline_scores", supplier="BankSupervision"),
)
PAIR_FACTS, QUERY_FACTS, CANDIDATE_FACTS = (
    tuple(fact.name for fact in FACTS if fact.shape == shape) for shape in ("pairwise", "query", "candidate")
)


@dataclass(frozen=True)
class _Transposed:
    """A function of (rows, columns) with the two roles exchanged."""

    fact: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.fact(columns, rows).T


@dataclass(frozen=True, kw_only=True, eq=False)
class Targets:
    """Which candidates are right for which queries, and facts that some objectives read.

    query_ids ``[Q]``, candidate_ids ``[C]``: equal id <=> they belong together.
    relevance, weight, ignore, pair_margin: facts of pairs; each a tensor ``[Q, C]``, ``Factors``, or a function of
    two global LongTensors (rows, columns) -> block. ``ignore``: true where a pair is neither positive nor negative.
    query_margin ``[Q]``, candidate_margin ``[C]``: adaptive margins of the anchors, in place of the objective's own.
    query_offline_scores ``[Q, K]``, candidate_offline_scores ``[C, K]``: scores of offline negatives, with gradient.
    positive_scores: the detached scores of all positive pairs, unordered; set by the engine.

    Raises ShapeError where lengths do not fit.
    """

    query_ids: Tensor
    candidate_ids: Tensor
    relevance: PairFact | None = None
    weight: PairFact | None = None
    ignore: PairFact | None = None
    pair_margin: PairFact | None = None
    query_margin: Tensor | None = None
    candidate_margin: Tensor | None = None
    query_offline_scores: Tensor | None = None
    candidate_offline_scores: Tensor | None = None
    positive_scores: Tensor | None = None
    relation: Tensor | None = None  # [P, 2] global (row, column) of positive pairs; None: by ids
    rows: Tensor | None = None  # [Q] global positions, for facts given as functions; None: 0..Q-1
    columns: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("query_ids", "candidate_ids"):
            object.__setattr__(self, name, as_ids(getattr(self, name), name))
        for name, length in (("rows", len(self.query_ids)), ("columns", len(self.candidate_ids))):
            if getattr(self, name) is None:
                object.__setattr__(self, name, torch.arange(length, device=self.query_ids.device))
        for fact in FACTS:
            value = getattr(self, fact.name)
            if fact.shape == "pairwise":
                _check_pair_fact(fact.name, value, self.shape)
            else:
                _check_item_fact(fact, value, self.shape[0 if fact.shape == "query" else 1])

    @classmethod
    def paired(cls, n: int, **facts: Any) -> Targets:
        """Query i belongs to candidate i only: what the papers' code does."""
        n = whole_number(n, "n")
        return cls(query_ids=torch.arange(n), candidate_ids=torch.arange(n), **facts)

    @classmethod
    def from_pairs(cls, query_index: Ids, candidate_index: Ids, num_queries: int, num_candidates: int, **facts: Any) -> Targets:
        """Any relation, given by its pairs (positions ``[P]`` and ``[P]``); positives may overlap."""
        query_index, candidate_index = as_ids(query_index, "query_index"), as_ids(candidate_index, "candidate_index")
        num_queries, num_candidates = whole_number(num_queries, "num_queries"), whole_number(num_candidates, "num_candidates")
        if len(query_index) != len(candidate_index):
            raise ShapeError(
                f"query_index has {len(query_index)} entries and candidate_index {len(candidate_index)}: give one of each for a pair."
            )
        for name, index, size in (("query_index", query_index, num_queries), ("candidate_index", candidate_index, num_candidates)):
            if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
                raise ShapeError(f"{name} goes from {int(index.min())} to {int(index.max())}, expected positions from 0 to {size - 1}.")
        relation = torch.stack([query_index, candidate_index], 1)
        query_ids, candidate_ids = (torch.arange(number, device=relation.device) for number in (num_queries, num_candidates))
        return cls(query_ids=query_ids, candidate_ids=candidate_ids, relation=relation, **facts)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.query_ids), len(self.candidate_ids)))

    @property
    def T(self) -> Targets:
        """The same facts with the roles of queries and candidates exchanged."""
        swapped = {"query_ids": self.candidate_ids, "candidate_ids": self.query_ids, "rows": self.columns, "columns": self.rows}
        facts = {fact.turned: _transpose(getattr(self, fact.name), fact) for fact in FACTS}
        return replace(self, relation=None if self.relation is None else self.relation.flip(1), **swapped, **facts)  # type: ignore[arg-type]

    def __getitem__(self, rows: slice | Tensor) -> Targets:
        """Some queries against all candidates."""
        per_query = ("query_ids", "rows", *QUERY_FACTS)
        sliced = {name: None if (fact := getattr(self, name)) is None else fact[rows] for name in per_query}
        facts = {name: _slice(getattr(self, name), rows) for name in PAIR_FACTS}
        return replace(self, **sliced, **facts)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Targets:
        """All tensors on a device."""
        moved = {field.name: _move(getattr(self, field.name), device) for field in fields(self)}
        return Targets(**moved)

    @property
    def positive(self) -> Tensor:
        """Bool ``[Q, C]``: the pairs that belong together (and are not ignored)."""
        return self._together if self.ignore is None else self._together & ~self.pairwise("ignore").bool()

    @property
    def negative(self) -> Tensor:
        """Bool ``[Q, C]``: the pairs that do not belong together (and are not ignored)."""
        return ~self._together if self.ignore is None else ~(self._together | self.pairwise("ignore").bool())

    @property
    def _together(self) -> Tensor:
        if self.relation is None:
            return self.query_ids[:, None] == self.candidate_ids[None, :]
        assert self.rows is not None and self.columns is not None
        rows, row_place = self.rows.unique(return_inverse=True)
        columns, column_place = self.columns.unique(return_inverse=True)
        in_block = torch.isin(self.relation[:, 0], rows) & torch.isin(self.relation[:, 1], columns)
        row, column = self.relation[in_block].T.contiguous()
        table = torch.zeros(len(rows), len(columns), dtype=torch.bool, device=rows.device)
        table[torch.searchsorted(rows, row), torch.searchsorted(columns, column)] = True
        return table[row_place][:, column_place]

    def pairwise(self, name: str, objective: str = "this objective") -> Tensor:
        """A fact of pairs as a block ``[Q, C]``. Raises MissingSupervision, naming the supervision that supplies it, if it was not given."""
        fact = getattr(self, name)
        if fact is None:
            raise missing(objective, name)
        if isinstance(fact, Factors):
            return fact.query_vectors @ fact.candidate_vectors.T
        if isinstance(fact, Tensor):
            return fact
        block = fact(self.rows, self.columns)
        if not isinstance(block, Tensor) or block.shape != self.shape:
            raise ShapeError(f"the function given for {name} returned a value {_form(block)}, expected {list(self.shape)}: rows x columns.")
        return block

    def margin_or(self, margin: float, objective: str) -> Tensor | float:
        """The margin of each query as an anchor ``[Q]``, or ``margin`` where no adaptive margins are given.

        Raises MissingSupervision if only the other side's margins are there: no silent fallback.
        """
        if self.query_margin is None and self.candidate_margin is not None:
            raise MissingSupervision(
                f"{objective} got margins for one side only: give query_margin and candidate_margin, one for each direction."
            )
        return margin if self.query_margin is None else self.query_margin


def as_ids(ids: Ids, name: str) -> Tensor:
    """Ids as a LongTensor ``[N]``. Raises ShapeError, by ``name``, for anything but whole numbers in one row."""
    if ids is None:
        raise ShapeError(f"{name} is None, expected one whole number for each item: equal ids belong together.")
    try:
        tensor = ids if isinstance(ids, Tensor) else torch.from_numpy(np.array(ids))
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(f"{name} must be whole numbers in one row; texts and nested lists cannot be ids: number them first.") from None
    if tensor.dim() != 1 or (tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())):
        raise ShapeError(f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, expected one whole number for each item.")
    return tensor.long()


def missing(objective: str, *names: str) -> MissingSupervision:
    """The error of an objective that needs a fact, or one of several, which was not given.

    >>> str(missing("Ladder", "relevance"))
    'Ladder needs relevance for every pair: give Targets(..., relevance=...) or train with GradedSupervision.'
    """
    facts = [fact for name in names for fact in FACTS if fact.name == name]
    field_names = [fact.name if fact.shape == "pairwise" else f"{fact.name} and {fact.other_side}" for fact in facts]
    pairwise = {fact.shape == "pairwise" for fact in facts}
    scope = "" if len(pairwise) > 1 else " for every pair" if pairwise == {True} else " for every item"
    suppliers = sorted({fact.supplier for fact in facts if fact.supplier})
    train = f" or train with {' or '.join(suppliers)}" if suppliers else ""
    return MissingSupervision(f"{objective} needs {', or '.join(field_names)}{scope}: give Targets(..., {facts[-1].name}=...){train}.")


def _check_item_fact(fact: Fact, value: Any, length: int) -> None:
    if value is not None and (not isinstance(value, Tensor) or value.dim() != 1 + len(fact.axes) or len(value) != length):
        expected = ", ".join([str(length), *fact.axes])
        raise ShapeError(f"{fact.name} is {_form(value)}, expected a tensor [{expected}]: one entry for each item of its side.")


def _check_pair_fact(name: str, fact: Any, shape: torch.Size) -> None:
    """Check the shape of a tensor or of factors; a function is checked when its block is computed."""
    if isinstance(fact, Factors):
        sides = (fact.query_vectors, fact.candidate_vectors)
        if any(side.shape != (length, sides[0].shape[-1]) for side, length in zip(sides, shape, strict=True)):
            forms = " and ".join(str(list(side.shape)) for side in sides)
            raise ShapeError(f"{name} is given as Factors {forms}, expected [{shape[0]}, E] and [{shape[1]}, E] for queries x candidates.")
    elif isinstance(fact, Tensor):
        if fact.shape != shape:
            raise ShapeError(f"{name} has shape {list(fact.shape)}, expected {list(shape)}: queries x candidates.")
    elif fact is not None and not callable(fact):
        raise ShapeError(f"{name} is {_form(fact)}, expected a tensor {list(shape)}, Factors, or a function of (rows, columns).")


def _form(fact: Any) -> str:
    return f"of shape {list(fact.shape)}" if isinstance(fact, Tensor) else f"of type {type(fact).__name__}"


def _transpose(value: Any, fact: Fact) -> Any:
    if value is None or fact.shape != "pairwise":
        return value
    if isinstance(value, Tensor):
        return value.T
    if isinstance(value, Factors):
        return Factors(value.candidate_vectors, value.query_vectors)
    return value.fact if isinstance(value, _Transposed) else _Transposed(value)


def _slice(fact: PairFact | None, rows: slice | Tensor) -> PairFact | None:
    if isinstance(fact, Factors):
        return Factors(fact.query_vectors[rows], fact.candidate_vectors)
    return fact[rows] if isinstance(fact, Tensor) else fact


def _move(fact: Any, device: torch.device | str) -> Any:
    if isinstance(fact, Factors):
        return Factors(fact.query_vectors.to(device), fact.candidate_vectors.to(device))
    return fact.to(device) if isinstance(fact, Tensor) else fact
