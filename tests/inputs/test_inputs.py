"""Generated inputs of each kind: a right result, or one sentence. Never a traceback, a hang, memory
beyond the limit, or a result that hides a problem. ``python -m tests.inputs`` reads more of them.
"""

from __future__ import annotations

import os
import random

import pytest
from tests.inputs import worker
from tests.inputs.campaign import FINDINGS, describe, run_campaign
from tests.inputs.cases import REAL_DATA
from tests.inputs.catalog import KINDS
from tests.inputs.planted_inputs import CASES
from tests.mutation import damaged
from tests.platforms import linux_calls, posix

pytestmark = [posix, linux_calls, pytest.mark.filterwarnings("ignore::UserWarning:PIL")]
QUICK = ("PNG", "EXIF times", "JSON lines", "safetensors", "recipes", "vote exports", "TREC files")
"""Kinds whose inputs take milliseconds."""
SEEDS_PER_SAMPLE = 10
SLOW = {"run folders": 6, "videos": 8, "HTTP requests": 30, "MCP messages": 8}


def read_in_this_process(name, seeds, folder, monkeypatch):
    """The findings of some seeds of a kind."""
    monkeypatch.setenv(REAL_DATA, os.environ.get("VISAVIS_DATA", ""))
    for variable, value in (("VISAVIS_CACHE", "cache"), ("VISAVIS_DATA", "none")):
        monkeypatch.setenv(variable, str(folder / value))
    monkeypatch.setenv("VISAVIS_TEXT_TOWERS", "0")
    kind, originals = KINDS[name], folder / "originals"
    originals.mkdir()
    state = kind.prepare(originals)
    try:
        replies = [
            worker.run_seed(kind, state, seed, folder / "input", command=False) for seed in seeds
        ]
    finally:
        if hasattr(state, "close"):
            state.close()
    assert [describe(name, reply) for reply in replies if reply["outcome"] in FINDINGS] == []
    return replies


@pytest.mark.parametrize("name", QUICK)
def test_inputs_are_read_or_refused_in_one_sentence(name, tmp_path, monkeypatch):
    read_in_this_process(name, range(10), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_inputs_of_each_kind_are_read_or_refused(name, tmp_path, monkeypatch):
    seeds = range(100, 100 + SLOW.get(name, SEEDS_PER_SAMPLE))
    replies = read_in_this_process(name, seeds, tmp_path, monkeypatch)
    assert {reply["outcome"] for reply in replies} <= {"accepted", "refused"}


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", KINDS)
def test_many_inputs_are_read_or_refused(name, tmp_path):
    summary = run_campaign([(name, range(KINDS[name].inputs))], saved=tmp_path)[name]
    assert [describe(name, reply) for reply in summary.findings] == []
    assert summary.counts.total() == KINDS[name].inputs


def test_complete_run_has_enough_inputs_and_kinds():
    assert len(KINDS) >= 15
    assert sum(kind.inputs for kind in KINDS.values()) >= 20_000


@pytest.mark.parametrize("outcome", [name for name in CASES if name not in ("memory", "crash")])
def test_planted_fault_has_its_outcome(outcome, monkeypatch):
    monkeypatch.setattr(worker, "LIMIT_S", 0.2)
    assert worker.read_case(CASES[outcome])[0] == outcome


@pytest.mark.slow
def test_campaign_finds_planted_faults_and_saves_inputs(tmp_path, monkeypatch):
    """A process that dies or is ended for its limits is replaced, and each finding can be replayed."""
    monkeypatch.setenv("VISAVIS_INPUTS_LIMIT_S", "1")
    outcomes = {
        seed: random.Random(f"planted faults {seed}").choice(list(CASES)) for seed in range(60)
    }
    # The first seed of each outcome.
    first = {outcome: seed for seed, outcome in reversed(outcomes.items())}
    assert set(first) == set(CASES)
    seeds = sorted(first.values())
    summary = run_campaign([("planted faults", seeds)], saved=tmp_path)["planted faults"]
    found = {reply["seed"]: reply["outcome"] for reply in summary.findings}
    assert found == {first[outcome]: outcome for outcome in FINDINGS}
    assert summary.counts.total() == len(CASES)
    reply = summary.findings[0]
    assert os.listdir(reply["saved"]) == ["input.txt"]
    assert f"python -m tests.inputs 'planted faults' --seeds {reply['seed']}" in describe(
        "planted faults", reply
    )


def test_damage_is_determined_by_its_seed_and_changes_bytes():
    content = bytes(range(256)) * 8
    changes = [damaged(content, random.Random(seed)) for seed in range(200)]
    assert changes == [damaged(content, random.Random(seed)) for seed in range(200)]
    assert sum(change != content for change in changes) >= 190
    assert any(len(change) < len(content) for change in changes)
    assert any(len(change) > len(content) for change in changes)
