"""The cross-modal encoder of X-VLM: layers of BERT in which words attend to each other, then to the states of an image."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

INITIAL_DEVIATION = 0.02
"""Of the weights of BERT's linear maps before any training."""


class FusionEncoder(nn.Module):
    """Word states ``[N, W, D]`` with their mask ``[N, W]`` and image states ``[N, R, E]`` to word states ``[N, W, D]`` that know the image.

    sizes: the config of a BERT, whose layers have these widths, heads and dropout. Names of parameters are those of BERT's layers
    with cross-attention, so that such layers can be loaded. Source: Zeng et al., X-VLM (2022), section 3.1; ALBEF (Li et al., 2021).
    """

    def __init__(self, sizes: Any, image_width: int, layers: int):
        super().__init__()
        self.layer = nn.ModuleList([_FusionLayer(sizes, image_width) for _ in range(layers)])

    def forward(self, words: Tensor, mask: Tensor, image: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        """kept: to which every layer adds how much each word attends to each state of the image, ``[N, heads, W, R]``."""
        seen = mask[:, None, None, :]
        for layer in self.layer:
            words = layer(words, seen, image, kept)
        return words

    def take_over(self, layers: nn.ModuleList) -> None:
        """Begin with the weights of as many layers of a BERT; what attends to the image stays as it was made."""
        for own, taken in zip(self.layer, layers, strict=True):
            own.load_state_dict(taken.state_dict() | {key: part for key, part in own.state_dict().items() if "crossattention" in key})


class _FusionLayer(nn.Module):
    def __init__(self, sizes: Any, image_width: int):
        super().__init__()
        width, epsilon = sizes.hidden_size, sizes.layer_norm_eps
        self.attention = _Attention(sizes, width)
        self.crossattention = _Attention(sizes, image_width)
        self.intermediate = nn.ModuleDict({"dense": _linear(width, sizes.intermediate_size)})
        self.output = _Residual(sizes.intermediate_size, width, sizes.hidden_dropout_prob, epsilon)

    def forward(self, words: Tensor, seen: Tensor, image: Tensor, kept: list[Tensor] | None) -> Tensor:
        words = self.attention(words, words, seen)
        words = self.crossattention(words, image, None, kept)
        return self.output(gelu(self.intermediate["dense"](words)), words)


class _Attention(nn.Module):
    """Attention of BERT, of states over themselves or over others of another width."""

    def __init__(self, sizes: Any, other_width: int):
        super().__init__()
        width = sizes.hidden_size
        self.heads, self.dropout = sizes.num_attention_heads, sizes.attention_probs_dropout_prob
        self.self = nn.ModuleDict(
            {"query": _linear(width, width), "key": _linear(other_width, width), "value": _linear(other_width, width)}
        )
        self.output = _Residual(width, width, sizes.hidden_dropout_prob, sizes.layer_norm_eps)

    def forward(self, states: Tensor, others: Tensor, seen: Tensor | None, kept: list[Tensor] | None = None) -> Tensor:
        query, key, value = (
            self.self[name](rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name, rows in (("query", states), ("key", others), ("value", others))
        )
        if kept is None:
            dropout = self.dropout if self.training else 0.0
            attended = scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout)
        else:
            kept.append((query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1))
            attended = kept[-1] @ value
        return self.output(attended.transpose(1, 2).flatten(2), states)


class _Residual(nn.Module):
    """``norm(states + dropout(linear(change)))``."""

    def __init__(self, inputs: int, width: int, dropout: float, epsilon: float):
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = _linear(inputs, width), nn.LayerNorm(width, eps=epsilon), nn.Dropout(dropout)

    def forward(self, change: Tensor, states: Tensor) -> Tensor:
        return self.LayerNorm(states + self.dropout(self.dense(change)))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=INITIAL_DEVIATION)
    nn.init.zeros_(layer.bias)
    return layer
