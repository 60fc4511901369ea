"""The feedback file: it only grows, survives a killed process, and does not change other files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import warnings

import pytest
from tests.platforms import posix

from visavis.core.errors import DataError, RunError, StorageError
from visavis.data.feedback.records import (
    Judgment,
    Preference,
    QueryKey,
    latest_judgments,
    open_feedback,
    read_feedback,
)

AT = "2026-01-01T00:00:00.000+00:00"


def judgment(item, fits, text="a dog"):
    return Judgment(AT, "photos", QueryKey(text), item, "c0ffee", fits)


def test_feedback_file_round_trip(tmp_path):
    lines = [
        judgment("a.png", True),
        judgment("b 東京.png", False),
        Preference(AT, QueryKey("a dog"), "one", "two", None),
    ]
    for _ in range(2):
        with open_feedback(tmp_path / "votes.jsonl") as file:
            for line in lines:
                file.append(line)
    assert read_feedback(tmp_path / "votes.jsonl") == lines * 2
    with open_feedback(tmp_path / "votes.jsonl") as file:
        assert file.records == lines * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["votes.jsonl"]


def test_latest_judgment_counts():
    records = [
        judgment("a", True),
        judgment("b", True),
        judgment("a", False),
        judgment("b", None),
        judgment("a", True, "a cat"),
    ]
    assert {pair: line.relevant for pair, line in latest_judgments(records).items()} == {
        (QueryKey("a dog"), "a"): False,
        (QueryKey("a cat"), "a"): True,
    }


def test_feedback_file_removes_incomplete_line(tmp_path, caplog):
    path = tmp_path / "votes.jsonl"
    whole = (
        json.dumps(
            {
                "timestamp": AT,
                "index": "i",
                "query": {"text": "a"},
                "item": "a",
                "content_hash": "c",
                "relevant": True,
                "kind": "judgment",
            }
        )
        + "\n"
    )
    for cut in range(1, len(whole) - 1, 7):
        path.write_text(whole + whole[:cut])
        caplog.clear()
        with open_feedback(path) as file:
            file.append(judgment("b", False))
        assert [
            f"incomplete last line of {cut:,} bytes" in message for message in caplog.messages
        ] == [True]
        assert [line.item for line in read_feedback(path)] == ["a", "b"]


@pytest.mark.parametrize(
    "content", ["dear diary", "dear\ndiary\n", '{"timestamp": 1}\n', '{"a": 2}\n', "[]"]
)
def test_feedback_file_does_not_change_other_files(tmp_path, content):
    path = tmp_path / "mine.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=r"mine\.txt"), open_feedback(path):
        pass
    assert path.read_text() == content


def test_feedback_file_creates_folder_and_rejects_folder(tmp_path):
    with open_feedback(tmp_path / "new" / "votes.jsonl"):
        pass
    assert (tmp_path / "new" / "votes.jsonl").read_bytes() == b""
    with pytest.raises((DataError, StorageError), match="new"), open_feedback(tmp_path / "new"):
        pass


def test_feedback_file_is_locked(tmp_path):
    path = tmp_path / "votes.jsonl"
    with open_feedback(path), pytest.raises(RunError, match="another process"), open_feedback(path):
        pass


@posix
@pytest.mark.slow
def test_feedback_file_survives_killed_process(tmp_path):
    path = tmp_path / "votes.jsonl"
    program = """
import sys
from visavis.data.feedback.records import Judgment, QueryKey, open_feedback
with open_feedback(sys.argv[1]) as file:
    for number in range(10**6):
        file.append(Judgment("2026-01-01", "i", QueryKey("x" * (number % 3000)), str(number), "c", True))
        print(number, flush=True)
"""
    for wait in (0.05, 0.11, 0.17):
        path.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        )
        first = process.stdout.readline()
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in (first + process.stdout.read()).splitlines() if line]
        process.wait()
        process.stdout.close()
        with warnings.catch_warnings(action="ignore"), open_feedback(path) as file:
            assert [int(line.item) for line in file.records][: len(acknowledged)] == acknowledged
            assert len(acknowledged) <= len(file.records) <= len(acknowledged) + 1
