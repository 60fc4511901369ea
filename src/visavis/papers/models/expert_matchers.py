"""Matchers of several experts per video: gates, NetVLAD, a score that the text weights, CE and MMT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from visavis.core.blocking import ScoreCost
from visavis.core.encoded import Encoded, seconds_part, unit_rows
from visavis.core.errors import ShapeError
from visavis.core.fields import (
    DropoutRate,
    LayerCount,
    NonNegativeInt,
    PositiveInt,
    require_field,
)
from visavis.models.base import Matcher, get_mask, get_part, get_vectors, valid_mask
from visavis.models.encoders.text_backbone import TextBackbone
from visavis.models.layers import MaskedBatchNorm, at_least_float32, max_pool, mean_pool
from visavis.models.word_encoders import GRUWordEncoder, WordMatcherConfig, pool_words


class GatedEmbedding(nn.Module):
    """Gated embedding unit: a linear layer whose output gates itself.

    Args:
        input_dim: Dimensions of the input.
        output_dim: Dimensions of the output.

    Formula:
        $unit(y * sigmoid(BN(W_2 y + b_2)))$ with $y = W_1 x + b_1$ and an elementwise product.

    Source:
        Miech et al., Learning a Text-Video Embedding from Incomplete and Heterogeneous Data (2018),
        section 3.1.
    """

    def __init__(self, input_dim: int, output_dim: int):
        super().__init__()
        self.linear = nn.Linear(input_dim, output_dim)
        self.gate = nn.Linear(output_dim, output_dim)
        self.norm = MaskedBatchNorm(output_dim)

    def forward(self, items: Tensor) -> Tensor:
        """Map vectors ``[N, input_dim]`` to unit vectors ``[N, output_dim]``."""
        mapped = self.linear(items)
        return unit_rows(mapped * self.norm(self.gate(mapped)).sigmoid())


class CollaborativeGating(nn.Module):
    """Gates of each expert of a video, from the expert itself and its relation to every other
    expert that is present.

    Args:
        num_experts: Number of experts.
        embedding_dim: Dimensions of an expert.

    Formula:
        $unit(x_i * sigmoid(BN(h(mean_j g(x_i, x_j))) + BN(W_i x_i)))$ over the other experts j
        that are present. g and h have one hidden layer with ReLU and are shared by all experts.
        Without another expert the mean is 0.

    Source:
        Liu et al., Use What You Have: Video Retrieval Using Representations From Collaborative
        Experts (2019), section 3.2.

    Differs from:
        The paper sums over the others. The released code takes the mean, as here, but an expert
        meets itself, and those before it in the list after their own gating. Its g has three layers
        with Mish and batch norm. It has no h.
    """

    def __init__(self, num_experts: int, embedding_dim: int):
        super().__init__()
        self.self_projection = nn.Linear(embedding_dim, embedding_dim)
        self.other_projection = nn.Linear(embedding_dim, embedding_dim, bias=False)
        self.relation_output = nn.Linear(embedding_dim, embedding_dim)
        self.attention = nn.Sequential(
            nn.Linear(embedding_dim, embedding_dim),
            nn.ReLU(),
            nn.Linear(embedding_dim, embedding_dim),
        )
        self.gates = nn.ModuleList(
            nn.Linear(embedding_dim, embedding_dim) for _ in range(num_experts)
        )
        self.gate_norms = nn.ModuleList(MaskedBatchNorm(embedding_dim) for _ in range(num_experts))
        self.attention_norms = nn.ModuleList(
            MaskedBatchNorm(embedding_dim) for _ in range(num_experts)
        )

    def forward(self, experts: Tensor, present: Tensor) -> Tensor:
        """Gate the experts ``[N, E, D]``. The result is 0 where one is missing."""
        # [N, E, E, 1]: the experts j that are present and differ from i.
        same_expert = torch.eye(experts.shape[1], dtype=torch.bool, device=experts.device)
        others = (present[:, None, :] & ~same_expert)[..., None]
        # mean_j g(x_i, x_j), [N, E, D]. g and h are linear around a ReLU: the map of a
        # concatenation is the sum of two maps, the mean of maps the map of the mean.
        hidden = (
            self.self_projection(experts)[:, :, None] + self.other_projection(experts)[:, None]
        ).relu()
        count = others.sum(2)
        relations = self.relation_output((hidden * others).sum(2) / count.clamp_min(1))
        # Without another expert the relation is 0, not the bias of its layer.
        attention = self.attention(relations * (count > 0))
        gated = [
            experts[:, i]
            * (
                attention_norm(attention[:, i], present[:, i])
                + gate_norm(gate(experts[:, i]), present[:, i])
            ).sigmoid()
            for i, (gate, gate_norm, attention_norm) in enumerate(
                zip(self.gates, self.gate_norms, self.attention_norms, strict=True)
            )
        ]
        return unit_rows(torch.stack(gated, 1)) * present[..., None]


class NetVLAD(nn.Module):
    """Sums of residuals of vectors to learned centers, with soft assignment. The order of the
    vectors has no effect.

    Args:
        input_dim: Dimensions of a vector.
        num_clusters: Number of centers.
        ghost_clusters: Number of further clusters that take a share of each vector and are left out
            of the sums.

    Formula:
        $V_k = unit(sum_l a_lk (x_l - c_k))$ with $a_l = softmax(BN(x_l W))$. All $V_k$ are
        concatenated and normalized to length 1.

    Source:
        Arandjelović et al. (2016). With batch norm: Miech et al., Learnable pooling with context
        gating (2017).

    Differs from:
        In released codes, padding is assigned to clusters and enters the batch statistics. Here it
        does neither.
    """

    def __init__(self, input_dim: int, num_clusters: int, ghost_clusters: int = 0):
        super().__init__()
        self.assign = nn.Linear(input_dim, num_clusters + ghost_clusters, bias=False)
        self.centers = nn.Parameter(torch.empty(num_clusters, input_dim))
        self.norm = MaskedBatchNorm(num_clusters + ghost_clusters)
        self.output_dim = num_clusters * input_dim
        nn.init.normal_(self.assign.weight, std=input_dim**-0.5)
        nn.init.normal_(self.centers, std=input_dim**-0.5)

    def forward(self, items: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool vectors ``[N, L, D]`` to ``[N, num_clusters D]``, 0 without valid vectors."""
        present = valid_mask(Encoded(items, mask))
        # Shape [N, L, clusters], 0 at padding and without ghost clusters.
        assignment = (
            self.norm(self.assign(items), present).softmax(-1)[..., : len(self.centers)]
            * present[..., None]
        )
        # sum_l a_lk (x_l - c_k) = sum_l a_lk x_l - c_k sum_l a_lk, without residuals of each
        # vector.
        sums = assignment.transpose(1, 2) @ items.masked_fill(~present[..., None], 0.0)
        # Shape [N, clusters, D].
        residuals = sums - assignment.sum(1)[..., None] * self.centers
        return unit_rows(unit_rows(residuals).flatten(1))


@dataclass(frozen=True)
class ExpertFeatures:
    """Features of one expert.

    Attributes:
        features: Features, shape ``[N, L, D]``, 0 at padding.
        mask: Valid features, shape ``[N, L]``.
        seconds: Time of each feature, shape ``[N, L]``, -1 where unknown. None: all unknown.
    """

    features: Tensor
    mask: Tensor
    seconds: Tensor | None = None

    @cached_property
    def present(self) -> Tensor:
        """Which videos have the expert, shape ``[N]``."""
        return self.mask.any(1)

    def pool(self, pooling: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Pool the features of each video, ``[N, D]``, 0 where the expert is missing."""
        # A missing expert pools its first vector, which is 0: a mean of nothing would be NaN.
        first = torch.arange(self.mask.shape[1], device=self.mask.device) == 0
        return pooling(self.features, self.mask | (first & ~self.present[:, None]))


class ExpertMatcher(Matcher):
    """Base class of matchers with named experts of a video, and one text embedding per expert,
    weighted by the text.

    Texts are a vector of a frozen encoder ("pooled"), or words that ``word_pool`` pools: of a
    frozen encoder ("words"), learned through a GRU, or the states of a trained text backbone
    ("tokens"), whose first state is BERT's own of the whole text.

    Args:
        config: The architecture.

    Formula:
        $S = (sum_e p_e w_e <v_e, t_e>) / (sum_e p_e w_e)$ with $p_e = 1$ if the video has expert e,
        else 0, and $w = softmax(M h)$ of the text's vector h. $t_e$ is a gated embedding of h.
        A video without experts scores 0.

    Source:
        Miech et al., Learning a Text-Video Embedding from Incomplete and Heterogeneous Data (2018),
        equations 3 to 5.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(WordMatcherConfig):
        """Architecture of a matcher of experts.

        Attributes:
            visual_granularity: Always "experts".
            experts: Dimensions of each expert's features, by name.
            embedding_dim: Dimensions of the embeddings.
            hidden_dim: Units of the GRU.
            bidirectional: Whether the GRU has two directions, which are averaged.
            word_pool: Pooling of words. "vlad": NetVLAD.
            text_clusters: Number of NetVLAD clusters of words.
            text_ghost_clusters: Number of further clusters whose words are left out.
            dropout: Dropout of word embeddings.
        """

        visual_granularity: Literal["experts"] = "experts"
        experts: dict[str, PositiveInt]
        embedding_dim: PositiveInt = 512
        hidden_dim: PositiveInt = 512
        bidirectional: bool = False
        word_pool: Literal["vlad", "first", "last", "max", "mean"] = "last"
        text_clusters: PositiveInt = 32
        text_ghost_clusters: NonNegativeInt = 0
        dropout: DropoutRate = 0.0

        def __post_init__(self) -> None:
            super().__post_init__()
            require_field(
                bool(self.experts),
                self,
                "experts",
                "the name and dimensions of at least one expert",
            )
            require_field(
                self.visual_input_dim == sum(self.experts.values()),
                self,
                "visual_input_dim",
                "the sum of the experts' dimensions",
            )

    visual_granularities = ("experts",)
    text_granularities = ("pooled", "words", "tokens")
    config: Config
    visual: nn.Module
    """Maps the experts, in the order of the config, to unit vectors ``[N, E, embedding_dim]``, 0
    where an expert is missing.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.text_backbone: nn.Module = nn.Identity()
        self.word_encoder = None
        # Dimensions of a text, or of its words, after each module.
        input_dim = config.text_input_dim
        if config.text_backbone:
            self.text_backbone = backbone = TextBackbone(config.text_backbone, config.word_noise)
            input_dim = backbone.hidden_dim
        elif config.text_granularity == "tokens":
            sizes = input_dim, config.word_dim, config.hidden_dim
            self.word_encoder = GRUWordEncoder(
                *sizes, bidirectional=config.bidirectional, dropout=config.dropout
            )
            input_dim = config.hidden_dim
        self.word_netvlad = None
        if config.word_pool == "vlad" and config.text_granularity != "pooled":
            self.word_netvlad = NetVLAD(input_dim, config.text_clusters, config.text_ghost_clusters)
            input_dim = self.word_netvlad.output_dim
        self.text_embeddings = nn.ModuleList(
            GatedEmbedding(input_dim, config.embedding_dim) for _ in config.experts
        )
        self.mixture = nn.Linear(input_dim, len(config.experts))

    def parts(self) -> dict[str, list[nn.Module]]:
        word_modules = [
            module for module in (self.word_encoder, self.word_netvlad) if module is not None
        ]
        return {
            "visual": [self.visual],
            "text": [*word_modules, self.text_embeddings, self.mixture],
            "text_backbone": [self.text_backbone],
        }

    def encode_visual(self, items: Encoded) -> Encoded:
        """Encode videos as $v_e$ ``[V, E, embedding_dim]``, 0 where the expert is missing, with the
        weights $p_e$.
        """
        assert isinstance(items.vectors, dict)
        experts = []
        for name in self.config.experts:
            part = get_part(items, name)
            seconds = items.vectors.get(seconds_part(name))
            mask = valid_mask(part)
            features = get_vectors(part).masked_fill(~mask[..., None], 0.0)
            # [N, L] from [N, L, 1].
            times = None if seconds is None else seconds[..., 0]
            experts.append(ExpertFeatures(features, mask, times))
        embeddings = at_least_float32(self.visual(experts))
        return Encoded(
            embeddings,
            weights=torch.stack([expert.present for expert in experts], 1).to(embeddings.dtype),
        )

    def encode_text(self, items: Encoded) -> Encoded:
        """Encode texts as $w_e t_e$ ``[T, E, embedding_dim]``, with the weights $w_e$."""
        items = self.text_backbone(items)
        text = get_vectors(items) if self.word_encoder is None else self.word_encoder(items)
        if self.word_netvlad is not None:
            text = self.word_netvlad(text, get_mask(items))
        elif self.config.text_granularity != "pooled":
            text = pool_words(text, get_mask(items), self.config.word_pool)
        # One vector per text now, [T, D].
        weights = at_least_float32(self.mixture(text)).softmax(-1)
        embeddings = torch.stack(
            [at_least_float32(embedding(text)) for embedding in self.text_embeddings], 1
        )
        # The weights are multiplied into the vectors, so that a score is one matrix product.
        return Encoded(embeddings * weights[..., None], weights=weights)

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        experts, present = _with_weights(visual)
        weighted, weights = _with_weights(text)
        # Missing experts are 0 and texts contain their weights, so the sum over experts is one
        # product.
        return (
            experts.flatten(1)
            @ weighted.flatten(1).T
            / (present @ weights.T).add_(_without_experts(present))
        )

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        experts, present = _with_weights(visual)
        weighted, weights = _with_weights(text)
        return (experts * weighted).sum((-2, -1)) / (
            (present * weights).sum(-1) + _without_experts(present)[:, 0]
        )

    def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost | None:
        """Declare the cost of products, sums of weights and quotients. Training holds each of them
        and a gradient of each.
        """
        itemsize = get_vectors(visual).dtype.itemsize
        return ScoreCost(inference_bytes=3 * itemsize, training_bytes=9 * itemsize)


def _with_weights(items: Encoded) -> tuple[Tensor, Tensor]:
    assert items.weights is not None
    return get_vectors(items), items.weights


def _without_experts(present: Tensor) -> Tensor:
    """Return 1 for a video without experts, else 0, ``[V, 1]``."""
    # Added to the sum of weights, so that score and gradient are 0 instead of 0 / 0.
    return (present.sum(-1, keepdim=True) == 0).to(present.dtype)


class CE(ExpertMatcher):
    """CE: collaborative experts. Features are averaged over time, or pooled by NetVLAD, and gated
    by the other experts.

    Each expert goes through a linear layer to length 1, then through ``CollaborativeGating``. The
    order of frames has no effect. Texts and score are those of every ``ExpertMatcher``.

    Args:
        config: The architecture.

    Source:
        Liu et al., Use What You Have: Video Retrieval Using Representations From Collaborative
        Experts (2019).

    Differs from:
        The released code averages the scores of a training video's captions before the loss, where
        it samples several captions.
    """

    name = "CE"

    @dataclass(frozen=True, kw_only=True)
    class Config(ExpertMatcher.Config):
        """Architecture of ``CE``.

        Attributes:
            word_pool: Pooling of words.
            netvlad_clusters: Number of NetVLAD clusters, by the name of an expert. Other experts
                are averaged over time.
        """

        word_pool: Literal["vlad", "first", "last", "max", "mean"] = "vlad"
        netvlad_clusters: dict[str, PositiveInt] = field(default_factory=dict)

        def __post_init__(self) -> None:
            super().__post_init__()
            require_field(
                set(self.netvlad_clusters) <= set(self.experts),
                self,
                "netvlad_clusters",
                f"names among {', '.join(self.experts)}",
            )

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = CollaborativeExpertEncoder(config)


class CollaborativeExpertEncoder(nn.Module):
    """Encoder of videos with one vector per expert, gated by one another.

    Args:
        config: The architecture.
    """

    def __init__(self, config: CE.Config):
        super().__init__()
        clusters = config.netvlad_clusters
        self.netvlads = nn.ModuleDict(
            {
                # Keys are numbers, because a name of an expert may have a dot, which a module name
                # may not.
                str(i): NetVLAD(dim, clusters[name])
                for i, (name, dim) in enumerate(config.experts.items())
                if name in clusters
            }
        )
        pooled_dims = [dim * clusters.get(name, 1) for name, dim in config.experts.items()]
        self.projections = nn.ModuleList(
            nn.Linear(dim, config.embedding_dim) for dim in pooled_dims
        )
        self.gating = CollaborativeGating(len(pooled_dims), config.embedding_dim)

    def forward(self, experts: Sequence[ExpertFeatures]) -> Tensor:
        """Encode the experts, in the order of the config, as unit vectors ``[N, E, D]``."""
        pooled = [
            self.netvlads[str(i)](expert.features, expert.mask)
            if str(i) in self.netvlads
            else expert.pool(mean_pool)
            for i, expert in enumerate(experts)
        ]
        projected = [
            unit_rows(project(vectors))
            for project, vectors in zip(self.projections, pooled, strict=True)
        ]
        gated: Tensor = self.gating(
            torch.stack(projected, 1), torch.stack([expert.present for expert in experts], 1)
        )
        return gated


class MMT(ExpertMatcher):
    """MMT: multi-modal transformer. The features of all experts at all times attend to one another.

    Each expert's features go through a linear layer to length 1, plus an embedding of the expert
    and one of the time. The sequence starts with a video token and one aggregate token per expert,
    the projection of its maximum over time. The encoder's state of this token is the vector of the
    expert. Texts and score are those of every ``ExpertMatcher``.

    Args:
        config: The architecture.

    Source:
        Gabeur et al., Multi-modal Transformer for Video Retrieval (2020), section 3.

    Differs from:
        In the released code, missing experts count in the score of MSR-VTT, and all weights start
        at a standard deviation of 0.02, at which a narrow model does not start to use the order.
        The paper has further embeddings for aggregates and unknown times. In the code, and with
        ``time_unit="second"`` here, both have the embedding of the first second.
    """

    name = "MMT"

    @dataclass(frozen=True, kw_only=True)
    class Config(ExpertMatcher.Config):
        """Architecture of ``MMT``.

        Attributes:
            layers: Layers of the transformer.
            heads: Attention heads.
            feedforward_dim: Hidden dimensions of the feed-forward layers.
            attention_dropout: Dropout of the transformer.
            max_length: Maximum number of features per expert. ``visual.max_length`` samples longer
                ones.
            time_unit: Time of a feature: its position in the sequence, or its second in the video.
            max_seconds: Number of embeddings of seconds. Later features share the last one.
        """

        layers: LayerCount = 4
        heads: PositiveInt = 4
        feedforward_dim: PositiveInt = 3072
        attention_dropout: DropoutRate = 0.1
        max_length: PositiveInt = 30
        time_unit: Literal["position", "second"] = "position"
        max_seconds: PositiveInt = 32

        def __post_init__(self) -> None:
            super().__post_init__()
            require_field(
                self.embedding_dim % self.heads == 0,
                self,
                "heads",
                f"a divisor of embedding_dim, {self.embedding_dim}",
            )

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = ExpertTransformer(config)


class ExpertTransformer(nn.Module):
    """Encoder of videos with one vector per expert.

    Args:
        config: The architecture.
    """

    def __init__(self, config: MMT.Config):
        super().__init__()
        dim = config.embedding_dim
        self.max_length = config.max_length
        self.reads_seconds = config.time_unit == "second"
        self.projections = nn.ModuleList(
            nn.Linear(inputs, dim) for inputs in config.experts.values()
        )
        self.video_token = nn.Parameter(torch.zeros(dim))
        self.expert_embeddings = nn.Embedding(len(config.experts), dim)
        # Row 0 is the one of the aggregate token.
        self.time_embeddings = nn.Embedding(
            config.max_seconds if self.reads_seconds else 1 + config.max_length, dim
        )
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.dropout = nn.Dropout(config.attention_dropout)
        layer = nn.TransformerEncoderLayer(
            dim,
            config.heads,
            config.feedforward_dim,
            config.attention_dropout,
            "gelu",
            layer_norm_eps=1e-12,
            batch_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        # Length 1 on average, as the features.
        for embedding in (self.expert_embeddings, self.time_embeddings):
            nn.init.normal_(embedding.weight, std=dim**-0.5)

    def forward(self, experts: Sequence[ExpertFeatures]) -> Tensor:
        """Encode the experts, in the order of the config, as unit vectors ``[N, E, D]``."""
        if self.reads_seconds and all(expert.seconds is None for expert in experts):
            raise ShapeError(
                "MMT: expected features with seconds for time_unit='second', got none. Convert "
                "published features with times, or set "
                "model.time_unit=position."
            )
        present = torch.stack([expert.present for expert in experts], 1)
        aggregates = list[Tensor]()
        tokens = list[Tensor]()
        masks = list[Tensor]()
        for index, (project, expert) in enumerate(zip(self.projections, experts, strict=True)):
            features = expert.features
            if features.shape[1] > self.max_length:
                raise ShapeError(
                    f"MMT: expected at most {self.max_length} features per expert, got "
                    f"{features.shape[1]}. Set visual.max_length to "
                    "sample them at equal intervals, or a larger model.max_length."
                )
            embedding = self.expert_embeddings.weight[index]
            aggregates.append(
                unit_rows(project(expert.pool(max_pool)))
                + embedding
                + self.time_embeddings.weight[0]
            )
            # Row 0 of the time embeddings is that of aggregates, and of unknown seconds.
            if not self.reads_seconds:
                times = torch.arange(1, 1 + features.shape[1], device=features.device)
            elif expert.seconds is None:
                times = torch.zeros_like(expert.mask, dtype=torch.long)
            else:
                times = expert.seconds.clamp(0, self.time_embeddings.num_embeddings - 1).long()
            tokens.append(unit_rows(project(features)) + embedding + self.time_embeddings(times))
            masks.append(expert.mask)
        video_token = self.video_token.expand(len(present), 1, -1)
        states = self.dropout(
            self.norm(torch.cat([video_token, torch.stack(aggregates, 1), *tokens], 1))
        )
        # The video token is always present: attention over nothing would be NaN.
        present_tokens = torch.cat([torch.ones_like(present[:, :1]), present, *masks], 1)
        encoded = self.encoder(states, src_key_padding_mask=~present_tokens)
        # The states of the aggregate tokens, which follow the video token.
        return unit_rows(encoded[:, 1 : 1 + len(experts)]) * present[..., None]
