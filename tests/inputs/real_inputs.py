"""Real files of ``VISAVIS_DATA`` with damaged bytes: photos, published lists, ratings and vectors.
Without this folder, these kinds are left out.
"""

from __future__ import annotations

import os
import random
import shutil
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.inputs.cases import REAL_DATA, Case, Kind
from tests.inputs.image_inputs import check_sizes, read_everything
from tests.mutation import damaged

from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.papers.relevance.caption_estimators import read_word_vectors
from visavis.papers.relevance.human_agreement import read_stsb

NUM_PHOTOS = 30
MAX_BYTES = 60_000


def real_data() -> Path:
    """The folder of real data sets."""
    return Path(os.environ.get(REAL_DATA) or os.environ.get("VISAVIS_DATA", "") or "none")


def prepare_photos(_: Path) -> list[bytes]:
    """The first photos of Flickr8k."""
    photos = []
    with tarfile.open(real_data() / "flickr8k" / "test-0000.tar") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if member.name.endswith(".jpg") and file is not None:
                photos.append(file.read())
            if len(photos) == NUM_PHOTOS:
                break
    return photos


def make_photo(rng: random.Random, folder: Path, photos: list[bytes]) -> Case:
    """A photo with damaged bytes, more often in its header."""
    content = rng.choice(photos)
    head = rng.choice([len(content), 1000])
    content = damaged(content[:head], rng) + content[head:]
    (folder / "photo.jpg").write_bytes(content)
    return Case(partial(read_everything, content, "photo.jpg"), check=check_sizes)


def read_lists(folder: Path) -> None:
    """Check a list and its archive, and open it."""
    check_dataset(folder)
    data = open_dataset(folder, skip_bad=True)
    assert len(data.captions) == len(data.image_of)


def make_list(rng: random.Random, folder: Path, _: Any) -> Case:
    """The list or the archive of MSVD, or the beginning of a list of Flickr30k."""
    if rng.random() < 0.7:
        source = real_data() / "msvd_mini"
        names = ["dataset_msvd_mini.json", "frames-0000.tar"]
        for name in names:
            shutil.copy(source / name, folder)
        path = folder / rng.choice(names)
        path.chmod(0o644)
        path.write_bytes(damaged(path.read_bytes(), rng))
    else:
        source = real_data() / "flickr30k_text" / "dataset_flickr30k_val_test.json"
        text = source.read_text()[:MAX_BYTES]
        text = text[: text.rindex(',{"imgid":')] + "]}"
        (folder / "dataset_flickr30k.json").write_bytes(damaged(text.encode(), rng))
    return Case(partial(read_lists, folder))


def make_text(rng: random.Random, folder: Path, _: Any) -> Case:
    """The ratings of STS-B, or vectors of GloVe."""
    source = rng.choice(["stsb/sts-dev.tsv", "glove/glove.6B.50d.captions.txt"])
    content = (real_data() / source).read_bytes()[:MAX_BYTES]
    content = damaged(content[: content.rindex(b"\n") + 1], rng)
    path = folder / Path(source).name
    path.write_bytes(content)
    if path.suffix == ".tsv":
        return Case(partial(read_stsb, "dev", folder), note=source)
    return Case(partial(read_word_vectors, path, {"dog", "cat", "the"}), note=source)


KINDS = [
    Kind("real photos", make_photo, prepare_photos, 250),
    Kind("real lists", make_list, inputs=150),
    Kind("real texts", make_text, inputs=150),
]
