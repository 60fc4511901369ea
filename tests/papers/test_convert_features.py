"""Conversion of published features: pickles of CE and HDF5 files of MMT."""

from __future__ import annotations

import collections
import json
import os
import pickle

import numpy as np
import pytest
import torch

import visavis
from visavis.core.errors import DataError, RefusedOverwrite
from visavis.core.progress import NoProgress
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.expert_store import ExpertStore
from visavis.data.features.store import FeatureStore
from visavis.evaluation import Protocol
from visavis.papers.convert_features import NUM_HELD_OUT
from visavis.training.runs.evaluate_runs import EvaluationOptions, evaluate_runs

VIDEOS = [f"video{number}" for number in range(20)]
WORDS = {
    video: [["a", "dog", str(number)], ["one", "cat"], ["é"]] for number, video in enumerate(VIDEOS)
}


def dump(path, value, protocol=4):
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.fixture
def ce(tmp_path):
    """A folder like that of CE: two experts with missing videos, captions, caption features, and
    lists.
    """
    random = np.random.default_rng(0)
    folder = tmp_path / "feats"
    folder.mkdir()
    appearance = {
        video: random.random((1 + number % 4, 3)).astype(np.float32)
        for number, video in enumerate(VIDEOS)
    }
    audio = collections.defaultdict(float, {video: random.random((2, 2)) for video in VIDEOS})
    audio |= {
        "video3": float("nan"),
        "video4": np.full((1, 2), np.nan),
        "video5": None,
        "video6": np.empty((0, 2)),
    }
    dump(folder / "I3D_new.pickle", appearance, 2)
    dump(folder / "Audio.pickle", audio)
    np.save(
        folder / "scene-raw.npy",
        np.array({video: random.random(5) for video in VIDEOS}, dtype=object),
        allow_pickle=True,
    )
    dump(folder / "raw-captions.pkl", WORDS)
    dump(
        folder / "w2v.pkl",
        {video: [random.random((len(words), 4)) for words in WORDS[video]] for video in VIDEOS},
    )
    dump(
        folder / "jsfusion_val_caption_idx.pkl",
        {video: number % 3 for number, video in enumerate(VIDEOS)},
        0,
    )
    for name, videos in {
        "train_list_full": VIDEOS[:12],
        "val_list_full": VIDEOS[12:14],
        "test_list_full": VIDEOS[14:],
    }.items():
        (folder / f"{name}.txt").write_text("\n".join(videos) + "\n")
    (folder / "train_list_jsfusion.txt").write_text("\r\n".join(VIDEOS[:15]))
    (folder / "val_list_jsfusion.txt").write_text("\n".join(VIDEOS[15:]))
    return folder


def sources(folder):
    return [
        f"i3d={path}" if path.name.startswith("I3D") else path for path in sorted(folder.iterdir())
    ]


def test_convert_ce_features(ce, tmp_path):
    out = tmp_path / "msrvtt"
    converted = visavis.data_convert(sources(ce), out)
    assert converted.experts == {"Audio": (2, 16), "i3d": (3, 20), "scene-raw": (5, 20)}
    assert (converted.num_videos, converted.num_captions, converted.caption_features) == (
        20,
        60,
        ("w2v",),
    )
    store = ExpertStore.open(out / "experts")
    read = store.read(store.rows(["video3", "video7"]))
    appearance = pickle.loads((ce / "I3D_new.pickle").read_bytes())
    assert np.array_equal(read.vectors["i3d"][1].numpy(), appearance["video7"])
    assert read.mask["Audio"].sum(1).tolist() == [0, 2]
    assert read.mask["scene-raw"].sum(1).tolist() == [1, 1]
    assert open_dataset(out / "dataset_msrvtt-full.json").captions[:3] == (
        "a dog 0",
        "one cat",
        "é",
    )
    texts = FeatureStore.open(out / "caption_features" / "w2v")
    assert texts.read(texts.rows(["a dog 7", "é"])).mask.sum(1).tolist() == [3, 1]


def test_convert_splits_from_lists(ce, tmp_path):
    converted = visavis.data_convert(sources(ce), tmp_path / "msrvtt")
    full, held_out, all_of_them = (
        open_dataset(tmp_path / "msrvtt" / f"dataset_msrvtt-{way}.json")
        for way in ("full", "1ka", "1ka-all")
    )
    assert converted.split_files == (
        "dataset_msrvtt-full.json",
        "dataset_msrvtt-1ka.json",
        "dataset_msrvtt-1ka-all.json",
    )
    counted = [
        collections.Counter(image.split for image in data.images)
        for data in (full, held_out, all_of_them)
    ]
    assert counted == [
        {"train": 12, "val": 2, "test": 6},
        {"train": 14, "val": 1, "test": 5},
        {"train": 15, "test": 5},
    ]
    test = held_out.split("test")
    assert test.captions == ("a dog 15", "one cat", "é", "a dog 18", "one cat")
    assert len(full.split("test").captions) == 18
    assert NUM_HELD_OUT == 500


def test_convert_ignores_video_suffixes(ce, tmp_path):
    appearance = pickle.loads((ce / "I3D_new.pickle").read_bytes())
    dump(ce / "I3D_new.pickle", {f"{video}.mp4": array for video, array in appearance.items()}, 2)
    (ce / "val_list_full.txt").write_text("\n".join(f"{video}.mp4" for video in VIDEOS[12:14]))
    converted = visavis.data_convert(sources(ce), tmp_path / "msrvtt")
    assert (converted.num_videos, converted.experts["i3d"]) == (20, (3, 20))
    store = ExpertStore.open(tmp_path / "msrvtt" / "experts")
    read = store.read(store.rows(["video7.mp4", "video7"]))
    assert all(read.mask[name].any(1).all() for name in ("Audio", "i3d"))
    assert (
        len(open_dataset(tmp_path / "msrvtt" / "dataset_msrvtt-full.json").split("val").images) == 2
    )


def test_convert_is_atomic_and_never_overwrites(ce, tmp_path):
    out = tmp_path / "msrvtt"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(RefusedOverwrite, match="already exists"):
        visavis.data_convert(sources(ce), out)
    dump(ce / "face.pkl", {video: np.ones((1, 3 if video == "video2" else 4)) for video in VIDEOS})
    with pytest.raises(
        DataError,
        match=r"video2: expert face: expected numbers of shape \[length, 4\], got float64 of shape \[1, 3\]",
    ):
        visavis.data_convert(sources(ce), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["feats", "msrvtt"]


class Command:
    def __reduce__(self):
        return os.system, ("touch gone",)


ARRAYS = {"a": np.ones((2, 3))}
BAD = {
    "code": (Command(), "is a pickle with code in it: it names '(posix|nt).system'"),
    "a list": ([1, 2], r"x\.pkl has a list, expected a dict that gives each video an array"),
    "nothing": ({}, r"x\.pkl has an empty dict, expected"),
    "all missing": (
        {"a": np.full((1, 2), np.nan), "b": None},
        r"all 2 videos have only None, NaN or empty arrays",
    ),
    "an odd one after a missing one": ({"a": None, "b": 1.5}, "video b has a float, expected"),
    "one video under two names": (
        {"a": np.ones((1, 2)), "a.mp4": np.ones((1, 2))},
        "duplicate video a, with and without its file suffix",
    ),
    "numbers of captions alone": ({"a": 1}, "the sources have only indices of tested captions"),
    "numbers for names": ({1: np.ones(3)}, "expected Unicode texts as video names, got a int"),
    "a dict of dicts": ({"a": {"boxes": np.ones(3)}}, "video a has a dict, expected"),
    "ragged features": (
        ARRAYS | {"b": np.ones((2, 4))},
        r"b: expert x: expected numbers of shape \[length, 3\], got float64 of shape \[2, 4\]",
    ),
    "maps": (ARRAYS | {"b": np.ones((2, 7, 7, 3))}, r"of shape \[2, 7, 7, 3\]"),
    "some NaN": (ARRAYS | {"b": np.array([[1, np.nan, 1]])}, "b: expert x: expected finite values"),
    "a text among arrays": (ARRAYS | {"b": "c"}, "gives b a str, but an array to others"),
    "a number among captions": ({"a": ["x"], "b": [3]}, "a caption of b is not a text"),
    "no list of captions": ({"a": ["x"], "b": "y"}, "video b has a str, but others have captions"),
    "a number for an array": (
        {"a": np.array(3.0)},
        r"x\.pkl gives a the number 3\.0, expected an array \[length, width\]",
    ),
    "features without captions": (
        {"a": [np.ones((2, 3))]},
        "features x: got 1 arrays for 0 captions of a",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_convert_reports_malformed_pickles(tmp_path, what):
    value, sentence = BAD[what]
    with pytest.raises(DataError, match=sentence) as error:
        visavis.data_convert([dump(tmp_path / "x.pkl", value)], tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pkl"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"x.txt": "a"},
            (
                r"x\.txt cannot be converted: expected \.pkl, \.pickle, \.npy, \.h5, \.hdf5, a \.json "
                r"of MSR-VTT, or a list of videos"
            ),
        ),
        ({"train_list.txt": "a\na\n"}, r"train_list\.txt has a duplicate video"),
        ({"train_list.txt": ""}, r"train_list\.txt is empty"),
        ({"train_list_x.txt": "a"}, "lists x: got the train list without a val or test list"),
        ({"test_list.txt": "a"}, "lists without a name: got the test list without the train list"),
        (
            {"test_list_x.txt": "a", "val_list_x.txt": "b"},
            "lists x: got the test list and the val list without the train list",
        ),
        ({"train_list.txt": "a\nb c\n\n", "test_list.txt": "b c"}, "b c is in train and in test"),
        ({"train_list.txt": "a", "test_list.txt": "b"}, "video b of a list has no captions"),
    ],
)
def test_convert_reports_malformed_lists(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    captions = dump(tmp_path / "captions.pkl", {"a": ["a dog"]})
    with pytest.raises(DataError, match=sentence):
        visavis.data_convert([captions, *(tmp_path / name for name in files)], tmp_path / "out")


def test_convert_reports_invalid_caption_index(ce, tmp_path):
    dump(ce / "jsfusion_val_caption_idx.pkl", dict.fromkeys(VIDEOS, 3))
    with pytest.raises(
        DataError, match="the tested caption of video15 is 3, expected an index below 3"
    ):
        visavis.data_convert(sources(ce), tmp_path / "out")


def test_convert_reads_captions_of_msrvtt_json(ce, tmp_path):
    (ce / "raw-captions.pkl").unlink()
    (ce / "w2v.pkl").unlink()
    sentences = [
        {"video_id": video, "caption": " ".join(words)}
        for number in range(3)
        for video in VIDEOS
        for words in [WORDS[video][number]]
    ]
    listed = {
        "videos": [{"video_id": video, "split": "train"} for video in VIDEOS],
        "sentences": sentences,
    }
    (ce / "MSRVTT_data.json").write_text(json.dumps(listed))
    visavis.data_convert(sources(ce), tmp_path / "msrvtt")
    assert (
        open_dataset(tmp_path / "msrvtt" / "dataset_msrvtt-1ka.json").split("test").captions[3]
        == "a dog 18"
    )
    (ce / "MSRVTT_data.json").write_text(
        json.dumps(listed | {"sentences": [*sentences, {"video_id": "video99", "caption": "a"}]})
    )
    with pytest.raises(
        DataError, match=r"MSRVTT_data\.json, sentence 60: expected the caption of a listed video"
    ):
        visavis.data_convert(sources(ce), tmp_path / "other")


def test_convert_keeps_splits_of_msrvtt_json(tmp_path):
    listed = {
        "videos": [
            {
                "video_id": video,
                "split": "validate" if number < 3 else "test" if number < 7 else "train",
            }
            for number, video in enumerate(VIDEOS)
        ],
        "sentences": [{"video_id": video, "caption": "a dog"} for video in VIDEOS],
    }
    (tmp_path / "all_videodatainfo.json").write_text(json.dumps(listed))
    visavis.data_convert([tmp_path / "all_videodatainfo.json"], tmp_path / "own")
    data = open_dataset(tmp_path / "own" / "dataset_own.json")
    assert {split: len(data.split(split).images) for split in data.splits} == {
        "train": 13,
        "val": 3,
        "test": 4,
    }
    del listed["videos"][5]["split"]
    (tmp_path / "all_videodatainfo.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match="has no split of video5, but of others"):
        visavis.data_convert([tmp_path / "all_videodatainfo.json"], tmp_path / "other")


def test_convert_reports_nonfinite_caption_features(ce, tmp_path):
    texts = {video: [np.ones((len(words), 4)) for words in WORDS[video]] for video in VIDEOS}
    texts["video7"][0][0, 2] = np.nan
    dump(ce / "w2v.pkl", texts)
    with pytest.raises(
        DataError,
        match="features w2v of the caption 'a dog 7': expected values that are finite in float16",
    ):
        visavis.data_convert(sources(ce), tmp_path / "out")


def test_convert_refuses_duplicate_split_list(ce, tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "train_list_full.txt").write_text("video1")
    with pytest.raises(
        DataError, match=r"more/train_list_full\.txt: duplicate train list of the same split"
    ):
        visavis.data_convert(
            [*sources(ce), tmp_path / "more" / "train_list_full.txt"], tmp_path / "out"
        )


@pytest.mark.parametrize("numbers", [{}, {"video15": 1}])
def test_convert_1ka_needs_the_tested_captions(ce, tmp_path, numbers):
    (ce / "jsfusion_val_caption_idx.pkl").unlink()
    if numbers:
        dump(ce / "jsfusion_val_caption_idx.pkl", numbers)
    with pytest.raises(
        DataError, match=r"one of 3 captions of video1[56] is tested, and its index is unknown"
    ):
        visavis.data_convert(sources(ce), tmp_path / "out")


def test_convert_captions_only(tmp_path):
    visavis.data_convert([dump(tmp_path / "raw-captions.pkl", WORDS)], tmp_path / "own")
    assert set(open_dataset(tmp_path / "own").splits) <= {"train", "val", "test"}


@pytest.fixture
def mmt(tmp_path):
    h5py = pytest.importorskip("h5py")
    for number, video in enumerate(VIDEOS):
        folder = tmp_path / "vid_feat_files" / "v" / str(number)
        folder.mkdir(parents=True)
        with h5py.File(folder / f"{video}.h5", "w") as file:
            file["features.rgb"] = np.full((2 + number % 3, 4), number, np.float32)
            if number % 2:
                file["features.audio"] = np.full(
                    (1, 3), np.nan if number == 1 else number, np.float32
                )
                file["features_t.audio"] = np.array([[number, number + 1.0]])
            for caption, words in enumerate(WORDS[video]):
                file[f"raw_captions.{caption}"] = np.array([word.encode() for word in words])
    return tmp_path / "vid_feat_files"


def test_convert_hdf5_files(mmt, tmp_path, capsys):
    converted = visavis.data_convert([mmt], tmp_path / "mmt")
    assert converted.experts == {"audio": (3, 9), "rgb": (4, 20)}
    store = ExpertStore.open(tmp_path / "mmt" / "experts")
    read = store.read(store.rows(["video7", "video1"]))
    assert read.mask["audio"].sum(1).tolist() == [1, 0]
    assert read.vectors["audio:seconds"][0].tolist() == [[7.5]]  # the middle of its stored times
    torch.testing.assert_close(
        read.vectors["rgb:seconds"][0, :3, 0], torch.tensor([0.1, 0.3, 0.5])
    )  # 0.2 s for each, as the code of MMT
    assert sorted(open_dataset(tmp_path / "mmt", skip_bad=True).captions) == sorted(
        " ".join(w) for own in WORDS.values() for w in own
    )


def test_convert_reports_malformed_hdf5_files(mmt, tmp_path):
    h5py = pytest.importorskip("h5py")
    path = mmt / "v" / "3" / "video3.h5"
    with h5py.File(path, "a") as file:
        file["features.face"] = h5py.ExternalLink("/etc/hosts", "/")
    with pytest.raises(
        DataError, match=r"video3\.h5: features\.face is a link, and links are not followed"
    ):
        visavis.data_convert([mmt], tmp_path / "out")
    with h5py.File(path, "a") as file:
        del file["features.face"]
        file["features.face"] = np.ones((2, 2))
        file.create_group("group")
    with pytest.raises(DataError, match="group is not an array in the file itself"):
        visavis.data_convert([mmt], tmp_path / "out")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"video3\.h5"):
        visavis.data_convert([mmt], tmp_path / "out")
    for key, content, sentence in (
        (
            "features.map",
            np.ones((2, 2, 4)),
            r"features\.map is of shape \[2, 2, 4\], expected \[length, width\]",
        ),
        (f"raw_captions.{'7' * 5_000}", np.array([1, 2]), r"raw_captions\.7{20} is not a text"),
        ("raw_captions.7", np.array([1, 2]), r"raw_captions\.7 is not a text"),
        ("raw_captions.7", np.array([[b"a", b"b"]]), r"raw_captions\.7 is not a text"),
        ("raw_captions.7", h5py.Empty("S4"), r"raw_captions\.7 is not a text"),
    ):
        with h5py.File(path, "w") as file:
            file[key] = content
        with pytest.raises(DataError, match=sentence):
            visavis.data_convert([mmt], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no \.h5"):
        visavis.data_convert([tmp_path / "empty"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_convert_hdf5_with_one_vector_per_video(mmt, tmp_path):
    h5py = pytest.importorskip("h5py")
    for number, video in enumerate(VIDEOS):
        with h5py.File(mmt / "v" / str(number) / f"{video}.h5", "a") as file:
            file["features.scene"] = (
                np.full(5, number, np.float32) if number else np.full(1, np.nan)
            )
    assert visavis.data_convert([mmt], tmp_path / "mmt").experts["scene"] == (5, 19)


def test_convert_hdf5_with_unusual_times(mmt, tmp_path):
    h5py = pytest.importorskip("h5py")
    for number, times in ((3, 2.0), (5, np.empty((0, 2)))):
        with h5py.File(mmt / "v" / str(number) / f"{VIDEOS[number]}.h5", "a") as file:
            del file["features_t.audio"]
            file["features_t.audio"] = times
    visavis.data_convert([mmt], tmp_path / "mmt")
    store = ExpertStore.open(tmp_path / "mmt" / "experts")
    seconds = store.read(store.rows([VIDEOS[3], VIDEOS[5]])).vectors["audio:seconds"]
    assert seconds.flatten().tolist() == [2.0, -1.0]


class Listener(NoProgress):
    def __init__(self):
        self.messages = []

    def message(self, text):
        self.messages.append(text)


def test_convert_video_without_experts(ce, tmp_path):
    listener = Listener()
    for name in ("I3D_new.pickle", "Audio.pickle", "scene-raw.npy"):
        (ce / name).unlink()
    dump(ce / "face.pkl", {video: np.ones((1, 3)) for video in VIDEOS[:18]})
    visavis.data_convert(sources(ce), tmp_path / "out", progress=listener)
    assert (
        "2 videos with captions, such as video18, are missing in all experts" in listener.messages
    )
    store = ExpertStore.open(tmp_path / "out" / "experts")
    assert store.read(store.rows(["video18"])).mask["face"].sum() == 0
    dump(ce / "face.pkl", {f"clip{video}": np.ones((1, 3)) for video in VIDEOS})
    with pytest.raises(
        DataError, match="no expert has any of the videos with captions, such as video0"
    ):
        visavis.data_convert(sources(ce), tmp_path / "other")


def test_cli_prints_conversion_report(ce, tmp_path):
    from typer.testing import CliRunner

    from visavis.cli import app

    arguments = ["data", "convert", *map(str, sources(ce)), "--out", str(tmp_path / "msrvtt")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "experts/Audio: 2 dimensions, 16 videos" in result.output
    result = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "again"), "--json"])
    assert json.loads(result.output)["experts"]["i3d"] == {"embedding_dim": 3, "videos": 20}


def test_converted_features_train_and_evaluate_ce(ce, tmp_path):
    """Pickles of CE are converted, CE trains on them, and the protocol of 1k-A evaluates it."""
    out = tmp_path / "msrvtt"
    visavis.data_convert(sources(ce), out)
    recipe = tmp_path / "ce.toml"
    recipe.write_text(
        f"""
        name = "ce"
        data = {{ path = "{(out / "dataset_msrvtt-1ka-all.json").as_posix()}" }}
        visual = {{ granularity = "experts", features = "{(out / "experts").as_posix()}", max_length = 3 }}
        text = {{ granularity = "words", features = "{(out / "caption_features" / "w2v").as_posix()}" }}
        model = {{ kind = "CE", embedding_dim = 8 }}
        training = {{ batch_size = 8 }}
        evaluation = {{ validation = "test" }}
        [[phases]]
        epochs = 1
        objective = "MaxMargin(margin=0.05)"
        """
    )
    trained = visavis.train(recipe, out=tmp_path / "run")
    assert (trained.test.num_images, trained.test.num_texts) == (5, 5)
    pairs = Protocol(name="pairs", description="", num_images=5, captions_per_image=1, ties="mean")
    options = EvaluationOptions(protocol=pairs)
    assert evaluate_runs([tmp_path / "run"], options, NoProgress()).ties == "mean"


@pytest.mark.parametrize("name", ["../../evil", "{folder}/evil", "", ".hidden"])
def test_convert_refuses_path_as_name(tmp_path, name):
    (tmp_path / "words.pkl").write_bytes(pickle.dumps({"video0": np.ones((2, 3), np.float32)}))
    with pytest.raises(DataError, match="expected NAME=PATH"):
        visavis.data_convert(
            [f"{name.format(folder=tmp_path)}={tmp_path / 'words.pkl'}"], out=tmp_path / "new"
        )
    assert not (tmp_path / "new").exists()
