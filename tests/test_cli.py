"""The command line: one JSON object or a table, one sentence for what is wrong, exit codes."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
from PIL import Image

import visavis
from visavis import cli
from visavis.cli.output import bars
from visavis.cli.signals import ENDS
from visavis.data import open_dataset
from visavis.data.scenes import write_scenes
from visavis.progress import TrainingStep
from visavis.runs import agreement

RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 8, word_width = 4 }
training = { batch_size = 8, probe_batches = 1, threads = 1 }

[[phases]]
epochs = 1
objective = "VLC()"

[[phases]]
epochs = 1
objective = "VLC()"
"""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("world") / "scenes", num_train=12, num_val=4, num_test=4, captions_per_image=2, size=32)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """``visavis ARGUMENTS`` in an empty folder: exit code, stdout, stderr. An error that is no sentence fails the test."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["visavis", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
        except SystemExit as end:
            return (end.code or 0, *capfd.readouterr())
        return (0, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(RECIPE)
    visavis.train(folder / "tiny.toml", data=scenes, out=folder / "run")
    return folder / "run"


OVERRIDES = [
    # unknown keys, at every level, name the nearest right one
    ("sed=1", r"sed is not a key of recipes: did you mean seed\?"),
    ("data.paht='x'", r"data\.paht is not a key of recipes: did you mean path\?"),
    ("visual.towr='x'", r"visual\.towr is not a key of recipes: did you mean tower\?"),
    ("text.mincount=1", r"text\.mincount is not a key of recipes: did you mean min_count\?"),
    ("training.batchsize=4", r"training\.batchsize is not a key of recipes: did you mean batch_size\?"),
    ("evaluation.protocl='plain'", r"evaluation\.protocl is not a key of recipes: did you mean protocol\?"),
    ("phases.0.epoch=4", r"phases\.0\.epoch is not a key of recipes: did you mean epochs\?"),
    ("phases.1.optimizer.l=4", r"phases\.1\.optimizer\.l is not a key of recipes: did you mean lr"),
    ("phases.0.schedule.warm_up=0.1", r"phases\.0\.schedule\.warm_up is not a key of recipes: did you mean warmup\?"),
    ("model.widht=4", r"has no field 'widht': did you mean width\?"),
    ("wholly.other=1", r"wholly is not a key of recipes: known: about, data"),
    # wrong types and values out of range
    ("training.batch_size=many", r"training\.batch_size is 'many'"),
    ("training.batch_size=1", r"training\.batch_size is 1: input should be greater than 1"),
    ("training.captions_per_image=0", r"training\.captions_per_image is 0: input should be greater than 0"),
    ("training.clip_norm=-1", r"training\.clip_norm is -1"),
    ("training.device=gpu", r"training\.device is 'gpu': input should be 'auto', 'cpu' or 'cuda'"),
    ("training.checkpoint_s=1e999", r"training\.checkpoint_s is inf: input should be a finite number"),
    ("seed=-1", r"seed is -1: input should be greater than or equal to 0"),
    (f"seed={2**63}", r"seed is 9223372036854775808: input should be less than 9223372036854775808"),
    ("seed=None", r"seed is None"),
    ("name=a/b", r"name is 'a/b'"),
    ("phases.0.epochs=0", r"phases\.0\.epochs is 0: input should be greater than 0"),
    ("phases.0.optimizer.lr=0", r"phases\.0\.optimizer\.lr is 0"),
    ("phases.0.schedule.warmup=1", r"phases\.0\.schedule\.warmup is 1"),
    ("phases.0.start_from=first", r"phases\.0\.start_from is 'first': input should be 'last' or 'best'"),
    ("phases=3", r"phases is 3: expected a list"),
    ("training=3", r"training is 3: expected a table of keys"),
    ("phases.0.epochs=True", r"phases\.0\.epochs is True: expected a whole number"),
    ("training.batch_size=1e3", r"training\.batch_size is 1000\.0: expected a whole number"),
    ("training.clip_norm=True", r"training\.clip_norm is True: expected a number"),
    ("training.autocast=1", r"training\.autocast is 1: expected true, false or \"auto\"\.$"),
    ("training.autocast=fast", r"training\.autocast is 'fast': expected true, false or \"auto\"\.$"),
    ("phases.0.optimizer.lr=-1e-3", r"phases\.0\.optimizer\.lr is -0\.001: input should be greater than 0"),
    ("phases.0.optimizer={'lr': 1e999}", r"phases\.0\.optimizer is \"{'lr': 1e999}\"|phases\.0\.optimizer\.lr is inf"),
    ("phases.0.optimizer.lr_multipliers={'text': -1}", r"lr_multipliers\.text is -1: input should be greater than 0"),
    ("phases.0.optimizer.lr_multipliers={'text': 0}", r"lr_multipliers\.text is 0: input should be greater than 0"),
    ("phases.0.schedule.factor=-1", r"phases\.0\.schedule\.factor is -1: input should be greater than 0"),
    ("phases.0.schedule.milestones=[1.5]", r"phases\.0\.schedule\.milestones\.0 is 1\.5: expected a whole number"),
    ("model.width=wide", r"width is 'wide', expected a whole number"),
    ("model.width=0", r"model VSE\+\+: width is 0, expected a whole number from 1 up"),
    ("model.width=1000000000000", r"model VSE\+\+ cannot be built"),
    ("model.dropout=1.0", r"model VSE\+\+: dropout is 1\.0, expected a share from 0 to below 1"),
    ("model.region_pool=min", r"region_pool is 'min', expected 'max' or 'mean'"),
    # overrides that name nothing
    ("training.batch_size", r"'training\.batch_size' is not of the form key=value"),
    ("=3", r"is not of the form key=value"),
    ("phases.2.epochs=3", r"phases\.2\.epochs names no phase; there are 2, the first is 0"),
    ("phases.x.epochs=3", r"phases\.x\.epochs names no phase"),
    ("phases.0=3", r"phases\.0 names a whole list|phases\.0 is 3"),
    ("name.x=3", r"name\.x goes into name, which is a plain value"),
    ("epochs=3", r"epochs= is for recipes of one phase, and this one has 2: write phases\.0\.epochs="),
    # names that do not exist
    ("objective=Unifid()", r"'Unifid' in 'Unifid\(\)' is not in the catalog: did you mean Unified\?"),
    ("objective='VLC(gama=3)'", r"VLC has no field 'gama': did you mean gamma\?"),
    ("objective='VLC(gamma=-3)'", r"gamma is -3"),
    ("objective=import os", r"is not of the form Name\(field=value"),
    ("phases.0.supervision=PairSupervison()", r"did you mean PairSupervision\?"),
    ("phases.0.optimizer.name=Adamax", r"phases\.0\.optimizer\.name is 'Adamax': input should be 'Adam', 'AdamW' or 'SGD'"),
    ("phases.1.trainable=['txt']", r"txt is not a part of VSEPlusPlus: did you mean text\?"),
    ("phases.1.optimizer.lr_multipliers={'visuals': 2}", r"visuals is not a part of VSEPlusPlus: did you mean visual\?"),
    ("model.kind=VSE+", r"model\.kind is 'VSE\+', which is no model: did you mean VSE\+\+\?"),
    ("model.kind=[1]", r"model\.kind is '\[1\]', which is no model"),
    ("evaluation.protocol=flickr8", r"there is no protocol 'flickr8': did you mean flickr8k\?"),
    ("evaluation.protocol=flickr8k", r"protocol flickr8k is defined on 1000 images, here are 4"),
    ("evaluation.validation=dev", r"data set scenes has no split dev"),
    ("evaluation.test=tset", r"data set scenes has no split tset: did you mean test\?"),
    ("visual.tower=no-such-tower", r"no-such-tower is no folder with a config\.json"),
    ("visual.crops=3", r"visual\.crops is 3: input should be 1 or 10"),
    ("visual.augment=true", r"visual\.augment is for visual\.view = \"pixels\""),
    ("text.view=words", r"text\.view is 'words', expected \"tokens\" for text\.tower = 'vocabulary'"),
    (
        "text.tower=minilm",
        r"text\.view is missing, expected \"pooled\" or \"words\" for text\.tower = 'minilm' as it is, or \"tokens\" to train it",
    ),
    ("text.min_count=0", r"text\.min_count is 0"),
    ("text.min_count=1000000", r"no word occurs 1000000 times or more in the 24 training captions of scenes.*: lower text\.min_count"),
    ("visual.features=gone.npy", r"gone\.npy does not exist"),
    ("data.path=gone", r"gone does not exist"),
    ("data.path=5", r"data\.path is 5: expected a text in quotes"),
    ("data.path=''", r"the recipe names no data"),
]


def check_failed_start(result, sentence, folder, before):
    code, out, err = result
    assert code == 1, err
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("visavis: ")
    assert re.search(sentence, last), last
    assert "Traceback" not in err
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(("override", "sentence"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_a_wrong_recipe_is_one_sentence_and_leaves_nothing_behind(call, recipe, scenes, tmp_path, override, sentence):
    data = () if override.startswith("data.path") else ("--data", scenes)
    check_failed_start(call("train", recipe, override, *data), sentence, tmp_path, ["tiny.toml"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("name = ", r"tiny\.toml is not TOML: Invalid value"),
        ("name = 'a'\nname = 'b'", r"tiny\.toml is not TOML: Cannot overwrite a value"),
        ("name = '\xff'", r"tiny\.toml is not UTF-8"),
        ("", r"tiny\.toml: name is missing"),
        ("name = 'x'\nvision = { tower = 'scenes' }\nmodel = { kind = 'VSE++' }\nphases = []", r"phases is \[\]"),
        (RECIPE.replace("VLC()", "VLC("), r"'VLC\(' is not of the form"),
        (RECIPE + "\n[trainig]\nx = 1", r"trainig is not a key of recipes: did you mean training\?"),
        (RECIPE.replace("epochs = 1", "epochs = 1979-05-27"), r"phases\.0\.epochs is datetime\.date"),
    ],
)
def test_a_wrong_file_is_one_sentence(call, recipe, scenes, tmp_path, content, sentence):
    recipe.write_bytes(content.encode("latin-1"))
    check_failed_start(call("train", recipe, "--data", scenes), sentence, tmp_path, ["tiny.toml"])


def test_a_recipe_that_is_nowhere_names_those_that_are(call, tmp_path):
    check_failed_start(
        call("train", "heads-flickr8"), r"neither a TOML file nor a recipe that ships: did you mean heads-flickr8k\?", tmp_path, []
    )
    check_failed_start(call("train", "gone.toml"), r"gone\.toml cannot be read: No such file", tmp_path, [])


def test_a_recipe_without_data_says_how_to_give_them(call, recipe, tmp_path):
    check_failed_start(call("train", recipe), "the recipe names no data: give data.path, or --data", tmp_path, ["tiny.toml"])


@pytest.mark.parametrize("path", ["5", "''", "scenes"])
def test_data_that_are_named_twice_are_neither(call, recipe, scenes, tmp_path, path):
    result = call("train", recipe, f"data.path={path}", "--data", scenes)
    check_failed_start(
        result, r"the data are named twice, by --data .*scenes and by data\.path=.*: keep one of them", tmp_path, ["tiny.toml"]
    )


def test_an_empty_name_of_data_is_not_the_data_of_the_recipe(call, recipe, scenes, tmp_path):
    recipe.write_text(RECIPE.replace("\n\n[[phases]]", f'\ndata = {{ path = "{scenes}" }}\n\n[[phases]]', 1))
    check_failed_start(call("train", recipe, "--data", ""), "the recipe names no data: give data.path, or --data", tmp_path, ["tiny.toml"])


def test_features_that_are_no_numbers_leave_no_run_folder(call, recipe, scenes, tmp_path):
    np.save(tmp_path / "features.npy", np.full((20, 6), np.nan, np.float32))
    for out in ((), ("--out", tmp_path / "run")):
        result = call("train", recipe, "visual.features=features.npy", "--data", scenes, *out)
        check_failed_start(result, r"row 0 of \S*features\.npy holds features that are not finite", tmp_path, ["features.npy", "tiny.toml"])


def test_features_of_other_images_are_refused(call, recipe, scenes, tmp_path):
    np.save(tmp_path / "features.npy", np.zeros((7, 6), np.float32))
    result = call("train", recipe, "visual.features=features.npy", "--data", scenes)
    check_failed_start(result, r"features\.npy is of shape \(7, 6\), expected 20 rows", tmp_path, ["features.npy", "tiny.toml"])


def test_a_batch_larger_than_the_data_is_one_batch(call, recipe, scenes, tmp_path):
    code, _, err = call("train", recipe, "training.batch_size=1000", "--data", scenes, "--out", tmp_path / "run", "--json")
    assert code == 0, err
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [0, 1, 2]


def test_something_of_the_users_is_never_overwritten(call, recipe, scenes, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    result = call("train", recipe, "--data", scenes, "--out", tmp_path / "mine")
    check_failed_start(result, "already exists and is not an empty folder; nothing was changed", tmp_path, ["mine", "tiny.toml"])
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("end", ENDS)
def test_a_signal_ends_a_command_with_a_sentence_and_the_code_of_the_shell(call, monkeypatch, end, hangups_heard):
    monkeypatch.setattr(cli, "app", lambda: signal.raise_signal(end))
    assert call() == (128 + end, "", f"visavis: ended by {end.name}.\n")
    assert signal.getsignal(end) is signal.SIG_DFL


def test_where_nothing_can_be_written_a_sentence_says_so(call, recipe, scenes, tmp_path):
    code, out, err = call("train", recipe, "--data", scenes, "--out", "/proc/nowhere/run")
    assert (code, out) == (1, "")
    assert err.strip().splitlines()[-1].startswith("visavis: /proc/nowhere")


def test_a_damaged_data_set_is_refused_until_told_otherwise(call, recipe, scenes, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(scenes, data)
    lines = (data / "captions.jsonl").read_text().splitlines()
    (data / "captions.jsonl").write_text("\n".join([lines[0].replace('"captions": [', '"captions": ["", '), *lines[1:]]) + "\n")
    check_failed_start(
        call("train", recipe, "--data", data), r"would lose something \(1 x empty caption\)", tmp_path, ["data", "tiny.toml"]
    )
    code, out, err = call("train", recipe, "--data", data, "--skip-bad", "--out", tmp_path / "run", "--json")
    assert code == 0
    assert json.loads(out)["run"] == str(tmp_path / "run")
    assert "left out: 0 of 20 images and 1 of 41 captions" in err


def test_a_check_prints_the_first_findings_of_each_kind_and_counts_the_rest(call, tmp_path):
    missing = [f"{number:02d}.jpg" for number in range(12)]
    rows = "".join(f"{name},a dog\n" for name in missing)
    (tmp_path / "captions.csv").write_text(f"filename,caption\n{rows}12.jpg,a cat\n12.jpg,\n")
    code, out, _ = call("data", "check", tmp_path)
    assert code == 1
    assert [name for name in missing if f"{name}: the image is missing" in out] == missing[:5]
    assert "missing image (13)" in out
    assert "... and 8 more: --all lists them" in out
    assert "captions.csv:15: the caption is empty" in out, "of every kind"
    _, out, _ = call("data", "check", tmp_path, "--all")
    assert all(f"{name}: the image is missing" in out for name in missing)
    assert "more:" not in out
    _, out, _ = call("data", "check", tmp_path, "--json")
    assert len([finding for finding in json.loads(out)["findings"] if finding["kind"] == "missing image"]) == 13


COMMANDS = {
    "doctor": "doctor",
    "check": "data check {scenes}",
    "features": "features {scenes} --visual scenes --out stores",
    "train": "train tiny.toml --data {scenes} --out new",
    "resume": "train --resume {run}",
    "evaluate": "evaluate {run}",
    "graded": "evaluate {run} --degrees SceneDegrees() --semantics paper",
    "diagnose": "diagnose {run} --objective TripletHN --objective NTXent(tau=0.2)",
    "search": "search {run} red",
    "coherence": "coherence {run} --degrees SceneDegrees() --queries 1 --out seen",
    "catalog": "catalog",
    "recipes": "catalog recipes",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_one_object_and_nothing_else(call, recipe, run, scenes, name):
    code, out, err = call(*COMMANDS[name].format(run=run, scenes=scenes).split(), "--json")
    assert out.count("\n") == 1, err
    said = json.loads(out)
    assert isinstance(said, dict)
    assert code == (name == "doctor" and not all(finding["ok"] for finding in said.values()))


@pytest.mark.parametrize("name", ["check", "evaluate", "graded", "diagnose", "search", "features", "resume", "coherence", "catalog"])
def test_without_json_people_read_a_text(call, run, scenes, name):
    code, out, err = call(*COMMANDS[name].format(run=run, scenes=scenes).split())
    assert code == 0, err
    assert out.strip()
    assert not out.startswith("{")


def test_recipes_have_a_line_each_and_other_entries_a_paragraph(call):
    _, recipes, _ = call("catalog", "recipes")
    assert re.search(r"^  heads-flickr8k  Two small towers", recipes, re.MULTILINE)
    assert "formula" not in recipes
    _, objectives, _ = call("catalog", "objectives")
    assert re.search(r"^  TripletHN\n      \S.*\n(      .*\n)*      formula: ", objectives, re.MULTILINE)


def test_a_run_folder_is_told_in_one_piece_however_long(call, run):
    code, out, _ = call("train", "--resume", run)
    assert code == 0
    assert f"Run folder: {run}\n" in out
    assert "RSUM" in out


def test_json_stays_alone_on_stdout_while_a_terminal_shows_bars(scenes, tmp_path):
    """stderr is a terminal here, so that bars are really drawn; stdout is not."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "visavis", "train", "tiny.toml", "--data", str(scenes), "--out", "run", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "100"}
    seen = []

    def look():
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(shown, 65536):
                seen.append(piece)

    looking = threading.Thread(target=look)
    looking.start()
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=environment, cwd=tmp_path, check=True).stdout
    os.close(terminal)
    looking.join()
    os.close(shown)
    assert b"epoch" in b"".join(seen), "a bar was drawn"
    assert out.count(b"\n") == 1
    assert json.loads(out)["run"] == "run"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["evaluate", "gone"], r"gone is no run folder: expected run\.toml"),
        (["diagnose", "gone"], r"gone is no run folder: expected run\.toml"),
        (["agreement", "gone"], r"gone is no run folder: expected run\.toml"),
        (["search", "gone", "a dog"], "gone is no run or model folder"),
        (["coherence", "gone"], r"gone is no run folder: expected run\.toml"),
        (["train", "--resume", "gone"], "gone is no run folder"),
        (["features", "gone", "--visual", "scenes"], "gone does not exist"),
        (["data", "check", "gone"], "gone does not exist"),
        (["catalog", "recipies"], r"there is no catalog of recipies: did you mean recipes\?"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_command_says_in_one_sentence_what_is_wrong(call, tmp_path, arguments, sentence, as_json):
    check_failed_start(call(*arguments, *["--json"] * as_json), sentence, tmp_path, [])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["evaluate", "--protocol", "flickr8"], r"there is no protocol 'flickr8': did you mean flickr8k\?"),
        (["evaluate", "--protocol", "flickr30k"], "protocol flickr30k is defined on 1000 images, here are 4"),
        (["evaluate", "--split", "tset"], r"has no split tset: did you mean test\?"),
        (["evaluate", "--data", "gone"], "gone does not exist"),
        (["evaluate", "--protocol", "cxc"], "protocol cxc is defined on 5000 images, here are 4"),
        (
            ["evaluate", "--degrees", "SceneDegres()"],
            r"'SceneDegres' in 'SceneDegres\(\)' is not in the catalog: did you mean SceneDegrees\?",
        ),
        (["evaluate", "--degrees", "SceneDegrees()", "--semantics", "code"], "semantics is 'code', expected reference or paper"),
        (["agreement"], r"ExpertAnnotations\.txt does not exist: people's judgements are of Flickr8k's test images"),
        (["coherence", "--degrees", "SceneDegrees()", "--seed", "-1"], r"seed is -1, expected a whole number from 0 to 2\^63 - 1"),
        (["diagnose", "--batches", "0"], "a diagnosis of 0 batches says nothing"),
        (["diagnose", "--objective", "VLC(gama=3)"], r"VLC has no field 'gama': did you mean gamma\?"),
    ],
)
def test_an_evaluation_that_cannot_be_is_a_sentence(call, run, tmp_path, arguments, sentence):
    check_failed_start(call(arguments[0], run, *arguments[1:]), sentence, tmp_path, [])


def test_runs_and_people_are_compared_on_what_people_judged(call, run, scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "agree", partial(agreement.agree, resamples=20))  # of 1,000
    data = write_scenes(tmp_path / "data", num_train=2, num_val=1, num_test=12, captions_per_image=2, size=32)
    names = [image.name for image in open_dataset(data).split("test").images]
    pairs = [f"{image}\t{other}#{k}" for image in names for other in names for k in (0, 1)]
    answers = [(1 + k % 4, 1 + (k + k // 5) % 4, 1 + (k + k // 7) % 4) for k in range(len(pairs))]
    expert, crowd = (
        "".join(f"{pair}\t{a}\t{b}\t{c}\n" for pair, (a, b, c) in zip(pairs, answers, strict=True)),
        [f"{pair}\t0\t{k % 3}\t2\n" for k, pair in enumerate(pairs)],
    )
    (data / "ExpertAnnotations.txt").write_text(expert)
    (data / "CrowdFlowerAnnotations.txt").write_text("".join(crowd))
    code, out, err = call("agreement", run, run, "--data", data, "--json")
    assert code == 0, err
    found = json.loads(out)["agreement"]
    assert [(each["judgements"], each["own_pairs"], each["pairs"]) for each in found] == [
        ("expert", True, 288),
        ("expert", False, 264),
        ("crowd", True, 288),
        ("crowd", False, 264),
    ]
    code, out, err = call("agreement", run, "--data", data, "--degrees", "SceneDegrees()")
    assert code == 0, err
    assert "each expert with the mean of the other two" in out
    assert "degrees by SceneDegrees() less the first" in out
    other = shutil.copytree(run, tmp_path / "other")
    (other / "run.toml").write_text((other / "run.toml").read_text().replace(str(scenes), str(data)))
    names = ["data", "other"]
    check_failed_start(call("agreement", other, run), "run is of other data than .*other: name the data set that people", tmp_path, names)


def test_a_recipe_says_who_tells_degrees(call, recipe, scenes, tmp_path):
    code, out, err = call("train", recipe, "evaluation.degrees=SceneDegrees", "--data", scenes, "--out", tmp_path / "run", "--json")
    assert code == 0, err
    trained = json.loads(out)
    assert trained["degrees"] == "SceneDegrees()"
    assert -1 <= trained["i2t_cs_at_4"] <= 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["i2t_cs_at_4_undefined"] == trained["i2t_cs_at_4_undefined"]
    code, out, _ = call("evaluate", tmp_path / "run", "--json")
    assert json.loads(out)["i2t_cs_at_4"] == trained["i2t_cs_at_4"]


def test_features_need_an_encoder(call, scenes, tmp_path):
    check_failed_start(call("features", scenes), "name an encoder with --visual, with --text, or both", tmp_path, [])


def test_a_run_without_a_model_yet_says_so(call, run, tmp_path):
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "run.toml").write_text((run / "run.toml").read_text())
    check_failed_start(call("evaluate", tmp_path / "young"), "holds no model yet", tmp_path, ["young"])


def test_an_image_that_cannot_be_read_is_said_in_a_search(call, run, tmp_path):
    Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    code, out, err = call("search", run, "something red", "--in", tmp_path, "--json")
    assert code == 0
    assert [hit["name"] for hit in json.loads(out)["hits"]] == ["red.png"]
    assert "broken.png" in err


def test_a_wrong_option_is_told_by_the_parser(call):
    code, _, err = call("train", "heads-flickr8k", "--ressume")
    assert code == 2
    assert "Traceback" not in err


def test_a_model_that_was_not_trained_here_is_taken_as_a_run(call, scenes, dual_encoders):
    code, out, _ = call("evaluate", dual_encoders / "clip", "--data", scenes, "--json")
    assert code == 0
    assert json.loads(out)["rsum"] == pytest.approx(visavis.evaluate(dual_encoders / "clip", data=scenes).to_json()["rsum"])
    code, out, _ = call("search", dual_encoders / "siglip", "a red circle", "--in", scenes, "--json")
    assert code == 0
    assert len(json.loads(out)["hits"]) == 5
    code, out, err = call("evaluate", dual_encoders / "clip")
    assert (code, out) == (1, "")
    assert err.endswith("brings no data: name a data set with --data.\n")


def test_a_log_tells_now_and_then_how_far_the_work_is(monkeypatch, capsys):
    step = TrainingStep(phase=0, phases=1, epoch=2, epochs=14, step=3, steps=10, loss=0.5, rsum=250.12, pairs_per_s=900, seconds_left=250)
    with bars.Bars() as progress:
        progress.step(step)
        monkeypatch.setattr(bars, "LINE_S", 0.0)
        progress.work("features", 512, 8000, 90.0)
        progress.step(step)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["features: 512/8,000  90/s", "epoch 3/14: loss 0.5  RSUM 250.1  900 pairs/s  4 min 10 s left"]
