"""Adds the tiny models of the examples to the import path, also for the processes that a test
starts.
"""

import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
sys.path += [
    str(folder) for folder in (PROJECT / "examples", PROJECT) if str(folder) not in sys.path
]
