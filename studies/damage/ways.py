"""Ways to damage a file: other bytes, other values, or a link, pipe or folder instead of the file."""

from __future__ import annotations

import json
import os
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomli_w


def damage(file: Path, rng: random.Random) -> str:
    """Damage one file, and return a description of the damage."""
    content = file.read_bytes()
    position = rng.randrange(len(content) or 1)

    def bit() -> None:
        file.write_bytes(
            content[:position]
            + bytes([content[position] ^ 1 << rng.randrange(8)])
            + content[position + 1 :]
            if content
            else b"\0"
        )

    def some_bytes() -> None:
        file.write_bytes(
            content[:position]
            + rng.randbytes(rng.randint(1, 16))
            + content[position + rng.randint(0, 16) :]
        )

    def linked(target_path: Path) -> None:
        file.unlink()
        file.symlink_to(target_path)

    def pipe() -> None:
        file.unlink()
        os.mkfifo(file)

    def folder() -> None:
        file.unlink()
        file.mkdir()

    def sparse() -> None:
        with open(file, "r+b") as target:
            target.truncate(40 * 2**30)

    damages: dict[str, Callable[[], object]] = {
        "one bit": bit,
        "some bytes": some_bytes,
        "cut": lambda: file.write_bytes(content[:position]),
        "longer": lambda: file.write_bytes(content + rng.randbytes(20)),
        "zeros": lambda: file.write_bytes(
            content[:position] + bytes(min(64, len(content) - position)) + content[position + 64 :]
        ),
        "empty": lambda: file.write_bytes(b""),
        "removed": file.unlink,
        "a folder": folder,
        "a pipe": pipe,
        "a link to itself": lambda: linked(file),
        "a device": lambda: linked(Path("/dev/zero")),
        "40 GB": sparse,
        "a mark in front": lambda: file.write_bytes(b"\xef\xbb\xbf" + content),
        "another file": lambda: file.write_bytes(
            rng.choice(
                sorted(sibling for sibling in file.parent.iterdir() if sibling.is_file())
            ).read_bytes()
        ),
    }
    changed = (
        _with_odd_value(file, content, rng)
        if file.suffix in (".json", ".jsonl", ".toml") and rng.random() < 0.6
        else None
    )
    if changed is not None:
        file.write_bytes(changed[1])
        return changed[0]
    name = rng.choices(list(damages), [4, 4, 3] + [1] * (len(damages) - 3))[0]
    damages[name]()
    return name


ODD_VALUES = (
    None,
    True,
    -1,
    0,
    3,
    0.5,
    1e308,
    float("nan"),
    10**30,
    "",
    "\x1b[31m",
    "..",
    "x" * 100_000,
    [],
    [[]],
    {},
    {"a": 1},
    ["a", 1],
    "CLIP",
)


def _with_odd_value(file: Path, content: bytes, rng: random.Random) -> tuple[str, bytes] | None:
    """A JSON or TOML file with one value replaced or removed."""
    lines = content.splitlines() if file.suffix == ".jsonl" else [content]
    number = rng.randrange(len(lines) or 1)
    try:
        value = (
            tomllib.loads(content.decode()) if file.suffix == ".toml" else json.loads(lines[number])
        )
    except (ValueError, IndexError):
        return None
    locations = list(_locations(value))
    if not locations:
        return None
    container, key = rng.choice(locations)
    odd = rng.choice(ODD_VALUES)
    description = f"{key} = {odd!r:.30}"
    if rng.random() < 0.25:
        del container[key]
        description = f"without {key}"
    else:
        container[key] = odd
    try:
        text = tomli_w.dumps(value) if file.suffix == ".toml" else json.dumps(value)
    except (TypeError, ValueError):
        return None
    lines[number] = text.encode()
    return description, b"\n".join(lines) + b"\n"


def _locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each location in a nested value: the container, and the key or index."""
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from _locations(inner)
