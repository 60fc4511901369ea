"""Data sets by their name on the hub: a download from a stand-in, configurations, failures, and no
network afterwards.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixtures.recipes import write_recipe
from tests.hub import Hub, retry_at_once, serving
from tests.processes import Command

from visavis.core.errors import DataError, VisavisError
from visavis.data.hub_files import _select_files

from .test_image_tables import png, rows, write_parquet

pytest.importorskip("huggingface_hub")
wds = pytest.importorskip(
    "webdataset", reason="webdataset is not installed: pip install -e '.[dev]'"
)
pytestmark = pytest.mark.slow
NAMES = ("good", "cut", "wrong", "configs", "shards", "text")


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("repositories")
    for name in ("good", "cut", "wrong"):
        write_parquet(folder / name / "data" / "train-00000-of-00001.parquet", rows(0, 1, 2))
        write_parquet(folder / name / "data" / "validation-00000-of-00001.parquet", rows(3))
        (folder / name / "README.md").write_text("license: mit")
    for config, number in (("small", 4), ("large", 5)):
        write_parquet(folder / "configs" / config / "test" / "0000.parquet", rows(number))
    (folder / "shards").mkdir()
    with wds.TarWriter(str(folder / "shards" / "test-000.tar")) as writer:
        writer.write({"__key__": "6", "png": png(6), "txt": "caption 6"})
    (folder / "shards" / "README.md").write_text("license: cc-by-4.0")
    (folder / "text").mkdir()
    (folder / "text" / "script.py").write_text("raise SystemExit")
    with serving({f"tiny/{name}": folder / name for name in NAMES}) as server:
        server.faults.update({"tiny/cut": "cut", "tiny/wrong": "wrong"})
        yield server


def open_all() -> None:
    """Open each data set that the arguments name, and print each result in a line."""
    from visavis.data.image_validation import open_valid_dataset

    retry_at_once()
    for name in sys.argv[1:]:
        try:
            data = open_valid_dataset(name)
            colors = [image.open().getpixel((0, 0))[0] for image in data.images]
            sys.stdout.write(
                f"{name} {data.name} {','.join(data.splits)} {colors} {data.fingerprint}\n"
            )
        except VisavisError as error:
            sys.stdout.write(f"{name} {type(error).__name__} {error}\n")


def opened(folder: Path, *names: str, **environment: str) -> list[str]:
    """Lines of ``open_all`` in a process of its own, because the library of the hub reads its
    settings at its import.
    """
    values = {
        "HF_HOME": str(folder / "hub"),
        "VISAVIS_CACHE": str(folder / "cache"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **environment,
    }
    command = Command(
        folder / "output",
        *names,
        program=open_all,
        environment=values,
        messages=folder / "messages",
    )
    assert command.wait(120) == 0, (folder / "messages").read_text()
    return command.output_text.splitlines()


def test_data_sets_of_the_hub_are_opened_by_name(hub, tmp_path):
    names = ("good", "configs:small", "configs:large", "shards", "good@main")
    lines = opened(tmp_path, *(f"hf:tiny/{name}" for name in names), **hub.environment)
    expected = (
        "good train,val [0, 1, 2, 3]",
        "configs test [4]",
        "configs test [5]",
        "shards test [6]",
        "good train,val [0, 1, 2, 3]",
    )
    for name, line, content in zip(names, lines, expected, strict=True):
        assert line.startswith(f"hf:tiny/{name} {content} "), line
    downloads = len(hub.downloads)
    assert not any(file.endswith("README.md") for file in hub.downloads), (
        "only the selected files are downloaded"
    )
    offline = opened(
        tmp_path,
        *(f"hf:tiny/{name}" for name in names),
        **{**hub.environment, "HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    assert offline == lines
    assert len(hub.downloads) == downloads


def test_commands_accept_names_of_the_hub(hub, tmp_path):
    write_recipe(tmp_path / "tiny.toml")
    environment = {
        "HF_HOME": str(tmp_path / "hub"),
        "VISAVIS_CACHE": str(tmp_path / "cache"),
        **hub.environment,
    }
    outputs, messages = [], []
    for words in (
        ["data", "check", "hf:tiny/good", "--json"],
        [
            "train",
            tmp_path / "tiny.toml",
            "--data",
            "hf:tiny/good",
            "--out",
            tmp_path / "run",
            "--json",
        ],
        ["evaluate", tmp_path / "run", "--split", "val", "--json"],
    ):
        command = Command(
            tmp_path / "output", *words, environment=environment, messages=tmp_path / "messages"
        )
        assert command.wait(120) == 0, (tmp_path / "messages").read_text()
        outputs.append(json.loads(command.output_text))
        messages.append((tmp_path / "messages").read_text())
        environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    assert outputs[0]["splits"] == {
        "train": {"images": 3, "captions": 6},
        "val": {"images": 1, "captions": 2},
    }
    assert outputs[2]["rsum"] == outputs[1]["validation_rsum"]
    assert 'path = "hf:tiny/good"' in (tmp_path / "run" / "run.toml").read_text()
    assert re.match(r"Downloading hf:tiny/good: \d+ kB, license: mit\.\n", messages[0])
    assert not any("Downloading" in text for text in messages[1:])


def test_size_and_license_are_printed_before_a_download(hub, tmp_path):
    def shown(*words: str) -> str:
        environment = {
            "HF_HOME": str(tmp_path / "hub"),
            "VISAVIS_CACHE": str(tmp_path / "cache"),
            **hub.environment,
        }
        command = Command(
            tmp_path / "output",
            "data",
            "check",
            *words,
            environment=environment,
            messages=tmp_path / "messages",
        )
        assert command.wait(120) in (0, 1)
        return (tmp_path / "messages").read_text()

    size = (hub.repositories["tiny/shards"] / "test-000.tar").stat().st_size
    assert f"Downloading hf:tiny/shards: {size / 1e3:.0f} kB, license: cc-by-4.0." in shown(
        "hf:tiny/shards"
    )
    assert f"license: see {hub.url}/datasets/tiny/configs." in shown("hf:tiny/configs:small")
    assert "Downloading" not in shown("hf:tiny/configs:large", "--quiet")


def test_failures_end_in_one_error(hub, tmp_path):
    hub.was_cut.clear()
    names = ("cut", "wrong", "none", "configs", "configs:huge", "text")
    lines = opened(
        tmp_path,
        *(f"hf:tiny/{name}" for name in names),
        "hf:tiny",
        "hf://datasets/tiny/good",
        **hub.environment,
    )
    patterns = (
        (
            r"expected a complete download from http\S+, got an interrupted one .* Run the command "
            r"again\.$"
        ),
        r"expected SHA-256 .* 2 damaged files were removed\. Run the command again\.$",
        (
            r"expected a data set of the Hugging Face Hub, got none \(it does not exist, or is "
            r"private\)\. Correct the name, or log in with hf auth login\.$"
        ),
        (
            r"expected the name of one configuration, got none\. Name one as hf:OWNER/NAME:CONFIG "
            r"\(large, small\)\.$"
        ),
        (
            r"expected the name of one configuration, got huge\. Name one as hf:OWNER/NAME:CONFIG "
            r"\(large, small\)\.$"
        ),
        (
            r"expected a repository with \.parquet, \.arrow, \.tar files, got script\.py\. Add "
            r"@refs/convert/parquet"
        ),
        r"expected hf:OWNER/NAME, with :CONFIG or @REVISION if needed\. Correct the name\.$",
        r"expected hf:OWNER/NAME, with :CONFIG or @REVISION if needed\. Correct the name\.$",
    )
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.search(rf"^hf:\S+ DataError hf:.*{pattern}", line), line
    hub.faults.clear()
    again = opened(tmp_path, "hf:tiny/cut", "hf:tiny/wrong", **hub.environment)
    assert all("train,val [0, 1, 2, 3]" in line for line in again), again
    hub.faults.update({"tiny/cut": "cut", "tiny/wrong": "wrong"})


def test_no_network_is_one_error(hub, tmp_path):
    for environment, cause, fix in (
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "the hub is not reachable",
            "Connect to the network once",
        ),
        (
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE=1 forbids downloads",
            "To download it, unset HF_HUB_OFFLINE",
        ),
    ):
        [line] = opened(tmp_path, "hf:tiny/good", **{**hub.environment, **environment})
        problem = f"it was not downloaded before, and {cause}"
        assert re.search(rf"HubUnreachableError .* got none \({problem}\)\. {fix}\.$", line), line


@pytest.mark.parametrize(
    ("files", "config", "selected"),
    [
        (
            ["data/train-0.parquet", "test.parquet", "a.jpg"],
            None,
            ["data/train-0.parquet", "test.parquet"],
        ),
        (["x/train-0.parquet", "default/train/0.parquet"], None, ["default/train/0.parquet"]),
        (["only/train-0.parquet"], None, ["only/train-0.parquet"]),
        (["train-0.parquet", "x/y/train-0.parquet"], "y", ["x/y/train-0.parquet"]),
        (["train-0.tar", "data-0.arrow"], None, ["data-0.arrow"]),
    ],
)
def test_files_of_one_kind_and_configuration_are_selected(files, config, selected):
    assert _select_files("hf:a/b", files, config) == selected


def test_broken_links_of_a_snapshot_are_refused(tmp_path):
    """A snapshot may link to its own blobs only."""
    from visavis.data.dataset_reader import open_dataset

    snapshot, blobs = (
        tmp_path / "datasets--tiny--good" / "snapshots" / "0",
        tmp_path / "datasets--tiny--good" / "blobs",
    )
    for folder, name in ((blobs, "inside"), (tmp_path, "outside")):
        write_parquet(folder / name, rows(0))
    snapshot.mkdir(parents=True)
    (snapshot / "test.parquet").symlink_to("../../blobs/inside")
    data = open_dataset(snapshot)
    assert (data.name, data.images[0].read()) == ("good", png(0))
    os.unlink(snapshot / "test.parquet")
    (snapshot / "test.parquet").symlink_to("../../../outside")
    with pytest.raises(DataError, match="points outside"):
        open_dataset(snapshot)
