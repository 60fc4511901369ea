"""Similarities and attention of regions and words, without attended vectors.

An attended vector $c = sum_i a_i x_i$ is only needed in its cosine with the fragment ``q`` that
attends. The cosine follows from $c q = sum_i a_i (x_i q)$, the products of regions with words,
and $|c|^2 = a G a$, the Gram matrix $G = X X^T$ of one item's fragments. Texts of similar
length are scored together, so that a long text does not pad all others.

Axes: A items whose C fragments are attended to (the context), B items whose Q fragments attend (the
query).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from visavis.core.encoded import AttentionWeights, Encoded, Parts, unit_rows
from visavis.core.fields import (
    DropoutRate,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    require_field,
)
from visavis.core.ragged import MaxSimDirection
from visavis.models.base import Matcher, get_mask, get_vectors, valid_mask
from visavis.models.layers import (
    EPSILON,
    Whitening,
    at_least_float32,
    build_mlp,
    mean_pool,
    pool_grid,
    xavier_linear,
)
from visavis.models.word_encoders import WordMatcherConfig, build_word_encoder

Normalization = Literal["clipped_l2norm", "softmax", "none"]
"""Normalization of similarities before the softmax over the context."""


@dataclass(frozen=True)
class RegionWordSimilarity:
    """Products of all fragments of the context with all fragments of the query.

    Attributes:
        values: Products, shape ``[A, C, B, Q]``.
        context: Items that are attended to.
        query: Items that attend.
        paired: Item i of the context meets only item i of the query, shape ``[N, C, 1, Q]``.
        transposed: Regions attend over words.
    """

    values: Tensor
    context: Encoded
    query: Encoded
    paired: bool = False
    transposed: bool = False

    @classmethod
    def compute(
        cls, visual: Encoded, text: Encoded, *, paired: bool = False
    ) -> RegionWordSimilarity:
        """Compute the products of regions with words, which attend. Paired: image i with text i."""
        regions = get_vectors(visual)
        words = get_vectors(text)
        if paired:
            return cls((regions @ words.transpose(1, 2))[:, :, None], visual, text, paired)
        # One product of [V R, D] and [D, T W] is faster than V T small ones.
        values = regions.flatten(0, 1) @ words.flatten(0, 1).T
        return cls(values.view(*regions.shape[:2], *words.shape[:2]), visual, text)

    @property
    def T(self) -> RegionWordSimilarity:
        """The same products with context and query exchanged."""
        values = self.values.transpose(1, 3) if self.paired else self.values.permute(2, 3, 0, 1)
        return RegionWordSimilarity(
            values.contiguous(), self.query, self.context, self.paired, not self.transposed
        )

    @property
    def context_mask(self) -> Tensor:
        """Valid fragments of the context, shape ``[A, C, 1, 1]``."""
        return valid_mask(self.context)[:, :, None, None]

    @property
    def query_mask(self) -> Tensor:
        """Valid fragments of the query, shape ``[A or 1, 1, B, Q]``."""
        return self._broadcast_query(valid_mask(self.query))[:, None]

    def attended_cosines(self, weights: Tensor) -> Tensor:
        """Compute the cosine ``[A, B, Q]`` of each fragment of the query with its attended vector.
        Weights have the shape of ``values`` and are 0 at padding.
        """
        fragments = get_vectors(self.context)
        # [A, C, C]: |c|^2 = a G a for each fragment of the query, without c itself.
        gram = fragments @ fragments.transpose(1, 2)
        squared_norms = ((gram @ weights.flatten(2)).view_as(weights) * weights).sum(1)
        # Clamped before the root, whose gradient is infinite at 0.
        norms = squared_norms.clamp(min=EPSILON**2).sqrt() * self._broadcast_query(
            get_vectors(self.query).norm(dim=-1)
        )
        return (weights * self.values).sum(1) / norms.clamp(min=EPSILON)

    def mean(self, fragments: Tensor) -> Tensor:
        """Average values ``[A, B, Q]`` over the fragments of the query to scores ``[V, T]``."""
        # [A or 1, B, Q]
        mask = self.query_mask[:, 0].to(fragments.dtype)
        return self._images_first((fragments * mask).sum(-1) / mask.sum(-1))

    def log_sum_exp(self, fragments: Tensor, inverse_temperature: float) -> Tensor:
        """Pool values ``[A, B, Q]`` over the query to ``[V, T]``: $(log sum_q exp(k x_q)) / k$."""
        # Padding adds exp(-inf) = 0 to the sum.
        scaled = (inverse_temperature * fragments).masked_fill(
            ~self.query_mask[:, 0], float("-inf")
        )
        return self._images_first(scaled.logsumexp(-1) / inverse_temperature)

    def _broadcast_query(self, values: Tensor) -> Tensor:
        """Broadcast values ``[B, Q]`` of the query's fragments against ``[A, B, Q]``."""
        return values[:, None] if self.paired else values[None]

    def _images_first(self, scores: Tensor) -> Tensor:
        return scores.T if self.transposed and not self.paired else scores


def attention_weights(
    similarity: RegionWordSimilarity,
    inverse_temperature: float,
    normalization: Normalization = "clipped_l2norm",
) -> Tensor:
    """Compute the attention ``[A, C, B, Q]`` of each fragment of the query, with sum 1 over the
    context: $softmax_c(inverse_temperature n(s_cq))$.
    """
    # SCAN (Lee et al., 2018), equations 2 and 3, and its code.
    values = similarity.values
    if normalization == "clipped_l2norm":
        # Leaky ReLU, then each fragment of the context has length 1 over the query.
        values = torch.nn.functional.leaky_relu(values, 0.1).masked_fill(
            ~similarity.query_mask, 0.0
        )
        values = l2_normalize(values)
    elif normalization == "softmax":
        values = values.masked_fill(~similarity.query_mask, float("-inf")).softmax(-1)
    return (
        (inverse_temperature * values)
        .masked_fill(~similarity.context_mask, float("-inf"))
        .softmax(1)
    )


def l2_normalize(values: Tensor) -> Tensor:
    """Divide each vector of the last axis by its length plus ``EPSILON``, as the code of SCAN and
    its successors does.
    """
    return values / (values.norm(dim=-1, keepdim=True) + EPSILON)


# Maximum ratio of the longest and the shortest text of a group.
MAX_LENGTH_RATIO = 4 / 3
# Texts up to this length belong to one group.
MIN_GROUP_LENGTH = 6
# Fewer texts are scored without groups. The cost of a block is measured on that few, and must be
# the cost of the longest text.
MIN_TEXTS = 16


def length_groups(lengths: Sequence[int]) -> list[slice]:
    """Group lengths in ascending order.

    Args:
        lengths: Lengths in ascending order.

    Returns:
        Slices of similar lengths.

    Example:
        >>> length_groups([3, 6, 8, 9, 11, 12, 70])
        [slice(0, 3, None), slice(3, 6, None), slice(6, 7, None)]
    """
    cuts = [0]
    for index, length in enumerate(lengths):
        if length > MAX_LENGTH_RATIO * max(lengths[cuts[-1]], MIN_GROUP_LENGTH):
            cuts.append(index)
    return [slice(*ends) for ends in pairwise([*cuts, len(lengths)])]


def truncate_items(items: Encoded, length: int) -> Encoded:
    """Keep the first positions of every part that has a mask."""

    def cut(parts: Parts) -> Parts:
        if isinstance(parts, Tensor):
            return parts[:, :length]
        masks = items.mask if isinstance(items.mask, dict) else {}
        return {name: part[:, :length] if name in masks else part for name, part in parts.items()}

    return Encoded(
        cut(items.vectors), None if items.mask is None else cut(items.mask), items.weights
    )


class RegionWordMatcher(Matcher):
    """Base class of matchers that keep every region and every word as a unit vector.

    Regions go through a linear layer. Token ids go through a bidirectional GRU whose directions are
    averaged. Word vectors of a frozen encoder, or of a trained text backbone, go through a linear
    layer.

    Args:
        config: The architecture.

    Source:
        SCAN (Lee et al., 2018), sections 3.2 and 3.3.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(WordMatcherConfig):
        """Architecture of a matcher of regions and words.

        Attributes:
            visual_granularity: Always "regions".
            embedding_dim: Dimensions of a region or word.
            dropout: Dropout of word embeddings, and of the hidden units of the context.
            context_dim: Hidden units of a network on the mean of the vectors of an item. Its output
                is added to each region or word, so that they also describe the whole item. For word
                vectors of a frozen encoder. 0: no context.
            input_dropout: Dropout of region features, word vectors and their means.
            region_grid: The regions of a square grid are averaged to a grid of this many rows. 0:
                unchanged.
            whiten_text: Whether to whiten word vectors of a frozen encoder with the mean and
                covariance of the means of the training captions.
        """

        visual_granularity: Literal["regions"] = "regions"
        embedding_dim: PositiveInt = 1024
        dropout: DropoutRate = 0.0
        context_dim: NonNegativeInt = 0
        input_dropout: DropoutRate = 0.0
        region_grid: NonNegativeInt = 0
        whiten_text: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("context_dim", "whiten_text"):
                is_used = bool(getattr(self, name)) and self.text_granularity != "words"
                require_field(
                    not is_used,
                    self,
                    name,
                    f'{0 if name == "context_dim" else False} unless texts are "words"',
                )

    visual_granularities = ("regions",)
    text_granularities = ("words", "tokens")
    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = xavier_linear(config.visual_input_dim, config.embedding_dim)
        self.input_dropout = nn.Dropout(config.input_dropout)
        self.whitening = Whitening(config.text_input_dim) if config.whiten_text else nn.Identity()
        self.visual_context = self._context_network(config.visual_input_dim)
        self.text_context = self._context_network(config.text_input_dim)
        self.text_backbone, self.text = build_word_encoder(
            config, config.embedding_dim, bidirectional=True, dropout=config.dropout
        )

    def parts(self) -> dict[str, list[nn.Module]]:
        return {
            "text_backbone": [self.text_backbone],
            "visual": [self.visual, self.visual_context or nn.Identity()],
            "text": [self.text, self.text_context or nn.Identity()],
        }

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        """Compute the attention of each word over regions, in the shape of ``products.values``."""
        raise NotImplementedError

    def attention(self, visual: Encoded, text: Encoded) -> AttentionWeights:
        products = self.similarity(self.encode_visual(visual), self.encode_text(text))
        weights = self.attention_weights(products)
        # Of one image and one text, [1, R, 1, W].
        return AttentionWeights(weights[0, :, 0].T, products.attended_cosines(weights)[0, 0])

    def similarity(
        self, visual: Encoded, text: Encoded, *, paired: bool = False
    ) -> RegionWordSimilarity:
        """Compute the products of regions with words. Paired: only of image i with text i."""
        return RegionWordSimilarity.compute(visual, text, paired=paired)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        """Compute scores from products: ``[V, T]``, or ``[N, 1]`` of pairs."""
        raise NotImplementedError

    def score_block(self, visual: Encoded, text: Encoded, *, paired: bool = False) -> Tensor:
        """Score texts that are all padded to the longest: ``[V, T]``, or ``[N, 1]`` of pairs."""
        return self.score_from_similarity(self.similarity(visual, text, paired=paired))

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        """Score texts in groups of similar length, each no longer than its longest text. All parts
        with a mask have the same mask.
        """
        mask = tree_leaves(text.mask)[0]
        if mask is None or len(text) < MIN_TEXTS:
            return self.score_block(visual, text)
        # The last valid position, because a mask may have gaps.
        positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        lengths, order = (mask * positions).amax(1).clamp(min=1).sort()
        ends = lengths.tolist()
        blocks = [
            self.score_block(visual, truncate_items(text[order[group]], ends[group.stop - 1]))
            for group in length_groups(ends)
        ]
        # Columns in the order of the texts.
        return torch.cat(blocks, 1)[:, order.argsort()]

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        return self.score_block(visual, text, paired=True)[:, 0]

    def _context_network(self, input_dim: int) -> nn.Module | None:
        """Build the network on the mean vector of an item."""
        config = self.config
        if not config.context_dim:
            return None
        layers = {"hidden_layers": 1, "hidden_dim": config.context_dim}
        return build_mlp(
            input_dim,
            config.embedding_dim,
            **layers,
            dropout=config.dropout,
            input_dropout=config.input_dropout,
        )

    def encode_visual(self, items: Encoded) -> Encoded:
        if self.config.region_grid:
            items = Encoded(pool_grid(get_vectors(items), self.config.region_grid))
        regions = self.visual(self.input_dropout(get_vectors(items)))
        if self.visual_context is not None:
            regions = _add_context(
                regions, self.visual_context(mean_pool(get_vectors(items), get_mask(items)))
            )
        return _unit_fragments(regions, items)

    def encode_text(self, items: Encoded) -> Encoded:
        items = self.text_backbone(items)
        if self.config.text_granularity != "words":
            return _unit_fragments(self.text(items), items)
        vectors = self.whitening(get_vectors(items))
        words = self.text(Encoded(self.input_dropout(vectors), items.mask))
        if self.text_context is not None:
            words = _add_context(words, self.text_context(mean_pool(vectors, get_mask(items))))
        return _unit_fragments(words, items)


def _add_context(fragments: Tensor, context: Tensor) -> Tensor:
    """Add the context of each item ``[N, D]`` to its fragments ``[N, L, D]``, both at length 1.
    Otherwise word vectors dominate at first.
    """
    return unit_rows(at_least_float32(fragments)) + unit_rows(at_least_float32(context))[:, None]


def _unit_fragments(fragments: Tensor, items: Encoded) -> Encoded:
    """Normalize fragments to length 1, in float32 at least, with 0 at padding."""
    fragments = unit_rows(at_least_float32(fragments))
    if isinstance(items.mask, Tensor):
        fragments = fragments.masked_fill(~items.mask[..., None], 0.0)
    return Encoded(fragments, items.mask)


class SCAN(RegionWordMatcher):
    """SCAN: stacked cross attention. Words attend over the regions of an image ("t2i"), or regions
    over the words ("i2t").

    Formula:
        $a_cq = softmax_c(inverse_temperature n(s_cq))$ and $r_q = cos(q, sum_c a_cq c)$. The
        score is the mean of $r_q$ over the fragments that attend ("mean"), or
        $(log sum_q exp(k r_q)) / k$ where $k$ is ``pool_inverse_temperature`` ("lse"). $n$: see ``attention_weights``.

    Source:
        Lee et al., Stacked Cross Attention for Image-Text Matching (2018), equations 1 to 8.

    Differs from:
        The released code, which forms every attended vector and loops over captions. The scores are
        the same.
    """

    name = "SCAN"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``SCAN``.

        Attributes:
            direction: Which side attends: words over regions ("t2i") or regions over words ("i2t").
            pool: Pooling of the cosines.
            inverse_temperature: Factor of similarities in the softmax, 9 for t2i and 4 for i2t in
                the paper.
            pool_inverse_temperature: Factor of the log-sum-exp, 6 for t2i, 5 (Flickr30K) or 20
                (COCO) for i2t in the paper.
            normalization: Normalization n of similarities before the softmax.
        """

        direction: Literal["t2i", "i2t"] = "t2i"
        pool: Literal["mean", "lse"] = "mean"
        inverse_temperature: PositiveFloat = 9.0
        pool_inverse_temperature: PositiveFloat = 6.0
        normalization: Normalization = "clipped_l2norm"

    config: Config

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        """Return attention over regions. If regions attend over words, it is their attention
        divided by its sum over the regions.
        """
        if self.config.direction == "t2i":
            return self._weights(products)
        # [B, Q, A, C] back to [A, C, B, Q].
        weights = self._weights(products.T).permute(2, 3, 0, 1) * products.query_mask
        return weights / weights.sum(1, keepdim=True).clamp(min=EPSILON)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        products = products if self.config.direction == "t2i" else products.T
        cosines = products.attended_cosines(self._weights(products))
        if self.config.pool == "mean":
            return products.mean(cosines)
        return products.log_sum_exp(cosines, self.config.pool_inverse_temperature)

    def _weights(self, products: RegionWordSimilarity) -> Tensor:
        return attention_weights(
            products, self.config.inverse_temperature, self.config.normalization
        )


class BFAN(RegionWordMatcher):
    """BFAN: bidirectional focal attention of words over regions and of regions over words.

    Formula:
        Attention $a$ as in SCAN is kept where $a_i C - sum_j a_j > 0$ ("equal") or
        $sum_j (a_i - a_j) sqrt(a_j) > 0$ ("prob"), and divided by its sum. The score is the mean cosine of words
        plus the mean cosine of regions, in [-2, 2].

    Source:
        Liu et al., Focus Your Attention (2019), equations 3 to 9. BFAN* in tables is the mean of
        both variants.
    """

    name = "BFAN"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``BFAN``.

        Attributes:
            focus: Which fragments keep their attention.
            inverse_temperature: Factor of similarities in the softmax.
        """

        focus: Literal["equal", "prob"] = "prob"
        inverse_temperature: PositiveFloat = 20.0

    config: Config

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        weights = attention_weights(products, self.config.inverse_temperature)
        if self.config.focus == "equal":
            kept = weights * products.context_mask.sum(1, keepdim=True) > weights.sum(
                1, keepdim=True
            )
        else:
            # sum_j (a_i - a_j) sqrt(a_j) > 0, without a matrix over i and j.
            roots = weights.sqrt()
            kept = weights * roots.sum(1, keepdim=True) > (weights * roots).sum(1, keepdim=True)
        focused = weights * kept
        return focused / focused.sum(1, keepdim=True).clamp(min=EPSILON)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        return self._mean_attended_cosine(products) + self._mean_attended_cosine(products.T)

    def _mean_attended_cosine(self, products: RegionWordSimilarity) -> Tensor:
        return products.mean(products.attended_cosines(self.attention_weights(products)))


class MaxSim(RegionWordMatcher):
    """MaxSim: late interaction. Half the mean over words of the best region, plus half the mean
    over regions of the best word.

    A pair costs only its products, because no attended vector is needed.

    Formula:
        $S = (mean_w max_r s_rw + mean_r max_w s_rw) / 2$ with cosines s. Direction "t2i" is the
        first mean alone, "i2t" the second.

    Source:
        Khattab and Zaharia, ColBERT (2020), for texts. Yao et al., FILIP (2022), section 3.1, for
        images and texts.

    Differs from:
        FILIP, whose two directions are two scores with a loss each. "t2i" and "i2t" give each of
        them.
    """

    name = "MaxSim"

    @dataclass(frozen=True, kw_only=True)
    class Config(RegionWordMatcher.Config):
        """Architecture of ``MaxSim``.

        Attributes:
            direction: Which means the score contains.
        """

        direction: MaxSimDirection = "both"

    config: Config

    @property
    def late_interaction(self) -> MaxSimDirection:
        return self.config.direction

    def attention_weights(self, products: RegionWordSimilarity) -> Tensor:
        """Return weight 1 for the best region, the first of equal ones."""
        best = products.values.masked_fill(~products.context_mask, float("-inf")).argmax(
            1, keepdim=True
        )
        return torch.zeros_like(products.values).scatter_(1, best, 1.0)

    def score_from_similarity(self, products: RegionWordSimilarity) -> Tensor:
        if self.config.direction == "t2i":
            return mean_best_region(products)
        if self.config.direction == "i2t":
            return _mean_best_word(products)
        return (mean_best_region(products) + _mean_best_word(products)) / 2


def mean_best_region(products: RegionWordSimilarity) -> Tensor:
    """Average the best region of each word over the words: ``[V, T]``, or ``[N, 1]`` of pairs."""
    return products.mean(products.values.masked_fill(~products.context_mask, float("-inf")).amax(1))


def _mean_best_word(products: RegionWordSimilarity) -> Tensor:
    """Return the mean over regions of the best word."""
    best = products.values.masked_fill(~products.query_mask, float("-inf")).amax(-1)
    present = products.context_mask[..., 0].to(best.dtype)
    return (best * present).sum(1) / present.sum(1)
