"""Randomly mutated run folders: either an error in one sentence or the same weights, never a
traceback.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import visavis
from visavis.core.errors import VisavisError

MUTATIONS = 200
ODD = (
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    float("nan"),
    float("-inf"),
    "",
    "odd",
    "\ud800",
    [],
    {},
    [[]],
    {"odd": 1},
)


def leaves(value: Any, place: tuple = ()) -> list[tuple]:
    """Yield the positions of all values in a JSON value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place, *(leaf for key, item in inner for leaf in leaves(item, (*place, key)))]


def change_value(file: Path, chance: random.Random) -> None:
    """Change a value of a JSON file or log line. Drop, double or change a line of TOML."""
    lines = file.read_text().splitlines(keepends=True)
    if file.suffix == ".toml":
        number = chance.randrange(len(lines))
        key, _, _ = lines[number].partition("=")
        odd = chance.choice(["-1", "0", "nan", "1e999", "true", '"odd"', "[]", "{}", "9" * 30])
        lines[number] = chance.choice(["", lines[number] * 2, f"{key}= {odd}\n"])
        file.write_text("".join(lines))
        return
    number = chance.randrange(len(lines)) if file.suffix == ".jsonl" else None
    value = json.loads(file.read_text() if number is None else lines[number])
    *path, last = chance.choice(leaves(value)[1:])
    parent = value
    for step in path:
        parent = parent[step]
    if chance.random() < 0.3:
        del parent[last]
    else:
        parent[last] = chance.choice(ODD)
    if number is None:
        file.write_text(json.dumps(value))
    else:
        lines[number] = json.dumps(value) + "\n"
        file.write_text("".join(lines))


def flip_bits(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes() or b"\0")
    for _ in range(chance.choice([1, 1, 8])):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def replace(file: Path, chance: random.Random) -> None:
    """Replace a file by nothing, a part, random bytes, a folder, a pipe, a link or a huge sparse
    file.
    """
    content = file.read_bytes()
    file.unlink()
    kind = chance.randrange(8)
    if kind == 0:
        file.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == 1:
        file.write_bytes(chance.randbytes(chance.choice([0, 7, 5000])))
    elif kind == 2:
        file.mkdir()
    elif kind == 3:
        os.mkfifo(file)
    elif kind == 4:
        file.symlink_to(chance.choice(["nowhere", file.name, "/dev/zero"]))
    elif kind == 5:
        file.write_bytes(b"[" * 100_000)
    elif kind == 6:
        os.truncate(os.open(file, os.O_CREAT | os.O_WRONLY), 2**36)


def used(run: Path, use: Callable[[Path], object]) -> str:
    try:
        use(run)
    except VisavisError as error:
        sentence = str(error)
    else:
        return "the same"
    assert re.fullmatch(r".*[.?]", sentence), sentence
    return "refused"


def evaluated_as(rsum: float) -> Callable[[Path], None]:
    def use(run: Path) -> None:
        assert visavis.evaluate(run, split="test", protocol="plain").metrics["rsum"] == rsum

    return use


def trained_to(weights: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    def use(run: Path) -> None:
        visavis.train(resume=run)
        assert all(
            torch.equal(part, weights[name])
            for name, part in load_file(run / "model" / "model.safetensors").items()
        )

    return use


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_mutated_run_folder_is_rejected_or_equal(stopped, uninterrupted, tmp_path):
    whole, errors = uninterrupted(False), Counter()
    weights = load_file(whole / "model" / "model.safetensors")
    before = visavis.evaluate(whole, split="test", protocol="plain").metrics["rsum"]
    for seed in range(MUTATIONS):
        chance, run = random.Random(seed), tmp_path / f"mutated-{seed}"
        origin = chance.choice([whole, whole, stopped])
        shutil.copytree(origin, run)
        file = chance.choice(
            sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".run.lock")
        )
        changes = [
            flip_bits,
            replace,
            *([change_value] * 3 if file.suffix in (".json", ".jsonl", ".toml") else []),
        ]
        chance.choice(changes)(file, chance)
        try:
            if origin == whole:
                errors[used(run, evaluated_as(before))] += 1
            errors[used(run, trained_to(weights))] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, {file.relative_to(run)} of {origin.name}")
            raise
        shutil.rmtree(run)
    assert min(errors.values()) > MUTATIONS / 10, errors
