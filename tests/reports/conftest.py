"""Each test of this folder is a public report of a user of some library, tried on visavis."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Require the source and the kind of each report:
    ``@pytest.mark.report("python-pillow/Pillow#4703", "turned twice")``.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            marker = item.get_closest_marker("report")
            if (
                marker is None
                or len(marker.args) != 2
                or not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", marker.args[0])
            ):
                raise pytest.UsageError(
                    f'{item.nodeid}: expected @pytest.mark.report("owner/repository#number", "kind").'
                )
