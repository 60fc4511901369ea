"""Checks of the installation: versions, threads, devices, data and caches, with fixes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from visavis.core.environment import (
    EnvironmentCheck,
    git_hash,
    installed_version,
    package_requirements,
    package_versions,
)
from visavis.core.errors import StorageError
from visavis.core.storage import cache_folder

_GIB = 2**30


_CPU_FEATURES = {
    "amx_tile": "AMX",
    "amx_bf16": "AMX bf16",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "avx2": "AVX2",
}


EXTRA_USES = {
    "hf": "visavis features, train: transformers encoders",
    "minilm": "visavis features, train, relevance: sentence model minilm",
    "lora": "visavis train: CLIP with low-rank adapters",
    "sentence-transformers": "visavis features, train: any text encoder of sentence-transformers",
    "timm": "visavis features, train: image encoders of timm",
    "noise": "visavis train: NoisySupervision",
    "video": "visavis features, train, search: video files and .h5 features",
    "search": "visavis index, search: LanceDB store in a folder or on object storage",
    "milvus": "visavis index, search: Milvus store",
    "scale": "visavis index, compare, reproduce: Ray cluster",
    "large": "visavis data_check, train: Parquet and Arrow tables of captions, shards",
    "serve": "visavis serve: web UI to search an index",
    "tensorboard": "visavis train: log of a training in TensorBoard",
    "wandb": "visavis train: log of a training in W&B",
    "mlflow": "visavis train: log of a training in MLflow",
    "trackio": "visavis train: log of a training in trackio",
    "export": "export of models to ONNX",
    "mteb": "evaluation on the tasks of mteb",
    "notebook": "to_pandas() of results",
    "docs": "documentation of visavis",
    "dev": "tests and checks of visavis",
}
"""Commands that need an extra, and the feature that needs it."""


def check_environment() -> list[EnvironmentCheck]:
    """Return all checks that matter before a run or in a bug report, most general first."""
    return [
        _python(),
        *(
            EnvironmentCheck(name, version)
            for name, version in package_versions().items()
            if name != "python"
        ),
        EnvironmentCheck("git", git_hash() or "not a checkout"),
        *_extras(),
        _torchvision(),
        _threads(),
        _cpu(),
        _cuda(),
        _memory(),
        _data(),
        _cache(),
        _hub(),
    ]


def _python() -> EnvironmentCheck:
    environment = sys.prefix if sys.prefix != sys.base_prefix else "no virtual environment"
    return EnvironmentCheck(
        "python",
        f"{platform.python_version()} ({platform.system()} {platform.machine()}, {environment})",
    )


def _extras() -> list[EnvironmentCheck]:
    checks, requirements = [], package_requirements()
    for extra, use in sorted(EXTRA_USES.items()):
        versions = {
            name: installed_version(name) for name, needed_by in requirements if needed_by == extra
        }
        packages = ", ".join(
            f"{name} {version or 'not installed'}" for name, version in versions.items()
        )
        fix = "" if all(versions.values()) else f"pip install 'visavis[{extra}]'"
        checks.append(EnvironmentCheck(f"extra {extra}", f"{packages} ({use})", fix=fix))
    return checks


def _torchvision() -> EnvironmentCheck:
    """visavis does not use torchvision, but a build for another torch breaks other packages on
    import.
    """
    version = installed_version("torchvision")
    if version is None:
        return EnvironmentCheck("torchvision", "not installed (not needed)")
    if (
        subprocess.run(
            [sys.executable, "-c", "import torchvision"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        return EnvironmentCheck("torchvision", f"{version} (not needed)")
    problem = (
        f"{version}, installed but not importable: it breaks timm, open_clip and others on import"
    )
    return EnvironmentCheck(
        "torchvision",
        problem,
        False,
        "pip uninstall torchvision, or install the build for this version of torch",
    )


def _threads() -> EnvironmentCheck:
    import torch

    from visavis.data.parallel import cpu_cores

    cores = cpu_cores()
    threads = torch.get_num_threads()
    value = f"torch uses {threads} of {cores} cores, OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    fix = "" if threads <= cores else f"export OMP_NUM_THREADS={cores}"
    return EnvironmentCheck("threads", value, not fix, fix)


def _cpu() -> EnvironmentCheck:
    import torch

    try:
        flags = set(
            re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[  # type: ignore[index]
                1
            ].split()
        )
    except (OSError, TypeError):
        return EnvironmentCheck("cpu", torch.backends.cpu.get_cpu_capability())
    return EnvironmentCheck(
        "cpu",
        ", ".join(name for flag, name in _CPU_FEATURES.items() if flag in flags)
        or "no vector extensions",
    )


def _cuda() -> EnvironmentCheck:
    import torch

    devices = (
        [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    missing = (
        f"torch is built for CUDA {torch.version.cuda}, no device available"
        if torch.version.cuda
        else "none (not needed)"
    )
    return EnvironmentCheck(
        "cuda",
        ", ".join(f"{device.name} ({device.total_memory / _GIB:.0f} GiB)" for device in devices)
        or missing,
    )


def _memory() -> EnvironmentCheck:
    from visavis.core.memory_budget import available_memory

    free = available_memory()
    if free is None:
        return EnvironmentCheck("memory", "unknown")
    fix = "" if free >= 2 * _GIB else "close other programs: training needs about 2 GiB"
    return EnvironmentCheck("memory", f"{free / _GIB:.1f} GiB free", not fix, fix)


def _data() -> EnvironmentCheck:
    from visavis.data.dataset_reader import data_folder, list_dataset_names

    folder = data_folder()
    fix = "export VISAVIS_DATA=FOLDER, the parent folder of flickr8k/ and other data sets"
    if folder is None:
        return EnvironmentCheck("VISAVIS_DATA", "not set", fix=fix)
    if not os.path.isdir(folder):
        return EnvironmentCheck("VISAVIS_DATA", f"{folder} is not a folder", ok=False, fix=fix)
    names = list_dataset_names(folder)
    fix = "" if names else "copy each data set into a subfolder"
    return EnvironmentCheck(
        "VISAVIS_DATA", f"{folder}: {', '.join(names) or 'no data set'}", bool(names), fix
    )


def _cache() -> EnvironmentCheck:
    try:
        folder = cache_folder()
    except StorageError:
        return EnvironmentCheck(
            "VISAVIS_CACHE",
            "not set, and this user has no home folder",
            ok=False,
            fix="export VISAVIS_CACHE=FOLDER",
        )
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    free = shutil.disk_usage(existing).free
    size = sum(file.stat().st_size for file in folder.rglob("*") if os.path.isfile(file))
    value, fix = f"{folder}: {size / _GIB:.2f} GiB used, {free / _GIB:.0f} GiB free on the disk", ""
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK):
        value, fix = (
            f"{folder} is not writable",
            "export VISAVIS_CACHE=FOLDER with a writable folder",
        )
    elif free < _GIB:
        fix = f"free disk space, or export VISAVIS_CACHE=FOLDER on a disk other than the one of {existing}"
    return EnvironmentCheck("VISAVIS_CACHE", value, not fix, fix)


def _hub() -> EnvironmentCheck:
    flags = [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
    ]
    if not flags:
        return EnvironmentCheck(
            "model hub",
            "allowed: models are downloaded when they are first used. The connection was not "
            "tested",
        )
    return EnvironmentCheck(
        "model hub",
        f"offline ({', '.join(flags)})",
        fix=f"unset {' '.join(flags)} to download models by name",
    )
