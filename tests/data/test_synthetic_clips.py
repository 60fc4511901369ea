"""Synthetic clips: reproducible, and each with a partner that has the same frames in another order."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from visavis.core.errors import DataError, RecipeError, RefusedOverwrite
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.expert_store import ExpertStore
from visavis.data.synthetic import ClipAnnotations, render_scene, write_synthetic_clips
from visavis.data.synthetic.clips import (
    ACTIONS,
    EXPERT_DIMS,
    ClipEvent,
    SyntheticClip,
    expert_features,
    partner_noise,
    sample_noise,
)
from visavis.data.synthetic.scene import SceneObject

SMALL = {"num_train": 40, "num_val": 10, "num_test": 10, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_synthetic_clips(tmp_path_factory.mktemp("moving") / "world", **SMALL)


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_synthetic_clips_are_reproducible(folder, tmp_path):
    assert digest(write_synthetic_clips(tmp_path / "again", **SMALL)) == digest(folder)
    assert digest(write_synthetic_clips(tmp_path / "other", **(SMALL | {"seed": 4}))) != digest(
        folder
    )


def test_synthetic_clips_are_a_data_set_with_experts(folder):
    data, store, truth = (
        open_dataset(folder),
        ExpertStore.open(folder / "experts"),
        ClipAnnotations.open(folder),
    )
    assert [len(data.split(name).images) for name in ("train", "val", "test")] == [40, 10, 10]
    assert tuple(image.name for image in data.images) == truth.names == tuple(store.items)
    assert store.embedding_dims == EXPERT_DIMS
    for i, clip in enumerate(truth.clips):
        lengths = {name: int(store.lengths(name)[i]) for name in EXPERT_DIMS}
        frames = len(clip.frames)
        expected = {"appearance": frames, "motion": frames - 1, "sound": frames}
        assert lengths == {
            name: 0 if name in truth.missing[i] else length for name, length in expected.items()
        }
    assert {"motion", "sound"} == {name for names in truth.missing for name in names}


def test_partner_clips_have_equal_averages(folder):
    store, truth = ExpertStore.open(folder / "experts"), ClipAnnotations.open(folder)
    assert set(truth.subset) == {"order", "direction"}
    read = store.read(np.arange(len(store)))
    for i, partner in enumerate(truth.partner_of):
        assert truth.partner_of[partner] == i != partner
        assert truth.clips[partner] == truth.clips[i].partner
        for name in EXPERT_DIMS:
            ours, theirs = (
                read.vectors[name][row][read.mask[name][row]].numpy() for row in (i, partner)
            )
            if name in truth.missing[i] or (
                name == "sound" and not any(sound for sound, _ in truth.clips[i].sounds)
            ):
                continue
            if name == "motion" and truth.subset[i] == "direction":
                assert np.abs(ours.mean(0) - theirs.mean(0)).max() > 0.1
                continue
            assert not np.array_equal(ours, theirs)
            np.testing.assert_array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_clip_captions_differ_from_those_of_the_partner(folder):
    data, truth = open_dataset(folder), ClipAnnotations.open(folder)
    for i, partner in enumerate(truth.partner_of):
        ours, theirs = (
            {data.captions[caption] for caption in data.captions_of[clip]} for clip in (i, partner)
        )
        assert len(ours) == 4
        assert not ours & theirs
        mentions_sound = any(
            f" {sound}" in caption
            for caption in ours
            for sound in ("bell", "drum", "whistle", "buzz", "splash")
        )
        assert not (mentions_sound and "sound" in truth.missing[i])


def test_synthetic_clip_captions_of_a_seed_are_pinned(folder):
    """Measurements on synthetic clips stay valid only if captions are equal."""
    text = "\n".join(open_dataset(folder).captions)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "53a469e8b08dcc41"


def test_event_restores_the_scene():
    things = (
        SceneObject("star", "red", "plain", "small", 0.35, 0.35),
        SceneObject("heart", "blue", "plain", "small", 0.65, 0.65),
    )
    for doing in ACTIONS:
        clip = SyntheticClip("paper", things, (ClipEvent(0, doing), ClipEvent(1, "up", "bell")))
        home, half, full, again = clip.frames[:4]
        assert home == again == clip.frames[-1]
        assert full != home
        assert full != half or doing in ("vanish", "change")
        assert [clip.frames[i] for i in clip.partner_frame_order] == list(clip.partner.frames)
        assert np.array(render_scene(full, 48)).shape == (48, 48, 3)


def test_expert_features_encode_motion_and_position():
    things = (
        SceneObject("star", "red", "plain", "small", 0.35, 0.35),
        SceneObject("heart", "blue", "plain", "small", 0.65, 0.65),
    )
    still = {name: np.zeros((7 - (name == "motion"), width)) for name, width in EXPERT_DIMS.items()}
    left, right = (
        expert_features(
            SyntheticClip("paper", things, (ClipEvent(0, doing), ClipEvent(1, "grow"))), still
        )
        for doing in ("left", "right")
    )
    assert np.abs(left["motion"][0] - right["motion"][0]).max() > 0.1
    np.testing.assert_array_equal(left["motion"][3:], right["motion"][3:])
    np.testing.assert_array_equal(left["appearance"][[0, 3]], right["appearance"][[0, 3]])
    assert not left["sound"].any()
    crossing = SyntheticClip("paper", things, (ClipEvent(0, "left", "drum"),), is_crossing=True)
    noise = sample_noise(crossing, np.random.default_rng(0))
    features, partner_features = (
        expert_features(crossing, noise),
        expert_features(crossing.partner, partner_noise(crossing, noise)),
    )
    np.testing.assert_array_equal(features["appearance"][::-1], partner_features["appearance"])
    assert crossing.partner.partner == crossing


def test_synthetic_clips_render_frames_of_given_size(tmp_path):
    folder = write_synthetic_clips(tmp_path / "world", num_train=2, num_val=0, num_test=0, size=32)
    truth = ClipAnnotations.open(folder)
    for name, clip in zip(truth.names, truth.clips, strict=True):
        frames = np.load(folder / "frames" / f"{name}.npy")
        np.testing.assert_array_equal(
            frames, np.stack([np.array(render_scene(scene, 32)) for scene in clip.frames])
        )
    assert len(open_dataset(folder).images) == 2


def test_synthetic_clips_refuse_numbers_out_of_range(tmp_path):
    for wrong, sentence in (
        ({"num_test": 3}, "num_test: expected an even integer >= 0"),
        ({"captions_per_clip": 0}, "captions_per_clip: expected a number from 1 to 10, got 0"),
        ({"size": 8}, "size: expected a number from 32 to 1024, got 8"),
        ({"seed": -1}, "seed: expected a number >= 0, got -1"),
    ):
        with pytest.raises(RecipeError, match=f"^{sentence}"):
            write_synthetic_clips(tmp_path / "world", **(SMALL | wrong))
    assert not (tmp_path / "world").exists()


def test_synthetic_clips_never_overwrite(folder, tmp_path):
    with pytest.raises(RefusedOverwrite):
        write_synthetic_clips(folder, **SMALL)
    with pytest.raises(DataError):
        ClipAnnotations.open(tmp_path)
    with pytest.raises(DataError, match="got 'flies'"):
        ClipEvent(0, "flies")
