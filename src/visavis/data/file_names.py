"""What the names of files and splits mean: splits by name and by a hash, suffixes of images, videos,
photos and shards, and names without valid Unicode.

Example:
    >>> describe_other_files(["a.xmp", "b.XMP", "logo.svg", "README"])
    '4 other files: .xmp, .svg, no suffix'
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath

SPLITS = ("train", "val", "test")
TAR_SUFFIX = ".tar"
INDEX_DATABASE = "index.db"
"""File in the folder of an index with its description, its items and votes on them."""
# Texts that pandas, R and databases write for a missing value.
MISSING_TEXTS = frozenset(("nan", "NaN", "NA", "<NA>", "None", "NULL", "null", "#N/A"))
_STANDARD_NAMES = {
    **{split: split for split in SPLITS},
    **dict.fromkeys(("restval", "training"), "train"),
    **dict.fromkeys(("dev", "valid", "validate", "validation"), "val"),
    "testing": "test",
}


LAST_CASED = 0x1FFFF
"""Unicode has no letters of upper and lower case beyond this number."""


def fold_case(text: str) -> str:
    """Replace letters by letters of one case, as names are compared without regard to case.

    Regular expressions of Python and of Arrow differ for letters such as ``İ`` and ``ſ``.

    Args:
        text: A text.

    Returns:
        A text with the same number of characters. ``ß`` and ``İ``, whose other case has two
        characters, equal themselves and ``ẞ`` only.

    Example:
        >>> fold_case("IMG.JPG"), fold_case("STRAẞE")
        ('img.jpg', 'straße')
    """
    return text.lower() if text.isascii() else "".join(map(_fold_letter, text))


@cache
def _fold_letter(letter: str) -> str:
    forms = letter.casefold(), letter.lower(), letter
    return next(form for form in forms if len(form) == 1)


@cache
def _letters_of_case() -> Mapping[str, str]:
    """All letters that ``fold_case`` replaces by the same letter, by this letter."""
    letters = defaultdict[str, str](str)
    for letter in map(chr, range(LAST_CASED)):
        if (folded := _fold_letter(letter)) != letter:
            letters[folded] = (letters[folded] or folded) + letter
    return dict(letters)


def any_case_expression(text: str) -> str:
    """Write a regular expression for a text in upper and lower case, as of ``fold_case``.

    Args:
        text: A text.

    Returns:
        An expression that engines read alike, because it does not use their option for case.

    Example:
        >>> any_case_expression("a1é")
        '[aA]1[éÉ]'
    """
    letters = _letters_of_case()
    return "".join(
        f"[{letters[letter]}]" if letter in letters else re.escape(letter)
        for letter in fold_case(text)
    )


def normalize_split_name(raw_name: object) -> str | None:
    """Return the standard name of a split: ``restval`` and ``Train`` are train, ``dev`` and
    ``validation`` are val. None if the source has no name, or the text of a missing value.
    """
    name = raw_name.strip() if isinstance(raw_name, str) else ""
    return None if name in MISSING_TEXTS else _STANDARD_NAMES.get(name.lower(), name) or None


def split_priority(split: str | None) -> int:
    """Return the order in which copies of an image are kept: 0 for test, 1 for val, 2 for others."""
    # A result on test must not come from training on a copy.
    return {"test": 0, "val": 1}.get(split or "", 2)


def split_by_hash(name: str) -> str:
    """Assign a split by a hash of the name: 80 % train, 10 % val, 10 % test. New images never
    change the split of others.
    """
    hundredth = (
        int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8]) % 100
    )
    return "train" if hundredth < 80 else "val" if hundredth < 90 else "test"


def splits_of_files(files: Iterable[Path], folder: Path) -> dict[Path, str | None]:
    """Read the split of each file from its name, or from the name of its folder:
    ``data/validation-00000-of-00001.parquet`` is val.
    """
    splits = {file: split_in_name(file.relative_to(folder)) for file in files}
    # If all files are named train, the data has no split to validate on. So no file has a split,
    # and images are assigned by a hash.
    return splits if set(splits.values()) != {"train"} else dict.fromkeys(splits)


def find_split_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Find the files of a data set in a folder, in its folder ``data``, and in the folders of both
    that are named as a split.
    """
    folders = [folder]
    for parent in (folder, folder / "data"):
        children = sorted(
            child
            for child in (parent.iterdir() if os.path.isdir(parent) else ())
            if os.path.isdir(child)
        )
        folders += [
            child
            for child in children
            if (child.name == "data" and parent == folder) or split_in_name(child.name) is not None
        ]
    files = (
        file
        for parent in folders
        for file in parent.iterdir()
        if file.suffix in suffixes and not file.name.startswith(".")
    )
    return sorted(filter(os.path.isfile, files))


def split_in_name(path: str | Path) -> str | None:
    """Find the standard name of a split in a path: in its file name, then in its folders."""
    for part in reversed(Path(path).parts):
        # Whole words: "training" is a split, and "trains.jpg" is not.
        for word in re.split(r"[\W\d_]+", part.lower()):
            if (split := normalize_split_name(word)) in SPLITS:
                return split
    return None


# Images that Pillow decodes: the suffixes that it registers for ``supported_formats``.
PILLOW_SUFFIXES = (
    *(
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".png",
        ".apng",
        ".webp",
        ".gif",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
        ".avif",
        ".avifs",
    ),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
)
VIDEO_SUFFIXES = (
    *(
        ".mp4",
        ".m4v",
        ".mov",
        ".qt",
        ".webm",
        ".mkv",
        ".avi",
        ".divx",
        ".mpg",
        ".mpeg",
        ".mpe",
        ".vob",
        ".ts",
        ".mts",
        ".m2ts",
        ".m2t",
    ),
    *(".wmv", ".asf", ".flv", ".f4v", ".3gp", ".3g2", ".ogv", ".ogm"),
)
# Photos of phones and cameras, which the extra ``photos`` decodes.
RAW_SUFFIXES = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".fff", ".gpr", ".iiq"),
    *(".kdc", ".mef", ".mos", ".mrw", ".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2"),
    *(".rwl", ".sr2", ".srf", ".srw", ".x3f"),
)
PHOTO_SUFFIXES = (".heic", ".heics", ".heif", ".heifs", ".hif", ".jxl", *RAW_SUFFIXES)
IMAGE_SUFFIXES = PILLOW_SUFFIXES + PHOTO_SUFFIXES
VISUAL_SUFFIXES = IMAGE_SUFFIXES + VIDEO_SUFFIXES
# Photos that cannot be decoded.
UNSUPPORTED_SUFFIXES = (".jxr", ".wdp", ".hdp")
# Lists, tables, features and notes of a data set.
DATASET_SUFFIXES = (
    ".json",
    ".jsonl",
    ".csv",
    ".tsv",
    ".txt",
    ".token",
    ".parquet",
    ".arrow",
    ".npy",
    ".npz",
    ".pkl",
    ".md",
)
# Suffixes in one line about other files.
MAX_NAMED_SUFFIXES = 10


def is_video(name: str) -> bool:
    """Return whether a file is a video, by its suffix."""
    return name.lower().endswith(VIDEO_SUFFIXES)


def unsupported_problem(name: str) -> str | None:
    """Return problem and fix, without a period, of a photo whose format cannot be decoded."""
    suffix = PurePath(name).suffix.lower()
    if suffix not in UNSUPPORTED_SUFFIXES:
        return None
    return f"expected a JPEG, PNG or other supported image, got a {suffix} file. Convert it to JPEG"


def describe_other_files(names: Iterable[str]) -> str | None:
    """Count files that are not read, and name their suffixes. None without files."""
    suffixes = Counter(PurePath(name).suffix.lower() or "no suffix" for name in names)
    # The most frequent first, then by name, so that the line does not depend on the order of the
    # files.
    ordered = sorted(suffixes, key=lambda suffix: (-suffixes[suffix], suffix))
    shown = ordered[:MAX_NAMED_SUFFIXES]
    total = suffixes.total()
    shown += ["..."] if len(ordered) > len(shown) else []
    return f"{total:,} other file{'s'[: total > 1]}: {', '.join(shown)}" if total else None


def is_valid_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8, so that it has no lone surrogates."""
    # The fast path of most texts.
    if text.isascii():
        return True
    # Three times as fast as a search for surrogates.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Backslashes that would look like an escaped byte are escaped, so that each name has one form.
_AMBIGUOUS = re.compile(r"\\(?=x[0-9a-f]{2})|[\udc80-\udcff]")
_ESCAPED = re.compile(r"\\x(5c|[89a-f][0-9a-f])")


def escape_name(name: str) -> str:
    r"""Write the name of a file as Unicode, which a file system may not require.

    Args:
        name: Name or path, with lone surrogates for bytes that are not UTF-8, as Python lists it.

    Returns:
        The name with these bytes in hex.

    Example:
        >>> escape_name("caf\udce9.jpg"), escape_name(r"caf\xe9.jpg")
        ('caf\\xe9.jpg', 'caf\\x5cxe9.jpg')
    """
    if name.isascii() and "\\x" not in name:
        return name
    return _AMBIGUOUS.sub(lambda match: rf"\x{ord(match[0]) & 0xFF:02x}", name)


def unescape_name(text: str) -> str:
    r"""Return the name of a file on its disk, the inverse of ``escape_name``.

    Args:
        text: Name or path as ``escape_name`` writes it.

    Returns:
        The name with lone surrogates, with which Python opens the file.

    Example:
        >>> unescape_name(r"caf\xe9.jpg") == "caf\udce9.jpg"
        True
    """
    if "\\x" not in text:
        return text
    return _ESCAPED.sub(
        lambda match: "\\" if match[1] == "5c" else chr(0xDC00 + int(match[1], 16)), text
    )


def escape_surrogates(text: str) -> str:
    """Format a text on one line, with lone surrogates as escaped bytes."""
    try:
        content = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # a surrogate without a byte, from a JSON escape
        content = text.encode(errors="surrogatepass")
    return " ".join(content.decode(errors="backslashreplace").splitlines())


def is_shard_pattern(name: str) -> bool:
    """Return whether a file name is a pattern of shards, such as ``train-{000..039}.tar``."""
    return name.endswith(TAR_SUFFIX) and re.search(r"\{.+\}|[*?[]", name) is not None
