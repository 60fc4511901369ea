"""Tables of captions as spreadsheets, pandas, R and published data sets write them: read, or
refused with the line and the fix.
"""

from __future__ import annotations

import codecs
import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from visavis.core.errors import DataError, NoDataset
from visavis.data import dataset_reader
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.papers.relevance.human_agreement import read_stsb
from visavis.retrieval.source_files import list_source_files

DOG, CAT = {"a.png": ["a dog"]}, {"img/b.png": ["a cat, asleep"]}
BOTH = DOG | CAT
PLAIN = 'filename,caption\na.png,a dog\nimg/b.png,"a cat, asleep"\n'
SEMICOLONS = "filename;caption\na.png;a dog\nimg/b.png;a cat, asleep\n"
FLICKR = "image_name| comment_number| comment\n"
TOKENS = 'a.png#0\ta dog\na.png#1\t"Go" on a sign\nimg/b.png#0\ta cat, asleep\n'
LISTS = {"a.png": ["a dog", "it's brown"], "img/b.png": ["a cat, asleep"]}
HEADER = r"expected a header with filename and caption, got .*\. Add a header line, or rename a column to filename\."
NO_LIST = r":2: the caption is a list that cannot be read: .*Write it as \['first caption', 'second caption'\], or one caption per row"
MISSING = r":3: the caption is '{}', the text of a missing value\. Write a caption, or remove it"
WINDOWS_1252 = r":3: the caption 'caf\\udce9' is not UTF-8\. Save it as UTF-8 \(Excel: CSV UTF-8\)"


@dataclass(frozen=True)
class Spelling:
    """A table.

    Attributes:
        content: Its text, encoded as UTF-8 if it is not bytes.
        expected: Captions by image, or an expression of the error.
        file: Name of the file.
        splits: Splits of the images, if the table gives them.
        large: Expression of the error of a large table. None: as a small one.
        skipped: Captions by image with ``skip_bad``, if there is an error of single rows.
    """

    content: str | bytes
    expected: dict[str, list[str]] | str
    file: str = "captions.csv"
    splits: tuple[str, ...] = ()
    large: str | None = None
    skipped: dict[str, list[str]] | None = None

    @property
    def data(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.encode()


SPELLINGS = {
    # Excel and other spreadsheets.
    "plain": Spelling(PLAIN, BOTH),
    "UTF-8 with a mark": Spelling(codecs.BOM_UTF8 + PLAIN.encode(), BOTH),
    "UTF-16 with a mark": Spelling(PLAIN.encode("utf-16"), BOTH),
    "UTF-16 big endian with a mark": Spelling(
        codecs.BOM_UTF16_BE + PLAIN.encode("utf-16-be"), BOTH
    ),
    "UTF-16 without a mark": Spelling(PLAIN.encode("utf-16-le"), BOTH),
    "UTF-16 big endian without a mark": Spelling(PLAIN.encode("utf-16-be"), BOTH),
    "Unicode text of Excel": Spelling(
        SEMICOLONS.replace(";", "\t").replace("\n", "\r\n").encode("utf-16"), BOTH
    ),
    "Windows-1252": Spelling(
        (PLAIN.replace("\nimg", "\nimg/b.png,café\nimg").encode("cp1252")),
        WINDOWS_1252,
        large=r"column caption: expected UTF-8 texts: .*Save it again as UTF-8|invalid UTF8",
        skipped=BOTH,
    ),
    "UTF-16 cut short": Spelling(
        PLAIN.encode("utf-16-le")[:-1],
        "is not UTF-16-LE: byte .*Save it as UTF-8",
        large="cannot be read as a table: .*Save it as UTF-8",
    ),
    "semicolons": Spelling(SEMICOLONS, BOTH),
    "sep line": Spelling("sep=;\r\n" + SEMICOLONS, BOTH),
    "sep line in quotes": Spelling('"sep=;"\r\n' + SEMICOLONS, BOTH),
    "sep line with another sign": Spelling("sep=^\n" + SEMICOLONS.replace(";", "^"), BOTH),
    "tabs": Spelling(SEMICOLONS.replace(";", "\t"), BOTH, "captions.tsv"),
    "tabs in .csv": Spelling(SEMICOLONS.replace(";", "\t"), BOTH),
    "vertical bars": Spelling(SEMICOLONS.replace(";", "|"), BOTH),
    "line ends of Windows": Spelling(PLAIN.replace("\n", "\r\n"), BOTH),
    "line ends of old Macs": Spelling(PLAIN.replace("\n", "\r"), BOTH),
    "no last line end": Spelling(PLAIN.rstrip(), BOTH),
    "empty first line": Spelling("\n" + PLAIN, BOTH),
    "empty rows at the end": Spelling(SEMICOLONS + ";\r\n;\r\n ; \n\n\n", BOTH),
    "empty row in between": Spelling(PLAIN.replace("\nimg", "\n,\nimg"), BOTH),
    "empty columns": Spelling(
        "filename;caption;;\na.png;a dog;;\nimg/b.png;a cat, asleep;;\n;;;\n", BOTH
    ),
    "all in quotes": Spelling(
        '"filename";"caption"\n"a.png";"a dog"\n"img/b.png";"a cat, asleep"\n', BOTH
    ),
    "doubled quotes": Spelling(
        PLAIN + 'a.png,"a ""big"" dog"\n', {"a.png": ["a dog", 'a "big" dog']} | CAT
    ),
    "line break in a cell": Spelling(
        PLAIN + 'a.png,"a dog\nruns"\n', {"a.png": ["a dog", "a dog\nruns"]} | CAT
    ),
    "header of Excel": Spelling(PLAIN.replace("filename,caption", "Image File,Description"), BOTH),
    "header with spaces": Spelling(PLAIN.replace("filename,caption", " Filename , Caption "), BOTH),
    "description next to a title": Spelling("filename,title,description\na.png,a dog,long\n", DOG),
    "unquoted comma": Spelling(
        PLAIN + "a.png,a dog, running\n",
        r":4: expected 2 columns, got 3\. Put texts that contain ',' in double quotes",
        large="Expected 2 columns, got 3.*Correct this row",
        skipped=BOTH,
    ),
    "no header": Spelling("a.png,a dog\n", HEADER),
    "other columns only": Spelling("sku,label\n1,a dog\n", HEADER),
    # Windows.
    "backslashes": Spelling(PLAIN.replace("img/", "img\\"), BOTH),
    "backslashes and a dot": Spelling(
        PLAIN.replace("img/", ".\\img\\"), {"./img/b.png": CAT["img/b.png"]} | DOG
    ),
    "absolute path of Windows": Spelling(
        PLAIN.replace("img/", "C:\\me\\"), {"C:/me/b.png": CAT["img/b.png"]} | DOG, large="missing"
    ),
    "spaces around names": Spelling(PLAIN.replace("a.png,", " a.png\t,"), BOTH),
    "name in decomposed form": Spelling(
        PLAIN + "cafe\u0301.png,a cup\n", BOTH | {"cafe\u0301.png": ["a cup"]}
    ),
    "name in composed form": Spelling(
        PLAIN + "caf\u00e9.png,a cup\n", BOTH | {"caf\u00e9.png": ["a cup"]}
    ),
    "caption in decomposed form": Spelling(
        PLAIN + "a.png,cafe\u0301\n", {"a.png": ["a dog", "caf\u00e9"]} | CAT
    ),
    # pandas.
    "index column": Spelling(
        'Unnamed: 0,filename,caption\n0,a.png,a dog\n1,img/b.png,"a cat, asleep"\n', BOTH
    ),
    "index column without a name": Spelling(
        ',filename,caption\n0,a.png,a dog\n1,img/b.png,"a cat, asleep"\n', BOTH
    ),
    "list": Spelling(
        """filename,captions\na.png,"['a dog', ""it's brown""]"\nimg/b.png,"['a cat, asleep']"\n""",
        LISTS,
    ),
    "list under caption": Spelling(
        """filename,caption\na.png,"['a dog', ""it's brown""]"\nimg/b.png,"a cat, asleep"\n""",
        LISTS,
    ),
    "JSON list": Spelling(
        """filename,raw\na.png,"[""a dog"", ""it's brown""]"\nimg/b.png,"[""a cat, asleep""]"\n""",
        LISTS,
    ),
    "NumPy array": Spelling(
        """filename,captions\na.png,"['a dog'\n ""it's brown""]"\nimg/b.png,['a cat\\x2c asleep']\n""",
        LISTS,
    ),
    "tuple": Spelling(
        """filename,captions\na.png,"('a dog', ""it's brown"")"\nimg/b.png,"('a cat, asleep',)"\n""",
        LISTS,
    ),
    "list that is cut": Spelling(
        "filename,captions\na.png,\"['a dog', 'a]\"\nimg/b.png,a cat\n",
        NO_LIST,
        skipped={"img/b.png": ["a cat"]},
    ),
    "list with a missing value": Spelling(
        "filename,captions\na.png,\"['a dog', nan]\"\nimg/b.png,a cat\n",
        NO_LIST,
        skipped={"img/b.png": ["a cat"]},
    ),
    "brackets in a caption": Spelling(
        "filename,caption\na.png,[a sign] a dog\na.png,[dog]\n",
        {"a.png": ["[a sign] a dog", "[dog]"]},
    ),
    "empty caption": Spelling(
        PLAIN.replace("\nimg", "\na.png,\nimg"), ":3: the caption is empty", skipped=BOTH
    ),
    **{
        f"missing caption {text}": Spelling(
            PLAIN.replace("\nimg", f"\na.png,{text}\nimg"), MISSING.format(text), skipped=BOTH
        )
        for text in ("nan", "NaN", "None", "<NA>")
    },
    "missing second caption": Spelling(
        'filename,caption,caption_2\na.png,a dog,nan\nimg/b.png,"a cat, asleep",\n', BOTH
    ),
    "split names": Spelling(
        "filename,caption,split\na.png,a dog,Train\nimg/b.png,b,TEST\ncaf\u00e9.png,c,Valid\n",
        {"a.png": ["a dog"], "img/b.png": ["b"], "caf\u00e9.png": ["c"]},
        splits=("train", "test", "val"),
    ),
    "missing split": Spelling(
        "filename,caption,split\na.png,a dog,train\nimg/b.png,b,nan\n",
        "img/b.png: the image has no split",
        skipped=DOG,
        splits=("train",),
    ),
    # R.
    "write.csv": Spelling(
        '"","filename","caption"\n"1","a.png","a dog"\n"2","img/b.png","a cat, asleep"\n', BOTH
    ),
    "write.table": Spelling(
        '"filename" "caption"\n"1" "a.png" "a dog"\n"2" "img/b.png" "a cat, asleep"\n', BOTH
    ),
    "write.table with tabs": Spelling(
        '"filename"\t"caption"\n"1"\t"a.png"\t"a dog"\n"2"\t"img/b.png"\t"a cat, asleep"\n', BOTH
    ),
    "missing value of R": Spelling(
        '"filename","caption"\n"a.png","a dog"\n"a.png",NA\n', MISSING.format("NA"), skipped=DOG
    ),
    "escaped quotes": Spelling(
        '"filename","caption"\n"a.png","a \\"big\\" dog"\n"img\\b.png","a cat, asleep"\n',
        {"a.png": ['a "big" dog']} | CAT,
        large=r"line 2: expected doubled quotes, got quotes that are escaped by a backslash.*or as captions\.parquet",
    ),
    "spaces after delimiters": Spelling(
        'filename, caption\na.png, a dog\nimg/b.png, "a cat, asleep"\n',
        BOTH,
        large="line 3: expected doubled quotes, got quotes after a space",
    ),
    "spaces without quotes": Spelling("filename, caption\na.png, a dog\n", DOG),
    "quotes in tabs": Spelling(
        'filename\tcaption\na.png\t"Go" on a sign\n', {"a.png": ['"Go" on a sign']}, "captions.tsv"
    ),
    # Flickr8k, Flickr30k, Kaggle.
    "results.csv of Flickr30k": Spelling(
        FLICKR + 'a.png| 0| a dog\na.png| 1| "Go" on a sign\nimg/b.png| 0| a cat, asleep\n',
        {"a.png": ["a dog", '"Go" on a sign']} | CAT,
        "results.csv",
    ),
    "broken row of Flickr30k": Spelling(
        FLICKR + "a.png| 0| a dog\na.png| 4   A dog runs\n",
        r"results\.csv:3: expected 3 columns, got 2\. Add the missing '\|'",
        "results.csv",
        large="Expected 3 columns, got 2.*Correct this row",
        skipped=DOG,
    ),
    "results_20130124.token": Spelling(
        TOKENS, {"a.png": ["a dog", '"Go" on a sign']} | CAT, "results_20130124.token"
    ),
    "Flickr8k.token.txt": Spelling(
        TOKENS, {"a.png": ["a dog", '"Go" on a sign']} | CAT, "Flickr8k.token.txt"
    ),
    "captions.txt of Kaggle": Spelling(PLAIN.replace("filename", "image"), BOTH, "captions.txt"),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder of images. The name with an accent is in the composed form."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "img").mkdir()
    for name in ("a.png", "img/b.png", "caf\u00e9.png"):
        Image.new("RGB", (2, 2)).save(folder / name)
    return folder


@pytest.fixture
def folder(images, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    for file in images.rglob("*.png"):
        (data / file.relative_to(images)).parent.mkdir(exist_ok=True)
        (data / file.relative_to(images)).hardlink_to(file)
    return data


def content(data) -> dict[str, list[str]]:
    return {
        image.name: [data.captions[i] for i in rows]
        for image, rows in zip(data.images, data.captions_of, strict=True)
    }


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_table_spelling(folder, name, large, monkeypatch):
    spelling = SPELLINGS[name]
    if large:
        pytest.importorskip("pyarrow", reason="pip install 'visavis[large]'")
        monkeypatch.setattr(dataset_reader, "LARGE_FILE_BYTES", 0)
    if large and spelling.large == "missing":
        return
    (folder / spelling.file).write_bytes(spelling.data)
    is_refused, error = isinstance(spelling.expected, str), spelling.expected
    if large:
        # Rows of a large table are counted, and not described one by one.
        error = spelling.large or ("unusable items" if spelling.skipped else error)
    if is_refused or (large and spelling.large):
        with pytest.raises(DataError, match=error):
            open_dataset(folder)
        if not large:
            assert not check_dataset(folder).ok
        if spelling.skipped is None or (large and spelling.large):
            return
    data = open_dataset(folder, skip_bad=is_refused)
    assert data.is_lazy == large
    assert content(data) == (spelling.expected if spelling.skipped is None else spelling.skipped)
    assert all(image.open().size == (2, 2) for image in data.images)
    if spelling.splits:
        assert tuple(image.split for image in data.images) == spelling.splits


OTHER_LISTS = {
    "captions.jsonl": '{"filename": "a.png", "caption": "%s"}\n',
    "captions_val2017.json": '{"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "caption": "%s"}]}',
    "dataset_x.json": '{"images": [{"filename": "a.png", "imgid": 1, "split": "val", "sentences": [{"raw": "%s"}]}]}',
}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("file", OTHER_LISTS)
def test_other_lists_refuse_missing_captions_and_lists(folder, file, encoding):
    (folder / file).write_text(OTHER_LISTS[file] % "ein H\u00fcndchen", encoding=encoding)
    assert list(open_dataset(folder).captions) == ["ein H\u00fcndchen"]
    for text, problem in (
        ("nan", "the caption is 'nan', the text of a missing value"),
        ("['a', 'b]", "is a list that cannot be read"),
    ):
        (folder / file).write_text(OTHER_LISTS[file] % text, encoding=encoding)
        with pytest.raises(DataError, match=problem):
            open_dataset(folder)


def test_list_in_json_lines_is_split(folder):
    (folder / "captions.jsonl").write_text(OTHER_LISTS["captions.jsonl"] % "['a dog', 'a cat']")
    assert content(open_dataset(folder)) == {"a.png": ["a dog", "a cat"]}


@pytest.mark.parametrize(
    "name",
    [name for name, spelling in SPELLINGS.items() if spelling.skipped and not spelling.large],
)
def test_large_table_describes_problems_as_a_small_one(folder, name, monkeypatch):
    pytest.importorskip("pyarrow", reason="pip install 'visavis[large]'")
    (folder / SPELLINGS[name].file).write_bytes(SPELLINGS[name].data)
    problems = []
    for limit in (dataset_reader.LARGE_FILE_BYTES, 0):
        monkeypatch.setattr(dataset_reader, "LARGE_FILE_BYTES", limit)
        findings = check_dataset(folder).findings
        problems.append({
            (finding.kind, finding.message)
            for finding in findings
            if finding.loses_data and finding.kind.endswith(("caption", "list", "split"))
            and finding.kind != "image without caption"
        })  # fmt: skip
    assert problems[0] == problems[1] != set()


CAPTION_ROWS = {
    "text": ({"caption": "a dog"}, ["a dog"]),
    "list": ({"captions": ["a dog", "a cat"]}, ["a dog", "a cat"]),
    "list as text": ({"caption": "['a dog', 'a cat']"}, ["a dog", "a cat"]),
    "numbered": ({"caption": "a dog", "caption_2": "a cat"}, ["a dog", "a cat"]),
    "fewer than others": ({"caption": "a dog", "caption_2": ""}, ["a dog"]),
    "objects": ({"sentences": [{"raw": "a dog"}, {"raw": "a cat"}]}, ["a dog", "a cat"]),
    "two kinds": ({"captions": ["a cat"], "caption": "a dog"}, ["a dog"]),
    "null in a list": ({"captions": ["a dog", None]}, ["a dog"]),
    "missing": ({"caption": "nan"}, "the caption is 'nan', the text of a missing value"),
    "cut list": ({"caption": "['a', 'b]"}, "is a list that cannot be read"),
    "number": ({"caption": 3}, "caption: expected texts, got 3"),
    "number as split": ({"caption": "a dog", "split": 3}, "split: expected a text, got 3"),
}


@pytest.mark.parametrize("name", CAPTION_ROWS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_row_is_read_alike_in_json_and_parquet(folder, name, kind):
    cells, expected = CAPTION_ROWS[name]
    cells = {"filename": "a.png", **cells}
    if kind == "jsonl":
        (folder / "captions.jsonl").write_text(json.dumps(cells) + "\n")
    else:
        pa = pytest.importorskip("pyarrow", reason="pip install 'visavis[large]'")
        cells["image"] = (folder / "a.png").read_bytes()
        table = pa.table({column: [cell] for column, cell in cells.items()})
        pytest.importorskip("pyarrow.parquet").write_table(table, folder / "train.parquet")
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            open_dataset(folder)
    else:
        assert content(open_dataset(folder)) == {"a.png": expected}


def test_windows_path_in_json_is_found(folder):
    (folder / "dataset_x.json").write_text(
        OTHER_LISTS["dataset_x.json"].replace("a.png", "img\\\\b.png") % "a cat"
    )
    data = open_dataset(folder)
    assert [(image.name, image.open().size) for image in data.images] == [("img\\b.png", (2, 2))]


def test_two_spellings_of_one_file_are_a_problem(folder):
    rows = "caf\u00e9.png,a cup,train\ncafe\u0301.png,a cup,test\n"
    (folder / "captions.csv").write_text(f"filename,caption,split\n{rows}")
    with pytest.raises(DataError, match="is already listed in another spelling, the first is used"):
        open_dataset(folder)


@pytest.mark.parametrize("value", ["['a dog', 'a cat']", '["a dog", "a cat"]', ["a dog", "a cat"]])
def test_list_in_parquet_is_split(folder, value):
    pa = pytest.importorskip(
        "pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'"
    )
    table = pa.table({"Image File": ["a.png", "img/b.png"], "caption": [value, value]})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "captions.parquet")
    expected = {"a.png": ["a dog", "a cat"], "img/b.png": ["a dog", "a cat"]}
    assert content(open_dataset(folder)) == expected
    images = table.set_column(
        0, "image", [[(folder / name).read_bytes() for name in expected]]
    ).append_column("file", [list(expected)])
    pytest.importorskip("pyarrow.parquet").write_table(images, folder / "captions.parquet")
    assert content(open_dataset(folder / "captions.parquet")) == expected


def test_results_of_another_program_are_no_list(folder):
    (folder / "results.csv").write_text("epoch,loss\n1,0.5\n")
    with pytest.raises(NoDataset):
        open_dataset(folder)
    (folder / "results.csv").write_text("filename,caption\na.png,a dog\n")
    (folder / "captions.csv").write_text(PLAIN)
    assert content(open_dataset(folder)) == BOTH, "captions.csv comes first"


ATTRIBUTES = {
    "UTF-16": "filename\tColor\na.png\tred\nimg/b.png\tblue\n".encode("utf-16"),
    "windows": "Image File,Color\r\na.png,red\r\nimg\\b.png,blue\r\n,\r\n",
    "R": '"","filename","Color"\n"1","a.png","red"\n"2","img/b.png","blue"\n',
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_spelling(folder, name):
    text = ATTRIBUTES[name]
    (folder / "attributes.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    collection = list_source_files(folder)
    assert {file.path: file.metadata["Color"] for file in collection.files if file.metadata} == {
        "a.png": "red",
        "img/b.png": "blue",
    }
    assert collection.skipped == ()


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_attributes_match_names_in_any_unicode_form(folder, form):
    name = unicodedata.normalize(form, "caf\u00e9.png")
    (folder / "attributes.csv").write_text(f"filename,color\n{name},red\n")
    assert [
        file.metadata for file in list_source_files(folder).files if file.path == "caf\u00e9.png"
    ] == [{"color": "red"}]


ATTRIBUTE_ERRORS = {
    "column count": (
        "filename,a\na.png,1\na.png,1,2\n",
        r"line 3: expected 2 columns, got 3\. Put texts that contain ',' in double quotes",
    ),
    "twice": (
        "filename,a\nimg/b.png,1\nimg\\b.png,2\n",
        r"line 3: expected one row for each file, got a second one of 'img/b\.png'",
    ),
    "no file": (
        "sku,a\n1,2\n",
        (
            r"expected a header with filename and attributes, got 'sku,a'.* or rename a column to "
            r"filename"
        ),
    ),
    "Windows-1252": (
        "filename,a\na.png,caf\u00e9\n".encode("cp1252"),
        r"is not UTF-8: byte 20 is 0xe9\. Save it as UTF-8 \(Excel: CSV",
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTE_ERRORS)
def test_attributes_error_names_line_and_fix(folder, name):
    text, problem = ATTRIBUTE_ERRORS[name]
    (folder / "attributes.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=problem):
        list_source_files(folder)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_ratings_are_read_as_any_table(tmp_path, encoding):
    (tmp_path / "sts-dev.tsv").write_text(
        'score\tsentence1\tsentence2\n3.5\t"a\tb\r\n\r\n', encoding=encoding, newline=""
    )
    rated = read_stsb("dev", tmp_path)
    assert (rated.first, rated.second, rated.ratings.tolist()) == (['"a'], ["b"], [3.5])
    (tmp_path / "sts-dev.tsv").write_text(
        "score\tsentence1\tsentence2\n\n3.5\ta\n", encoding=encoding
    )
    with pytest.raises(
        DataError, match=r"line 3: expected 3 columns, got 2\. Add the missing '\\t'"
    ):
        read_stsb("dev", tmp_path)
