"""MSR-VTT and MSVD as published: captions, splits, and findings."""

from __future__ import annotations

import json

import pytest
from tests.videos import gray, write_video

from visavis.core.errors import DataError
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import list_dataset, open_dataset
from visavis.data.image_validation import NUM_SAMPLED_VIDEOS


def test_check_reports_videos_that_were_not_decoded(tmp_path):
    pytest.importorskip("av", reason="reads video files")
    names = [f"{number:02d}.mp4" for number in range(NUM_SAMPLED_VIDEOS + 1)]
    for number, name in enumerate(names):
        write_video(tmp_path / name, [gray(10 * number)])
    (tmp_path / "captions.csv").write_text(
        "filename,caption\n" + "".join(f"{name},a clip\n" for name in names)
    )
    (note,) = [
        finding
        for finding in check_dataset(tmp_path).findings
        if finding.kind == "videos not decoded"
    ]
    assert note.message.startswith("9 of 17 videos were decoded")
    assert not note.loses_data
    assert "videos not decoded" not in {
        finding.kind for finding in check_dataset(tmp_path, decode_videos=True).findings
    }


@pytest.fixture
def msrvtt(tmp_path):
    """Two files, as published: training and validation in one, test in another."""
    videos = [("video0", "train"), ("video1", "train"), ("video2", "validate"), ("video3", "test")]
    for file, part in (
        ("train_val_videodatainfo.json", videos[:3]),
        ("test_videodatainfo.json", videos[3:]),
    ):
        sentences = [
            {"video_id": name, "caption": f"caption {number} of {name}", "sen_id": number}
            for number in range(3)
            for name, _ in part
            if (name, number) != ("video3", 2)
        ]
        listed = [
            {
                "video_id": name,
                "split": split,
                "category": 3,
                "url": "https://example.org",
                "start time": 1.5,
            }
            for name, split in part
        ]
        (tmp_path / file).write_text(
            json.dumps({"info": {}, "videos": listed, "sentences": sentences})
        )
    return tmp_path


class TwoCaptions(dict):
    """An object whose JSON has the key ``caption`` twice."""

    def items(self):
        return [*super().items(), ("caption", "another")]


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_msrvtt_reads_both_files(msrvtt):
    data = open_dataset(msrvtt)
    assert [(image.name, image.split) for image in data.images] == [
        ("video3", "test"),
        ("video0", "train"),
        ("video1", "train"),
        ("video2", "val"),
    ]
    assert data.split("test").captions == ("caption 0 of video3", "caption 1 of video3")
    assert [len(own) for own in data.captions_of] == [2, 3, 3, 3]
    assert open_dataset(msrvtt / "test_videodatainfo.json").fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("edit", "kind", "sentence"),
    [
        (
            lambda content: content["videos"].append({"video_id": 7}),
            "malformed entry",
            "expected an object with video_id and split",
        ),
        (
            lambda content: content["videos"].append(content["videos"][0]),
            "duplicate name",
            "already listed in",
        ),
        (
            lambda content: content["sentences"].append({"video_id": "video9", "caption": "a"}),
            "caption without image",
            "its video_id 'video9' is not listed",
        ),
        (
            lambda content: content["sentences"].append(["video0", "a"]),
            "malformed entry",
            "expected an object with video_id and caption",
        ),
        (
            lambda content: content["sentences"].append(
                TwoCaptions(video_id="video3", caption="a")
            ),
            "malformed entry",
            "caption, each once",
        ),
        (
            lambda content: content.update(sentences=[]),
            "image without caption",
            "listed without a caption",
        ),
    ],
)
def test_msrvtt_problems_are_findings(msrvtt, edit, kind, sentence):
    change(msrvtt / "test_videodatainfo.json", edit)
    assert any(
        finding.kind == kind and sentence in finding.message
        for finding in list_dataset(msrvtt).losses
    )


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        '{"videos": {}, "sentences": []}',
        '{"videos": [], "videos": [], "sentences": []}',
    ],
)
def test_msrvtt_refuses_other_json(tmp_path, content):
    (tmp_path / "videodatainfo.json").write_text(content)
    with pytest.raises(
        DataError,
        match=r"videodatainfo\.json( is not JSON|: expected {'videos': \[\.\.\.\], 'sentences')",
    ):
        open_dataset(tmp_path)


@pytest.fixture
def msvd(tmp_path):
    (tmp_path / "AllVideoDescriptions.txt").write_text(
        "# MSVD\n\nabc_1_5 a dog runs\nabc_1_5 a dog is running\nb-c_2_9 two cats\nxyz_0_3 a man "
        "cooks\nlost_1_2 nobody lists this\n"
    )
    for split, name in (("train", "abc_1_5"), ("val", "b-c_2_9"), ("test", "xyz_0_3")):
        (tmp_path / f"{split}_list.txt").write_text(f"{name}\n")
    return tmp_path


def test_msvd_reads_splits_of_lists(msvd):
    data = open_dataset(msvd)
    assert data.splits == ("train", "val", "test")
    assert data.split("train").captions == ("a dog runs", "a dog is running")
    assert any(
        "1 videos with captions are not in a list, such as lost_1_2" in finding.message
        for finding in list_dataset(msvd).findings
    )


@pytest.mark.parametrize("sign", ["\u2028", "\x85", "\x0b", "\x1c"])
def test_msvd_captions_end_at_line_feeds_only(msvd, sign):
    with open(msvd / "AllVideoDescriptions.txt", "a", encoding="utf-8") as file:
        file.write(f"b-c_2_9 two{sign}dogs\n")
    assert open_dataset(msvd).split("val").captions == ("two cats", f"two{sign}dogs")


def test_msvd_video_in_two_lists_is_a_finding(msvd):
    (msvd / "test_list.txt").write_text("xyz_0_3\nabc_1_5\n")
    assert "image in two splits" in {finding.kind for finding in list_dataset(msvd).losses}


def test_msvd_reports_missing_list(msvd):
    (msvd / "val_list.txt").unlink()
    with pytest.raises(
        DataError,
        match=r"val_list\.txt is missing: expected AllVideoDescriptions\.txt with train_list\.txt.* Add this list\.",
    ):
        open_dataset(msvd)
