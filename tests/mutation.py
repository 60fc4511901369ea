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


MAGIC_NUMBERS = (
    b"\xff\xd8\xff\xe0\0\x10JFIF",
    b"\x89PNG\r\n\x1a\n",
    b"GIF89a",
    b"RIFF\xff\xff\xff\xffWEBPVP8L",
    b"II*\0\x08\0\0\0",
    b"MM\0*\0\0\0\x08",
    b"\0\0\0\x18ftypheic",
    b"\0\0\0\x18ftypisom",
    b"\xff\x0a",
    b"\0\0\0\x0cJXL \r\n\x87\n",
    b"\x1aE\xdf\xa3",
    b"PK\x03\x04",
    b"\x1f\x8b\x08\0",
    b"\x28\xb5\x2f\xfd",
    b"BZh9",
    b"PAR1",
    b"ARROW1\0\0",
    b"\x93NUMPY\x01\0",
    b"SQLite format 3\0",
    b"\x80\x04\x95",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"<html>",
    b"%PDF-1.7",
    b"version https://git-lfs.github.com/spec/v1\n",
)
"""Starts of files of other kinds."""


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One to three changes of bytes: bits, lengths, parts that are cut, copied, moved or removed, and
    starts of other files.
    """
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        content = _damaged_once(content, rng)
    return content


def _damaged_once(content: bytes, rng: random.Random) -> bytes:
    size = len(content)
    if not size:
        return rng.choice(MAGIC_NUMBERS)
    # Headers and footers matter more than their share of the bytes.
    region = rng.choice([size, size, min(size, 64), min(size, 512)])
    start = rng.randrange(region)
    if rng.random() < 0.15:
        start = size - 1 - start
    width = min(rng.choice([1, 2, 4, 8, 64, 1024, max(1, size // 4)]), size - start)
    part = content[start : start + width]
    end = start + width
    match rng.randrange(12):
        case 0 | 1:
            changed_bytes = bytearray(content)
            for _ in range(rng.choice([1, 1, 2, 8])):
                changed_bytes[rng.randrange(region)] ^= 1 << rng.randrange(8)
            return bytes(changed_bytes)
        case 2 | 3:
            # A length, an offset or a size of an image.
            width = rng.choice([1, 2, 4, 8])
            value = rng.choice([0, 1, 2**7, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63])
            value = rng.choice([value, rng.getrandbits(8 * width), size, size + 1])
            order = rng.choice(["little", "big"])
            field_bytes = (value % 2 ** (8 * width)).to_bytes(width, order)  # type: ignore[arg-type]
            return content[:start] + field_bytes + content[start + width :]
        case 4:
            return content[:start]
        case 5:
            return content[:end] + part * rng.choice([1, 1, 2, 50]) + content[end:]
        case 6:
            return content[:start] + content[end:]
        case 7:
            other = rng.randrange(size)
            rest = content[:start] + content[end:]
            return rest[:other] + part + rest[other:]
        case 8:
            magic = rng.choice(MAGIC_NUMBERS)
            return magic + content[rng.choice([0, len(magic)]) :]
        case 9:
            return content[:start] + bytes([rng.choice([0, 255, 32])]) * width + content[end:]
        case 10:
            return content[:start] + rng.randbytes(width) + content[end:]
        case _:
            return content + rng.choice([b"\0", b"\n", content[:start], rng.randbytes(16)])
