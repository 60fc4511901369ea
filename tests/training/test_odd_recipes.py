"""Invalid recipes: every included file, mutated at random, is either valid or rejected in one sentence."""

from __future__ import annotations

import copy
import random
import tomllib
from typing import Any

import pytest
import tomli_w

from visavis.errors import VisavisError
from visavis.recipes.files import read_recipe, read_recipe_file, shipped_files
from visavis.recipes.recipe import parse_override

from ..mutation import ODD, changed, flipped


def resolve(path: Any, overrides: dict[str, Any]) -> None:
    """Return every recipe of a file."""
    file = read_recipe_file(str(path))
    for row in file.variants or [None]:
        file.recipe(row, overrides)


def check(name, count, tmp_path):
    chance, text, read = random.Random(name), shipped_files()[name].read_bytes(), 0
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
                    "model.embedding_dim",
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


def test_mutated_recipes_are_valid_or_rejected(tmp_path):
    for name in shipped_files():
        check(name, 40, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", shipped_files())
def test_many_mutated_recipes_are_valid_or_rejected(name, tmp_path):
    check(name, 1_000, tmp_path)


def test_unreadable_recipe_text_is_rejected(tmp_path):
    for content in (
        *("a = " + "[" * 50_000, "a = " + "9" * 50_000, "a.b = 1\n" * 2),
        *(".".join("a" * 3_000) + " = 1", "a = 1979-13-45", "\ufeffa = 1"),
    ):
        (tmp_path / "recipe.toml").write_text(content)
        with pytest.raises(VisavisError):
            resolve(tmp_path / "recipe.toml", {})


def test_unreadable_override_is_rejected(tmp_path):
    (tmp_path / "recipe.toml").write_bytes(shipped_files()["demo"].read_bytes())
    values = ("[" * 9_000, "9" * 9_000, "b'x'", "{1: 2}", "\0", "'\\ud800'", "1e999", "{b=1", "-" * 9_000 + "1", "{[]: 1}")
    for value in values:
        with pytest.raises(VisavisError, match=r"a is not a key of recipes|is not of the form"):
            resolve(tmp_path / "recipe.toml", dict([parse_override(f"a={value}")]))


@pytest.mark.parametrize("table", ["{ audio = 16, speech = 32 }", "{'audio': 16, 'speech': 32}", '{"audio": 16, "speech": 32}'])
def test_override_accepts_toml_table_or_literal(table):
    recipe = read_recipe("unified/4/ce-full-unified", dict([parse_override(f"model.netvlad_clusters={table}")]))
    assert recipe.model["netvlad_clusters"] == {"audio": 16, "speech": 32}


INTEGERS = ("seed", "data.training_images", "text.min_count", "training.batch_size", "training.threads", "training.patience", "memory")


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", [2**63, 10**30, 10**400], ids=["2^63", "10^30", "10^400"])
def test_oversized_integer_is_rejected(key, value):
    with pytest.raises(VisavisError, match=f"{key.rpartition('.')[2]}: expected"):
        read_recipe("demo", {key: value})
