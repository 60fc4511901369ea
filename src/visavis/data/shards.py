"""Shards: their files, local or on object storage, and their samples, which are members of a tar
file with the same key, or rows of a part of a Parquet file.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from visavis.core import storage
from visavis.core.errors import DataError, VisavisError, requires_extra
from visavis.data.columns import import_pyarrow
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import require
from visavis.data.file_names import IMAGE_SUFFIXES, TAR_SUFFIX, escape_surrogates, is_valid_unicode
from visavis.data.formats.listing import MAX_CAPTION_CHARS, require_captions
from visavis.data.formats.table_columns import (
    MAX_TEXT_BYTES,
    TableColumns,
    parse_captions,
    read_cell,
)
from visavis.data.formats.webdataset import TarSamples, expand_braces
from visavis.data.image_file import MAX_IMAGE_BYTES, ByteRange

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
    def name(self) -> str:
        """Name of the file without its folder."""
        return self.url.rpartition("/")[2]


def list_shards(pattern: str) -> list[ShardFile]:
    """List the shards of a pattern: a path or URL (``s3://``, ``gs://``, ``hf://``) with braces or
    ``*``, one file, a folder with shards of one kind, or an index file.
    """
    counts: dict[str, int] = {}
    # Paths of Windows become URLs, too.
    pattern = pattern.replace(os.sep, "/")
    urls = [pattern]
    # As `widsindex` of WebDataset writes it.
    if pattern.endswith(".json"):
        index_url = pattern if "://" in pattern else resolve_path(pattern).as_posix()
        filesystem, path = open_filesystem(index_url)
        with (
            storage_access(index_url, "Check the URL and the credentials."),
            filesystem.open_input_stream(path) as file,
        ):
            content = file.read()
        folder = index_url.rpartition("/")[0]
        for shard in storage.parse_json(content, _Index, index_url).shardlist:
            is_absolute = "://" in shard.url or os.path.isabs(shard.url)
            counts[shard.url if is_absolute else f"{folder}/{shard.url}"] = shard.nsamples
        urls = list(counts)
    elif re.search(r"\{.+\}", pattern):
        urls = expand_braces(pattern)
    # In the order of the pattern, which numbers the items of a stream.
    files = [file for url in urls for file in _list_url(url)]
    require(
        files,
        f"{pattern}: expected shards ({TAR_SUFFIX} or {PARQUET_SUFFIX} files), found none. Check "
        "the pattern.",
    )
    require(
        len({os.path.splitext(file.url)[1] for file in files}) == 1,
        f"{pattern}: expected shards of one kind, got {TAR_SUFFIX} and {PARQUET_SUFFIX} files. "
        "Name one kind, such as *.tar.",
    )
    # Names are in the fingerprint and in errors, without their folders.
    require(
        len({file.name for file in files}) == len(files),
        f"{pattern}: expected shards with different names, got {len(files)} shards with equal "
        "ones. Rename them.",
    )
    by_name = {url.rpartition("/")[2]: count for url, count in counts.items()}
    return [replace(file, num_samples=by_name.get(file.name)) for file in files]


@contextmanager
def storage_access(url: str, fix: str, action: str = "read") -> Iterator[None]:
    """Convert the errors of a file system or of Arrow in this block to DataError."""
    try:
        yield
    # Our own errors, such as a missing extra, are ValueErrors, too.
    except VisavisError:
        raise
    except (import_pyarrow().ArrowException, OSError, ValueError) as error:
        raise DataError(f"{url} cannot be {action}: {storage.error_reason(error)}. {fix}") from None


def open_filesystem(url: str) -> tuple[Any, str]:
    """Open the file system (``pyarrow.fs``) of a path or URL. Return it with the path in it."""
    pa = import_pyarrow()
    if "://" not in url:
        return pa.fs.LocalFileSystem(), url
    with storage_access(url, "Check the URL.", "opened"):
        if not url.startswith("hf://"):
            return pa.fs.FileSystem.from_uri(url)
        with requires_extra("hf", "data of the Hugging Face Hub"):
            from huggingface_hub import HfFileSystem
        handler = pa.fs.FSSpecHandler(HfFileSystem())
        return pa.fs.PyFileSystem(handler), url.removeprefix("hf://")


def local_copy(file: ShardFile) -> Path:
    """Return a local file with the content of a shard. A remote one is downloaded once, for all
    processes of this machine.
    """
    if "://" not in file.url:
        return Path(file.url)
    value = os.environ.get(CACHE_SIZE, DEFAULT_CACHE_GB)
    limit = -1.0
    with suppress(ValueError):
        limit = float(value) * 1e9
    # A shard that was replaced has another copy.
    identity = json.dumps([file.url, file.size, file.changed_ns]).encode()
    folder = storage.cache_folder() / "shards"
    suffix = os.path.splitext(file.url)[1]
    path = folder / f"{hashlib.sha256(identity).hexdigest()[:32]}{suffix}"
    # The first process downloads it, and the others wait.
    with storage.folder_lock(path, wait=True):
        if not os.path.exists(path):
            # Also false for NaN.
            require(
                limit >= 0,
                f"{CACHE_SIZE}: expected a number of GB >= 0, got {value!r}. Correct or remove "
                "this variable.",
            )
            # The oldest copies make room before the download, so that all together never exceed the
            # limit.
            _remove_old_copies(folder, limit - file.size)
            filesystem, source = open_filesystem(file.url)
            with (
                storage_access(file.url, "Check the connection and the free disk space."),
                storage.atomic_file(path) as part,
                filesystem.open_input_stream(source) as stream,
                storage.current_disk().open(part, "wb") as target,
            ):
                shutil.copyfileobj(stream, target, 2**22)
        # The time of the last use, by which old copies are removed.
        storage.current_disk().touch(path)
    return path


def _remove_old_copies(folder: Path, limit: float) -> None:
    """Remove the copies that were used least recently. A process that reads one of them can finish."""
    copies = list[tuple[int, int, Path]]()
    for path in folder.glob(f"*{TAR_SUFFIX}"):
        # Another process may remove it now.
        with suppress(FileNotFoundError):
            status = path.stat()
            copies.append((status.st_mtime_ns, status.st_size, path))
    for _, size, path in sorted(copies, reverse=True):
        limit -= size
        if limit < 0:
            # Windows keeps a file that a process has open. A later call removes it.
            with suppress(PermissionError):
                storage.current_disk().unlink(path)


def _list_url(url: str) -> list[ShardFile]:
    """The shard at a path, those that a pattern matches, or those in a folder."""
    file_type = import_pyarrow().fs.FileType
    folder, _, name = url.rpartition("/")
    is_pattern = any(sign in name for sign in "*?[")
    if "://" not in url:
        local = resolve_path(folder or ".") / name if is_pattern else resolve_path(url)
        url = local.as_posix()
        folder = url.rpartition("/")[0]
    filesystem, path = open_filesystem(folder if is_pattern else url)
    with storage_access(url, "Check the URL and the credentials.", "listed"):
        infos = [filesystem.get_file_info(path)]
        if is_pattern or infos[0].type == file_type.Directory:
            infos = filesystem.get_file_info(import_pyarrow().fs.FileSelector(path))
            if is_pattern:
                infos = [info for info in infos if fnmatch.fnmatch(info.base_name, name)]
            else:
                folder = url.rstrip("/")
        else:
            require(
                infos[0].type != file_type.NotFound,
                f"{url}: expected an existing shard, got none. Check the pattern of the shards.",
            )
    return [
        ShardFile(f"{folder}/{info.base_name}", info.size, info.mtime_ns or 0)
        for info in sorted(infos, key=lambda info: info.path)
        if info.type == file_type.File and info.extension in ("tar", "parquet")
    ]


@dataclass(frozen=True)
class _IndexedShard:
    url: str
    nsamples: int


@dataclass(frozen=True)
class _Index:
    shardlist: list[_IndexedShard]


@dataclass(frozen=True)
class EmbeddedBytes(ByteRange):
    """Bytes of an image that are in memory.

    Attributes:
        content: The bytes.
    """

    content: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return len(self.content)

    @contextmanager
    def open(self, limit: int | None = None) -> Iterator[io.BytesIO]:
        """Open the bytes as a file. The limit is not used."""
        yield io.BytesIO(self.content)


@dataclass(frozen=True)
class Shard:
    """A part of the data that is read at once: a tar file, or a row group of a Parquet file.

    Attributes:
        file: The file.
        count: Number of samples.
        row_group: Row group of a Parquet file.
        first_key: Key of its first sample, if it was read.
    """

    file: ShardFile
    count: int
    row_group: int = 0
    first_key: str | None = None

    @property
    def name(self) -> str:
        """Name for errors."""
        return (
            f"{self.file.name}, row group {self.row_group}"
            if self.file.url.endswith(PARQUET_SUFFIX)
            else self.file.name
        )


class TarReader:
    """Samples of a tar file, whose keys are names without extension. Members stay in the file until
    they are read.

    Args:
        path: The file.
        name: Name for errors.

    Attributes:
        damage: Damage of the file, after which no sample is read. "": none.
    """

    def __init__(self, path: Path, name: str):
        # Opened once: another process may remove the file from the cache while it is read.
        self.file = open(path, "rb")  # noqa: SIM115 - closed with the reader
        # Not __del__: in a cycle, such as an error and its frames, the collector may finalize the
        # file before its reader. A finalizer keeps the file out of the cycle.
        weakref.finalize(self, self.file.close)
        self.name, self.tar = name, TarSamples.read(self.file, path, name)
        self.keys = list(self.tar.samples)
        self.damage = self.tar.damage

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, row: int) -> str:
        """Return the key of a sample, which must be UTF-8."""
        key = self.keys[row]
        # Not require: the message would take longer than the check.
        if not is_valid_unicode(key):
            raise DataError(
                f"{self.tar.location(key)}: expected a name in UTF-8, got {key!r}. Rename the "
                "members of this sample."
            )
        return key

    def image(self, row: int) -> bytes:
        """Read the image of a sample."""
        key = self.keys[row]
        return self.tar.read_member(self.file, key, self.tar.find(key, IMAGE_SUFFIXES, "image"))

    def captions(self, row: int) -> list[str]:
        """Read the captions of a sample."""
        key = self.keys[row]
        return require_captions(self.tar.read_captions(self.file, key), self.tar.location(key))


class ParquetReader:
    """Samples of a row group of a Parquet file, which is in memory.

    Args:
        shard: The row group.
    """

    damage = ""

    def __init__(self, shard: Shard):
        self.name = shard.name
        with _open_parquet(shard.file.url) as file:
            self.columns = columns = TableColumns.of_schema(file.schema_arrow, shard.file.url)
            self.image_column = columns.image or columns.file
            names = [
                name
                for name in (self.image_column, columns.file, *columns.captions)
                if name is not None
            ]
            group = file.metadata.row_group(shard.row_group)
            # Reading takes three times the size of a column.
            limits = dict.fromkeys(
                columns.captions, max(2**26, 4 * MAX_CAPTION_CHARS * group.num_rows)
            )
            if self.image_column not in limits:
                limits[self.image_column] = MAX_IMAGE_BYTES * max(1, group.num_rows / 8)
            # Columns of few huge values are found before they are in memory.
            for chunk in map(group.column, range(group.num_columns)):
                column = chunk.path_in_schema.partition(".")[0]
                size = chunk.total_uncompressed_size
                limit = limits.get(column, size)
                require(
                    size <= limit,
                    f"{self.name}: {column}: expected at most {limit:,.0f} bytes, got {size:,}. "
                    "Remove the huge values.",
                )
            self.table = file.read_row_group(shard.row_group, columns=list(dict.fromkeys(names)))

    def _read_cell(self, column: str | None, row: int, max_bytes: int = MAX_TEXT_BYTES) -> Any:
        return read_cell(self.table[column], row, f"{self.name}, row {row}, {column}", max_bytes)

    def __len__(self) -> int:
        return len(self.table)

    def key(self, row: int) -> str | None:
        """Return the file name of a sample. None: the row has none."""
        name = None if self.columns.file is None else self._read_cell(self.columns.file, row)
        return None if name is None else str(name)

    def image(self, row: int) -> bytes:
        """Read the image of a sample."""
        value = self._read_cell(self.image_column, row, MAX_IMAGE_BYTES)
        content: Any = value.get("bytes") if isinstance(value, dict) else value
        require(
            isinstance(content, bytes),
            f"{self.name}, row {row}: expected the bytes of an image in column "
            f"{self.image_column}, got {type(content).__name__}. "
            "Store the bytes of the images in the table.",
        )
        return content

    def captions(self, row: int) -> list[str]:
        """Read the captions of a sample."""
        values = [self._read_cell(column, row) for column in self.columns.captions]
        captions = [
            text for value in values for text in parse_captions(value) or () if text.strip()
        ]
        # Not require: a text may have megabytes.
        if not captions:
            raise DataError(
                f"{self.name}, row {row}: expected a caption, got {values[0]!r:.40}. Add it to the "
                "row."
            )
        return require_captions(captions, f"{self.name}, row {row}")


@contextmanager
def _open_parquet(url: str) -> Iterator[Any]:
    """Open a Parquet file, and convert errors of reading it in this block."""
    filesystem, path = open_filesystem(url)
    with (
        storage_access(url, "Copy the shard again."),
        import_pyarrow().parquet.ParquetFile(path, filesystem=filesystem) as file,
    ):
        yield file


ShardReader: TypeAlias = TarReader | ParquetReader
"""Reads samples of an open shard."""


def open_shard(shard: Shard) -> ShardReader:
    """Open a shard."""
    if shard.file.url.endswith(PARQUET_SUFFIX):
        return ParquetReader(shard)
    return TarReader(local_copy(shard.file), shard.name)


def count_samples(file: ShardFile, *, skip_bad: bool, read_key: bool) -> list[Shard]:
    """Count the samples of a file, from an index, its metadata or its headers. ``skip_bad``: the
    samples before a damage count.
    """
    if file.url.endswith(PARQUET_SUFFIX):
        with _open_parquet(file.url) as parquet:
            metadata = parquet.metadata
        return [
            Shard(file, metadata.row_group(group).num_rows, group)
            for group in range(metadata.num_row_groups)
        ]
    # An index file has no keys, so that a key is read from the tar file.
    if file.num_samples is not None and not read_key:
        return [Shard(file, file.num_samples)]
    reader = TarReader(local_copy(file), file.name)
    if reader.damage and not skip_bad:
        raise damaged_shard(file.url, reader.damage)
    count = len(reader) if file.num_samples is None else file.num_samples
    return [
        Shard(file, count, first_key=escape_surrogates(reader.keys[0]) if reader.keys else None)
    ]


def damaged_shard(url: str, damage: str) -> DataError:
    """Make the error of a damaged shard."""
    return DataError(
        f"{url}: {damage.removesuffix('.')}. Copy the shard again, or train with --skip-bad to use "
        "the samples before."
    )
