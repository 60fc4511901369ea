"""What visavis itself writes and reads again: recipes, runs, indexes with their vectors, votes and
text encoders, exports of votes, TREC files and lists of texts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import tomllib
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from tests.fixtures.recipes import write_recipe
from tests.inputs.cases import Case, Kind
from tests.mutation import ODD, changed, damaged, flipped

import visavis
from visavis.data.dataset_reader import open_dataset
from visavis.data.feedback.records import Judgment, Preference, QueryKey
from visavis.data.feedback.sources import read_feedback, write_feedback
from visavis.data.feedback.training_pairs import FeedbackPairs
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation.trec import TrecRankings, write_trec
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.zero_shot import read_templates
from visavis.training.recipes.files import read_recipe_file, shipped_files

OVERRIDE_KEYS = (
    *("phases.0.epochs", "model", "model.embedding_dim", "data.path", "objective", "rows"),
    *("extends", "", "a.", ".", "phases.-1.x", "phases.0", "training.batch_size", "seed"),
)


def resolve(path: Path, overrides: dict[str, Any]) -> int:
    """Resolve every recipe of a file, and count them."""
    file = read_recipe_file(str(path))
    rows = file.variants or [None]
    for row in rows:
        file.recipe(row, overrides)
    return len(rows)


TEXT_MISTAKES: dict[str, Callable[[str], str]] = {
    "key twice": lambda text: 'name = "one"\nname = "two"\n' + text,
    "unknown key": lambda text: "no_such_key = 3\n" + text,
    "deep": lambda text: "a = " + "[" * 50_000 + "\n" + text,
    "many digits": lambda text: "seed = " + "9" * 50_000 + "\n" + text,
    "impossible date": lambda text: "name = 1979-13-45\n" + text,
    "not closed": lambda text: text + '\n[model\nkind = "VSE++"\n',
    "NUL": lambda text: text + "\0",
    "infinity": lambda text: "seed = inf\n" + text,
}


def make_recipe(rng: random.Random, folder: Path, _: Any) -> Case:
    """An included recipe with changed values or bytes."""
    files = shipped_files()
    name = rng.choice(sorted(files))
    text = files[name].read_bytes()
    path, overrides = folder / "recipe.toml", {}
    way, known, note = rng.random(), "unknown", "changed values"
    check: Any = lambda _: ""  # noqa: E731
    if way < 0.1:
        known, note = "right", "valid"
        end = rng.choice([b"\n", b"\r\n"])
        path.write_bytes(rng.choice([b"", b"\xef\xbb\xbf"]) + text.replace(b"\n", end))
    elif way < 0.25:
        known, note = "wrong", rng.choice(list(TEXT_MISTAKES))
        check = lambda _: "a wrong recipe was accepted"  # noqa: E731
        path.write_text(TEXT_MISTAKES[note](text.decode()), encoding="utf-8")
    elif way < 0.5:
        note = "changed bytes"
        path.write_bytes(rng.choice([flipped, damaged])(text, rng))
    else:
        content = changed(tomllib.loads(text.decode()), rng)
        path.write_text(tomli_w.dumps(content), errors="surrogatepass")
        if rng.random() < 0.3:
            overrides = {rng.choice(OVERRIDE_KEYS): rng.choice(ODD)}
    return Case(partial(resolve, path, overrides), known, check, f"{name}: {note}")  # type: ignore[arg-type]


def make_run(folder: Path) -> tuple[Path, Path]:
    """A small data set, and a run on it."""
    scenes = write_synthetic_scenes(
        folder / "scenes", num_train=12, num_val=4, num_test=8, captions_per_image=2, size=32
    )
    recipe = write_recipe(folder / "tiny.toml")
    visavis.train(recipe, data=scenes, out=folder / "run")
    return scenes, folder / "run"


def evaluated(run: Path) -> dict[str, Any]:
    """The result of an evaluation, as it is printed."""
    found: Any = visavis.evaluate(run)
    values: dict[str, Any] = found.to_json()
    return values


def prepare_run(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A run and its evaluation."""
    _, run = make_run(folder)
    return run, evaluated(run)


def damage_one(folder: Path, rng: random.Random, names: list[str]) -> str:
    """Damage or remove one of the files, and return what was done."""
    name = rng.choice(names)
    file = folder / name
    content = file.read_bytes()
    way = rng.random()
    if way < 0.05:
        file.unlink()
        return f"{name} removed"
    if way < 0.4 and name.endswith((".json", ".jsonl")):
        lines = content.splitlines()
        number = rng.randrange(len(lines)) if name.endswith("l") else 0
        value = json.loads(lines[number] if name.endswith("l") else content)
        text = json.dumps(changed({"": value}, rng).get(""), default=str).encode()
        lines[number] = text
        file.write_bytes(b"\n".join(lines) + b"\n" if name.endswith("l") else text)
        return f"{name} with a changed value"
    file.write_bytes(damaged(content, rng))
    return f"{name} damaged"


def continued(run: Path) -> str:
    """Resume a run that is complete, or whose last checkpoint is damaged."""
    visavis.train(resume=run)
    return "resumed"


RUN_FILES = ("run.toml", "environment.json", "metrics.jsonl", "result.json", "ranks.safetensors")
MODEL_FILES = ("model/config.json", "model/model.safetensors")


def make_run_folder(rng: random.Random, folder: Path, state: tuple[Path, dict[str, Any]]) -> Case:
    """A run with a damaged file: evaluation and resuming."""
    run, expected = state
    shutil.copytree(run, folder / "run")
    resumes = rng.random() < 0.3
    files = list(RUN_FILES + MODEL_FILES)
    if resumes:
        last = max((run / "checkpoint").iterdir())
        files = [f"checkpoint/{last.name}/{file.name}" for file in last.iterdir()] + [
            "metrics.jsonl"
        ]
    note = damage_one(folder / "run", rng, files)
    if resumes:
        return Case(partial(continued, folder / "run"), note=f"resume: {note}")

    def check(found: dict[str, Any]) -> str:
        # The weights have a hash. A recipe may be changed to another valid one.
        if note.startswith(("run.toml", "model/config.json")) or found == expected:
            return ""
        return f"the evaluation has changed with {note}"

    return Case(
        partial(evaluated, folder / "run"),
        "unknown",
        check,
        note,
        ("evaluate", str(folder / "run")),
    )


def answers(folder: Path) -> Any:
    """What a user sees of an index."""
    index = open_index(folder)
    try:
        results = search_collection(
            index, SearchQuery.from_text("a red circle"), top=30, group_duplicates=False
        )
        return (
            results.message,
            [(hit.key, round(hit.score, 4)) for hit in results],
            sorted(index.items),
        )
    finally:
        index.close()


def prepare_index(folder: Path) -> tuple[Path, Any]:
    """An index with votes, and its answers."""
    os.environ["VISAVIS_TEXT_TOWERS"] = "1"
    scenes, run = make_run(folder)
    visavis.index(run, scenes / "images", out=folder / "index")
    expected = answers(folder / "index")
    return folder / "index", expected


def make_index(
    names: Callable[[Path], list[str]], rng: random.Random, folder: Path, state: Any
) -> Case:
    """An index with a damaged file: the answers of the intact one, or an error."""
    original, expected = state
    index = folder / "index"
    shutil.copytree(original, index)
    note = damage_one(index, rng, names(original))

    def check(found: Any) -> str:
        return "" if found == expected else f"other answers, {note}: {found!r:.600}"

    return Case(
        partial(answers, index), "unknown", check, note, ("search", str(index), "a red circle")
    )


def in_folder(*parts: str) -> Callable[[Path], list[str]]:
    """The files of an index whose path begins with a part."""
    return lambda folder: sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and str(path.relative_to(folder)).startswith(parts)
    )


def make_values(rng: random.Random, folder: Path, state: Any) -> Case:
    """An index whose database has another value in a cell, as another program may write it."""
    original, expected = state
    index = folder / "index"
    shutil.copytree(original, index)
    with closing(sqlite3.connect(index / "index.db")) as database, database:
        tables = [
            name
            for name, kind in database.execute("SELECT name, type FROM sqlite_master")
            if kind == "table" and not name.startswith("sqlite_")
        ]
        table = rng.choice(tables)
        columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
        column = rng.choice(columns)
        value = rng.choice(
            [
                None,
                -1,
                2**62,
                1e308,
                "",
                "\0",
                "x" * 5000,
                b"",
                b"\xff\x00",
                "a\u2028b",
                float("inf"),
            ]
        )
        note = f"{table}.{column} = {value!r:.20}"
        with suppress(sqlite3.Error):
            database.execute(
                f'UPDATE "{table}" SET "{column}" = ? WHERE rowid IN '
                f'(SELECT rowid FROM "{table}" ORDER BY random() LIMIT 1)',
                (value,),
            )

    def check(found: Any) -> str:
        return "" if found == expected else f"other answers, {note}: {found!r:.600}"

    return Case(partial(answers, index), check=check, note=note)


def sampled_votes(rng: random.Random) -> list[Any]:
    """Votes and preferences."""
    texts = ["a red circle", "é 東京", 'a "b" -c', "a\u2028b", "x" * 500]
    items = ["images/1.png", "images/é.png", "a\u2028b.png"]
    votes: list[Any] = [
        Judgment(
            f"2026-11-0{number + 1}T10:00:00+00:00",
            "index",
            QueryKey(rng.choice(texts), rng.choice(["", "images/1.png"])),
            rng.choice(items),
            rng.choice(["", "0" * 32]),
            rng.choice([True, False, None]),
            vote=f"vote{number}",
        )
        for number in range(rng.choice([1, 3, 6]))
    ]
    return [*votes, Preference("2026-11-09T10:00:00+00:00", QueryKey("a"), "one", "two", "one")]


def read_votes(path: Path, data: Any) -> list[Any]:
    """Records, as ``visavis train --feedback`` and ``evaluate --feedback`` read them."""
    records = read_feedback(path)
    pairs = FeedbackPairs.from_records(records, data)
    assert str(pairs).count("\n") == 0
    return records


def prepare_votes(folder: Path) -> Any:
    """The data set whose images were judged."""
    return open_dataset(
        write_synthetic_scenes(
            folder / "scenes", num_train=4, num_val=2, num_test=2, captions_per_image=1, size=32
        )
    )


VOTE_MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no item": lambda vote: vote.pop("item"),
    "unknown field": lambda vote: vote.update(kind="other"),
    "relevant is a text": lambda vote: vote.update(relevant="yes"),
    "query is a text": lambda vote: vote.update(query="a dog"),
    "number as an item": lambda vote: vote.update(item=3),
    "no time": lambda vote: vote.pop("timestamp"),
}


def make_votes(rng: random.Random, folder: Path, data: Any) -> Case:
    """A file of ``visavis indexes export-votes``."""
    path = folder / "votes.jsonl"
    votes = sampled_votes(rng)
    write_feedback(path, votes)
    run = partial(read_votes, path, data)
    way = rng.random()
    if way < 0.25:
        return Case(run, "right", lambda found: "" if found == votes else "other votes", "valid")
    lines = path.read_text().split("\n")
    if way < 0.6:
        number = rng.randrange(len(votes) - 1)
        vote = json.loads(lines[number])
        if rng.random() < 0.2:
            note = "duplicate key"
            lines[number] = lines[number][:-1] + ', "item": "other"}'
        elif rng.random() < 0.2:
            note = "cut in the last line"
            text = path.read_text()
            path.write_text(text[: rng.randrange(len(text) - 50, len(text) - 1)])
            return Case(run, "wrong", lambda _: "accepted", note)
        else:
            note = rng.choice(list(VOTE_MISTAKES))
            VOTE_MISTAKES[note](vote)
            lines[number] = json.dumps(vote)
        path.write_text("\n".join(lines))
        return Case(run, "wrong", lambda _: "accepted", note)
    if way < 0.8:
        number = rng.randrange(len(votes))
        lines[number] = json.dumps(changed(json.loads(lines[number]), rng), default=str)
        path.write_text("\n".join(lines))
        return Case(run, note="changed value")
    path.write_bytes(damaged(path.read_bytes(), rng))
    return Case(run, note="damaged bytes")


ODD_NAMES = (
    *(
        "a.jpg",
        "a b.jpg",
        "a\tb.jpg",
        "a%20b.jpg",
        "100%",
        "é.jpg",
        "\u2028",
        "\u00a0.jpg",
        "a\nb.jpg",
    ),
    *("\ufeff", "#0", "a\rb", "\x0b", "\x1c", "\x85", "Q0", "1e5", "\u3000x"),
)


def make_trec(rng: random.Random, folder: Path, _: Any) -> Case:
    """TREC files with odd names: a reader of their columns finds each name and score again. Files that
    exist are replaced only if they are equal.
    """
    queries = tuple(rng.sample(ODD_NAMES, 3))
    candidates = tuple(rng.sample(ODD_NAMES, 4))
    from visavis.evaluation.trec import escape_names

    rankings = TrecRankings(
        np.array([rng.sample(range(4), 3) for _ in queries]),
        np.array([[3.5, 2.25, -1.0]] * 3, np.float32),
        np.array([[query, rng.randrange(4), 1] for query in range(3)]),
        escape_names(queries),
        escape_names(candidates),
    )
    tag = rng.choice(["run", "a run/é", "../x", "\0", ".", "%"])
    way = rng.random()
    known, note = "right", "valid"
    if way < 0.3:
        known, note = "wrong", "other judgments exist"
        (folder / "i2t.qrels").write_bytes(
            rng.choice([b"", b"q 0 d 1\n", b"\xff\xfe\0", b"\xff", b"\0" * 100, b"q 0 d 1"])
        )

    def run() -> list[Path]:
        return write_trec(folder, tag, {"i2t": rankings})

    def check(paths: list[Path]) -> str:
        if known == "wrong":
            return "other judgments were replaced"
        for path in paths:
            if folder not in path.resolve().parents:
                return f"{path} is outside of {folder}"
        found = [
            line.split(" ")
            for path in paths
            if path.suffix == ".run"
            for line in path.read_bytes().decode().split("\n")[:-1]
        ]
        if any(len(columns) != 6 for columns in found):
            return f"a line has other columns: {found}"
        names = {(columns[0], columns[2]) for columns in found}
        expected = {
            (rankings.queries[row], rankings.candidates[column])
            for row in range(3)
            for column in rankings.order[row]
        }
        # Readers split at any white space.
        parts = {part for pair in names for part in pair}
        if any(len(part.split()) != 1 for part in parts):
            return f"a name has white space: {parts}"
        return "" if names == expected else f"written {expected}, read {names}"

    return Case(run, known, check, note)  # type: ignore[arg-type]


def make_texts(rng: random.Random, folder: Path, _: Any) -> Case:
    """A file with one text per line: prompts of ``visavis classify``, or the bank of a correction."""
    from visavis.api.arguments import read_bank

    path = folder / "texts.txt"
    parts = [
        "a photo of {}",
        "é {}",
        "{} a\u2028b",
        "{}, a\x0bb",
        "東京 {}",
        "\u0085 {} x",
        "{}\x1cy",
    ]
    texts = rng.sample(parts, rng.choice([1, 3, 5]))
    end = rng.choice(["\n", "\r\n", "\n\n"])
    encoding = rng.choice(["utf-8", "utf-8-sig", "utf-16"])
    content = (end.join(texts) + rng.choice(["", end])).encode(encoding)
    reads_templates = rng.random() < 0.5
    run: Any = partial(read_templates if reads_templates else read_bank, path)
    way = rng.random()
    if way < 0.4:
        path.write_bytes(content)
        stripped = [text.strip() for text in texts]
        return Case(
            run,
            "right",
            lambda found: "" if found == stripped else f"written {stripped}, read {found}",
            "valid",
        )
    if way < 0.6:
        wrong = [b"", b"\n \n", b"\xff\xfe\0", b"caf\xe9 {}\n"]
        if reads_templates:
            wrong += [b"a photo\n", b"{} {}\n"]
        path.write_bytes(rng.choice(wrong))
        return Case(run, "wrong", lambda _: "accepted", "wrong")
    path.write_bytes(damaged(content, rng))
    return Case(run, note="damaged bytes")


KINDS = [
    Kind("recipes", make_recipe, inputs=1000),
    Kind("run folders", make_run_folder, prepare_run, 300),
    Kind("index database", partial(make_index, in_folder("index.db")), prepare_index, 500),
    Kind("index vectors", partial(make_index, in_folder("vectors")), prepare_index, 250),
    Kind("index text encoder", partial(make_index, in_folder("text-towers")), prepare_index, 300),
    Kind("index values", make_values, prepare_index, 300),
    Kind("vote exports", make_votes, prepare_votes, 500),
    Kind("TREC files", make_trec, inputs=250),
    Kind("text lists", make_texts, inputs=250),
]
