"""Statements of defaults, limits and order in the docs agree with the code."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
import tomllib

import pytest
import typer
from tests.docs import PROJECT

import visavis
from visavis import cli
from visavis.cli.commands import command_words
from visavis.core.own_code import loaded_classes
from visavis.core.progress import NoProgress
from visavis.data.file_names import VIDEO_SUFFIXES
from visavis.data.image_hashes import MAX_HAMMING_DISTANCE
from visavis.data.live_photos import MAX_LIVE_PHOTO_BYTES, MAX_LIVE_SECONDS
from visavis.data.video import MAX_FRAMES_PER_VIDEO
from visavis.models.default_model import DEFAULT_MODELS
from visavis.objectives import CATALOG
from visavis.retrieval.build.compression import MEASURED_QUERIES, MEASURED_SETS, TARGET_RECALL
from visavis.retrieval.build.encoding import CLIPS_PER_SHARD, SHARD_SIZE
from visavis.retrieval.build.make_correction import MAX_TEXTS
from visavis.retrieval.build.no_match import MAX_CONTRADICTED, MAX_SAMPLED_ITEMS, bank_texts
from visavis.retrieval.search import MIN_DUPLICATE_COSINE, RERANK_DEPTH
from visavis.retrieval.server.limits import (
    IMAGE_SEARCH_COST,
    REQUEST_COSTS,
    RateLimits,
    ServerLimits,
)
from visavis.retrieval.server.security import MIN_TOKEN_LENGTH
from visavis.retrieval.stores.maxsim_search import (
    CANDIDATES_PER_RESULT,
    MIN_CANDIDATES,
    MIN_ITEMS,
)
from visavis.training import supervision
from visavis.training.recipes import default_recipe
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.recipe import _all_keys

from .objectives.test_laws import BEYOND_NEGATIVES

SUPERVISIONS = (
    *supervision.CATALOG,
    *loaded_classes(supervision.Supervision, "supervisions"),
)


def read_page(page: str) -> str:
    """A page with its lines joined, because a sentence may go on in the next line."""
    return " ".join((PROJECT / page).read_text(encoding="utf-8").split())


def names_after(page: str, start: str, end: str) -> set[str]:
    """The names in backticks of the page between two texts, which occur once."""
    text = read_page(page)
    assert text.count(start) == 1, start
    return set(re.findall(r"`([^`]+)`", text.partition(start)[2].partition(end)[0]))


def test_start_page_and_guides_stay_below_45_000_words():
    """What only papers need has pages of its own."""
    pages = [PROJECT / "docs/index.md", *(PROJECT / "docs/guides").glob("*.md")]
    assert sum(len(page.read_text("utf-8").split()) for page in pages) <= 45_000


@pytest.mark.parametrize("reduction", ["half_mean", "mean"])
def test_losses_page_names_objectives_that_do_not_sum(reduction):
    named = names_after("docs/guides/losses-only.md", f"**`{reduction}`:**", " - ")
    kinds = [kind for kind in CATALOG if kind().reduction == reduction]
    assert named == {kind.__name__ for kind in kinds}


def test_positives_page_names_terms_without_negatives():
    named = names_after("docs/explanation/several-positives.md", "have a term of 0.", "The neg")
    assert named == BEYOND_NEGATIVES


def written_names(node: ast.AST) -> list[object]:
    """Keywords of a call, or keys of a dictionary."""
    if isinstance(node, ast.Call):
        return [keyword.arg for keyword in node.keywords]
    keys = node.keys if isinstance(node, ast.Dict) else []
    return [key.value for key in keys if isinstance(key, ast.Constant)]


def test_positives_page_names_supervisions_of_annotations():
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \| ([^|]+) \|$",
        (PROJECT / "docs/explanation/several-positives.md").read_text("utf-8"),
        re.MULTILINE,
    )
    shown = {
        (annotation, kind)
        for annotations, kinds in rows
        for annotation in re.findall(r"\w+", annotations)
        for kind in re.findall(r"`(\w+)`", kinds)
    }
    annotations = {annotation for annotation, _ in shown}
    assert len(annotations) == 8
    provided = {
        (name, kind.__name__)
        for kind in SUPERVISIONS
        for node in ast.walk(ast.parse(inspect.cleandoc(inspect.getsource(kind))))
        for name in written_names(node)
        if name in annotations
    }
    assert shown == provided


def test_recipe_page_names_keys_that_exclude_pretrained_model():
    named = names_after("docs/guides/recipes.md", "These overrides exclude it:", "An image encoder")
    assert named == set(default_recipe.ENCODER_KEYS)


def test_recipe_page_names_keys_that_are_not_inherited(tmp_path):
    named = names_after("docs/guides/recipes.md", "Variants are inherited, but not", "- `run.toml`")
    own = {"name": "base", "about": "The base.", "published": "goal/3/r152-cir-sig-ms", "seed": 3}
    text = "\n".join(f"{key} = {value!r}" for key, value in own.items())
    (tmp_path / "base.toml").write_text(f'extends = "heads-flickr8k"\n{text}\n')
    (tmp_path / "child.toml").write_text('extends = "base.toml"\nname = "child"\n')
    child = read_recipe(tmp_path / "child.toml").to_dict()
    assert named == {key for key, value in own.items() if child.get(key) != value}


def test_limits_of_pages_are_those_of_the_code():
    search = read_page("docs/guides/search.md")
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    top = inspect.signature(visavis.search).parameters["top"].default
    assert f"Without `--top`, {words[top]} results are printed" in search
    assert f"at most {SHARD_SIZE} files, and at most {CLIPS_PER_SHARD} videos" in search
    assert f"over at most {MAX_SAMPLED_ITEMS:,} evenly spaced items" in search
    assert f"more than {MAX_FRAMES_PER_VIDEO:,} frames" in read_page("docs/guides/video.md")


def test_page_names_costs_and_limits_of_requests():
    page = read_page("docs/guides/serve.md")
    for path, units in REQUEST_COSTS.items():
        assert re.search(rf"\| `(GET )?{path}`[^|]* \| {units:.0f} \|", page), path
    assert f"`POST /api/search`, a search by image | {IMAGE_SEARCH_COST:.0f} |" in page
    limits = ServerLimits()
    header = f"send the headers of a request within {limits.header_timeout_s:.0f} s"
    assert f"{header}, and the body within {limits.body_timeout_s:.0f} s" in page
    assert f"take more than {limits.decode_timeout_s:.0f} s to decode" in page
    assert f"{limits.max_request_pixels // 10**6} million pixels" in page
    assert f"keeps the last {limits.max_uploads} images" in page
    assert f"up to {limits.max_results:,} results" in page
    assert f"queries over {limits.max_query_chars} characters are refused" in page
    assert f"have {limits.max_inputs:,} inputs of up to {limits.max_input_chars:,} char" in page
    assert f"{RateLimits().burst:.0f} units per client, plus {RateLimits().per_s:.0f} per" in page
    assert f"at least {MIN_TOKEN_LENGTH} characters" in page


def test_search_page_names_limits_of_indexes():
    page = read_page("docs/guides/search.md")
    assert f"of at most {MAX_LIVE_PHOTO_BYTES >> 20} MiB with the name of a photo" in page
    assert f"the clip lasts at most {MAX_LIVE_SECONDS:.0f} s" in page
    assert f"With fewer than {MIN_ITEMS:,} items, search computes" in page
    assert f"at least {MIN_CANDIDATES:,} candidates, or {CANDIDATES_PER_RESULT} for" in page
    assert f"the number is {MEASURED_SETS} instead of {MEASURED_QUERIES}" in page
    assert (
        f"recommends the smallest encoding that keeps {TARGET_RECALL:.0%}".replace("%", " %")
        in page
    )
    assert f"a cosine of {MIN_DUPLICATE_COSINE} whose perceptual hashes" in page
    assert f"differ in at most {MAX_HAMMING_DISTANCE} of 256 bits" in page
    assert f"re-ranks the first {RERANK_DEPTH} results" in page
    assert f"scores {len(bank_texts()[0]):,} fixed texts" in page
    assert f"more than {MAX_CONTRADICTED:.0%}".replace("%", " %") in page
    assert f"At most {MAX_TEXTS:,} texts are used" in page


def test_video_page_lists_all_suffixes():
    listed = re.search(r"Supported files: ([^.]*)\.", read_page("docs/guides/video.md"))
    assert listed
    assert {f".{name}" for name in listed[1].split(", ")} == set(VIDEO_SUFFIXES)


def test_scaling_page_names_supervisions_of_one_process():
    page = read_page("docs/guides/scaling.md")
    sentence = re.search(r"- ((?:`[^`]+`[, and]*)+) train in one process, because", page)
    assert sentence
    named = set(re.findall(r"`([^`]+)`", sentence[1]))
    alone = {
        kind.__name__
        for kind in SUPERVISIONS
        if isinstance(kind.one_process_only, str) and kind.one_process_only
    }
    assert named == alone | {"PairSupervision(by='texts')"}


def test_extras_are_those_of_the_installation_page():
    page = read_page("docs/guides/installation.md")
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]

    def included(name: str) -> set[str]:
        own = re.findall(r"visavis\[([^]]+)\]", " ".join(extras[name]))
        return {name}.union(*(included(other) for names in own for other in names.split(",")))

    for_users = set(extras) - {"docs", "test", "dev"}
    assert all("train" in included(name) for name in for_users)
    left_out = re.search(r"`all` leaves out ([^.]*)\.", page)
    assert left_out
    assert set(re.findall(r"`([^`]+)`", left_out[1])) == for_users - included("all")


def test_command_line_page_names_commands_with_free_names():
    page = read_page("docs/guides/command-line.md")
    named = names_after("docs/guides/command-line.md", "Without it,", "create the next free name")
    functions = {name: getattr(visavis, name) for name in dir(visavis) if name.islower()}
    numbered = {
        " ".join(command_words(name))
        for name, function in functions.items()
        if inspect.isfunction(function)
        and re.search(r"out: .*``runs/[^`]*<n>", inspect.getdoc(function) or "")
    }
    assert named == numbered | {"compare"}
    assert "`mteb` adds to `runs/mteb`" in page
    assert inspect.signature(visavis.mteb).parameters["out"].default == "runs/mteb"


def test_tutorial_lists_default_models():
    page = read_page("docs/tutorials/search-your-images.md")
    for model in DEFAULT_MODELS:
        assert f"| `{model.name}` | {model.license} | {model.download_mb} MB |" in page


def test_pages_install_from_a_checkout():
    files = [
        PROJECT / "README.md",
        *(PROJECT / "docs").rglob("*"),
        *(PROJECT / "examples").iterdir(),
    ]
    for file in files:
        if file.suffix in (".md", ".ipynb", ".py"):
            for command in re.findall(
                r"pip install [^`\n]*visavis[^`\n]*", file.read_text("utf-8")
            ):
                assert file.name == "installation.md", command
    assert "In an environment that has visavis, `pip install 'vi" in read_page(
        "docs/guides/installation.md"
    )


def test_audit_takes_encoders_of_training_without_clip(
    few_scenes, dual_encoders, monkeypatch, tmp_path
):
    pytest.importorskip("peft")
    monkeypatch.setenv("VISAVIS_CONFIG", str(tmp_path))
    (tmp_path / "settings.toml").write_text(f'model = "{dual_encoders / "clip"}"\n')
    settings = {"data.path": str(few_scenes)}
    with_clip = default_recipe.choose_recipe(settings, downloads=NoProgress())
    assert with_clip.name == default_recipe.SMALL_DATA_RECIPE
    audit = visavis.data_audit(few_scenes, parts=["duplicates"])
    assert audit.reason == default_recipe.choose_recipe(settings).reason


@pytest.mark.parametrize(("damage", "code"), [("copy", 0), ("cut", 1)])
def test_data_check_exits_with_1_if_items_are_lost(
    few_scenes, damage, code, monkeypatch, capsys, tmp_path
):
    scenes = shutil.copytree(few_scenes, tmp_path / "scenes")
    first, second = sorted((scenes / "images").iterdir())[:2]
    second.write_bytes(first.read_bytes() if damage == "copy" else first.read_bytes()[:100])
    monkeypatch.setattr(sys, "argv", ["visavis", "data", "check", str(scenes)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code or 0) == code
    assert ("note: " in capsys.readouterr().out) == (damage == "copy")


def test_catalog_describes_every_key():
    entries = visavis.catalog("keys")["keys"]
    names = [entry["name"] for entry in entries]
    leaves = {
        key for key in _all_keys() if not any(other.startswith(f"{key}.") for other in _all_keys())
    }
    assert len(names) == len(set(names))
    assert set(names) == leaves - {"objective", "epochs"}
    assert all(entry["summary"] and entry["type"] and entry["default"] for entry in entries)
    by_name = {entry["name"]: entry for entry in entries}
    assert by_name["phases.0.keep_optimizer"]["type"] == "true or false"
    assert by_name["training.ema_decay"]["type"] == "number >= 0 and < 1"
    assert by_name["phases.0.learned_start"]["type"] == 'list of: "scale" or "bias"'
    assert by_name["data.interleave"]["default"] == "16"
    assert by_name["phases.0.epochs"]["default"] == "required"


def options_of(command, path=()):
    """Every option of a command and of those in it, with its help."""
    for parameter in command.params:
        yield " ".join([*path, parameter.opts[-1]]), getattr(parameter, "help", None)
    for name, inner in getattr(command, "commands", {}).items():
        yield from options_of(inner, (*path, name))


def test_every_option_has_help():
    options = dict(options_of(typer.main.get_command(cli.app)))
    assert len(options) > 150
    assert [name for name, text in options.items() if not text] == []


def test_readme_names_number_of_objectives():
    assert f"[{len(CATALOG)} objectives]" in read_page("README.md")
