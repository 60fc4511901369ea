"""Tiny embedding models of real classes with random weights: embedders from vision-language models,
and models of sentence-transformers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As in the Qwen-VL models, without videos and tools."""
PROMPTS = {"query": "Find the image.", "document": "Represent the image."}
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def write_vision_language_model(folder: Path, kind: str = "qwen3_vl") -> Path:
    """Write a vision-language model of transformers: two layers, a tokenizer of bytes, images of at
    most 64 x 64 pixels.
    """
    import transformers
    from tokenizers import pre_tokenizers

    from visavis.models.encoders.sentence_encoders import without_videos

    tokenizer = transformers.Qwen2TokenizerFast(
        vocab={byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
        merges=[],
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
    )
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    )
    tokens = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        },
    }
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 8}
    if kind == "qwen2_vl":
        names = "Qwen2VL"
        vision |= {"embed_dim": 16, "mlp_ratio": 2}
    elif kind == "qwen2_5_vl":
        names = "Qwen2_5_VL"
        vision |= {"intermediate_size": 24, "out_hidden_size": 16}
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    else:
        names = "Qwen3VL"
        text |= {"head_dim": 8}
        text["rope_parameters"] |= {"mrope_interleaved": True}
        vision |= {"intermediate_size": 24, "out_hidden_size": 16}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = getattr(transformers, f"{names}Config")(
        text_config=text, vision_config=vision, **tokens
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{names}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    transformers.utils.logging.disable_progress_bar()
    with without_videos():
        processor = getattr(transformers, f"{names}Processor")(
            images, tokenizer, chat_template=CHAT_TEMPLATE
        )
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    return folder


def save(model: Any, folder: Path) -> Path:
    """Write a SentenceTransformer with the prompts of a retrieval model."""
    import transformers

    from visavis.models.encoders.sentence_encoders import without_videos

    model.prompts = dict(PROMPTS)
    transformers.utils.logging.disable_progress_bar()
    with without_videos():
        model.save(str(folder), create_model_card=False)
    transformers.utils.logging.enable_progress_bar()
    return folder


def write_embedders(root: Path, clip: Path) -> Path:
    """Write the folders ``plain`` (a vision-language model), ``embedder`` (the same as
    sentence-transformers publish it), ``dense`` (a CLIP with a further layer) and ``router`` (an
    image and a text encoder of their own).
    """
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    from visavis.models.encoders.sentence_encoders import load_sentence_transformers_model

    plain = write_vision_language_model(root / "plain")
    save(load_sentence_transformers_model(plain), root / "embedder")
    shutil.copytree(clip, root / "clip")
    clip, size = root / "clip", {"height": 32, "width": 32}
    # With its class and with the length of texts, which sentence-transformers needs.
    transformers.CLIPImageProcessorPil(size=size, crop_size=size).save_pretrained(clip)
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip)
    tokenizer.model_max_length = 12
    tokenizer.save_pretrained(clip)
    torch.manual_seed(1)
    options = {"model_kwargs": {"local_files_only": True}}
    dense = Dense(10, 6, activation_function=torch.nn.Identity())
    save(
        SentenceTransformer(
            modules=[Transformer(str(clip), **options), dense, Normalize()], device="cpu"
        ),
        root / "dense",
    )
    routes = {
        side: [Transformer(str(clip), **options), Dense(10, 6), Normalize()]
        for side in ("image", "text")
    }
    router = Router(routes, route_mappings={(None, "image"): "image", (None, "text"): "text"})
    save(SentenceTransformer(modules=[router], device="cpu"), root / "router")
    return root
