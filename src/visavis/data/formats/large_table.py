"""Tables of millions of captions, as Parquet or Arrow files, or as a large CSV file.

It has the columns of ``captions.csv``: the image file, the caption (a text or a list of texts) and, if you have splits, ``split``.

The first time that a table is opened, it is checked and converted to memory-mapped columns under ``tables/`` in ``VISAVIS_CACHE``:

- ``names.arrow``, ``splits.npy``: name and split of each image, in order of first mention.
- ``captions.arrow``, ``image_of.npy``: each caption, and the index of its image.
- ``image_rows.npy``, ``caption_rows.npy``: if something was skipped, the number of each item in the whole table, its row in stored features.
- ``table.json``: counts, problems and a hash of the content.

Afterwards it opens without reading the captions. Image files are not opened before they are used: a missing one stops the training there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visavis import storage
from visavis.data.columns import ROWS_PER_CHUNK, ImageColumn, TextColumn, import_pyarrow
from visavis.data.dataset import Dataset
from visavis.data.formats.listing import MAX_CAPTION_CHARS, DatasetFormat, Finding, Listing
from visavis.data.formats.table_columns import CAPTION_NAMES, FILE_NAMES, OTHER_FILE_NAMES, named_columns
from visavis.data.splits import normalize_split_name, split_by_hash
from visavis.errors import DataError

# Part of the key of a cached conversion. A change of the files needs another number.
_VERSION = 1
# Problems of each kind that are described one by one. The others are counted.
_EXAMPLES = 3
# Images whose files are searched. If none exists, the table has stored features only.
_PROBED_FILES = 100

_KINDS = {
    "": "",
    "caption without image": "the row names no image file",
    "empty caption": "the caption is empty",
    "caption too long": f"the caption has more than {MAX_CAPTION_CHARS:,} characters",
    "image in two splits": "the image has another split in another row",
    "image without split": "the image has no split, although others have one",
    "image without caption": "the image has no usable caption",
}
_KIND_NAMES = tuple(_KINDS)


@dataclass(frozen=True)
class TableSummary:
    """Content of ``table.json``.

    Attributes:
        sha256: Hash of all columns.
        splits: Names of the splits.
        images: Number of images in the table.
        captions: Number of captions in the table.
        usable_images: Number of images without a problem.
        usable_captions: Number of captions without a problem.
        problems: Number of problems by kind.
        examples: The first problems of each kind.
    """

    sha256: str
    splits: tuple[str, ...]
    images: int
    captions: int
    usable_images: int
    usable_captions: int
    problems: dict[str, int] = field(default_factory=dict)
    examples: tuple[Finding, ...] = ()


def open_table(path: Path) -> Dataset:
    """Open a table. The first time, it is checked and converted.

    Args:
        path: The file.

    Returns:
        The usable images and captions, which are read on demand.

    Raises:
        DataError: If the file cannot be read, or no image is usable.
    """
    folder, summary = _convert(path)
    if not summary.usable_images:
        raise DataError(f"{path} has no usable image ({_count(summary.problems)}): {next(iter(summary.examples), 'no image is listed')}.")

    def load(name: str) -> np.ndarray:
        return storage.read_array(folder / name, kinds="iu")

    names = TextColumn(folder / "names.arrow", f"{summary.sha256} names")
    is_whole = (summary.usable_images, summary.usable_captions) == (summary.images, summary.captions)
    return Dataset(
        name=Path(os.path.realpath(path)).parent.name,
        images=ImageColumn(names, summary.splits, load("splits.npy"), _image_folder(names, Path(os.path.realpath(path.parent)))),
        captions=TextColumn(folder / "captions.arrow", f"{summary.sha256} captions"),
        image_of=load("image_of.npy"),
        image_origin=None if is_whole else load("image_rows.npy"),
        caption_origin=None if is_whole else load("caption_rows.npy"),
        skipped=_skipped(path, summary),
    )


def table_problems(path: Path) -> list[Finding]:
    """List the problems of a table.

    Args:
        path: The file.

    Returns:
        The first problems of each kind, then the number of the others.
    """
    _, summary = _convert(path)
    rest = {kind: number - _EXAMPLES for kind, number in summary.problems.items() if number > _EXAMPLES}
    return [*summary.examples, *(Finding(kind, path.name, f"{number:,} more rows: {_KINDS[kind]}") for kind, number in rest.items())]


def list_table(path: Path) -> Listing:
    """List the images and captions of a table one by one, for a check that opens every image.

    Args:
        path: The file.

    Returns:
        The listing of the usable items, with all problems.
    """
    data, listing = open_table(path), Listing(path)
    for image in data.images:
        listing.add_image(image.name, image.split).location = image.location
    for caption, image_index in zip(data.captions, data.image_of.tolist(), strict=True):
        listing.add_caption(caption, listing.images[image_index], path.name)
    listing.findings += table_problems(path)
    return listing


def _image_folder(names: TextColumn, folder: Path) -> Path | None:
    """The folder of the image files. None if the first images have no file there."""
    probed = names.read(np.arange(min(_PROBED_FILES, len(names))))
    return folder if any(os.path.isfile(folder / name) for name in probed) else None


def _skipped(path: Path, summary: TableSummary) -> tuple[str, ...]:
    if not summary.problems:
        return ()
    total = f"{summary.images - summary.usable_images:,} of {summary.images:,} images and "
    total += f"{summary.captions - summary.usable_captions:,} of {summary.captions:,} captions of {path.name} ({_count(summary.problems)})"
    return (total, *map(str, summary.examples))


def _count(problems: dict[str, int]) -> str:
    return ", ".join(f"{number:,} x {kind}" for kind, number in problems.items())


def _convert(path: Path) -> tuple[Path, TableSummary]:
    """Return the folder of converted columns and its summary. They are made if they do not exist."""
    folder = storage.cache_folder() / "tables" / storage.stat_hash([path], _VERSION)
    with storage.folder_lock(folder, wait=True):
        if os.path.isdir(folder):
            try:
                return folder, storage.read_json(folder / "table.json", TableSummary)
            except DataError as reason:
                storage.remove_damaged(folder, [], str(reason))
                storage.remove_folder(folder)
        with storage.open_file(path), storage.atomic_folder(folder) as part:
            summary = _Conversion(path).write(part)
            storage.write_json(part / "table.json", asdict(summary))
        import_pyarrow().default_memory_pool().release_unused()
    return folder, summary


class _Conversion:
    """Checks a table and writes its columns. Captions are read twice, so that they are never in memory at once."""

    def __init__(self, path: Path):
        self.path, self.pa = path, import_pyarrow()
        self.compute = self.pa.compute
        try:
            self.table = self.pa.dataset.dataset(path, format=_file_format(path, self.pa))
        except (self.pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} cannot be read as a table: {_first_line(error)}.") from None
        self.file_column = self._find("the image file", "filename", FILE_NAMES, OTHER_FILE_NAMES)
        self.caption_column = self._find("the caption", "caption", CAPTION_NAMES)
        self.split_column = next(iter(named_columns(self.table.schema.names, ("split",))), None)

    def _find(self, content: str, standard_name: str, *known: tuple[str, ...]) -> str:
        found = named_columns(self.table.schema.names, *known)
        if len(found) != 1:
            columns = ", ".join(self.table.schema.names)
            raise DataError(
                f"{self.path}: expected one column with {content}, got {len(found)} ({columns:.80}). Name one of them {standard_name}."
            )
        return found[0]

    def write(self, folder: Path) -> TableSummary:
        """Write all columns, and return the summary."""
        file_ids, names, parents, usable, problems = self._read_rows()
        splits, split_names, image_problem = self._splits(file_ids, names)
        image_of = file_ids[parents]
        usable &= image_of >= 0
        usable &= image_problem[image_of] == 0
        has_caption = np.zeros(len(names), bool)
        has_caption[image_of[usable]] = True
        image_problem[~has_caption & (image_problem == 0)] = _KIND_NAMES.index("image without caption")
        for code in np.unique(image_problem[image_problem > 0]).tolist():
            found = np.flatnonzero(image_problem == code)
            problems.add(_KIND_NAMES[code], len(found), [names[i].as_py() for i in found[:_EXAMPLES].tolist()])
        image_rows, caption_rows = np.flatnonzero(image_problem == 0), np.flatnonzero(usable)
        new_index = np.cumsum(image_problem == 0) - 1
        digest = hashlib.sha256("\x1f".join(split_names).encode())
        arrays = {"splits": splits[image_rows], "image_of": new_index[image_of[caption_rows]]}
        if (len(image_rows), len(caption_rows)) != (len(names), len(parents)):
            arrays |= {"image_rows": image_rows, "caption_rows": caption_rows}
        for name, array in arrays.items():
            storage.write_array(folder / f"{name}.npy", array)
            digest.update(array.data)
        rows_of_chunks = (image_rows[start : start + ROWS_PER_CHUNK] for start in range(0, len(image_rows), ROWS_PER_CHUNK))
        self._write_column(folder / "names.arrow", (names.take(self.pa.array(rows)) for rows in rows_of_chunks), digest)
        self._write_column(folder / "captions.arrow", self._usable_captions(usable), digest)
        counts = (len(names), len(parents), len(image_rows), len(caption_rows))
        return TableSummary(digest.hexdigest()[:32], split_names, *counts, problems.counts, tuple(problems.examples))

    def _batches(self, *columns: str) -> Iterator[Any]:
        """Yield the columns of the table in blocks of rows."""
        try:
            yield from self.table.to_batches(columns=list(columns), batch_size=ROWS_PER_CHUNK // 8, use_threads=True)
        except (self.pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{self.path} cannot be read as a table: {_first_line(error)}.") from None

    def _captions(self, column: Any) -> tuple[Any, np.ndarray]:
        """The captions of a block as one array, and the row of each."""
        if self.pa.types.is_list(column.type) or self.pa.types.is_large_list(column.type):
            rows = self.compute.list_parent_indices(column).to_numpy(zero_copy_only=False)
            column = self.compute.list_flatten(column)
        else:
            rows = np.arange(len(column))
        return self._texts(column, self.caption_column), rows

    def _texts(self, column: Any, name: str) -> Any:
        """A column as valid texts."""
        if (
            not self.pa.types.is_string(column.type)
            and not self.pa.types.is_large_string(column.type)
            and not self._is_text_dictionary(column)
        ):
            raise DataError(f"{self.path}: column {name}: expected texts, got {column.type}. Store texts in it.")
        texts = column.cast(self.pa.large_string())
        try:
            texts.validate(full=True)
        except self.pa.ArrowInvalid as error:
            raise DataError(f"{self.path}: column {name}: expected UTF-8 texts: {_first_line(error)}. Save it again as UTF-8.") from None
        return texts

    def _is_text_dictionary(self, column: Any) -> bool:
        types = self.pa.types
        return types.is_null(column.type) or (types.is_dictionary(column.type) and types.is_string(column.type.value_type))

    def _read_rows(self) -> tuple[np.ndarray, Any, np.ndarray, np.ndarray, _Problems]:
        """Return the image of each row (-1: none), all names, the row of each caption, whether each is usable, and the problems of rows."""
        files, parents, usable, problems, first_row = [], [], [], _Problems(), 0
        self.split_texts = []
        for batch in self._batches(self.file_column, self.caption_column, *([self.split_column] if self.split_column else [])):
            names = self._texts(batch.column(0), self.file_column)
            files.append(self.compute.if_else(self.compute.equal(names, ""), None, names))
            captions, rows = self._captions(batch.column(1))
            if self.split_column:
                self.split_texts.append(self._texts(batch.column(2), self.split_column))
            trimmed = self.compute.utf8_trim_whitespace(captions)
            empty = self._to_numpy(self.compute.equal(trimmed, ""), True)
            too_long = self._to_numpy(self.compute.utf8_length(captions), 0) > MAX_CAPTION_CHARS
            no_file = np.flatnonzero(self._to_numpy(files[-1].is_null(), False))
            for kind, lost in (("caption without image", no_file), ("empty caption", rows[empty]), ("caption too long", rows[too_long])):
                problems.add(kind, len(lost), [f"{self.path.name}, row {first_row + row + 1:,}" for row in lost[:_EXAMPLES].tolist()])
            usable.append(~empty & ~too_long)
            parents.append(first_row + rows)
            first_row += batch.num_rows
        if not first_row:
            raise DataError(f"{self.path} has no usable image: the table has no rows.")
        encoded = self.pa.chunked_array(files).dictionary_encode().combine_chunks()
        file_ids = self._to_numpy(encoded.indices, -1).astype(np.int64)
        return file_ids, encoded.dictionary, np.concatenate(parents), np.concatenate(usable), problems

    def _splits(self, file_ids: np.ndarray, names: Any) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
        """Return the split of each image as a code, the names of the splits, and the problem of each image as a code (0: none)."""
        problem = np.zeros(len(names), np.int8)
        codes: dict[str, int] = {}
        if self.split_column:
            encoded = self.pa.chunked_array(self.split_texts).dictionary_encode().combine_chunks()
            standard = [normalize_split_name(name) for name in encoded.dictionary.to_pylist()]
            code_of = np.array([-1 if name is None else codes.setdefault(name, len(codes)) for name in standard] + [-1])
            of_rows = code_of[self._to_numpy(encoded.indices, len(standard))]
            rows = np.flatnonzero((file_ids >= 0) & (of_rows >= 0))
            of_images = np.full(len(names), -1)
            # In reverse, because the first row of an image decides.
            of_images[file_ids[rows][::-1]] = of_rows[rows][::-1]
            problem[of_images < 0] = _KIND_NAMES.index("image without split")
            problem[file_ids[rows][of_rows[rows] != of_images[file_ids[rows]]]] = _KIND_NAMES.index("image in two splits")
            if codes:
                return np.maximum(of_images, 0).astype(np.int8), tuple(codes), problem
        blocks = (names.slice(start, ROWS_PER_CHUNK // 8).to_pylist() for start in range(0, len(names), ROWS_PER_CHUNK // 8))
        assigned = np.fromiter(
            (codes.setdefault(split_by_hash(name), len(codes)) for block in blocks for name in block), np.int8, len(names)
        )
        return assigned, tuple(codes), np.zeros_like(problem)

    def _to_numpy(self, column: Any, missing: Any) -> np.ndarray:
        """A column as an array, with a value for null."""
        array: np.ndarray = self.compute.fill_null(column, missing).to_numpy(zero_copy_only=False)
        return array

    def _usable_captions(self, usable: np.ndarray) -> Iterator[Any]:
        """Yield the usable captions in blocks."""
        start = 0
        for batch in self._batches(self.caption_column):
            captions, _ = self._captions(batch.column(0))
            yield captions.filter(self.pa.array(usable[start : start + len(captions)]))
            start += len(captions)

    def _write_column(self, path: Path, blocks: Iterator[Any], digest: Any) -> None:
        """Write a column with the same number of rows in each record batch."""
        schema, waiting, count = self.pa.schema([("text", self.pa.large_string())]), [], 0
        with storage.storage_errors(path), self.pa.ipc.new_file(str(path), schema) as writer:
            for block in blocks:
                waiting.append(block)
                count += len(block)
                while count >= ROWS_PER_CHUNK:
                    joined = self.pa.concat_arrays(waiting)
                    self._write_chunk(writer, joined.slice(0, ROWS_PER_CHUNK), schema, digest)
                    waiting, count = [joined.slice(ROWS_PER_CHUNK)], count - ROWS_PER_CHUNK
            if count:
                self._write_chunk(writer, self.pa.concat_arrays(waiting), schema, digest)

    def _write_chunk(self, writer: Any, texts: Any, schema: Any, digest: Any) -> None:
        _, offsets_buffer, content = texts.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        digest.update(np.diff(offsets).data)
        digest.update(memoryview(content or b"")[offsets[0] : offsets[-1]])
        writer.write_batch(self.pa.record_batch([texts], schema=schema))


class _Problems:
    """Number of problems by kind, and the first ones."""

    def __init__(self) -> None:
        self.counts, self.examples = dict[str, int](), list[Finding]()

    def add(self, kind: str, number: int, locations: list[str]) -> None:
        if not number:
            return
        before = self.counts.get(kind, 0)
        self.counts[kind] = before + number
        self.examples += [Finding(kind, location, _KINDS[kind]) for location in locations[: max(0, _EXAMPLES - before)]]


_MAX_HEADER_BYTES = 2**16
"""Maximum length of the first line of a CSV file."""


def _file_format(path: Path, pa: Any) -> Any:
    """The format of a file for ``pyarrow.dataset``. A caption in a CSV file is never null."""
    if path.suffix == ".parquet":
        return "parquet"
    if path.suffix not in (".csv", ".tsv"):
        return "ipc"
    parse = pa.csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",", newlines_in_values=True)
    with storage.open_file(path) as file:
        header = file.readline(_MAX_HEADER_BYTES).decode(errors="replace")
    if not header.endswith("\n"):
        raise DataError(f"{path}: expected a first line with the names of columns, got {len(header):,} characters without an end.")
    names = [name.strip().strip('"') for name in header.split(parse.delimiter)]
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    return pa.dataset.CsvFileFormat(parse_options=parse, convert_options=convert)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].removesuffix(".") if str(error) else type(error).__name__


LARGE_TABLE = DatasetFormat(
    name="captions.parquet",
    description="captions.parquet or captions.arrow next to the images (columns filename, caption, split), for millions of captions",
    patterns=("captions.parquet", "captions.arrow"),
    suffixes=("captions.parquet", "captions.arrow"),
    read=list_table,
    image_files="none",
    open=open_table,
)
