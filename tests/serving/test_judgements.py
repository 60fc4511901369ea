"""The file of votes: it only grows, a killed process leaves what was said before, and nothing of another kind is touched."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from visavis.data.judgements import Asked, Judgement, Preference, last_words, open_judgements, read_judgements
from visavis.errors import DataError, RunError, StorageError

AT = "2026-01-01T00:00:00.000+00:00"


def judged(item, fits, text="a dog"):
    return Judgement(AT, "photos", Asked(text), item, "c0ffee", fits)


def test_what_was_said_is_read_again(tmp_path):
    lines = [judged("a.png", True), judged("b 東京.png", False), Preference(AT, Asked("a dog"), "one", "two", None)]
    for _ in range(2):
        with open_judgements(tmp_path / "votes.jsonl") as file:
            for line in lines:
                file.add(line)
    assert read_judgements(tmp_path / "votes.jsonl") == lines * 2
    with open_judgements(tmp_path / "votes.jsonl") as file:
        assert file.lines == lines * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["votes.jsonl"]


def test_the_last_word_counts():
    said = [judged("a", True), judged("b", True), judged("a", False), judged("b", None), judged("a", True, "a cat")]
    assert {pair: line.fits for pair, line in last_words(said).items()} == {(Asked("a dog"), "a"): False, (Asked("a cat"), "a"): True}


def test_a_line_that_a_crash_cut_short_is_taken_out_before_the_next(tmp_path):
    path = tmp_path / "votes.jsonl"
    whole = json.dumps({"at": AT, "index": "i", "query": {"text": "a"}, "item": "a", "content": "c", "fits": True, "kind": "fits"}) + "\n"
    for cut in range(1, len(whole) - 1, 7):
        path.write_text(whole + whole[:cut])
        with open_judgements(path) as file:
            file.add(judged("b", False))
        assert [line.item for line in read_judgements(path)] == ["a", "b"]


@pytest.mark.parametrize("content", ["dear diary", "dear\ndiary\n", '{"at": 1}\n', '{"a": 2}\n', "[]"])
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "mine.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=r"mine\.txt"), open_judgements(path):
        pass
    assert path.read_text() == content


def test_a_folder_that_is_not_there_is_made_and_one_in_the_way_is_a_sentence(tmp_path):
    with open_judgements(tmp_path / "new" / "votes.jsonl"):
        pass
    assert (tmp_path / "new" / "votes.jsonl").read_bytes() == b""
    with pytest.raises((DataError, StorageError), match="new"), open_judgements(tmp_path / "new"):
        pass


def test_two_processes_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "votes.jsonl"
    with open_judgements(path), pytest.raises(RunError, match="another process"), open_judgements(path):
        pass


def test_a_killed_process_leaves_every_vote_that_it_acknowledged(tmp_path):
    path = tmp_path / "votes.jsonl"
    program = """
import sys
from visavis.data.judgements import Asked, Judgement, open_judgements
with open_judgements(sys.argv[1]) as file:
    for number in range(10**6):
        file.add(Judgement("2026-01-01", "i", Asked("x" * (number % 3000)), str(number), "c", True))
        print(number, flush=True)
"""
    for wait in (0.05, 0.11, 0.17):
        path.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        first = process.stdout.readline()
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in (first + process.stdout.read()).splitlines() if line]
        process.wait()
        process.stdout.close()
        with open_judgements(path) as file:
            assert [int(line.item) for line in file.lines][: len(acknowledged)] == acknowledged
            assert len(acknowledged) <= len(file.lines) <= len(acknowledged) + 1
