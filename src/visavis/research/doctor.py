"""Checks of the installation: versions, threads, devices, data and caches, with fixes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
    "train": "the command line, training, evaluation, comparisons and reports",
    "hf": "visavis features, train: transformers encoders",
    "minilm": "visavis features, train, papers relevance: sentence model minilm",
    "lora": "visavis train: CLIP with low-rank adapters",
    "sentence-transformers": "visavis features, train, index: models of sentence-transformers",
    "timm": "visavis features, train: image encoders of timm",
    "noise": "visavis train: NoisySupervision",
    "video": "visavis features, train, search: video files and .h5 features",
    "photos": "visavis index, search, features, train: HEIC, JPEG XL and camera raw photos",
    "search": "visavis index, search: decoders of photos, and fast products of vectors",
    "milvus": "visavis index, search: Milvus store",
    "scale": "visavis index, compare, papers reproduce: Ray cluster",
    "large": "visavis data check, train: Parquet and Arrow tables of captions, shards",
    "serve": "visavis serve: web UI to search an index",
    "mcp": "visavis mcp: search tools of an assistant",
    "langchain": "retriever and embeddings of LangChain",
    "llama-index": "retriever and embeddings of LlamaIndex",
    "tensorboard": "visavis train: log of a training in TensorBoard",
    "wandb": "visavis train: log of a training in W&B",
    "mlflow": "visavis train: log of a training in MLflow",
    "trackio": "visavis train: log of a training in trackio",
    "export": "export of models to ONNX",
    "mteb": "evaluation on the tasks of mteb",
    "notebook": "to_pandas() of results",
    "docs": "documentation of visavis",
    "test": "make test",
    "dev": "tests and checks of visavis",
}
"""Commands that need an extra, and the feature that needs it."""


def check_environment() -> list[EnvironmentCheck]:
    """Return all checks that matter before a run or in a bug report, most general first."""
    return [*_packages(), *_hardware(), *_locations()]


def _packages() -> Iterator[EnvironmentCheck]:
    from visavis.data.images import readable_formats
    from visavis.data.photo_decoder import PACKAGES

    environment = sys.prefix if sys.prefix != sys.base_prefix else "no virtual environment"
    yield EnvironmentCheck(
        "python",
        f"{platform.python_version()} ({platform.system()} {platform.machine()}, {environment})",
    )
    for name, version in package_versions().items():
        if name != "python":
            yield EnvironmentCheck(name, version)
    yield EnvironmentCheck("git", git_hash() or "not a checkout")
    requirements = package_requirements()
    for extra, use in sorted(EXTRA_USES.items()):
        versions = {
            name: installed_version(name) for name, needed_by in requirements if needed_by == extra
        }
        packages = ", ".join(
            f"{name} {version or 'not installed'}" for name, version in versions.items()
        )
        fix = "" if all(versions.values()) else f"pip install 'visavis[{extra}]'"
        yield EnvironmentCheck(f"extra {extra}", f"{packages} ({use})", fix=fix)
    # visavis does not use torchvision, but a build for another torch breaks other packages on
    # import.
    torchvision = installed_version("torchvision")
    # -P: a file torchvision.py in the current folder must not run.
    probe = [sys.executable, "-P", "-c", "import torchvision"]
    if torchvision is None:
        yield EnvironmentCheck("torchvision", "not installed (not needed)")
    elif subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        yield EnvironmentCheck("torchvision", f"{torchvision} (not needed)")
    else:
        yield EnvironmentCheck(
            "torchvision",
            f"{torchvision}, installed but not importable: it breaks timm, open_clip and others on "
            "import",
            ok=False,
            fix="pip uninstall torchvision, or install the build for this version of torch",
        )
    formats = readable_formats()
    missing = [name for name in PACKAGES if name not in formats]
    value = ", ".join(formats)
    fix = ""
    if missing:
        value += f" (not installed: {', '.join(missing)})"
        fix = "pip install 'visavis[photos]'"
    yield EnvironmentCheck("image formats", value, fix=fix)


def _hardware() -> Iterator[EnvironmentCheck]:
    import torch

    from visavis.core.memory_budget import available_memory
    from visavis.data.parallel import cpu_cores

    cores = cpu_cores()
    threads = torch.get_num_threads()
    value = f"torch uses {threads} of {cores} cores, OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    fix = "" if threads <= cores else f"export OMP_NUM_THREADS={cores}"
    yield EnvironmentCheck("threads", value, not fix, fix)

    # Only Linux lists the flags of its processor.
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8") if os.access(cpu_info, os.R_OK) else ""
    if flags := re.search(r"^flags\s*:(.*)$", lines, re.MULTILINE):
        found = [name for flag, name in _CPU_FEATURES.items() if flag in flags[1].split()]
        yield EnvironmentCheck("cpu", ", ".join(found) or "no vector extensions")
    else:
        yield EnvironmentCheck("cpu", torch.backends.cpu.get_cpu_capability())

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = map(torch.cuda.get_device_properties, range(number))
    missing = (
        f"torch is built for CUDA {torch.version.cuda}, no device available"
        if torch.version.cuda
        else "none (not needed)"
    )
    names = [f"{device.name} ({device.total_memory / _GIB:.0f} GiB)" for device in devices]
    # Only computers of Apple have MPS, and they have no CUDA.
    if torch.backends.mps.is_available():
        size = torch.mps.recommended_max_memory() / _GIB
        yield EnvironmentCheck("mps", f"GPU of this computer ({size:.0f} GiB)")
    else:
        yield EnvironmentCheck("cuda", ", ".join(names) or missing)

    free = available_memory()
    if free is None:
        yield EnvironmentCheck("memory", "unknown")
    else:
        fix = "" if free >= 2 * _GIB else "close other programs: training needs about 2 GiB"
        yield EnvironmentCheck("memory", f"{free / _GIB:.1f} GiB free", not fix, fix)


def _locations() -> Iterator[EnvironmentCheck]:
    from visavis.data.data_paths import data_folder
    from visavis.data.dataset_reader import list_dataset_names
    from visavis.data.hub_files import offline_variables

    data = data_folder()
    fix = "export VISAVIS_DATA=FOLDER, the parent folder of flickr8k/ and other data sets"
    if data is None:
        yield EnvironmentCheck("VISAVIS_DATA", "not set", fix=fix)
    elif not os.path.isdir(data):
        yield EnvironmentCheck("VISAVIS_DATA", f"{data} is not a folder", ok=False, fix=fix)
    else:
        names = list_dataset_names(data)
        fix = "" if names else "copy each data set into a subfolder"
        value = f"{data}: {', '.join(names) or 'no data set'}"
        yield EnvironmentCheck("VISAVIS_DATA", value, bool(names), fix)
    yield _cache()
    flags = offline_variables()
    value = (
        f"offline ({', '.join(flags)})"
        if flags
        else "allowed: models are downloaded when they are first used"
    )
    fix = f"unset {' '.join(flags)} to download models by name" if flags else ""
    yield EnvironmentCheck("model hub", value, fix=fix)


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
    # The folder is created by the first command that writes to it.
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    free = shutil.disk_usage(existing).free
    size = sum(file.stat().st_size for file in folder.rglob("*") if os.path.isfile(file))
    value = f"{folder}: {size / _GIB:.2f} GiB used, {free / _GIB:.0f} GiB free on the disk"
    fix = ""
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK):
        value = f"{folder} is not writable"
        fix = "export VISAVIS_CACHE=FOLDER with a writable folder"
    elif free < _GIB:
        fix = f"free disk space, or export VISAVIS_CACHE=FOLDER on a disk other than the one of {existing}"
    return EnvironmentCheck("VISAVIS_CACHE", value, not fix, fix)
