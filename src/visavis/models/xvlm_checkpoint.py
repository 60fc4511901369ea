"""A published checkpoint of X-VLM as what training begins with: an image encoder and a BERT of ``transformers``, and the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

from visavis import storage
from visavis.errors import DataError
from visavis.models.checkpoints import ConvertedModel, check_weights, text_donor
from visavis.models.foreign import open_config, open_model
from visavis.models.pretrained import keep_files
from visavis.models.processor import Processor
from visavis.models.tokenizing import PretrainedTokenizer
from visavis.models.towers import TowerSpec
from visavis.models.xvlm import XVLM
from visavis.models.xvlm_names import LEFT_OUT, published_names

VISUAL, TEXT, REST, MODEL = "visual", "text", "fusion.safetensors", "model"
"""What a converted checkpoint consists of: two folders of transformers, a file that ``XVLM`` begins with, and the whole as it is."""
_TEXT_LAYER = re.compile(r"text_encoder\.encoder\.layer\.(\d+)\.")
TABLE = "relative_position_bias_table"
PICTURES = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""How the released code reads pictures, but for their size."""


@dataclass(frozen=True)
class ConvertedXVLM(ConvertedModel):
    """temperature: that of its loss."""

    fusion_layers: int
    width: int
    temperature: float

    def to_json(self) -> dict[str, Any]:
        model = {"kind": "XVLM", "pretrained": str(self.folder / REST), "fusion_layers": self.fusion_layers, "width": self.width}
        return {
            "visual": {"tower": str(self.folder / VISUAL), "view": "pixels"},
            "text": {"tower": str(self.folder / TEXT), "view": "tokens"},
            "model": model | {"temperature": self.temperature},
        }


def convert_xvlm(
    tensors: Mapping[str, Tensor], checkpoint: Path, out: str | Path, *, text: str = "", image_size: int | None = None
) -> ConvertedXVLM:
    """Write the weights of a published X-VLM of Swin and BERT, pretrained or fine-tuned, into a new folder.

    text: the folder or hub name of the BERT that it was made from, for its config and tokenizer; "": bert-base-uncased. image_size: pixels of a side to train
    with, default the checkpoint's own: windows of attention grow with it, and their position biases are interpolated.
    Raises DataError naming weights that are unknown, missing or of wrong shapes.
    Differs from: the released code, which interpolates position biases from a grid that is denser at its center.
    """
    layers = 1 + max((int(match[1]) for name in tensors if (match := _TEXT_LAYER.match(name))), default=-1)
    names = published_names(tensors, layers)
    check_weights(tensors, names, LEFT_OUT, checkpoint, "an X-VLM of Swin and BERT")
    text = text or "bert-base-uncased"
    donor, _ = text_donor(text, checkpoint, "reads texts by the config and tokenizer of the BERT that it was made from")
    sizes = open_config(donor)
    made: dict[str, dict[str, Tensor]] = {VISUAL: {}, TEXT: {}, REST: {}}
    for published, targets in names.items():
        for (part, name), tensor in zip(targets, tensors[published].chunk(len(targets)), strict=True):
            made[part][name] = tensor.float()
    found = tensors["text_encoder.embeddings.word_embeddings.weight"].shape
    if (layers, *found) != (sizes.num_hidden_layers, sizes.vocab_size, sizes.hidden_size):
        raise DataError(
            f"{checkpoint} has {found[0]:,} words of width {found[1]:,} and {layers} layers of text, but {text} has {sizes.vocab_size:,} of width "
            f"{sizes.hidden_size:,} and {sizes.num_hidden_layers}: name the text model that it was made from."
        )
    own = _image_size(tensors, image_size, checkpoint)
    side = image_size or own
    made[VISUAL] = {
        name: _grown(tensor, own, side, checkpoint) if name.endswith(TABLE) else tensor for name, tensor in made[VISUAL].items()
    }
    if Path(out).exists():
        storage.new_folder(out, replaced=True)
    with storage.replacing_folder(out) as folder:
        for part in (VISUAL, TEXT):
            (folder / part).mkdir()
        storage.write_json(folder / VISUAL / "config.json", _swin_config(made[VISUAL], side))
        storage.write_json(folder / VISUAL / "preprocessor_config.json", PICTURES | {"size": {"height": side, "width": side}})
        keep_files(donor, folder / TEXT)
        for part in (VISUAL, TEXT):
            storage.write_tensors(folder / part / "model.safetensors", made[part], for_transformers=True)
            open_model(folder / part)
        storage.write_tensors(folder / REST, made[REST])
        fusion_layers = sum(name.endswith("crossattention.self.query.weight") for name in names)
        temperature = tensors["temp"].item() if "temp" in tensors else 0.07
        converted = ConvertedXVLM(Path(out), fusion_layers, len(tensors["vision_proj.weight"]), round(temperature, 6))
        _write_model(folder, converted)
    return converted


def _write_model(written: Path, converted: ConvertedXVLM) -> None:
    """The model itself, of folders that lie elsewhere while they are written."""
    tokens, width = PretrainedTokenizer.open(written / TEXT), open_config(written / VISUAL).hidden_size
    config = XVLM.Config(
        backbone=str(written / VISUAL),
        text_backbone=str(written / TEXT),
        pretrained=str(written / REST),
        visual_width=width,
        text_width=len(tokens),
        fusion_layers=converted.fusion_layers,
        width=converted.width,
        temperature=converted.temperature,
    )
    matcher = XVLM(config)
    visual, text = (str(converted.folder.resolve() / part) for part in (VISUAL, TEXT))
    matcher.config = replace(config, backbone=visual, text_backbone=text, pretrained="")
    Processor(TowerSpec("visual", visual, "grid"), None, None, text).save(matcher, written / MODEL)


def _image_size(tensors: Mapping[str, Tensor], given: int | None, checkpoint: Path) -> int:
    """Pixels of a side that the checkpoint was trained with, by the masks of its first shifted windows; if it has none, as given."""
    mask = tensors.get("vision_encoder.layers.0.blocks.1.attn_mask")
    if mask is not None:
        window = math.isqrt(mask.shape[1])
        return math.isqrt(len(mask)) * window * tensors["vision_encoder.patch_embed.proj.weight"].shape[-1]
    if given is None:
        raise DataError(f"{checkpoint} does not say for which size of pictures it was trained: give image_size, such as 384.")
    return given


def _grown(table: Tensor, own: int, side: int, checkpoint: Path) -> Tensor:
    """The position biases ``[(2 w - 1)^2, heads]`` of windows that grow as pictures do."""
    if side == own:
        return table
    edge = math.isqrt(len(table))
    window = (edge + 1) // 2
    if window * side % own:
        raise DataError(
            f"{checkpoint} has windows of {window} for pictures of {own} pixels, which do not grow evenly to image_size = {side}."
        )
    square = table.T.unflatten(1, (edge, edge))[None]
    return interpolate(square, size=(2 * window * side // own - 1,) * 2, mode="bicubic", align_corners=True)[0].flatten(1).T


def _swin_config(tensors: Mapping[str, Tensor], side: int) -> dict[str, Any]:
    tables = {tuple(map(int, re.findall(r"\d+", name)[:2])): tensor for name, tensor in tensors.items() if name.endswith(TABLE)}
    stages = range(1 + max(stage for stage, _ in tables))
    patches = tensors["embeddings.patch_embeddings.projection.weight"]
    return {
        "model_type": "swin",
        "architectures": ["SwinModel"],
        "image_size": side,
        "patch_size": patches.shape[-1],
        "embed_dim": len(patches),
        "depths": [sum(stage == own for own, _ in tables) for stage in stages],
        "num_heads": [tables[stage, 0].shape[1] for stage in stages],
        "window_size": (math.isqrt(len(tables[0, 0])) + 1) // 2,
        "mlp_ratio": len(tensors["encoder.layers.0.blocks.0.intermediate.dense.weight"]) / len(patches),
        "qkv_bias": True,
        "drop_path_rate": 0.1,
    }
