"""Ways to damage a file: its bytes, its values, or what stands under its name."""

from __future__ import annotations

import json
import os
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomli_w


def damage(file: Path, draw: random.Random) -> str:
    """Damage one file, and return a description of the damage."""
    content = file.read_bytes()
    place = draw.randrange(len(content) or 1)

    def bit() -> None:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :] if content else b"\0")

    def some_bytes() -> None:
        file.write_bytes(content[:place] + draw.randbytes(draw.randint(1, 16)) + content[place + draw.randint(0, 16) :])

    def linked(to: Path) -> None:
        file.unlink()
        file.symlink_to(to)

    def pipe() -> None:
        file.unlink()
        os.mkfifo(file)

    def folder() -> None:
        file.unlink()
        file.mkdir()

    def sparse() -> None:
        with open(file, "r+b") as target:
            target.truncate(40 * 2**30)

    ways: dict[str, Callable[[], object]] = {
        "one bit": bit,
        "some bytes": some_bytes,
        "cut": lambda: file.write_bytes(content[:place]),
        "longer": lambda: file.write_bytes(content + draw.randbytes(20)),
        "zeros": lambda: file.write_bytes(content[:place] + bytes(min(64, len(content) - place)) + content[place + 64 :]),
        "empty": lambda: file.write_bytes(b""),
        "removed": file.unlink,
        "a folder": folder,
        "a pipe": pipe,
        "a link to itself": lambda: linked(file),
        "a device": lambda: linked(Path("/dev/zero")),
        "40 GB": sparse,
        "a mark in front": lambda: file.write_bytes(b"\xef\xbb\xbf" + content),
        "another file": lambda: file.write_bytes(
            draw.choice(sorted(other for other in file.parent.iterdir() if other.is_file())).read_bytes()
        ),
    }
    changed = _with_odd_value(file, content, draw) if file.suffix in (".json", ".jsonl", ".toml") and draw.random() < 0.6 else None
    if changed is not None:
        file.write_bytes(changed[1])
        return changed[0]
    name = draw.choices(list(ways), [4, 4, 3] + [1] * (len(ways) - 3))[0]
    ways[name]()
    return name


ODD = (
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


def _with_odd_value(file: Path, content: bytes, draw: random.Random) -> tuple[str, bytes] | None:
    """A JSON or TOML file with one value replaced or left out."""
    lines = content.splitlines() if file.suffix == ".jsonl" else [content]
    number = draw.randrange(len(lines) or 1)
    try:
        value = tomllib.loads(content.decode()) if file.suffix == ".toml" else json.loads(lines[number])
    except (ValueError, IndexError):
        return None
    places = list(_places(value))
    if not places:
        return None
    holder, key = draw.choice(places)
    odd = draw.choice(ODD)
    what = f"{key} = {odd!r:.30}"
    if draw.random() < 0.25:
        del holder[key]
        what = f"without {key}"
    else:
        holder[key] = odd
    try:
        written = tomli_w.dumps(value) if file.suffix == ".toml" else json.dumps(value)
    except (TypeError, ValueError):
        return None
    lines[number] = written.encode()
    return what, b"\n".join(lines) + b"\n"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value, as what holds it and the key or index there."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)
