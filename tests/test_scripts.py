"""Scripts of benchmarks and studies on the smallest useful inputs: each ends without an error."""

import subprocess
import sys

import pytest

from .conftest import PROJECT

COMMANDS = [
    "benchmarks/coherence.py --images 100 --ks 10 50",
    "benchmarks/engine.py --rows large --objectives VLC --size 256 --repeats 1",
    "benchmarks/index.py --images 60",
    "benchmarks/scan.py --images 20 --captions 40 --looped 10",
    "benchmarks/serve.py --clients 2 --seconds 1 --requests 20",
    "studies/errata.py --check",
    "studies/synthetic_clips.py --seeds 1 --clips 40 --out {out}",
    "studies/recompute_claims.py",
]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split(".py")[0])
def test_script_runs(command, tmp_path):
    script, *arguments = command.format(out=tmp_path / "out").split()
    done = subprocess.run([sys.executable, PROJECT / script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
