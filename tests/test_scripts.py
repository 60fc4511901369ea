"""Scripts of benchmarks and studies on the smallest useful inputs: each ends without an error."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import SceneGraphs, write_synthetic_scenes
from visavis.training.recipes.files import read_recipe

from .conftest import PROJECT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(PROJECT / "studies")
    import ladder
    import matchers

COMMANDS = [
    "benchmarks/coherence.py --images 100 --ks 10 50",
    "benchmarks/compiled_loss.py --pairs 32 --backend eager",
    "benchmarks/engine.py --rows large --objectives VLC --size 256 --repeats 1",
    "benchmarks/index.py --images 60",
    "benchmarks/index.py --loop --images 8 --size 400 300 --repeats 1",
    "benchmarks/query_start.py --items 1000 --repeats 1",
    "benchmarks/scan.py --images 20 --captions 40 --looped 10",
    "benchmarks/serve.py --clients 2 --seconds 1 --requests 20",
    "benchmarks/typing_clients.py --clients 2 --seconds 1 --rounds 1",
    "studies/errata.py --check",
    "studies/synthetic_clips.py --seeds 1 --clips 40 --out {out}",
    "studies/board.py --seeds 1 --limit 1 --data scenes --out {out}",
    "studies/recompute_claims.py",
]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split(".py")[0])
def test_script_runs(command, tmp_path):
    script, *arguments = command.format(out=tmp_path / "out").split()
    done = subprocess.run(
        [sys.executable, PROJECT / script, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", matchers.CANDIDATES)
def test_matcher_study_has_valid_recipes(name):
    job = matchers.Job(name, "Unified", 1e-3, 1, 5.0, 0.4, 1000, Path("runs"))
    assert read_recipe(matchers.RECIPE, job.overrides()).phases


def test_ladder_study_ranks_the_long_tail_by_relevance(tmp_path):
    scenes = write_synthetic_scenes(
        tmp_path / "scenes", num_train=3, num_val=0, num_test=30, size=32
    )
    test = open_dataset(scenes).split("test")
    relevance = torch.from_numpy(
        SceneGraphs.open(scenes).relevance(test.image_rows, test.caption_rows)
    )
    measures = ladder.long_tail_ndcg(test, relevance)
    assert measures == pytest.approx({"nDCG@10 i2t long tail": 1.0, "nDCG@10 t2i long tail": 1.0})


@pytest.mark.slow
def test_study_passes_runs_to_its_workers(tmp_path):
    shutil.copytree(PROJECT / "studies", tmp_path / "studies")
    plan = 'rates = [1e-3]\n[objectives]\nUnified = { try = ["Unified()"], with = { recipe = "no-recipe" } }\n[experiments]\n'
    (tmp_path / "studies" / "study.toml").write_text(plan)
    command = [sys.executable, tmp_path / "studies" / "study.py", "--workers", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    # The worker reads the recipe.
    assert done.stderr.splitlines()[-1].startswith("study: no-recipe"), done.stderr[-2000:]
