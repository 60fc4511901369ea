"""Scripts of benchmarks and studies on the smallest useful inputs: each ends without an error."""

import subprocess
import sys
from pathlib import Path

import pytest

from visavis.recipes.files import read_recipe

from .conftest import PROJECT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(PROJECT / "studies")
    import matchers

COMMANDS = [
    "benchmarks/coherence.py --images 100 --ks 10 50",
    "benchmarks/engine.py --rows large --objectives VLC --size 256 --repeats 1",
    "benchmarks/index.py --images 60",
    "benchmarks/scan.py --images 20 --captions 40 --looped 10",
    "benchmarks/serve.py --clients 2 --seconds 1 --requests 20",
    "studies/errata.py --check",
    "studies/synthetic_clips.py --seeds 1 --clips 40 --out {out}",
    "studies/recompute_claims.py",
]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split(".py")[0])
def test_script_runs(command, tmp_path):
    script, *arguments = command.format(out=tmp_path / "out").split()
    done = subprocess.run([sys.executable, PROJECT / script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", matchers.CANDIDATES)
def test_matcher_study_has_valid_recipes(name):
    job = matchers.Job(name, "Unified", 1e-3, 1, 5.0, 0.4, 1000, Path("runs"))
    assert read_recipe(matchers.RECIPE, job.overrides()).phases
