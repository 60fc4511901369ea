"""Moving scenes: the same every time, and of every clip another one with the same frames in another order."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from visavis.data import open_dataset
from visavis.data.experts import ExpertStore
from visavis.data.scenes import MovingScenes, draw, write_moving_scenes
from visavis.data.scenes.moving.clips import DOINGS, Clip, Event
from visavis.data.scenes.moving.senses import WIDTHS, draw_noise, noise_of_partner, sense
from visavis.data.scenes.world import Thing
from visavis.errors import DataError, RecipeError, RefusedOverwrite

SMALL = {"num_train": 40, "num_val": 10, "num_test": 10, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_moving_scenes(tmp_path_factory.mktemp("moving") / "world", **SMALL)


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_arguments_give_the_same_bytes_and_another_seed_another_world(folder, tmp_path):
    assert digest(write_moving_scenes(tmp_path / "again", **SMALL)) == digest(folder)
    assert digest(write_moving_scenes(tmp_path / "other", **(SMALL | {"seed": 4}))) != digest(folder)


def test_it_is_a_data_set_with_a_store_of_experts_some_of_them_missing(folder):
    data, store, truth = open_dataset(folder), ExpertStore.open(folder / "experts"), MovingScenes.open(folder)
    assert [len(data.split(name).images) for name in ("train", "val", "test")] == [40, 10, 10]
    assert tuple(image.name for image in data.images) == truth.names == tuple(store.items)
    assert store.widths == WIDTHS
    for i, clip in enumerate(truth.clips):
        lengths = {name: int(store.lengths(name)[i]) for name in WIDTHS}
        frames = len(clip.frames)
        expected = {"appearance": frames, "motion": frames - 1, "sound": frames}
        assert lengths == {name: 0 if name in truth.missing[i] else length for name, length in expected.items()}
    assert {"motion", "sound"} == {name for names in truth.missing for name in names}


def test_averages_over_time_cannot_tell_a_clip_from_its_partner(folder):
    store, truth = ExpertStore.open(folder / "experts"), MovingScenes.open(folder)
    assert set(truth.subset) == {"order", "direction"}
    read = store.read(np.arange(len(store)))
    for i, partner in enumerate(truth.partner_of):
        assert truth.partner_of[partner] == i != partner
        assert truth.clips[partner] == truth.clips[i].partner
        for name in WIDTHS:
            ours, theirs = (read.vectors[name][row][read.mask[name][row]].numpy() for row in (i, partner))
            if name in truth.missing[i] or (name == "sound" and not any(sound for sound, _ in truth.clips[i].sounds)):
                continue
            if name == "motion" and truth.subset[i] == "direction":
                assert np.abs(ours.mean(0) - theirs.mean(0)).max() > 0.1
                continue
            assert not np.array_equal(ours, theirs)
            np.testing.assert_array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_no_caption_of_a_clip_is_one_of_its_partner_and_sounds_are_told_only_where_they_are_heard(folder):
    data, truth = open_dataset(folder), MovingScenes.open(folder)
    for i, partner in enumerate(truth.partner_of):
        ours, theirs = ({data.captions[caption] for caption in data.captions_of[clip]} for clip in (i, partner))
        assert len(ours) == 4
        assert not ours & theirs
        heard = any(f" {sound}" in caption for caption in ours for sound in ("bell", "drum", "whistle", "buzz", "splash"))
        assert not (heard and "sound" in truth.missing[i])


@pytest.mark.parametrize("doing", DOINGS)
def test_an_event_begins_and_ends_at_home_and_changes_something_between(doing):
    things = (Thing("star", "red", "plain", "small", 0.35, 0.35), Thing("heart", "blue", "plain", "small", 0.65, 0.65))
    clip = Clip("paper", things, (Event(0, doing), Event(1, "up", "bell")))
    home, half, full, again = clip.frames[:4]
    assert home == again == clip.frames[-1]
    assert full != home
    assert full != half or doing in ("vanish", "change")
    assert [clip.frames[i] for i in clip.order_of_partner] == list(clip.partner.frames)
    assert np.array(draw(full, 48)).shape == (48, 48, 3)


def test_motion_says_what_goes_which_way_and_appearance_where():
    things = (Thing("star", "red", "plain", "small", 0.35, 0.35), Thing("heart", "blue", "plain", "small", 0.65, 0.65))
    still = {name: np.zeros((7 - (name == "motion"), width)) for name, width in WIDTHS.items()}
    left, right = (sense(Clip("paper", things, (Event(0, doing), Event(1, "grow"))), still) for doing in ("left", "right"))
    assert np.abs(left["motion"][0] - right["motion"][0]).max() > 0.1
    np.testing.assert_array_equal(left["motion"][3:], right["motion"][3:])
    np.testing.assert_array_equal(left["appearance"][[0, 3]], right["appearance"][[0, 3]])
    assert not left["sound"].any()
    crossing = Clip("paper", things, (Event(0, "left", "drum"),), crossing=True)
    noise = draw_noise(crossing, np.random.default_rng(0))
    forth, back = sense(crossing, noise), sense(crossing.partner, noise_of_partner(crossing, noise))
    np.testing.assert_array_equal(forth["appearance"][::-1], back["appearance"])
    assert crossing.partner.partner == crossing


def test_frames_are_drawn_where_a_size_is_given(tmp_path):
    folder = write_moving_scenes(tmp_path / "world", num_train=2, num_val=0, num_test=0, size=32)
    truth = MovingScenes.open(folder)
    for name, clip in zip(truth.names, truth.clips, strict=True):
        frames = np.load(folder / "frames" / f"{name}.npy")
        np.testing.assert_array_equal(frames, np.stack([np.array(draw(scene, 32)) for scene in clip.frames]))
    assert len(open_dataset(folder).images) == 2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"num_test": 3}, "num_test=3 is no number of clips that come in pairs: give an even one, 0 or more"),
        ({"captions_per_clip": 0}, "captions_per_clip=0 is out of range"),
        ({"size": 8}, "size=8 is out of range"),
        ({"seed": -1}, "seed=-1 is negative"),
    ],
)
def test_numbers_out_of_range_are_one_sentence(wrong, sentence, tmp_path):
    with pytest.raises(RecipeError, match=f"^{sentence}"):
        write_moving_scenes(tmp_path / "world", **(SMALL | wrong))
    assert not (tmp_path / "world").exists()


def test_what_stands_there_is_kept_and_what_is_not_there_is_said(folder, tmp_path):
    with pytest.raises(RefusedOverwrite):
        write_moving_scenes(folder, **SMALL)
    with pytest.raises(DataError):
        MovingScenes.open(tmp_path)
    with pytest.raises(DataError, match="an event is 'flies'"):
        Event(0, "flies")
