"""Files outside a data set or folder are neither read nor served, unless VISAVIS_IMAGE_ROOTS lists
their folder.

Each variant of an attack builds its source from an outside folder ``secret`` with red images, and
some replace a file after it was opened. Every variant is repeated with the outside folder listed,
which shows that the attack would otherwise succeed.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset import ContentFingerprint
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.arrays import ArrayFeatures
from visavis.data.image_file import ByteRange
from visavis.retrieval.index_folder import Index, IndexManifest
from visavis.retrieval.items import IndexItem
from visavis.retrieval.run_images import open_image_collection
from visavis.retrieval.server.image_cache import render_jpeg
from visavis.retrieval.source_files import list_readable_files, list_source_files

from ..videos import write_video

Change = Callable[[Path, Path], object]
RED, BLUE = (250, 0, 0), (0, 0, 250)
SECRET_TEXT = "a secret text"


def paint(path: Path, color: tuple[int, int, int]) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".mp4":
        write_video(path, [np.full((32, 32, 3), color, np.uint8)] * 3)
    else:
        Image.new("RGB", (8, 8), color).save(path)
    return path.read_bytes()


def archive(path: Path, content: bytes, **members: bytes) -> None:
    """Write an archive, in which ``>`` before the name of a member makes it a symbolic link and
    ``=`` a hard link.
    """
    with tarfile.open(path, "w") as tar:
        for name, link in members.items():
            info = tarfile.TarInfo(name.removeprefix(">").removeprefix("="))
            info.type = (
                tarfile.SYMTYPE
                if name[0] == ">"
                else tarfile.LNKTYPE
                if name[0] == "="
                else tarfile.REGTYPE
            )
            info.linkname = "" if info.isreg() else link.decode()
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))


def table(data: Path, file: object) -> None:
    (data / "captions.csv").write_text(f"filename,caption\n{file},a dog\n")


def karpathy(data: Path, **image: str) -> None:
    (data / "dataset_x.json").write_text(
        json.dumps({"images": [{**image, "split": "train", "sentences": [{"raw": "a dog"}]}]})
    )


def coco(data: Path, file: str) -> None:
    content = {
        "images": [{"id": 1, "file_name": file}],
        "annotations": [{"image_id": 1, "caption": "a dog"}],
    }
    (data / "captions_val2017.json").write_text(json.dumps(content))


def image_table(path: Path, image: object) -> None:
    pa = pytest.importorskip(
        "pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'"
    )
    table = pa.table({"image": [image], "caption": ["a dog"]})
    if path.suffix == ".parquet":
        __import__("pyarrow.parquet").parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)


def linked_table(data: Path, secret: Path, name: str) -> None:
    image_table(secret / name, (secret / "a.png").read_bytes())
    link(data, name, secret / name)


def shard(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in (("a.png", (path.parent / "a.png").read_bytes()), ("a.txt", b"a dog")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def link(data: Path, name: str, target: object, listed: str = "") -> None:
    """Replace a file or folder by a link, and list a file."""
    path = data / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(str(target))
    if listed:
        table(data, listed)


def chain(data: Path, secret: Path) -> None:
    link(data, "images/b.png", secret / "a.png")
    link(data, "images/a.png", "b.png", "images/a.png")


def precomp(data: Path, array: Path | None = None, captions: Path | None = None) -> None:
    np.save(data / "train_ims.npy", np.ones((2, 3), np.float32))
    (data / "train_caps.txt").write_text("a dog\n" * 2)
    if array:
        link(data, "train_ims.npy", array)
    if captions:
        link(data, "train_caps.txt", captions)


def msvd(data: Path, secret: Path, linked: str) -> None:
    for name, text in {
        "train_list.txt": "a\n",
        "val_list.txt": "",
        "test_list.txt": "",
        "AllVideoDescriptions.txt": "a a dog\n",
    }.items():
        (data / name).write_text(text)
    link(data, linked, secret / linked)


DATASETS: dict[str, Change] = {
    "parent": lambda data, secret: table(data, "../secret/a.png"),
    "parent of a subfolder": lambda data, secret: (
        (data / "images").mkdir(),
        table(data, "images/../../secret/a.png"),
    ),
    "parent with dots": lambda data, secret: table(data, "./../secret/./a.png"),
    "absolute": lambda data, secret: table(data, secret / "a.png"),
    "absolute with two slashes": lambda data, secret: table(data, f"/{secret}/a.png"),
    "hidden link": lambda data, secret: link(data, ".a.png", secret / "a.png", ".a.png"),
    "hidden linked folder": lambda data, secret: link(data, ".images", secret, ".images/a.png"),
    "Karpathy parent": lambda data, secret: karpathy(data, filename="a.png", filepath="../secret"),
    "Karpathy absolute": lambda data, secret: karpathy(
        data, filename="a.png", filepath=str(secret)
    ),
    "COCO parent": lambda data, secret: coco(data, "../secret/a.png"),
    "COCO absolute": lambda data, secret: coco(data, str(secret / "a.png")),
    "list of COCO": lambda data, secret: (
        coco(secret, "a.png"),
        link(data, "captions_val2017.json", secret / "captions_val2017.json"),
    ),
    "split table parent": lambda data, secret: (data / "train.csv").write_text(
        "image_path,caption\n../secret/a.png,a dog\n"
    ),
    "linked folder of a table": lambda data, secret: (
        (data / "captions.train").touch(),
        paint(secret / "table" / "a.png", RED),
        (secret / "table" / "metadata.csv").write_text("file_name,text\na.png,a dog\n"),
        link(data, "train", secret / "table"),
    ),
    "Parquet parent": lambda data, secret: image_table(
        data / "captions-train.parquet", "../secret/a.png"
    ),
    "Parquet path": lambda data, secret: image_table(
        data / "captions-train.parquet", {"bytes": None, "path": str(secret / "a.png")}
    ),
    "linked Parquet": lambda data, secret: linked_table(data, secret, "captions-train.parquet"),
    "linked Arrow": lambda data, secret: linked_table(data, secret, "captions-train.arrow"),
    "linked shard": lambda data, secret: (
        shard(secret / "train.tar"),
        link(data, "captions-train.tar", secret / "train.tar"),
    ),
    "archive": lambda data, secret: link(data, "all.tar", secret / "all.tar", "member.png"),
    "video parent": lambda data, secret: table(data, "../secret/a.mp4"),
    "video without a suffix": lambda data, secret: link(data, "clips/a.mp4", secret / "a.mp4", "a"),
    "list": lambda data, secret: (
        table(secret, "a.png"),
        link(data, "captions.csv", secret / "captions.csv"),
    ),
    "list of Karpathy": lambda data, secret: (
        karpathy(secret, filename="a.png"),
        link(data, "dataset_x.json", secret / "dataset_x.json"),
    ),
    "features": lambda data, secret: precomp(data, array=secret / "train_ims.npy"),
    "captions of features": lambda data, secret: precomp(data, captions=secret / "train_caps.txt"),
    "captions of videos": lambda data, secret: msvd(data, secret, "AllVideoDescriptions.txt"),
    "list of videos": lambda data, secret: msvd(data, secret, "train_list.txt"),
}
LINKS: dict[str, Change] = {
    "link": lambda data, secret: link(data, "a.png", secret / "a.png", "a.png"),
    "relative link": lambda data, secret: link(
        data, "images/a.png", "../../secret/a.png", "images/a.png"
    ),
    "chain of links": chain,
    "linked folder": lambda data, secret: link(data, "images", secret, "images/a.png"),
    "linked folder by base name": lambda data, secret: link(data, "images", secret, "a.png"),
    "deep linked folder": lambda data, secret: link(
        data, "one/two/three", secret.parent, "one/two/three/secret/a.png"
    ),
    "link with an image suffix to a folder": lambda data, secret: link(
        data, "images.png", secret, "images.png/a.png"
    ),
    "link to a link": lambda data, secret: (
        link(secret, "again", secret),
        link(data, "images", secret / "again", "images/a.png"),
    ),
    "video": lambda data, secret: link(data, "a.mp4", secret / "a.mp4", "a.mp4"),
}
LATER: dict[str, tuple[Change, Change]] = {
    "replaced image": (lambda data, _: paint(data / "a.png", BLUE), LINKS["link"]),
    "replaced image by a chain": (lambda data, _: paint(data / "images/a.png", BLUE), chain),
    "replaced link inside": (
        lambda data, _: (paint(data / "b.png", BLUE), link(data, "a.png", "b.png")),
        lambda data, secret: link(data, "a.png", secret / "a.png"),
    ),
    "replaced folder": (
        lambda data, _: paint(data / "images/a.png", BLUE),
        lambda data, secret: link(data, "images", secret),
    ),
    "replaced parent folder": (
        lambda data, _: paint(data / "one/secret/a.png", BLUE),
        lambda data, secret: link(data, "one", secret.parent),
    ),
    "replaced video": (lambda data, _: paint(data / "a.mp4", BLUE), LINKS["video"]),
}


@pytest.fixture
def secret(tmp_path) -> Path:
    secret = tmp_path / "secret"
    image = paint(secret / "a.png", RED)
    paint(secret / "a.mp4", RED)
    archive(secret / "all.tar", image, **{"member.png": b""})
    np.save(secret / "train_ims.npy", np.full((2, 3), 7, np.float32))
    (secret / "train_caps.txt").write_text(f"{SECRET_TEXT}\n" * 2)
    (secret / "train_list.txt").write_text("secret\n")
    (secret / "AllVideoDescriptions.txt").write_text(f"a {SECRET_TEXT}\nsecret {SECRET_TEXT}\n")
    return secret


@pytest.fixture
def data(tmp_path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def readers(location: ByteRange, item: IndexItem) -> Iterator[Callable[[], object]]:
    """All ways to read an image."""
    yield location.read
    yield lambda: render_jpeg(location, item, "thumbnail")
    yield lambda: ContentFingerprint.compute({"a": location})
    yield lambda: location.content_hash


def is_red(image: Image.Image) -> bool:
    red, _, blue = np.asarray(image).mean((0, 1))
    return bool(red > blue)


def leaks(source: Path, change: Callable[[], object] = lambda: None) -> list[str]:
    """What can be read of the secret in any way, after a change that is made while the source is
    open.
    """
    found, images = [], []
    for opened in (open_image_collection, lambda path: open_dataset(path, skip_bad=True)):
        with suppress(DataError):
            images += opened(source).images
    try:
        collection = list_source_files(source)
    except DataError:
        collection = None
    is_dataset = any(source.glob("captions*")) or any(source.glob("dataset*"))
    index = Index(
        source,
        IndexManifest("", "", 2, str(source), "", 5.0, is_dataset),
        None,
        None,
        list_readable_files,
    )  # type: ignore[arg-type]
    listed = {file.path: file.location for file in (collection.files if collection else ())}
    locations = {
        f"image {i}": image.location for i, image in enumerate(images) if image.location
    } | listed
    change()
    outside = [
        "../secret/a.png",
        str(source.parent / "secret/a.png"),
        "a.png",
        "images/a.png",
        "a.mp4",
        "images/a.mp4",
    ]
    for name in (*listed, *outside):
        item = IndexItem(name, name, "video" if name.endswith("mp4") else "image", "", 0, 0)
        with suppress(DataError):
            locations[f"index {name}"] = index.locate(item)
    for name, location in locations.items():
        item = IndexItem(name, name, "video" if ".mp4" in location.path.name else "image", "", 0, 0)
        for read in readers(location, item):
            try:
                read()
            except DataError as error:
                found += [str(error)] * (
                    storage.IMAGE_ROOTS not in str(error) and "cannot be read" not in str(error)
                )
            else:
                found += [name] * is_red(
                    Image.open(io.BytesIO(render_jpeg(location, item, "image")))
                )
    for image in images:
        if image.location:
            for decode in (image.preview, lambda image=image: image.frames(1.0)[0]):
                with suppress(DataError):
                    found += [f"decoded {image.name}"] * is_red(decode())
    return found


def text_leaks(source: Path) -> list[str]:
    """What can be read of lists and features."""
    try:
        data = open_dataset(source, skip_bad=True)
    except DataError as error:
        return [] if storage.IMAGE_ROOTS in str(error) else [str(error)]
    found = [caption for caption in data.captions if caption == SECRET_TEXT]
    if any(source.glob("*_ims.npy")):
        found += ["features"] * (
            ArrayFeatures.open_precomp(source).read([0]).vectors.max().item() == 7
        )
    return found + [image.name for image in data.images if image.name == "secret"]


TEXTS = ("features", "captions of features", "captions of videos", "list of videos")


@pytest.mark.parametrize("variant", [*DATASETS, *LINKS])
def test_dataset_refuses_outside_files(data, secret, variant, monkeypatch):
    (DATASETS | LINKS)[variant](data, secret)
    report = check_dataset(data)
    assert not report.ok
    assert storage.IMAGE_ROOTS in " ".join(map(str, report.findings))
    assert (text_leaks if variant in TEXTS else leaks)(data) == []
    monkeypatch.setenv(storage.IMAGE_ROOTS, f"{data}{os.pathsep}{secret}")
    if "list" not in variant:
        assert check_dataset(data).ok
    assert (
        "list of Karpathy" in variant
        or variant == "list"
        or (text_leaks if variant in TEXTS else leaks)(data)
    )


@pytest.mark.parametrize("variant", LATER)
def test_file_replaced_after_opening_is_not_read(data, secret, variant, monkeypatch):
    before, after = LATER[variant]
    before(data, secret)
    (file,) = list(data.rglob("a.*"))
    table(data, file.relative_to(data))
    assert check_dataset(data).ok
    assert leaks(data, lambda: after(data, secret)) == []
    assert not check_dataset(data).ok
    monkeypatch.setenv(storage.IMAGE_ROOTS, str(secret))
    assert leaks(data)


@pytest.mark.parametrize("variant", LINKS)
def test_folder_refuses_outside_files(data, secret, variant, monkeypatch):
    LINKS[variant](data, secret)
    (data / "captions.csv").unlink()
    paint(data / "own.png", BLUE)
    assert leaks(data) == []
    assert storage.IMAGE_ROOTS in " ".join(list_source_files(data).skipped)
    monkeypatch.setenv(storage.IMAGE_ROOTS, str(secret.parent))
    assert leaks(data)
    assert list_source_files(data).skipped == ()


@pytest.mark.parametrize("variant", LATER)
def test_folder_file_replaced_later_is_not_read(data, secret, variant):
    before, after = LATER[variant]
    before(data, secret)
    paint(data / "own.png", BLUE)

    def change():
        after(data, secret)
        (data / "captions.csv").unlink(missing_ok=True)

    assert leaks(data, change) == []


@pytest.mark.parametrize("name", ["../secret/a.png", "/etc/a.png", ">a.png", "=a.png", "../a.png"])
def test_archive_members_never_lead_outside(data, secret, name):
    """A member with such a name has the bytes in the archive. Links in archives are never followed."""
    paint(data.parent / "a.png", RED)
    content = paint(data.parent / "blue.png", BLUE)
    archive(data / "all.tar", content, **{name: str(secret / "a.png").encode()})
    table(data, name.lstrip(">="))
    assert check_dataset(data).ok == (name[0] not in ">=")
    assert leaks(data) == []


def test_archive_replaced_later_is_not_read(data, secret):
    archive(data / "all.tar", paint(data.parent / "blue.png", BLUE), **{"member.png": b""})
    table(data, "member.png")
    assert leaks(data, lambda: link(data, "all.tar", secret / "all.tar")) == []


def test_features_replaced_later_are_not_read(data, secret):
    precomp(data)
    assert text_leaks(data) == []
    precomp(data, array=secret / "train_ims.npy")
    with pytest.raises(DataError, match="points outside"):
        ArrayFeatures.open_precomp(data)


def test_links_inside_and_hard_links_are_read(data, secret):
    paint(data / "real/b.png", BLUE)
    os.link(secret / "a.png", data / "hard.png")
    link(data, "link.png", "real/b.png")
    link(data, "folder", data / "real")
    link(data.parent, "data-link", data)
    (data / "captions.csv").write_text("filename,caption\nhard.png,a\nlink.png,b\nfolder/b.png,c\n")
    for source in (data, data.parent / "data-link"):
        assert [image.open().size for image in open_dataset(source).images] == [(8, 8)] * 3


def test_open_file_without_proc_checks_identity(data, secret, monkeypatch):
    """Where the path of an open file is unknown, a link that is replaced while it is opened is
    detected by its identity.
    """
    paint(data / "a.png", BLUE)
    readlink, realpath = os.readlink, os.path.realpath
    monkeypatch.setattr(
        os, "readlink", lambda path: readlink(str(path).replace("/proc", "/nowhere"))
    )
    location = ByteRange(data / "a.png", root=data)
    assert location.read()
    link(data, "b.png", secret / "a.png")
    with pytest.raises(DataError, match="points outside"):
        ByteRange(data / "b.png", root=data).read()
    monkeypatch.setattr(
        os.path,
        "realpath",
        lambda path: realpath(data / "a.png" if str(path).endswith("b.png") else path),
    )
    with pytest.raises(DataError, match="replaced while it was opened"):
        ByteRange(data / "b.png", root=data).read()
