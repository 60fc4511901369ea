"""The overfitted run of the retrieval tests."""

from tests.retrieval.conftest import run, scenes

__all__ = ["run", "scenes"]
