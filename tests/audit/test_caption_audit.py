"""Audit of captions: generic captions, and captions unlike their siblings."""

import numpy as np
import pytest
import torch

from visavis.data.dataset import Dataset
from visavis.data.image_file import Image
from visavis.research.audit.audit_part import tfidf_vectors
from visavis.research.audit.caption_audit import (
    audit_captions,
    sample_other_images,
    sibling_agreement,
    sibling_mean,
)

ANIMALS = ["dog", "cat", "horse", "cow", "bird", "fox", "bear", "duck", "goat", "mouse"]
PLACES = [
    "beach",
    "street",
    "forest",
    "kitchen",
    "meadow",
    "river",
    "roof",
    "garden",
    "barn",
    "hill",
]
COLORS = ["red", "blue", "green", "gray", "white", "black", "brown"]


def make_caption(index, verb):
    return f"the {COLORS[index % 7]} {ANIMALS[index % 10]} {verb} {PLACES[index // 10]}"


def data_of(captions):
    """Return a data set with a list of captions for each image."""
    image_of = np.repeat(np.arange(len(captions)), [len(texts) for texts in captions])
    images = tuple(Image(f"{number}.jpg", "train") for number in range(len(captions)))
    return Dataset("texts", images, tuple(text for texts in captions for text in texts), image_of)


def audited(captions):
    data = data_of(captions)
    return audit_captions(data, tfidf_vectors(data.captions), "words", np.arange(len(data.images)))


def test_sibling_agreement_equals_loop():
    image_of = torch.tensor([0, 0, 1, 1, 1, 2, 0])
    assigned = torch.tensor([0, 1, 1, 2, 0, 0, 2])
    vectors = torch.nn.functional.normalize(torch.randn(7, 5, dtype=torch.float64), dim=1)
    values = torch.randn(7, dtype=torch.float64)
    siblings, means = (
        sibling_agreement(vectors, image_of, assigned),
        sibling_mean(values, image_of, assigned),
    )
    for caption in range(7):
        others = [
            other for other in range(7) if image_of[other] == assigned[caption] and other != caption
        ]
        others = others if image_of[caption] == assigned[caption] else others[:-1]
        cosines = [vectors[i] @ vectors[j] for i in others for j in others if i != j]
        expected = (
            np.mean([vectors[caption] @ vectors[other] for other in others]) if others else np.nan,
            np.mean(cosines) if cosines else np.nan,
            np.mean([values[other] for other in others]) if others else np.nan,
        )
        found = (*siblings[caption].tolist(), means[caption].item())
        assert found == pytest.approx(expected, nan_ok=True)


def test_sample_other_images_avoids_copies():
    groups, image_of = np.array([0, 0, 1, 2]), np.repeat(np.arange(4), 50)
    assert (groups[sample_other_images(image_of, groups, 0)] != groups[image_of]).all()


def test_audit_captions_finds_generic_caption():
    captions = [
        [
            make_caption(i, "sits near a"),
            make_caption(i, "seen at the"),
            make_caption(i, "by a quiet"),
        ]
        for i in range(100)
    ]
    for i in range(8):
        captions[i][1] = "A nice photo!" if i % 2 else "a nice photo"
    report = audited(captions)
    assert (report.num_generic, len(report.generic), report.num_shared) == (8, 1, 8)
    assert (report.generic[0].num_other_images, report.generic[0].num_exact_copies) == (7, 7)
    assert [
        issue.serious for issue in report.issues() if issue.kind == "captions that fit many images"
    ] == [True]


def test_audit_captions_finds_planted_outliers():
    captions = [
        [
            make_caption(i, "sits near a"),
            make_caption(i, "seen at the"),
            make_caption(i, "by a quiet"),
        ]
        for i in range(100)
    ]
    healthy = audited(captions)
    assert not any(issue.serious for issue in healthy.issues())
    wrong = {i: make_caption(i + 41, "sits near a") for i in range(10)}
    for i, text in wrong.items():
        captions[i][0] = text
    report = audited(captions)
    found = {(outlier.image, outlier.caption) for outlier in report.outliers}
    planted = {(f"{i}.jpg", text) for i, text in wrong.items()}
    first = [(outlier.image, outlier.caption) in planted for outlier in report.outliers[:10]]
    assert sum(first) >= 8
    assert len(found & planted) >= 9
    assert len(found & planted) >= 0.4 * len(
        found
    )  # the list ends where half of it is expected to be wrong
    assert report.outlier_ratio == pytest.approx(10 / 300, abs=0.02)


def test_audit_captions_needs_three_captions_for_outliers():
    captions = [[make_caption(i, "sits near a"), make_caption(i, "seen at the")] for i in range(50)]
    captions[0][0] = make_caption(77, "sits near a")
    assert audited(captions).outliers == ()
