"""Board of runs: values by hand, what is never in one table, foreign and damaged folders."""

from __future__ import annotations

import csv
import json
import math
import shutil

import pytest
import torch

import visavis
from visavis.core import storage
from visavis.core.errors import RefusedOverwrite, RunError
from visavis.core.progress import NoProgress
from visavis.evaluation.metrics.catalog import SIX_RECALLS
from visavis.papers.board.board import data_hashes
from visavis.papers.board.recorded_runs import RecordedData, read_runs, without_folders

NCR = "NCR(margin=0.2, warmup=False, semantics='paper', reduction='sum')"
VLC = "VLC(gamma=50.0, reduction='sum')"


@pytest.fixture
def write_run(tiny_run, tmp_path):
    """A function that writes the folder of a run with given recalls, without its weights."""

    def write(name, rsum=300.0, seed=1, *, record=None, recipe=None, result=None, objective=VLC):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        values = storage.read_toml(tiny_run / "run.toml")
        values["seed"] = seed
        values["phases"][0]["objective"] = objective
        for key, value in (recipe or {}).items():
            section, _, last = key.rpartition(".")
            (values[section] if section else values)[last] = value
        environment = json.loads((tiny_run / "environment.json").read_text())
        environment |= {"seed": seed, "recipe": values, **(record or {})}
        content = json.loads((tiny_run / "result.json").read_text())
        content |= dict.fromkeys(SIX_RECALLS, rsum / 6)
        content |= {"rsum": rsum, "seconds": 2.0, **(result or {})}
        storage.write_toml(folder / "run.toml", values)
        (folder / "environment.json").write_text(json.dumps(environment))
        (folder / "result.json").write_text(json.dumps(content))
        return folder

    return write


def board(tmp_path, *runs):
    return visavis.papers_board(runs or [tmp_path], out=tmp_path / "board")


def test_board_mean_and_interval_are_those_by_hand(write_run, tmp_path):
    for seed, rsum in enumerate((300.0, 302.0, 304.0, 306.0), 1):
        write_run(f"a-{seed}", rsum, seed)
    for seed, rsum in enumerate((290.0, 292.0, 297.0), 1):
        write_run(f"b-{seed}", rsum, seed, objective="Triplet(margin=0.2, reduction='sum')")
    group = board(tmp_path).groups[0]
    first, second = group.rows
    assert (first.objective, second.objective) == ("VLC()", "Triplet()")
    assert (first.seeds, second.seeds) == ((1, 2, 3, 4), (1, 2, 3))
    # s = sqrt(20 / 3), and t of three degrees of freedom is 3.18245.
    half_width = 3.18245 * math.sqrt(20 / 3) / 2
    spread = first.results.spread("rsum")
    assert first.results.mean("rsum") == 303
    assert (spread.low, spread.high) == pytest.approx((303 - half_width, 303 + half_width), 1e-5)
    few = second.results.spread("rsum")
    assert (few.low, few.high) == (290, 297)
    # Differences of seeds 1 to 3: -10, -10, -7. t = -9 / (sqrt(3) / sqrt(3)) with two degrees.
    test = group.tests["rsum"][second.name]
    assert test.difference == pytest.approx(-9)
    assert test.p == pytest.approx(1 - 9 / math.sqrt(83), abs=1e-9)
    assert test.seeds == (1, 2, 3)
    assert first.name not in group.tests["rsum"]


def test_board_interval_stays_on_the_scale(write_run, tmp_path):
    for seed, rsum in enumerate((0.0, 0.0, 0.0, 60.0), 1):
        write_run(f"a-{seed}", rsum, seed)
    [row] = board(tmp_path).groups[0].rows
    assert row.results.spread("rsum").low == 0


def test_board_csv_has_a_line_for_each_row_and_metric(write_run, tmp_path):
    for seed in (1, 2):
        write_run(f"a-{seed}", 300 + seed, seed)
        write_run(f"b-{seed}", 280 + 2 * seed, seed, objective=NCR)
    result = board(tmp_path)
    with open(result.folder / "board.csv", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["metric"] == "rsum"]
    assert [line["objective"] for line in lines] == ["VLC()", NCR.partition("(")[0] + "()"]
    assert [float(line["mean"]) for line in lines] == [301.5, 283]
    assert lines[1]["seeds"] == "1 2"
    assert lines[1]["data_hash"] == result.groups[0].shared.data_hash
    assert float(lines[1]["difference"]) == -18.5
    assert float(lines[1]["training_s"]) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"record": {"data_fingerprint": "0123456789abcdef"}}, "data hash"),
        ({"result": {"protocol": "flickr8k"}}, "protocol"),
        ({"result": {"num_images": 7}}, "candidates"),
        ({"result": {"num_texts": 7}}, "candidates"),
        ({"result": {"ties": "mean"}}, "ties"),
        ({"recipe": {"evaluation.test": "val"}}, "test split"),
        ({"recipe": {"evaluation.average_networks": True}}, "models"),
    ],
)
def test_board_separates_runs_that_cannot_be_compared(write_run, tmp_path, changes, reason):
    write_run("a", 300.0)
    write_run("b", 310.0, **changes)
    result = board(tmp_path)
    assert [len(group.rows) for group in result.groups] == [1, 1]
    first, second = (group.shared for group in result.groups)
    assert first.differences(second) == [reason]
    assert [len(row) for row in result.overview().rows] == [3], "one column for each table"
    page = (result.folder / "report.html").read_text()
    assert f"other {reason} than table" in page


def test_board_separates_other_pixels_of_equal_captions(write_run, tmp_path, tiny_run):
    inputs = json.loads((tiny_run / "environment.json").read_text())["inputs"]
    inputs["images"]["content_hash"] = "0" * 32
    write_run("a")
    write_run("b", record={"inputs": inputs})
    assert len(board(tmp_path).groups) == 2


def test_board_separates_noise_and_its_kinds(write_run, tmp_path):
    write_run("clean")
    for name, share in (("a", 0.2), ("b", 0.4)):
        write_run(name, recipe={"data": {"path": "scenes", "noise_ratio": share}})
    noises = [group.shared.noise for group in board(tmp_path).groups]
    assert sorted(noises) == ["", "ShuffledCaptions(share=0.2)", "ShuffledCaptions(share=0.4)"]


@pytest.mark.parametrize(
    ("noise", "described"),
    [
        ("", ""),
        ("ShuffledCaptions(share=0.4, seed=None)", "ShuffledCaptions(share=0.4)"),
        ("ShuffledCaptions(seed=3, share=0.4)", "ShuffledCaptions(share=0.4)"),
        ("ListedCaptions(file='a.npy')", "ListedCaptions(file='a.npy')"),
    ],
)
def test_noise_is_described_without_its_seed(noise, described):
    data = RecordedData(noise=noise)
    assert data.described_noise == described
    assert data.depends_on_seed == bool(noise)


def test_board_prints_the_noise_index_of_each_seed(write_run, tmp_path):
    recipe = {"data": {"path": "scenes", "noise": "ShuffledCaptions(share=0.4, seed=None)"}}
    for seed in (1, 2):
        result = {"noise_index": f"index-{seed}"}
        record = {"data_fingerprint": f"content {seed}"}
        write_run(f"runs/{seed}", seed=seed, recipe=recipe, result=result, record=record)
    [group] = board(tmp_path).groups
    assert group.noise_indices == "index-1, index-2"
    assert any("Noise index by seed: index-1, index-2." in note for note in group.table().notes)


def noisy(write_run, name, seed, content):
    return write_run(
        name,
        seed=seed,
        recipe={"data": {"path": "scenes", "noise_ratio": 0.4}},
        record={"data_fingerprint": content},
    )


def test_board_joins_seeds_whose_noise_differs(write_run, tmp_path):
    for seed in (1, 2):
        noisy(write_run, f"here/a-{seed}", seed, f"content {seed}")
    noisy(write_run, "there/b-2", 2, "content 2")
    noisy(write_run, "there/b-3", 3, "content 3")
    noisy(write_run, "others/c-2", 2, "another content")
    noisy(write_run, "unknown/d-4", 4, "content 4")
    measured, _ = read_runs([tmp_path], NoProgress())
    hashes = {}
    for run, data_hash in zip(measured, data_hashes(measured), strict=True):
        hashes.setdefault(run.folder.parent.name, set()).add(data_hash)
    assert all(len(of_folder) == 1 for of_folder in hashes.values())
    assert hashes["here"] == hashes["there"], "they share the content of seed 2"
    assert len({*map(min, hashes.values())}) == 3, "others contradicts it, unknown shares no seed"


def test_board_joins_seeds_with_validation_images_of_their_own(write_run, tmp_path):
    for seed in (1, 2):
        recipe = {"evaluation.random_validation": True}
        record = {"data_fingerprint": f"content {seed}"}
        write_run(f"runs/{seed}", seed=seed, recipe=recipe, record=record)
    write_run("runs/fixed")
    drawn, fixed = board(tmp_path).groups
    assert [len(row.runs) for row in drawn.rows] == [2]
    assert [len(row.runs) for row in fixed.rows] == [1]
    assert "validation images drawn by the seed" in str(drawn.shared.described())


def test_board_shows_ensemble_apart(write_run, tmp_path):
    folder = write_run("pair", 320.0)
    for name in ("one", "two"):
        write_run(f"pair/{name}", 300.0 + len(name))
    values = storage.read_toml(folder / "run.toml") | {"members": {"one": {}, "two": {}}}
    storage.write_toml(folder / "ensemble.toml", values)
    (folder / "run.toml").unlink()
    (folder / "environment.json").unlink()
    result = board(tmp_path)
    kinds = {group.shared.kind: group for group in result.groups}
    assert sorted(kinds) == ["ensemble of 2 models", "single model"]
    ensemble = kinds["ensemble of 2 models"].rows[0].runs[0]
    [single] = kinds["single model"].rows
    assert ensemble.metrics["rsum"] == 320
    assert ensemble.parameters == 2 * single.runs[0].parameters
    # Both members are the same run, of which one counts.
    assert ["seed 1 of this setting" in each.reason for each in result.left_out] == [True]


def test_board_refuses_members_outside_the_ensemble(write_run, tmp_path):
    folder = write_run("pair")
    values = storage.read_toml(folder / "run.toml") | {"members": {"../a": {}, "../b": {}}}
    storage.write_toml(folder / "ensemble.toml", values)
    write_run("a")
    result = board(tmp_path)
    assert ["names of letters" in each.reason for each in result.left_out] == [True]


def test_board_merges_the_run_of_a_stranger(tiny_run, write_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "downloads" / "stranger", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "downloads" / "stranger" / "model")
    toml = tmp_path / "downloads" / "stranger" / "run.toml"
    values = storage.read_toml(toml)
    values["data"]["path"] = "C:\\Users\\someone\\scenes"
    storage.write_toml(toml, values)
    objective = values["phases"][0]["objective"]
    write_run("mine", seed=values["seed"] + 1, objective=objective)
    [group] = board(tmp_path).groups
    [row] = group.rows
    assert row.seeds == (values["seed"], values["seed"] + 1)
    assert "scenes" in group.data


def test_board_counts_a_copied_run_once(write_run, tmp_path):
    write_run("a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    result = board(tmp_path, tmp_path, tmp_path / "a")
    assert result.num_runs == 1
    [left] = result.left_out
    assert "with the same results" in left.reason


def damage(folder, name, content):
    (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", "{", "is not JSON"),
        ("result.json", "[]", "should be an object"),
        ("result.json", '{"protocol": "plain"}', "is missing"),
        ("result.json", '{"rsum": 1}', "expected test results, got none"),
        ("environment.json", "{}", "is missing"),
        ("run.toml", "a = [", "expected TOML"),
        ("run.toml", "seed = 1\nmodel = {}\nphases = []", "expected a phase"),
        ("run.toml", "seed = 1\nmodel = {}\nphases = 3", "should be a valid array"),
        ("ranks.safetensors", "damaged", "safetensors"),
    ],
)
def test_damaged_run_is_one_line_of_the_board(write_run, tmp_path, name, content, message):
    write_run("good")
    damage(write_run("bad", seed=2), name, content)
    result = board(tmp_path)
    assert result.num_runs == 1
    [left] = result.left_out
    assert left.folder.name == "bad"
    assert message in left.reason
    assert "\n" not in left.reason


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"i2t_r1": 101.0}, "expected 0 to 100 percent"),
        ({"rsum": 590.0}, "expected the sum of its six recalls"),
        ({"rsum": float("nan")}, "expected the sum of its six recalls"),
        ({"seconds": float("inf")}, "expected a time"),
        ({"ties": "friendly"}, "ties"),
        ({"num_images": 0}, "expected positive numbers"),
    ],
)
def test_impossible_values_are_left_out_of_the_board(write_run, tmp_path, result, message):
    write_run("good")
    write_run("bad", seed=2, result=result)
    [left] = board(tmp_path).left_out
    assert message in left.reason


def test_board_leaves_out_recalls_that_ranks_contradict(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run", copy_function=shutil.copyfile)
    measured, left_out = read_runs([tmp_path], NoProgress())
    assert (len(measured), left_out) == (1, [])
    content = json.loads((tmp_path / "run" / "result.json").read_text())
    content["t2i_r1"] += 1
    content["rsum"] += 1
    (tmp_path / "run" / "result.json").write_text(json.dumps(content))
    _, [left] = read_runs([tmp_path], NoProgress())
    assert "as the stored ranks of all queries give" in left.reason


@pytest.mark.parametrize(
    "objective", ["<script>alert(1)</script>", "VLC(gamma=open('x'))", "a" * 3000]
)
def test_board_leaves_out_what_is_not_an_objective(write_run, tmp_path, objective):
    write_run("good")
    write_run("bad", seed=2, objective=objective)
    result = board(tmp_path)
    assert len(result.left_out) == 1
    assert "<script>" not in (result.folder / "report.html").read_text()


def test_board_runs_no_code_of_a_recipe(write_run, tmp_path):
    folder = write_run(
        "own", objective="own.py:Mine(power=2)", recipe={"model": {"kind": "own.py:Net"}}
    )
    (folder / "own.py").write_text("raise SystemExit('executed')\n")
    [row] = board(tmp_path).groups[0].rows
    assert (row.objective, row.model) == ("own.py:Mine(power=2)", "own.py:Net()")


def test_board_names_settings_in_which_rows_differ(write_run, tmp_path):
    write_run("a", 300.0)
    write_run("b", 310.0, recipe={"training.clip_norm": 1.5})
    first, second = board(tmp_path).groups[0].rows
    assert dict(first.settings) == {"training.clip_norm": "1.5"}
    assert first.objective == second.objective
    assert first.name != second.name


def test_board_shows_each_protocol_in_its_own_table(write_run, tmp_path, tiny_run):
    content = json.loads((tiny_run / "result.json").read_text())
    protocols = {name: content | {"protocol": name} for name in ("plain", "plain+equal-texts")}
    values = {key: content[key] for key in (*SIX_RECALLS, "rsum")}
    write_run("a", result={"protocols": protocols, **values})
    result = board(tmp_path)
    assert [group.shared.conditions.protocol for group in result.groups] == list(protocols)
    assert result.num_runs == 1


def test_board_leaves_out_ranks_that_are_not_numbers(write_run, tmp_path):
    write_run("good")
    names = ("image_ranks", "text_ranks", "image_ids", "text_ids")
    ranks = {f"plain/{name}": torch.ones(3, dtype=torch.bfloat16) for name in names}
    storage.write_tensors(write_run("bad", seed=2) / "ranks.safetensors", ranks)
    [left] = board(tmp_path).left_out
    assert "expected ranks as integers" in left.reason


def test_unfinished_run_and_empty_folder_are_lines_of_the_board(write_run, tmp_path):
    (write_run("stopped", seed=2) / "result.json").unlink()
    write_run("good")
    (tmp_path / "empty").mkdir()
    result = visavis.papers_board([tmp_path, tmp_path / "empty"], out=tmp_path / "board")
    reasons = {left.folder.name: left.reason for left in result.left_out}
    assert "--resume" in reasons["stopped"]
    assert "no run" in reasons["empty"]


def test_board_without_any_run_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="expected a finished run with test results"):
        board(tmp_path, tmp_path / "empty")
    assert not (tmp_path / "board").exists()
    with pytest.raises(RunError, match="expected a folder of runs, got nothing"):
        board(tmp_path, tmp_path / "missing")


def test_board_refuses_a_folder_with_files(write_run, tmp_path):
    write_run("a")
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "letter.txt").write_text("dear")
    with pytest.raises(RefusedOverwrite):
        board(tmp_path, tmp_path / "a")


def test_board_page_is_one_file_without_addresses(write_run, tmp_path):
    write_run("a")
    page = (board(tmp_path).folder / "report.html").read_text()
    assert "http" not in page
    assert "<script" not in page
    assert "position: sticky" in page


def test_board_converts_to_json_and_frames(write_run, tmp_path):
    write_run("a")
    result = board(tmp_path)
    content = json.loads(json.dumps(result.to_json()))
    assert content["rows"][0]["mean"]["rsum"] == 300
    assert result.records()[0]["mean.rsum"] == 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/me/flickr8k", "flickr8k"),
        ("Mined(file='/data/me/mined.json', n=1)", "Mined(file='mined.json', n=1)"),
        ("C:\\data\\encoder.pth", "encoder.pth"),
        ("openai/clip-vit", "openai/clip-vit"),
        ("1/2", "1/2"),
    ],
)
def test_without_folders_keeps_names(text, expected):
    assert without_folders(text) == expected
