"""README and docs: commands and Python blocks of each page run in order as a reader runs them, with
only the extras that the page installed, and print what the page shows.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from PIL import Image
from tests.docs import (
    PAGES,
    PROJECT,
    Installation,
    Session,
    Step,
    check_output,
    read_steps,
)
from tests.hub import Hub, serving

from visavis.models.default_model import DEFAULT_MODELS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pages show commands for bash")

ELSEWHERE = {"docs/guides/coming-from.md", "docs/guides/extend.md", "docs/guides/serve.md"}
"""Pages whose Python blocks run in tests/test_docs_code.py, alone or in a changed copy of the package,
or with the client of OpenAI in tests/server/test_inference_api.py.
"""
NOT_RUN = {
    "tests of the repository": ["python -m tests.*", "pytest -m *"],
    "real photos, minutes to hours of training or measuring": [
        "*flickr*",
        "* coco-5k *",
        "visavis papers relevance*",
        "visavis train cvse++*",
        "visavis papers diagnose run",
        "visavis papers diagnose run --*",
        "visavis data mine runs/first *",
        "visavis train synthetic-clips/*",
        "visavis train ladder-scenes*",
        "for seed in * visavis train demo data.path=runs/*",
        "visavis compare RECIPE *",
        "visavis compare --data photos/ --minutes *",
        "visavis data scenes --out runs/*",
        "visavis train goal/*",
        "visavis papers reproduce *",
        "visavis train maxsim-minilm*",
        "visavis index runs/maxsim *",
        "visavis search indexes/maxsim *",
        "visavis indexes compress indexes/maxsim *",
        "visavis papers coherence runs/*",
        "visavis papers coherence one-level ladder *",
        "for seed in *",
        "*python* studies/*",
        "*python benchmarks/*",
    ],
    "a model or data of the hub that the tests have no small copy of": [
        "visavis * hf:OWNER/NAME",
        "visavis * vidore/*",
        "visavis papers convert openai/*",
        "visavis train * visual.encoder=models/long-clip *",
        "visavis mteb *",
    ],
    "more layers than the small copy of the model, with which tests/training/test_settings.py freezes layers": [
        "visavis train clip/full *frozen_layers*",
    ],
    "several GPUs or machines": [
        "torchrun *",
        "* --workers ray:8*",
    ],
    "an embedding model, with which test_embedding_model.py of models and training runs these commands": [
        "visavis evaluate FOLDER *",
        "visavis index FOLDER *",
        "visavis search index *",
        "visavis train embedding-model/*",
        "visavis export runs/mine --format sentence-transformers --out exported",
    ],
    "votes of a user, with which tests/experiments/test_feedback.py runs these commands": [
        "visavis * --feedback indexes/holidays*",
        "visavis indexes evaluate indexes/holidays*",
        "visavis * indexes/holidays-2*",
    ],
    "files of these names, with which tests/retrieval/test_names.py searches": [
        "visavis search indexes/holidays *",
    ],
    "vectors of another program, or another store": [
        "* vectors.parquet *",
        "* --store photos.db",
    ],
    "a model that knows more than one that is trained in seconds": [
        "* --max-irrelevant *",
        "visavis indexes calibrate *",
        "visavis indexes correct *",
        "visavis indexes measure *",
    ],
    "a program of another project": [
        "ir_measures *",
    ],
    "files of other projects": [
        "visavis papers convert logs/*",
        "visavis papers convert 16m_*",
        "visavis evaluate my-clip *",
        "visavis index my-clip *",
        "visavis evaluate xvlm *",
        "visavis data convert i3d=*",
    ],
    "changes the computer of the user, or needs an account": [
        "uv *",
        "pipx *",
        "visavis --install-completion",
        "visavis export * --push *",
        "make *",
    ],
    "Docker": [
        "docker *",
    ],
    "a program that does not end": [
        "tensorboard *",
    ],
}
"""Reasons why commands do not run here, with patterns of these commands."""

MODELS = {
    **{model.name: "clip" for model in DEFAULT_MODELS},
    "openai/clip-vit-base-patch32": "clip",
    "google/siglip-base-patch16-224": "siglip",
}
"""Models of the hub, and the tiny model of random weights that a local hub has in its place."""

NAMES = {
    "photos": [
        *("FOLDER", "OTHER_DATA", "SOURCE", "clips", "data/scenes", "moved/photos", "my-photos"),
        *("new-captions", "products", "runs/demo-1/scenes", "scenes"),
    ],
    "runs/mine": [
        *("RUN", "RUN2", "RUN3", "runs/demo-1/unified-1", "runs/holidays-1", "runs/my-recipe-1"),
        "runs/photos-1",
    ],
    "indexes/photos": ["INDEX", "indexes/holidays", "indexes/one", "indexes/two", "indexes/videos"],
}
"""The photos, the run and the index that pages start with, and their other names on pages."""
FILES = {
    "my-recipe.toml": 'extends = "demo"\nname = "my-recipe"\nphases.0.epochs = 1\n',
    "captions.csv": "filename,caption\n"
    + "".join(f"images/{number:06}.png,a red star\n" for number in range(40)),
    "prompts.txt": "a photo of a {}.\nan image with a {}.\n",
    "titles.txt": "a blue star\n",
    "products/attributes.csv": "filename,color,brand\nimages/000000.png,red,Acme\n",
}
"""Files of a reader."""
GIVEN = {
    "README.md": ("photos", "runs/demo-1"),
    "docs/papers/ranking-coherence.md": ("RUN", "photos"),
    "docs/guides/assistants.md": ("photos", "runs", "indexes/v"),
    "docs/guides/your-data.md": ("photos", "my-photos", "clips", "products"),
    "docs/tutorials/compare-losses.md": (),
    "docs/tutorials/fine-tune-clip.md": (),
    "docs/tutorials/own-loss.md": (),
    "docs/tutorials/search-your-images.md": ("photos",),
    "docs/tutorials/teach-new-words.md": (),
    "docs/guides/search.md": ("INDEX", "RUN", "moved", "photos", "runs"),
    "docs/tutorials/train-a-search-model.md": ("my-photos",),
}
"""What a page starts with, if it is not everything."""


WITHOUT_TRAIN = {
    "README.md",
    "docs/explanation/several-positives.md",
    "docs/guides/integrations.md",
    "docs/guides/losses-only.md",
    "docs/index.md",
}
"""Pages that start with the losses alone, as tutorials do. The others assume the extra train."""
LONG = {
    "docs/papers/graded-relevance.md",
    "docs/papers/ranking-coherence.md",
    "docs/guides/compare.md",
    "docs/guides/data.md",
    "docs/tutorials/compare-losses.md",
    "docs/tutorials/own-loss.md",
    "docs/tutorials/teach-new-words.md",
    "docs/tutorials/train-a-search-model.md",
}
"""Pages that train on a thousand images or more."""
SPREAD = {
    # Weights of a trained model depend on the processor.
    "docs/guides/integrations.md": 0.1,
    "docs/tutorials/compare-losses.md": 0.3,
    "docs/tutorials/teach-new-words.md": 0.3,
    "docs/tutorials/train-a-search-model.md": 0.3,
    # The page shows a larger collection or the real model.
    "docs/guides/compare.md": math.inf,
    "docs/guides/data.md": math.inf,
    "docs/guides/recipes.md": math.inf,
    "docs/guides/search.md": math.inf,
    "docs/tutorials/search-your-images.md": math.inf,
}
"""Allowed differences of printed numbers, as a share, with the reason. All others agree to 0.001."""
COLLAPSED = {"docs/tutorials/compare-losses.md": "TripletHN()"}
"""Rows of trainings that collapse, or nearly do. Their numbers differ between processors."""
CHECKS = {
    "docs/guides/losses-only.md": """
items = torch.eye(2), torch.eye(2).repeat(3, 1), [0, 1]
assert loss(*items, [0, 1] * 3) < 1e-6 < loss(*items, [1, 0] * 3)
""",
    "docs/guides/integrations.md": """
import torch
items, labels = torch.randn(4, 128), torch.arange(4) // 2
assert memory_loss(items, labels) > 0 < views_loss(items, items.flip(0))
""",
}
"""Code that checks the names that a page defines."""


def reason_not_to_run(step: Step) -> str | None:
    for reason, patterns in NOT_RUN.items():
        if any(fnmatchcase(step.text, pattern) for pattern in patterns):
            return reason
    return None


@pytest.fixture(scope="module")
def hub(dual_encoders: Path) -> Iterator[Hub]:
    with serving({name: dual_encoders / folder for name, folder in MODELS.items()}) as server:
        yield server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of the folder ``to`` of a page, which is the same for each page, because an index
    knows the place of its photos.
    """
    return tmp_path_factory.mktemp("path")


@pytest.fixture(scope="module")
def prepared(root: Path) -> Path:
    """A folder with captioned photos, a run and an index."""
    (root / "to").mkdir()
    installation = Installation(root / "installed")
    installation.install(["search"])
    session = Session(installation, root / "to", installation.environment)
    for command in (
        "visavis data scenes --out photos --num-train 60 --num-val 20 --num-test 20",
        "visavis train demo --data photos epochs=2 --out runs/mine",
        "visavis index runs/mine photos --out indexes/photos",
    ):
        session.run_command(command)
    session.close()
    Image.new("RGB", (40, 30), "red").save(root / "to" / "photo.jpg")
    shutil.rmtree(root / "installed")
    return (root / "to").rename(root / "prepared")


def run_shell(command: str, folder: Path, environment: dict[str, str]) -> str:
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 0, f"$ {command}\n{process.stdout}"
    return process.stdout


def has_ended(process: int) -> bool:
    """Whether a process of another parent has ended, which that parent may not have noticed."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def extras_of(command: str) -> list[str] | None:
    """The extras that a command installs. None for other commands."""
    installed = re.match(r"pip install -e '?\.(?:\[([^]]+)\])?", command)
    if installed is None:
        return None
    return installed[1].split(",") if installed[1] else []


class Reader:
    """Runs the steps of a page in a folder."""

    def __init__(self, folder: Path, environment: dict[str, str], extras: list[str]):
        self.folder = folder
        self.installation = Installation(folder.parent / "installed")
        self.install(extras)
        self.environment = self.installation.environment | environment
        self.python, self.commands = (
            Session(self.installation, folder, self.environment) for _ in range(2)
        )
        self.server, self.address = 0, ""

    def run(self, step: Step) -> str:
        """Run a step and return what it prints."""
        text = step.text.replace(".venv/bin/", "").replace("localhost:8000", self.address)
        extras = extras_of(text)
        if step.file:
            (self.folder / step.file).write_text(text, encoding="utf-8")
            return ""
        if step.is_python:
            return self.python.run_code(text)
        if extras is not None:
            self.install(extras)
            return ""
        if re.match(r"(\w+=\S+ )?visavis serve ", text):
            return self.serve(text)
        if text.startswith("visavis ") and not re.search("[>|]", text):
            fails = (step.output or "").startswith("visavis: ")
            return self.commands.run_command(text, fails=fails)
        return run_shell(text, self.folder, self.environment)

    def install(self, extras: list[str]) -> None:
        try:
            self.installation.install(extras)
        except PackageNotFoundError as error:
            pytest.skip(f"{error.name} is not installed: run make slow")

    def serve(self, command: str) -> str:
        """Start a server, which runs until the next one or the end of the page."""
        self.end_server()
        self.server = self.commands.start_command(command, "--port", "0", waits=False)
        started, log = time.monotonic(), self.commands.log
        while (found := re.search(r" at http://(\S+?)/?\s", log.read_text())) is None:
            assert not has_ended(self.server), f"$ {command}\n{log.read_text()}"
            assert time.monotonic() < started + 200, f"$ {command}\n{log.read_text()}"
            time.sleep(0.05)
        self.address = found[1]
        return log.read_text()

    def end_server(self) -> None:
        if self.server:
            os.kill(self.server, signal.SIGINT)
            self.server = 0

    def close(self) -> None:
        self.end_server()
        self.python.close()
        self.commands.close()


def give(page: str, folder: Path, prepared: Path) -> None:
    """Put what a page starts with into a folder, under each name that the page uses."""
    (folder / "examples").symlink_to(PROJECT / "examples")
    for name in ("photo.jpg", "birds/red_circle/1.jpg", "birds/blue_star/1.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(prepared / "photo.jpg", folder / name)
    text = "\n".join(step.text for step in read_steps(page))
    for source, names in NAMES.items():
        for name in (source, *names):
            is_used = name in ("photos", "runs/mine") or re.search(
                rf"\b{name}\b", text
            )  # or by an index
            if is_used and name.startswith(GIVEN.get(page, ("",))):
                shutil.copytree(prepared / source, folder / name)
    for name, text in FILES.items():
        if (folder / name).parent.is_dir():
            (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def reader(page: str, root: Path, hub: Hub, request: pytest.FixtureRequest) -> Iterator[Reader]:
    prepared, folder = request.getfixturevalue("prepared"), root / "to"
    folder.mkdir()
    if GIVEN.get(page) != ():
        give(page, folder, prepared)
    settings = {
        "VISAVIS_CONFIG": str(root / "config"),
        "VISAVIS_CACHE": str(root / "cache"),
        "HF_HOME": str(root / "hub"),
    }
    extras = [] if page in WITHOUT_TRAIN or "tutorials" in page else ["train"]
    reader = Reader(folder, hub.environment | settings, extras)
    yield reader
    reader.close()
    # The default model is one that an earlier page downloaded, if there is one.
    for name in ("to", "installed", "config", "cache", "hub"):
        shutil.rmtree(root / name, ignore_errors=True)


def steps_to_run(page: str) -> list[Step]:
    """The steps of a page that run here."""
    return [
        step
        for step in read_steps(page)
        if not reason_not_to_run(step) and not (step.is_python and page in ELSEWHERE)
    ]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=[pytest.mark.long, pytest.mark.timeout(3600)]
            if page in LONG
            else pytest.mark.slow,
        )
        for page in PAGES
        if steps_to_run(page)
    ],
)
def test_page_runs_as_written(page, reader):
    for step in steps_to_run(page):
        printed = reader.run(step).replace(str(reader.folder.parent), "/path")
        printed = printed.replace("/path/config", "~/.config/visavis")
        if step.output is not None:
            check_output(step.output, printed, SPREAD.get(page, 0), COLLAPSED.get(page, ""))
    if page in CHECKS:
        reader.python.run_code(CHECKS[page])


def test_steps_run_or_have_a_reason():
    steps = [step for page in PAGES for step in read_steps(page)]
    for patterns in NOT_RUN.values():
        for pattern in patterns:
            assert any(fnmatchcase(step.text, pattern) for step in steps), pattern
    assert sum(len(steps_to_run(page)) for page in PAGES) >= 190


def test_extras_of_pages_exist():
    used = {
        extra for page in PAGES for step in read_steps(page) for extra in extras_of(step.text) or []
    }
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"hf", "lora", "search", "train"} <= used <= project["optional-dependencies"].keys()


def test_output_differs_by_spread_at_most():
    shown = "...\nRSUM 285.3±35 (2 images)  runs/a-1.png 4 s.\n"
    check_output(shown, "log\nRSUM 300.0±90  (2 images) runs/a-7.png 9 s.\n", 0.1)
    for printed in (
        "RSUM 320.0±35 (2 images) runs/a-1.png 4 s.",  # beyond the spread
        "RSUM 285.3±35 (3 images) runs/a-1.png 4 s.",  # a count
        "RSUM 285.3±35 (2 photos) runs/a-1.png 4 s.",  # a word
        "RSUM 285.3±35 (2 images) runs/a-1.png 4 s.\nmore",  # a line that the page does not show
    ):
        with pytest.raises(AssertionError):
            check_output(shown, printed, 0.1)


def test_output_differs_in_ranges_of_seeds():
    check_output("a 1.0 2.0\n  range 1–2 2–3\n", "a 1.0 2.0\n  range     2–2\n", 0)
    with pytest.raises(AssertionError):
        check_output("a 1.0\n  range 1–2\n", "a 1.0\nchance 1–2\n", 0)


def test_installation_has_only_named_extras(tmp_path):
    installation = Installation(tmp_path)
    installation.install(["hf"])
    names = {path.name for path in installation.site.iterdir()}
    assert {"torch", "transformers"} <= names
    assert not {"pyarrow", "fastapi", "peft", "pytest"} & names
