"""Damaged checkpoints and models: reported in one sentence, with fallback to an intact checkpoint."""

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
from visavis.core import storage
from visavis.core.errors import RunError
from visavis.training.checkpoint import HASHES, Checkpoint, complete_checkpoints

PARTS = (
    "weights.safetensors",
    "best_weights.safetensors",
    "optimizer.safetensors",
    "metrics.jsonl",
    "state.json",
    HASHES,
)


def flip(file: Path, seed: int) -> None:
    """Change one bit in the data of a tensor file."""
    content, chance = bytearray(file.read_bytes()), random.Random(seed)
    first = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else 0
    content[chance.randrange(first, len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "damage",
    [flip, lambda file, _: file.unlink(), lambda file, _: file.write_bytes(b"")],
    ids=["flip", "remove", "empty"],
)
def test_damaged_checkpoint_is_replaced_with_warning(finished, listener, part, damage):
    older, newest = complete_checkpoints(finished / "checkpoint")
    damage(newest / part, PARTS.index(part))
    found = Checkpoint.latest(finished / "checkpoint", listener)
    if part == "state.json" and not (newest / part).exists():
        assert (found.folder, listener.messages) == (older, []), (
            "a checkpoint without a state is not complete"
        )
        return
    assert found.folder == older
    (sentence,) = listener.messages
    assert re.search(rf"{newest.name}.* Falling back to checkpoint {older.name}\.$", sentence)


@pytest.fixture
def finished(uninterrupted, tmp_path) -> Path:
    return Path(shutil.copytree(uninterrupted(False), tmp_path / "copy"))


def test_resume_before_damaged_checkpoint_is_exact(stopped, uninterrupted, outcome, listener):
    older, newest = complete_checkpoints(stopped / "checkpoint")
    flip(newest / "weights.safetensors", 0)
    visavis.train(resume=stopped, progress=listener)
    assert any(
        f"{newest}/weights.safetensors is damaged" in sentence and older.name in sentence
        for sentence in listener.messages
    )
    assert outcome(stopped) == outcome(uninterrupted(False))


def test_checkpoint_with_endless_log_is_skipped(stopped, listener):
    older, newest = complete_checkpoints(stopped / "checkpoint")
    os.truncate(newest / "metrics.jsonl", 40 * 2**30)
    visavis.train(resume=stopped, progress=listener)
    assert any(
        re.search(r"metrics\.jsonl: expected at most .* bytes, got 42,949,672,960", sentence)
        and older.name in sentence
        for sentence in listener.messages
    )


def test_resume_needs_intact_checkpoint(stopped):
    for checkpoint in complete_checkpoints(stopped / "checkpoint"):
        flip(checkpoint / "best_weights.safetensors", 1)
    with pytest.raises(
        RunError,
        match=r"best_weights\.safetensors is damaged: its tensors differ from those that were written",
    ):
        visavis.train(resume=stopped)
    assert len(complete_checkpoints(stopped / "checkpoint")) == 2


def sign(checkpoint: Path) -> None:
    """Write the hashes of the current files, so that hashes do not reveal the damage."""
    storage.write_json(
        checkpoint / HASHES,
        {name: storage.content_hash(checkpoint / name) for name in ("metrics.jsonl", "state.json")},
    )


def only_one(run: Path) -> Path:
    older, newest = complete_checkpoints(run / "checkpoint")
    shutil.rmtree(older)
    return newest


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"epoch": 99},
            r"epoch, batch: expected below 1 and at most 11, got epoch 99 and batch \d+",
        ),
        ({"phase": 2}, "phase: expected 0 to 1, got 2"),
        ({"batch": 12}, "expected below 1 and at most 11, got epoch 0 and batch 12"),
        ({"phase_step": 0}, "phase step 0: expected the step of the folder name"),
        ({"step": 40}, "step 40, phase step"),
        ({"epoch": -1}, r"state\.json: epoch is -1: input should be greater than or equal to 0"),
        ({"batch": "3"}, r"state\.json: batch is '3': input should be a valid integer"),
    ],
)
def test_checkpoint_outside_recipe_is_rejected(stopped, change, sentence):
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
        (
            "optimizer",
            lambda _: {},
            (
                r"optimizer\.safetensors: expected the state of AdamW after \d+ steps, got an empty "
                r"file"
            ),
        ),
        (
            "optimizer",
            lambda t: {name: part for name, part in t.items() if name != first_of(t, ".exp_avg")},
            "exp_avg is missing",
        ),
        (
            "optimizer",
            lambda t: t | {first_of(t, ".exp_avg"): t[first_of(t, ".step")].clone()},
            r"exp_avg: expected shape \[.+\], got \[\]",
        ),
        (
            "optimizer",
            lambda t: t | {"stranger.exp_avg": t[first_of(t, ".step")].clone()},
            r"stranger\.exp_avg is unknown",
        ),
        (
            "weights",
            lambda t: {name: part.double() for name, part in t.items()},
            r"expected float32 of shape .*, got float64 of shape",
        ),
        (
            "best_weights",
            lambda t: dict(list(t.items())[1:]),
            "expected float32 of shape .*, got no tensor",
        ),
    ],
)
def test_checkpoint_with_wrong_tensors_is_rejected(stopped, part, change, sentence):
    file = only_one(stopped) / f"{part}.safetensors"
    # Copies: Windows does not replace a file that is mapped.
    tensors = {name: part.clone() for name, part in storage.read_tensors(file).items()}
    storage.write_tensors(file, change(tensors))
    with pytest.raises(RunError, match=sentence):
        visavis.train(resume=stopped)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda row: {"phase": 0}, r"metrics\.jsonl:1: epoch is missing"),
        (
            lambda row: row | {"rsum": "much"},
            r"metrics\.jsonl:1: rsum is 'much': input should be a valid number",
        ),
        (
            lambda row: row | {"rsum": 1e9, "phase": 7},
            r"metrics\.jsonl: expected a phase from 0 to 1, got 7 for the best validation",
        ),
        (lambda row: row["time"], r"metrics\.jsonl:1: phase is missing"),
    ],
)
def test_damaged_log_is_reported(finished, change, sentence):
    log = finished / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    storage.write_json_lines(log, [change(rows[0]), *rows[1:]])
    with pytest.raises(RunError, match=sentence):
        visavis.papers_diagnose(finished, max_batches=1)


def without_hashes(file: Path) -> None:
    """Rewrite tensors without a hash."""
    save_file({name: tensor.clone() for name, tensor in load_file(file).items()}, file)


def test_model_hash_detects_flipped_bit(finished):
    weights = finished / "model" / "model.safetensors"
    before = visavis.load(finished).encode_texts(["a red circle"])
    without_hashes(weights)
    assert visavis.load(finished).encode_texts(["a red circle"]).equal(before)
    visavis.train(resume=finished)
    flip(weights, 2)
    with pytest.raises(
        RunError,
        match=re.escape(f"{weights} is damaged: its tensors differ from those that were written"),
    ):
        visavis.load(finished)
    visavis.train(resume=finished)
    config = finished / "model" / "config.json"
    intact = config.read_text()
    config.write_text(intact.replace('"circle"', '"circla"'))
    with pytest.raises(RunError, match=re.escape(f"{config} is damaged: expected")):
        visavis.load(finished)
    known = json.loads(config.read_text())
    storage.write_json(
        config, {name: value for name, value in known.items() if name != "config_sha256"}
    )
    with pytest.raises(RunError, match=r"expected config_sha256 \w{64}, got None"):
        visavis.load(finished)
    config.write_text(intact)
    assert visavis.load(finished).encode_texts(["a red circle"]).equal(before)
    visavis.train(resume=finished)
    assert visavis.load(finished).encode_texts(["a red circle"]).equal(before), (
        "its checkpoint has the best weights too"
    )
