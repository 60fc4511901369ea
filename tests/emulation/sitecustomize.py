"""Emulation of Windows and macOS on Linux, for ``make test-platforms``.

Python imports this module at the start of each process whose PYTHONPATH has this folder, so the
processes that a test starts are emulated, too.

- Code of visavis sees no POSIX modules, no calls that Windows lacks, no ``/proc`` and no
  ``/dev/shm``. Other packages have code of their own for these systems and see all of Linux.
- transformers and visavis read weights as on Windows, where they do not map their files.
- ``spawn`` is the only start method of processes.
- A file that this process has open or mapped cannot be renamed, replaced or removed, and neither
  can a folder that contains it. A rename replaces nothing but files.
- The temporary folder ignores the case of names, in calls of Python.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
import sys
from types import FrameType, ModuleType
from typing import Any

HIDDEN_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}
HIDDEN_NAMES = {
    "os": "O_DIRECTORY O_NOFOLLOW chown fork forkpty geteuid getloadavg getpgid getuid killpg mkfifo "
    "posix_fallocate pread pwrite register_at_fork sched_getaffinity sched_setaffinity setpgid "
    "setsid statvfs sysconf uname",
    "signal": "SIGALRM SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2 pthread_sigmask",
}
HIDDEN_FOLDERS = ("/proc", "/dev/shm", "/dev/fd", "/sys/fs/cgroup")
# Modules for which sys.platform is "win32". Others would call what only Windows has.
SEE_WINDOWS = {
    "transformers.modeling_utils",
    "visavis.core.storage.reading",
    "visavis.models.encoders.pretrained_loading",
}
STANDARD_LIBRARY = os.path.dirname(os.__file__)


class _Partial(ModuleType):
    """A module without some of its names, and with other values of some."""

    def __init__(self, module: ModuleType, hidden: str, **values: object):
        super().__init__(module.__name__)
        vars(self).update(_module=module, _hidden=frozenset(hidden.split()), **values)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_hidden"]:
            raise AttributeError(f"{name} is hidden: Windows does not have it")
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_module"], name)


_real_import = builtins.__import__


def _import(
    name: str,
    globals: Any = None,  # noqa: A002
    locals: Any = None,  # noqa: A002
    fromlist: Any = (),
    level: int = 0,
) -> ModuleType:
    module = _real_import(name, globals, locals, fromlist, level)
    if name == "sys" and (globals or {}).get("__name__") in SEE_WINDOWS:
        return _SYS_OF_WINDOWS
    if not level and _is_visavis((globals or {}).get("__name__")):
        if name.partition(".")[0] in HIDDEN_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return _PARTIAL.get(module.__name__, module)
    return module


def _is_visavis(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == "visavis"


def _called_by_visavis() -> bool:
    """Whether the first caller outside the standard library and this module is code of visavis."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            file != __file__
            and not file.startswith("<frozen")
            and ("site-packages" in file or not file.startswith(STANDARD_LIBRARY))
        ):
            return _is_visavis(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return False


def _is_hidden(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and str(path).startswith(HIDDEN_FOLDERS)


def _missing(path: object) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "hidden", path)


def _check_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        event == "open"
        and _is_hidden(arguments[0])
        and sys._getframe(1).f_code.co_filename != __file__
        and _called_by_visavis()
    ):
        raise _missing(arguments[0])


def _hide_folders() -> None:
    sys.addaudithook(_check_opened)
    for module, name, result in (
        (os.path, "isdir", False),
        (os.path, "exists", False),
        (os, "access", False),
        (os, "readlink", None),
        (os, "stat", None),
        (shutil, "disk_usage", None),
    ):
        _hide_in(module, name, result)


def _hide_in(module: Any, name: str, result: object) -> None:
    real = getattr(module, name)

    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        if _is_hidden(path) and _called_by_visavis():
            if result is None:
                raise _missing(path)
            return result
        return real(path, *arguments, **options)

    _put_in(module, name, real, call)


def _put_in(module: Any, name: str, real: Any, call: Any) -> None:
    """Replace a function. Its pickle names the module, as that of the real one does."""
    call.__module__, call.__qualname__ = module.__name__, name
    setattr(module, name, call)
    # Functions are looked up in these sets by their identity.
    for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real in supported:
            supported.add(call)


def _spawn_only() -> None:
    import multiprocessing
    from multiprocessing import context

    for name in ("fork", "forkserver"):
        context._concrete_contexts.pop(name)  # type: ignore[attr-defined]
    spawn = context._concrete_contexts["spawn"]  # type: ignore[attr-defined]
    context._default_context._default_context = spawn  # type: ignore[attr-defined]
    multiprocessing.get_all_start_methods = lambda: ["spawn"]


def _open_files() -> set[str]:
    """Files that this process has open or mapped, without those of the interpreter."""
    found = set()
    for number in _real_listdir("/proc/self/fd"):
        try:
            found.add(_real_readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    with _real_open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found.update(line.rstrip("\n").split(None, 5)[5] for line in maps if " /" in line)
    return found


_real_listdir, _real_readlink, _real_open = os.listdir, os.readlink, open


def _refuse_open(path: Any, directory: Any = None) -> None:
    """Raise the error of Windows if a file, or a file in a folder, is open in this process."""
    name = os.fsdecode(path)
    if directory is not None:
        name = os.path.join(_real_readlink(f"/proc/self/fd/{directory}"), name)
    if os.path.islink(name) or _called_by_tempfile():
        return
    name = os.path.realpath(name)
    if name.endswith(".lock"):  # the locks of filelock are other ones on Windows
        return
    opened = _open_files()
    # The descriptor of a folder with which shutil.rmtree works does not count as open.
    if any(
        (other == name and not os.path.isdir(name)) or other.startswith(f"{name}{os.sep}")
        for other in opened
        if not other.endswith(".lock") and not os.path.isdir(other)
    ):
        raise PermissionError(errno.EACCES, "it is open in this process (emulated)", name)


def _called_by_tempfile() -> bool:
    """Whether tempfile unlinks an open file, which it leaves to the system on Windows."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == f"{STANDARD_LIBRARY}/tempfile.py"


def _lock_open_files() -> None:
    for name in ("remove", "unlink"):
        setattr(os, name, _locking(getattr(os, name)))
    real_rename, real_replace = os.rename, os.replace

    def rename(source: Any, target: Any, **options: Any) -> None:
        _refuse_open(source, options.get("src_dir_fd"))
        if os.path.lexists(target) and not options:
            raise FileExistsError(errno.EEXIST, "it exists (emulated)", os.fsdecode(target))
        real_rename(source, target, **options)

    def replace(source: Any, target: Any, **options: Any) -> None:
        _refuse_open(source, options.get("src_dir_fd"))
        if os.path.lexists(target) and not options:
            if os.path.isdir(target):
                raise PermissionError(
                    errno.EACCES, "it is a folder (emulated)", os.fsdecode(target)
                )
            _refuse_open(target)
        real_replace(source, target, **options)

    os.rename, os.replace = rename, replace
    shutil._use_fd_functions = False  # type: ignore[attr-defined]


def _locking(real: Any) -> Any:
    def call(path: Any, *, dir_fd: int | None = None) -> None:
        _refuse_open(path, dir_fd)
        real(path, dir_fd=dir_fd)

    return call


def _true_case(path: Any) -> Any:
    """The path of an existing file whose name differs by case only, below the temporary folder."""
    if isinstance(path, int) or path is None:
        return path
    name = os.fsdecode(path)
    if not name.startswith(_TEMPORARY) or _real_lexists(name):
        return path
    folder, base = os.path.split(name)
    folder = _true_case(folder)
    try:
        found = [other for other in _real_listdir(folder) if other.casefold() == base.casefold()]
    except OSError:
        found = []
    return os.path.join(folder, found[0] if found else base)


def _real_lexists(path: str) -> bool:
    try:
        _real_lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _ignore_case() -> None:
    one_path = (
        "stat lstat open mkdir rmdir remove unlink scandir listdir access chmod readlink utime"
    )
    for module, name, paths in (
        *((os, name, 1) for name in one_path.split()),
        *((os, name, 2) for name in ("rename", "replace")),
        (builtins, "open", 1),
        (io, "open", 1),
    ):
        _ignore_case_in(module, name, paths)


def _ignore_case_in(module: Any, name: str, paths: int) -> None:
    real = getattr(module, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if options.get("dir_fd") is None:
            arguments = (*map(_true_case, arguments[:paths]), *arguments[paths:])
        return real(*arguments, **options)

    _put_in(module, name, real, call)


_TEMPORARY, _real_lstat = os.environ.get("TMPDIR", "/tmp"), os.lstat
_PARTIAL: dict[str, ModuleType] = {
    name: _Partial(module, HIDDEN_NAMES[name]) for name, module in (("os", os), ("signal", signal))
}
_SYS_OF_WINDOWS = _Partial(sys, "", platform="win32")
_spawn_only()
_hide_folders()
_lock_open_files()
_ignore_case()
builtins.__import__ = _import
sys.is_emulated = True  # type: ignore[attr-defined]
