"""The names of X-VLM's published weights, and what they are called where they are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

Targets = tuple[tuple[str, str], ...]
"""Part of the converted checkpoint and name in it; several for a tensor that is cut into as many equal parts."""

LEFT_OUT = re.compile(r".*\.(relative_position_index|attn_mask|position_ids)|text_encoder\.cls\..*|bbox_head\..*|temp")
"""Buffers; the heads of the pretraining, masked words and boxes; the temperature of its loss."""
BOTH = ("weight", "bias")
PROJECTIONS = {"vision_proj": "visual", "text_proj": "text", "itm_head.0": "match.0", "itm_head.1": "match.1", "itm_head.3": "match.3"}
BLOCK = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
"""Parts of a block of Swin, as its authors and as transformers name them."""
ATTENTION = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias")


def published_names(found: Iterable[str], text_layers: int) -> dict[str, Targets]:
    """Every weight that a whole checkpoint of Swin and so many layers of BERT has, by its published name, with its targets.

    found: the names in a checkpoint, by which the number of its stages, blocks and fusion layers is known.

    >>> published_names(["vision_encoder.layers.0.blocks.0.norm1.bias"], 1)["vision_encoder.norm.bias"]
    (('visual', 'layernorm.bias'),)
    """
    found = set(found)
    blocks = {
        tuple(map(int, match.groups())) for name in found if (match := re.match(r"vision_encoder\.layers\.(\d+)\.blocks\.(\d+)\.", name))
    }
    depths = [1 + max(block for stage, block in blocks if stage == own) for own in sorted({stage for stage, _ in blocks})]
    crossed = {int(match[1]) for name in found if (match := re.match(r"text_encoder\.encoder\.layer\.(\d+)\.crossattention\.", name))}
    below = min(crossed, default=text_layers // 2)
    return dict([*_visual(depths), *_text(text_layers, below), *_each(PROJECTIONS.items(), "", "", "fusion.safetensors")])


def _visual(depths: list[int]) -> Iterator[tuple[str, Targets]]:
    outside = {"patch_embed.proj": "embeddings.patch_embeddings.projection", "patch_embed.norm": "embeddings.norm", "norm": "layernorm"}
    yield from _each(outside.items(), "vision_encoder.", "", "visual")
    for stage, depth in enumerate(depths):
        for block in range(depth):
            own, here = f"vision_encoder.layers.{stage}.blocks.{block}.", f"encoder.layers.{stage}.blocks.{block}."
            yield from _each(BLOCK.items(), own, here, "visual")
            for end in BOTH:
                yield f"{own}attn.qkv.{end}", tuple(("visual", f"{here}attention.self.{name}.{end}") for name in ("query", "key", "value"))
            table = "relative_position_bias_table"
            yield f"{own}attn.{table}", (("visual", f"{here}attention.self.{table}"),)
        if stage + 1 < len(depths):
            for name in ("reduction.weight", "norm.weight", "norm.bias"):
                yield f"vision_encoder.layers.{stage}.downsample.{name}", (("visual", f"encoder.layers.{stage}.downsample.{name}"),)


def _text(layers: int, below: int) -> Iterator[tuple[str, Targets]]:
    for name in EMBEDDINGS:
        yield f"text_encoder.embeddings.{name}", (("text", f"embeddings.{name}"),)
    parts = [*(f"attention.{part}" for part in ATTENTION), "intermediate.dense", "output.dense", "output.LayerNorm"]
    for layer in range(layers):
        own = f"text_encoder.encoder.layer.{layer}."
        yield from _each(zip(parts, parts, strict=True), own, f"encoder.layer.{layer}.", "text")
        if layer >= below:
            crossing = [f"crossattention.{part}" for part in ATTENTION]
            yield from _each(zip(crossing, crossing, strict=True), own, f"fusion.layer.{layer - below}.", "fusion.safetensors")


def _each(names: Iterable[tuple[str, str]], own: str, here: str, part: str) -> Iterator[tuple[str, Targets]]:
    """The weight and the bias of modules, by their published names and ours."""
    for published, name in names:
        for end in BOTH:
            yield f"{own}{published}.{end}", ((part, f"{here}{name}.{end}"),)
