"""Files of the Hugging Face Hub: one error for each failed download, checked hashes, and data sets by name."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from visavis import storage
from visavis.data.splits import split_in_name
from visavis.errors import DataError, StorageError, requires_extra

DATASET_NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")
"""Name of a data set of the hub: ``hf:OWNER/NAME``, ``hf:OWNER/NAME:CONFIG`` or ``hf:OWNER/NAME@REVISION``."""
# Kinds of files that are opened as a data set. The first kind that a repository has is downloaded.
_SUFFIXES = (".parquet", ".arrow", ".tar")


OnBytes = Callable[[int, int], None]
"""Receives the downloaded bytes and all bytes."""


class HubUnreachableError(DataError):
    """The hub is offline or cannot be reached, and the files are not in its cache."""


@contextmanager
def hub_errors(name: str, expected: str) -> Iterator[None]:
    """Turn every error of a download into one error of visavis. The warnings of the hub's library are not printed.

    Args:
        name: Name of the model or data set.
        expected: The expected content, for the error.

    Yields:
        Nothing.

    Raises:
        HubUnreachableError: If the hub cannot be reached.
        StorageError: If the disk is full.
        DataError: If the hub does not provide the files, or the download was interrupted.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging as hub_logging

    if not (os.path.isabs(constants.HF_HUB_CACHE) or {"HF_HOME", "HF_HUB_CACHE"} & os.environ.keys()):
        raise StorageError("HF_HOME: expected a folder for downloads, got none, and this user has no home folder. Set HF_HOME=FOLDER.")
    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # The full disk itself is reported by the error.
            warnings.filterwarnings("ignore", message="Not enough free disk space")
            yield
    except (errors.LocalEntryNotFoundError, errors.DryRunError) as error:
        cause = error.__cause__
        if isinstance(cause, errors.GatedRepoError | errors.RepositoryNotFoundError):
            raise _not_provided(name, expected, cause) from None
        problem = "it was not downloaded before, and the hub is not reachable"
        raise HubUnreachableError(f"{name}: expected {expected}, got none ({problem}). Connect to the network once.") from None
    # The HTTP library of huggingface_hub, and with it the class of an interruption, differs between versions.
    except Exception as error:  # noqa: BLE001
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"{name}: expected free disk space for the download, got a full disk at {constants.HF_HUB_CACHE}. Free space there, or set "
                "HF_HOME to a folder on another disk."
            ) from None
        refused = errors.HFValidationError | errors.RepositoryNotFoundError | errors.RevisionNotFoundError
        if isinstance(error, refused) or (isinstance(error, OSError) and error.errno):
            raise _not_provided(name, expected, error) from None
        raise DataError(
            f"{name}: expected a complete download from {constants.ENDPOINT}, got an interrupted one ({type(error).__name__}). "
            "Run the command again."
        ) from None
    finally:
        hub_logging.set_verbosity(level)


def _not_provided(name: str, expected: str, error: Exception) -> DataError:
    """The error for files that the hub does not provide."""
    from huggingface_hub import errors

    # A GatedRepoError is a RepositoryNotFoundError, too.
    explanations = {
        errors.HFValidationError: ("invalid name for the hub", "Restore the folder or use another name."),
        errors.GatedRepoError: ("access is restricted", "Request access on its hub page and log in with hf auth login."),
        errors.RevisionNotFoundError: ("it has no such revision", "Use another revision."),
        errors.RepositoryNotFoundError: ("it does not exist, or is private", "Correct the name, or log in with hf auth login."),
    }
    unexpected = (storage.error_reason(error), "Check the name and the folder of the cache.")
    problem, fix = next((text for kind, text in explanations.items() if isinstance(error, kind)), unexpected)
    return DataError(f"{name}: expected {expected}, got none ({problem}). {fix}")


def download_message(name: str, num_bytes: int, license_name: str) -> str:
    """Return the line that is printed before a download.

    Args:
        name: Name of the model or data set.
        num_bytes: Size of the files that are downloaded.
        license_name: License, or the page that states it.

    Returns:
        The line.

    Example:
        >>> download_message("tiny/clip", 605_200_000, "MIT")
        'Downloading tiny/clip: 605 MB, license: MIT.'
    """
    size = f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.0f} kB"
    return f"Downloading {name}: {size}, license: {license_name}."


def hub_license(repository: str, kind: Literal["model", "dataset"]) -> str:
    """Return the license that the hub page of a repository states.

    Args:
        repository: ``OWNER/NAME``.
        kind: Kind of the repository.

    Returns:
        Its name, such as ``mit``. The address of the page if it names none.
    """
    from huggingface_hub import HfApi, constants

    info = HfApi(endpoint=constants.ENDPOINT).repo_info(repository, repo_type=kind)
    card = getattr(info, "card_data", None)
    # The license "other" has a name of its own.
    licenses: Any = (card.get("license_name") or card.get("license") or []) if card else []
    names = ", ".join([licenses] if isinstance(licenses, str) else map(str, licenses))
    return names or f"see {constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository}"


def verify_hashes(name: str, files: Iterable[Path]) -> None:
    """Compare downloaded files with their SHA-256, which is the name of a large file in the cache. Damaged files are removed.

    Args:
        name: Name of the model or data set.
        files: The files.

    Raises:
        DataError: If a file is damaged.
    """
    damaged = []
    for file in files:
        target = Path(os.path.realpath(file))
        if re.fullmatch("[0-9a-f]{64}", target.name):
            with target.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if digest != target.name:
                file.unlink()
                target.unlink()
                damaged.append(f"{file.name}: expected SHA-256 {target.name[:12]}..., got {digest[:12]}...")
    if damaged:
        removed = "The damaged file was removed." if len(damaged) == 1 else f"{len(damaged)} damaged files were removed."
        raise DataError(f"{name}: {damaged[0]} {removed} Run the command again.")


def hub_repository(folder: Path) -> Path | None:
    """Return the repository in the cache of the hub to which a folder of files belongs.

    Args:
        folder: A snapshot, or a folder in it. Its files are links to ``blobs`` next to all snapshots.

    Returns:
        The resolved folder of the repository. None: the folder is not in a snapshot.
    """
    snapshots = next((parent for parent in Path(os.path.realpath(folder)).parents if parent.name == "snapshots"), None)
    return snapshots.parent if snapshots is not None and os.path.isdir(snapshots.with_name("blobs")) else None


def progress_class(on_bytes: OnBytes) -> type[Any]:
    """Return a progress bar for the hub's library that is not shown and reports its bytes.

    Args:
        on_bytes: Receives the progress.

    Returns:
        The class.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class ByteCounter(tqdm):
        def __init__(self, *args: Any, **options: Any):
            self.counts_bytes, self.received = options.get("unit") == "B", 0
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.received += int(n or 0)
            if self.counts_bytes and self.total:
                on_bytes(min(self.received, self.total), self.total)

    return ByteCounter


@cache
def download_dataset(name: str) -> Path:
    """Return the folder of a data set of the hub. A data set that was downloaded before is neither updated nor searched on the hub.

    Name, size and license are logged at level INFO before a download, which the command line prints.

    Args:
        name: Name that ``DATASET_NAME`` matches.

    Returns:
        The folder of its Parquet, Arrow or tar files in the cache of the hub.

    Raises:
        HubUnreachableError: If the hub cannot be reached and the data set was not downloaded before.
        DataError: If the hub does not provide the data set, or it has no files of a known kind.
        MissingExtra: If ``huggingface_hub`` is not installed.
    """
    with requires_extra("hf", "data of the Hugging Face Hub"):
        from huggingface_hub import constants, snapshot_download
    parts = DATASET_NAME.fullmatch(name)
    if parts is None:
        raise DataError(f"{name}: expected hf:OWNER/NAME, with :CONFIG or @REVISION if needed. Correct the name.")
    key = hashlib.sha256(json.dumps([2, name, constants.HF_HUB_CACHE]).encode()).hexdigest()[:32]
    record = storage.cache_folder() / "hub" / f"{key}.json"
    # The folder of a complete download, and its files.
    downloaded: list[str] | None = storage.read_checksummed_json(record, list[str])
    if downloaded is not None and all(map(os.path.isfile, downloaded[1:])):
        return Path(downloaded[0])
    repository, revision = parts["repository"], parts["revision"]
    with hub_errors(name, "a data set of the Hugging Face Hub"):
        options: Any = {"dry_run": True, "tqdm_class": progress_class(lambda _, __: None)}
        available = snapshot_download(repository, repo_type="dataset", revision=revision, **options)
    files = _select_files(name, [file.filename for file in available], parts["config"])
    with hub_errors(name, "a data set of the Hugging Face Hub"):
        if missing := sum(file.file_size or 0 for file in available if file.filename in files and file.will_download):
            logging.getLogger(__name__).info("%s", download_message(name, missing, hub_license(repository, "dataset")))
        snapshot = Path(snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=files))
    verify_hashes(name, [snapshot / file for file in files])
    folder = snapshot / _config_of(files[0])
    storage.write_checksummed_json(record, [str(folder), *(str(snapshot / file) for file in files)])
    return folder


def _config_of(file: str) -> str:
    """Folder of the configuration of a file: the folders above ``data`` and above the name of a split."""
    folders = list(Path(file).parts[:-1])
    while folders and (folders[-1] == "data" or split_in_name(folders[-1]) is not None):
        folders.pop()
    return "/".join(folders)


def _select_files(name: str, files: list[str], config: str | None) -> list[str]:
    """Select the files of one kind and of one configuration."""
    suffix = next((suffix for suffix in _SUFFIXES if any(file.endswith(suffix) for file in files)), None)
    if suffix is None:
        names = ", ".join(sorted(files)[:5]) or "no files"
        raise DataError(
            f"{name}: expected a repository with {', '.join(_SUFFIXES)} files, got {names}. "
            "Add @refs/convert/parquet for the copy that the hub converts, or download the data set yourself."
        )
    by_config: dict[str, list[str]] = {}
    for file in sorted(file for file in files if file.endswith(suffix)):
        by_config.setdefault(_config_of(file), []).append(file)
    config_name = config or ("" if "" in by_config else "default")
    matches = [folder for folder in by_config if config_name in (folder, Path(folder).name)] or ([] if config else list(by_config))
    if len(matches) != 1:
        configs = ", ".join(filter(None, (Path(folder).name for folder in by_config))) or "no names"
        raise DataError(
            f"{name}: expected the name of one configuration, got {config or 'none'}. Name one as hf:OWNER/NAME:CONFIG ({configs})."
        )
    return by_config[matches[0]]
