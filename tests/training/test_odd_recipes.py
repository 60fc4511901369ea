"""Invalid recipes: every included file, mutated at random, is either valid or rejected in one
sentence.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
import tomllib
from dataclasses import MISSING, fields
from typing import Any

import pytest
import tomli_w
from pydantic import BaseModel

from visavis import models
from visavis.core.errors import VisavisError
from visavis.core.own_code import loaded_classes
from visavis.evaluation import Protocol
from visavis.losses import objectives
from visavis.papers import relevance as graded
from visavis.research.experiments.jobs import Workers
from visavis.research.experiments.run_comparison import plan_comparison
from visavis.training import supervision
from visavis.training.recipes.files import read_recipe, read_recipe_file, shipped_files
from visavis.training.recipes.recipe import Recipe, parse_override
from visavis.training.recipes.settings import Phase

from ..mutation import ODD, changed, flipped

SUPERVISIONS = (
    *supervision.CATALOG,
    *loaded_classes(supervision.Supervision, "supervisions"),
)


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
            path.write_text(
                tomli_w.dumps(changed(tomllib.loads(text.decode()), chance)), errors="surrogatepass"
            )
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
    values = (
        "[" * 9_000,
        "9" * 9_000,
        "b'x'",
        "{1: 2}",
        "\0",
        "'\\ud800'",
        "1e999",
        "{b=1",
        "-" * 9_000 + "1",
        "{[]: 1}",
    )
    for value in values:
        with pytest.raises(VisavisError, match=r"a is not a key of recipes|is not of the form"):
            resolve(tmp_path / "recipe.toml", dict([parse_override(f"a={value}")]))


@pytest.mark.parametrize(
    "table",
    ["{ audio = 16, speech = 32 }", "{'audio': 16, 'speech': 32}", '{"audio": 16, "speech": 32}'],
)
def test_override_accepts_toml_table_or_literal(table):
    recipe = read_recipe(
        "unified/4/ce-full-unified", dict([parse_override(f"model.netvlad_clusters={table}")])
    )
    assert recipe.model["netvlad_clusters"] == {"audio": 16, "speech": 32}


def recipe_keys(section=Recipe, prefix=""):
    """Every dotted key of a recipe."""
    for name, field in section.model_fields.items():
        if name == "phases" or (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            yield from recipe_keys(
                Phase if name == "phases" else field.annotation,
                f"{prefix}{name}{'.0' if name == 'phases' else ''}.",
            )
        else:
            yield prefix + name


NUMBERS = (
    "lr",
    "eps",
    "clip_norm",
    "checkpoint_s",
    "factor",
    "weight_decay",
    "loss_warmup_epochs",
)
"""Keys that may be any finite number."""


@pytest.mark.parametrize("key", list(recipe_keys()))
def test_oversized_integer_in_a_recipe_is_rejected(key):
    last = key.rpartition(".")[2]
    for value in (2**63, -(10**400)):
        if last in NUMBERS and value == 2**63:
            continue
        with pytest.raises(
            VisavisError, match=rf"{last}(\.\w+)*: expected|{key} is not a key"
        ) as refused:
            read_recipe("demo", {key: value})
        assert len(str(refused.value)) < 400 and "digits) for integer" not in str(refused.value)


TINY = """
name = "tiny"
visual = { encoder = "scenes" }
phases = [{ epochs = 1, objective = "VLC()" }]
"""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None], ids=str)
def test_nan_and_none_in_a_recipe_are_rejected(value):
    # The command line can restore defaults of None.
    unset = {"training.captions_per_image", "evaluation.random_validation"}
    keys = [key for key in recipe_keys() if value is not None or key not in unset]
    for key in keys:
        for given in (value, [value], {"a": value}, {"a": [1, {"b": value}]}):
            with pytest.raises(VisavisError, match=r": expected |needs a value|is not a key"):
                read_recipe("demo", {key: given})


@pytest.mark.parametrize("kind", list(models.all_models()))
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "[nan]", "[1.0, inf]", "{ a = nan }"])
def test_nan_in_the_model_of_a_recipe_file_is_rejected(kind, text, tmp_path):
    for field in fields(models.find_model(kind).Config):
        (tmp_path / "recipe.toml").write_text(
            f'{TINY}\n[model]\nkind = "{kind}"\n{field.name} = {text}\n'
        )
        with pytest.raises(
            VisavisError,
            match=rf"model\.{field.name}[.\w]*: expected a finite number, got -?(nan|inf)\. Set one",
        ):
            read_recipe(str(tmp_path / "recipe.toml"))


@pytest.mark.parametrize("text", ["None", "1e999", "[None]", "{ a = nan }", "nan"])
def test_nan_and_none_on_command_line_are_rejected(text, command_line, scenes, tmp_path):
    code, _, errors = command_line(
        "train", "demo", "--data", scenes, "--out", tmp_path / "run", f"model.embedding_dim={text}"
    )
    assert code == 1 and re.search(r"embedding_dim[.\w]*: expected", errors), errors


CATALOGS = (
    objectives.CATALOG,
    SUPERVISIONS,
    graded.CATALOG,
    [model.Config for model in models.all_models().values()],
    [Protocol],
)


@pytest.mark.parametrize(
    "kind", list(itertools.chain(*CATALOGS)), ids=lambda kind: kind.__qualname__
)
def test_oversized_integer_in_a_field_is_rejected(kind):
    given = {
        field.name: 8
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    }
    for field in fields(kind):
        for value in (2**63, -(10**400)):
            if "float" in str(field.type).lower() and value == 2**63:
                continue
            with pytest.raises(VisavisError, match=r"expected .+, got [^(]+$"):
                kind(**given | {field.name: value})


@pytest.mark.parametrize(
    "kind", list(itertools.chain(*CATALOGS)), ids=lambda kind: kind.__qualname__
)
def test_nan_and_none_in_a_field_are_rejected(kind):
    given = {
        field.name: 8
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    }
    for field in fields(kind):
        for value in (math.nan, math.inf, -math.inf, None, (math.nan,), {"a": math.nan}):
            if value is None and field.default is None:
                continue
            with pytest.raises(VisavisError, match=r": expected .+, got [^(]+|\(nan,\)"):
                kind(**given | {field.name: value})


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("MMT", "layers"),
        ("VSRN", "reasoning_steps"),
        ("SGRAF", "reasoning_steps"),
        ("HEADS", "hidden_layers"),
        ("XVLM", "fusion_layers"),
    ],
)
def test_number_of_layers_is_limited(kind, field):
    config = next(
        model.Config
        for name, model in models.all_models().items()
        if name.replace("-", "").upper() == kind
    )
    given = {"visual_input_dim": 8, "text_input_dim": 8} | (
        {"experts": {"audio": 8}} if kind == "MMT" else {}
    )
    given |= {"backbone": "vit", "text_backbone": "bert"} if kind == "XVLM" else {}
    with pytest.raises(VisavisError, match=f"{field}: expected an integer <= 1000, got 1000000000"):
        config(**given | {field: 10**9})


def test_number_of_seeds_workers_and_threads_is_limited():
    with pytest.raises(
        VisavisError, match=r"seeds: expected an integer from 1 to 1,000, got 1000000000"
    ):
        plan_comparison(read_recipe("demo"), ((), (), ()), 10**9)
    with pytest.raises(
        VisavisError, match=r"workers: expected an integer from 1 to 1,000, got 2147483647"
    ):
        Workers(num_workers=2**31 - 1)
    with pytest.raises(
        VisavisError,
        match=r"training.threads: expected an integer <= 1024, got 2147483647",
    ):
        read_recipe("demo", {"training.threads": 2**31 - 1})
