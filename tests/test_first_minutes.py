"""First minutes without a model of one's own: choice of a pretrained model, its download from a
stand-in of the hub, and its failures.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from tests.docs import console_commands
from tests.hub import WEIGHTS, Hub, retry_at_once, serving
from tests.platforms import posix
from tests.processes import Command

import visavis
from visavis import cli
from visavis.core.errors import DataError, RunError, VisavisError
from visavis.core.progress import NoProgress
from visavis.data import hub_files
from visavis.data.hub_files import HubUnreachableError, fetch_hub_files, list_hub_files
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models.default_model import (
    COPIED_FILES,
    DEFAULT_MODELS,
    default_model,
    saved_model,
    settings_file,
)
from visavis.models.encoders.pretrained_files import missing_bytes
from visavis.retrieval.build.default_index import default_index_folder
from visavis.training.recipes.default_recipe import choose_recipe

TUTORIAL = "docs/tutorials/search-your-images.md"
DEFAULT = DEFAULT_MODELS[0].name
TINY = ("tiny/cut", "tiny/wrong", "tiny/good")


@pytest.fixture(scope="module")
def hub(dual_encoders: Path) -> Iterator[Hub]:
    with serving(dict.fromkeys((DEFAULT, *TINY), dual_encoders / "clip")) as server:
        yield server


@pytest.fixture
def photos(few_scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos without captions in the folder ``photos`` of the current folder, with new settings and
    an empty cache of the hub.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VISAVIS_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    shutil.copytree(few_scenes / "images", tmp_path / "photos")
    return Path("photos")


def run_tutorial(hub: Hub) -> dict[str, float]:
    """Run the commands of the tutorial in the current folder, all but the first without a network.
    Returns the seconds of each.
    """
    seconds, environment = dict[str, float](), hub.environment
    for words in console_commands(TUTORIAL):
        started = time.monotonic()
        command = Command(
            Path("output"),
            *words,
            *(["--port", "0"] if words[0] == "serve" else []),
            environment=environment,
        )
        environment = {**hub.environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
        if words[0] != "serve":
            assert command.wait(300) == 0, command.output_text
        else:
            while (address := re.search(r" at (http\S+)\s", command.output_text)) is None:
                assert time.monotonic() < started + 300, command.output_text
                assert not command.ended, command.output_text
                time.sleep(0.05)
            assert b"<html" in urlopen(address[1]).read()
            command.send(signal.SIGINT)
            command.wait(30)
        seconds[words[0]] = time.monotonic() - started
        Path(f"{words[0]}.txt").write_text(command.output_text)
    return seconds


@pytest.mark.slow
def test_tutorial_reaches_web_ui_from_empty_folder(hub, photos):
    hub.downloads.clear()
    run_tutorial(hub)
    first = Path("index.txt").read_text()
    assert re.search(rf"Downloading {DEFAULT}: \d+ [kM]B, license: MIT\.", first)
    assert "24 items in the index" in first
    assert f"Default model: {DEFAULT}" in first
    assert "Downloading" not in Path("search.txt").read_text() + Path("serve.txt").read_text()
    assert ".png" in Path("search.txt").read_text()
    assert hub.downloads.count(f"{DEFAULT}/{WEIGHTS}") == 1
    assert os.listdir("indexes") == ["photos"]


@pytest.mark.long
def test_tutorial_with_500_photos(hub, photos, tmp_path_factory):
    folder = write_synthetic_scenes(
        tmp_path_factory.mktemp("500") / "scenes",
        num_train=480,
        num_val=10,
        num_test=10,
        captions_per_image=1,
    )
    shutil.rmtree(photos)
    shutil.copytree(folder / "images", photos)
    seconds = run_tutorial(hub)
    sys.stderr.write(f"{seconds}\n")
    assert "500 items in the index" in Path("index.txt").read_text()
    assert sum(seconds.values()) < 600


@pytest.mark.slow
def test_model_outside_the_table_has_the_license_of_its_page(hub, photos, dual_encoders):
    command = Command(
        Path("output"), "index", "photos", "--model", "tiny/good", environment=hub.environment
    )
    assert command.wait(300) == 0, command.output_text
    assert re.search(
        rf"Downloading tiny/good: \d+ [kM]B, license: see {hub.url}/tiny/good\.",
        command.output_text,
    )


def download_all() -> None:
    """Download each model of the stand-in, then one without a server, and print each result in a
    line.
    """
    from huggingface_hub import constants

    from visavis.models.encoders.pretrained_files import download_hub_model, missing_bytes

    retry_at_once()
    for name in (*TINY, "tiny/none"):
        try:
            sys.stdout.write(
                f"{name} {missing_bytes(name) > 0} "
                f"{download_hub_model(name, lambda done, total: None).name}\n"
            )
        except VisavisError as error:
            sys.stdout.write(f"{name} {type(error).__name__} {error}\n")
    constants.ENDPOINT = "http://127.0.0.1:9"
    try:
        missing_bytes("tiny/new")
    except VisavisError as error:
        sys.stdout.write(f"tiny/new {type(error).__name__} {error}\n")


@pytest.mark.slow
def test_failed_downloads_end_in_one_error(hub, photos):
    hub.faults.update({"tiny/cut": "cut", "tiny/wrong": "wrong"})
    command = Command(Path("output"), program=download_all, environment=hub.environment)
    assert command.wait(120) == 0, command.output_text
    cut, wrong, good, none, new = command.output_text.splitlines()
    assert re.search(
        r"^tiny/cut DataError .*expected a complete download from http.*, got an interrupted one "
        r".* Run the command again\.$",
        cut,
    )
    assert re.search(
        rf"^tiny/wrong DataError .*{WEIGHTS}: expected SHA-256 .*\. The damaged file was removed\. "
        r"Run the command again\.$",
        wrong,
    )
    assert good.startswith("tiny/good True ")
    assert "it does not exist, or is private" in none
    assert "HubUnreachableError" in new

    hub.faults.clear()
    again = Command(Path("output"), program=download_all, environment=hub.environment)
    assert again.wait(120) == 0
    assert [line.split()[1] for line in again.output_text.splitlines()[:2]] == ["True", "True"], (
        "a second run completes"
    )


@pytest.fixture(scope="module")
def large_clip(dual_encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CLIP with more words in its table, so that its weights have 2 MB."""
    import transformers

    folder = tmp_path_factory.mktemp("large") / "clip"
    shutil.copytree(dual_encoders / "clip", folder)
    config = transformers.CLIPConfig.from_pretrained(folder)
    config.text_config.vocab_size = 31_000
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder


def kept_bytes(cache: Path) -> int:
    """Size of the incomplete files in a cache of the hub."""
    return sum(part.stat().st_size for part in cache.glob("models--*/blobs/*.part"))


def test_interrupted_download_is_continued(large_clip, tmp_path, monkeypatch):
    """Ctrl-C after the first chunk, then a connection that breaks in the middle of the file."""
    from huggingface_hub import constants

    retry_at_once()
    content = (large_clip / WEIGHTS).read_bytes()
    with serving({"tiny/slow": large_clip}) as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        files = list_hub_files(
            "tiny/slow", "a model", "tiny/slow", "model", endpoint=server.url, allow_patterns=["*"]
        )
        reports = list[tuple[int, int]]()

        def interrupt(done: int, total: int) -> None:
            reports.append((done, total))
            if done > 2**19:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as stopped:
            fetch_hub_files("tiny/slow", "model", files, interrupt)
        total = sum(path.stat().st_size for path in large_clip.iterdir())
        assert stopped.value.__notes__ == ["1 of 2 MB of the download are kept."]
        kept = kept_bytes(tmp_path / "hub")
        assert 2**18 <= kept < len(content) // 2
        assert {one[1] for one in reports} == {total}
        assert max(after[0] - before[0] for before, after in pairwise(reports)) <= 2**18

        server.faults["tiny/slow"] = "break"
        reports.clear()
        files = list_hub_files(
            "tiny/slow", "a model", "tiny/slow", "model", endpoint=server.url, allow_patterns=["*"]
        )
        fetch_hub_files("tiny/slow", "model", files, lambda *done: reports.append(done))
        assert server.resumed[0] == kept
        assert len(content) // 2 - 2**18 < server.resumed[1] <= len(content) // 2
        assert len(server.resumed) == 2
        assert reports[-1][0] == reports[-1][1]
    (snapshot,) = (tmp_path / "hub" / "models--tiny--slow" / "snapshots").iterdir()
    assert (snapshot / WEIGHTS).read_bytes() == content
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_slow_download_shows_bytes_and_stops_at_once(large_clip, photos, tmp_path):
    cache = tmp_path / "hub" / "hub"
    with serving({DEFAULT: large_clip}) as server:
        server.bytes_per_s, server.faults[DEFAULT] = 300_000, "break"
        command = Command(Path("output"), "index", "photos", environment=server.environment)
        while kept_bytes(cache) < 2**18:
            assert not command.ended, command.output_text
            time.sleep(0.05)
        stopped = time.monotonic()
        command.send(signal.SIGINT)
        assert command.wait(30) == 128 + signal.SIGINT
        # The rest of the file would take more than five seconds.
        assert time.monotonic() - stopped < 3
        assert re.search(
            r"Stopped\. [01] of 2 MB of the download are kept\. Repeat it with: .*index photos",
            command.output_text,
        )
        kept = kept_bytes(cache)
        server.bytes_per_s = math.inf
        again = Command(Path("output"), "index", "photos", environment=server.environment)
        assert again.wait(300) == 0, again.output_text
        assert server.resumed[0] == kept
    assert "24 items in the index" in again.output_text


@pytest.mark.long
@pytest.mark.parametrize("problem", ["cut", "wrong", "offline", "disk"])
def test_command_reports_one_line_for_failed_download(hub, photos, problem, small_disk):
    environment, hub.faults[DEFAULT] = dict(hub.environment), problem
    if problem == "offline":
        environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    if problem == "disk":
        environment["HF_HOME"] = str(small_disk)
        (small_disk / "other").write_bytes(bytes(2**20 - 60_000))
    hub.was_cut.clear()
    shown = Command(
        Path("output"), "index", "photos", messages=Path("messages"), environment=environment
    )
    assert shown.wait(300) == 1
    lines = [
        line
        for line in Path("messages").read_text().splitlines()
        if not line.startswith("Downloading")
    ]
    assert len(lines) == 1, lines
    expected = {
        "cut": "interrupted",
        "wrong": "expected SHA-256",
        "offline": "pass --model FOLDER",
        "disk": "full disk",
    }
    assert expected[problem] in lines[0]
    assert not Path("indexes").exists()
    assert saved_model() is None
    hub.faults.clear()
    if problem == "disk":
        (small_disk / "other").unlink()
    again = Command(
        Path("output"), "index", "photos", environment={**environment, "HF_ENDPOINT": hub.url}
    )
    assert again.wait(300) == 0, again.output_text


def request_all() -> None:
    """Request each model of the stand-in, and print each result in a line."""
    import logging

    from visavis.models.default_model import default_model

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    logging.getLogger("httpx2").setLevel(logging.CRITICAL)
    logging.getLogger("httpx").setLevel(logging.CRITICAL)
    for name in sys.argv[1:]:
        try:
            with default_model(
                name,
                SimpleNamespace(
                    message=lambda text: sys.stdout.write(f"{text}\n"), update=lambda *_: None
                ),
            ):
                sys.stdout.write(f"{name} was opened\n")
        except VisavisError as error:
            sys.stdout.write(f"{type(error).__name__} {error}\n")


@pytest.mark.slow
def test_hub_problems_have_their_own_message_and_fix(hub, photos, dual_encoders, tmp_path):
    for name, file in (
        ("empty", ""),
        ("readme", "README.md"),
        ("config", "config.json"),
        ("number", "model.safetensors"),
    ):
        (tmp_path / name).mkdir()
        if file:
            (tmp_path / name / file).write_text("{}")
    shutil.copytree(dual_encoders / "clip", tmp_path / "number", dirs_exist_ok=True)
    (tmp_path / "number" / "README.md").write_text("license: 4")
    faults = {f"tiny/{status}": status for status in (401, 403, 429, 500, 503)} | {
        "tiny/html": "html",
        "tiny/stall": "stall",
    }
    expected = {
        "tiny/401": "DataError .*requires a login, or does not exist, status 401.* log in again with hf auth login",
        "tiny/403": "DataError .*forbidden, status 403.* Request access",
        "tiny/429": "HubUnavailableError .*no more requests for now, status 429.* Wait a few minutes",
        "tiny/500": "HubUnavailableError .*problem of its own, status 500.* Run the command again later",
        "tiny/503": "HubUnavailableError .*problem of its own, status 503.* Run the command again later",
        "tiny/html": "DataError .*answers with another page.* Check HF_ENDPOINT",
        "tiny/empty": "DataError .*without config.json or modules.json.* Use the name",
        "tiny/readme": "DataError .*without config.json or modules.json.* Use the name",
        "tiny/config": "DataError .*without weights as safetensors.* Use the name",
        "tiny/stall": r"Waiting for http\S+, at most 4 s for each request\.\nHubUnavailableError .*did not answer within 4 s.* Check the network",
    }
    with serving(
        {name: tmp_path / name.rpartition("/")[2] for name in (*expected, "tiny/number")}
    ) as server:
        server.faults.update(faults)
        environment = {**server.environment, "HF_HUB_ETAG_TIMEOUT": "4"}
        command = Command(
            Path("output"), *expected, "tiny/number", program=request_all, environment=environment
        )
        assert command.wait(120) == 0, command.output_text
    lines = [
        *(rf"{line}.*\." for line in expected.values()),
        r"Downloading tiny/number: .*, license: 4\.",
        "tiny/number was opened",
    ]
    assert re.match("\n".join(lines), command.output_text), command.output_text


@pytest.mark.long
def test_train_downloads_model_after_size_and_license(hub, photos, few_scenes):
    words = ("train", "--data", few_scenes, "--out", "run", "epochs=1", "training.threads=1")
    command = Command(Path("output"), *words, environment=hub.environment)
    assert command.wait(300) == 0, command.output_text
    assert re.search(rf"Downloading {DEFAULT}: \d+ [kM]B, license: MIT\.", command.output_text)
    assert "Using the default recipe clip/small-data." in command.output_text
    assert saved_model() == DEFAULT


@pytest.mark.long
def test_search_without_run_prints_query_as_json(hub, photos):
    words = ("search", "a red star", "--collection", photos, "--json")
    command = Command(
        Path("output"), *words, messages=Path("messages"), environment=hub.environment
    )
    assert command.wait(300) == 0, Path("messages").read_text()
    assert json.loads(command.output_text)["query"] == "a red star"


@pytest.mark.parametrize(
    ("is_forbidden", "cause"),
    [
        (True, r"HF_HUB_OFFLINE=1 forbids downloads\. To download it, unset HF_HUB_OFFLINE\."),
        (False, r"the hub is not reachable\. Connect to the network once\."),
    ],
)
def test_missing_model_names_cause_command_and_files(
    photos, monkeypatch, capsys, is_forbidden, cause
):
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    if not is_forbidden:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("visavis.models.default_model.missing_bytes", _unreachable)
    command = f"  hf download {DEFAULT} {' '.join(COPIED_FILES)} --local-dir clip"
    cause = rf"visavis: model: .* got neither: .* MB, license: MIT\) .*{cause}"
    monkeypatch.setattr(sys, "argv", ["visavis", "index", str(photos)])
    with pytest.raises(SystemExit):
        cli.main()
    first, *lines = capsys.readouterr().err.strip().splitlines()
    assert re.fullmatch(cause, first)
    assert lines[0].endswith("and pass --model clip:")
    assert lines[1] == command
    assert lines[2].startswith("These work without")
    assert [line.split()[1] for line in lines[3:]] == ["demo", "index"]


def _unreachable(name):
    raise HubUnreachableError(name)


@posix
def test_network_that_swallows_packets_is_given_up_soon(monkeypatch, tmp_path):
    """A server that accepts no connection counts as not reachable, after seconds."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(hub_files, "_CONNECTION_S", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        for _ in range(3):  # until the queue of the kernel is full
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(HubUnreachableError, match=r"the hub is not reachable\)"):
            missing_bytes("tiny/model")


def test_copied_files_are_all_that_a_model_needs(photos, dual_encoders):
    Path("copied").mkdir()
    for name in COPIED_FILES:
        shutil.copy(dual_encoders / "clip" / name, "copied")
    assert visavis.index(photos, model="copied").num_items == 24


def test_doctor_reports_a_model_that_cannot_be_downloaded(photos):
    (check,) = [check for check in visavis.doctor() if check.name == "default model"]
    assert not check.ok
    assert "HF_HUB_OFFLINE=1 forbids downloads" in check.value


def test_folder_instead_of_index_names_the_command(photos):
    with pytest.raises(VisavisError, match=r"visavis search 'a dog' --collection 'My Photos'\.$"):
        visavis.search(photos.rename("My Photos"), "a dog")
    with pytest.raises(DataError, match=r"Use My Photos\."):
        visavis.search("a dog", collection="my photo")


def test_offline_without_model_fails_before_an_index(photos):
    with pytest.raises(HubUnreachableError):
        visavis.search("a red star", collection=photos)
    Path("empty").mkdir()
    with pytest.raises(DataError, match="expected images"):
        visavis.index(photos.with_name("empty"))
    assert not Path("indexes").exists()


def test_named_model_is_default_only_if_set_and_is_kept(photos, dual_encoders):
    model = dual_encoders / "clip"
    first = visavis.index(photos, model=model)
    assert (first.folder, first.num_items, saved_model()) == ("indexes/photos", 24, None)
    assert visavis.index(photos).num_unchanged == 24, "the index keeps its model"
    assert visavis.indexes_default_model(model) == str(model)
    assert saved_model() == str(model)
    with pytest.raises(RunError, match="nowhere"):
        visavis.indexes_default_model("nowhere")
    assert saved_model() == str(model)
    (check,) = [check for check in visavis.doctor() if check.name == "default model"]
    assert check.value == f"{model} ({settings_file()})"
    hits = visavis.search("a red star", collection=photos, top=2).hits
    assert len(hits) == 2

    assert default_index_folder(photos, dual_encoders / "siglip") == Path("indexes/photos-2"), (
        "an index of another model is kept"
    )
    Path("other").mkdir()
    shutil.move("photos", "other/photos")
    assert visavis.index("other/photos").folder == "indexes/photos-2", (
        "an index of another folder is kept"
    )
    with pytest.raises(VisavisError, match=r"--model: expected one model"):
        visavis.index(model, photos, model=model)
    with pytest.raises(VisavisError, match=r"got only 'a red star'\. Add --collection FOLDER"):
        visavis.search("a red star")


def test_attributes_filter_products(photos, dual_encoders):
    names, table = sorted(file.name for file in photos.iterdir()), photos / "attributes.csv"
    table.write_text(
        "filename,color,price\n"
        + "".join(f"{name},{'red' if n % 2 else 'blue'},{n}\n" for n, name in enumerate(names))
        + "gone.png,red,1\n"
    )
    report = visavis.index(photos, model=dual_encoders / "clip")
    assert report.skipped == ("'gone.png': listed in attributes.csv, but not among the images.",)
    hits = visavis.search(
        "a star", collection=photos, filter={"color": "red", "duplicates": "show"}, top=20
    ).hits
    assert {hit.item.path for hit in hits} == set(names[1::2])
    with pytest.raises(
        DataError,
        match=r"^metadata: expected one of the names color, price, got 'hue'\. Filter by one of them\.$",
    ):
        visavis.search("a star", collection=photos, filter={"hue": "red"})
    assert (
        "passes the filters"
        in visavis.search("a star", collection=photos, filter={"color": "pink"}).message
    )
    table.write_text(f"filename,color\n{names[0]},green\n")
    update = visavis.index(photos)
    assert (update.num_encoded, update.num_unchanged) == (0, 0), "new attributes keep the vectors"
    for text, problem in (
        ("name\n", "expected a header with filename and attributes"),
        ("filename,a\nx,1,2\n", "line 2: expected 2 columns, got 3"),
        ("filename,a\nx,1\nx,2\n", "a second one"),
    ):
        table.write_text(text)
        with pytest.raises(DataError, match=problem):
            visavis.index(photos)


def test_missing_default_model_names_the_settings(photos, dual_encoders):
    settings_file().parent.mkdir()
    settings_file().write_text('model = "/gone/model"\n')
    with pytest.raises(
        DataError,
        match=r"settings\.toml: model: expected an existing folder, got /gone/model\. Pass --model",
    ):
        visavis.index(photos)
    settings_file().write_text("model = 3\n")
    with pytest.raises(DataError, match="expected a folder or hub name, got 3"):
        visavis.index(photos)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "model = MODEL\n"),
        ("# mine\nother = 1\n", "model = MODEL\n# mine\nother = 1\n"),
        (
            "other = 1\n[server]\nmodel = 'x'  # of the server\n",
            "model = MODEL\nother = 1\n[server]\nmodel = 'x'  # of the server\n",
        ),
        ("# first\nmodel = 'old/model'  # was\nother = 1\n", "# first\nmodel = MODEL\nother = 1\n"),
        ("\"model\" = 'old/model'\nother = 1\n", None),
    ],
)
def test_saving_default_model_keeps_other_settings(photos, dual_encoders, before, after):
    messages, model = [], str(dual_encoders / "clip")
    settings_file().parent.mkdir()
    settings_file().write_text(before)
    with default_model(model, SimpleNamespace(message=messages.append), set_default=True):
        pass
    text = settings_file().read_text()
    assert text == (before if after is None else after.replace("MODEL", f'"{model}"'))
    assert messages[0].startswith(
        "The model could not be saved" if after is None else f"Default model: {model}"
    )


def test_train_adapts_default_model_if_available(photos, few_scenes, dual_encoders):
    pytest.importorskip("peft", reason="PEFT is not installed: pip install 'visavis[lora]'")
    data = {"data.path": str(few_scenes)}
    without = choose_recipe(data, downloads=NoProgress())
    assert without.name.startswith("photos/")
    assert without.warning.startswith("Without a pretrained CLIP, the model finds little")
    assert f"hf download {DEFAULT} config.json" in without.warning
    shutil.copytree(dual_encoders / "clip", Path("cache") / "backbones" / "clip")
    chosen = choose_recipe(data, downloads=NoProgress())
    assert (chosen.name, chosen.overrides) == (
        "clip/small-data",
        {"visual.encoder": "clip", "text.encoder": "clip"},
    )
    assert choose_recipe(
        {**data, "text.encoder": "vocabulary"}, downloads=NoProgress()
    ).name.startswith("photos/")
    result = visavis.train(
        data=few_scenes, out="run", overrides={"epochs": 1, "training.threads": 1}
    )
    assert (result.run / "run.toml").exists()
