"""Versions of the installed packages and of the code, and the command that starts visavis.

Optional packages are not imported: their versions come from package metadata.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from visavis.core.errors import RunError


@dataclass(frozen=True)
class EnvironmentCheck:
    """One line of ``visavis doctor``.

    Attributes:
        name: Subject of the check.
        value: The measured value.
        ok: Whether nothing is wrong.
        fix: How to fix a problem, or how to enable a feature. Empty if there is nothing to do.
    """

    name: str
    value: str
    ok: bool = True
    fix: str = ""


def shell_command() -> str:
    """Return the command that runs visavis from the current folder: its name if it is on the PATH,
    else its path.
    """
    script = shutil.which("visavis", path=sysconfig.get_path("scripts"))
    if shutil.which("visavis") is not None or script is None:
        return "visavis"
    try:
        return quote_argument(os.path.relpath(script))
    except ValueError:  # another drive of Windows
        return quote_argument(script)


def quote_argument(argument: str | Path) -> str:
    """Quote an argument of a command that a user copies into a shell."""
    text = str(argument)
    return subprocess.list2cmdline([text]) if os.name == "nt" else shlex.quote(text)


def package_versions() -> dict[str, str]:
    """Return the versions that results depend on: Python, visavis, and the packages of its losses
    and of the extra ``train``.
    """
    return dict(_package_versions())


# Reading the metadata takes 10 ms, 3 % of a tiny training. The modules of this process keep their
# first version.
@cache
def _package_versions() -> dict[str, str]:
    core = [name for name, extra in package_requirements() if extra in {None, "train"}]
    return {"python": platform.python_version()} | {
        name: installed_version(name) or "not installed" for name in ["visavis", *core]
    }


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Two processes of git take 8 ms, 3 % of a tiny training. The modules of this process keep their
# first content.
@cache
def git_hash() -> str | None:
    """Return the commit of the checkout that visavis runs from, with ``+`` if files were changed,
    or None outside a checkout.
    """
    root = Path(__file__).resolve().parents[3]
    if not os.path.exists(root / ".git") or shutil.which("git") is None:
        return None
    commit = command_output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = command_output(
        "git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"
    )
    return f"{commit}{'+' if changed else ''}" if commit else None


@cache
def package_requirements() -> list[tuple[str, str | None]]:
    """Read the packages that visavis needs from its metadata, each with its extra, or None."""
    try:
        lines = importlib.metadata.requires("visavis") or []
    except importlib.metadata.PackageNotFoundError:
        raise RunError(
            "visavis: expected an installed package, got source files without its metadata. Run "
            "pip install -e . in the checkout."
        ) from None
    requirements = []
    for line in lines:
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        # An extra that includes another one names visavis itself.
        if name != "visavis":
            requirements.append((name, extra[1] if extra else None))
    return requirements


def command_output(*command: str) -> str:
    """Run a command and return its output, which is empty if it fails without one."""
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout.strip()
