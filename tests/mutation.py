"""Random mutations of file contents, determined by a seed."""

from __future__ import annotations

import copy
import datetime as dt
import random
from typing import Any

ODD = [
    *(0, -1, True, 2**63, 10**400, 0.0, -0.5, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\n",
        "None",
        "scenes",
        "demo",
        "demo/x",
        "x.toml",
        "x\0.toml",
        "n.toml" * 999,
        "/dev/zero",
        "VLC(",
        "VLC(gamma='x')",
        "()" * 999,
        "n" * 5000,
        "🙂",
    ),
    *(
        [],
        [[]],
        [1, "a", {}],
        {},
        {"": {}},
        {"kind": 3},
        {"kind": "VSE++", "width": []},
        {"0": {"epochs": 1}},
        {"a": {"b": {"c": 1}}},
    ),
    *(dt.date(1979, 5, 27), dt.time(7, 32), dt.datetime(1979, 5, 27, 7, 32, tzinfo=dt.UTC)),
]
KEYS = [
    "",
    "kind",
    "rows",
    "extends",
    "phases",
    "name",
    "about",
    "0",
    "model",
    "epochs",
    "objective",
    "vision",
    "rate",
    "a.b",
    "🙂",
    "x" * 300,
]


def entries(value: Any) -> list[tuple[Any, Any]]:
    """All pairs of a table or list and one of its keys, at any depth."""
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [(value, key) for key, _ in inner] + [
        entry for _, part in inner for entry in entries(part)
    ]


def changed(content: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One to three values replaced, deleted, moved, nested or put under another key."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice([1, 1, 2, 3])):
        if not (known := entries(content)):
            break
        table, key = rng.choice(known)
        match rng.randrange(6):
            case 0 | 1:
                table[key] = copy.deepcopy(rng.choice(ODD))
            case 2:
                del table[key]
            case 3:
                other, name = rng.choice(known)
                table[key] = copy.deepcopy(other[name])
            case 4:
                table[key] = {rng.choice(KEYS): table[key]}
            case 5 if isinstance(table, dict):
                table[rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))
    return content


def flipped(text: bytes, rng: random.Random) -> bytes:
    """One to three bytes replaced, removed or doubled."""
    content = bytearray(text)
    for _ in range(rng.choice([1, 2, 3])):
        offset = rng.randrange(len(content))
        content[offset : offset + rng.randrange(3)] = bytes([rng.randrange(256)] * rng.randrange(3))
    return bytes(content)
