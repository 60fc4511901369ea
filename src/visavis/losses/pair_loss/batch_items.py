"""Items of a batch: their check, their embeddings, Matryoshka dimensions, and encoding in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from visavis.core.encoded import Encoded, Items, Vectors, as_encoded, concatenate
from visavis.core.errors import ShapeError, SpecError, format_value
from visavis.core.memory_budget import return_freed_memory


def embedding_matrix(items: Items) -> Tensor:
    """Return the embeddings ``[N, D]`` of items that have one vector each."""
    rows = as_encoded(items).vectors
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        raise ShapeError(
            "cosine scores: expected one floating-point vector per item, [N, D]. Pass "
            "PairLoss(score=...) for regions, words or named parts."
        )
    return rows


def concatenate_items(items: Encoded, extra_items: Encoded, name: str) -> Encoded:
    """Append extra items to the items of a batch."""
    are_tensors = [isinstance(each, Vectors) for each in (items, extra_items)]
    if are_tensors[0] != are_tensors[1] or (
        are_tensors[0] and items.vectors.shape[1:] != extra_items.vectors.shape[1:]  # type: ignore[union-attr]
    ):
        raise ShapeError(
            f"{name}: expected the kind and dimension of the batch, both tensors [N, D] or both "
            "Encoded."
        )
    return concatenate([items, extra_items])


def validate_matryoshka_dims(dims: Sequence[int]) -> tuple[int, ...]:
    """Check and sort Matryoshka dimensions.

    Args:
        dims: Numbers of leading dimensions at which a loss is computed.

    Returns:
        The distinct dimensions in ascending order.

    Raises:
        SpecError: If they are not integers >= 1.

    Source:
        Kusupati et al., Matryoshka Representation Learning (2022): the sum of the losses at all
        dimensions, each of weight 1.

    Example:
        >>> validate_matryoshka_dims([256, 64, 256])
        (64, 256)
    """
    values: list[Any] = list(dims) if isinstance(dims, list | tuple) else [dims]
    if not all(
        isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values
    ):
        raise SpecError(
            "matryoshka_dims: expected a list of integers >= 1, such as [64, 256], got "
            f"{format_value(dims)}."
        )
    return tuple(sorted(set(values)))


def smaller_dims(dims: Sequence[int], items: Encoded) -> tuple[int, ...]:
    """Select the Matryoshka dimensions below the dimension of the embeddings."""
    if not dims:
        return ()
    embedding_dim = embedding_matrix(items).shape[1]
    if max(dims) > embedding_dim:
        raise ShapeError(
            f"matryoshka_dims: expected at most {embedding_dim}, the dimension of the embeddings, "
            f"got {', '.join(map(str, dims))}."
        )
    return tuple(dim for dim in dims if dim < embedding_dim)


def truncate_embeddings(items: Encoded, embedding_dim: int) -> Encoded:
    """Keep the leading dimensions of the embeddings."""
    rows = embedding_matrix(items)
    return (
        items if rows.shape[1] == embedding_dim else replace(items, vectors=rows[:, :embedding_dim])
    )


def encode_in_chunks(encode: Callable[[Any], Items], chunks: Iterable[Any]) -> Items:
    """Encode items chunk by chunk, with the activations of one chunk in memory.

    Activations are recomputed in the backward pass. Gradients are exact, including dropout, because
    a chunk gets the same random numbers again. BatchNorm statistics are those of the chunks and are
    updated twice.

    Args:
        encode: Encodes one chunk.
        chunks: Arguments of ``encode``.

    Returns:
        The items of all chunks.

    Raises:
        ShapeError: If ``chunks`` is empty.
    """
    # Otherwise the heap grows to several times the activations of a chunk, because chunks are freed
    # and allocated in turns.
    return_freed_memory()
    encoded = [checkpoint(encode, chunk, use_reentrant=False) for chunk in chunks]
    if not encoded:
        raise ShapeError("chunks: expected at least one, got none. A chunk may hold no items.")
    return concatenate([as_encoded(chunk) for chunk in encoded]).score_input()


def as_items(name: str, items: Items) -> Encoded:
    """Check the items of an argument, and wrap a tensor. All further code reads one type."""
    if not (isinstance(items, Encoded) or (isinstance(items, Tensor) and items.dim())):
        raise ShapeError(
            f"{name}: expected a tensor [N, D] or Encoded items, got {type(items).__name__}."
        )
    encoded = as_encoded(items)
    # Items without values would be copied to the device of the others, with whatever its memory
    # holds.
    if any(part.is_meta for part in encoded.tensors):
        raise ShapeError(
            f"{name}: expected tensors with values, got one on the device meta. Load the "
            "weights of the model first."
        )
    return encoded
