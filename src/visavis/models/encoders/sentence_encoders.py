"""Sentence encoders: pooling of a frozen sentence model, and cross-encoders of text pairs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from visavis.core import storage
from visavis.core.encoded import unit_rows
from visavis.core.errors import DataError, requires_extra
from visavis.models.encoders.pretrained_files import SENTENCE_CONFIG, model_folder
from visavis.models.encoders.pretrained_loading import (
    check_encoding,
    load_pretrained_model,
    load_pretrained_tokenizer,
    loading_from,
)
from visavis.models.layers import mean_pool


@dataclass(frozen=True)
class SentenceTransformersModule:
    """One step of a sentence-transformers model.

    Attributes:
        type: Class of the step.
        path: Its folder within the folder of the model.
    """

    type: str
    path: Annotated[str, Field(pattern=r"^(\w[\w.-]*)?$")]


@dataclass(frozen=True)
class _RouterConfig:
    """Classes of the steps of a router, by the names of their folders."""

    types: dict[str, str]


@dataclass(frozen=True)
class _SentenceBertConfig:
    max_seq_length: Annotated[int, Field(gt=2)] | None = None


def read_sentence_transformers_modules(folder: Path) -> list[SentenceTransformersModule]:
    """Read the ``modules.json`` of a sentence-transformers folder."""
    modules = storage.read_json(folder / "modules.json", list[SentenceTransformersModule])
    if not modules:
        raise DataError(
            f"{folder / 'modules.json'}: expected the steps of a sentence model, got none. "
            "Download it again."
        )
    return modules


@dataclass(frozen=True)
class SentencePooling:
    """Pooling of the words ``[N, L, D]`` of a text to one vector.

    Attributes:
        mode: "mean", or "first" for the first token.
        normalize: Whether to normalize the vector.
        max_length: Word pieces after which a text is cut.
    """

    mode: str = "mean"
    normalize: bool = False
    max_length: int = 512

    @classmethod
    def read(cls, folder: Path, max_length: int) -> SentencePooling:
        """Read the pooling of a sentence-transformers folder. Without its files it is the mean."""
        if not os.path.exists(folder / "modules.json"):
            return cls(max_length=max_length)
        modules, modes, is_simple = _read_pooling(folder)
        if not is_simple:
            raise DataError(
                f"{folder}: expected pooling by the mean or the first token, normalized or not, "
                f"got {', '.join(modes) or 'none'} through "
                f"{', '.join(modules) or 'no modules'}. Use another sentence model, or granularity "
                "pooled of a frozen encoder."
            )
        file = folder / SENTENCE_CONFIG
        limit = None
        if os.path.exists(file):
            limit = storage.read_json(file, _SentenceBertConfig).max_seq_length
        length = min(limit or max_length, max_length)
        return cls(_POOLING_NAMES[modes[0]], "Normalize" in modules, length)

    def __call__(self, words: Tensor, mask: Tensor) -> Tensor:
        pooled = words[:, 0] if self.mode == "first" else mean_pool(words, mask)
        return unit_rows(pooled) if self.normalize else pooled


_POOLING_NAMES = {"mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}


def _read_pooling(folder: Path) -> tuple[list[str], list[str], bool]:
    """Names of the classes of the steps of a model, names of the poolings that are concatenated,
    and whether they are a transformer with one pooling by the mean or the first token.
    """
    modules = {
        module.type.rsplit(".", 1)[-1]: folder / module.path
        for module in read_sentence_transformers_modules(folder)
    }
    modes = list[str]()
    if "Pooling" in modules:
        pooling = storage.read_json(modules["Pooling"] / "config.json", dict[str, Any])
        # Older files have a flag per pooling, newer ones the name of the pooling.
        flags = [name for name, value in pooling.items() if value is True]
        prefix = "pooling_mode_"
        modes = [name.removeprefix(prefix) for name in flags if name.startswith(prefix)]
        modes = modes or [str(pooling.get("pooling_mode"))]
    is_simple = len(modes) == 1 and modes[0] in _POOLING_NAMES
    known_steps = {"Transformer", "Pooling", "Normalize"}
    return list(modules), modes, is_simple and set(modules) <= known_steps


def needs_sentence_transformers(folder: Path) -> bool:
    """Check whether only sentence-transformers can run a model: it has a prompt, or other steps
    than a transformer with pooling by the mean or the first token.
    """
    if not os.path.exists(folder / "modules.json"):
        return False
    file = folder / "config_sentence_transformers.json"
    prompt = None
    if os.path.exists(file):
        prompt = storage.read_json(file, dict[str, Any]).get("default_prompt_name")
    return prompt is not None or not _read_pooling(folder)[2]


def load_sentence_transformers_model(folder: Path, **options: Any) -> Any:
    """Load a model with the package sentence-transformers, without code of its folder, on the CPU
    unless the ``options`` of its transformers have a device map.
    """
    has_modules = os.path.exists(folder / "modules.json")
    files = [folder / "modules.json"] if has_modules else []
    types = [step.type for step in read_sentence_transformers_modules(folder)] if files else []
    for file in folder.rglob("router_config.json"):
        types += storage.read_json(file, _RouterConfig).types.values()
    # Any other class would be code of the folder.
    for name in types:
        if not name.startswith("sentence_transformers."):
            raise DataError(
                f"{folder / 'modules.json'}: expected steps of sentence-transformers, got "
                f"{name}. Such code is never run. Use another model."
            )
    # Each part is checked for damaged files and code, but not loaded.
    for part in sorted(file.parent for file in folder.glob(f"*/{SENTENCE_CONFIG}")):
        with loading_from(part, "a part that transformers can read"):
            pass
    with requires_extra("sentence-transformers", f"the encoder {folder}"):
        from sentence_transformers import SentenceTransformer
    local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    with (
        loading_from(folder, "a model that sentence-transformers can read"),
        without_videos(),
    ):
        if has_modules:
            # A device map replaces the device.
            device = None if "device_map" in options else "cpu"
            return SentenceTransformer(
                str(folder), device=device, model_kwargs=options, **local
            ).eval()
        # A vision-language model without modules.json is pooled by its last token, after the prompt
        # that starts an answer, and normalized.
        from sentence_transformers.base.modules import Transformer
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

        transformer: Any = Transformer(
            str(folder),
            model_kwargs=options | local,
            processor_kwargs=dict(local),
            config_kwargs=dict(local),
            processing_kwargs={"chat_template": {"add_generation_prompt": True}},
        )
        pooling = Pooling(transformer.get_embedding_dimension(), "lasttoken")
        return SentenceTransformer(
            modules=[transformer, pooling, Normalize()], device=options.get("device_map", "cpu")
        ).eval()


@contextmanager
def without_videos() -> Iterator[None]:
    """Within this block, processors of transformers are loaded and saved without their video
    processor, which needs torchvision.
    """
    from transformers import ProcessorMixin

    original = ProcessorMixin.__dict__["get_attributes"]

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in original.__get__(None, cls)() if name != "video_processor"]

    processor_class: Any = ProcessorMixin
    processor_class.get_attributes = classmethod(get_attributes)
    try:
        yield
    finally:
        processor_class.get_attributes = original


# End of error messages about models with another number of outputs.
CROSS_ENCODER_ADVICE = (
    "Use a cross-encoder with one output, such as one of visavis papers relevance fit --kind cross"
)


class TextPairEncoder(nn.Module):
    """Cross-encoder of text pairs: a sequence classifier of ``transformers`` with one output.

    Args:
        model: The classifier.
        tokenizer: Its tokenizer.
        max_length: Tokens after which a pair is cut.
    """

    def __init__(self, model: Any, tokenizer: Any, max_length: int):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length

    def preprocess(self, first: Sequence[str], second: Sequence[str]) -> Any:
        """Tokenize pairs, padded to the longest."""
        return self.tokenizer(
            list(first),
            list(second),
            truncation=True,
            max_length=self.max_length,
            padding=True,
            return_tensors="pt",
        )

    def forward(self, tokens: Any) -> Tensor:
        """Score pairs, tokens of ``preprocess``, in float32, ``[N]``."""
        return self.model(**tokens).logits[:, 0].float()

    @torch.no_grad()
    def encode(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        """Score pairs without a gradient, in float32, ``[N]``."""
        return self(self.preprocess(first, second).to(next(self.parameters()).device))


def open_text_pair_encoder(name: str, *, new_head: bool = False) -> TextPairEncoder:
    """Open a cross-encoder in evaluation mode. A ``new_head`` is an output to be trained."""
    folder = model_folder(name)
    options: dict[str, Any] = {"num_labels": 1} if new_head else {}
    model = load_pretrained_model(
        folder,
        "AutoModelForSequenceClassification",
        new_head=new_head,
        advice=CROSS_ENCODER_ADVICE,
        **options,
    )
    if model.config.num_labels != 1:
        raise DataError(
            f"{folder}: expected one output, got {model.config.num_labels}. {CROSS_ENCODER_ADVICE}."
        )
    encoder = TextPairEncoder(model, *load_pretrained_tokenizer(folder)).eval()
    check_encoding(
        lambda: encoder(encoder.preprocess(["a dog"], ["a cat"])), folder, "a pair of texts"
    )
    return encoder
