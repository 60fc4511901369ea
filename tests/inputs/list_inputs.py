"""Lists of images and captions in all formats, written from a known data set, with one known mistake
each, or with damaged bytes.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import random
import tarfile
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tests.inputs.cases import Case, Kind
from tests.mutation import damaged

from visavis.core.errors import DataError
from visavis.data.dataset_check import check_dataset
from visavis.data.image_validation import open_valid_dataset

SPLITS = ("train", "val", "test")
NAME_PARTS = (
    *(
        "a",
        "dog",
        "DSC_0001",
        "IMG 12",
        "é",
        "e\u0301",
        "東京",
        "🌸",
        "ß",
        "İ",
        "-x",
        "a,b",
        "it's",
    ),
    *(
        "[1]",
        "(2)",
        "{3}",
        "100%",
        "a=b",
        "a;b",
        "a|b",
        "#1",
        "a#b",
        "~a",
        "$HOME",
        "%20",
        "\u200d",
        "＃",
    ),
)
CAPTION_PARTS = (
    *(
        "a dog",
        "two red cars",
        'a "quoted" word',
        "it's, well, here",
        "; | \t x",
        "naïve café",
        "東京の桜",
    ),
    *(
        "🌸🐕\u200d🦺",
        "\u202eright to left",
        "e\u0301te\u0301",
        "#0",
        "100 %",
        "C:\\photos\\x",
        "line\u2028end",
        "=1+1",
    ),
    *(
        "<b>bold</b>",
        "\\n",
        "'single'",
        "NULL is a word",
        "nan or none",
        "a\u00a0b",
        "a\ufeffb",
        "{x}",
        "[1]x",
    ),
)


@dataclass
class Item:
    """An image with its captions."""

    name: str
    split: str
    captions: list[str]
    content: bytes


@dataclass
class Mistake:
    """A mistake that a list may have, by the function that makes it.

    Attributes:
        note: Short description.
        apply: Changes the rows before they are written, or the bytes after.
    """

    note: str
    rows: Callable[[random.Random, list[dict[str, Any]]], None] = lambda *_: None
    content: Callable[[random.Random, bytes], bytes] = lambda _, content: content
    folder: Callable[[random.Random, Path, list[Item]], None] = lambda *_: None


def png(number: int) -> bytes:
    """A small image that differs by number."""
    file = io.BytesIO()
    Image.new("RGB", (4 + number, 5), (number * 9, 7, 99)).save(file, "PNG")
    return file.getvalue()


def sampled_items(rng: random.Random, *, plain_names: bool = False) -> list[Item]:
    """Three to six images of all splits."""
    items = []
    for number in range(rng.choice([3, 4, 6])):
        part = "x" if plain_names else rng.choice(NAME_PARTS)
        captions = [
            " ".join(rng.choices(CAPTION_PARTS, k=rng.choice([1, 1, 2]))).strip()
            for _ in range(rng.choice([1, 2, 3]))
        ]
        captions = list(dict.fromkeys(captions))
        items.append(Item(f"{part}{number}.png", SPLITS[number % 3], captions, png(number)))
    return items


def write_images(folder: Path, items: list[Item]) -> None:
    """Write the image files."""
    for item in items:
        path = folder / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.content)


def read_list(folder: Path, *, is_wrong: bool) -> Any:
    """Check a data set as ``visavis data check``, open it as ``visavis train``."""
    report = check_dataset(folder)
    # An image without captions is a candidate of evaluations. It is noted, and is not an error.
    is_noted = any(finding.kind == "uncaptioned image" for finding in report.findings)
    if is_wrong:
        assert is_noted or not report.ok, "visavis data check reports no loss"
        with suppress(DataError):
            open_valid_dataset(folder, skip_bad=True)
    else:
        for finding in report.findings:
            text = str(finding)
            assert text.encode() and "\n" not in text, f"the finding {text!r} has several lines"
    data = open_valid_dataset(folder)
    for image in data.images:
        # A large table finds its files when they are read.
        assert image.open().mode == "RGB"
    assert not is_wrong or is_noted, "a wrong list was opened without an error"
    return data


def nfc(text: str) -> str:
    """The form in which captions are compared."""
    return unicodedata.normalize("NFC", text)


def check_items(items: list[Item], data: Any) -> str:
    """A data set has exactly the written images, captions and splits."""
    found: dict[str, tuple[str, list[str]]] = {
        image.name: (image.split, []) for image in data.images
    }
    for caption, number in zip(data.captions, data.image_of, strict=True):
        found[data.images[number].name][1].append(caption)
    expected = {item.name: (item.split, list(map(nfc, item.captions))) for item in items}
    if found == expected:
        return ""
    different = [name for name in {*found, *expected} if found.get(name) != expected.get(name)]
    return "; ".join(
        f"{name!r}: written {expected.get(name)}, read {found.get(name)}" for name in different[:2]
    )


def any_row(
    change: Callable[[random.Random, dict[str, Any]], None],
) -> Callable[[random.Random, list[dict[str, Any]]], None]:
    """A mistake in one row."""
    return lambda rng, rows: change(rng, rng.choice(rows))


def missing_file(rng: random.Random, folder: Path, items: list[Item]) -> None:
    """Remove an image file."""
    (folder / rng.choice(items).name).unlink()


def cut_file(rng: random.Random, folder: Path, items: list[Item]) -> None:
    """Cut an image file in the middle."""
    item = rng.choice(items)
    (folder / item.name).write_bytes(item.content[: rng.randrange(len(item.content) - 12)])


def put(key: str, value: Any) -> Callable[[random.Random, dict[str, Any]], None]:
    """Replace a value of a row."""

    def change(_: random.Random, row: dict[str, Any]) -> None:
        row[key] = value

    return change


FILE_MISTAKES = [
    Mistake("missing image file", folder=missing_file),
    Mistake("cut image file", folder=cut_file),
]
ROW_MISTAKES = [
    Mistake("row without image", any_row(put("filename", ""))),
    Mistake("empty caption", any_row(put("caption", " "))),
    Mistake("long caption", any_row(put("caption", "a" * 20_001))),
    Mistake("image outside the folder", any_row(put("filename", "../outside.png"))),
    Mistake("absolute path", any_row(put("filename", "/etc/hostname"))),
    Mistake("missing value as a caption", any_row(put("caption", "nan"))),
    Mistake("caption is half a list", any_row(put("caption", "['a dog', 'b']]"))),
]


def with_other_split(rng: random.Random, rows: list[dict[str, Any]]) -> None:
    """Another row of an image has another split."""
    row = dict(rng.choice(rows))
    row["split"] = next(split for split in SPLITS if split != row["split"])
    row["caption"] += " again"
    rows.append(row)


def csv_dialect(rng: random.Random) -> dict[str, Any]:
    """A form in which programs write tables."""
    return {
        "delimiter": rng.choice([",", ",", ";", "\t"]),
        "quoting": rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
        "lineterminator": rng.choice(["\n", "\r\n"]),
    }


def as_csv(rows: list[dict[str, Any]], dialect: dict[str, Any], header: list[str]) -> str:
    """A table of rows."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, **dialect)
    writer.writerow(header)
    writer.writerows([row["filename"], row["caption"], row["split"]] for row in rows)
    return file.getvalue()


def encoded(text: str, rng: random.Random) -> bytes:
    """A text in one of the encodings that spreadsheets write."""
    encoding = rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le-bom"])
    if encoding == "utf-16-le-bom":
        return codecs.BOM_UTF16_BE + text.encode("utf-16-be")
    return text.encode(encoding)


def caption_rows(items: list[Item]) -> list[dict[str, Any]]:
    """A row for each caption."""
    return [
        {"filename": item.name, "caption": caption, "split": item.split}
        for item in items
        for caption in item.captions
    ]


def line_break(text: str) -> bytes:
    """The line break of a table."""
    return b"\r\n" if "\r\n" in text else b"\n"


CSV_TEXT_MISTAKES: dict[str, Callable[[random.Random, bytes, bytes], bytes]] = {
    "unclosed quote": lambda _, content, end: content + b'x0.png,"a dog,train' + end,
    "too many cells": lambda _, content, end: content + b"x0.png,a dog,train,one,two" + end,
    "too few cells": lambda _, content, end: content + b"x0.png" + end,
    "bytes that are not UTF-8": lambda _, content, end: content + b"x0.png,a \xff dog,train" + end,
    "no header": lambda _, content, end: content[content.index(end) + len(end) :],
    "two columns of files": lambda _, content, end: (
        b"filename,image" + content[content.index(b",") :]
    ),
}


def make_csv(rng: random.Random, folder: Path, _: Any) -> Case:
    """``captions.csv`` or ``captions.tsv``."""
    items = sampled_items(rng)
    (folder / "data").mkdir()
    (folder / "outside.png").write_bytes(png(1))
    folder = folder / "data"
    write_images(folder, items)
    rows = caption_rows(items)
    dialect = csv_dialect(rng)
    header = [
        rng.choice(["filename", "file_name", "image", "Image File", "path"]),
        rng.choice(["caption", "Caption", "text", "sentence"]),
        "split",
    ]
    if header[0] == "Image File":
        header[0] = "image_file"
    known: Any = "right"
    way, note = rng.random(), "valid"
    if way < 0.3:
        for _row in range(rng.choice([0, 1, 3])):
            rng.shuffle(rows)
        items = [
            Item(
                item.name,
                item.split,
                [row["caption"] for row in rows if row["filename"] == item.name],
                b"",
            )
            for item in items
        ]
        content = encoded(as_csv(rows, dialect, header), rng)
    elif way < 0.65:
        known = "wrong"
        if rng.random() < 0.4:
            dialect = {"delimiter": ",", "quoting": csv.QUOTE_MINIMAL, "lineterminator": "\n"}
            text = as_csv(rows, dialect, ["filename", "caption", "split"])
            note = rng.choice(list(CSV_TEXT_MISTAKES))
            (folder / "x0.png").write_bytes(png(0))
            content = CSV_TEXT_MISTAKES[note](rng, text.encode(), line_break(text))
        else:
            mistakes = [*FILE_MISTAKES, *ROW_MISTAKES, Mistake("two splits", with_other_split)]
            mistake = rng.choice(mistakes)
            note = mistake.note
            mistake.rows(rng, rows)
            mistake.folder(rng, folder, items)
            content = encoded(as_csv(rows, dialect, header), rng)
    else:
        known, note = "unknown", "damaged bytes"
        content = damaged(encoded(as_csv(rows, dialect, header), rng), rng)
    name = "captions.tsv" if dialect["delimiter"] == "\t" else "captions.csv"
    (folder / name).write_bytes(content)
    return list_case(folder, items, known, note)


def nothing_but_findings(_: Any) -> str:
    """Nothing is known of the content of a damaged list."""
    return ""


JSON_ODD: list[Any] = [
    *(None, True, 1, -0.5, 10**30, [], {}, [[]], ["a", 1], {"raw": 3}, [None], "", " ", ["", "a"]),
]
LINE_MISTAKES: dict[str, Callable[[random.Random, str], str]] = {
    "duplicate key": lambda _, line: line[:-1] + ', "filename": "other.png"}',
    "cut line": lambda rng, line: line[: rng.randrange(1, len(line) - 1)],
    "half a character": lambda _, line: json.dumps(
        {**json.loads(line), "captions": ["a \ud800 dog"]}
    ),
    "deep": lambda _, line: line[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a list": lambda _, line: f"[{line}]",
    "two objects": lambda _, line: line + line,
    "without filename": lambda _, line: json.dumps(
        {key: value for key, value in json.loads(line).items() if key != "filename"}
    ),
    "caption of another type": lambda rng, line: json.dumps(
        {**json.loads(line), "captions": rng.choice([3, [3], {"x": "y"}, [["a"]]])}
    ),
    "no captions": lambda rng, line: json.dumps(
        {**json.loads(line), "captions": rng.choice(["", " ", [""]])}
    ),
    "name of another type": lambda rng, line: json.dumps(
        {**json.loads(line), "filename": rng.choice([["a.png"], {"a": 1}, 2.5, ""])}
    ),
    "split of another type": lambda rng, line: json.dumps(
        {**json.loads(line), "split": rng.choice([3, ["train"], {}])}
    ),
    "NUL in the name": lambda _, line: json.dumps({**json.loads(line), "filename": "a\0.png"}),
}


def make_lines(rng: random.Random, folder: Path, _: Any) -> Case:
    """``captions.jsonl``."""
    items = sampled_items(rng)
    write_images(folder, items)
    # Each line is as ASCII, or as UTF-8.
    lines = [
        json.dumps(
            {"filename": item.name, "captions": item.captions, "split": item.split},
            ensure_ascii=rng.random() < 0.5,
        )
        for item in items
    ]
    known: Any = "right"
    way, note = rng.random(), "valid"
    if 0.3 <= way < 0.7:
        known = "wrong"
        number = rng.randrange(len(lines))
        if rng.random() < 0.2:
            mistake = rng.choice(FILE_MISTAKES)
            note = mistake.note
            mistake.folder(rng, folder, items)
        else:
            note = rng.choice(list(LINE_MISTAKES))
            lines[number] = LINE_MISTAKES[note](rng, lines[number])
    end = rng.choice(["\n", "\r\n", "\n\n"])
    content = (end.join(lines) + rng.choice(["", "\n"])).encode()
    content = rng.choice([b"", codecs.BOM_UTF8]) + content
    if way >= 0.7:
        known, note, content = "unknown", "damaged bytes", damaged(content, rng)
    (folder / "captions.jsonl").write_bytes(content)
    return list_case(folder, items, known, note)


def list_case(folder: Path, items: list[Item], known: Any, note: str) -> Case:
    """The case of a folder."""
    check = partial(check_items, items) if known == "right" else nothing_but_findings
    command = ("data", "check", str(folder)) if "outside" not in note else ()
    return Case(partial(read_list, folder, is_wrong=known == "wrong"), known, check, note, command)


def entries(value: Any) -> list[tuple[Any, Any]]:
    """All places of values in JSON."""
    from tests.mutation import entries as all_entries

    return all_entries(value)


def as_karpathy(items: list[Item]) -> dict[str, Any]:
    """A list of Karpathy's splits."""
    images = [
        {
            "filename": item.name,
            "imgid": number,
            "split": item.split,
            "sentids": [10 * number + place for place in range(len(item.captions))],
            "sentences": [
                {"raw": text, "tokens": text.split(), "imgid": number, "sentid": 10 * number + k}
                for k, text in enumerate(item.captions)
            ],
        }
        for number, item in enumerate(items)
    ]
    return {"images": images, "dataset": "x"}


KARPATHY_MISTAKES: dict[str, Callable[[random.Random, dict[str, Any]], None]] = {
    "no sentences": lambda rng, image: image.pop("sentences"),
    "empty sentences": lambda rng, image: image.update(sentences=[]),
    "sentences of another type": lambda rng, image: image.update(
        sentences=rng.choice(
            [3, "a dog", {"raw": "a"}, [3], [None], [{"tokens": "a"}, {"tokens": [[]]}]]
        )
    ),
    "caption of another type": lambda rng, image: image["sentences"][0].update(
        raw=rng.choice([3, True, {}, [[]]])
    ),
    "empty caption": lambda rng, image: image["sentences"][0].update(raw=rng.choice(["", "  "])),
    "no filename": lambda rng, image: image.pop("filename"),
    "filename of another type": lambda rng, image: image.update(
        filename=rng.choice([None, 3, ["a.png"], ""])
    ),
    "split of another type": lambda rng, image: image.update(split=rng.choice([3, ["train"], {}])),
    "unknown file": lambda rng, image: image.update(filename="no such file.png"),
}


def make_karpathy(rng: random.Random, folder: Path, _: Any) -> Case:
    """``dataset_x.json``."""
    items = sampled_items(rng)
    write_images(folder, items)
    content = as_karpathy(items)
    known: Any = "right"
    way, note = rng.random(), "valid"
    if 0.3 <= way < 0.6:
        known = "wrong"
        note = rng.choice([*KARPATHY_MISTAKES, "image twice"])
        if note == "image twice":
            content["images"].append(dict(rng.choice(content["images"])))
        else:
            KARPATHY_MISTAKES[note](rng, rng.choice(content["images"]))
    elif 0.6 <= way < 0.75:
        known, note = "unknown", "changed values"
        holder, key = rng.choice(entries(content))
        holder[key] = rng.choice(JSON_ODD)
    text = json.dumps(content, ensure_ascii=rng.random() < 0.5).encode()
    if 0.75 <= way < 0.8:
        known, note = "wrong", "duplicate key"
        text = text.replace(b'{"images"', b'{"images": [], "images"', 1)
    elif way >= 0.8:
        known, note, text = "unknown", "damaged bytes", damaged(text, rng)
    (folder / "dataset_x.json").write_bytes(text)
    return list_case(folder, items, known, note)


def make_coco(rng: random.Random, folder: Path, _: Any) -> Case:
    """``captions_val2017.json``."""
    items = sampled_items(rng)
    for item in items:
        item.split = "val"
    write_images(folder, items)
    content: dict[str, Any] = {
        "images": [{"id": number, "file_name": item.name} for number, item in enumerate(items)],
        "annotations": [
            {"image_id": number, "id": 10 * number + place, "caption": caption}
            for number, item in enumerate(items)
            for place, caption in enumerate(item.captions)
        ],
    }
    known: Any = "right"
    way, note = rng.random(), "valid"
    if 0.3 <= way < 0.6:
        known = "wrong"
        annotation = rng.choice(content["annotations"])
        image = rng.choice(content["images"])
        mistakes: dict[str, Callable[[], Any]] = {
            "caption of an unknown image": lambda: annotation.update(
                image_id=rng.choice([999, -1, "0", None, 1.5, [0], {}])
            ),
            "no image of a caption": lambda: annotation.pop("image_id"),
            "caption of another type": lambda: annotation.update(
                caption=rng.choice([3, None, ["a"], {}])
            ),
            "no caption": lambda: annotation.pop("caption"),
            "empty caption": lambda: annotation.update(caption=" "),
            "two images of an id": lambda: content["images"].append(dict(image)),
            "no file name": lambda: image.pop("file_name"),
            "unknown file": lambda: image.update(file_name="no such file.png"),
            "id of another type": lambda: image.update(id=rng.choice([[1], {}, None])),
        }
        note = rng.choice(list(mistakes))
        mistakes[note]()
    elif 0.6 <= way < 0.75:
        known, note = "unknown", "changed values"
        holder, key = rng.choice(entries(content))
        holder[key] = rng.choice(JSON_ODD)
    text = json.dumps(content, ensure_ascii=rng.random() < 0.5).encode()
    if way >= 0.8:
        known, note, text = "unknown", "damaged bytes", damaged(text, rng)
    (folder / "captions_val2017.json").write_bytes(text)
    return list_case(folder, items, known, note)


def make_parquet(rng: random.Random, folder: Path, _: Any) -> Case:
    """A Parquet or Arrow table with images in it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    items = sampled_items(rng)
    rows: list[dict[str, Any]] = [
        {
            "image": {"bytes": item.content, "path": item.name},
            "caption": item.captions,
            "split": item.split,
        }
        for item in items
    ]
    known: Any = "right"
    way, note = rng.random(), "valid"
    if 0.25 <= way < 0.5:
        known = "wrong"
        row = rng.choice(rows)
        mistakes: dict[str, Callable[[], Any]] = {
            "no image": lambda: row.update(image=None),
            "no bytes": lambda: row["image"].update(bytes=None),
            "empty bytes": lambda: row["image"].update(bytes=b""),
            "cut image": lambda: row["image"].update(bytes=row["image"]["bytes"][:40]),
            "no caption": lambda: row.update(caption=None),
            "empty captions": lambda: row.update(caption=[]),
            "empty caption": lambda: row.update(caption=[" "]),
            "long caption": lambda: row.update(caption=["a" * 20_001]),
        }
        note = rng.choice(list(mistakes))
        mistakes[note]()
    table = pa.Table.from_pylist(
        rows,
        pa.schema(
            {
                "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
                "caption": pa.list_(pa.string()),
                "split": pa.string(),
            }
        ),
    )
    if rng.random() < 0.7:
        path = folder / "data.parquet"
        pq.write_table(
            table,
            path,
            row_group_size=rng.choice([1, 2, 100]),
            compression=rng.choice(["NONE", "SNAPPY", "ZSTD", "GZIP"]),
            use_dictionary=rng.random() < 0.5,
            write_page_checksum=rng.random() < 0.5,
        )
    else:
        path = folder / "data.arrow"
        options = pa.ipc.IpcWriteOptions(compression=rng.choice([None, "lz4", "zstd"]))
        make = rng.choice([pa.ipc.new_stream, pa.ipc.new_file])
        with make(str(path), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=rng.choice([1, 3, 100]))
    if way >= 0.5:
        known, note = "unknown", "damaged bytes"
        path.write_bytes(damaged(path.read_bytes(), rng))
    return list_case(path, items, known, note)


def make_table(rng: random.Random, folder: Path, _: Any) -> Case:
    """A Parquet table of image files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    items = sampled_items(rng)
    write_images(folder, items)
    rows = caption_rows(items)
    known: Any = "right"
    way, note = rng.random(), "valid"
    if 0.25 <= way < 0.55:
        known = "wrong"
        row = rng.choice(rows)
        mistakes: dict[str, Callable[[], Any]] = {
            "no file": lambda: row.update(filename=None),
            "empty name": lambda: row.update(filename=""),
            "unknown file": lambda: row.update(filename="no such file.png"),
            "no caption": lambda: row.update(caption=None),
            "empty caption": lambda: row.update(caption=" "),
            "long caption": lambda: row.update(caption="a" * 20_001),
            "two splits": lambda: with_other_split(rng, rows),
        }
        note = rng.choice(list(mistakes))
        mistakes[note]()
    path = folder / "captions.parquet"
    table = pa.Table.from_pylist(
        rows, pa.schema({"filename": pa.string(), "caption": pa.string(), "split": pa.string()})
    )
    pq.write_table(table, path, row_group_size=rng.choice([1, 2, 100]))
    if way >= 0.55:
        known, note = "unknown", "damaged bytes"
        path.write_bytes(damaged(path.read_bytes(), rng))
    return list_case(path, items, known, note)


def tar_sample(rng: random.Random, item: Item) -> list[tuple[str, bytes]]:
    """The members of an image: the image, and its captions as a text or as JSON."""
    stem = item.name.removesuffix(".png")
    if len(item.captions) == 1 and rng.random() < 0.5:
        return [(item.name, item.content), (f"{stem}.txt", item.captions[0].encode())]
    text = json.dumps({"captions": item.captions}, ensure_ascii=rng.random() < 0.5)
    return [(item.name, item.content), (f"{stem}.json", text.encode())]


def with_tar_mistake(
    rng: random.Random, item: Item, sample: list[tuple[str, bytes]], note: str
) -> list[tuple[str, bytes]]:
    """The members of an image with a mistake."""
    image, text = sample
    stem = item.name.removesuffix(".png")
    other_type = json.dumps({"captions": rng.choice([3, [3], {}])}).encode()
    members = {
        "no caption": [image],
        "no image": [text],
        "empty caption": [image, (f"{stem}.txt", b" ")],
        "JSON that is cut": [image, (f"{stem}.json", b'{"captions": ["a')],
        "sample twice": [image, text, text],
        "cut image": [(item.name, item.content[:40]), text],
        "bytes that are not UTF-8": [image, (f"{stem}.txt", b"a \xff dog")],
        "JSON of another type": [image, (f"{stem}.json", other_type)],
    }
    return members.get(note, sample)


def make_tar(rng: random.Random, folder: Path, _: Any) -> Case:
    """Shards of WebDataset, one for each split."""
    items = sampled_items(rng, plain_names=True)
    known: Any = "right"
    way, note = rng.random(), "valid"
    wrong = 0.25 <= way < 0.6
    if wrong:
        known = "wrong"
        mistakes = [
            *("no caption", "no image", "empty caption", "JSON that is cut", "cut shard"),
            *("sample twice", "cut image", "bytes that are not UTF-8", "JSON of another type"),
        ]
        note = rng.choice(mistakes)
    target = rng.choice(items)
    for split in SPLITS:
        members: list[tuple[str, bytes]] = []
        for item in items:
            if item.split != split:
                continue
            sample = tar_sample(rng, item)
            members += (
                with_tar_mistake(rng, item, sample, note) if wrong and item is target else sample
            )
        path = folder / f"{split}-0000.tar"
        tar_format = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
        with tarfile.open(path, "w", format=tar_format) as archive:
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    path = folder / f"{target.split}-0000.tar"
    content = path.read_bytes()
    if note == "cut shard":
        # Anywhere before the end of the last member.
        end = len(content.rstrip(b"\0"))
        path.write_bytes(content[: rng.randrange(1, end)])
    elif way >= 0.6:
        known, note = "unknown", "damaged bytes"
        path.write_bytes(damaged(content, rng))
    return list_case(folder, items, known, note)


KINDS = [
    Kind("CSV captions", make_csv, inputs=1000),
    Kind("JSON lines", make_lines, inputs=750),
    Kind("Karpathy lists", make_karpathy, inputs=750),
    Kind("COCO lists", make_coco, inputs=500),
    Kind("Parquet images", make_parquet, inputs=500),
    Kind("Parquet captions", make_table, inputs=500),
    Kind("tar shards", make_tar, inputs=500),
]
