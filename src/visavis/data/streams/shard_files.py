"""Files of shards, local or on object storage: patterns, file systems and local copies of remote
files.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visavis.core import storage
from visavis.core.errors import DataError, requires_extra
from visavis.data.columns import import_pyarrow
from visavis.data.dataset_reader import resolve_path
from visavis.data.formats.webdataset import TAR_SUFFIX, expand_braces

PARQUET_SUFFIX = ".parquet"
# Variable with the size in GB of the local copies of remote shards.
CACHE_SIZE = "VISAVIS_SHARD_CACHE_GB"
DEFAULT_CACHE_GB = 50.0


@dataclass(frozen=True)
class ShardFile:
    """A file of a shard.

    Attributes:
        url: Path, or URL such as ``s3://bucket/train-000.tar``.
        size: Size in bytes.
        changed_ns: Time of the last change. 0 if the storage gives none.
        num_samples: Number of samples by an index file. None: not given.
    """

    url: str
    size: int
    changed_ns: int
    num_samples: int | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it is on object storage."""
        return "://" in self.url

    @property
    def name(self) -> str:
        """Name of the file without its folder."""
        return self.url.rpartition("/")[2]


def list_shards(pattern: str) -> list[ShardFile]:
    """List the shards that a pattern names.

    Args:
        pattern: ``train-{000..039}.tar``, ``train-*.tar``, one file, a folder with shards of one
            kind, or an index file (``.json``) as ``widsindex`` of WebDataset writes. Local (also
            under ``VISAVIS_DATA``), or at ``s3://``, ``gs://`` or ``hf://``.

    Returns:
        The shards, sorted by their path, or in the order of the index or of the braces.

    Raises:
        DataError: If a shard is missing, or nothing matches the pattern.
    """
    counts: dict[str, int] = {}
    if pattern.endswith(".json"):
        counts = _read_index(pattern)
        urls = list(counts)
    elif re.search(r"\{.+\}", pattern):
        urls = expand_braces(pattern)
    else:
        urls = [pattern]
    files = [file for url in urls for file in _list_url(url)]
    if not files:
        raise DataError(
            f"{pattern}: expected shards ({TAR_SUFFIX} or {PARQUET_SUFFIX} files), found none. "
            "Check the pattern."
        )
    if len({os.path.splitext(file.url)[1] for file in files}) > 1:
        raise DataError(
            f"{pattern}: expected shards of one kind, got {TAR_SUFFIX} and {PARQUET_SUFFIX} files. "
            "Name one kind, such as *.tar."
        )
    if len({file.name for file in files}) < len(files):
        raise DataError(
            f"{pattern}: expected shards with different names, got {len(files)} shards with equal "
            "ones. Rename them."
        )
    by_name = {url.rpartition("/")[2]: count for url, count in counts.items()}
    return [
        ShardFile(file.url, file.size, file.changed_ns, by_name.get(file.name)) for file in files
    ]


def open_filesystem(url: str) -> tuple[Any, str]:
    """Open the file system of a URL.

    Args:
        url: Path or URL.

    Returns:
        The file system of ``pyarrow.fs`` and the path in it.

    Raises:
        DataError: If the URL is not understood.
        MissingExtra: If ``huggingface_hub`` is not installed and the URL begins with ``hf://``.
    """
    pa = import_pyarrow()
    if "://" not in url:
        return pa.fs.LocalFileSystem(), url
    try:
        if url.startswith("hf://"):
            with requires_extra("hf", "data of the Hugging Face Hub"):
                from huggingface_hub import HfFileSystem
            return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(HfFileSystem())), url.removeprefix(
                "hf://"
            )
        filesystem, path = pa.fs.FileSystem.from_uri(url)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{url} cannot be opened: {error}. Check the URL.") from None
    return filesystem, path


def local_copy(file: ShardFile) -> Path:
    """Return a local file with the content of a shard. A remote one is downloaded once, for all
    processes of this machine.

    The oldest copies are removed when all together are larger than ``VISAVIS_SHARD_CACHE_GB``.

    Args:
        file: The shard.

    Returns:
        Path of the file.

    Raises:
        DataError: If it cannot be read.
    """
    if not file.is_remote:
        return Path(file.url)
    key = hashlib.sha256(json.dumps([file.url, file.size, file.changed_ns]).encode()).hexdigest()[
        :32
    ]
    folder = storage.cache_folder() / "shards"
    path = folder / f"{key}{os.path.splitext(file.url)[1]}"
    with storage.folder_lock(path, wait=True):
        if not os.path.exists(path):
            _remove_old_copies(folder, file.size)
            filesystem, source = open_filesystem(file.url)
            try:
                with (
                    storage.atomic_file(path) as part,
                    filesystem.open_input_stream(source) as stream,
                    open(part, "wb") as target,
                ):
                    while block := stream.read(2**22):
                        target.write(block)
            except OSError as error:
                raise DataError(
                    f"{file.url} cannot be read: {error}. Check the connection and the free disk "
                    "space."
                ) from None
        os.utime(path)
    return path


def _remove_old_copies(folder: Path, size: int) -> None:
    """Remove the copies that were used least recently, so that one more fits. A process that reads
    one of them can finish.
    """
    value, copies = os.environ.get(CACHE_SIZE, DEFAULT_CACHE_GB), list[tuple[int, int, Path]]()
    limit = -1.0
    with suppress(ValueError):
        limit = float(value) * 1e9
    if not limit >= 0:
        raise DataError(
            f"{CACHE_SIZE}: expected a number of GB >= 0, got {value!r}. Correct or remove this "
            "variable."
        )
    for path in folder.glob(f"*{TAR_SUFFIX}"):
        # Another process may remove it now.
        with suppress(FileNotFoundError):
            status = path.stat()
            copies.append((status.st_mtime_ns, status.st_size, path))
    for _, copy_size, path in sorted(copies, reverse=True):
        size += copy_size
        if size > limit:
            path.unlink(missing_ok=True)


def _list_url(url: str) -> list[ShardFile]:
    """The shard at a path, those that a pattern matches, or those in a folder."""
    pa = import_pyarrow()
    folder, _, name = url.rpartition("/")
    is_pattern = any(sign in name for sign in "*?[")
    if "://" not in url:
        url = str(resolve_path(folder or ".") / name) if is_pattern else str(resolve_path(url))
        folder = url.rpartition("/")[0]
    filesystem, path = open_filesystem(folder if is_pattern else url)
    try:
        infos = [filesystem.get_file_info(path)]
        if is_pattern or infos[0].type == pa.fs.FileType.Directory:
            infos = filesystem.get_file_info(pa.fs.FileSelector(path))
            infos = [
                info
                for info in infos
                if fnmatch.fnmatch(info.base_name, name if is_pattern else "*")
            ]
            folder = folder if is_pattern else url.rstrip("/")
        elif infos[0].type == pa.fs.FileType.NotFound:
            raise DataError(
                f"{url}: expected an existing shard, got none. Check the pattern of the shards."
            )
    except OSError as error:
        raise DataError(
            f"{url} cannot be listed: {error}. Check the URL and the credentials."
        ) from None
    shards = sorted(
        (
            info
            for info in infos
            if info.type == pa.fs.FileType.File and info.extension in ("tar", "parquet")
        ),
        key=lambda info: info.path,
    )
    return [
        ShardFile(f"{folder}/{info.base_name}", info.size, info.mtime_ns or 0) for info in shards
    ]


@dataclass(frozen=True)
class _IndexedShard:
    url: str
    nsamples: int


@dataclass(frozen=True)
class _Index:
    shardlist: list[_IndexedShard]


def _read_index(url: str) -> dict[str, int]:
    """Number of samples by shard of an index file. Relative paths are resolved against its folder."""
    if "://" not in url:
        url = str(resolve_path(url))
    filesystem, path = open_filesystem(url)
    try:
        with filesystem.open_input_stream(path) as file:
            content = file.read()
    except OSError as error:
        raise DataError(
            f"{url} cannot be read: {error}. Check the URL and the credentials."
        ) from None
    index = storage.parse_json(content, _Index, url)
    folder = url.rpartition("/")[0]
    return {
        shard.url
        if "://" in shard.url or os.path.isabs(shard.url)
        else f"{folder}/{shard.url}": shard.nsamples
        for shard in index.shardlist
    }
