"""Attention of words over regions, or of regions over words, without ever forming an attended vector.

An attended vector ``c = sum_i a_i x_i`` is only used in its cosine with the fragment ``q`` that attends. So it is never formed at its
width: ``c q = sum_i a_i (x_i q)`` follows from the products of regions with words, and ``|c|^2 = a G a`` from the Gram matrix
``G = X X^T`` of one item's fragments.

Axes: A items whose C fragments are attended to (the context), B items whose Q fragments attend (the query).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visavis.models.base import vectors
from visavis.types import Encoded

Normalization = Literal["clipped_l2norm", "softmax", "none"]

SMALLEST = 1e-8
"""The least that a norm or a product of norms is divided by."""


@dataclass(frozen=True)
class Products:
    """The products of all fragments of the context with all of the query: ``values [A, C, B, Q]``.

    paired: item i of the context meets item i of the query alone, ``[N, C, 1, Q]``. turned: regions ask words.
    """

    values: Tensor
    context: Encoded
    query: Encoded
    paired: bool = False
    turned: bool = False

    @classmethod
    def of(cls, visual: Encoded, text: Encoded) -> Products:
        """Words ask the regions of every image."""
        regions, words = vectors(visual), vectors(text)
        values = regions.flatten(0, 1) @ words.flatten(0, 1).T
        return cls(values.view(*regions.shape[:2], *words.shape[:2]), visual, text)

    @classmethod
    def of_pairs(cls, visual: Encoded, text: Encoded) -> Products:
        """Words of text i ask the regions of image i."""
        return cls((vectors(visual) @ vectors(text).transpose(1, 2))[:, :, None], visual, text, paired=True)

    @property
    def T(self) -> Products:
        """The same with context and query exchanged."""
        values = self.values.transpose(1, 3) if self.paired else self.values.permute(2, 3, 0, 1)
        return Products(values.contiguous(), self.query, self.context, self.paired, not self.turned)

    @property
    def context_mask(self) -> Tensor:
        """Which fragments of the context there are, ``[A, C, 1, 1]``."""
        return mask_of(self.context)[:, :, None, None]

    @property
    def query_mask(self) -> Tensor:
        """Which fragments of the query there are, ``[A or 1, 1, B, Q]``."""
        return self._of_query(mask_of(self.query))[:, None]

    def cosines(self, weights: Tensor) -> Tensor:
        """The cosine of each fragment of the query with what it attends to, ``[A, B, Q]``. weights: as ``values``, 0 where nothing is."""
        fragments = vectors(self.context)
        gram = fragments @ fragments.transpose(1, 2)
        squared = ((gram @ weights.flatten(2)).view_as(weights) * weights).sum(1)
        norms = squared.clamp(min=SMALLEST**2).sqrt() * self._of_query(vectors(self.query).norm(dim=-1))
        return (weights * self.values).sum(1) / norms.clamp(min=SMALLEST)

    def mean(self, fragments: Tensor) -> Tensor:
        """The mean over the fragments of the query, ``[A, B, Q] -> [V, T]``."""
        mask = self.query_mask[:, 0].to(fragments.dtype)
        return self._by_image((fragments * mask).sum(-1) / mask.sum(-1))

    def log_sum_exp(self, fragments: Tensor, sharpness: float) -> Tensor:
        """``log sum_q exp(sharpness x_q) / sharpness`` over the fragments of the query, ``[A, B, Q] -> [V, T]``."""
        present = (sharpness * fragments).masked_fill(~self.query_mask[:, 0], float("-inf"))
        return self._by_image(present.logsumexp(-1) / sharpness)

    def _of_query(self, facts: Tensor) -> Tensor:
        """Facts of the query's fragments ``[B, Q]``, to be set beside ``[A, B, Q]``."""
        return facts[:, None] if self.paired else facts[None]

    def _by_image(self, scores: Tensor) -> Tensor:
        return scores.T if self.turned and not self.paired else scores


def attention(products: Products, sharpness: float, normalization: Normalization = "clipped_l2norm") -> Tensor:
    """How much each fragment of the query attends to those of the context: ``[A, C, B, Q]``, sum 1 over the context.

    Formula: ``softmax_c(sharpness * n(s_cq))``. n: "clipped_l2norm": leaky ReLU (0.1), then each fragment of the context at length
    1 over the query; "softmax": softmax over the query; "none": as it is. Source: SCAN (Lee et al., 2018), equations 2 and 3, and its code.
    """
    values = products.values
    if normalization == "clipped_l2norm":
        values = torch.nn.functional.leaky_relu(values, 0.1).masked_fill(~products.query_mask, 0.0)
        values = at_length_one(values)
    elif normalization == "softmax":
        values = values.masked_fill(~products.query_mask, float("-inf")).softmax(-1)
    return (sharpness * values).masked_fill(~products.context_mask, float("-inf")).softmax(1)


def at_length_one(values: Tensor) -> Tensor:
    """Each vector of the last axis divided by its length and a little, as the code of SCAN and its successors does."""
    return values / (values.norm(dim=-1, keepdim=True) + SMALLEST)


def mask_of(items: Encoded) -> Tensor:
    """Which fragments there are ``[N, L]``."""
    if items.mask is None:
        return torch.ones(vectors(items).shape[:2], dtype=torch.bool, device=vectors(items).device)
    assert isinstance(items.mask, Tensor)
    return items.mask
