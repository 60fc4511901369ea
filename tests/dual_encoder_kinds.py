"""Tiny dual encoders of every supported kind: config, tokenizer and image processor of transformers,
with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

WORDS = [
    "a",
    "red",
    "blue",
    "green",
    "circle",
    "square",
    "star",
    "and",
    "large",
    "small",
    "on",
    "the",
    "left",
    "of",
]
CHINESE = list("一个红蓝绿色圆方形星大小的和")
SENTENCES = [
    "a red circle",
    "a blue square and a small green star",
    "一个红色的圆形",
    "star",
    "a large circle and a large circle on the left of a large circle and a star",
]
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
VISION = ENCODER | {"image_size": 32, "patch_size": 8}
LENGTH = 12
"""Maximum number of tokens."""


def bert_tokenizer(folder: Path) -> Any:
    """WordPiece of words, letters and Chinese characters."""
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*letters, *(f"##{letter}" for letter in letters)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = list(dict.fromkeys([*special, *WORDS, *CHINESE, *pieces]))
    (folder / "vocab.txt").write_text("\n".join(names), encoding="utf-8")
    return BertTokenizer(str(folder / "vocab.txt"), model_max_length=LENGTH)


def xlm_roberta_tokenizer(folder: Path) -> Any:
    """SentencePiece unigrams."""
    from transformers import XLMRobertaTokenizer

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", *CHINESE]
    vocabulary = [
        *((token, 0.0) for token in special),
        *((f"▁{word}", -3.0) for word in dict.fromkeys(WORDS) if len(word) > 1),
        *((letter, -8.0) for letter in letters),
        ("<mask>", 0.0),
    ]
    return XLMRobertaTokenizer(vocab=vocabulary, model_max_length=LENGTH)


def gemma_tokenizer(name: str) -> Callable[[Path], Any]:
    """Byte pairs with byte fallback, which Gemma and SigLIP 2 share."""

    def build(folder: Path) -> Any:
        import transformers

        special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
        letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", *CHINESE]
        merges, pieces = [], []
        for word in dict.fromkeys(WORDS):
            for end in range(2, len(word) + 1):
                if word[:end] not in pieces:
                    merges.append((word[: end - 1], word[end - 1]))
                    pieces.append(word[:end])
        data = [f"<0x{number:02X}>" for number in range(256)]
        names = dict.fromkeys([*special, *data, *letters, *pieces])
        vocabulary = {name: number for number, name in enumerate(names)}
        return getattr(transformers, name)(
            vocab=vocabulary,
            merges=merges,
            model_max_length=LENGTH,
            padding_side="right",
            add_bos_token=False,
            add_eos_token=True,
        )

    return build


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _build_model(kind: str, tokenizer: Any) -> Any:
    """Model of transformers with random weights."""
    import transformers as hf

    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos")}
    ids |= {"bos_token_id": tokenizer.bos_token_id}
    text = ENCODER | {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH}
    # Positions start after the number of the padding token.
    roberta = text | ids | NO_DROPOUT | {"max_position_embeddings": LENGTH + 2}
    naflex = {key: value for key, value in VISION.items() if key != "image_size"}
    bert = text | NO_DROPOUT
    parts: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "siglip2-fixed": ("Siglip", text | {"projection_size": 16}, VISION),
        "siglip2-naflex": (
            "Siglip2",
            text | {"projection_size": 16},
            naflex | {"num_patches": 16},
        ),
        "metaclip_2": ("MetaClip2", text | ids, VISION),
        "chinese_clip": ("ChineseCLIP", bert, VISION),
        "altclip": ("AltCLIP", roberta | {"project_dim": 12}, VISION),
    }
    if kind in parts:
        name, text_config, vision_config = parts[kind]
        size = {} if kind.startswith("siglip") else {"projection_dim": 10}
        config = getattr(hf, f"{name}Config")(
            text_config=text_config, vision_config=vision_config, **size
        )
        return getattr(hf, f"{name}Model")(config)
    # Any pair of encoders.
    visions: dict[str, Any] = {
        "vision-text-dual-encoder": lambda: hf.ViTConfig(**VISION, **NO_DROPOUT),
        "clip+xlm-roberta": lambda: hf.CLIPVisionConfig(**VISION),
        "dinov2+bert": lambda: hf.Dinov2Config(**VISION, **NO_DROPOUT),
        "swin+bert": lambda: hf.SwinConfig(
            image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
        ),
    }
    text_encoder = hf.XLMRobertaConfig(**roberta) if "roberta" in kind else hf.BertConfig(**bert)
    return hf.VisionTextDualEncoderModel(
        hf.VisionTextDualEncoderConfig(
            vision_config=visions[kind]().to_dict(),
            text_config=text_encoder.to_dict(),
            projection_dim=10,
        )
    )


TOKENIZERS: dict[str, Callable[[Path], Any]] = {
    "siglip2-fixed": gemma_tokenizer("GemmaTokenizer"),
    "siglip2-naflex": gemma_tokenizer("Siglip2Tokenizer"),
    "chinese_clip": bert_tokenizer,
    "altclip": xlm_roberta_tokenizer,
    "metaclip_2": xlm_roberta_tokenizer,
    "vision-text-dual-encoder": bert_tokenizer,
    "clip+xlm-roberta": xlm_roberta_tokenizer,
    "dinov2+bert": bert_tokenizer,
    "swin+bert": bert_tokenizer,
}
IMAGE_PROCESSORS = {
    "siglip2-fixed": ("SiglipImageProcessorPil", {"size": {"height": 32, "width": 32}}),
    "siglip2-naflex": ("Siglip2ImageProcessorPil", {"patch_size": 8, "max_num_patches": 16}),
    "chinese_clip": (
        "ChineseCLIPImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "do_center_crop": False},
    ),
    "altclip": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": 32}),
    "metaclip_2": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": 32}),
    "vision-text-dual-encoder": ("ViTImageProcessorPil", {"size": {"height": 32, "width": 32}}),
}
KINDS = tuple(IMAGE_PROCESSORS)
"""Every value of ``model_type`` except those of the fixture ``dual_encoders``, and both kinds of
SigLIP 2.
"""
DAILY_KINDS = tuple(
    pytest.param(kind, marks=[] if kind in ("siglip2-naflex", "altclip") else pytest.mark.slow)
    for kind in KINDS
)
"""Kinds for tests of which the daily suite runs two: one that reads patches, and one whose weights
have other names in files.
"""
PAIRS = tuple(kind for kind in TOKENIZERS if kind not in KINDS)
"""Further pairs of encoders as vision-text-dual-encoder."""


def write_dual_encoder(kind: str, folder: Path) -> Path:
    """Write the folder of a tiny model."""
    import transformers

    folder.mkdir(parents=True)
    tokenizer = TOKENIZERS[kind](folder)
    model = _build_model(kind, tokenizer)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if not name.startswith("logit_"):
            torch.nn.init.normal_(parameter, std=0.4)
    if hasattr(model, "logit_bias"):
        torch.nn.init.constant_(model.logit_scale, 4.7)
        torch.nn.init.constant_(model.logit_bias, -12.9)
    transformers.utils.logging.disable_progress_bar()
    model.eval().save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    name, settings = IMAGE_PROCESSORS[kind if kind in KINDS else "vision-text-dual-encoder"]
    getattr(transformers, name)(**settings).save_pretrained(folder)
    return folder


def by_hand(
    folder: Path, images: Sequence[Any], texts: Sequence[str], **options: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Output of transformers for all pairs of images and texts, with its own processors, and the unit
    vectors of both.
    """
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    padded = model.config.text_config.model_type.startswith("siglip")
    tokens = tokenizer(
        list(texts),
        padding="max_length" if padded else True,
        truncation=True,
        max_length=LENGTH,
        return_tensors="pt",
    )
    inputs = {"input_ids": tokens["input_ids"]}
    if not padded:
        inputs["attention_mask"] = tokens["attention_mask"]
    pixels = processor([image.convert("RGB") for image in images], return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs, **pixels, **options)
        features = (
            model.get_image_features(**pixels).pooler_output,
            model.get_text_features(**inputs).pooler_output,
        )
    image_rows, text_rows = map(normalize, features)
    return output, image_rows, text_rows
