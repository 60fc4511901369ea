"""Near-duplicates: alignment of crops, nearest neighbors, and planted copies."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.data.synthetic import write_synthetic_scenes
from visavis.research.audit.duplicates import (
    ImageThumbnails,
    aligned_correlation,
    make_copies,
    pairs_above_threshold,
)

WORDS = {
    "recipe": "photos/frozen-words",
    "overrides": {"visual.encoder": "scenes", "text.min_count": 1},
}
NUM_PLANTED = 16


@pytest.fixture(scope="module")
def large_scenes(tmp_path_factory):
    return write_synthetic_scenes(
        tmp_path_factory.mktemp("scenes") / "scenes",
        num_train=60,
        num_val=5,
        num_test=15,
        captions_per_image=1,
        size=96,
    )


@pytest.fixture(scope="module")
def images(large_scenes):
    return [Image.open(path).convert("RGB") for path in sorted((large_scenes / "images").iterdir())]


@pytest.fixture(scope="module")
def planted(large_scenes, images):
    """The synthetic scenes with copies of training images: recompressed, halved, cropped, and all
    of these, in train and in test.
    """
    random = np.random.default_rng(1)
    rows = [json.loads(line) for line in (large_scenes / "captions.jsonl").read_text().splitlines()]
    folder, pairs = large_scenes.parent / "planted", set()
    (folder / "images").mkdir(parents=True)
    for row in rows:
        (folder / row["filename"]).write_bytes((large_scenes / row["filename"]).read_bytes())
    for number, origin in enumerate(random.choice(60, NUM_PLANTED, replace=False)):
        name = f"images/copy{number}.{'png' if number % 2 else 'jpg'}"
        make_copies(images[origin], random)[number % 4].save(folder / name)
        rows.append(
            {
                "filename": name,
                "split": "test" if number < 10 else "train",
                "captions": [f"a copy of number {origin}"],
            }
        )
        pairs.add(frozenset((name, rows[origin]["filename"])))
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, pairs


def test_alignment_finds_crops_and_no_other_images(images):
    small = ImageThumbnails.from_images(images[:20]).thumbnails
    assert aligned_correlation(small, small).min() > 0.9999
    cropped = ImageThumbnails.from_images(
        [image.crop((5, 2, 92, 94)) for image in images[:20]]
    ).thumbnails
    correlation = aligned_correlation(small, cropped)
    torch.testing.assert_close(correlation, aligned_correlation(cropped, small))
    assert correlation.min() > 0.97
    assert aligned_correlation(small, small.roll(1, 0)).max() < 0.95


def test_alignment_of_flat_images_is_low():
    flat = torch.full((1, 3, 48, 48), 200, dtype=torch.uint8)
    noise = torch.randint(0, 256, (1, 3, 48, 48), dtype=torch.uint8)
    assert aligned_correlation(flat, flat).item() < 0.5
    assert aligned_correlation(flat, noise).item() < 0.5


def test_pairs_above_threshold_equal_those_of_full_matrix():
    vectors = torch.nn.functional.normalize(torch.randn(300, 8), dim=1)
    scores = vectors @ vectors.T - 2 * torch.eye(300)
    nearest = scores.topk(3).indices.tolist()
    found = {tuple(pair) for pair in pairs_above_threshold(vectors, -2.0, 3).tolist()}
    assert found == {
        (min(i, j), max(i, j)) for i, neighbors in enumerate(nearest) for j in neighbors
    }
    assert len(pairs_above_threshold(vectors[:1], -2.0, 3)) == 0
    found = {tuple(pair) for pair in pairs_above_threshold(vectors, 0.9, 299).tolist()}
    assert found == {(i, j) for i, j in (scores >= 0.9).nonzero().tolist() if i < j}


@pytest.mark.slow
def test_duplicates_finds_exactly_planted_copies(planted):
    """Precision 1 and recall of at least 14 of 16: recompressed, halved, cropped by up to 8 % of
    each side, and all of these.
    """
    folder, pairs = planted
    audit = visavis.data_audit(folder, parts=["duplicates"], **WORDS)
    copies = [pair for pair in audit.duplicates.pairs if pair.kind == "copy"]
    assert {frozenset((pair.first, pair.second)) for pair in copies} <= pairs
    assert len(copies) >= 14
    num_leaked = sum(set(pair.splits) == {"train", "test"} for pair in copies)
    assert audit.duplicates.copies_in_train == {"test": num_leaked}
    assert num_leaked >= 8
    assert (audit.duplicates.copies, audit.duplicates.groups) == (2 * len(copies), len(copies))
    assert audit.duplicates.thresholds.recall > 0.85
    assert [issue.kind for issue in audit.issues if issue.serious] == [
        "copies across splits",
        "copies in one split",
    ]
    assert f"{num_leaked} of the 25 test images have a copy in train" in audit.issues[0].description
    assert not audit.ok
    again = visavis.data_audit(folder, parts=["duplicates"], **WORDS)
    assert again.duplicates == audit.duplicates


@pytest.mark.slow
def test_duplicates_of_clean_scenes_are_empty(large_scenes):
    audit = visavis.data_audit(large_scenes, parts=["duplicates"], **WORDS)
    assert [pair for pair in audit.duplicates.pairs if pair.kind == "copy"] == []
    assert audit.ok
