"""Suffixes of images, videos and undecodable photos, and the summary of the other files of a
folder.
"""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from visavis.cli.console import print_result
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.file_names import (
    IMAGE_SUFFIXES,
    RAW_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    VIDEO_SUFFIXES,
    describe_other_files,
)
from visavis.data.images import supported_formats
from visavis.retrieval.build.index_builder import IndexReport
from visavis.retrieval.run_images import open_image_collection
from visavis.retrieval.source_files import list_source_files

OTHERS = ("a.xmp", "b.XMP", "sub/c.svg", "notes")


def jpeg(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(file, "JPEG")
    return file.getvalue()


def photo(suffix: str) -> str:
    """A name of its own, because a raw image belongs to a developed one of the same name."""
    return f"photo{suffix[1:]}{suffix.upper()}"


@pytest.fixture
def folder(tmp_path):
    """A file for each known suffix, and others."""
    root = tmp_path / "photos"
    (root / "sub").mkdir(parents=True)
    for suffix in IMAGE_SUFFIXES + VIDEO_SUFFIXES + UNSUPPORTED_SUFFIXES:
        (root / photo(suffix)).write_bytes(jpeg("red"))
    for name in OTHERS:
        (root / name).write_text("text")
    (root / ".hidden.xmp").write_text("text")
    return root


def test_image_suffixes_are_those_of_pillow():
    formats = {*supported_formats(), "MPO", "DIB"}
    registered = {
        suffix for suffix, name in Image.registered_extensions().items() if name in formats
    }
    assert registered <= set(IMAGE_SUFFIXES)
    assert {".jpg", ".jfif", ".jpe", ".mpo"} <= registered


def test_suffixes_have_one_meaning():
    suffixes = IMAGE_SUFFIXES + VIDEO_SUFFIXES + UNSUPPORTED_SUFFIXES
    assert len(set(suffixes)) == len(suffixes)
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in suffixes)
    assert {".mts", ".m2ts", ".ts", ".vob"} <= set(VIDEO_SUFFIXES)
    assert {".srw", ".crw", ".pef", ".nrw", ".3fr", ".rwl", ".x3f"} <= set(RAW_SUFFIXES)


def test_index_lists_each_file_or_counts_it(folder):
    (folder / "attributes.csv").write_text("filename,color\nphotojpg.JPG,red\n")
    files = list_source_files(folder)
    assert {file.path for file in files.files} == {
        photo(suffix) for suffix in IMAGE_SUFFIXES + VIDEO_SUFFIXES
    }
    assert {file.path for file in files.files if file.is_video} == {
        photo(suffix) for suffix in VIDEO_SUFFIXES
    }
    assert len(files.skipped) == len(UNSUPPORTED_SUFFIXES)
    assert (
        "'photojxr.JXR': expected a JPEG, PNG or other supported image, got a .jxr file. Convert it "
        "to JPEG." in files.skipped
    )
    assert files.other_files == "4 other files: .xmp, .svg, no suffix"


def test_index_report_prints_other_files(capsys):
    report = IndexReport(
        "indexes/x", 3, 3, 0, 0, 0, (), 1.0, other_files="12 other files: .xmp, .svg"
    )
    print_result(report)
    assert "\n12 other files: .xmp, .svg.\n" in capsys.readouterr().out
    assert report.to_json()["other_files"] == "12 other files: .xmp, .svg"
    assert "other_files" not in replace(report, other_files=None).to_json()


def test_collection_of_images_counts_other_files(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISAVIS_CACHE", str(folder.parent / "cache"))
        data = open_image_collection(folder)
    assert {image.name for image in data.images} == {photo(suffix) for suffix in IMAGE_SUFFIXES}
    assert data.other_files == describe_other_files(OTHERS)
    assert f"{len(VIDEO_SUFFIXES)} videos" in data.skipped[0] and sum(
        "supported image" in text for text in data.skipped
    ) == len(UNSUPPORTED_SUFFIXES)


def test_check_lists_unsupported_photos_and_counts_other_files(folder, tmp_path):
    (folder / "captions.csv").write_text(
        "filename,caption\nphotojfif.JFIF,a red square\nphotopng.PNG,another red square\n"
    )
    (folder / "README.md").write_text("text")
    findings = check_dataset(folder).findings
    notes = {
        (finding.location, finding.message)
        for finding in findings
        if finding.kind in ("image without caption", "other files")
    }
    assert ("photopef.PEF", "the file is in the folder, but captions.csv does not list it") in notes
    assert [message for location, message in notes if location == "captions.csv"] == [
        describe_other_files(OTHERS)
    ]
    assert (
        open_dataset(folder, skip_bad=True).other_files
        == list_source_files(folder).other_files
        == describe_other_files(OTHERS)
    )


def test_other_files_are_one_line():
    assert describe_other_files([]) is None
    assert describe_other_files(["a.xmp"]) == "1 other file: .xmp"
    many = describe_other_files(f"{number}.{number % 20:02}" for number in range(2_000))
    assert many == f"2,000 other files: {', '.join(f'.{number:02}' for number in range(10))}, ..."
