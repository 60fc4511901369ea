"""Own parts from outside the package: run by name, recorded, and never run by a stored file."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from tests.fixtures.recipes import recipe_text, write_recipe

import visavis
from visavis import cli
from visavis.core import own_code
from visavis.core.errors import RunError, SpecError
from visavis.evaluation import rank_scores
from visavis.losses.objective import Objective, Reduction
from visavis.losses.pair_summaries import find_positive_pairs, log1p_exp
from visavis.objectives import TripletHN
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import read_run_recipe

SOFT_HN = '''
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from visavis.losses.objective import Objective, Reduction
from visavis.losses.pair_summaries import find_positive_pairs, log1p_exp

(Path(__file__).parent / "ran").touch()


@dataclass(frozen=True, kw_only=True)
class SoftHN(Objective):
    """Smooth hinge on the hardest negative."""

    margin: float = 0.2
    reduction: Reduction = "sum"

    def one_way(self, scores, targets):
        pairs = find_positive_pairs(scores, targets)
        return log1p_exp(pairs.hardest - pairs.positive + self.margin)
'''
MRR = """
from visavis.evaluation.metrics import Metric

MRR = Metric(
    name="mrr_fraction",
    label="MRR",
    definition="mean reciprocal rank of the first correct {candidate} of a {query}",
    formula="mean(1 / rank)",
    unit="fraction",
    function=lambda ranks: (1 / ranks[:, 0]).mean(),
)
"""

ESTIMATOR = '''
from dataclasses import dataclass

import torch

from visavis.papers.relevance.base import CaptionRelevance, RelevanceEstimator


class LengthRelevance(CaptionRelevance):
    def __init__(self, lengths, scale):
        self.lengths, self.scale = lengths, scale

    def __call__(self, rows, columns):
        return (-self.scale * (self.lengths[rows][:, None] - self.lengths[columns]).abs()).exp()

    def pairs(self, first, second):
        return (-self.scale * (self.lengths[first] - self.lengths[second]).abs()).exp()


@dataclass(frozen=True, kw_only=True)
class Length(RelevanceEstimator):
    """Captions of similar length are relevant to each other."""

    scale: float = 1.0

    def for_captions(self, captions):
        return LengthRelevance(torch.tensor([float(len(one)) for one in captions]), self.scale)
'''


@dataclass(frozen=True, kw_only=True)
class Softer(Objective):
    """An objective of a module that Python imported already."""

    margin: float = 0.2
    reduction: Reduction = "sum"

    def one_way(self, scores, targets):
        pairs = find_positive_pairs(scores, targets)
        return log1p_exp(pairs.hardest - pairs.positive + self.margin)


@pytest.fixture(autouse=True)
def no_code(monkeypatch):
    """Each test starts as a new process does, without named code."""
    monkeypatch.setenv(own_code.VARIABLE, "")  # restored to absent after the test
    for cached in (own_code._load, own_code._hash_of):
        cached.cache_clear()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A researcher's folder with an objective, a metric and a recipe."""
    (tmp_path / "soft_hn.py").write_text(SOFT_HN)
    (tmp_path / "mrr.py").write_text(MRR)
    write_recipe(tmp_path / "tiny.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def forget():
    """Continue as another process, which inherits nothing."""
    os.environ.pop(own_code.VARIABLE, None)
    for cached in (own_code._load, own_code._hash_of):
        cached.cache_clear()


def train(few_scenes, **changes):
    overrides = {"objective": "soft_hn.py:SoftHN(margin=0.1)", **changes}
    return visavis.train("tiny.toml", overrides=overrides, data=few_scenes, out="run")


def test_own_objective_is_parsed_and_equals_a_shipped_form(lab):
    objective = visavis.parse("soft_hn.py:SoftHN(margin=0.1)")
    assert repr(objective) == "soft_hn.py:SoftHN(margin=0.1, reduction='sum')"
    assert visavis.parse(repr(objective)) == objective
    scores = torch.randn(5, 5, dtype=torch.float64)
    hinge = TripletHN(margin=0.1)(1e4 * scores, visavis.Targets.paired(5))
    sharp = objective(1e4 * scores, visavis.Targets.paired(5))
    torch.testing.assert_close(sharp, hinge, rtol=1e-3, atol=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("soft_hn.py:Soft()", r"soft_hn\.py: expected Soft to be a Objective: did you mean SoftHN"),
        ("soft_hn.py:Path()", r"expected Path to be a Objective: known: SoftHN"),
        ("other.py:SoftHN()", r"other\.py: expected Python code .*FileNotFoundError"),
        ("no.such.package:SoftHN()", r"no\.such\.package: expected Python code .*No module named"),
        ("soft_hn.py:SoftHN(margn=1)", r"SoftHN has no field 'margn': did you mean margin"),
        ("soft_hn.py:SoftHN(margin='x')", r"SoftHN\.margin: expected a finite number, got 'x'"),
    ],
)
def test_own_objective_reports_what_is_wrong(lab, text, message):
    with pytest.raises(SpecError, match=message):
        visavis.parse(text)


PLAIN = SOFT_HN.replace("@dataclass(frozen=True, kw_only=True)\n", "")
INHERITED = """
from __future__ import annotations
from visavis.objectives import TripletHN
Variance = float
class SoftHN(TripletHN):
    scale: Variance = 2.0
"""


@pytest.mark.parametrize("code", [PLAIN, INHERITED], ids=["plain", "inherited"])
@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("use", ["parse", "train", "compare", "anatomy"])
def test_own_objective_that_is_no_dataclass_is_one_error(lab, code, as_object, use):
    (lab / "soft_hn.py").write_text(code)
    visavis.allow_code("soft_hn.py")
    objective = "soft_hn.py:SoftHN()"
    if as_object:
        objective = own_code._load(str(lab / "soft_hn.py")).SoftHN()
    calls = {
        "parse": lambda: visavis.parse(objective),
        "train": lambda: visavis.train("tiny.toml", overrides={"objective": objective}, data="x"),
        "compare": lambda: visavis.compare("tiny.toml", objective=[objective], data="x"),
        "anatomy": lambda: visavis.papers_anatomy(objective),
    }
    with pytest.raises(
        visavis.VisavisError,
        match=r"SoftHN: expected a dataclass.* Add the line @dataclass\(frozen=True, kw_only=True\) "
        r"above class SoftHN",
    ):
        calls[use]()


@pytest.mark.parametrize("source", ["soft_hn.py", "soft_hn"])
def test_own_code_leaves_the_import_path_as_it_was(lab, monkeypatch, source):
    monkeypatch.setattr(sys, "path", [str(lab), *sys.path])
    before = list(sys.path)
    visavis.allow_code(source)
    sys.modules.pop(source, None)
    assert sys.path == before


def test_own_metric_does_not_replace_one_of_visavis(lab):
    (lab / "mrr.py").write_text(MRR.replace("mrr_fraction", "r1"))
    visavis.allow_code("mrr.py")
    with pytest.raises(SpecError, match=r"^i2t_r1: expected a metric with a name of its own"):
        rank_scores(torch.eye(2), range(2), range(2))


def test_run_with_own_code_is_used_without_running_it(lab, few_scenes):
    trained = train(few_scenes, **{"evaluation.extra_metrics": ["mrr.py:MRR"]})
    assert trained.objective == "soft_hn.py:SoftHN(margin=0.1, reduction='sum')"
    keys = trained.test.extra_metrics
    assert keys == ("i2t_mrr_fraction", "t2i_mrr_fraction")
    ranks = torch.as_tensor(trained.test.image_ranks)
    assert trained.test.metrics["i2t_mrr_fraction"] == pytest.approx((1 / ranks).mean().item())
    record = json.loads((lab / "run" / "environment.json").read_text())
    assert sorted(record["code"]) == ["mrr.py", "soft_hn.py"]
    forget()
    (lab / "ran").unlink()
    assert visavis.evaluate("run").metrics["rsum"] == trained.test.metrics["rsum"]
    assert visavis.load("run").encode_texts(["a red circle"]).shape[0] == 1
    recipe = read_run_recipe(lab / "run")
    assert repr(recipe.phases[0].objective) == trained.objective
    with pytest.raises(
        SpecError, match=r"never run code by themselves\. Name it with visavis --code"
    ):
        recipe.phases[0].objective.gradient_scale  # noqa: B018
    with pytest.raises(
        RunError, match=r"run: expected its own code (mrr|soft_hn)\.py, which a run never"
    ):
        visavis.train(resume="run")
    assert not (lab / "ran").exists()


def test_run_with_own_code_resumes_with_unchanged_code_only(lab, few_scenes):
    first = train(few_scenes)
    forget()
    moved = lab / "elsewhere" / "soft_hn.py"
    moved.parent.mkdir()
    (lab / "soft_hn.py").rename(moved)
    visavis.allow_code(moved)
    assert visavis.train(resume="run").test.metrics == first.test.metrics
    forget()
    moved.write_text(SOFT_HN + "# changed\n")
    visavis.allow_code(moved)
    with pytest.raises(RunError, match=r"run: soft_hn\.py changed since the run began"):
        visavis.train(resume="run")


def write_modules(folder, **texts):
    for name, text in texts.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def modules():
    """Imported modules are forgotten after the test."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def hash_in_new_process(source):
    forget()
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]
    visavis.allow_code(source)
    (changed,) = own_code.code_hashes().values()
    return changed


@pytest.mark.parametrize(
    ("changed", "is_included"),
    [
        ("own_direct", True),
        ("own_indirect", True),
        ("own_package/__init__", True),
        ("own_package/own_relative", True),
        ("own_other", False),
    ],
)
def test_hash_of_own_code_has_the_modules_that_it_imports(lab, modules, changed, is_included):
    write_modules(
        lab,
        own_direct="from own_indirect import VALUE",
        own_indirect="VALUE = 1",
        own_package__own_relative="VALUE = 1",
        own_other="VALUE = 1",
    )
    (lab / "own_package" / "__init__.py").write_text("from . import own_relative")
    imports = "import json\nimport own_direct\nfrom own_package import own_relative\n"
    (lab / "soft_hn.py").write_text(
        SOFT_HN.replace("from dataclasses", imports + "from dataclasses")
    )
    first = hash_in_new_process("soft_hn.py")
    assert hash_in_new_process("soft_hn.py") == first
    with (lab / f"{changed}.py").open("a") as file:
        file.write("\nMORE = 12345\n")
    assert (hash_in_new_process("soft_hn.py") != first) == is_included


def test_hash_of_own_package_has_the_modules_that_it_imports(lab, modules):
    (lab / "own_lab").mkdir()
    write_modules(lab, own_lab__losses="from .helper import SCALE", own_lab__helper="SCALE = 0.1")
    (lab / "own_lab" / "__init__.py").touch()
    first = hash_in_new_process("own_lab.losses")
    (lab / "own_lab" / "helper.py").write_text("SCALE = 5.0")
    assert hash_in_new_process("own_lab.losses") != first


def test_hash_of_own_code_leaves_installed_packages_out(lab, modules, monkeypatch):
    """An environment in a folder below the file, as of most projects."""
    write_modules(lab / "env", own_installed="VALUE = 1")
    monkeypatch.syspath_prepend(lab / "env")
    (lab / "soft_hn.py").write_text(
        SOFT_HN.replace("from dataclasses", "import own_installed\nfrom dataclasses")
    )
    first = hash_in_new_process("soft_hn.py")
    (lab / "env" / "own_installed.py").write_text("VALUE = 12345")
    assert hash_in_new_process("soft_hn.py") == first


def test_files_of_own_code_need_different_names(lab):
    visavis.allow_code("soft_hn.py")
    (lab / "b").mkdir()
    (lab / "b" / "soft_hn.py").write_text(SOFT_HN)
    with pytest.raises(SpecError, match=r"b/soft_hn\.py: expected own code with a file name"):
        visavis.parse("b/soft_hn.py:SoftHN()")


def test_object_of_an_imported_class_trains(lab, few_scenes):
    trained = train(few_scenes, objective=Softer(margin=0.1))
    assert trained.objective == "tests.training.test_own_code:Softer(margin=0.1, reduction='sum')"


@pytest.mark.slow
def test_own_objective_is_compared_and_trains_on_two_processes(lab, few_scenes):
    settings = ["--data", str(few_scenes), "--seeds", "2", "--no-tune", "--workers", "2", "--quiet"]
    objectives = ["--objective", "soft_hn.py:SoftHN()", "--objective", "TripletHN()"]
    settings.append('evaluation.extra_metrics=["mrr.py:MRR"]')
    command = [sys.executable, "-m", "visavis", "compare", "tiny.toml", *objectives, *settings]
    subprocess.run([*command, "--out", "compared", "--json"], check=True, cwd=lab)
    assert "soft_hn.py:SoftHN()" in (lab / "compared" / "table.md").read_text()
    page = (lab / "compared" / "report.html").read_text()
    assert "soft_hn.py:SoftHN" in page
    head, *_, chance = (lab / "compared" / "table.md").read_text().split("\n\n")[0].split("\n")
    columns = [cell.strip() for cell in head.split("|")]
    assert columns[-3:-1] == ["image to text MRR", "text to image MRR"]
    assert chance.endswith("| - | - |")
    assert "text to image MRR" in page
    assert "compared,t2i_mrr_fraction" in (lab / "compared" / "table.csv").read_text().replace(
        "soft_hn.py:SoftHN()", "compared"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    training = ["train", "tiny.toml", "objective=soft_hn.py:SoftHN()", "--data", str(few_scenes)]
    subprocess.run([*torchrun, "-m", "visavis", *training, "--out", "two"], check=True, cwd=lab)
    assert (lab / "two" / "result.json").exists()


def test_option_code_names_own_code(lab, few_scenes, monkeypatch, capsys):
    train(few_scenes)
    forget()
    monkeypatch.setattr(
        sys, "argv", ["visavis", "--code", "soft_hn.py", "train", "--resume", "run"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "soft_hn.py:SoftHN(margin=0.1" in capsys.readouterr().out


EVIL = SOFT_HN.replace("SoftHN", "Evil").replace('"ran"', '"evil"')


@pytest.mark.slow
def test_stored_texts_never_run_code(lab, few_scenes):
    """Code in the current folder that the files of a run and of a comparison name."""
    (lab / "evil.py").write_text(EVIL)
    visavis.train("tiny.toml", data=few_scenes, out="run")
    compared = visavis.compare(
        "tiny.toml",
        objective=["VLC()", "TripletHN()"],
        data=few_scenes,
        seeds=2,
        out="cmp",
        tune=False,
    )
    assert len(compared.settings) == 2
    for file in [*lab.rglob("run.toml"), *lab.rglob("result.json"), *lab.rglob("plan.json")]:
        file.write_text(re.sub(r"(VLC|TripletHN)\([^)\"]*\)", "evil.py:Evil()", file.read_text()))
    (lab / "mine.toml").write_text('extends = "run/run.toml"\nseed = 3\n')
    attempts = [
        lambda: visavis.evaluate("run"),
        lambda: visavis.load("run").encode_texts(["a red circle"]),
        lambda: visavis.export("run", format="onnx", out="onnx"),
        lambda: visavis.papers_diagnose("run"),
        lambda: visavis.train(resume="run"),
        lambda: visavis.train("run/run.toml", out="again"),
        lambda: visavis.train("mine.toml", out="mine"),
        lambda: visavis.compare("run/run.toml", objective="VLC()", seeds=1, out="c", tune=False),
        lambda: visavis.compare("run/run.toml", grid=["seed=[1, 2]"], seeds=1, out="g", tune=False),
        lambda: visavis.compare(resume="cmp"),
        lambda: visavis.compare(resume="cmp", seeds=3),
    ]
    for attempt in attempts:
        with suppress(visavis.VisavisError):
            attempt()
        assert not (lab / "evil").exists()


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import no_such_module", "def ("])
def test_code_that_cannot_be_imported_is_one_error(lab, code):
    (lab / "broken.py").write_text(code)
    with pytest.raises(SpecError, match=r"broken\.py: expected Python code that can be imported"):
        visavis.parse("broken.py:X()")


@pytest.mark.slow
def test_edited_code_is_not_mixed_with_runs_of_the_old_one(lab, few_scenes):
    settings = {"data": few_scenes, "out": "cmp", "tune": False}
    visavis.compare("tiny.toml", objective=["soft_hn.py:SoftHN()", "VLC()"], seeds=2, **settings)
    forget()
    (lab / "soft_hn.py").write_text(SOFT_HN.replace("log1p_exp(", "2 * log1p_exp("))
    visavis.allow_code("soft_hn.py")
    with pytest.raises(RunError, match=r"soft_hn\.py changed since the run began"):
        visavis.compare(resume="cmp", seeds=3)
    run = next((lab / "cmp" / "runs").glob("*soft*"))
    with pytest.raises(RunError, match=r"soft_hn\.py changed since the run began"):
        visavis.evaluate(run)


def test_relevance_estimator_and_supervision_come_from_a_file(lab, few_scenes):
    (lab / "estim.py").write_text(ESTIMATOR)
    trained = train(
        few_scenes, **{"evaluation.sections": ["Coherence(relevance='estim.py:Length()')"]}
    )
    assert trained.test.sections[0].relevance == "estim.py:Length(scale=1.0)"
    forget()
    again = visavis.evaluate("run", section="Coherence(relevance='estim.py:Length()')")
    assert again.sections[0].relevance == "estim.py:Length(scale=1.0)"


@pytest.mark.slow
def test_compare_takes_objects(lab, few_scenes):
    result = visavis.compare(
        "tiny.toml",
        objective=[Softer(), TripletHN()],
        data=few_scenes,
        seeds=1,
        out="c",
        tune=False,
    )
    assert result.settings[0].choice.startswith("tests.training.test_own_code:Softer(")


RECIPES_WITH_CODE = {
    "objective": recipe_text({"objective": "evil.py:Evil()"}),
    "supervision": recipe_text({"supervision": "evil.py:Evil()"}),
    "nested": recipe_text(
        {"objective": "Ladder()", "supervision": "GradedSupervision(relevance='evil.py:Evil()')"}
    ),
    "estimator": recipe_text(evaluation={"sections": "Coherence(relevance='evil.py:Evil()')"}),
    "metric": recipe_text(evaluation={"extra_metrics": ["evil.py:Evil"]}),
    "model": recipe_text(model={"kind": "evil.py:Evil", "word_dim": None}),
}


@pytest.mark.parametrize("part", RECIPES_WITH_CODE)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_recipe_does_not_run_the_code_that_it_names(lab, monkeypatch, capsys, part, command):
    """The error names the command that runs it."""
    folder = lab / "from somebody"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL)
    (folder / "theirs.toml").write_text(RECIPES_WITH_CODE[part])
    words = [command, "from somebody/theirs.toml", "--data", "nowhere"]
    monkeypatch.setattr(sys, "argv", ["visavis", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert not (folder / "evil").exists()
    message = capsys.readouterr().err.strip()
    assert re.search(r"visavis: evil\.py:Evil: expected own code that you name", message)
    _, _, repeated = message.partition("Repeat it with: ")
    assert shlex.split(repeated)[1:] == ["--code", "from somebody/evil.py", *words]
    monkeypatch.setattr(sys, "argv", shlex.split(repeated))
    with pytest.raises(SystemExit):
        cli.main()
    assert (folder / "evil").exists()


def test_override_names_its_code_but_not_that_of_the_recipe(lab):
    """The rest of the recipe stays unnamed, also if an override replaces the part."""
    (lab / "evil.py").write_text(EVIL)
    (lab / "theirs.toml").write_text(recipe_text({"objective": "evil.py:Evil()"}))
    recipe = read_recipe("theirs.toml", {"objective": "soft_hn.py:SoftHN()"})
    assert repr(recipe.phases[0].objective).startswith("soft_hn.py:SoftHN(")
    assert not (lab / "evil").exists()
    with pytest.raises(own_code.CodeNotNamed):
        read_recipe("theirs.toml")
