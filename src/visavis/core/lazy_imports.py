"""Names of a package that are imported when they are first used, so that a command loads only what
it uses.
"""

from __future__ import annotations

import importlib
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], *, other_package: str | None = None
) -> Callable[[str], Any]:
    """Build the ``__getattr__`` of a package whose names are imported on first use."""
    # No name may be the name of a submodule: importing the submodule sets this attribute of the
    # package to the module, and `__getattr__` is not called.

    def import_name(name: str) -> Any:
        if name not in modules:
            message = f"module {package!r} has no attribute {name!r}"
            # Only for names of classes: Python asks modules for many names with underscores.
            is_class = other_package is not None and name[:1].isupper()
            if is_class and hasattr(importlib.import_module(str(other_package)), name):
                message += f". Import it from {other_package}."
            # Python suggests a similar name of this object.
            raise AttributeError(message, name=name, obj=sys.modules[package])
        return getattr(importlib.import_module(modules[name]), name)

    return import_name


class LazyCatalog(UserDict[str, Any]):
    """Classes by name, each of which is imported when it is first read.

    Args:
        places: Place of each class, ``package.module:Class``.
    """

    def __init__(self, places: Mapping[str, str]):
        super().__init__(places)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, str):
            module, _, attribute = value.partition(":")
            value = self.data[name] = getattr(importlib.import_module(module), attribute)
        return value
