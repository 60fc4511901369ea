"""Files of the Hugging Face Hub: one error for each failed download, checked hashes, data sets by
name, and uploads.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from visavis.core import storage
from visavis.core.errors import (
    DataError,
    SpecError,
    StorageError,
    VisavisError,
    format_value,
    requires_extra,
)
from visavis.data.file_names import split_in_name

# Name of a data set of the hub: ``hf:OWNER/NAME``, ``hf:OWNER/NAME:CONFIG`` or
# ``hf:OWNER/NAME@REVISION``.
DATASET_NAME = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
# Kinds of files that are opened as a data set. The first kind that a repository has is downloaded.
_SUFFIXES = (".parquet", ".arrow", ".tar")


OnBytes = Callable[[int, int], None]
"""Receives the downloaded bytes and all bytes."""


class HubUnreachableError(DataError):
    """The hub is offline or cannot be reached, and the files are not in its cache."""


class HubUnavailableError(DataError):
    """The hub was reached, but does not answer in time, allows no more requests for now, or has a
    problem of its own.
    """


HubKind = Literal["model", "dataset"]
"""Kind of a repository."""
# The hub's library reports, and keeps after a broken connection, whole chunks only: of 10 MB, 10 s at
# 1 MB/s.
_CHUNK_BYTES = 2**18
# Files up to this size start again after an interruption.
_MIN_RESUMED_BYTES = 2**20
# Time in seconds after which a line reports that the hub has not answered yet.
_WAITING_LINE_S = 3.0
# Time in seconds for a connection. Each request tries it once.
_CONNECTION_S = 4.0


def offline_variables() -> list[str]:
    """Return the environment variables that forbid downloads of the hub's library."""
    return [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
    ]


def offline_reason() -> str:
    """Return why the hub was not reached, as a clause."""
    names = offline_variables()
    if names:
        return f"{names[0]}={os.environ[names[0]]} forbids downloads"
    return "the hub is not reachable"


def how_to_go_online() -> str:
    """Return how to allow a download, as a sentence."""
    names = offline_variables()
    if names:
        return f"To download it, unset {' '.join(names)}."
    return "Connect to the network once."


@contextmanager
def hub_errors(name: str, expected: str, *, is_download: bool = False) -> Iterator[None]:
    """Turn every error of a request to the hub into one error of visavis. Warnings of the hub's
    library are not printed. ``expected`` is the content for the error.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
    from huggingface_hub.utils import logging as hub_logging

    if not (
        os.path.isabs(constants.HF_HUB_CACHE) or {"HF_HOME", "HF_HUB_CACHE"} & os.environ.keys()
    ):
        raise StorageError(
            "HF_HOME: expected a folder for downloads, got none, and this user has no home folder. "
            "Set HF_HOME=FOLDER."
        )
    level = hub_logging.get_verbosity()
    limit_s = constants.HF_HUB_ETAG_TIMEOUT

    def limit_waiting(request: Any) -> None:
        timeouts = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            key: limit_s if value is None else value for key, value in timeouts.items()
        }
        # A network that swallows packets. Others connect within a second.
        if "HF_HUB_ETAG_TIMEOUT" not in os.environ:
            request.extensions["timeout"]["connect"] = _CONNECTION_S

    # The library asks for information about a repository without a time limit, and has no setting
    # for it. With the hook, a request waits at most `HF_HUB_ETAG_TIMEOUT` seconds.
    hooks = getattr(get_session(), "event_hooks", {}).get("request", [])
    hooks.append(limit_waiting)
    message = f"Waiting for {constants.ENDPOINT}, at most {limit_s} s for each request."
    waiting = threading.Timer(_WAITING_LINE_S, logging.getLogger(__name__).info, ("%s", message))
    waiting.daemon = True
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        # A download reports its progress itself.
        if not is_download:
            waiting.start()
        with warnings.catch_warnings():
            # The full disk itself is reported by the error.
            warnings.filterwarnings("ignore", message="Not enough free disk space")
            yield
    except VisavisError:
        raise
    # The HTTP library of huggingface_hub, and with it the class of an error, differs between
    # versions.
    except Exception as error:  # noqa: BLE001
        raise _hub_error(name, expected, error) from None
    finally:
        waiting.cancel()
        hooks.remove(limit_waiting)
        hub_logging.set_verbosity(level)


def _hub_error(name: str, expected: str, error: Exception) -> VisavisError:
    """The error of visavis for an error of the hub's library."""
    from huggingface_hub import constants, errors

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"{name}: expected free disk space for the download, got a full disk at "
            f"{constants.HF_HUB_CACHE}. Free space there, or set "
            "HF_HOME to a folder on another disk."
        )
    is_missing = isinstance(error, errors.LocalEntryNotFoundError | errors.DryRunError)
    cause = (error.__cause__ or error) if is_missing else error
    status = getattr(getattr(cause, "response", None), "status_code", 0)
    is_system_error = isinstance(error, OSError) and bool(error.errno)
    # A run whose name has a typing error looks like a name of the hub.
    similar = storage.similar_path(name) if is_missing else None
    # Condition, class, problem and fix. The first condition that holds counts: classes of the
    # library derive from each other.
    cases: tuple[tuple[bool, type[DataError], str, str], ...] = (
        (
            isinstance(cause, errors.HFValidationError),
            DataError,
            "invalid name for the hub",
            "Restore the folder or use another name.",
        ),
        (
            isinstance(cause, errors.GatedRepoError),
            DataError,
            "access is restricted",
            "Request access on its hub page and log in with hf auth login.",
        ),
        (
            isinstance(cause, errors.RevisionNotFoundError),
            DataError,
            "it has no such revision",
            "Use another revision.",
        ),
        (
            status == 401,
            DataError,
            "it requires a login, or does not exist, status 401",
            "Correct the name, or log in again with hf auth login.",
        ),
        (
            status == 403,
            DataError,
            "access to it is forbidden, status 403",
            "Request access on its hub page, or log in with a token that may read it.",
        ),
        (
            status == 429,
            HubUnavailableError,
            "the hub allows no more requests for now, status 429",
            "Wait a few minutes, or log in with hf auth login.",
        ),
        (
            status >= 500,
            HubUnavailableError,
            f"the hub has a problem of its own, status {status}",
            "Run the command again later.",
        ),
        (
            isinstance(cause, errors.RepositoryNotFoundError),
            DataError,
            "it does not exist, or is private",
            "Correct the name, or log in with hf auth login.",
        ),
        (
            "ConnectTimeout" in type(cause).__name__,
            HubUnreachableError,
            f"it was not downloaded before, and {offline_reason()}",
            how_to_go_online(),
        ),
        (
            "Timeout" in type(cause).__name__,
            HubUnavailableError,
            f"{constants.ENDPOINT} did not answer within {constants.HF_HUB_ETAG_TIMEOUT} s",
            "Check the network, run the command again later, or set HF_HUB_ETAG_TIMEOUT to more seconds.",
        ),
        (
            isinstance(cause, json.JSONDecodeError),
            DataError,
            f"{constants.ENDPOINT} answers with another page",
            "Check HF_ENDPOINT, and log in to the network if it has a login page.",
        ),
        (
            is_missing,
            HubUnreachableError,
            f"it was not downloaded before, and {offline_reason()}",
            how_to_go_online() if similar is None else f"Use {similar}.",
        ),
        (
            is_system_error,
            DataError,
            storage.error_reason(error),
            "Check the name and the folder of the cache.",
        ),
    )
    for applies, kind, problem, fix in cases:
        if applies:
            return kind(f"{name}: expected {expected}, got none ({problem}). {fix}")
    return DataError(
        f"{name}: expected a complete download from {constants.ENDPOINT}, got an interrupted "
        f"one ({type(error).__name__}). "
        "Run the command again."
    )


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


def hub_license(repository: str, kind: HubKind) -> str:
    """Return the license that the hub page of a repository states, such as ``mit``, or the address
    of the page.
    """
    from huggingface_hub import HfApi, constants

    info = HfApi(endpoint=constants.ENDPOINT).repo_info(repository, repo_type=kind)
    # None for a repository without a page.
    card = getattr(info, "card_data", None)
    # The license "other" has a name of its own.
    licenses: Any = (card.get("license_name") or card.get("license") or []) if card else []
    names = ", ".join(map(str, licenses if isinstance(licenses, list) else [licenses]))
    return (
        names or f"see {constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository}"
    )


def verify_hashes(name: str, files: Iterable[Path]) -> None:
    """Compare downloaded files with their SHA-256, which is the name of a large file in the cache.
    Damaged files are removed.
    """
    damaged = []
    for file in files:
        target = Path(os.path.realpath(file))
        if re.fullmatch("[0-9a-f]{64}", target.name):
            digest = storage.content_hash(target)
            if digest != target.name:
                # A link of the cache and its target: otherwise the next download would use the
                # damaged file.
                storage.current_disk().unlink(file)
                storage.current_disk().unlink(target)
                damaged.append(
                    f"{file.name}: expected SHA-256 {target.name[:12]}..., got {digest[:12]}..."
                )
    if damaged:
        removed = (
            "The damaged file was removed."
            if len(damaged) == 1
            else f"{len(damaged)} damaged files were removed."
        )
        raise DataError(f"{name}: {damaged[0]} {removed} Run the command again.")


def hub_repository(folder: Path) -> Path | None:
    """Return the repository in the cache of the hub to which a folder of files belongs. None: the
    folder is not in a snapshot.
    """
    # A link of the cache leads from snapshots/REVISION to blobs.
    snapshots = next(
        (parent for parent in Path(os.path.realpath(folder)).parents if parent.name == "snapshots"),
        None,
    )
    return (
        snapshots.parent
        if snapshots is not None and os.path.isdir(snapshots.with_name("blobs"))
        else None
    )


def hidden_bar() -> type[Any]:
    """Return a progress bar for the hub's library that is not shown."""
    from huggingface_hub.utils.tqdm import tqdm

    class HiddenBar(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **{**options, "disable": True})

    return HiddenBar


def list_hub_files(
    name: str, expected: str, repository: str, kind: HubKind, **options: Any
) -> list[Any]:
    """List files of a repository without downloading them, as ``huggingface_hub.DryRunFileInfo``.
    ``options`` are for ``snapshot_download``.
    """
    from huggingface_hub import snapshot_download

    with hub_errors(name, expected):
        return snapshot_download(
            repository, repo_type=kind, dry_run=True, tqdm_class=hidden_bar(), **options
        )


def fetch_hub_files(
    repository: str, kind: HubKind, files: Iterable[Any], on_bytes: OnBytes | None = None
) -> None:
    """Download missing files of ``list_hub_files`` into the cache of the hub. Without ``on_bytes``,
    the hub's library shows the progress.
    """
    from huggingface_hub import constants, hf_hub_download

    from visavis.core.stopping import kept_if_stopped

    unfinished = unfinished_download(repository, kind)
    was_interrupted = os.path.exists(unfinished)
    missing = [file for file in files if file.will_download or was_interrupted]
    # A cache that is complete may be read-only.
    if missing and not was_interrupted:
        storage.write_text(unfinished, "")
    total = sum(file.file_size or 0 for file in missing)
    received = 0

    class ByteCounter(hidden_bar()):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            # The part of an interrupted download.
            self.update(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            nonlocal received
            received += int(n or 0)
            if on_bytes is not None and total:
                on_bytes(min(received, total), total)

    def describe() -> str:
        return f"{received / 1e6:,.0f} of {total / 1e6:,.0f} MB of the download are kept."

    bar = None if on_bytes is None else ByteCounter
    chunk_bytes = constants.DOWNLOAD_CHUNK_SIZE
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    try:
        # One after the other in this thread, so that Ctrl-C ends it at once and the next call
        # continues the file. The hub's library would complete the files in its threads first, and
        # start an interrupted file again.
        for file in missing:
            with kept_if_stopped(lambda: describe() if received else ""):
                is_large = (
                    _MIN_RESUMED_BYTES < (file.file_size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE
                ) and _fetch_large_file(repository, kind, file, bar)
                # A file in its place is only registered.
                hf_hub_download(
                    repository,
                    file.filename,
                    repo_type=kind,
                    revision=file.commit_hash,
                    tqdm_class=bar,
                    # The content of a small file cannot be verified.
                    force_download=was_interrupted and not is_large,
                )
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = chunk_bytes


def unfinished_download(repository: str, kind: HubKind) -> Path:
    """Return the file in the cache of the hub that shows that a download has begun and not ended.
    The files that are there may be damaged, because the hub's library does not flush them.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(
        constants.HF_HUB_CACHE,
        repo_folder_name(repo_id=repository, repo_type=kind),
        ".unfinished",
    )


def finish_download(repository: str, kind: HubKind) -> None:
    """Flush the verified files of a download to the disk, if there was one."""
    unfinished = unfinished_download(repository, kind)
    folder = unfinished.parent
    if os.path.exists(unfinished):
        with storage.storage_errors(folder):
            # The library may have created the folder of the cache and the one above it.
            for path in [*folder.absolute().parents[:3], folder, *folder.rglob("*")]:
                if not os.path.islink(path):
                    # Another process may have removed its temporary files meanwhile.
                    with suppress(PermissionError, FileNotFoundError):
                        storage.current_disk().sync_path(path)
            storage.current_disk().unlink(unfinished)
            storage.current_disk().sync_path(folder)


def _fetch_large_file(repository: str, kind: HubKind, file: Any, bar: type[Any] | None) -> bool:
    """Download a file to its place in the cache of the hub, or the rest of it. Returns whether the
    hub states its SHA-256.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(repository, file.filename, repo_type=kind, revision=file.commit_hash)
    etag = get_hf_file_metadata(url).etag or ""
    if not re.fullmatch("[0-9a-f]{64}", etag):
        # Without its SHA-256, a continued file cannot be verified.
        return False
    folder = repo_folder_name(repo_id=repository, repo_type=kind)
    target = Path(constants.HF_HUB_CACHE, folder, "blobs", etag)
    part = target.with_name(f"{etag}.part")
    with storage.folder_lock(part, wait=True):
        if not os.path.exists(target):
            with storage.current_disk().open(part, "ab") as opened:
                if opened.tell() > file.file_size:
                    opened.truncate(0)

                def fetch_rest() -> bool:
                    """Download the rest. Returns whether a part was there before."""
                    start = opened.tell()
                    http_get(
                        url,
                        opened,
                        resume_size=start,
                        headers=build_hf_headers(),
                        expected_size=file.file_size,
                        tqdm_class=bar,
                    )
                    opened.flush()
                    return start > 0

                # The part of an interrupted download may not be what was written before.
                if fetch_rest() and storage.content_hash(part) != etag:
                    opened.truncate(0)
                    opened.seek(0)
                    fetch_rest()
            storage.current_disk().sync_path(part)
            storage.move(part, target)
    storage.remove_lock(part)
    return True


@cache
def download_dataset(name: str) -> Path:
    """Return the folder of a data set of the hub. A data set that was downloaded before is neither
    updated nor searched on the hub.
    """
    with requires_extra("hf", "data of the Hugging Face Hub"):
        from huggingface_hub import constants, snapshot_download
    parts = DATASET_NAME.fullmatch(name)
    if parts is None:
        raise DataError(
            f"{name}: expected hf:OWNER/NAME, with :CONFIG or @REVISION if needed. Correct the "
            "name."
        )
    # The place of the cache is a part of the key: another HF_HOME has files of its own.
    key = hashlib.sha256(json.dumps([2, name, constants.HF_HUB_CACHE]).encode()).hexdigest()[:32]
    record = storage.cache_folder() / "hub" / f"{key}.json"
    # The folder of a complete download, and its files.
    downloaded: list[str] | None = storage.read_checksummed_json(record, list[str])
    if downloaded is not None and all(map(os.path.isfile, downloaded[1:])):
        return Path(downloaded[0])
    repository = parts["repository"]
    revision = parts["revision"]
    expected = "a data set of the Hugging Face Hub"
    available = list_hub_files(name, expected, repository, "dataset", revision=revision)
    files = _select_files(name, [file.filename for file in available], parts["config"])
    needed = [file for file in available if file.filename in files]
    with hub_errors(name, expected, is_download=True):
        if missing := sum(file.file_size or 0 for file in needed if file.will_download):
            # The command line prints lines at level INFO.
            logging.getLogger(__name__).info(
                "%s", download_message(name, missing, hub_license(repository, "dataset"))
            )
        fetch_hub_files(repository, "dataset", needed)
        snapshot = Path(
            snapshot_download(
                repository,
                repo_type="dataset",
                revision=revision,
                allow_patterns=files,
                tqdm_class=hidden_bar(),
            )
        )
    verify_hashes(name, [snapshot / file for file in files])
    finish_download(repository, "dataset")
    folder = snapshot / _config_of(files[0])
    storage.write_checksummed_json(record, [str(folder), *(str(snapshot / file) for file in files)])
    return folder


def _config_of(file: str) -> str:
    """Folder of the configuration of a file: the folders above ``data`` and above the name of a
    split.
    """
    folders = list(Path(file).parts[:-1])
    while folders and (folders[-1] == "data" or split_in_name(folders[-1]) is not None):
        folders.pop()
    return "/".join(folders)


def _select_files(name: str, files: list[str], config: str | None) -> list[str]:
    """Select the files of one kind and of one configuration."""
    suffix = next(
        (suffix for suffix in _SUFFIXES if any(file.endswith(suffix) for file in files)), None
    )
    if suffix is None:
        names = ", ".join(sorted(files)[:5]) or "no files"
        raise DataError(
            f"{name}: expected a repository with {', '.join(_SUFFIXES)} files, got {names}. "
            "Add @refs/convert/parquet for the copy that the hub converts, or download the data "
            "set yourself."
        )
    by_config: dict[str, list[str]] = {}
    for file in sorted(file for file in files if file.endswith(suffix)):
        by_config.setdefault(_config_of(file), []).append(file)
    # Without a name, the files at the top, or the configuration named default.
    config_name = config or ("" if "" in by_config else "default")
    matches = [folder for folder in by_config if config_name in (folder, Path(folder).name)] or (
        [] if config else list(by_config)
    )
    if len(matches) != 1:
        configs = ", ".join(filter(None, (Path(folder).name for folder in by_config))) or "no names"
        raise DataError(
            f"{name}: expected the name of one configuration, got {config or 'none'}. Name one as "
            f"hf:OWNER/NAME:CONFIG ({configs})."
        )
    return by_config[matches[0]]


# Pattern of the name of a repository with its owner.
REPO_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")


def validate_repo(repo: str, name: str = "repo") -> None:
    """Check the name of a repository before any work is done for it. ``name`` is the argument."""
    if not REPO_NAME.fullmatch(repo):
        raise SpecError(
            f"{name}: expected owner/name of a repository of the Hugging Face hub, got "
            f"{format_value(repo)}. Pass such a name."
        )
    with requires_extra("hf", "an upload to the hub"):
        import huggingface_hub  # noqa: F401


def upload_folder(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload all files of a folder in one commit, and return the address of the commit. A missing
    repository is created.
    """
    import huggingface_hub

    try:
        api = huggingface_hub.HfApi(library_name="visavis")
        api.create_repo(repo, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message="Upload a model of visavis"
            ).commit_url
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StorageError(
            f"{repo}: expected an upload to the Hugging Face hub, got {reason.rstrip('.')}. Log in "
            "with hf auth login, or check the network."
        ) from None
