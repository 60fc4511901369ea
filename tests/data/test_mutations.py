"""Files of each kind with random damage: a DataError or a correct result, in limited time."""

from __future__ import annotations

import io
import json
import random
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visavis.core.encoded import Encoded
from visavis.core.errors import VisavisError
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.arrays import ArrayFeatures, first_nonfinite_row
from visavis.data.features.store import FeatureStore, FeatureWriter, StoreDescription
from visavis.data.synthetic import SceneGraphs, write_synthetic_scenes
from visavis.papers.relevance import MatrixRelevance
from visavis.papers.relevance.caption_estimators import PairCache, read_word_vectors
from visavis.papers.relevance.human_agreement import read_crisscrossed_captions, read_stsb

NAMES = ("a.png", "bé.png", "c.png", "d.png")
ODD_VALUES = (
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    float("nan"),
    "",
    " ",
    "\0",
    "\ud800",
    "a" * 30_000,
    "../a.png",
    [],
    [[]],
    {},
    {"raw": {}},
    "test",
)
ODD_BYTES = (
    b"",
    b"\0",
    b"\xff",
    b'"',
    b",",
    b"\n",
    b"\r",
    b"{",
    b"]",
    b"null",
    b"9" * 400,
    b"[[",
    b"\\ud800",
    b"../",
    b"\x80" * 12,
    b"1e999",
    b"-",
)
SLOWEST_S = 10


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


def as_table(folder: Path) -> Path:
    rows = ["filename,split,caption,caption_2"]
    rows += [
        ",".join([row["filename"], row["split"], row["captions"][0], '"two, dogs"'])
        for row in photos(folder)
    ]
    (folder / "captions.csv").write_text("\n".join(rows))
    return folder / "captions.csv"


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


def as_coco(folder: Path) -> Path:
    rows = photos(folder)
    content = {
        "images": [{"id": number, "file_name": row["filename"]} for number, row in enumerate(rows)],
        "annotations": [
            {"image_id": number, "id": number, "caption": row["captions"][0]}
            for number, row in enumerate(rows)
        ],
    }
    (folder / "captions_val2017.json").write_text(json.dumps(content))
    return folder / "captions_val2017.json"


def as_image_table(name: str, **options: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        pa = pytest.importorskip(
            "pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'"
        )
        rows = photos(folder)
        images = [
            {"bytes": (folder / row["filename"]).read_bytes(), "path": row["filename"]}
            for row in rows
        ]
        table = pa.table(
            {
                "image": images,
                "captions": [row["captions"] for row in rows],
                "split": [row["split"] for row in rows],
            }
        )
        if name.endswith(".parquet"):
            __import__("pyarrow.parquet").parquet.write_table(
                table, folder / name, row_group_size=3
            )
        else:
            with pa.ipc.new_stream(
                str(folder / name), table.schema, options=pa.ipc.IpcWriteOptions(**options)
            ) as writer:
                writer.write_table(table, max_chunksize=3)
        for row in rows:
            (folder / row["filename"]).unlink()
        return folder / name

    return make


def as_shard(folder: Path) -> Path:
    with tarfile.open(folder / "val-000.tar", "w") as tar:
        for row in photos(folder):
            content = (folder / row["filename"]).read_bytes()
            text = json.dumps({"captions": row["captions"], "split": row["split"]}).encode()
            (folder / row["filename"]).unlink()
            for name, data in ((row["filename"], content), (f"{row['filename'][:-4]}.json", text)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder / "val-000.tar"


def as_archive(folder: Path) -> Path:
    as_karpathy(folder)
    return folder / "all-0000.tar"


def as_image(folder: Path) -> Path:
    as_lines(folder)
    return folder / "c.png"


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
    data = open_dataset(folder, skip_bad=True, decode_images=True)
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
    open_dataset(folder, decode_images=True)
    records = Path(__import__("os").environ["VISAVIS_CACHE"], "checks")
    return max(records.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def read_record(folder: Path) -> None:
    assert len(open_dataset(folder, decode_images=True).images) == len(NAMES)


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


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "lines": (as_lines, read_list),
    "table": (as_table, read_list),
    "karpathy": (as_karpathy, read_list),
    "archive": (as_archive, read_list),
    "COCO": (as_coco, read_list),
    "Parquet": (as_image_table("data.parquet"), read_list),
    "Arrow": (as_image_table("data.arrow"), read_list),
    "compressed Arrow": (as_image_table("data.arrow", compression="lz4"), read_list),
    "shard": (as_shard, read_list),
    "image": (as_image, read_list),
    "array": (as_array, read_list),
    "captions": (as_captions, read_list),
    **{
        name: (as_store(name), read_store)
        for name in (
            "features.json",
            "keys.json",
            "progress.json",
            "vectors.npy",
            "words.npy",
            "offsets.npy",
        )
    },
    "record": (as_record, read_record),
    "pairs": (as_pairs, read_pairs),
    "scenes": (as_scenes, read_scenes),
    "word vectors": (
        as_vectors,
        lambda folder: read_word_vectors(folder / "vectors.txt", {"dog", "cat", "bé"}),
    ),
    "matrix": (
        as_matrix,
        lambda folder: MatrixRelevance(path=str(folder / "matrix.npy")).for_captions(
            ["a", "b", "c"]
        )(torch.arange(3), torch.arange(3)),
    ),
    "ratings": (as_ratings, of_ratings),
    "numbered": (as_numbered, read_crisscrossed_captions),
}


def changed(content: bytes, rng: random.Random) -> bytes:
    """One change: a bit, a truncation, an insertion, an exchange of two parts, or one JSON value."""
    place, width = rng.randrange(len(content)), rng.choice((1, 2, 8, 40))
    way = rng.randrange(5)
    if way == 0:
        return (
            content[:place]
            + bytes([content[place] ^ (1 << rng.randrange(8))])
            + content[place + 1 :]
        )
    if way == 1:
        return content[:place] + (b"" if rng.random() < 0.5 else content[place + width :])
    if way == 2:
        return content[:place] + rng.choice(ODD_BYTES) + content[place + rng.choice((0, width)) :]
    if way == 3:
        other = rng.randrange(len(content))
        first, second = sorted((place, other))
        return (
            content[:first]
            + content[second : second + width]
            + content[first + width : second]
            + content[first : first + width]
            + content[second + width :]
        )
    return with_odd_value(content, rng)


def with_odd_value(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n") if content.count(b"\n{") else [content]
    number = rng.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except ValueError:
        return content[::-1]
    at = {"": value}
    step: object = ""
    holder: object = at
    while isinstance(inner := holder[step], dict | list) and inner and rng.random() < 0.85:  # type: ignore[index]
        holder, step = (
            inner,
            rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner))),
        )  # type: ignore[arg-type]
    if isinstance(holder, dict) and step and rng.random() < 0.2:
        del holder[step]
    else:
        holder[step] = rng.choice(ODD_VALUES)  # type: ignore[index]
    lines[number] = json.dumps(at[""], ensure_ascii=True).encode()
    return b"\n".join(lines)


def mutate(folder: Path, kind: str, seeds: range) -> None:
    make, read = KINDS[kind]
    (folder / "whole").mkdir()
    path = make(folder / "whole")
    read(folder / "whole")
    whole = {
        file: file.read_bytes()
        for file in {path, *(file for file in (folder / "whole").rglob("*") if file.is_file())}
    }
    for seed in seeds:
        for file, content in whole.items():
            if not file.exists() or file.read_bytes() != content:
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
        path.write_bytes(changed(whole[path], random.Random(f"{kind} {seed}")))
        start = time.perf_counter()
        try:
            with suppress(VisavisError):
                read(folder / "whole")
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}: {error}") from error
        assert time.perf_counter() - start < SLOWEST_S, f"{kind}, seed {seed} took long"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_changed_files_raise_data_error_or_read_correctly(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    mutate(tmp_path, kind, range(20))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_files_raise_data_error_or_read_correctly(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    mutate(tmp_path, kind, range(20, 400))
