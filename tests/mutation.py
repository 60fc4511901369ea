"""Contents of files changed at random, by seed."""

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
    *([], [[]], [1, "a", {}], {}, {"": {}}, {"kind": 3}, {"kind": "VSE++", "width": []}, {"0": {"epochs": 1}}, {"a": {"b": {"c": 1}}}),
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


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every table or list with each of its keys, at any depth."""
    inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [(value, key) for key, _ in inner] + [place for _, part in inner for place in places(part)]


def changed(content: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One to three values replaced, deleted, moved, nested or put under another key."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice([1, 1, 2, 3])):
        if not (known := places(content)):
            break
        table, key = chance.choice(known)
        match chance.randrange(6):
            case 0 | 1:
                table[key] = copy.deepcopy(chance.choice(ODD))
            case 2:
                del table[key]
            case 3:
                other, name = chance.choice(known)
                table[key] = copy.deepcopy(other[name])
            case 4:
                table[key] = {chance.choice(KEYS): table[key]}
            case 5 if isinstance(table, dict):
                table[chance.choice(KEYS)] = copy.deepcopy(chance.choice(ODD))
    return content


def flipped(text: bytes, chance: random.Random) -> bytes:
    """One to three bytes replaced, removed or doubled."""
    content = bytearray(text)
    for _ in range(chance.choice([1, 2, 3])):
        place = chance.randrange(len(content))
        content[place : place + chance.randrange(3)] = bytes([chance.randrange(256)] * chance.randrange(3))
    return bytes(content)
