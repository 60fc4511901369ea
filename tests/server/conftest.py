"""A collection with unusual files, indexes of it by two tiny models, and the server."""

from __future__ import annotations

import io
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from PIL import Image, ImageDraw, TiffImagePlugin
from tests.fixtures.recipes import write_recipe
from tests.processes import Command

import visavis
from visavis.data.synthetic import write_synthetic_scenes
from visavis.retrieval.open_index import open_index
from visavis.retrieval.server.application import create_app
from visavis.retrieval.server.search_service import ServedIndex
from visavis.retrieval.server.vote_store import open_votes

LATITUDE = (48.0, 8.0, 13.0)
MARKUP = '<img src=x onerror="document.title=`owned`">.png'
COLORS = ("red", "green", "blue", "orange", "purple", "teal")
SHAPES = ("circle", "square", "star")


def photo(
    color: str = "red", shape: str = "circle", size: tuple[int, int] = (64, 48), shift: int = 0
) -> Image.Image:
    """A shape on a white background."""
    image = Image.new("RGB", size, "white")
    box = (8 + shift % 5, 8, 40 + shift % 5, 40)
    pen = ImageDraw.Draw(image)
    if shape == "star":
        pen.polygon([(box[0], 40), (box[0] + 16, 6), (box[2], 40)], fill=color)
    else:
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=color)
    return image


def photo_with_exif(image: Image.Image) -> bytes:
    """A rotated JPEG with location, camera and comment, as phones write it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "SecretCamera"
    exif.get_ifd(0x8825).update(
        {1: "N", 2: tuple(TiffImagePlugin.IFDRational(part) for part in LATITUDE), 3: "E"}
    )
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif, comment=b"SecretComment", quality=95)
    return file.getvalue()


@pytest.fixture(scope="session")
def collection_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images, and a few unusual ones."""
    root = tmp_path_factory.mktemp("collection")
    for number in range(60):
        color, shape = COLORS[number % 6], SHAPES[number // 6 % 3]
        folder = root / ("trips" if number % 2 else "home/kitchen")
        folder.mkdir(parents=True, exist_ok=True)
        photo(color, shape, (64 + number % 7, 48), number).save(folder / f"{number:02}.png")
        os.utime(folder / f"{number:02}.png", (1_600_000_000 + 86_400 * number,) * 2)
    (root / "place.jpg").write_bytes(photo_with_exif(photo("green", "square", (160, 80))))
    photo("orange").save(root / MARKUP)
    photo("teal").save(root / "späte Blüte 東京 🌸.png")
    frames = [photo(color, "star") for color in COLORS]
    frames[0].save(root / "animated.gif", save_all=True, append_images=frames[1:])
    photo("purple").save(root / "leaves.png")
    return root


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small models with little training. The second was also trained for 8 dimensions."""
    root = tmp_path_factory.mktemp("runs")
    # The tests of pages and limits depend on which photos these models find equal.
    scenes = write_synthetic_scenes(
        root / "scenes", num_train=24, num_val=4, num_test=4, captions_per_image=3, size=32
    )
    recipe = write_recipe(
        root / "recipe.toml",
        {"epochs": 4, "objective": "Unified(gamma=30)", "optimizer": {"lr": 0.01}},
        name="small",
        model={"embedding_dim": 16, "word_dim": 8},
        training={"batch_size": 24},
    )
    for name in ("one", "two"):
        visavis.train(
            recipe,
            data=scenes,
            out=root / name,
            overrides=[f"seed={len(name) + ord(name[0])}"]
            + ["matryoshka_dims=[8]"] * (name == "two"),
        )
    return [root / "one", root / "two"]


@pytest.fixture(scope="session")
def indexes(
    collection_folder: Path, runs: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """An index of the collection by each model. One image was then replaced by a link that points
    outside.
    """
    root = tmp_path_factory.mktemp("indexes")
    for run in runs:
        visavis.index(run, collection_folder, out=root / run.name)
    (collection_folder / "leaves.png").unlink()
    outside = collection_folder.parent / "outside.png"
    photo("red").save(outside)
    (collection_folder / "leaves.png").symlink_to(outside)
    return [root / run.name for run in runs]


@pytest.fixture(scope="session")
def index_folder(indexes: list[Path]) -> Path:
    return indexes[0]


@pytest.fixture(scope="session")
def collection(index_folder: Path) -> ServedIndex:
    return ServedIndex(open_index(index_folder))


@pytest.fixture(scope="session")
def other_collection(indexes: list[Path]) -> ServedIndex:
    return ServedIndex(open_index(indexes[1]))


def remove_votes(folder: Path) -> None:
    """Remove all votes from an index that tests share."""
    with open_votes(folder) as votes:
        votes.connection.execute("DELETE FROM votes")
        votes.connection.execute("DELETE FROM preferences")


@pytest.fixture
def client(collection: ServedIndex) -> Iterator[TestClient]:
    """A client of a loopback server that saves votes, of which there are none yet."""
    remove_votes(collection.index.folder)
    app = create_app([collection], saves_votes=True)
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="session")
def shared_client(collection: ServedIndex) -> Iterator[TestClient]:
    """A client of a loopback server, for tests that leave no votes."""
    app = create_app([collection], saves_votes=True)
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@contextmanager
def served(*arguments: str | Path) -> Iterator[tuple[str, Command]]:
    """The address and the process of ``visavis serve``, which is stopped on exit."""
    with tempfile.TemporaryDirectory() as folder:
        process = Command(Path(folder) / "output", "serve", *arguments, "--port", "0")
        try:
            deadline = time.monotonic() + 60
            while (address := re.search(r" at (http\S+)\s", process.output_text)) is None:
                assert time.monotonic() < deadline, (
                    f"the server does not respond: {process.output_text}"
                )
                assert not process.ended, f"the server stopped: {process.output_text}"
                time.sleep(0.02)
            yield address[1], process
        finally:
            process.send(signal.SIGINT)
            try:
                process.wait(15)
            except AssertionError:
                process.send(signal.SIGKILL)
                process.wait(15)
