"""The machine and the installation: versions, threads, accelerators, data, caches, and how to fix what is wrong.

Nothing here imports an optional package: installed versions come from package metadata.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from visavis.storage import cache_folder

_GIB = 2**30
_CPU_FEATURES = {"amx_tile": "AMX", "amx_bf16": "AMX bf16", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "avx2": "AVX2"}

SERVES = {
    "hf": "visavis features, train: encoders of transformers",
    "minilm": "visavis features, train, relevance: the sentence model minilm",
    "lora": "visavis train: CLIP with low-rank adapters",
    "report": "visavis demo, coherence, relevance: pictures",
    "noise": "visavis train: NoisySupervision",
    "video": "visavis features, train, search: video files, and .h5 of features",
    "search": "visavis index, search: a store in a folder or on object storage",
    "milvus": "visavis index, search: a store in Milvus",
    "scale": "visavis index: a Ray cluster",
    "serve": "visavis serve: a page to search an index",
    "dev": "tests and checks of visavis itself",
}
"""The commands that need an extra, and what for."""


@dataclass(frozen=True)
class Fact:
    """One line of ``visavis doctor``. ok: nothing is wrong. remedy: how to fix it, or how to enable more; may be empty."""

    name: str
    value: str
    ok: bool = True
    remedy: str = ""


def program() -> str:
    """The command that runs visavis from the current folder: its name if it is on the PATH, else its path."""
    beside = Path(sys.prefix) / "bin" / "visavis"
    if shutil.which("visavis") is not None or not beside.exists():
        return "visavis"
    return shlex.quote(os.path.relpath(beside))


def inspect() -> list[Fact]:
    """All facts that matter before a run or in a bug report, most general first."""
    return [
        _python(),
        *(Fact(name, version) for name, version in versions().items() if name != "python"),
        Fact("git", git_hash() or "not a checkout"),
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


def versions() -> dict[str, str]:
    """Versions that a run's results depend on: Python, visavis and the packages it always needs."""
    core = [name for name, extra in _requirements() if extra is None]
    return {"python": platform.python_version()} | {name: installed(name) or "not installed" for name in ["visavis", *core]}


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it; None if absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_hash() -> str | None:
    """The commit of the checkout that visavis runs from, with ``+`` if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{'+' if changed else ''}" if commit else None


def _python() -> Fact:
    place = sys.prefix if sys.prefix != sys.base_prefix else "no virtual environment"
    return Fact("python", f"{platform.python_version()} ({platform.system()} {platform.machine()}, {place})")


def _requirements() -> list[tuple[str, str | None]]:
    """``(package, extra)`` for everything that visavis can use, as its own metadata says; extra None: always needed."""
    requirements = []
    for line in importlib.metadata.requires("visavis") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        requirements.append((re.split(r"[^\w.-]", line, maxsplit=1)[0], extra[1] if extra else None))
    return requirements


def _extras() -> list[Fact]:
    packages: dict[str, list[str]] = {}
    for package, extra in _requirements():
        if extra in SERVES:
            packages.setdefault(extra, []).append(package)
    return [_extra(extra, names) for extra, names in packages.items()]


def _extra(extra: str, names: list[str]) -> Fact:
    known = {name: installed(name) for name in names}
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in known.items())
    remedy = "" if all(known.values()) else f"pip install 'visavis[{extra}]'"
    return Fact(f"extra {extra}", f"{packages} ({SERVES[extra]})", remedy=remedy)


def _torchvision() -> Fact:
    """torchvision is never used here, but a build that does not fit torch breaks other packages on import."""
    version = installed("torchvision")
    if version is None:
        return Fact("torchvision", "not installed (not needed)")
    importing = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
    if importing.returncode == 0:
        return Fact("torchvision", f"{version} (not needed)")
    return Fact(
        "torchvision",
        f"{version}, installed but not importable: it breaks timm, open_clip and others on import",
        ok=False,
        remedy="pip uninstall torchvision, or install the build that fits this torch",
    )


def _threads() -> Fact:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    value = f"torch uses {threads} of {cores} cores, OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    return Fact("threads", value, threads <= cores, "" if threads <= cores else f"export OMP_NUM_THREADS={cores}")


def _cpu() -> Fact:
    import torch

    try:
        flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())  # type: ignore[index]
    except (OSError, TypeError):
        return Fact("cpu", torch.backends.cpu.get_cpu_capability())
    return Fact("cpu", ", ".join(name for flag, name in _CPU_FEATURES.items() if flag in flags) or "no vector extension found")


def _cuda() -> Fact:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Fact("cuda", ", ".join(f"{device.name} ({device.total_memory / _GIB:.0f} GiB)" for device in devices))
    return Fact("cuda", f"torch is built for CUDA {torch.version.cuda}, no device found" if torch.version.cuda else "none (not needed)")


def _memory() -> Fact:
    try:
        free = int(re.search(r"^MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        return Fact("memory", "unknown")
    enough = free >= 2 * _GIB
    return Fact("memory", f"{free / _GIB:.1f} GiB free", enough, "" if enough else "close other programs: training needs about 2 GiB")


def _data() -> Fact:
    from visavis.data.reading import data_folder, datasets_in

    folder = data_folder()
    if folder is None:
        return Fact("VISAVIS_DATA", "not set", remedy="export VISAVIS_DATA=FOLDER, which holds flickr8k/ and others")
    if not folder.is_dir():
        return Fact(
            "VISAVIS_DATA", f"{folder} is not a folder", ok=False, remedy="export VISAVIS_DATA=FOLDER, which holds flickr8k/ and others"
        )
    names = datasets_in(folder)
    missing = "" if names else "put a data set into a folder of its own there"
    return Fact("VISAVIS_DATA", f"{folder}: {', '.join(names) or 'no data set found'}", bool(names), missing)


def _cache() -> Fact:
    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    value = f"{folder}: {size / _GIB:.2f} GiB kept, {free / _GIB:.0f} GiB free on that disk"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Fact("VISAVIS_CACHE", f"{folder} cannot be written", ok=False, remedy="export VISAVIS_CACHE=FOLDER, one that you may write")
    if free < _GIB:
        return Fact(
            "VISAVIS_CACHE", value, ok=False, remedy=f"free some space, or export VISAVIS_CACHE=FOLDER on another disk than {existing}"
        )
    return Fact("VISAVIS_CACHE", value)


def _hub() -> Fact:
    flags = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}]
    if not flags:
        return Fact("model hub", "online: a model that is not in the cache is downloaded when named")
    return Fact("model hub", f"offline ({', '.join(flags)})", remedy=f"unset {' '.join(flags)} to download models by name")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
