"""Names that the operating system rejects, wherever a path or a model is expected: one error, or a
skipped file.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pkgutil
import sys

import pytest
import torch

import visavis
from visavis import DataError, Retriever, VisavisError, api, cli
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models.encoders.pretrained_files import model_folder
from visavis.papers.relevance.caption_estimators import CrossEncoder, SentenceModel
from visavis.retrieval.open_index import open_index
from visavis.retrieval.source_files import list_source_files

NAMES = {
    "long name": "a" * 300,
    "longer name": "a" * 5000,
    "long path": "/".join(["a" * 200] * 20),
    "long URI": "s3://" + "a" * 5000,
    "loop": "loop",
    "below a loop": "loop/x",
    "loop of two": "first",
    "NUL": "a\0b",
    "unknown user": "~nosuchuser/a",
    "pattern": "nowhere/train-{000..003}.tar",
    "long pattern": "a" * 300 + "-*.tar",
    "NUL in a pattern": "a\0-{0..1}.tar",
    "pattern below a loop": "loop/*.tar",
    "hub without a name": "hf:",
    "hub without an owner": "hf:name",
    "NUL in a hub name": "hf:owner/a\0b",
    "URL of the hub": "hf://datasets/owner/name",
}
CALLS = {
    "load": lambda name: visavis.load(name),
    "Retriever.load": lambda name: Retriever.load(name),
    "evaluate": lambda name: visavis.evaluate(name),
    "features": lambda name: visavis.features("scenes", visual=name, out="made"),
    "features of a text encoder": lambda name: visavis.features("scenes", text=name, out="made"),
    "data_convert": lambda name: visavis.data_convert([name], "made"),
    "model_folder": lambda name: model_folder(name),
    "search": lambda name: visavis.search(name, "a dog"),
    "open_index": lambda name: open_index(name),
    "cross-encoder": lambda name: (
        CrossEncoder(model=name)
        .for_captions(["a", "b"])
        .pairs(torch.tensor([0]), torch.tensor([1]))
    ),
    "sentence model": lambda name: SentenceModel(model=name).for_captions(["a", "b"]),
    **{
        key: lambda name, key=key: visavis.train(
            "demo", overrides={key: name}, data=None if key == "data.path" else "scenes", out="run"
        )
        for key in (
            "data.path",
            "data.feedback",
            "visual.encoder",
            "visual.features",
            "text.encoder",
            "text.features",
            "evaluation.forgetting",
        )
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for link, target in (("loop", "loop"), ("first", "second"), ("second", "first")):
        os.symlink(target, link)
    write_synthetic_scenes(
        tmp_path / "scenes", num_train=8, num_val=2, num_test=2, captions_per_image=1, size=32
    )
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
def test_names_the_system_rejects_are_refused(call, folder):
    for kind, name in NAMES.items():
        with pytest.raises(VisavisError) as refused:
            CALLS[call](name)
        assert "\n" not in str(refused.value), kind
        assert not os.path.exists("run"), kind


def test_data_check_reports_names_the_system_rejects(folder):
    for name in NAMES.values():
        with contextlib.suppress(DataError):
            assert not visavis.data_check(name).ok


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["evaluate", "a" * 256],
            "run: expected a path whose names have at most 255 bytes and no NUL, got 'aaa",
        ),
        (["index", "a\0b"], "run: expected a path whose names have at most 255 bytes and no NUL"),
        (["train", "/".join(["a" * 200] * 21)], "recipe: expected a path whose names have at most"),
        (["data", "check", "\ud800"], "path: expected a path of valid Unicode, got '\\ud800'."),
        (["search", "run", "\udcff"], "query: expected a text of valid Unicode, got '\\udcff'."),
        (["train", "demo", "name='\udcff'"], "overrides: expected a text of valid Unicode, got"),
        # A store may have a longer address, and a name that is not UTF-8 is a path of Linux.
        (
            ["indexes", "evaluate", "index", "x", "--store", "s3://" + "a" * 300],
            "expected an index",
        ),
        (["data", "check", "\udcff"], "\\xff: expected a path in UTF-8"),
    ],
)
def test_command_line_rejects_texts_the_system_rejects(words, message, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["visavis", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    output = capsys.readouterr()
    assert end.value.code == 1
    assert message in output.err + output.out


def test_links_in_a_loop_are_skipped_or_refused(folder):
    (folder / "scenes" / "images" / "loop.png").symlink_to("loop.png")
    (folder / "scenes" / "images" / "loop").symlink_to("../images", target_is_directory=True)
    for source in ("scenes", "scenes/images"):
        assert len(list_source_files(source).files) == 12
    assert any("loop.png" in skipped for skipped in list_source_files("scenes/images").skipped)


WORK = {
    "papers_anatomy": "visavis.papers.diagnostics.objective_profile.profile_objectives",
    "papers_board": "visavis.papers.board.recorded_runs.read_runs",
    "papers_coherence": "visavis.papers.relevance.runs.open_rankers",
    "compare": "visavis.research.experiments.run_comparison.prepare_settings",
    "papers_convert": "visavis.models.encoders.checkpoint_files.read_checkpoint",
    "data_convert": "visavis.papers.convert_features._parse_source",
    "data_scenes": "visavis.data.synthetic.write_synthetic_clips",
    "demo": "visavis.research.demo_run._run_stages",
    "papers_diagnose": "visavis.papers.diagnostics.contribution_analysis.diagnose_run",
    "export": "visavis.models.retriever.Retriever.load",
    "explain": "visavis.research.attention_maps.attention_map",
    "features": "visavis.data.dataset_reader.open_dataset",
    "index": "visavis.models.retriever.Retriever.load",
    "indexes_export": "visavis.retrieval.build.index_export.read_manifest",
    "indexes_export_votes": "visavis.retrieval.build.index_export.read_feedback",
    "data_mine": "visavis.training.runs.mine_negatives._encode",
    "mteb": "visavis.models.retriever.Retriever.load",
    "papers_relevance_fit": "visavis.papers.relevance.fine_tuning.read_stsb",
    "papers_relevance_thresholds": "visavis.papers.relevance.estimator_quality.relevance_distributions",
    "papers_reproduce": "visavis.research.experiments.run_comparison.prepare_settings",
    "train": "visavis.training.training_run.prepare_training",
}
"""The function of each command that does its work."""
ARGUMENTS = {
    "papers_anatomy": ("VLC()",),
    "papers_board": ("run",),
    "papers_coherence": ("run",),
    "papers_convert": ("weights.pt",),
    "data_convert": (["features.pkl"],),
    "papers_diagnose": ("run",),
    "explain": ("run", "image.png", "red"),
    "export": ("run",),
    "features": ("scenes",),
    "index": ("run", "scenes"),
    "indexes_export": ("index",),
    "indexes_export_votes": ("index",),
    "data_mine": ("run",),
    "mteb": ("run",),
    "papers_relevance_thresholds": ("scenes",),
    "papers_reproduce": ("cocos/1",),
    "train": ("demo",),
}
OPTIONS = {
    "papers_coherence": {"relevance": "CBoW()"},
    "compare": {"objective": ["VLC()", "NTXent()"], "data": "scenes"},
    "features": {"visual": "scenes"},
    "mteb": {"tasks": "Flickr30kT2IRetrieval"},
    "papers_reproduce": {"base_recipe": "demo", "overrides": {"data.path": "scenes"}},
    "train": {"data": "scenes"},
}


WRITES_A_FILE = (
    "explain",
    "indexes_export",
    "indexes_export_votes",
    "papers_diagnose",
    "data_mine",
    "papers_relevance_thresholds",
)


def test_every_command_with_an_output_is_listed():
    outputs = {
        name
        for name in api.__all__
        if "out" in inspect.signature(getattr(visavis, name)).parameters
    }
    assert outputs == set(WORK)


@pytest.mark.parametrize("command", WORK)
def test_existing_output_is_refused_before_any_work(command, folder, monkeypatch):
    (folder / "full").mkdir()
    (folder / "full" / "letter.txt").write_text("dear")
    (folder / "full.png").write_text("dear")
    name = "full.png" if command in WRITES_A_FILE else "full"
    module, _, function = WORK[command].rpartition(".")

    def work(*args, **kwargs):
        raise AssertionError("the work has begun")

    owner = pkgutil.resolve_name(module)
    monkeypatch.setattr(owner, function, work)
    output = {"out": name}
    with pytest.raises(VisavisError, match=r"already exists|expected a new folder"):
        getattr(visavis, command)(*ARGUMENTS.get(command, ()), **OPTIONS.get(command, {}), **output)
    assert sorted(os.listdir("full")) == ["letter.txt"]
