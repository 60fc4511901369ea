"""Recipes nobody means: every file that ships, changed at random by seed, is a recipe or one sentence."""

from __future__ import annotations

import copy
import random
import tomllib
from typing import Any

import pytest
import tomli_w

from visavis.errors import VisavisError
from visavis.training.overrides import parse_override
from visavis.training.recipe_files import read_file, read_recipe, shipped

from ..mutation import ODD, changed, flipped


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
    [
        "a=" + "[" * 9_000,
        "a=" + "9" * 9_000,
        "a=b'x'",
        "a={1: 2}",
        "a=\0",
        "a='\\ud800'",
        "a=1e999",
        "a={b=1",
        "a=" + "-" * 9_000 + "1",
        "a={[]: 1}",
    ],
)
def test_an_override_that_is_hard_to_read_is_a_sentence(text, tmp_path):
    (tmp_path / "recipe.toml").write_bytes(shipped()["demo"].read_bytes())
    with pytest.raises(VisavisError, match=r"a is not a key of recipes|is not of the form"):
        resolve(tmp_path / "recipe.toml", dict([parse_override(text)]))


@pytest.mark.parametrize("table", ["{ audio = 16, speech = 32 }", "{'audio': 16, 'speech': 32}", '{"audio": 16, "speech": 32}'])
def test_an_override_may_be_a_table_of_toml_or_a_literal(table):
    recipe = read_recipe("unified/4/ce-full-unified", dict([parse_override(f"model.clusters={table}")]))
    assert recipe.model["clusters"] == {"audio": 16, "speech": 32}
