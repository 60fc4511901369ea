"""Default pretrained model of commands without a run: the user's setting, a model on this machine,
or a download.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visavis.core import storage
from visavis.core.environment import EnvironmentCheck, installed_version, shell_command
from visavis.core.errors import DataError, StorageError
from visavis.core.progress import Progress
from visavis.data.hub_files import (
    HubUnreachableError,
    download_message,
    how_to_go_online,
    hub_errors,
    hub_license,
    offline_reason,
    offline_variables,
)
from visavis.models.encoders.pretrained_files import (
    DUAL_ENCODER_TYPES,
    HUB_NAME,
    cached_hub_folder,
    import_transformers,
    local_model_folder,
    missing_bytes,
    model_folder,
)

SETTINGS_FILE = "settings.toml"


@dataclass(frozen=True)
class PretrainedModel:
    """A CLIP or SigLIP model of the hub.

    Attributes:
        name: Name of the hub.
        license: License of the weights, as published.
        download_mb: Size of the weights in MB.
    """

    name: str
    license: str
    download_mb: int


DEFAULT_MODELS = (
    PretrainedModel("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "MIT", 605),
    PretrainedModel("openai/clip-vit-base-patch32", "not named on its hub page", 605),
    PretrainedModel("google/siglip-base-patch16-224", "Apache-2.0", 813),
)
"""Models for searching without training, in the order of preference. The first one is downloaded if
none is on this machine.
"""


def settings_file() -> Path:
    """Return the path of the user's settings, which may not exist: in ``VISAVIS_CONFIG``, else in
    ``visavis`` of the user's config folder.
    """
    return storage.user_folder("VISAVIS_CONFIG", "XDG_CONFIG_HOME", ".config") / SETTINGS_FILE


def saved_model() -> str | None:
    """Return the folder or hub name in the user's settings. None: no model is set."""
    try:
        file = settings_file()
    except StorageError:  # without a home folder, there are no settings
        return None
    if not os.path.exists(file):
        return None
    name = storage.read_toml(file).get("model")
    if name is not None and not isinstance(name, str):
        raise DataError(
            f"{file}: model: expected a folder or hub name, got {name!r}. Set another one "
            "with visavis indexes default-model, or delete the file."
        )
    return name


def available_model() -> str | None:
    """Return the name of a model on this machine: of the table, in the hub's cache or in the folder
    ``backbones``, else another CLIP in it. None: there is none.
    """
    for candidate in DEFAULT_MODELS:
        if (
            local_model_folder(candidate.name) is not None
            or cached_hub_folder(candidate.name) is not None
        ):
            return candidate.name
    # Sorted, so that the choice does not depend on the file system.
    for config in sorted((storage.cache_folder() / "backbones").glob("*/config.json")):
        if storage.read_json(config, dict[str, Any]).get("model_type") in DUAL_ENCODER_TYPES:
            return config.parent.name
    return None


def check_default_model() -> EnvironmentCheck:
    """Return the line of ``visavis doctor`` about the default model, without loading it."""
    if installed_version("transformers") is None:
        return EnvironmentCheck("default model", "none", fix="pip install 'visavis[hf]'")
    try:
        saved = saved_model()
    except DataError as error:
        return EnvironmentCheck(
            "default model", str(error), ok=False, fix=f"delete {settings_file()}"
        )
    if saved is not None:
        return EnvironmentCheck("default model", f"{saved} ({settings_file()})")
    with suppress(StorageError):  # without a home folder, which the line about the cache reports
        if (available := available_model()) is not None:
            return EnvironmentCheck("default model", f"{available} (on this machine)")
    first = DEFAULT_MODELS[0]
    described = f"{first.name} ({first.download_mb} MB, license: {first.license})"
    # A few bytes of the hub show whether the model can be downloaded.
    can_download = False
    if not offline_variables():
        from huggingface_hub import HfApi

        # The library raises errors of its HTTP client and of its own.
        with suppress(Exception):
            HfApi().model_info(first.name, timeout=CONNECTION_TEST_S)
            can_download = True
    if can_download:
        return EnvironmentCheck("default model", f"{described}, downloaded when first used")
    return EnvironmentCheck(
        "default model",
        f"{described} is not on this machine, and {offline_reason()}",
        ok=False,
        fix=f"{how_to_go_online()} Or copy it from another machine: visavis index prints the "
        "command",
    )


CONNECTION_TEST_S = 3.0
"""Seconds after which ``visavis doctor`` regards the hub as not reachable."""

COPIED_FILES = (
    "config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files of a CLIP or SigLIP model that visavis reads."""


def how_to_copy(name: str, option: str = "--model FOLDER") -> list[str]:
    """Return lines about copying a model of the hub. ``option`` passes FOLDER to a command."""
    folder = "clip"
    advice = (
        "Or run this on another machine (pip install huggingface_hub), copy the folder with its "
        f"{len(COPIED_FILES)} files to this one, and pass {option.replace('FOLDER', folder)}:"
    )
    return [advice, f"  hf download {name} {' '.join(COPIED_FILES)} --local-dir {folder}"]


@contextmanager
def default_model(
    model: str | Path | None, progress: Progress, *, set_default: bool = False
) -> Iterator[str]:
    """Choose a model for this block. A model that is downloaded because none was named becomes the
    user's setting if the block succeeds.
    """
    import_transformers()
    name = None if model is None else str(model)
    saved = saved_model()
    if name is not None and os.path.exists(name):
        name = os.path.abspath(name)
    if name is None and saved is not None and os.path.isabs(saved) and not os.path.exists(saved):
        raise DataError(
            f"{settings_file()}: model: expected an existing folder, got {saved}. Pass --model "
            "NAME, or delete the file."
        )
    # The named model, the model of the settings, a model on this machine, else the first of the
    # table.
    local = name or saved or available_model()
    selected = local or DEFAULT_MODELS[0].name
    is_downloaded = _download(selected, progress, is_default=local is None)
    yield selected
    # Only after the block: a model that cannot be loaded must not become the default.
    folder = local_model_folder(selected) or cached_hub_folder(selected)
    # A named model becomes the default only if the caller wants it.
    is_new_default = set_default if name is not None else is_downloaded
    if not is_new_default or selected == saved or folder is None:
        return
    config = storage.read_json(folder / "config.json", dict[str, Any])
    # A run is not a CLIP or SigLIP.
    if config.get("model_type") in DUAL_ENCODER_TYPES:
        try:
            storage.set_toml_value(settings_file(), "model", selected)
        except (StorageError, DataError) as error:
            progress.message(f"The model could not be saved as the default: {error}")
        else:
            progress.message(
                f"Default model: {selected} (saved in {settings_file()}, change it with visavis "
                "indexes default-model NAME)."
            )


def _download(name: str, progress: Progress, *, is_default: bool) -> bool:
    """Download a model of the hub that is not on this machine, after a line with name, size and
    license. Return whether it was downloaded.
    """
    if (
        os.path.exists(name)
        or local_model_folder(name) is not None
        or not HUB_NAME.fullmatch(name)
        or cached_hub_folder(name) is not None
    ):
        return False
    listed = next((candidate for candidate in DEFAULT_MODELS if candidate.name == name), None)
    try:
        size = missing_bytes(name)
    except HubUnreachableError:
        size_and_license = (
            f" ({listed.download_mb} MB, license: {listed.license})" if listed else ""
        )
        argument = "model" if is_default else name
        error = HubUnreachableError(
            f"{argument}: expected a CLIP or SigLIP model on this machine, or a connection to the "
            f"Hugging Face hub, got neither: {name}{size_and_license} is not on this machine, and "
            f"{offline_reason()}. {how_to_go_online()}"
        )
        notes = how_to_copy(name)
        if is_default:
            program = shell_command()
            trained = "with a run that you trained on images with captions"
            notes += [
                "These work without a pretrained model:",
                f"  {program} demo",
                f"  {program} index RUN FOLDER    {trained}",
            ]
        for line in notes:
            error.add_note(line)
        raise error from None
    with hub_errors(name, "a CLIP or SigLIP model of the Hugging Face hub"):
        license_name = listed.license if listed else hub_license(name, "model")
    progress.message(download_message(name, size, license_name))
    model_folder(
        name,
        on_bytes=lambda done, total: progress.update(
            "download (MB)", done // 10**6, max(total // 10**6, 1), 0.0
        ),
    )
    return True
