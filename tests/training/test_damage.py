"""Checkpoints and models that are no longer what was written: told in one sentence, and where there is a whole one, gone on from there."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import visavis
from visavis import storage
from visavis.errors import RunError
from visavis.training.checkpoint import HASHES, Checkpoint, complete

PARTS = ("weights.safetensors", "best.safetensors", "optimizer.safetensors", "metrics.jsonl", "state.json", HASHES)


def flip(file: Path, seed: int) -> None:
    """Change one bit, somewhere behind the names and shapes of tensors."""
    content, chance = bytearray(file.read_bytes()), random.Random(seed)
    first = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else 0
    content[chance.randrange(first, len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "damage", [flip, lambda file, _: file.unlink(), lambda file, _: file.write_bytes(b"")], ids=["flip", "remove", "empty"]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it_and_that_is_said(finished, listener, part, damage):
    older, newest = complete(finished / "checkpoint")
    damage(newest / part, PARTS.index(part))
    found = Checkpoint.latest(finished / "checkpoint", listener)
    if part in ("state.json", HASHES) and not (newest / part).exists():
        assert (found.folder, listener.said) == ((newest if part == HASHES else older), []), "it is not complete, or of an earlier version"
        return
    assert found.folder == older
    (sentence,) = listener.said
    assert re.search(rf"{newest.name}.* The checkpoint before it is taken, {older.name}\.$", sentence)


@pytest.fixture
def finished(uninterrupted, tmp_path) -> Path:
    return Path(shutil.copytree(uninterrupted(False), tmp_path / "copy"))


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_to_the_very_same_end(stopped, uninterrupted, outcome, listener):
    older, newest = complete(stopped / "checkpoint")
    flip(newest / "weights.safetensors", 0)
    visavis.train(resume=stopped, progress=listener)
    assert any(f"{newest}/weights.safetensors is damaged" in sentence and older.name in sentence for sentence in listener.said)
    assert outcome(stopped) == outcome(uninterrupted(False))


def test_a_log_without_end_is_passed_over_unread(stopped, listener):
    older, newest = complete(stopped / "checkpoint")
    os.truncate(newest / "metrics.jsonl", 40 * 2**30)
    visavis.train(resume=stopped, progress=listener)
    assert any("metrics.jsonl is of 42,949,672,960 bytes" in sentence and older.name in sentence for sentence in listener.said)


def test_without_a_whole_checkpoint_nothing_goes_on(stopped):
    for checkpoint in complete(stopped / "checkpoint"):
        flip(checkpoint / "best.safetensors", 1)
    with pytest.raises(RunError, match=r"best\.safetensors is damaged: its tensors are not those that were written"):
        visavis.train(resume=stopped)
    assert len(complete(stopped / "checkpoint")) == 2


def sign(checkpoint: Path) -> None:
    """The hashes of the files as they are now: what follows is not told by them."""
    storage.write_json(checkpoint / HASHES, {name: storage.content_hash(checkpoint / name) for name in ("metrics.jsonl", "state.json")})


def only_one(run: Path) -> Path:
    older, newest = complete(run / "checkpoint")
    shutil.rmtree(older)
    return newest


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epoch": 99}, r"the run would be in epoch 99 of 2 and at batch \d+ of 11"),
        ({"phase": 2}, "in phase 2 of 2, the first of which is 0"),
        ({"batch": 12}, "at batch 12 of 11"),
        ({"phase_step": 0}, "step 0 of its phase, which is not where its epoch and name are"),
        ({"step": 40}, "at step 40"),
        ({"epoch": -1}, r"state\.json: epoch is -1: input should be greater than or equal to 0"),
        ({"batch": "3"}, r"state\.json: batch is '3': input should be a valid integer"),
    ],
)
def test_a_run_is_never_anywhere_outside_of_its_recipe(stopped, change, sentence):
    checkpoint = only_one(stopped)
    state = json.loads((checkpoint / "state.json").read_text())
    storage.write_json(checkpoint / "state.json", state | change)
    sign(checkpoint)
    with pytest.raises(RunError, match=sentence):
        visavis.train(resume=stopped)


def first_of(tensors, ending):
    return next(name for name in tensors if name.endswith(ending))


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("optimizer", lambda _: {}, r"optimizer\.safetensors is empty, expected the state of AdamW after \d+ steps"),
        ("optimizer", lambda t: {name: part for name, part in t.items() if name != first_of(t, ".exp_avg")}, "exp_avg is missing"),
        ("optimizer", lambda t: t | {first_of(t, ".exp_avg"): t[first_of(t, ".step")].clone()}, r"exp_avg is of shape \[\], expected \["),
        ("optimizer", lambda t: t | {"stranger.exp_avg": t[first_of(t, ".step")].clone()}, r"stranger\.exp_avg is unknown"),
        ("weights", lambda t: {name: part.double() for name, part in t.items()}, r"float64 of shape .*, expected float32 of shape"),
        ("best", lambda t: dict(list(t.items())[1:]), "is missing, expected float32"),
    ],
)
def test_tensors_of_a_checkpoint_must_be_those_of_the_model_and_its_optimizer(stopped, part, change, sentence):
    file = only_one(stopped) / f"{part}.safetensors"
    storage.write_tensors(file, change(storage.read_tensors(file)))
    with pytest.raises(RunError, match=sentence):
        visavis.train(resume=stopped)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda row: {"phase": 0}, r"metrics\.jsonl:1: epoch is missing"),
        (lambda row: row | {"rsum": "much"}, r"metrics\.jsonl:1: rsum is 'much': input should be a valid number"),
        (lambda row: row | {"rsum": 1e9, "phase": 7}, r"metrics\.jsonl: the best validation is in phase 7 of 2, the first of which is 0"),
        (lambda row: row["time"], r"metrics\.jsonl:1: phase is missing"),
    ],
)
def test_a_damaged_log_is_a_sentence(finished, change, sentence):
    log = finished / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    storage.write_json_lines(log, [change(rows[0]), *rows[1:]])
    with pytest.raises(RunError, match=sentence):
        visavis.diagnose(finished, batches=1)


def without_hashes(file: Path) -> None:
    """Tensors as earlier versions wrote them."""
    save_file({name: tensor.clone() for name, tensor in load_file(file).items()}, file)


def test_a_run_of_an_earlier_version_goes_on(stopped, uninterrupted, outcome):
    """One checkpoint without hashes, its state under another name; nothing in the record but what was in it then."""
    checkpoint = only_one(stopped)
    for file in checkpoint.glob("*.safetensors"):
        without_hashes(file)
    (checkpoint / HASHES).unlink()
    (checkpoint / "state.json").rename(checkpoint / "place.json")
    known = json.loads((stopped / "environment.json").read_text())
    storage.write_json(stopped / "environment.json", {name: known[name] for name in ("threads", "data_fingerprint")})
    visavis.train(resume=stopped)
    assert outcome(stopped) == outcome(uninterrupted(False))


def test_one_flipped_bit_of_a_model_is_told_and_a_model_without_a_hash_loads_as_it_did(finished):
    weights = finished / "model" / "model.safetensors"
    before = visavis.load(finished).encode_texts(["a red circle"])
    without_hashes(weights)
    assert visavis.load(finished).encode_texts(["a red circle"]).equal(before)
    visavis.train(resume=finished)
    flip(weights, 2)
    with pytest.raises(RunError, match=re.escape(f"{weights} is damaged: its tensors are not those that were written")):
        visavis.load(finished)
    visavis.train(resume=finished)
    config = finished / "model" / "config.json"
    config.write_text(config.read_text().replace('"circle"', '"circla"'))
    with pytest.raises(RunError, match=re.escape(f"{config} is damaged: it is not what was written")):
        visavis.load(finished)
    known = json.loads(config.read_text())
    storage.write_json(config, {name: value for name, value in known.items() if name != "config_sha256"})
    visavis.load(finished)
    visavis.train(resume=finished)
    assert visavis.load(finished).encode_texts(["a red circle"]).equal(before), "its checkpoint has the best weights too"
