"""Near-duplicates: what agrees with what, and planted copies that are all found, and nothing else."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.auditing.alignment import aligned
from visavis.auditing.neighbors import nearest_others, pairs_above
from visavis.auditing.pictures import Pictures, own_copies
from visavis.data.scenes import write_scenes

WORDS = {"recipe": "photos/frozen-words", "overrides": {"visual.tower": "scenes", "text.min_count": 1}}
NUM_PLANTED = 16


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("world") / "scenes", num_train=60, num_val=5, num_test=15, captions_per_image=1, size=96)


@pytest.fixture(scope="module")
def pictures(world):
    return [Image.open(path).convert("RGB") for path in sorted((world / "images").iterdir())]


@pytest.fixture(scope="module")
def planted(world, pictures):
    """The world with copies of training images: recompressed, halved, cropped, and all of these, in train and in test."""
    random = np.random.default_rng(1)
    rows = [json.loads(line) for line in (world / "captions.jsonl").read_text().splitlines()]
    folder, pairs = world.parent / "planted", set()
    (folder / "images").mkdir(parents=True)
    for row in rows:
        (folder / row["filename"]).write_bytes((world / row["filename"]).read_bytes())
    for number, origin in enumerate(random.choice(60, NUM_PLANTED, replace=False)):
        name = f"images/copy{number}.{'png' if number % 2 else 'jpg'}"
        own_copies(pictures[origin], random)[number % 4].save(folder / name)
        rows.append({"filename": name, "split": "test" if number < 10 else "train", "captions": [f"a copy of number {origin}"]})
        pairs.add(frozenset((name, rows[origin]["filename"])))
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, pairs


def test_a_picture_agrees_with_itself_and_its_parts_and_not_with_others(pictures):
    small = Pictures.of(pictures[:20]).small
    assert aligned(small, small).min() > 0.9999
    cropped = Pictures.of([picture.crop((5, 2, 92, 94)) for picture in pictures[:20]]).small
    agree = aligned(small, cropped)
    torch.testing.assert_close(agree, aligned(cropped, small))
    assert agree.min() > 0.97
    assert aligned(small, small.roll(1, 0)).max() < 0.95


def test_a_flat_picture_agrees_with_nothing():
    flat = torch.full((1, 3, 48, 48), 200, dtype=torch.uint8)
    noise = torch.randint(0, 256, (1, 3, 48, 48), dtype=torch.uint8)
    assert aligned(flat, flat).item() < 0.5
    assert aligned(flat, noise).item() < 0.5


def test_nearest_others_are_those_of_the_whole_matrix():
    vectors = torch.nn.functional.normalize(torch.randn(300, 8), dim=1)
    scores = vectors @ vectors.T - 2 * torch.eye(300)
    values, places = nearest_others(vectors, 3)
    torch.testing.assert_close(values, scores.topk(3).values)
    assert torch.equal(places[:, 0], scores.argmax(1))
    found = {tuple(pair) for pair in pairs_above(vectors, 0.9, 299).tolist()}
    assert found == {(i, j) for i, j in (scores >= 0.9).nonzero().tolist() if i < j}


def test_planted_copies_are_found_and_nothing_else(planted):
    """Precision 1 and recall of at least 14 of 16: recompressed, halved, cropped by up to 8 % of each side, and all of these."""
    folder, pairs = planted
    audit = visavis.data_audit(folder, part=["duplicates"], **WORDS)
    copies = [pair for pair in audit.duplicates.pairs if pair.kind == "copy"]
    assert {frozenset((pair.first, pair.second)) for pair in copies} <= pairs
    assert len(copies) >= 14
    leaked = sum(set(pair.splits) == {"train", "test"} for pair in copies)
    assert audit.duplicates.leaked == {"test": leaked}
    assert leaked >= 8
    assert (audit.duplicates.copies, audit.duplicates.groups) == (2 * len(copies), len(copies))
    assert audit.duplicates.thresholds.found > 0.85
    assert [concern.kind for concern in audit.concerns if concern.alarm] == ["copies across splits", "copies in one split"]
    assert f"{leaked} of the 25 test images have a copy in train" in audit.concerns[0].what
    assert not audit.ok
    again = visavis.data_audit(folder, part=["duplicates"], **WORDS)
    assert again.duplicates == audit.duplicates


def test_a_healthy_world_has_no_copies(world):
    audit = visavis.data_audit(world, part=["duplicates"], **WORDS)
    assert [pair for pair in audit.duplicates.pairs if pair.kind == "copy"] == []
    assert audit.ok
