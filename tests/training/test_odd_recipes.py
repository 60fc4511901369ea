"""Recipes nobody means: every file that ships, changed at random by seed, is a recipe or one sentence."""

from __future__ import annotations

import copy
import datetime as dt
import random
import tomllib
from typing import Any

import pytest
import tomli_w

from visavis.errors import VisavisError
from visavis.training.overrides import parse_override
from visavis.training.recipe_files import read_file, shipped

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


def resolve(path: Any, overrides: dict[str, Any]) -> None:
    """Every recipe of a file."""
    file = read_file(str(path))
    for row in file.rows or [None]:
        file.recipe(row, overrides)


def check(name, count, tmp_path):
    chance, text, read = random.Random(name), shipped()[name].read_bytes(), 0
    for number in range(count):
        path, overrides = tmp_path / "recipe.toml", {}
        if number % 3 == 0:
            path.write_bytes(flipped(text, chance))
        else:
            path.write_text(tomli_w.dumps(changed(tomllib.loads(text.decode()), chance)), errors="surrogatepass")
        if number % 4 == 0:
            key = chance.choice(
                [
                    "phases.0.epochs",
                    "model",
                    "model.width",
                    "data.path",
                    "objective",
                    "rows",
                    "extends",
                    "",
                    "a.",
                    ".",
                    "phases.-1.x",
                    "phases.0",
                ]
            )
            overrides = {key: copy.deepcopy(chance.choice(ODD))}
        try:
            resolve(path, overrides)
        except VisavisError:
            continue
        except Exception as error:
            raise AssertionError(f"{number}: {type(error).__name__}: {error}") from error
        read += 1
    assert 0 < read < count


@pytest.mark.parametrize("name", shipped())
def test_a_changed_recipe_is_a_recipe_or_a_sentence(name, tmp_path):
    check(name, 40, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", shipped())
def test_many_changed_recipes_are_recipes_or_sentences(name, tmp_path):
    check(name, 1_000, tmp_path)


@pytest.mark.parametrize(
    "content",
    ["a = " + "[" * 50_000, "a = " + "9" * 50_000, "a.b = 1\n" * 2, ".".join("a" * 3_000) + " = 1", "a = 1979-13-45", "\ufeffa = 1"],
)
def test_a_text_that_is_hard_to_read_is_a_sentence(content, tmp_path):
    (tmp_path / "recipe.toml").write_text(content)
    with pytest.raises(VisavisError):
        resolve(tmp_path / "recipe.toml", {})


@pytest.mark.parametrize(
    "text",
    ["a=" + "[" * 9_000, "a=" + "9" * 9_000, "a=b'x'", "a={1: 2}", "a=\0", "a='\\ud800'", "a=1e999", "a=" + "-" * 9_000 + "1", "a={[]: 1}"],
)
def test_an_override_that_is_hard_to_read_is_a_sentence(text, tmp_path):
    (tmp_path / "recipe.toml").write_bytes(shipped()["demo"].read_bytes())
    with pytest.raises(VisavisError, match=r"a is not a key of recipes|is not of the form"):
        resolve(tmp_path / "recipe.toml", dict([parse_override(text)]))
