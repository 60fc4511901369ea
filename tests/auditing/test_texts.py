"""Captions as texts: those that fit many pictures, those unlike their siblings."""

import numpy as np
import pytest
import torch

from visavis.auditing.siblings import Siblings, mean_of_others, other_pictures
from visavis.auditing.texts import audit_captions
from visavis.auditing.vectors import word_vectors
from visavis.data.dataset import Dataset, Image

ANIMALS = ["dog", "cat", "horse", "cow", "bird", "fox", "bear", "duck", "goat", "mouse"]
PLACES = ["beach", "street", "forest", "kitchen", "meadow", "river", "roof", "garden", "barn", "hill"]
COLORS = ["red", "blue", "green", "gray", "white", "black", "brown"]


def said(index, verb):
    return f"the {COLORS[index % 7]} {ANIMALS[index % 10]} {verb} {PLACES[index // 10]}"


def data_of(captions):
    """A data set of pictures, each with a list of captions."""
    image_of = np.repeat(np.arange(len(captions)), [len(own) for own in captions])
    images = tuple(Image(f"{number}.jpg", "train") for number in range(len(captions)))
    return Dataset("texts", images, tuple(text for own in captions for text in own), image_of)


def audited(captions):
    data = data_of(captions)
    return audit_captions(data, word_vectors(data.captions), "words", np.arange(len(data.images)))


def test_siblings_are_those_that_one_would_count_by_hand():
    own = torch.tensor([0, 0, 1, 1, 1, 2, 0])
    image = torch.tensor([0, 1, 1, 2, 0, 0, 2])
    vectors = torch.nn.functional.normalize(torch.randn(7, 5, dtype=torch.float64), dim=1)
    values = torch.randn(7, dtype=torch.float64)
    siblings, means = Siblings.of(vectors, own, image), mean_of_others(values, own, image)
    for caption in range(7):
        others = [other for other in range(7) if own[other] == image[caption] and other != caption]
        others = others if own[caption] == image[caption] else others[:-1]
        cosines = [vectors[i] @ vectors[j] for i in others for j in others if i != j]
        expected = (
            np.mean([vectors[caption] @ vectors[other] for other in others]) if others else np.nan,
            np.mean(cosines) if cosines else np.nan,
            np.mean([values[other] for other in others]) if others else np.nan,
        )
        found = (siblings.agreement[caption].item(), siblings.among[caption].item(), means[caption].item())
        assert found == pytest.approx(expected, nan_ok=True)


def test_another_picture_is_never_a_copy_of_the_own():
    groups, own = np.array([0, 0, 1, 2]), np.repeat(np.arange(4), 50)
    assert (groups[other_pictures(own, groups, 0)] != groups[own]).all()


def test_a_caption_of_many_pictures_is_found():
    captions = [[said(i, "sits near a"), said(i, "seen at the"), said(i, "by a quiet")] for i in range(100)]
    for i in range(8):
        captions[i][1] = "A nice picture!" if i % 2 else "a nice picture"
    report = audited(captions)
    assert (report.num_generic, len(report.generic), report.shared) == (8, 1, 8)
    assert (report.generic[0].pictures, report.generic[0].copies) == (7, 7)
    assert [concern.alarm for concern in report.concerns() if concern.kind == "captions that fit many pictures"] == [True]


def test_captions_of_other_pictures_are_found_and_healthy_ones_raise_no_alarm():
    captions = [[said(i, "sits near a"), said(i, "seen at the"), said(i, "by a quiet")] for i in range(100)]
    healthy = audited(captions)
    assert not any(concern.alarm for concern in healthy.concerns())
    wrong = {i: said(i + 41, "sits near a") for i in range(10)}
    for i, text in wrong.items():
        captions[i][0] = text
    report = audited(captions)
    found = {(odd.image, odd.caption) for odd in report.odd}
    planted = {(f"{i}.jpg", text) for i, text in wrong.items()}
    first = [(odd.image, odd.caption) in planted for odd in report.odd[:10]]
    assert sum(first) >= 8
    assert len(found & planted) >= 9
    assert len(found & planted) >= 0.4 * len(found)  # the list goes on to where one half is expected to be wrong
    assert report.share == pytest.approx(10 / 300, abs=0.02)


def test_of_two_captions_it_is_not_told_which_is_odd():
    captions = [[said(i, "sits near a"), said(i, "seen at the")] for i in range(50)]
    captions[0][0] = said(77, "sits near a")
    assert audited(captions).odd == ()
