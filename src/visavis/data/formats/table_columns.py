"""Columns of tables with images and captions: which of them hold the image, the captions, the name
and the split.
"""

from __future__ import annotations

import ast
import json
import re
import reprlib
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from visavis.core.errors import DataError
from visavis.data.columns import import_pyarrow
from visavis.data.dataset import require
from visavis.data.file_names import MISSING_TEXTS, normalize_split_name
from visavis.data.image_file import ByteRange

if TYPE_CHECKING:
    import pyarrow as pa

FILE_NAMES = ("filename", "file_name", "image", "image_name", "file", "path")
# Names of the same content that are read only if none of the above exists.
OTHER_FILE_NAMES = (
    "image_path",
    "image_file",
    "image_filename",
    "img_path",
    "img_name",
    "img_file",
    "filepath",
    "file_path",
)
ID_NAMES = ("image_id", "img_id", "imgid", "cocoid", "__key__")
CAPTION_NAMES = ("caption", "captions", "text", "title", "sentence", "sentences", "texts", "raw")
# Names that are read only if none of the above exists.
OTHER_CAPTION_NAMES = ("description", "comment", "alt_text")
# Columns with an image, as ``datasets`` writes them, or with its bytes.
IMAGE_NAMES = ("image", "img", "jpg", "png", "webp")
# Maximum size of all texts of a sample. It is checked before they are decoded.
MAX_TEXT_BYTES = 2**22
# Keys of the text of a caption that is an object, as in Karpathy's lists.
_TEXT_KEYS = ("raw", "caption", "text", "sentence")
# A list of texts as JSON, Python and NumPy write it. NumPy separates texts by white space only.
_LITERAL = r"""u?(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")"""
_LITERALS = re.compile(
    rf"""[\[({{]\s*(?:{_LITERAL}(?:\s*,\s*|\s+|(?=[\])}}])))*+[\])}}]\s*""", re.DOTALL
)
_LIST_TEXT = re.compile(r"""[\[({]\s*(?:u?['"].*)?[\])}]\s*""", re.DOTALL)


def normalize_column(name: str) -> str:
    """Return the name of a column in lower case, with underscores for spaces: ``Image File`` is
    ``image_file``.
    """
    return re.sub(r"\s+", "_", name.strip().lower())


def is_list_text(text: str) -> bool:
    """Return whether a text begins and ends like a list of texts, such as ``['a dog', 'a cat']``."""
    return text[:1] in ("[", "(", "{") and _LIST_TEXT.fullmatch(text) is not None


def split_caption_list(text: str) -> list[str]:
    """Split a list of captions that pandas, NumPy or JSON wrote as a text. Any other text, and a
    list that cannot be read, is one caption.
    """
    if not is_list_text(text):
        return [text]
    try:
        captions = json.loads(text)
        if isinstance(captions, list) and all(isinstance(caption, str) for caption in captions):
            return captions
    except (ValueError, RecursionError):
        pass
    if not _LITERALS.fullmatch(text):
        return [text]
    try:
        with warnings.catch_warnings():
            # For a backslash that escapes nothing.
            warnings.simplefilter("error")
            return [ast.literal_eval(literal) for literal in re.findall(_LITERAL, text, re.DOTALL)]
    except (SyntaxError, ValueError):
        return [text]


def named_columns(names: Iterable[str], *tiers: Sequence[str]) -> list[str]:
    """Find columns in the order of the searched names, as ``normalize_column`` writes them."""
    # The next tier counts only if no name of the one before exists.
    by_name = {normalize_column(name): name for name in names}
    matches_of_tiers = ([by_name[name] for name in tier if name in by_name] for tier in tiers)
    return next(filter(None, matches_of_tiers), [])


def find_file_column(names: Sequence[str], location: object) -> str:
    """Find the one column with the image file of a table of captions."""
    file_names = {
        normalize_column(name) for name in named_columns(names, FILE_NAMES, OTHER_FILE_NAMES)
    }
    # Names may differ in case only.
    columns = [name for name in names if normalize_column(name) in file_names]
    require(
        len(columns) == 1,
        f"{location}: expected one column with the image file, got {len(columns)} "
        f"({', '.join(names):.80}). Name one of them filename.",
    )
    return columns[0]


# Not frozen, because a table has as many of them as rows.
@dataclass(slots=True)
class TableRow:
    """Content of a row of a table.

    Attributes:
        location: Location of the row for findings, such as ``captions.csv:3``.
        name: Name of the image, which may be its file. None: the row names none.
        captions: Captions of the row.
        split: Standard name of the split. None: the row gives none.
        image: Location of the bytes of the image. None: the row has none.
        path: Path that ``datasets`` writes next to the bytes.
        default_name: Name of an image that has no other. None: the table has no images in it.
    """

    location: str
    name: str | None
    captions: list[str]
    split: str | None
    image: ByteRange | None = None
    path: str | None = None
    default_name: str | None = None


@dataclass(frozen=True)
class TableColumns:
    """Columns of a table.

    Attributes:
        image: Column with the bytes of the image. None: images are files.
        file: Column with the file, or with the name of an image whose bytes are in the table. None:
            images have no names.
        captions: Columns with captions.
        split: Column with the split. None: no column.
    """

    image: str | None
    file: str | None
    captions: tuple[str, ...]
    split: str | None

    @classmethod
    def of_table(cls, names: Sequence[str], location: object) -> TableColumns:
        """Find the columns of a table of captions of image files."""
        file = find_file_column(names, location)
        kinds = _caption_kinds(names)
        require(
            "caption" in kinds or "captions" in kinds or len(kinds) == 1,
            f"{location}: expected one column with the caption, got {len(kinds)} "
            f"({', '.join(names):.80}). Name one of them caption.",
        )
        return cls._of_kinds(None, file, kinds, names)

    @classmethod
    # The lines of a file have the same keys. Few entries, because keys may have megabytes.
    @lru_cache(maxsize=8)
    def of_object(cls, names: tuple[str, ...]) -> TableColumns:
        """Find the keys of an object of JSON, which may have others of any meaning."""
        files = named_columns(names, FILE_NAMES, OTHER_FILE_NAMES)
        return cls._of_kinds(None, files[0] if files else None, _caption_kinds(names), names)

    @classmethod
    def of_schema(cls, schema: pa.Schema, location: str) -> TableColumns:
        """Find the columns of a table that may have images in it."""
        embedded = [field.name for field in schema if _holds_bytes(field.type)]
        images = named_columns(embedded, IMAGE_NAMES)[:1] or embedded
        kinds = _caption_kinds(schema.names)
        captions = _preferred_kind(kinds)
        others = [name for name in schema.names if name not in (*embedded, *captions)]
        files = named_columns(others, FILE_NAMES, OTHER_FILE_NAMES, ID_NAMES if images else ())
        columns = ", ".join(f"{field.name} ({field.type!s:.40})" for field in schema)
        require(
            len(images) == 1 or (files and not images),
            f"{location}: expected a column with the image ({', '.join(IMAGE_NAMES)} with bytes, "
            f"or {', '.join(FILE_NAMES)} with a file), got {columns}. Rename the column.",
        )
        require(
            captions,
            f"{location}: expected a column with the caption ({', '.join(CAPTION_NAMES)}), got "
            f"{columns}. Rename the column.",
        )
        found = cls._of_kinds(
            images[0] if images else None, files[0] if files else None, kinds, schema.names
        )
        used = (*images, *files[:1], *found.captions, found.split)
        for name in filter(None, used):
            # Arrow reads the first of them.
            require(
                schema.names.count(name) == 1,
                f"{location}: expected one column {name}, got {schema.names.count(name)}. Rename "
                "the others.",
            )
        return found

    @classmethod
    def _of_kinds(
        cls,
        image: str | None,
        file: str | None,
        kinds: Mapping[str, list[str]],
        names: Sequence[str],
    ) -> TableColumns:
        split = next(iter(named_columns(names, ("split",))), None)
        return cls(image, file, tuple(_preferred_kind(kinds)), split)

    def parse_row(self, location: str, file: Any, captions: Sequence[Any], split: Any) -> TableRow:
        """Read the values of a row: one of the file, one of each column of captions, and the split.
        Raises DataError if a value has another type.
        """
        if file is not None and not isinstance(file, str | int):
            raise DataError(f"{self.file}: expected a text, got {shorten(file)}")
        texts = list[str]()
        for column, value in zip(self.captions, captions, strict=True):
            # Most values are one text. Two calls less save a fifth of the time of a row.
            if isinstance(value, str) and not value.startswith(("[", "(", "{")):
                texts.append(value)
                continue
            found = cell_texts(value)
            if found is None:
                raise DataError(f"{column}: expected texts, got {shorten(value)}")
            texts += found
        # Rows have as many cells as the longest. An empty first caption is a finding, the others
        # are not. A list has as many texts as its writer meant.
        if len(texts) > 1 and not any(isinstance(value, list) for value in captions):
            while len(texts) > 1 and (not texts[-1] or texts[-1] in MISSING_TEXTS):
                texts.pop()
        if split is not None and not isinstance(split, str):
            raise DataError(f"{self.split}: expected a text, got {shorten(split)}")
        name = file if isinstance(file, str) else None
        # A number is the id of an image in the table, and not the name of a file.
        if isinstance(file, int) and self.image is not None:
            name = str(file)
        standard_split = None if split is None else normalize_split_name(split)
        return TableRow(location, name, texts, standard_split)


def read_cell(
    column: pa.ChunkedArray, row: int, location: str, max_bytes: int = MAX_TEXT_BYTES
) -> Any:
    """Read a value of a column as a Python object. ``location`` is for errors."""
    # A slice, so that its size is known before it is decoded.
    cell = column.slice(row, 1)
    if import_pyarrow().types.is_dictionary(cell.type):
        cell = cell.cast(cell.type.value_type)
    # Before it becomes a Python object: a cell of a hostile file may have gigabytes.
    require(
        cell.nbytes <= max_bytes,
        f"{location}: expected at most {max_bytes:,} bytes, got {cell.nbytes:,}. Shorten the text "
        "or image.",
    )
    try:
        return cell[0].as_py()
    except ValueError as error:
        raise DataError(
            f"{location}: expected text in UTF-8 and fields with different names, got {error}. "
            "Write the row again."
        ) from None


def cell_texts(value: Any) -> list[str] | None:
    """Read the texts of a value: a text, a list that is written as a text, an object with the text,
    or a list of these. Missing values are left out. None: the value has another type.
    """
    if isinstance(value, str):
        return split_caption_list(value)
    texts = list[str]()
    for entry in value if isinstance(value, list) else [value]:
        if entry is None:
            continue
        text = (
            next((entry[key] for key in _TEXT_KEYS if key in entry), None)
            if isinstance(entry, dict)
            else entry
        )
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def parse_captions(value: Any) -> list[str] | None:
    """Read the captions of a sample of a stream. Missing values and their texts, such as ``nan``,
    are left out. Texts are normalized to NFC. None: another type, or a list that cannot be read.
    """
    is_missing = isinstance(value, str) and value in MISSING_TEXTS
    texts = [] if is_missing else cell_texts(value)
    if texts is None or any(map(is_list_text, texts)):
        return None
    return [unicodedata.normalize("NFC", text) for text in texts]


def shorten(value: Any) -> str:
    """Format the beginning of a value of any size and depth, at most 60 characters."""
    return f"{reprlib.repr(value):.60}"


def _caption_kinds(names: Sequence[str]) -> dict[str, list[str]]:
    """Columns of captions by their name without a number."""
    kinds: dict[str, list[str]] = {}
    for caption_names in (CAPTION_NAMES, OTHER_CAPTION_NAMES):
        for column in names:
            if match := re.fullmatch(
                rf"({'|'.join(caption_names)})[_-]?\d*", normalize_column(column)
            ):
                kinds.setdefault(match[1], []).append(column)
        if kinds:
            break
    return kinds


def _preferred_kind(kinds: Mapping[str, list[str]]) -> list[str]:
    """The columns of captions that are read if a table has several kinds of texts."""
    names = (*CAPTION_NAMES, *OTHER_CAPTION_NAMES)
    return next((kinds[name] for name in names if name in kinds), [])


def _holds_bytes(kind: pa.DataType) -> bool:
    """Whether a column holds bytes, or a struct of ``datasets`` with bytes."""
    types = import_pyarrow().types
    if types.is_struct(kind):
        position = kind.get_field_index("bytes")
        return position >= 0 and (
            types.is_null(kind.field(position).type) or _holds_bytes(kind.field(position).type)
        )
    return bool(types.is_binary(kind) or types.is_large_binary(kind))
