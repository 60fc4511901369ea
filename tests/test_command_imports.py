"""A command imports only the modules that it uses: a budget of our modules for each."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache

import pytest

from visavis.models import all_models
from visavis.models.encoders.encoder_spec import OWN_PREPROCESSING
from visavis.models.encoders.scene_encoder import SceneEncoder
from visavis.models.retriever import Retriever
from visavis.models.text_tower import tower_folder
from visavis.models.text_tower_export import write_text_tower
from visavis.objectives import CATALOG as OBJECTIVES

SEARCH = ["search", "index", "a red circle"]
PROGRAM = """
import atexit, sys
def report():
    known = ("visavis", "torch", "transformers", "pyarrow", "pandas")
    names = sorted(name for name in sys.modules if name in known or name[:8] == "visavis.")
    print(*names, file=sys.stderr)
atexit.register(report)
from visavis.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(few_scenes, tiny_run, tiny_index, tmp_path_factory):
    """A data set, a run and an index with a text tower."""
    root = tmp_path_factory.mktemp("commands")
    for name, shared in (("scenes", few_scenes), ("run", tiny_run), ("index", tiny_index)):
        shutil.copytree(shared, root / name)
    model = Retriever.load(root / "run")
    write_text_tower(model, tower_folder(root / "index", model.fingerprint))
    return root


@cache
def imported(folder, *arguments):
    """Names of our modules that a command imports."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert process.returncode == 0, process.stderr
    return process.stderr.splitlines()[-1].split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        (["--help"], 29),
        (["catalog", "objectives"], 51),
        (["data", "check", "scenes"], 65),
        (SEARCH, 62),
        (["mcp", "index"], 40),
    ],
    ids=lambda value: value if isinstance(value, int) else value[0].strip("-"),
)
def test_command_imports_few_modules(folder, arguments, budget):
    names = [name for name in imported(folder, *arguments) if name.startswith("visavis")]
    assert len(names) <= budget, "\n".join(names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["objectives", "recipes"])
def test_catalog_reads_its_cache_without_torch(folder, kind):
    imported(folder, "catalog", kind)
    assert "torch" not in imported(folder, "catalog", kind, "--json")


@pytest.mark.slow
def test_search_imports_no_torch_no_training_and_no_other_store(folder):
    names = imported(folder, *SEARCH)
    unused = ("training", "research", "data.formats", "data.synthetic", "models.clip")
    prefixes = tuple(f"visavis.{name}" for name in unused)
    assert not [name for name in names if name.startswith(prefixes)]
    assert not [name for name in names if name.endswith(("milvus_store", "maxsim_search"))]
    assert not {"torch", "transformers", "pyarrow", "pandas"} & set(names)


@pytest.mark.slow
def test_mcp_server_starts_without_torch(folder):
    assert "torch" not in imported(folder, "mcp", "index")


def test_import_of_models_loads_no_objective_and_no_command():
    program = "import sys, visavis, visavis.models; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = done.stdout.split()
    unused = ("visavis.losses", "visavis.models.", "visavis.api.", "torch")
    assert not [name for name in names if name.startswith(unused)]


def test_model_catalog_keys_are_the_names_of_the_models():
    assert all(name == model.name for name, model in all_models().items())


def test_scene_preprocessing_has_the_size_of_the_encoder():
    assert OWN_PREPROCESSING["scenes"].resize == (SceneEncoder.image_size,) * 2


LOSSES_ONLY = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"PIL", "safetensors", "typer", "rich", "scipy", "tomli_w", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""Packages of the extra ``train`` that torch does not install."""


def run_losses_only(program):
    return subprocess.run(
        [sys.executable, "-c", LOSSES_ONLY + program], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_losses_and_adapters_need_no_extra():
    run = run_losses_only("""
import torch
from visavis import PairLoss, Targets, parse
from visavis.core.errors import MissingSupervision
from visavis.integrations import (
    lightning, open_clip, pytorch_metric_learning, sentence_transformers, transformers
)
from visavis.objectives import CATALOG

images, texts = torch.eye(3), torch.eye(3).repeat_interleave(2, dim=0)
for kind in CATALOG:
    try:
        print(float(PairLoss(kind())(images, texts, torch.arange(3), torch.arange(3).repeat_interleave(2))))
    except MissingSupervision:
        print("supervision")
""")
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == len(OBJECTIVES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "purpose"),
    [
        ("from visavis.cli import main; main()", "visavis: the command line"),
        ("import visavis; visavis.load('runs/mine')", "visavis.load"),
        ("import visavis; visavis.train()", "visavis.train"),
    ],
    ids=["command", "load", "train"],
)
def test_missing_train_extra_is_one_sentence(program, purpose):
    run = run_losses_only(program)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith(
        f"{purpose} needs the package {'typer' if 'cli' in program else 'tomli_w'}, which is not installed: run pip install 'visavis[train]'."
    )


WITHOUT_TORCH = """
import sys
from pathlib import Path
sys.modules["torch"] = None

import numpy as np
from visavis.retrieval.calibrate import index_correction
from visavis.retrieval.items import IndexItem
from visavis.retrieval.stores import milvus_store
from visavis.retrieval.stores.base import MaxSimQuery, SetEncoding, StoreDigest, VectorSets
from visavis.retrieval.stores.set_codec import SetCodec
from visavis.retrieval.stores.sqlite_store import SqliteStore

folder = Path(sys.argv[1])
random = np.random.default_rng(0)
rows = random.standard_normal((5000, 64)).astype(np.float32)
rows /= np.linalg.norm(rows, axis=1, keepdims=True)
sets = VectorSets(rows, np.arange(0, 5001, 2))
codec = SetCodec.fit(sets, SetEncoding(None, 16))
stores = {
    "one": (SqliteStore(folder / "one", 64, memory="1GB"), rows, rows[7:8]),
    "several": (
        SqliteStore(folder / "several", 64, late_interaction="both", codec=codec),
        sets,
        [MaxSimQuery.from_vectors((1.0, rows[14:16]))],
    ),
}
for store, vectors, queries in stores.values():
    names = [f"{number:04d}" for number in range(len(vectors))]
    store.add([IndexItem(name, name, "image", "", 0, 0) for name in names], vectors)
    store.prepare_search()
    [found] = store.search(queries, 3)
    print(found[0].key)

digest = StoreDigest(1, "0" * 16)
settings = index_correction.CorrectionSettings("CSLS(k=1)", "bank", "model", True, "")
arrays = {"digest": index_correction.digest_array(digest), "bias": np.zeros(1)}
index_correction.write_correction_file(folder / "correction", settings, arrays)
read, settings = index_correction.read_correction_file(folder / "correction")
print(read["bias"].tolist(), settings)
"""


def test_stores_and_corrections_work_without_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0007", "0007", "[0.0] CSLS(k=1) over bank (fixed-bank)"]
