"""Encoded items of one side as tensors, their Matryoshka dimensions, and encoding in chunks.

>>> import torch
>>> encoder = torch.nn.Linear(4, 2)
>>> chunks = torch.ones(6, 4).split(2)
>>> torch.equal(encode_in_chunks(encoder, chunks), encoder(torch.ones(6, 4)))
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from visavis.core.encoded import Encoded, Items, all_tensors, concatenate
from visavis.core.errors import ShapeError, SpecError, format_value
from visavis.core.memory_budget import return_freed_memory

SomeItems = TypeVar("SomeItems", Tensor, Encoded, Items)


def float_tensors(items: Items) -> list[Tensor]:
    """List the tensors that can have a gradient.

    Args:
        items: A tensor or Encoded items.

    Returns:
        The floating-point tensors.
    """
    return [part for part in all_tensors(items) if part.is_floating_point()]


def embedding_matrix(items: Items) -> Tensor:
    """Return the embeddings of items that have one vector each.

    Args:
        items: A tensor or Encoded items.

    Returns:
        Embeddings of shape ``[N, D]``.

    Raises:
        ShapeError: If the items are not one floating-point vector each.
    """
    rows = items.vectors if isinstance(items, Encoded) else items
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        raise ShapeError(
            "cosine scores: expected one floating-point vector per item, [N, D]. Pass "
            "PairLoss(score=...) for regions, words or named parts."
        )
    return rows


def concatenate_items(items: Items, extra_items: Items, name: str) -> Items:
    """Append extra items to the items of a batch.

    Args:
        items: Items of the batch.
        extra_items: Items to append.
        name: Name of the extra items, for the error message.

    Returns:
        All items.

    Raises:
        ShapeError: If the two differ in kind or dimension.
    """
    if isinstance(items, Encoded) and isinstance(extra_items, Encoded):
        return concatenate([items, extra_items])
    if (
        isinstance(items, Encoded)
        or isinstance(extra_items, Encoded)
        or items.shape[1:] != extra_items.shape[1:]
    ):
        raise ShapeError(
            f"{name}: expected the kind and dimension of the batch, both tensors [N, D] or both "
            "Encoded."
        )
    return torch.cat([items, extra_items])


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


def smaller_dims(dims: Sequence[int], items: Items) -> tuple[int, ...]:
    """Select the Matryoshka dimensions below the dimension of the embeddings.

    Args:
        dims: Matryoshka dimensions.
        items: The items.

    Returns:
        The smaller dimensions.

    Raises:
        ShapeError: If one is larger than the dimension of the embeddings.
    """
    if not dims:
        return ()
    embedding_dim = embedding_matrix(items).shape[1]
    if max(dims) > embedding_dim:
        raise ShapeError(
            f"matryoshka_dims: expected at most {embedding_dim}, the dimension of the embeddings, "
            f"got {', '.join(map(str, dims))}."
        )
    return tuple(dim for dim in dims if dim < embedding_dim)


def truncate_embeddings(items: SomeItems, embedding_dim: int) -> SomeItems:
    """Keep the leading dimensions of the embeddings.

    Args:
        items: Items with one vector each.
        embedding_dim: Number of dimensions to keep.

    Returns:
        The truncated items, or the items themselves if they have this dimension.

    Example:
        >>> import torch
        >>> truncate_embeddings(torch.eye(3), 1).tolist()
        [[1.0], [0.0], [0.0]]
    """
    rows = embedding_matrix(items)
    if rows.shape[1] == embedding_dim:
        return items
    return (
        rows[:, :embedding_dim]
        if isinstance(items, Tensor)
        else replace(items, vectors=rows[:, :embedding_dim])
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
    return concatenate(encoded) if isinstance(encoded[0], Encoded) else torch.cat(encoded)
