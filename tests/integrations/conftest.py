"""The tiny models of the examples serve the tests too; processes that a test starts find it by its name."""

import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
sys.path += [str(folder) for folder in (PROJECT / "examples", PROJECT) if str(folder) not in sys.path]
