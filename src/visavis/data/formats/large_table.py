"""Tables of millions of captions, as Parquet or Arrow files, or as a large CSV file.

It has the columns of ``captions.csv``: the image file, one or several columns of captions (texts or
lists of texts) and, if you have splits, ``split``.

The first time that a table is opened, it is checked and converted to memory-mapped columns under
``tables/`` in ``VISAVIS_CACHE``:

- ``names.arrow``, ``splits.npy``: name and split of each image, in order of first mention.
- ``captions.arrow``, ``image_of.npy``: each caption, and the index of its image.
- ``image_rows.npy``, ``caption_rows.npy``: if something was skipped, the number of each item in the
  whole table, its row in stored features.
- ``uncaptioned.arrow``, ``uncaptioned_splits.npy``, ``uncaptioned_rows.npy``: the same of images
  without captions, if there are any.
- ``table.json``: counts, problems and a hash of the content.

Afterwards it opens without reading the captions. Image files are not opened before they are used: a
missing one stops the training there.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.columns import (
    ROWS_PER_CHUNK,
    ImageColumn,
    TextColumn,
    import_pyarrow,
    offsets_and_bytes,
    unique_texts,
)
from visavis.data.dataset import Dataset, require, without_captions
from visavis.data.file_names import MISSING_TEXTS, normalize_split_name, split_by_hash
from visavis.data.formats.arrow_tables import TableScan
from visavis.data.formats.listing import (
    MAX_CAPTION_CHARS,
    NAME_PADDING,
    NAMELESS_ROW,
    UNSPLIT_IMAGE,
    DatasetFormat,
    Finding,
    Listing,
    caption_problem,
    describe_skipped,
    no_usable_image,
)
from visavis.data.formats.table_columns import is_list_text, split_caption_list
from visavis.data.formats.text_tables import NAME_NUMBER

# Part of the key of a cached conversion. A change of the files needs another number.
_VERSION = 5
# Problems of each kind that are described one by one. The others are counted.
_MAX_EXAMPLES = 3
# Images whose files are searched.
_PROBED_FILES = 100

# Problems of images. Their index is the code of an image in memory, 0 for none.
_IMAGE_PROBLEMS = {
    "": "",
    "image in two splits": "the image has another split in another row",
    UNSPLIT_IMAGE[0]: UNSPLIT_IMAGE[1],
    "image without caption": "the image has no usable caption",
}
_IMAGE_KINDS = tuple(_IMAGE_PROBLEMS)
_MAX_MISSING_BYTES = max(map(len, MISSING_TEXTS))
# Captions that are checked as Python objects at once.
_CHECKED_CAPTIONS = 4096


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
        uncaptioned_images: Number of images without captions, which are candidates of evaluations.
        uncaptioned_rows: Number of their empty captions.
        problems: Number of problems by kind.
        examples: The first problems of each kind.
    """

    sha256: str
    splits: tuple[str, ...]
    images: int
    captions: int
    usable_images: int
    usable_captions: int
    uncaptioned_images: int = 0
    uncaptioned_rows: int = 0
    problems: dict[str, int] = field(default_factory=dict)
    examples: tuple[Finding, ...] = ()


def open_table(path: Path) -> Dataset:
    """Open a table. The first time, it is checked and converted. Its items are read on demand."""
    folder, summary = _convert(path)
    if not summary.usable_images:
        example = next(iter(summary.examples), "no image is listed")
        raise no_usable_image(path, summary.problems, example)

    def load(name: str) -> np.ndarray:
        return storage.read_array(folder / name, kinds="iu")

    names = TextColumn(folder / "names.arrow", f"{summary.sha256} names")
    num_images = summary.usable_images, summary.images
    num_captions = summary.usable_captions, summary.captions
    has_all_items = num_images[0] == num_images[1] and num_captions[0] == num_captions[1]
    folder_of_images = Path(os.path.realpath(path.parent))
    # If none of the first images has a file, the table has stored features only.
    probed = names.read(np.arange(min(_PROBED_FILES, len(names))))
    has_files = any(os.path.isfile(folder_of_images / name) for name in probed)

    def images(names: TextColumn, splits: str) -> ImageColumn:
        return ImageColumn(
            names, summary.splits, load(splits), folder_of_images if has_files else None
        )

    name = Path(os.path.realpath(path)).parent.name
    unpaired: tuple[Dataset, ...] = ()
    if summary.uncaptioned_images:
        uncaptioned = TextColumn(folder / "uncaptioned.arrow", f"{summary.sha256} uncaptioned")
        rows = load("uncaptioned_rows.npy")
        unpaired = (without_captions(name, images(uncaptioned, "uncaptioned_splits.npy"), rows),)
    return Dataset(
        name=name,
        images=images(names, "splits.npy"),
        captions=TextColumn(folder / "captions.arrow", f"{summary.sha256} captions"),
        image_of=load("image_of.npy"),
        image_origin=None if has_all_items else load("image_rows.npy"),
        caption_origin=None if has_all_items else load("caption_rows.npy"),
        skipped=describe_skipped(
            path,
            (num_images[0] + summary.uncaptioned_images, num_images[1]),
            (num_captions[0], num_captions[1] - summary.uncaptioned_rows),
            summary.problems,
            summary.examples,
        ),
        unpaired=unpaired,
    )


def table_problems(path: Path) -> list[Finding]:
    """List the first problems of each kind of a table, then the number of the others."""
    _, summary = _convert(path)
    more_rows = {
        kind: number - _MAX_EXAMPLES
        for kind, number in summary.problems.items()
        if number > _MAX_EXAMPLES
    }
    return [
        *summary.examples,
        *(
            Finding(kind, path.name, f"{number:,} more rows: {kind}")
            for kind, number in more_rows.items()
        ),
    ]


def list_table(path: Path) -> Listing:
    """List the images and captions of a table one by one, for a check that opens every image."""
    data = open_table(path)
    listing = Listing(path)
    for image in data.images:
        listing.add_image(image.name, image.split).location = image.location
    for caption, image_index in zip(data.captions, data.image_of.tolist(), strict=True):
        listing.add_caption(caption, listing.images[image_index], path.name)
    for image in data.unpaired_images:
        listing.add_image(image.name, image.split).location = image.location
    listing.findings += table_problems(path)
    return listing


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
    """Checks a table and writes its columns. Names and splits are read first, then captions, which
    are never in memory at once.
    """

    def __init__(self, path: Path):
        self.path = path
        self.pa = import_pyarrow()
        self.compute = import_pyarrow().compute
        # Number of problems by kind, and the first ones.
        self.problems = Counter[str]()
        self.examples = list[Finding]()
        self.scan = TableScan(path)
        self.layout = self.scan.layout
        columns = self.scan.columns
        assert columns.file is not None
        self.file_column = columns.file
        self.caption_columns = list(columns.captions)
        self.split_columns = [columns.split] if columns.split else []

    def write(self, folder: Path) -> TableSummary:
        """Write all columns, and return the summary."""
        row_images, row_splits, names = self._read_names()
        # The table of hashes that made the names unique is larger than all that follows.
        self.pa.default_memory_pool().release_unused()
        splits, split_names, image_problem = self._splits(row_images, row_splits, names)
        blocks_usable = list[np.ndarray]()
        blocks_images = list[np.ndarray]()
        blocks_empty = [np.zeros(0, np.int64)]
        has_text = np.zeros(len(names), bool)

        def usable_captions() -> Iterator[Any]:
            for captions, rows, usable, empty in self._read_captions(row_images):
                images = row_images[rows]
                has_text[images[~empty & (images >= 0)]] = True
                blocks_empty.append(rows[empty])
                usable &= (images >= 0) & (image_problem[images] == 0)
                blocks_usable.append(usable)
                blocks_images.append(images[usable])
                yield captions.filter(self.pa.array(usable))

        # Captions are written while they are checked, so that only their lengths and images stay in
        # memory.
        self._write_column(folder / "captions.arrow", usable_captions())
        usable = np.concatenate(blocks_usable)
        caption_images = np.concatenate(blocks_images)
        has_caption = np.zeros(len(names), bool)
        has_caption[caption_images] = True
        # In a split without any caption, missing captions are a mistake.
        is_uncaptioned = ~has_text & (image_problem == 0) & np.isin(splits, splits[has_text])
        empty_rows = np.concatenate(blocks_empty)
        is_mistake = ~is_uncaptioned[row_images[empty_rows]] | (row_images[empty_rows] < 0)
        kind, message = caption_problem("") or ("", "")
        self._add_problem(kind, empty_rows[is_mistake], self._name_row, message)
        image_problem[~has_caption & ~is_uncaptioned & (image_problem == 0)] = _IMAGE_KINDS.index(
            "image without caption"
        )
        for code in np.unique(image_problem[image_problem > 0]).tolist():
            kind = _IMAGE_KINDS[code]
            images = np.flatnonzero(image_problem == code)
            self._add_problem(kind, images, lambda image: str(names[image]), _IMAGE_PROBLEMS[kind])
        # Rows of usable images in the whole table, and the index of each row among them.
        is_usable = (image_problem == 0) & ~is_uncaptioned
        image_rows = np.flatnonzero(is_usable)
        uncaptioned = np.flatnonzero(is_uncaptioned)
        new_index = np.cumsum(is_usable) - 1
        columns = {"names": image_rows} | ({"uncaptioned": uncaptioned} if len(uncaptioned) else {})
        for column, rows in columns.items():
            blocks = np.split(rows, range(ROWS_PER_CHUNK, len(rows), ROWS_PER_CHUNK))
            self._write_column(
                folder / f"{column}.arrow", (names.take(self.pa.array(block)) for block in blocks)
            )
        arrays = {"splits": splits[image_rows], "image_of": new_index[caption_images]}
        counts = (len(names), len(usable), len(image_rows), len(caption_images))
        # Without skipped items, the number of an item is its row in stored features.
        if counts[:2] != counts[2:]:
            arrays |= {"image_rows": image_rows, "caption_rows": np.flatnonzero(usable)}
        if len(uncaptioned):
            arrays |= {"uncaptioned_splits": splits[uncaptioned], "uncaptioned_rows": uncaptioned}
        digest = hashlib.sha256("\x1f".join(split_names).encode())
        for name, array in arrays.items():
            storage.write_array(folder / f"{name}.npy", array)
            digest.update(array.data)
        for column in (*columns, "captions"):
            self._hash_column(folder / f"{column}.arrow", digest)
        return TableSummary(
            digest.hexdigest()[:32],
            split_names,
            *counts,
            len(uncaptioned),
            int(np.count_nonzero(~is_mistake)),
            dict(self.problems),
            tuple(self.examples),
        )

    def _read_names(self) -> tuple[np.ndarray, list[Any], Any]:
        """Return the image of each row (-1: none), the texts of the splits, and the name of each
        image.
        """
        splits = list[Any]()

        def read_blocks() -> Iterator[Any]:
            for _, batch in self.scan.batches(
                [self.file_column, *self.split_columns], ROWS_PER_CHUNK // 8
            ):
                names = self._texts(batch.column(0), self.file_column)
                # Not `if_else`: before pyarrow 24 it reads other bytes if the block is a slice.
                is_empty = self._to_numpy(self.compute.equal(names, ""), False)
                if is_empty.any():
                    names = names.take(self.pa.array(np.arange(len(names)), mask=is_empty))
                splits.extend(
                    self._texts(batch.column(1), name).dictionary_encode()
                    for name in self.split_columns
                )
                yield names

        row_images, names = unique_texts(read_blocks())
        if (cleaned := self._clean_names(names)) is not names:
            is_empty = self._to_numpy(self.compute.equal(cleaned, ""), False)
            merged, names = unique_texts(
                [cleaned.take(self.pa.array(np.arange(len(cleaned)), mask=is_empty))]
            )
            row_images = np.where(row_images >= 0, merged[row_images], -1)
        if not len(names):
            reason = "no row names an image file" if len(row_images) else "the table has no rows"
            raise DataError(
                f"{self.path} has no usable image: {reason}. Add rows with an image file and a "
                "caption."
            )
        return row_images, splits, names

    def _clean_names(self, names: Any) -> Any:
        """Names with forward slashes, and without surrounding spaces and numbers of captions. The
        same array if nothing changes.
        """
        if self.layout is None:
            return names
        cleaned = names
        if self.layout.has_numbered_names:
            cleaned = self.compute.replace_substring_regex(cleaned, NAME_NUMBER.pattern, "")
        if (offsets_and_bytes(names)[1] == ord("\\")).any():
            cleaned = self.compute.replace_substring(cleaned, "\\", "/")
        padding = NAME_PADDING.encode()
        if _have_byte(cleaned, padding).any() or _have_byte(cleaned, padding, last=True).any():
            cleaned = self.compute.utf8_trim(cleaned, characters=NAME_PADDING)
        return cleaned

    def _splits(
        self, row_images: np.ndarray, row_splits: list[Any], names: Any
    ) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
        """Return the split of each image as a code, the names of the splits, and the problem of
        each image as a code (0: none).
        """
        problem = np.zeros(len(names), np.int8)
        codes = dict[str, int]()
        blocks = list[np.ndarray]()
        for block in row_splits:
            names_of_block = map(normalize_split_name, block.dictionary.to_pylist())
            text_codes = [
                -1 if split is None else codes.setdefault(split, len(codes))
                for split in names_of_block
            ]
            # A row without a text has the index -1 and takes the last entry.
            indices = self._to_numpy(block.indices, -1)
            blocks.append(np.array([*text_codes, -1], np.int32)[indices])
        # The split of each row as a code (-1: none).
        row_codes = np.concatenate(blocks or [np.full(len(row_images), -1)])
        rows = np.flatnonzero((row_images >= 0) & (row_codes >= 0))
        if not len(rows):
            codes.clear()
            # Few texts are Python objects at once.
            starts = range(0, len(names), ROWS_PER_CHUNK // 8)
            assigned = (
                codes.setdefault(split_by_hash(name), len(codes))
                for start in starts
                for name in names.slice(start, ROWS_PER_CHUNK // 8).to_pylist()
            )
            return np.fromiter(assigned, np.int8, len(names)), tuple(codes), problem
        images = row_images[rows]
        row_codes = row_codes[rows]
        image_codes = np.full(len(names), -1, np.int32)
        # In reverse, because the first row of an image decides.
        image_codes[images[::-1]] = row_codes[::-1]
        problem[image_codes < 0] = _IMAGE_KINDS.index(UNSPLIT_IMAGE[0])
        problem[images[row_codes != image_codes[images]]] = _IMAGE_KINDS.index(
            "image in two splits"
        )
        return (
            np.maximum(image_codes, 0).astype(np.int8 if len(codes) <= 128 else np.int32),
            tuple(codes),
            problem,
        )

    def _read_captions(
        self, row_images: np.ndarray
    ) -> Iterator[tuple[Any, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield blocks of captions, the row of each, and whether its text is usable, and empty."""
        for first_row, batch in self.scan.batches(self.caption_columns, ROWS_PER_CHUNK // 8):
            captions, rows = self._captions(batch)
            num_bytes = self._to_numpy(self.compute.binary_length(captions), 0)
            empty = (num_bytes == 0) | self._to_numpy(self.compute.utf8_is_space(captions), True)
            unnamed = row_images[first_row + rows] < 0
            if unnamed.any():
                # Spreadsheets write rows of empty cells.
                is_blank = unnamed & ~np.isin(rows, rows[~empty])
                captions = captions.filter(self.pa.array(~is_blank))
                rows, num_bytes, empty, unnamed = (
                    values[~is_blank] for values in (rows, num_bytes, empty, unnamed)
                )
            self._add_problem(
                NAMELESS_ROW[0],
                first_row + np.unique(rows[unnamed]),
                self._name_row,
                NAMELESS_ROW[1],
            )
            # A text has at most as many characters as bytes.
            may_fail = (
                (num_bytes > MAX_CAPTION_CHARS)
                | (num_bytes <= _MAX_MISSING_BYTES)
                | _have_byte(captions, b"[({")
            )
            usable = ~empty & ~self._find_caption_problems(
                captions, np.flatnonzero(~empty & may_fail), first_row + rows
            )
            yield captions, first_row + rows, usable, empty

    def _find_caption_problems(
        self, captions: Any, candidates: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """Whether each caption of a block has a problem, if it is a candidate. The problems are
        added.
        """
        kinds = defaultdict[str, list[int]](list)
        messages = dict[int, str]()
        for start in range(0, len(candidates), _CHECKED_CAPTIONS):
            part = candidates[start : start + _CHECKED_CAPTIONS]
            texts = captions.take(self.pa.array(part)).to_pylist()
            for position, text in zip(part.tolist(), texts, strict=True):
                if problem := caption_problem(text):
                    kinds[problem[0]].append(position)
                    messages[position] = problem[1]
        has_problem = np.zeros(len(captions), bool)
        for kind, positions in kinds.items():
            has_problem[positions] = True
            self._add_problem(
                kind,
                np.array(positions),
                lambda position: self._name_row(int(rows[position])),
                messages,
            )
        return has_problem

    def _captions(self, batch: Any) -> tuple[Any, np.ndarray]:
        """The captions of a block as one array, row by row, and the row of each."""
        parts = [
            self._flatten(batch.column(number), name)
            for number, name in enumerate(self.caption_columns)
        ]
        if len(parts) == 1 and (
            self.layout is None or np.array_equal(parts[0][1], np.arange(len(batch)))
        ):
            return parts[0]
        rows = np.concatenate([rows for _, rows in parts])
        order = np.argsort(rows, kind="stable")
        captions = self.pa.concat_arrays([texts for texts, _ in parts]).take(self.pa.array(order))
        rows = rows[order]
        # As in a small CSV file, empty cells at the end of a row are not captions, except the
        # first.
        num_bytes = self._to_numpy(self.compute.binary_length(captions), 0)
        may_be_missing = (num_bytes > 0) & (num_bytes <= _MAX_MISSING_BYTES)
        is_missing = self._matches(captions, may_be_missing, MISSING_TEXTS.__contains__)
        filled = np.flatnonzero((num_bytes > 0) & ~is_missing)
        # Position of the last filled caption of each row, 0 for a row without any.
        last_filled = np.zeros(len(batch), np.int64)
        last_filled[rows[filled]] = filled
        is_first = np.diff(rows, prepend=-1) > 0
        keep = is_first | (np.arange(len(rows)) <= last_filled[rows])
        return captions.filter(self.pa.array(keep)), rows[keep]

    def _flatten(self, column: Any, name: str) -> tuple[Any, np.ndarray]:
        """The captions of a column in NFC, and the row of each."""
        if not (self.pa.types.is_list(column.type) or self.pa.types.is_large_list(column.type)):
            texts = self._texts(column, name)
            rows = np.arange(len(column))
            if not self._matches(texts, _have_byte(texts, b"[({"), is_list_text).any():
                return self._to_nfc(texts), rows
            cells = [
                [cell] if cell is None else split_caption_list(cell) for cell in texts.to_pylist()
            ]
            column = self.pa.array(cells, self.pa.large_list(self.pa.large_string()))
        rows = self.compute.list_parent_indices(column).to_numpy(zero_copy_only=False)
        return self._to_nfc(self._texts(self.compute.list_flatten(column), name)), rows

    def _to_nfc(self, texts: Any) -> Any:
        offsets, content = offsets_and_bytes(texts)
        if content[offsets[0] : offsets[-1]].max(initial=0) < 128:
            return texts
        mask = self.pa.array(
            self._to_numpy(self.compute.invert(self.compute.string_is_ascii(texts)), False)
        )
        return self.compute.replace_with_mask(
            texts, mask, self.compute.utf8_normalize(texts.filter(mask), "NFC")
        )

    def _matches(
        self, captions: Any, candidates: np.ndarray, predicate: Callable[[str], bool]
    ) -> np.ndarray:
        """Whether each caption is a candidate that satisfies a predicate."""
        found = np.zeros(len(captions), bool)
        rows = np.flatnonzero(candidates)
        found[rows] = [
            predicate(caption) for caption in captions.take(self.pa.array(rows)).to_pylist()
        ]
        return found

    def _texts(self, column: Any, name: str) -> Any:
        """A column as valid texts."""
        types = self.pa.types
        kind = column.type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        require(
            types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind),
            f"{self.path}: column {name}: expected texts, got {column.type}. Store texts in it.",
        )
        texts = column.cast(self.pa.large_string())
        if self.layout is not None and self.layout.has_spaces:
            texts = self.compute.utf8_ltrim(texts, characters=" ")
        try:
            texts.validate(full=True)
        except self.pa.ArrowInvalid as error:
            raise DataError(
                f"{self.path}: column {name}: expected UTF-8 texts: {storage.error_reason(error)}. "
                "Save it again as UTF-8."
            ) from None
        return texts

    def _to_numpy(self, column: Any, missing: Any) -> np.ndarray:
        """A column as an array, with a value for null."""
        return self.compute.fill_null(column, missing).to_numpy(zero_copy_only=False)

    def _name_row(self, row: int) -> str:
        return f"{self.path.name}, row {row + 1:,}"

    def _add_problem(
        self,
        kind: str,
        items: np.ndarray,
        locate: Callable[[int], str],
        messages: str | Mapping[int, str],
    ) -> None:
        """Add a problem of images or rows."""
        if len(items):
            new_examples = items[: max(0, _MAX_EXAMPLES - self.problems[kind])].tolist()
            self.examples += [
                Finding(
                    kind, locate(item), messages if isinstance(messages, str) else messages[item]
                )
                for item in new_examples
            ]
            self.problems[kind] += len(items)

    def _write_column(self, path: Path, blocks: Iterator[Any]) -> None:
        """Write a column with the same number of rows in each record batch."""
        schema = self.pa.schema([("text", self.pa.large_string())])
        waiting = []
        count = 0
        with storage.storage_errors(path), self.pa.ipc.new_file(str(path), schema) as writer:
            for block in blocks:
                waiting.append(block)
                count += len(block)
                while count >= ROWS_PER_CHUNK:
                    joined = self.pa.concat_arrays(waiting)
                    writer.write_batch(
                        self.pa.record_batch([joined.slice(0, ROWS_PER_CHUNK)], schema=schema)
                    )
                    waiting = [joined.slice(ROWS_PER_CHUNK)]
                    count = count - ROWS_PER_CHUNK
            if count:
                writer.write_batch(
                    self.pa.record_batch([self.pa.concat_arrays(waiting)], schema=schema)
                )

    def _hash_column(self, path: Path, digest: Any) -> None:
        """Add a written column to a hash. The file is not mapped, so that its pages do not stay in
        memory.
        """
        with storage.storage_errors(path), self.pa.OSFile(str(path)) as file:
            reader = self.pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                texts = reader.get_batch(number).column(0)
                offsets, content = offsets_and_bytes(texts)
                # Lengths instead of offsets, which depend on where a block begins.
                digest.update(np.diff(offsets).data)
                digest.update(content[offsets[0] : offsets[-1]].data)


def _have_byte(texts: Any, values: bytes, *, last: bool = False) -> np.ndarray:
    """Whether the first or last byte of each text is one of some values."""
    offsets, content = offsets_and_bytes(texts)
    if not len(content):
        return np.zeros(len(texts), bool)
    is_value = np.zeros(256, bool)
    is_value[list(values)] = True
    positions = offsets[1:] - 1 if last else offsets[:-1]
    found = is_value[content[np.clip(positions, 0, len(content) - 1)]]
    return found & (np.diff(offsets) > 0) if found.any() else found


LARGE_TABLE = DatasetFormat(
    name="captions.parquet",
    description="captions.parquet or captions.arrow next to the images (columns filename, caption, split), for millions of captions",
    patterns=("captions.parquet", "captions.arrow"),
    suffixes=("captions.parquet", "captions.arrow"),
    read=list_table,
    image_files="none",
    open=open_table,
)
