"""Loading of pretrained models from files of others: every file is checked, and code in a folder is
never run.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visavis.core import storage
from visavis.core.errors import DataError, MissingExtra, SpecError, VisavisError
from visavis.models.encoders.checkpoint_files import (
    check_finite_weights,
    check_weight_names,
    check_weight_shapes,
    read_checkpoint,
    wrapper_of,
)
from visavis.models.encoders.cnn_backbones import (
    PUBLISHED_BACKBONES,
    published_backbone_name,
    published_weights_file,
)
from visavis.models.encoders.preprocessing import patch_inputs
from visavis.models.encoders.pretrained_files import (
    BIN_WEIGHTS_PATTERN,
    SENTENCE_CONFIG,
    import_transformers,
    model_folder,
    quiet_transformers,
    refuse_adapter,
    weights_are_loaded_later,
)

_LOCAL = {"trust_remote_code": False, "local_files_only": True}
_INCOMPLETE_ADVICE = "Download a complete copy"
_CODE_ADVICE = "Such code is never run. Use a model type that transformers contains"
_FIXED_SIZE_TYPES = (
    *(
        f"{name}_vision_model"
        for name in ("clip", "siglip", "chinese_clip", "altclip", "metaclip_2")
    ),
    "vit",
    "deit",
)
"""Image encoders that read other sizes only with the option ``interpolate_pos_encoding``."""
_PADDED_TEXT_TYPES = ("siglip_text_model", "siglip2_text_model")
"""Text encoders that were trained on texts padded to one length, and read the padding."""
_OFFSET_TYPES = (
    "altclip_text_model",
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "mpnet",
)
"""Text encoders whose first position has the number after the padding token's."""
_END_TOKEN_TYPES = ("clip_text_model", "metaclip_2_text_model")
"""Text encoders that read the vector of a text at its end token."""
_SAMPLE_SIZE = 100
"""Number of words of its own vocabulary with which a tokenizer is tested."""


@dataclass(frozen=True)
class _ModelType:
    """Required part of a ``config.json``. A timm model has ``architecture`` instead of
    ``model_type``.
    """

    model_type: str


@dataclass(frozen=True)
class _TokenizerCode:
    """Part of a ``tokenizer_config.json`` that identifies its code."""

    tokenizer_class: str | None = None
    auto_map: dict[str, Any] | list[Any] | None = None


def load_pretrained_config(folder: Path) -> Any:
    """Load the config of a folder."""
    with loading_from(folder, "a config that transformers can read") as transformers:
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
    if config.model_type == "timm_wrapper" and config.model_args:
        # Newer timm writes it, and transformers sets it as well.
        config.model_args.pop("num_classes", None)
    return config


def load_pretrained_model(
    folder: Path,
    auto_class: str = "AutoModel",
    *,
    new_head: bool = False,
    text_only: bool = False,
    advice: str = _INCOMPLETE_ADVICE,
    **options: Any,
) -> Any:
    """Load a model in evaluation mode. All weights must be in the folder and finite, except a
    ``new_head``. A pooler without weights is removed.
    """
    only_bin_weights = any(folder.glob(BIN_WEIGHTS_PATTERN)) and not any(
        folder.glob("*.safetensors")
    )
    options |= {
        "use_safetensors": None if only_bin_weights else True,
        # `.bin` files are read as tensors only. Nothing is unpickled.
        "weights_only": True,
        "output_loading_info": True,
    }
    config = load_pretrained_config(folder)
    with loading_from(folder, "a model that transformers can read") as transformers:
        options |= {"config": config} if config.model_type == "timm_wrapper" else {}
        kind = _text_class(config) if text_only else getattr(transformers, auto_class)
        model, loading = kind.from_pretrained(folder, **_LOCAL, **options)
    _check_loaded_names(folder, model, loading, new_head, advice)
    if only_bin_weights and sys.platform == "win32":
        # transformers maps these files, and Windows neither replaces nor removes a mapped file.
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    check_finite_weights(model.named_parameters(), folder)
    return model.eval()


def check_weight_files(folder: Path) -> None:
    """Check that a folder has the weights of its config, without reading them."""
    # On the device "meta", tensors have shapes but no values.
    with loading_from(folder, "a model that transformers can read") as transformers:
        model, loading = transformers.AutoModel.from_pretrained(
            folder, **_LOCAL, device_map="meta", output_loading_info=True
        )
    _check_loaded_names(folder, model, loading, False, _INCOMPLETE_ADVICE)


def _text_class(config: Any) -> Any:
    """The class of a dual encoder without its image encoder, whose weights are not read either."""
    import transformers

    with torch.device("meta"):
        kind = type(transformers.AutoModel.from_config(config, trust_remote_code=False))

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for name, _ in list(self.named_children()):
            if not name.startswith("text_"):
                delattr(self, name)

    def initialize(self: Any, module: Any) -> None:
        # Of the whole model, it initializes the projections of both sides.
        if module is not self:
            kind._init_weights(self, module)

    methods = {"__init__": build, "_init_weights": initialize}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def build_empty_model(folder: Path, *, with_pooler: bool = False, text_only: bool = False) -> Any:
    """Build the model of a folder's config without its weights, which are loaded later.
    ``with_pooler``: they include a pooler.
    """
    with loading_from(folder, "a config that transformers can read") as transformers:
        config = load_pretrained_config(folder)
        if text_only:
            return _text_class(config)(config).to(torch.float32).eval()
        model = transformers.AutoModel.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        ).eval()
    # from_config always adds a pooler, which these weights may lack.
    pooler = getattr(model, "pooler", None)
    if pooler is not None and list(pooler.parameters()) and not with_pooler:
        model.pooler = None
    return model


def load_pretrained_tokenizer(folder: Path, *, has_own_model: bool = True) -> tuple[Any, int]:
    """Load the tokenizer of a folder, and the number of tokens after which a text is cut.
    ``has_own_model``: the config also describes the model that will read the tokens.
    """
    config = load_pretrained_config(folder)
    config = getattr(config, "text_config", config)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise DataError(
            f"text.encoder: expected a model that reads texts, got {folder}, which reads images "
            f"only ({config.model_type}). "
            "Use it as visual.encoder, or name another model."
        )
    with loading_from(folder, "a tokenizer that transformers can read") as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
        max_length = tokenizer.model_max_length
        if (num_positions := getattr(config, "max_position_embeddings", None)) is not None:
            first = config.pad_token_id + 1 if config.model_type in _OFFSET_TYPES else 0
            max_length = min(num_positions - first, max_length)
        # A test with words of its own vocabulary.
        words = sample_vocabulary(tokenizer)
        max_words = max_length - tokenizer.num_special_tokens_to_add()
        token_ids = (
            [tokenizer(word, truncation=True, max_length=max_length)["input_ids"] for word in words]
            if max_words > 0
            else []
        )
    problem = ""
    if max_words < 1:
        problem = (
            f" is damaged: expected room for words in a text, got a maximum of {max_length} tokens."
            " Download it again."
        )
    elif len(words) < 2 or len(set(map(tuple, token_ids))) <= len(words) // 2:
        problem = (
            ": expected a working tokenizer, got one that maps different words to the same tokens. "
            "Add the tokenizer.json, vocab.txt or .model with which its model was trained."
        )
    elif (largest := max(map(max, token_ids))) >= config.vocab_size:
        problem = (
            f": expected the model's own tokenizer, with ids below {config.vocab_size:,}, got ids "
            f"up to {largest:,}. Use the tokenizer with which the model was trained."
        )
    if problem:
        raise DataError(f"{folder}{problem}")
    if has_own_model:
        _check_end_token(folder, config, tokenizer, token_ids)
    if config.model_type not in _PADDED_TEXT_TYPES:
        # Positions and poolings count from the first token. SigLIP pads every text to one length,
        # on the side of its training.
        tokenizer.padding_side = "right"
    return tokenizer, max_length


def open_text_source(name: str, checkpoint: Path, reason: str) -> tuple[Path, Any]:
    """Find the folder of the text model that a checkpoint needs, and load its tokenizer."""
    try:
        folder = model_folder(name)
        tokenizer, _ = load_pretrained_tokenizer(folder, has_own_model=False)
    except DataError as error:
        raise DataError(
            f"{checkpoint} {reason}, which it does not contain. Pass its folder or name as text. "
            f"{error}"
        ) from None
    return folder, tokenizer


def _check_end_token(folder: Path, config: Any, tokenizer: Any, token_ids: list[list[int]]) -> None:
    """Raise DataError if a CLIP would not read the vector of a text at the end of the text."""
    if config.model_type not in _END_TOKEN_TYPES:
        return
    for ids in token_ids:
        # As transformers pools: configs of CLIP before its version 4.31 have the wrong id 2, which
        # means the highest id of the padded text.
        is_highest = config.eos_token_id == 2 and config.model_type == "clip_text_model"
        end = max([*ids, tokenizer.pad_token_id or 0]) if is_highest else config.eos_token_id
        if ids[-1] != end:
            rule = (
                f"{end} (the highest id, because text_config.eos_token_id is 2)"
                if is_highest
                else f"text_config.eos_token_id = {end}"
            )
            raise DataError(
                f"{folder}: expected texts that end with the token {rule}, at which the model "
                f"reads their vectors, got the end token {ids[-1]} "
                "of the tokenizer. Set text_config.eos_token_id in config.json, or use the "
                "tokenizer with which the model was trained."
            )


def check_reads_images(name: str, folder: Path) -> None:
    """Check that a model is not a text model, without loading its weights."""
    config = load_pretrained_config(folder)
    # Image models have no vocabulary.
    reads_texts = isinstance(getattr(config, "vocab_size", None), int)
    if reads_texts and not any(
        hasattr(config, part) for part in ("vision_config", "image_size", "num_channels")
    ):
        raise DataError(
            f"visual.encoder: expected a model that reads images, got {name}, which reads texts "
            f"only ({config.model_type}). "
            "Use it as text.encoder, or name another model."
        )


def native_image_size(config: Any) -> tuple[int, int] | None:
    """Return height and width of the images a model was trained on. None: not in the config."""
    size = getattr(getattr(config, "vision_config", config), "image_size", None)
    if isinstance(size, int):
        return size, size
    return (size[0], size[1]) if isinstance(size, (list, tuple)) and len(size) == 2 else None


def is_vision_transformer(config: Any) -> bool:
    """Report whether an image model reads patches of one size at one resolution. Models with
    several resolutions pad images.
    """
    vision = getattr(config, "vision_config", config)
    return all(
        isinstance(getattr(vision, name, None), int) for name in ("patch_size", "hidden_size")
    ) and not hasattr(vision, "depths")


def check_image_size(config: Any, size: int, name: str) -> None:
    """Check that patches of a vision transformer cover images of another size than its own
    completely.
    """
    if not is_vision_transformer(config) or native_image_size(config) == (size, size):
        return
    patch = getattr(config, "vision_config", config).patch_size
    if size % patch == 0:
        return
    lower = size // patch * patch
    nearest = f"{lower} or {lower + patch}" if lower else str(patch)
    raise SpecError(
        f"visual.image_size: expected a multiple of {patch}, the patch size of {name}, got {size}. "
        f"Set the nearest size, {nearest}."
    )


def check_default_size(config: Any, size: Sequence[int], folder: Path) -> None:
    """Check that the preprocessing of a folder gives images of the size in its config. No size was
    set, so that none is interpolated.
    """
    native = native_image_size(config)
    # DINOv2 and similar models interpolate by themselves, and were published with two sizes.
    model_type = getattr(config, "vision_config", config).model_type
    if native is None or tuple(size) == native or model_type not in _FIXED_SIZE_TYPES:
        return
    sizes = [" x ".join(map(str, pair)) for pair in (native, size)]
    raise DataError(
        f"{folder / 'preprocessor_config.json'}: expected images of {sizes[0]} pixels, the "
        f"image_size of config.json, got {sizes[1]}. Set its size and crop_size to {sizes[0]}."
    )


def image_features(model: Any, pixels: Tensor) -> Any:
    """Encode pixels ``[N, 3, H, W]``, or patches of ``PatchPreprocessing``. Position embeddings are
    interpolated for another image size than the model's, as ``interpolate_pos_encoding`` does.
    """
    encode = getattr(model, "get_image_features", model)
    if pixels.dim() == 3:
        return encode(**patch_inputs(pixels))
    native = native_image_size(getattr(model, "config", None)) or getattr(
        getattr(getattr(model, "timm_model", None), "patch_embed", None), "img_size", None
    )
    if native is None or tuple(native) == tuple(pixels.shape[-2:]):
        return encode(pixel_values=pixels)
    if _can_interpolate(model):
        return encode(pixel_values=pixels, interpolate_pos_encoding=True)
    try:
        return encode(pixel_values=pixels)
    # transformers and timm raise these for a wrong size.
    except (AssertionError, ValueError):
        sizes = [" x ".join(map(str, size)) for size in (native, pixels.shape[-2:])]
        raise SpecError(
            f"visual.image_size: expected the size of the encoder, {sizes[0]} pixels, because it "
            "cannot interpolate its position embeddings, "
            f"got {sizes[1]}. Remove visual.image_size, or name another encoder."
        ) from None


def _can_interpolate(model: Any) -> bool:
    """Whether the image encoder of a model has the option ``interpolate_pos_encoding``."""
    forward = getattr(model, "vision_model", model).forward
    return "interpolate_pos_encoding" in inspect.signature(forward).parameters


@torch.no_grad()
def interpolated_positions(model: Any, image_size: int, prefix: str) -> dict[str, Tensor]:
    """Compute the position embeddings of an image encoder, by name, for images of another size.
    Empty: it has none, or always interpolates.
    """
    embeddings = model.embeddings
    learned = [item for item in embeddings.named_parameters() if "position" in item[0]]
    if not learned or not _can_interpolate(model):
        return {}
    name, positions = learned[0]
    # Tokens of patches, and special tokens before them.
    patch = model.config.patch_size
    num_special = positions.shape[-2] - (model.config.image_size // patch) ** 2
    num_tokens = (image_size // patch) ** 2 + num_special
    # Only the shape of the tokens is read.
    tokens = torch.empty(1, num_tokens, positions.shape[-1], device="meta")
    resized = embeddings.interpolate_pos_encoding(tokens, image_size, image_size)
    return {f"{prefix}embeddings.{name}": resized.reshape(*positions.shape[:-2], num_tokens, -1)}


def reads_padding(config: Any) -> bool:
    """Report whether a dual encoder was trained on texts padded to one length, and reads the
    padding.
    """
    text_type = getattr(getattr(config, "text_config", None), "model_type", "")
    return text_type in _PADDED_TEXT_TYPES


def load_pretrained_processor(folder: Path) -> Any:
    """Load the processor of images and texts of a folder."""
    with loading_from(folder, "a processor that transformers can read") as transformers:
        return transformers.AutoProcessor.from_pretrained(folder, **_LOCAL)


def sample_vocabulary(tokenizer: Any) -> list[str]:
    """Sample different words of a tokenizer's vocabulary, from its first to its last."""
    special = set(tokenizer.all_special_tokens)
    tokens = [
        token
        for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        if token not in special
    ]
    # The last word, too: ids beyond the vocabulary of the model are at its end.
    sampled = [*tokens[:: len(tokens) // _SAMPLE_SIZE + 1], *tokens[-1:]]
    words = [tokenizer.convert_tokens_to_string([token]).strip() for token in sampled]
    return list(dict.fromkeys(word for word in words if word))


@torch.no_grad()
def check_encoding(
    encode: Callable[[], Any], folder: Path, input_name: str, *, image_size: int = 0
) -> Tensor:
    """Encode an item once, so that inconsistent files of a folder are found when it is opened."""
    # A size that was set is the likely cause.
    advice = (
        "Set another visual.image_size for this model" if image_size else "Download the model again"
    )
    size = f" of {image_size} x {image_size} pixels" if image_size else ""
    with loading_from(folder, f"a model that can encode {input_name}{size}", advice):
        vectors = encode()
    if not vectors.isfinite().all():
        raise DataError(
            f"{folder} is damaged: expected finite features of {input_name}, got NaN or infinity. "
            "Download it again."
        )
    return vectors


def check_text_encoding(
    encode: Callable[[list[str]], Tensor], folder: Path, tokenizer: Any
) -> None:
    """Encode two words once, as ``check_encoding``. Their vectors ``[N, ...]`` must differ."""
    first, *others = sample_vocabulary(tokenizer)
    ids = tokenizer(first)["input_ids"]
    # A word that differs for the tokenizer: two unknown words are the same token.
    second = next(word for word in others if tokenizer(word)["input_ids"] != ids)
    vectors = check_encoding(lambda: encode([first, second]), folder, "a text")
    if vectors[0].allclose(vectors[1], rtol=1e-5, atol=1e-7):
        raise DataError(
            f"{folder}: expected different vectors of the texts {first!r} and {second!r}, got "
            "equal ones. Download it again."
        )


@contextmanager
def loading_from(
    folder: Path, expected: str, advice: str = "Download the model again"
) -> Iterator[Any]:
    """Convert the errors of libraries that read a folder, and yield transformers."""
    # A pipe or device among the files would block a library forever.
    for file in folder.iterdir():
        if not os.path.isdir(file):
            with storage.reading_regular_file(file):
                pass
    # Before transformers reads the folder, because it could run the code.
    _refuse_code(folder)
    try:
        with quiet_transformers() as transformers:
            yield transformers
    except (VisavisError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - transformers and tokenizers raise errors of every kind on damaged files
        if "ignore_mismatched_sizes" in str(error):
            reason = "its weights have other shapes than in its config.json"
        elif any(mark in str(error) for mark in ("weights_only", "PytorchStreamReader")):
            reason = (
                "its weights are damaged, or contain objects that could run code and are never "
                "opened"
            )
        else:
            reason = textwrap.shorten(str(error), 200, placeholder=" ...").rstrip(".: ")
            # The message of a KeyError is only the key.
            if isinstance(error, KeyError):
                reason = f"{type(error).__name__} {reason}"
        raise DataError(
            f"{folder}: expected {expected}, got an error ({reason or type(error).__name__}). "
            f"{advice}, or use another one."
        ) from None


def _refuse_code(folder: Path) -> None:
    """Raise DataError if a folder needs code of its own or of others."""
    transformers = import_transformers()
    if os.path.exists(folder / "modules.json") and not os.path.exists(folder / "config.json"):
        # The first step of a sentence-transformers model is not a transformer.
        return
    config = storage.read_json(folder / "config.json", dict[str, Any])
    if "model_type" not in config and "pretrained_cfg" in config:
        _check_timm(config, folder)
        return
    kind = storage.read_json(folder / "config.json", _ModelType).model_type
    if os.path.exists(sentence := folder / SENTENCE_CONFIG):
        # Its options go to transformers.
        config["options"] = storage.read_json(sentence, dict[str, Any])
    file = folder / "tokenizer_config.json"
    settings = _TokenizerCode()
    if os.path.exists(file):
        settings = storage.read_json(file, _TokenizerCode)
    problem = ""
    if config.get("auto_map") and kind not in transformers.CONFIG_MAPPING:
        problem = (
            f"a model type of transformers, got {kind} with code of its own (auto_map in "
            f"config.json). {_CODE_ADVICE}."
        )
    elif settings.auto_map and not hasattr(transformers, settings.tokenizer_class or ""):
        problem = (
            "a tokenizer of transformers, got one with code of its own (auto_map in "
            f"tokenizer_config.json). {_CODE_ADVICE}."
        )
    elif kernel := next(_external_kernels(config), None):
        problem = (
            f"no external code in config.json, got {kernel!r}. Such code is never run. Remove this "
            "entry."
        )
    if problem:
        raise DataError(f"{folder}: expected {problem}")
    refuse_adapter(folder)


def _check_timm(config: dict[str, Any], folder: Path) -> None:
    """Check that timm is installed, and that a config names an architecture of timm and no other
    files.
    """
    if importlib.util.find_spec("timm") is None:
        raise MissingExtra("timm", "timm", f"the image encoder {folder}")
    architecture = config.get("architecture")
    arguments = config.get("model_args") or {}
    unknown = [
        name
        for name in sorted(arguments)
        if name.startswith(("checkpoint", "pretrained", "features"))
    ]
    problem = ""
    if not isinstance(architecture, str) or not re.fullmatch(r"\w+", architecture):
        problem = (
            f"architecture: expected the name of a timm model, got {architecture!r}. Use another "
            "model."
        )
    elif unknown:
        problem = (
            f"model_args: expected settings of the architecture, got {unknown[0]}. Remove this "
            "entry."
        )
    if problem:
        raise DataError(f"{folder}: {problem}")


def _external_kernels(config: Any) -> Iterator[str]:
    """Yield implementations in a config, at any depth, that are in a repository of the hub."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, str) and "/" in value and key.endswith("_implementation"):
            yield value
        yield from _external_kernels(value)


def _check_loaded_names(
    folder: Path, model: Any, loading: dict[str, Any], new_head: bool, advice: str
) -> None:
    """Raise DataError for missing or additional weights, and remove a pooler without weights."""
    base = f"{model.base_model_prefix}." if new_head else ""
    missing = sorted(
        key
        for key in loading["missing_keys"]
        if key.startswith(base) and not key.startswith(f"{base}pooler.")
    )
    # Names with another number are layers that the config does not have. Other additional weights
    # are heads of the pretraining.
    names = {_without_numbers(name) for name in model.state_dict()}
    extra = sorted(key for key in loading["unexpected_keys"] if _without_numbers(key) in names)
    problem = ""
    if missing and (wrapper := wrapper_of(loading["unexpected_keys"])):
        problem = (
            f"names of weights as in transformers, got names that start with {wrapper} as a "
            "training wrapper saves them. Remove this prefix from the names, or save the model "
            "inside the wrapper with save_pretrained."
        )
    elif missing:
        problem = (
            f"all weights of its config.json, got none for {missing[0]} and {len(missing) - 1} "
            f"others. {advice}."
        )
    elif extra:
        problem = (
            f"only weights of its config.json, got also {extra[0]} and {len(extra) - 1} others. "
            "Use the config.json of this model."
        )
    if problem:
        raise DataError(f"{folder}: expected {problem}")
    # Only the pooler is missing here.
    if loading["missing_keys"] and not new_head:
        model.pooler = None


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def open_published_backbone(name: str) -> nn.Module:
    """Open a published image encoder in evaluation mode. Its weights are random where others are
    loaded later.
    """
    backbone = PUBLISHED_BACKBONES[published_backbone_name(name) or name]
    if weights_are_loaded_later():
        return backbone.build().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    file = published_weights_file(name)
    # Without memory and initialization of weights that are replaced at once.
    with torch.device("meta"):
        model = backbone.build()
    expected = model.state_dict()
    # Older files lack the counters of batch norms, which are not needed.
    counters = {
        name: torch.zeros((), dtype=torch.long)
        for name in expected
        if name.endswith("num_batches_tracked")
    }
    tensors = counters | read_checkpoint(file)
    ignored = re.compile(f"{re.escape(backbone.classifier_prefix)}.*")
    check_weight_names(tensors, expected, ignored, file, f"the weights of {backbone.files[0]}")
    check_weight_shapes(
        tensors,
        {name: part.shape for name, part in expected.items()},
        file,
        f"Download {backbone.files[0]}.",
    )
    weights = {
        name: tensors[name].float() if tensors[name].is_floating_point() else tensors[name]
        for name in expected
    }
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
