"""Downloads of models from the Hugging Face hub: size before, progress, checked hashes, and one
clear error.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from visavis.core.errors import DataError
from visavis.data.hub_files import OnBytes, hub_errors, progress_class, verify_hashes

CONFIG_FILE_PATTERNS = ("*.json", "*.txt", "*.model")
"""Config, preprocessing and tokenizer files of a model folder."""
HUB_FILE_PATTERNS = (
    *CONFIG_FILE_PATTERNS,
    "model*.safetensors",
    "[0-9]*_*/model.safetensors",
    "[0-9]*_*/pytorch_model.bin",
)
"""Files that are downloaded from the hub, with the numbered steps of a sentence-transformers model.
"""
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
    """Return the folder of a model in the cache of the hub, without any network.

    Args:
        name: Name of the hub.

    Returns:
        The folder. None if the model is missing or incomplete.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(name, allow_patterns=list(HUB_FILE_PATTERNS), local_files_only=True)
        )
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # RuntimeError: the user has no home folder, and HF_HOME is not set
        return None
    return folder if is_model_folder(folder) and _has_weights(folder) else None


def missing_bytes(name: str) -> int:
    """Return the size of the files of a model that are not in the cache.

    Args:
        name: Name of the hub.

    Returns:
        Size in bytes.

    Raises:
        HubUnreachableError: If the hub cannot be reached.
        DataError: If the hub does not provide the model.
    """
    from huggingface_hub import snapshot_download

    with hub_errors(name, _EXPECTED):
        patterns = [*HUB_FILE_PATTERNS, BIN_WEIGHTS_PATTERN]
        files = snapshot_download(
            name,
            allow_patterns=patterns,
            dry_run=True,
            tqdm_class=progress_class(lambda _, __: None),
        )
    _check_files(name, [file.filename for file in files])
    has_safetensors = any(file.filename.endswith(".safetensors") for file in files)
    used = [file for file in files if not (has_safetensors and file.filename.endswith(".bin"))]
    return sum(file.file_size or 0 for file in used if file.will_download)


def download_hub_model(name: str, on_bytes: OnBytes | None = None) -> Path:
    """Return the folder of a model of the hub. Missing files are downloaded, and their weights are
    compared with the hub's hashes.

    A complete CLIP or SigLIP model in the cache is used without any network.

    Args:
        name: Name of the hub.
        on_bytes: Receives the progress.

    Returns:
        The folder.

    Raises:
        HubUnreachableError: If the hub cannot be reached and the model is not in the cache.
        StorageError: If the disk is full.
        DataError: If the hub does not provide the model, the download was interrupted, or a hash
            differs.
    """
    from huggingface_hub import snapshot_download

    cached = cached_hub_folder(name)
    # An index and adapters belong to these weights, so a newer version on the hub must not replace
    # them. An encoder without one of these files may be incomplete.
    if cached is not None and all(
        os.path.exists(cached / file)
        for file in ("preprocessor_config.json", "tokenizer_config.json")
    ):
        return cached
    with hub_errors(name, _EXPECTED, is_download=True):
        options: dict[str, Any] = (
            {} if on_bytes is None else {"tqdm_class": progress_class(on_bytes)}
        )
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILE_PATTERNS), **options))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=[BIN_WEIGHTS_PATTERN], **options)
    _check_files(name, [str(file.relative_to(folder)) for file in folder.rglob("*")])
    if folder != cached:
        verify_hashes(name, sorted(folder.iterdir()))
    return folder


def _check_files(name: str, files: list[str]) -> None:
    """Raise DataError if a repository lacks a config, or weights in a format that is read."""
    has_config = not MODEL_CONFIGS.isdisjoint(files)
    if has_config and any(
        fnmatch(file, pattern) for file in files for pattern in ("*.safetensors", "*.bin")
    ):
        return
    missing = (
        "weights as safetensors or pytorch_model.bin"
        if has_config
        else " or ".join(sorted(MODEL_CONFIGS))
    )
    raise DataError(
        f"{name}: expected {_EXPECTED}, got a repository without {missing}. Use the name of a "
        "model in the format of transformers."
    )


def is_model_folder(folder: Path) -> bool:
    """Check whether a folder has the config of a model of transformers, timm or
    sentence-transformers.

    Args:
        folder: Any path.

    Returns:
        Whether it has.
    """
    return any(os.path.exists(folder / name) for name in MODEL_CONFIGS)


def _has_weights(folder: Path) -> bool:
    patterns = ("*.safetensors", BIN_WEIGHTS_PATTERN, "[0-9]*_*/model.safetensors")
    return any(os.path.exists(file) for pattern in patterns for file in folder.glob(pattern))
