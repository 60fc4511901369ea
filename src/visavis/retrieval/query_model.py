"""Text queries of an index. CLIP, SigLIP and MetaCLIP encode them without transformers and without
the image side, whose loading takes several times longer than a search.

The first command that loads such a model also encodes a few texts with ``DualEncoderTexts``, and
records whether their vectors are equal. Later searches of unchanged files use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from visavis.core import storage
from visavis.core.blocking import chunk_slices
from visavis.core.encoded import Encoded, unit_rows
from visavis.core.errors import RunError, StorageError, VisavisError
from visavis.models.encoders.pretrained_files import (
    DUAL_ENCODERS,
    VISUAL_BACKBONE_FOLDER,
    find_dual_encoder,
    model_folder,
)
from visavis.models.inference import OnBatch
from visavis.models.retriever import DEFAULT_BATCH_SIZE, Retriever, check_texts

WEIGHTS_FILE = "model.safetensors"
TEXT_DEFAULTS = {
    "clip": {
        "hidden_act": "quick_gelu",
        "num_attention_heads": 8,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 77,
        "eos_token_id": 49407,
    },
    "siglip": {
        "hidden_act": "gelu_pytorch_tanh",
        "num_attention_heads": 12,
        "layer_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    },
}
"""Settings of the text side that a ``config.json`` may leave out, by its architecture."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda values: values * torch.sigmoid(1.702 * values),
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda values: gelu(values, approximate="tanh"),
}
FIRST_ID_OF_CLIP = 2
"""End token in old configs of CLIP, which means the highest id of a text."""
SAMPLE_TEXTS = (
    "a photo of a cat",
    "Two  dogs, one of them brown,\nrun on a beach: it's 7 o'clock & 20 °C!",
    "Größe: 3 m² – ein Café",
    "日本の猫 🐈",
    " ".join(f"word{number} dog" for number in range(200)),
)
"""Texts whose vectors are compared: punctuation, accents, other scripts, and too many words."""
MAX_DIFFERENCE = 1e-5
MIN_SIDE = 64
"""Shorter side to which images without a model are decoded, in pixels."""


@dataclass
class DualEncoderTexts:
    """Encodes texts as the text side of a CLIP or SigLIP, up to the last digits.

    Attributes:
        weights: Weights of the text side by their names in transformers.
        kind: ``model_type`` in ``DUAL_ENCODERS``.
        config: Settings of the text side.
        tokenizer: Cuts texts, and pads texts of SigLIP.
    """

    weights: dict[str, Tensor]
    kind: str
    config: dict[str, Any]
    tokenizer: Any

    @classmethod
    def open(cls, folder: Path) -> Self | None:
        """Open the text side of a pretrained model, or of a run that trained all weights.

        Args:
            folder: Folder of the model.

        Returns:
            The text side. None if transformers has to read the files.

        Raises:
            DataError: If a file is damaged.
        """
        backbone = folder / VISUAL_BACKBONE_FOLDER
        config_folder = backbone if os.path.isdir(backbone) else folder
        files = [folder / WEIGHTS_FILE, config_folder / "tokenizer.json"]
        if not all(map(os.path.isfile, (*files, config_folder / "config.json"))):
            return None
        content = storage.read_json(config_folder / "config.json", dict[str, Any])
        kind = str(content.get("model_type"))
        given = content.get("text_config")
        text = DUAL_ENCODERS[kind].text if kind in DUAL_ENCODERS else ""
        if not text or not isinstance(given, dict):
            return None
        config: dict[str, Any] = {**TEXT_DEFAULTS[text], **given}
        prefix = "" if config_folder == folder else "model."
        with storage.open_tensors(folder / WEIGHTS_FILE) as file:
            weights = {
                name.removeprefix(prefix): file.get_tensor(name).float()
                for name in file.keys()  # noqa: SIM118 - not a dictionary
                if name.startswith((f"{prefix}text_model.", f"{prefix}text_projection."))
            }
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(config_folder / "tokenizer.json"))
        length = config["max_position_embeddings"]
        tokenizer.enable_truncation(length)
        # A CLIP reads a text up to its end, so that any padding will do.
        padding: dict[str, Any] = {}
        if text == "siglip":
            padding = {"length": length, **_padding(config_folder, tokenizer)}
        tokenizer.enable_padding(**padding)
        return cls(weights, kind, config, tokenizer)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Encode texts.

        Args:
            texts: The texts.

        Returns:
            Unit vectors, shape ``[N, D]``.
        """
        ids = torch.tensor([encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))])
        weights = self.weights
        config = self.config
        is_clip = DUAL_ENCODERS[self.kind].text == "clip"
        heads = config["num_attention_heads"]
        activation = ACTIVATIONS[config["hidden_act"]]

        def project(name: str, states: Tensor) -> Tensor:
            return linear(states, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        def normalize(name: str, states: Tensor) -> Tensor:
            weight = weights[f"{name}.weight"]
            bias = weights[f"{name}.bias"]
            return layer_norm(states, weight.shape, weight, bias, config["layer_norm_eps"])

        embeddings = "text_model.embeddings"
        positions = weights[f"{embeddings}.position_embedding.weight"][: ids.shape[1]]
        states = weights[f"{embeddings}.token_embedding.weight"][ids] + positions
        number = 0
        while f"text_model.encoder.layers.{number}.layer_norm1.weight" in weights:
            layer = f"text_model.encoder.layers.{number}"
            normalized = normalize(f"{layer}.layer_norm1", states)
            query, key, value = (
                project(f"{layer}.self_attn.{name}_proj", normalized)
                .unflatten(-1, (heads, -1))
                .transpose(1, 2)  # [N, heads, L, D / heads]
                for name in ("q", "k", "v")
            )
            attended = scaled_dot_product_attention(query, key, value, is_causal=is_clip)
            attended = attended.transpose(1, 2).flatten(2)
            states = states + project(f"{layer}.self_attn.out_proj", attended)
            inner = project(f"{layer}.mlp.fc1", normalize(f"{layer}.layer_norm2", states))
            states = states + project(f"{layer}.mlp.fc2", activation(inner))
            number += 1
        states = normalize("text_model.final_layer_norm", states)
        if not is_clip:
            return unit_rows(project("text_model.head", states[:, -1]))
        end = config["eos_token_id"]
        is_highest = end == FIRST_ID_OF_CLIP and self.kind == "clip"
        last = (ids if is_highest else (ids == end).int()).argmax(1)
        return unit_rows(project("text_projection", states[torch.arange(len(ids)), last]))


def _padding(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Read the padding token of a folder, and the side on which it is added."""
    file = folder / "tokenizer_config.json"
    settings = storage.read_json(file, dict[str, Any]) if os.path.isfile(file) else {}
    token = settings.get("pad_token")
    number = tokenizer.token_to_id(token.get("content") if isinstance(token, dict) else token or "")
    return {"pad_id": number or 0, "direction": settings.get("padding_side", "right")}


class TextQueryModel(Retriever):
    """A model that encodes texts at once, and is loaded when something else is needed.

    Args:
        texts: Text side of the model.
        length: Number of dimensions of its vectors, see ``Retriever.embedding_dim``.
        load: Loads the whole model.
    """

    def __init__(self, texts: DualEncoderTexts, length: int, load: Callable[[], Retriever]):
        self._texts = texts
        self._length = length
        self._load = load

    @cached_property
    def _whole(self) -> Retriever:
        return self._load()

    def __getattr__(self, name: str) -> Any:
        # Called for the attributes that the constructor of Retriever would set. A copy asks for
        # private methods, before it has ``_load``.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    @property
    def fingerprint(self) -> str:
        """See ``Retriever.fingerprint``."""
        return self._whole.fingerprint

    def encode_texts(self, texts: Sequence[str], on_progress: OnBatch | None = None) -> Tensor:
        """Encode texts, see ``Retriever.encode_texts``."""
        count = check_texts(texts)
        vectors = list[Tensor]()
        for batch in chunk_slices(count, DEFAULT_BATCH_SIZE):
            vectors.append(unit_rows(self._texts.encode(texts[batch])[:, : self._length]))
            if on_progress is not None:
                on_progress(batch.stop, count)
        return torch.cat(vectors)

    def with_embedding_dim(self, embedding_dim: int) -> Retriever:
        """See ``Retriever.with_embedding_dim``."""
        return self._whole.with_embedding_dim(embedding_dim)

    def with_full_decoding(self) -> Retriever:
        """See ``Retriever.with_full_decoding``."""
        return self._whole.with_full_decoding()

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count tokens, see ``Processor.count_tokens``."""
        check_texts(texts)
        return [
            sum(encoding.attention_mask)
            for encoding in self._texts.tokenizer.encode_batch(list(texts))
        ]

    def unknown_words(self, text: str) -> list[str]:
        """A tokenizer knows all words."""
        return []


class PairedModel(Retriever):
    """Texts by one model, and images by the model whose vectors it was trained on.

    Args:
        queries: Model of the texts, with one vector per text.
        load_items: Loads the model of the images.
    """

    def __init__(self, queries: Retriever, load_items: Callable[[], Retriever]):
        self._queries = queries
        self._load_items = load_items

    @cached_property
    def _items(self) -> Retriever:
        return self._load_items()

    def __getattr__(self, name: str) -> Any:
        # Called for the attributes that the constructor of Retriever would set.
        if name.startswith("_"):
            raise AttributeError(name)
        # Images are decoded for the processor. Texts do not use it, see below.
        return getattr(self._items if name == "processor" else self._queries, name)

    @property
    def fingerprint(self) -> str:
        """See ``Retriever.fingerprint``."""
        return self._queries.fingerprint

    def encode_texts(self, texts: Sequence[str], on_progress: OnBatch | None = None) -> Tensor:
        """Encode texts, see ``Retriever.encode_texts``."""
        return self._queries.encode_texts(texts, on_progress)

    def encode_text(self, texts: Sequence[str], on_progress: OnBatch | None = None) -> Encoded:
        """Encode texts, see ``Retriever.encode_text``."""
        return self._queries.encode_text(texts, on_progress)

    def encode_visual(self, images: Sequence[Any], on_progress: OnBatch | None = None) -> Encoded:
        """Encode images, see ``Retriever.encode_visual``."""
        return Encoded(self._items.to_unit_rows(self._items.encode_visual(images, on_progress)))

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count tokens, see ``Processor.count_tokens``."""
        return self._queries.count_tokens(texts)

    def unknown_words(self, text: str) -> list[str]:
        """Find unknown words, see ``Processor.unknown_words``."""
        return self._queries.unknown_words(text)


class GivenVectors(Retriever):
    """Stands for the unknown model of an index whose vectors were read from a file.

    Args:
        file: The file.
        fingerprint: Fingerprint of its vectors.
    """

    def __init__(self, file: str, fingerprint: str):
        self.file = file
        self._fingerprint = fingerprint
        # Vectors are compared by their cosines.
        self.matcher: Any = SimpleNamespace(
            late_interaction=None, matryoshka_dims=(), score_is_cosine=True, rerank_top_k=0
        )
        # Files are decoded for their perceptual hashes only.
        visual = SimpleNamespace(crops=1, full_decoding=False)
        self.processor: Any = SimpleNamespace(
            visual_spec=visual, converts_single_images=False, min_side=MIN_SIDE, items=None
        )

    @property
    def device(self) -> torch.device:
        """The CPU, as nothing is encoded."""
        return torch.device("cpu")

    def _problem(self) -> RunError:
        return RunError(
            f"{self.file}: expected a model for the query, got an index of vectors from this file, "
            "which has none. Train one for texts with visavis train --index INDEX --data DATA, use "
            "it with visavis indexes use-queries INDEX RUN, or search for items similar to one "
            "with --like KEY."
        )

    @property
    def fingerprint(self) -> str:
        """See ``Retriever.fingerprint``."""
        return self._fingerprint

    def encode_text(self, texts: Sequence[str], on_progress: OnBatch | None = None) -> Encoded:
        """Raise RunError, as there is no model."""
        raise self._problem()

    def encode_visual(self, images: Sequence[Any], on_progress: OnBatch | None = None) -> Encoded:
        """Raise RunError, as there is no model."""
        raise self._problem()

    def with_full_decoding(self) -> Retriever:
        """Raise RunError, as no image is encoded."""
        raise RunError(
            f"--full-decoding: expected none, because {self.file} holds the vectors, and no image "
            "is encoded. Remove it."
        )

    def unknown_words(self, text: str) -> list[str]:
        """No word is known to be unknown."""
        return []


def open_query_model(
    name: str, fingerprint: str, length: int, load: Callable[[], Retriever]
) -> Retriever:
    """Open the model of an index for text queries.

    Args:
        name: Location of the model.
        fingerprint: Its fingerprint in the index.
        length: Number of dimensions of the vectors of the index.
        load: Loads the whole model, and checks that it has this fingerprint.

    Returns:
        The model, which is loaded later if it is a known CLIP or SigLIP.

    Raises:
        VisavisError: From ``load``.
    """
    folder = _dual_encoder_folder(name)
    texts = None
    if folder is not None and _recorded(folder, fingerprint):
        texts = DualEncoderTexts.open(folder)
    if texts is not None:
        return TextQueryModel(texts, length, load)
    model = load()
    record_text_queries(name, fingerprint, model)
    return model


def record_text_queries(name: str, fingerprint: str, model: Retriever) -> None:
    """Record whether ``DualEncoderTexts`` yields the vectors of a model, for later searches.

    Args:
        name: Location of the model.
        fingerprint: Its fingerprint in the index.
        model: The model.
    """
    folder = _dual_encoder_folder(name)
    if folder is None or _recorded(folder, fingerprint) is not None:
        return
    with suppress(StorageError):  # a user without a home folder, or a full disk
        is_equal = _gives_vectors_of(DualEncoderTexts.open(folder), model)
        storage.write_checksummed_json(_record_file(folder, fingerprint), is_equal)


def _recorded(folder: Path, fingerprint: str) -> bool | None:
    with suppress(StorageError):
        is_equal: bool | None = storage.read_checksummed_json(
            _record_file(folder, fingerprint), bool
        )
        return is_equal
    return None


def _record_file(folder: Path, fingerprint: str) -> Path:
    files = [file for file in folder.rglob("*") if os.path.isfile(file)]
    key = storage.stat_hash([*files, Path(__file__)], torch.__version__, fingerprint)
    return storage.cache_folder() / "checks" / f"text-queries-{key}.json"


def _dual_encoder_folder(name: str) -> Path | None:
    """Folder of a CLIP or SigLIP, pretrained or trained in all weights."""
    folder = Path(name)
    folder = folder / "model" if os.path.exists(folder / "model" / "config.json") else folder
    if os.path.isfile(folder / VISUAL_BACKBONE_FOLDER / "config.json"):
        config = storage.read_json(folder / "config.json", dict[str, Any])
        return folder if config.get("kind") == "CLIP" else None
    try:
        found = find_dual_encoder(folder)
        return None if found is None else model_folder(found)
    except VisavisError:  # loading the model reports it
        return None


def _gives_vectors_of(texts: DualEncoderTexts | None, model: Retriever) -> bool:
    """Whether the text side yields the vectors of the model, which may have other settings."""
    if texts is None:
        return False
    try:
        vectors = texts.encode(SAMPLE_TEXTS)
    except (KeyError, IndexError, RuntimeError):  # weights of another architecture
        return False
    expected = model.encode_texts(SAMPLE_TEXTS)
    if model.embedding_dim is not None:
        vectors = unit_rows(vectors[:, : model.embedding_dim])
    return vectors.shape == expected.shape and bool(
        (vectors - expected).abs().max() <= MAX_DIFFERENCE
    )
