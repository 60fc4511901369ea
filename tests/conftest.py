"""Test environment: temporary caches and settings, no network, one thread, fixed seeds, and real
data if present.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from urllib.request import Request, urlopen

import hypothesis
import numpy as np
import pytest
import torch
from tests.platforms import IS_EMULATED

from visavis.core.child_processes import VARIABLES

PROJECT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("visavis", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("visavis")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most expected values are those of a CPU
    shared_data = PROJECT.parent / "shared" / "data"
    if "VISAVIS_DATA" not in os.environ and shared_data.is_dir():
        os.environ["VISAVIS_DATA"] = str(shared_data)
    if not IS_EMULATED:
        _write_temporary_files_to_memory()
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="visavis-cache-")
    os.environ["VISAVIS_CACHE"] = config.stash[_CACHE]
    os.environ["VISAVIS_CONFIG"] = os.path.join(config.stash[_CACHE], "config")
    os.environ["HF_HOME"] = os.path.join(config.stash[_CACHE], "hub")
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it


DATA_SETS = (
    "backbone",
    "coco_5k_test_text",
    "flickr8k",
    "flickr30k_text",
    "glove",
    "msvd_mini",
    "stsb",
)
"""Folders that the tests marked ``data`` read."""


def missing_data() -> list[str]:
    """Names of the data sets that ``VISAVIS_DATA`` lacks."""
    folder = os.environ.get("VISAVIS_DATA")
    return [
        name for name in DATA_SETS if not folder or not os.path.isdir(os.path.join(folder, name))
    ]


_CACHE = pytest.StashKey[str]()


def _write_temporary_files_to_memory() -> None:
    """Use the file system in memory, where writing to disk takes a tenth of the suite's CPU time. A
    given TMPDIR is respected.
    """
    memory = Path("/dev/shm")
    if (
        "TMPDIR" not in os.environ
        and os.access(memory, os.W_OK)
        and shutil.disk_usage(memory).free >= 4 * 2**30
    ):
        os.environ["TMPDIR"] = tempfile.tempdir = str(memory)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: it took 7 of 19 CPU s to visit the imported modules
    again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(
            10_000, 20, 50
        )  # collections take 1.2 s instead of 3 of each worker in the tests of training
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("data") and (missing := missing_data()):
        pytest.skip(
            f"real data sets are missing: {', '.join(missing)}. Set VISAVIS_DATA to their folder"
        )
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets, for tests marked ``data``."""
    return Path(os.environ["VISAVIS_DATA"])


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of one megabyte, or of the size that a test sets, for tests of a full disk.
    Skipped if it cannot be mounted.
    """
    folder = tmp_path / "small disk"
    folder.mkdir()
    mounted = sys.platform == "linux" and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', '1m')}", "tmpfs", folder], check=False, capture_output=True
    ).returncode == 0  # fmt: skip
    if not mounted:
        pytest.skip("a small file system cannot be mounted on this machine")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Restore the default action of SIGHUP in this process and its children, even if the tests run
    under nohup.
    """
    if hasattr(signal, "SIGHUP"):
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        yield
        signal.signal(signal.SIGHUP, before)
    else:
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts with the same random state, in any order."""
    # Without CUDA, torch.manual_seed records a stack trace, which takes milliseconds.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - other packages use the global state
    random.seed(0)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """No test leaves Ctrl-C ignored, which later tests press."""
    yield
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert handler is signal.default_int_handler


@pytest.fixture(autouse=True)
def import_path_of_children() -> Iterator[None]:
    """No test leaves the variables that a command sets for its own process. With them, a script that a
    later test starts finds no module next to itself.
    """
    yield
    for name in VARIABLES:
        os.environ.pop(name, None)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def dual_encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders ``clip`` and ``siglip`` of tiny models with random weights, preprocessing and a
    tokenizer of a few words.
    """
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [
        "[PAD]",
        "[UNK]",
        "[BOS]",
        "[EOS]",
        "a",
        "red",
        "blue",
        "green",
        "circle",
        "square",
        "star",
        "and",
        "large",
        "small",
    ]
    encoder = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    text = {
        "vocab_size": len(words),
        "max_position_embeddings": 12,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    parts = {
        "text_config": encoder | text,
        "vision_config": encoder | {"image_size": 32, "patch_size": 8},
    }
    torch.manual_seed(0)
    made = {
        "clip": transformers.CLIPModel(transformers.CLIPConfig(**parts, projection_dim=10)),
        "siglip": transformers.SiglipModel(transformers.SiglipConfig(**parts)),
    }
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[BOS] $A [EOS]", special_tokens=[("[BOS]", 2), ("[EOS]", 3)]
    )
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    pixels = {
        "do_resize": True,
        "size": {"height": 32, "width": 32},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    root = tmp_path_factory.mktemp("dual-encoders")
    transformers.utils.logging.disable_progress_bar()
    for name, model in made.items():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.eval().save_pretrained(root / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
            root / name
        )
        (root / name / "preprocessor_config.json").write_text(json.dumps(pixels))
    transformers.utils.logging.enable_progress_bar()
    return root


@pytest.fixture(scope="session")
def kind_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a tiny dual encoder of a kind, see ``dual_encoder_kinds``."""
    pytest.importorskip("transformers")
    from tests.dual_encoder_kinds import write_dual_encoder

    root = tmp_path_factory.mktemp("kinds")
    return cache(lambda kind: write_dual_encoder(kind, root / kind))


@pytest.fixture(scope="session")
def embedders(dual_encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of tiny embedding models with random weights, see ``write_embedders``."""
    pytest.importorskip("sentence_transformers")
    from tests.embedders import write_embedders

    return write_embedders(tmp_path_factory.mktemp("embedders"), dual_encoders / "clip")


@pytest.fixture(scope="session")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models with random weights: ``vit`` with a class token, ``swin`` without one,
    and ``bert``.
    """
    transformers = pytest.importorskip("transformers")
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] a the of and red blue green yellow circle square triangle star left right above below large small"
    words = words.split()
    bert = {
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 40,
    }
    root = tmp_path_factory.mktemp("towers")
    torch.manual_seed(1)
    transformers.utils.logging.disable_progress_bar()
    (root / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(root / "vocab.txt")).save_pretrained(root / "bert")
    vit = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "image_size": 16,
        "patch_size": 8,
    }
    swin = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 4,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 2,
    }
    models = {
        "vit": transformers.ViTModel(transformers.ViTConfig(**vit), add_pooling_layer=False),
        "swin": transformers.SwinModel(transformers.SwinConfig(**swin)),
        "bert": transformers.BertModel(transformers.BertConfig(**bert, vocab_size=len(words))),
    }
    for name, model in models.items():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(root / name)
    pixels = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for name in ("vit", "swin"):
        (root / name / "preprocessor_config.json").write_text(json.dumps(pixels))
    transformers.utils.logging.enable_progress_bar()
    return root


@pytest.fixture(scope="session")
def object_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket of an S3 server in this process."""
    server = pytest.importorskip(
        "moto.server", reason="moto is installed by make slow"
    ).ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    keys = {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **keys,
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "NO_PROXY": "*",
        }.items():
            patch.setenv(name, value)
        urlopen(
            Request(
                f"http://{host}:{port}/bucket",
                method="PUT",
                headers={"Host": "s3.us-east-1.amazonaws.com"},
            )
        ).close()
        yield "s3://bucket"
    server.stop()
