"""Targets: which candidates are relevant for which queries, and annotations of pairs and items that
objectives read.

Memory is O(Q + C): ids instead of masks, and pairwise annotations as a tensor, as factors, or as a
function of positions. A mask ``[Q, C]`` is computed only for the selected rows:
``targets[rows].positive``.

>>> targets = Targets(query_ids=[7, 8], candidate_ids=[7, 7, 8])      # image 7 has two captions
>>> targets.positive.tolist()
[[True, True, False], [False, False, True]]
>>> targets.T.positive.shape
torch.Size([3, 2])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from visavis.core.errors import MissingSupervision, ShapeError, VisavisError, format_value
from visavis.core.fields import validate_int

Ids: TypeAlias = Tensor | np.ndarray | Sequence[int] | Sequence[str]
MAX_COMPARED_PAIRS = 2**15
"""Number of pairs up to which comparing all ids finds the positives faster than sorting them."""


@dataclass(frozen=True)
class Factors:
    """A pairwise annotation as a product ``query_vectors @ candidate_vectors.T``, computed block by
    block.

    Attributes:
        query_vectors: One vector per query, shape ``[Q, E]``.
        candidate_vectors: One vector per candidate, shape ``[C, E]``.
    """

    query_vectors: Tensor
    candidate_vectors: Tensor


PairwiseAnnotation: TypeAlias = Tensor | Factors | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Annotation:
    """Declaration of a field of `Targets` next to the ids. Slicing, transposing, gathering and
    checks follow from it.

    Attributes:
        name: The field.
        shape: "pairwise" for ``[Q, C]``, "query" or "candidate" for one entry per item of that
            side.
        axes: Names of further axes after the items, such as ``("K",)``.
        transposed_field: The field that holds the values when queries and candidates exchange
            roles. Empty for the same field.
        suppliers: Class names of the supervisions that provide the values, for error messages.
    """

    name: str
    shape: Literal["pairwise", "query", "candidate"] = "pairwise"
    axes: tuple[str, ...] = ()
    transposed_field: str = ""
    suppliers: tuple[str, ...] = ()


ANNOTATIONS = (
    Annotation("relevance", suppliers=("GradedSupervision",)),
    Annotation("weight", suppliers=("LearnedWeights", "RelevanceWeights")),
    Annotation("ignore"),
    Annotation("pair_margin", suppliers=("NoisySupervision", "RelevanceMargins")),
    Annotation(
        "query_margin",
        "query",
        transposed_field="candidate_margin",
        suppliers=("NoisySupervision",),
    ),
    Annotation(
        "query_offline_scores",
        "query",
        ("K",),
        transposed_field="candidate_offline_scores",
        suppliers=("OfflineNegativeSupervision",),
    ),
    Annotation(
        "candidate_margin",
        "candidate",
        transposed_field="query_margin",
        suppliers=("NoisySupervision",),
    ),
    Annotation(
        "candidate_offline_scores",
        "candidate",
        ("K",),
        transposed_field="query_offline_scores",
        suppliers=("OfflineNegativeSupervision",),
    ),
)
PAIRWISE_ANNOTATIONS, QUERY_ANNOTATIONS, CANDIDATE_ANNOTATIONS = (
    tuple(annotation.name for annotation in ANNOTATIONS if annotation.shape == shape)
    for shape in ("pairwise", "query", "candidate")
)


ANNOTATION_NAMES = tuple(annotation.name for annotation in ANNOTATIONS)


@dataclass(frozen=True)
class _Transposed:
    """A function of (rows, columns) with the two roles exchanged."""

    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.function(columns, rows).T


@dataclass(frozen=True, kw_only=True, eq=False)
class Targets:
    """Relevance of candidates for queries, by ids or by a relation, with optional annotations.

    A pairwise annotation is a tensor ``[Q, C]``, `Factors`, or a function of two global LongTensors
    (rows, columns) that returns a block of shape rows x columns.

    Attributes:
        query_ids: Ids of the queries, integers or texts, shape ``[Q]``. A query and a candidate with
            equal ids are a positive pair.
        candidate_ids: Ids of the candidates, shape ``[C]``.
        relevance: Graded relevance, pairwise.
        weight: Weights that multiply scores, pairwise.
        ignore: True where a pair is neither positive nor negative, pairwise.
        pair_margin: Adaptive margin of each pair, pairwise.
        query_margin: Adaptive margin of each query as an anchor, shape ``[Q]``. Replaces the margin
            of the objective.
        candidate_margin: The same for candidates as anchors, shape ``[C]``.
        query_offline_scores: Scores of each query with its offline negatives, shape ``[Q, K]``,
            with gradient.
        candidate_offline_scores: Scores of each candidate with its offline negatives, shape ``[C,
            K]``, with gradient.
        positive_scores: Detached scores of all positive pairs in any order. Set by PairLoss.
        relation: Positive pairs as global (row, column), shape ``[P, 2]``. None: by ids.
        rows: Global positions of the queries, shape ``[Q]``, for annotations given as functions.
            None: 0 to Q - 1.
        columns: Global positions of the candidates, shape ``[C]``. None: 0 to C - 1.

    Raises:
        ShapeError: If lengths or shapes do not match.
    """

    query_ids: Tensor
    candidate_ids: Tensor
    relevance: PairwiseAnnotation | None = None
    weight: PairwiseAnnotation | None = None
    ignore: PairwiseAnnotation | None = None
    pair_margin: PairwiseAnnotation | None = None
    query_margin: Tensor | None = None
    candidate_margin: Tensor | None = None
    query_offline_scores: Tensor | None = None
    candidate_offline_scores: Tensor | None = None
    positive_scores: Tensor | None = None
    relation: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None

    def __post_init__(self) -> None:
        require_ids_of_one_kind(
            self.query_ids, self.candidate_ids, names=("query_ids", "candidate_ids")
        )
        for name in ("query_ids", "candidate_ids"):
            object.__setattr__(self, name, to_id_tensor(getattr(self, name), name))
        for name, length in zip(("rows", "columns"), self.shape, strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, torch.arange(length, device=self.query_ids.device))
        for annotation in ANNOTATIONS:
            if (value := getattr(self, annotation.name)) is None:
                continue
            if annotation.shape == "pairwise":
                _check_pairwise(annotation.name, value, self.shape)
                continue
            length = self.shape[0 if annotation.shape == "query" else 1]
            if (
                not isinstance(value, Tensor)
                or value.dim() != 1 + len(annotation.axes)
                or len(value) != length
            ):
                expected = ", ".join([str(length), *annotation.axes])
                raise ShapeError(
                    f"{annotation.name}: expected a tensor [{expected}], one entry per item, got a "
                    f"value {_describe(value)}."
                )

    @classmethod
    def paired(cls, n: int, **annotations: Any) -> Targets:
        """Make targets where query i belongs to candidate i only, as the code of the papers does.

        Args:
            n: Number of pairs.
            **annotations: Fields of `Targets` next to the ids.

        Returns:
            Targets of shape ``[n, n]``.
        """
        n = validate_int(n, "n")
        return cls(query_ids=torch.arange(n), candidate_ids=torch.arange(n), **annotations)

    @classmethod
    def from_pairs(
        cls,
        query_index: Ids,
        candidate_index: Ids,
        num_queries: int,
        num_candidates: int,
        **annotations: Any,
    ) -> Targets:
        """Make targets of any relation, given by its positive pairs. Positives of queries may
        overlap.

        Args:
            query_index: Position of the query of each pair, shape ``[P]``.
            candidate_index: Position of the candidate of each pair, shape ``[P]``.
            num_queries: Number of queries.
            num_candidates: Number of candidates.
            **annotations: Fields of `Targets` next to the ids.

        Returns:
            Targets of shape ``[num_queries, num_candidates]``.

        Raises:
            ShapeError: If the lengths differ or a position is out of range.
        """
        query_index = to_id_tensor(to_integer_tensor(query_index, "query_index"), "query_index")
        candidate_index = to_id_tensor(
            to_integer_tensor(candidate_index, "candidate_index"), "candidate_index"
        )
        num_queries = validate_int(num_queries, "num_queries")
        num_candidates = validate_int(num_candidates, "num_candidates")
        if len(query_index) != len(candidate_index):
            raise ShapeError(
                f"candidate_index: expected {len(query_index)} entries as in query_index, got "
                f"{len(candidate_index)}. Pass one of each per pair."
            )
        for name, index, size in (
            ("query_index", query_index, num_queries),
            ("candidate_index", candidate_index, num_candidates),
        ):
            if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
                raise ShapeError(
                    f"{name}: expected positions from 0 to {size - 1}, got {int(index.min())} to "
                    f"{int(index.max())}."
                )
        relation = torch.stack([query_index, candidate_index], 1)
        query_ids, candidate_ids = (
            torch.arange(size, device=relation.device) for size in (num_queries, num_candidates)
        )
        return cls(
            query_ids=query_ids, candidate_ids=candidate_ids, relation=relation, **annotations
        )

    @property
    def shape(self) -> torch.Size:
        """Number of queries and of candidates."""
        # The length of a tensor by ``len`` takes four times as long.
        return torch.Size((self.query_ids.shape[0], self.candidate_ids.shape[0]))

    @property
    def T(self) -> Targets:
        """The same targets with the roles of queries and candidates exchanged."""
        swapped = {
            "query_ids": self.candidate_ids,
            "candidate_ids": self.query_ids,
            "rows": self.columns,
            "columns": self.rows,
        }
        # torch.compile cannot call `dict[str, Any]`.
        annotations: dict[str, Any] = {}
        for annotation in ANNOTATIONS:
            value = getattr(self, annotation.name)
            if value is not None and annotation.shape == "pairwise":
                if isinstance(value, Tensor):
                    value = value.T
                elif isinstance(value, Factors):
                    value = Factors(value.candidate_vectors, value.query_vectors)
                else:
                    is_transposed = isinstance(value, _Transposed)
                    value = value.function if is_transposed else _Transposed(value)
            annotations[annotation.transposed_field or annotation.name] = value
        relation = None if self.relation is None else self.relation.flip(1)
        return self._with(relation=relation, **swapped, **annotations)

    def __getitem__(self, rows: slice | Tensor) -> Targets:
        """Select queries. All candidates stay."""
        per_query = ("query_ids", "rows", *QUERY_ANNOTATIONS)
        sliced = {
            name: None if (value := getattr(self, name)) is None else value[rows]
            for name in per_query
        }
        # torch.compile cannot call `dict[str, Any]`.
        annotations: dict[str, Any] = {}
        for name in PAIRWISE_ANNOTATIONS:
            value = getattr(self, name)
            if isinstance(value, Factors):
                value = Factors(value.query_vectors[rows], value.candidate_vectors)
            elif isinstance(value, Tensor):
                value = value[rows]
            # A function stays as it is. It is called with the selected positions.
            annotations[name] = value
        return self._with(**sliced, **annotations)

    def to(self, device: torch.device | str) -> Targets:
        """Move all tensors to a device.

        Args:
            device: Target device.

        Returns:
            The targets on the device.
        """
        moved = self._with(
            **{
                name: _move(value, device)
                for name in FIELD_NAMES
                if (value := getattr(self, name)) is not None
            }
        )
        if not torch.compiler.is_compiling():
            # Only such a copy, which a loss makes for one call, caches its pairs. The owner of
            # these targets may change the ids in place between two calls.
            vars(moved)["_pairs"] = None
        return moved

    def _with(self, **changes: Any) -> Targets:
        """A copy with other fields that fit together, without the checks of the constructor."""
        if torch.compiler.is_compiling():
            return replace(self, **changes)
        changed = object.__new__(Targets)
        vars(changed).update({name: getattr(self, name) for name in FIELD_NAMES} | changes)
        return changed

    @property
    def masks(self) -> tuple[Tensor, Tensor]:
        """Positive and negative pairs, as `positive` and `negative`, computed at once."""
        related = self._related
        if self.ignore is None:
            return related, ~related
        ignored = self.pairwise("ignore").bool()
        return related & ~ignored, ~(related | ignored)

    @property
    def positive(self) -> Tensor:
        """Positive pairs that are not ignored, bool ``[Q, C]``."""
        return (
            self._related
            if self.ignore is None
            else self._related & ~self.pairwise("ignore").bool()
        )

    @property
    def negative(self) -> Tensor:
        """Pairs that are neither positive nor ignored, bool ``[Q, C]``."""
        return (
            ~self._related
            if self.ignore is None
            else ~(self._related | self.pairwise("ignore").bool())
        )

    @property
    def _related(self) -> Tensor:
        if self.relation is None:
            # Setting the pairs takes a tenth of the time of comparing all ids, unless they are few.
            if self._are_few_pairs:
                return self._equal_ids
            related = self.query_ids.new_zeros(self.shape, dtype=torch.bool)
            related[self._pairs_by_id] = True
            return related
        assert self.rows is not None and self.columns is not None
        # Positions may repeat, so the pairs are marked in a table of the distinct ones [rows, columns]
        # and read by all.
        rows, row_index = self.rows.unique(return_inverse=True)
        columns, column_index = self.columns.unique(return_inverse=True)
        in_block = torch.isin(self.relation[:, 0], rows) & torch.isin(self.relation[:, 1], columns)
        row, column = self.relation[in_block].T.contiguous()
        table = torch.zeros(len(rows), len(columns), dtype=torch.bool, device=rows.device)
        table[torch.searchsorted(rows, row), torch.searchsorted(columns, column)] = True
        return table[row_index][:, column_index]

    @property
    def is_defined_by_ids(self) -> bool:
        """Whether equal ids alone decide which pairs are positive: no relation and no ignored
        pairs.
        """
        return self.relation is None and self.ignore is None

    def positive_pairs(self, blocks: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Find all positive pairs without a matrix ``[Q, C]``: by sorting ids, or block by block
        where ids do not suffice.

        Args:
            blocks: Slices of queries that are processed at once.

        Returns:
            The query and the candidate of each pair, shapes ``[P]``, ordered by query and then by
            candidate.

        Example:
            >>> Targets(query_ids=[7, 8, 7], candidate_ids=[8, 7, 7]).positive_pairs([slice(0, 3)])
            (tensor([0, 0, 1, 2, 2]), tensor([1, 2, 0, 1, 2]))
        """
        if not self.is_defined_by_ids:
            by_block = [
                (
                    self[rows].positive.nonzero()
                    + torch.tensor([rows.start, 0], device=self.query_ids.device)
                )
                for rows in blocks
            ]
            query, candidate = (
                torch.cat(by_block).T.contiguous() if by_block else self.query_ids.new_zeros(2, 0)
            )
            return query, candidate
        return self._pairs_by_id

    @property
    def _pairs_by_id(self) -> tuple[Tensor, Tensor]:
        """The query and the candidate of each pair of equal ids, ordered by both."""
        # A compiler sees no cache and no branch that depends on the ids.
        if torch.compiler.is_compiling():
            query, candidate = self._equal_ids.nonzero(as_tuple=True)
            return query, candidate
        if "_pairs" not in vars(self):
            return self._find_pairs_by_id()
        if vars(self)["_pairs"] is None:
            vars(self)["_pairs"] = self._find_pairs_by_id()
        return vars(self)["_pairs"]

    def _find_pairs_by_id(self) -> tuple[Tensor, Tensor]:
        if self._are_few_pairs:
            query, candidate = self._equal_ids.nonzero(as_tuple=True)
            return query, candidate
        order, first, counts = self._id_runs()
        queries = torch.arange(counts.shape[0], device=counts.device)
        ends = counts.cumsum(0)
        if bool((ends == queries + 1).all()):
            # One positive for each query, as in most batches.
            return queries, order[first]
        query = queries.repeat_interleave(counts)
        position = (
            torch.arange(query.shape[0], device=counts.device) + (first - ends + counts)[query]
        )
        return query, order[position]

    @property
    def _are_few_pairs(self) -> bool:
        return torch.compiler.is_compiling() or math.prod(self.shape) <= MAX_COMPARED_PAIRS

    @property
    def _equal_ids(self) -> Tensor:
        return self.query_ids[:, None] == self.candidate_ids

    def positive_counts(self, blocks: Sequence[slice]) -> Tensor:
        """Count the positives of each query.

        Args:
            blocks: Slices of queries that are processed at once.

        Returns:
            Number of positives, shape ``[Q]``.
        """
        if self.is_defined_by_ids:
            return self._id_runs()[2]
        return self.positive_pairs(blocks)[0].bincount(minlength=self.shape[0])

    def _id_runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates sorted by id, and for each query the start and the length of its run of equal
        ids.
        """
        ids, order = self.candidate_ids.sort(stable=True)
        first = torch.searchsorted(ids, self.query_ids)
        return order, first, torch.searchsorted(ids, self.query_ids, right=True) - first

    def pairwise(self, name: str, objective: str = "this objective") -> Tensor:
        """Compute a pairwise annotation as a block.

        Args:
            name: Field of `Targets`.
            objective: Name of the objective that reads it, for the error message.

        Returns:
            Values of shape ``[Q, C]``.

        Raises:
            ShapeError: If a function returns a block of another shape.
            MissingSupervision: If the annotation was not given. Names the supervision that provides
                it.
        """
        value = getattr(self, name)
        if value is None:
            raise missing_annotation(objective, name)
        if isinstance(value, Factors):
            return value.query_vectors @ value.candidate_vectors.T
        if isinstance(value, Tensor):
            return value
        block = value(self.rows, self.columns)
        if not isinstance(block, Tensor) or block.shape != self.shape:
            raise ShapeError(
                f"{name}: expected a function that returns {list(self.shape)}, rows x columns, got "
                f"a value {_describe(block)}."
            )
        return block

    def query_margin_or(self, default: float, objective: str) -> Tensor | float:
        """Return the adaptive margins of the queries, or a default.

        Args:
            default: Margin without adaptive margins.
            objective: Name of the objective, for the error message.

        Returns:
            Margins of shape ``[Q]``, or the default.

        Raises:
            MissingSupervision: If only the margins of the candidates are given. The margin is never
                replaced silently.
        """
        if self.query_margin is None and self.candidate_margin is not None:
            raise MissingSupervision(
                f"{objective}: expected query_margin and candidate_margin, got margins for one "
                "side only. Pass one for each direction."
            )
        return default if self.query_margin is None else self.query_margin


FIELD_NAMES = tuple(field.name for field in fields(Targets))


def to_id_tensor(ids: Ids, name: str) -> Tensor:
    """Convert ids to a LongTensor ``[N]``. Equal texts become equal integers >= 0 in each process."""
    if isinstance(ids, Tensor):
        tensor = ids
    elif _has_texts(ids):
        # Hashes of 63 bits. Two of a million texts have the same one with a probability of 5e-8.
        codes = [text.encode("utf-8", "surrogatepass") for text in ids]  # type: ignore[union-attr]
        return torch.tensor(
            [int.from_bytes(blake2b(code, digest_size=8).digest()) >> 1 for code in codes]
        )
    else:
        tensor = to_integer_tensor(ids, name)
    if tensor.dim() != 1 or (
        tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())
    ):
        raise ShapeError(
            f"{name}: expected one integer or text per item, got shape {list(tensor.shape)} and "
            f"dtype {tensor.dtype}. Number the items first."
        )
    return tensor.long()


def to_integer_tensor(values: Any, name: str) -> Tensor:
    """Convert numbers to a tensor."""
    if isinstance(values, Tensor):
        return values
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError, OverflowError):
        raise ShapeError(
            f"{name}: expected one integer or text per item, got {format_value(values)}. Number "
            "the items first."
        ) from None


def require_ids_of_one_kind(*ids: Ids, names: tuple[str, str]) -> None:
    """Check that two lists of ids are both integers or both texts. Others are never equal."""
    numbers = [values for values in ids if not _has_texts(values)]
    is_mixed = 0 < len(numbers) < len(ids)
    if is_mixed and to_integer_tensor(numbers[0], names[0]).numel():
        raise ShapeError(
            f"{', '.join(names)}: expected integers or texts for both, got one of each. Pass ids of "
            "the same kind."
        )


def _has_texts(ids: Any) -> bool:
    if isinstance(ids, np.ndarray):
        return ids.ndim == 1 and ids.dtype.kind in "UTO" and _has_texts(ids.tolist())
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str) and len(ids) > 0
    return is_list and all(isinstance(text, str) for text in ids)


def missing_annotation(objective: str, *names: str) -> MissingSupervision:
    """Make the error of an objective that needs an annotation, or one of several, which was not
    given.

    Args:
        objective: Name of the objective.
        *names: Fields of `Targets`, of which one is enough.

    Returns:
        The error, to be raised by the caller.

    Example:
        >>> str(missing_annotation("Ladder", "relevance"))
        'Ladder: expected relevance for every pair, got none. Pass Targets(..., relevance=...) or train with GradedSupervision.'
    """
    annotations = [
        annotation for name in names for annotation in ANNOTATIONS if annotation.name == name
    ]
    field_names = [
        annotation.name
        if annotation.shape == "pairwise"
        else f"{annotation.name} and {annotation.transposed_field}"
        for annotation in annotations
    ]
    pairwise = {annotation.shape == "pairwise" for annotation in annotations}
    scope = (
        "" if len(pairwise) > 1 else " for every pair" if pairwise == {True} else " for every item"
    )
    suppliers = sorted({name for annotation in annotations for name in annotation.suppliers})
    train = f" or train with {' or '.join(suppliers)}" if suppliers else ""
    return MissingSupervision(
        f"{objective}: expected {', or '.join(field_names)}{scope}, got none. Pass Targets(..., "
        f"{annotations[-1].name}=...){train}."
    )


def _check_pairwise(name: str, value: Any, shape: torch.Size) -> None:
    """Check the shape of a tensor or of factors. A function is checked when its block is computed."""
    if isinstance(value, Factors):
        sides = (value.query_vectors, value.candidate_vectors)
        if any(
            side.shape != (length, sides[0].shape[-1])
            for side, length in zip(sides, shape, strict=True)
        ):
            shapes = " and ".join(str(list(side.shape)) for side in sides)
            raise ShapeError(
                f"{name}: expected Factors of shapes [{shape[0]}, E] and [{shape[1]}, E], got "
                f"{shapes}."
            )
    elif isinstance(value, Tensor):
        if value.shape != shape:
            raise ShapeError(
                f"{name}: expected shape {list(shape)}, queries x candidates, got "
                f"{list(value.shape)}."
            )
    elif not callable(value):
        raise ShapeError(
            f"{name}: expected a tensor {list(shape)}, Factors, or a function of (rows, columns), "
            f"got a value {_describe(value)}."
        )


def _describe(value: Any) -> str:
    return (
        f"of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"of type {type(value).__name__}"
    )


def _move(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Factors):
        return Factors(value.query_vectors.to(device), value.candidate_vectors.to(device))
    return value.to(device) if isinstance(value, Tensor) else value


def annotations_needing_grad(targets: Targets) -> dict[str, Tensor]:
    """Find the annotation tensors that need a gradient, by names such as "weight" or
    "weight.query_vectors".
    """
    tensors: dict[str, Tensor] = {}
    for name in ANNOTATION_NAMES:
        value = getattr(targets, name)
        if isinstance(value, Factors):
            tensors |= {
                f"{name}.query_vectors": value.query_vectors,
                f"{name}.candidate_vectors": value.candidate_vectors,
            }
        elif isinstance(value, Tensor):
            tensors[name] = value
        elif (
            value is not None
            and len(targets.query_ids)
            and targets[:1].pairwise(name).requires_grad
        ):
            raise VisavisError(
                f"{name}: expected a function without gradient, got values with a gradient. Pass a "
                "tensor instead."
            )
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


def has_annotations(targets: Targets) -> bool:
    """Return whether the targets hold more than ids."""
    return targets.relation is not None or any(
        getattr(targets, name) is not None for name in ANNOTATION_NAMES
    )


def get_annotation_tensor(targets: Targets, name: str) -> Tensor:
    """Return an annotation tensor by a name of `annotations_needing_grad`."""
    value: Any = targets
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value


def replace_annotation_tensors(targets: Targets, new: dict[str, Tensor]) -> Targets:
    """Replace annotation tensors by name."""
    for name, tensor in new.items():
        field, _, part = name.partition(".")
        targets = replace(
            targets,
            **{field: replace(getattr(targets, field), **{part: tensor}) if part else tensor},
        )
    return targets


def with_annotation_leaves(targets: Targets, names: list[str]) -> tuple[Targets, list[Tensor]]:
    """Detach annotation tensors and make them leaves of a new graph."""
    leaves = {
        name: get_annotation_tensor(targets, name).detach().requires_grad_() for name in names
    }
    return replace_annotation_tensors(targets, leaves), list(leaves.values())


def equal_text_pairs(image: Tensor, key: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Pair images with all texts that are equal to one of their own.

    Args:
        image: Position of the image of each own text, shape ``[P]``.
        key: Key of this text, see `visavis.data.equal_texts.text_keys`, shape ``[P]``.
        keys: Keys of the texts to pair, shape ``[T]``.

    Returns:
        The image and the text of each pair, ascending, each pair once.

    Example:
        >>> equal_text_pairs(torch.tensor([0, 1]), torch.tensor([5, 7]), torch.tensor([7, 5, 5]))
        (tensor([0, 0, 1]), tensor([1, 2, 0]))
    """
    image, key = torch.stack([image, key]).unique(dim=1).contiguous()  # the texts of an image
    ascending, order = keys.sort(stable=True)
    first = torch.searchsorted(ascending, key)
    counts = torch.searchsorted(ascending, key, right=True) - first
    # Position in ``order``: the first text of a key, plus the number within its texts.
    starts = first - (counts.cumsum(0) - counts)
    texts = order[starts.repeat_interleave(counts) + torch.arange(int(counts.sum()))]
    return image.repeat_interleave(counts), texts
