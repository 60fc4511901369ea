"""Malformed lists and stored features: one error each, also after any change of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from visavis.core.errors import DataError
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_validation import open_valid_dataset

UNREADABLE = {
    "cut JSON": ("dataset_x.json", b'{"images": [{"filename"', "is not JSON: .*line 1"),
    "deep JSON": ("dataset_x.json", b"[" * 100_000, "is not JSON"),
    "JSON of another kind": ("dataset_x.json", b'{"videos": []}', "expected {'images': .*videos"),
    "JSON list": ("dataset_x.json", b"[1]", "expected {'images': .*list"),
    "no images": ("dataset_x.json", b'{"images": []}', "no usable image.*no image is listed"),
    "no rows": ("captions.jsonl", b"\n", "no usable image.*no image is listed"),
    "empty table": ("captions.csv", b"", "expected a header with filename and caption"),
    "no header": ("captions.csv", b"a.png,a dog\n", "expected a header with filename and caption"),
    "two captions": (
        "captions.csv",
        b"filename,title,text\na.png,A,B\n",
        "Name one of them caption",
    ),
    "no caption column": ("captions.csv", b"filename,size\na.png,3\n", "Name one of them caption"),
    "two files": (
        "captions.csv",
        b"filename,image,caption\na.png,b.png,A\n",
        "Name one of them filename",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_malformed_list_raises_one_error(tmp_path, case):
    name, text, sentence = UNREADABLE[case]
    (tmp_path / name).write_bytes(text)
    for skip_bad in (False, True):
        with pytest.raises(DataError, match=sentence):
            open_dataset(tmp_path, skip_bad=skip_bad)
    report = check_dataset(tmp_path)
    assert not report.ok
    assert len(report.findings) == 1


def precomp(folder: Path, stem: str = "train", rows: int = 4, captions: int = 20) -> np.ndarray:
    features = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    np.save(folder / f"{stem}_ims.npy", features)
    (folder / f"{stem}_caps.txt").write_text("".join(f"caption {i}\n" for i in range(captions)))
    return features


def test_nonfinite_precomp_features_are_findings(tmp_path):
    features = precomp(tmp_path)
    features[2, 1] = np.nan
    np.save(tmp_path / "train_ims.npy", features)
    precomp(tmp_path, "dev")
    report = check_dataset(tmp_path)
    assert [
        (finding.kind, finding.location) for finding in report.findings if finding.loses_data
    ] == [("features not finite", "train-2")]
    assert len(open_dataset(tmp_path).images) == 8  # the structure is sound
    with pytest.raises(DataError, match="train-2"):
        open_valid_dataset(tmp_path)
    data = open_valid_dataset(tmp_path, skip_bad=True)
    assert data.image_rows.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert len(data.captions) == 35


def test_precomp_row_count_mismatch_is_a_finding(tmp_path):
    precomp(tmp_path, captions=19)
    precomp(tmp_path, "test")
    report = check_dataset(tmp_path)
    assert [
        (finding.kind, finding.location) for finding in report.findings if finding.loses_data
    ] == [("wrong row count", "train_caps.txt")]
    with pytest.raises(
        DataError,
        match=r"expected 4 captions, as train_ims\.npy has rows, or a multiple of it, got 19",
    ):
        open_dataset(tmp_path)
    assert open_dataset(tmp_path, skip_bad=True).splits == ("test",)


def test_precomp_broken_captions_are_findings(tmp_path):
    precomp(tmp_path)
    lines = (tmp_path / "train_caps.txt").read_bytes().split(b"\n")
    lines[3], lines[7] = b"", b"caf\xe9"
    (tmp_path / "train_caps.txt").write_bytes(b"\n".join(lines))
    found = [
        (finding.kind, finding.location)
        for finding in check_dataset(tmp_path).findings
        if finding.loses_data
    ]
    assert found == [("empty caption", "train_caps.txt:4"), ("broken UTF-8", "train_caps.txt:8")]
    assert len(open_dataset(tmp_path, skip_bad=True).captions) == 18


@pytest.mark.parametrize("damage", ["cut", "no captions"])
def test_precomp_truncated_or_missing_files_are_errors(tmp_path, damage):
    precomp(tmp_path)
    if damage == "cut":
        (tmp_path / "train_ims.npy").write_bytes((tmp_path / "train_ims.npy").read_bytes()[:-8])
    else:
        (tmp_path / "train_caps.txt").unlink()
    with pytest.raises(
        DataError, match=r"train_ims.npy is not a readable|train_caps.txt is missing"
    ):
        open_dataset(tmp_path, skip_bad=True)
    assert [finding.kind for finding in check_dataset(tmp_path).findings] == ["unreadable"]
