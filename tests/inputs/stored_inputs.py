"""Files of data sets, stored features, caches and judgments with damaged bytes or values: an error, or
the result of the intact file where the format can find the damage.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.inputs.cases import Case, Kind
from tests.mutation import changed, damaged

from visavis.core.encoded import Encoded
from visavis.data.dataset_check import check_dataset
from visavis.data.features.arrays import ArrayFeatures, first_nonfinite_row
from visavis.data.features.store import FeatureStore, FeatureWriter, StoreDescription
from visavis.data.image_validation import open_valid_dataset
from visavis.data.synthetic import SceneGraphs, write_synthetic_scenes
from visavis.papers.relevance import MatrixRelevance
from visavis.papers.relevance.caption_estimators import PairCache, read_word_vectors
from visavis.papers.relevance.human_agreement import read_crisscrossed_captions, read_stsb

NAMES = ("a.png", "bé.png", "c.png", "d.png")


def photos(folder: Path, *, archive: bool = False) -> list[dict]:
    contents = {}
    for number, name in enumerate(NAMES):
        file = io.BytesIO()
        Image.new("RGB", (6 + number, 5), (number, 9, 9)).save(file, "PNG")
        contents[name] = file.getvalue()
    if archive:
        with tarfile.open(folder / "all-0000.tar", "w") as tar:
            for name, content in contents.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    splits = ("train", "train", "val", "test")
    return [
        {"filename": name, "split": split, "captions": [f"a dog {name}", f'"two", dogs {name}']}
        for name, split in zip(NAMES, splits, strict=True)
    ]


def as_lines(folder: Path) -> Path:
    (folder / "captions.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in photos(folder))
    )
    return folder / "captions.jsonl"


def as_karpathy(folder: Path) -> Path:
    images = [
        {
            "filename": row["filename"],
            "filepath": ".",
            "split": row["split"],
            "imgid": number,
            "cocoid": 7 * number,
            "sentences": [
                {"raw": text, "tokens": text.split(), "sentid": 2 * number + k}
                for k, text in enumerate(row["captions"])
            ],
        }
        for number, row in enumerate(photos(folder, archive=True))
    ]
    (folder / "dataset_x.json").write_text(json.dumps({"images": images, "dataset": "x"}))
    return folder / "dataset_x.json"


def as_archive(folder: Path) -> Path:
    as_karpathy(folder)
    return folder / "all-0000.tar"


def as_array(folder: Path) -> Path:
    for stem in ("train", "test"):
        np.save(folder / f"{stem}_ims.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
        (folder / f"{stem}_caps.txt").write_text("a dog\na cat\n")
    return folder / "train_ims.npy"


def as_captions(folder: Path) -> Path:
    as_array(folder)
    return folder / "test_caps.txt"


def read_list(folder: Path) -> None:
    report = check_dataset(folder)
    assert all("\n" not in str(finding) and str(finding).encode() for finding in report.findings)
    data = open_valid_dataset(folder, skip_bad=True)
    for image in data.images:
        assert image.location is None or image.open().mode == "RGB"
    assert len(data.fingerprint) == 16
    if list(folder.glob("*_ims.npy")):
        features = ArrayFeatures.open_precomp(folder)
        first_nonfinite_row(features)
        features.read(features.rows(image.name for image in data.images))


def as_store(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        words = name in ("offsets.npy", "words.npy")
        description = StoreDescription(
            "text", "words" if words else "pooled", "encoder", "0" * 16, (3,), 4, "data"
        )
        writer = FeatureWriter.open(
            folder / "store", description, list(NAMES), np.array([1, 2, 1, 2]) if words else None
        )
        vectors = torch.arange(24.0).view(4, 2, 3) if words else torch.arange(12.0).view(4, 3)
        mask = (
            torch.tensor([[True, False], [True, True], [True, False], [True, True]])
            if words
            else None
        )
        writer.append(Encoded(vectors, mask))
        writer.finish()
        return folder / "store" / name

    return make


def read_store(folder: Path) -> None:
    store = FeatureStore.open(folder / "store")
    if not store.description.has_variable_length:
        assert store.read(store.rows(NAMES)).vectors.equal(torch.arange(12.0).view(4, 3)), (
            "never other features"
        )
    else:
        assert store.read(store.rows(NAMES)).vectors[1].equal(torch.arange(6.0, 12).view(2, 3))


def as_record(folder: Path) -> Path:
    as_lines(folder)
    open_valid_dataset(folder)
    records = Path(os.environ["VISAVIS_CACHE"], "checks")
    return max(records.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def read_record(folder: Path) -> None:
    assert len(open_valid_dataset(folder).images) == len(NAMES)


def as_pairs(folder: Path) -> Path:
    PairCache(folder / "relevance.sqlite").add(
        {(name, other): 0.25 for name in NAMES for other in NAMES}
    )
    return folder / "relevance.sqlite"


def read_pairs(folder: Path) -> None:
    pairs = PairCache(folder / "relevance.sqlite")
    assert set(pairs.read([(name, other) for name in NAMES for other in NAMES]).values()) <= {
        0.25
    }, "never another degree"
    pairs.add({("a", "b"): 0.5})
    assert pairs.read([("a", "b")]) == {("a", "b"): 0.5}


def as_scenes(folder: Path) -> Path:
    write_synthetic_scenes(
        folder / "scenes", num_train=2, num_val=0, num_test=0, size=32, captions_per_image=1
    )
    return folder / "scenes" / "scenes.jsonl"


def read_scenes(folder: Path) -> None:
    relevance = SceneGraphs.open(folder / "scenes").relevance()
    assert ((relevance >= 0) & (relevance <= 1)).all()


def as_vectors(folder: Path) -> Path:
    (folder / "vectors.txt").write_text("dog 1 2 3\ncat 4 5.5 -6\nbé 7 8 9e-3\n")
    return folder / "vectors.txt"


def as_matrix(folder: Path) -> Path:
    np.save(folder / "matrix.npy", np.full((3, 3), 0.5, np.float32))
    return folder / "matrix.npy"


def as_ratings(folder: Path) -> Path:
    (folder / "sts-dev.tsv").write_text(
        "genre\tsentence1\tsentence2\tscore\nx\ta dog\ta cat\t3.5\nx\tone\ttwo\t0\n"
    )
    return folder / "sts-dev.tsv"


def as_numbered(folder: Path) -> Path:
    sentences = [{"raw": "a dog", "sentid": 1}, {"raw": "a cat", "sentid": 2}]
    image = {"filename": "a.jpg", "cocoid": 5, "sentids": [1, 2], "sentences": sentences}
    (folder / "dataset_coco_5k_test.json").write_text(json.dumps({"images": [image]}))
    (folder / "cxc_sts_test.csv").write_text("caption1,caption2,agg_score\nx:1,x:2,3.0\n")
    return folder / "dataset_coco_5k_test.json"


def of_ratings(folder: Path) -> None:
    rated = read_stsb("dev", folder)
    assert ((rated.ratings >= 0) & (rated.ratings <= 5)).all()


FILES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "tar of images": (as_archive, read_list),
    "feature arrays": (as_array, read_list),
    "caption text": (as_captions, read_list),
    **{
        f"stored {name}": (as_store(name), read_store)
        for name in (
            "features.json",
            "keys.json",
            "progress.json",
            "vectors.npy",
            "words.npy",
            "offsets.npy",
        )
    },
    "relevance cache": (as_pairs, read_pairs),
    "scene graphs": (as_scenes, read_scenes),
    "word vectors": (
        as_vectors,
        lambda folder: read_word_vectors(folder / "vectors.txt", {"dog", "cat", "bé"}),
    ),
    "relevance matrix": (
        as_matrix,
        lambda folder: MatrixRelevance(path=str(folder / "matrix.npy")).for_captions(
            ["a", "b", "c"]
        )(torch.arange(3), torch.arange(3)),
    ),
    "rated texts": (as_ratings, of_ratings),
    "rated captions": (as_numbered, read_crisscrossed_captions),
}


def prepare(name: str, folder: Path) -> tuple[Path, str]:
    """Write the intact files, and read them. Returns their folder, and the name of the file that is
    damaged.
    """
    make, read = FILES[name]
    whole = folder / "whole"
    whole.mkdir()
    path = make(whole)
    read(whole)
    return whole, os.path.relpath(path, whole)


def make_damaged(name: str, rng: random.Random, folder: Path, state: tuple[Path, str]) -> Case:
    """A copy of the files, one of which is damaged."""
    whole, path = state
    shutil.copytree(whole, folder / "files")
    note = damage_file(folder / "files" / path, rng)
    return Case(partial(FILES[name][1], folder / "files"), note=note)


def make_record(rng: random.Random, folder: Path, _: Any) -> Case:
    """A damaged record in the cache, that a data set was checked."""
    note = damage_file(as_record(folder), rng)
    return Case(partial(read_record, folder), "right", note=note)


def damage_file(file: Path, rng: random.Random) -> str:
    """Damage a file, and return how."""
    content = file.read_bytes()
    if content.lstrip()[:1] in (b"{", b"[") and rng.random() < 0.4:
        file.write_bytes(with_odd_value(content, rng))
        return "changed value"
    file.write_bytes(damaged(content, rng))
    return "damaged bytes"


def with_odd_value(content: bytes, rng: random.Random) -> bytes:
    """JSON, or a line of JSON, with one to three changed values."""
    lines = content.split(b"\n") if content.count(b"\n{") else [content]
    number = rng.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except ValueError:
        return content[::-1]
    changed_value = changed({"": value}, rng).get("", None)
    lines[number] = json.dumps(changed_value, default=str).encode()
    return b"\n".join(lines)


KINDS = [
    *(Kind(name, partial(make_damaged, name), partial(prepare, name), 150) for name in FILES),
    Kind("check records", make_record, inputs=150),
]
