"""Reports about tables of captions and attributes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from visavis.core.errors import DataError
from visavis.data.dataset_reader import open_dataset
from visavis.retrieval.source_files import list_source_files


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "img").mkdir()
    for name in ("a.png", "img/b.png", "caf\u00e9.png"):
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    return tmp_path


def captions(folder: Path) -> list[str]:
    return list(open_dataset(folder).captions)


@pytest.mark.report("pandas-dev/pandas#58906", "a list in a CSV file is read as one text")
def test_list_of_pandas_is_several_captions(folder):
    (folder / "captions.csv").write_text("filename,captions\na.png,\"['a dog', 'a brown dog']\"\n")
    assert captions(folder) == ["a dog", "a brown dog"]


@pytest.mark.report(
    "mlfoundations/open_clip#1083", "columns are not found because the file is separated by commas"
)
@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
def test_delimiter_is_recognized(folder, delimiter):
    (folder / "captions.csv").write_text(f"filepath{delimiter}title\na.png{delimiter}a dog\n")
    assert captions(folder) == ["a dog"]


@pytest.mark.report(
    "AILab-CVC/YOLO-World#535", "backslashes of Windows in a COCO list are not found on Linux"
)
def test_backslashes_in_coco_list_are_found(folder):
    content = {
        "images": [{"id": 1, "file_name": "img\\b.png"}],
        "annotations": [{"image_id": 1, "caption": "a cat"}],
    }
    (folder / "captions_val2017.json").write_text(json.dumps(content))
    assert open_dataset(folder).images[0].open().size == (2, 2)


@pytest.mark.report("PowerShell/PowerShell#7776", "the line sep= is taken for the header")
def test_separator_line_is_not_the_header(folder):
    (folder / "attributes.csv").write_text("sep=;\nfilename;color\na.png;red\n")
    assert {"color": "red"} in [file.metadata for file in list_source_files(folder).files]


@pytest.mark.report("vividvilla/csvtotable#35", "UTF-16 is not supported")
def test_utf16_table_is_read(folder):
    (folder / "captions.csv").write_text(
        "filename,caption\na.png,ein H\u00fcndchen\n", encoding="utf-16"
    )
    assert captions(folder) == ["ein H\u00fcndchen"]


@pytest.mark.report(
    "onaio/onadata#695", "a file in another encoding than UTF-8 ends in a traceback"
)
def test_other_encoding_names_line_and_fix(folder):
    (folder / "captions.csv").write_bytes("filename,caption\na.png,h\u00f4tel\n".encode("cp1252"))
    with pytest.raises(
        DataError, match=r"captions\.csv:2: .* is not UTF-8\. Save it as UTF-8 \(Excel: CSV UTF-8\)"
    ):
        captions(folder)


@pytest.mark.report("huggingface/datasets#5490", "the index of pandas is a column without a name")
def test_index_column_is_ignored(folder):
    (folder / "captions.csv").write_text(",filename,caption\n0,a.png,a dog\n")
    assert captions(folder) == ["a dog"]


@pytest.mark.report(
    "biolab/orange3-prototypes#177", "empty cells become texts 'nan' in text mining"
)
@pytest.mark.report("huggingface/datasets#4467", "the text 'null' is silently another value")
@pytest.mark.parametrize("text", ["nan", "null"])
def test_text_of_missing_value_is_refused_with_its_line(folder, text):
    (folder / "captions.csv").write_text(f"filename,caption\na.png,a dog\na.png,{text}\n")
    with pytest.raises(
        DataError, match=rf"captions\.csv:3: the caption is '{text}', the text of a missing value"
    ):
        captions(folder)


@pytest.mark.report(
    "llmsresearch/paperbanana#240",
    "images are skipped because names are NFD on the disk and NFC in the list",
)
def test_attributes_in_other_form_of_accents_are_found(folder):
    (folder / "attributes.csv").write_text("filename,color\ncafe\u0301.png,red\n")
    collection = list_source_files(folder)
    assert {file.path: file.metadata for file in collection.files}["caf\u00e9.png"] == {
        "color": "red"
    }
    assert collection.skipped == ()
