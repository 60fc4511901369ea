"""Loading of pretrained models: damaged folders are reported with their name, and code in a folder
is never run.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import visavis
from visavis.core import storage
from visavis.core.errors import DataError, VisavisError
from visavis.data.vocabulary import Vocabulary
from visavis.models.clip.model import open_dual_encoder
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.frozen_encoders import open_text_encoder, open_visual_encoder
from visavis.models.encoders.sentence_encoders import open_text_pair_encoder
from visavis.models.image_text.global_matchers import VSEPlusPlus
from visavis.models.processor import Processor

from ..mutation import changed, flipped

transformers = pytest.importorskip("transformers")

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "a",
    "dog",
    "runs",
    "cat",
    "sleeps",
    "on",
    "the",
    "beach",
]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
OPEN = {
    "vit": open_visual_encoder,
    "bert": open_text_encoder,
    "cross": open_text_pair_encoder,
    "clip": open_dual_encoder,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, dual_encoders):
    """Write intact folders: ``vit``, ``bert``, ``cross`` and ``clip``."""
    root = tmp_path_factory.mktemp("sound")
    text = transformers.BertConfig(
        **SMALL, vocab_size=len(WORDS), max_position_embeddings=16, num_labels=1
    )
    models = {
        "vit": transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)),
        "bert": transformers.BertModel(text),
        "cross": transformers.BertForSequenceClassification(text),
    }
    transformers.utils.logging.disable_progress_bar()
    for name, model in models.items():
        model.save_pretrained(root / name)
    transformers.utils.logging.enable_progress_bar()
    pixels = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (root / "vit" / "preprocessor_config.json").write_text(json.dumps(pixels))
    (root / "vocab.txt").write_text("\n".join(WORDS))
    for name in ("bert", "cross"):
        transformers.BertTokenizer(str(root / "vocab.txt")).save_pretrained(root / name)
    shutil.copytree(dual_encoders / "clip", root / "clip")
    words = Vocabulary.from_captions(["a red circle", "a blue star"], min_count=1)
    config = VSEPlusPlus.Config(
        visual_input_dim=192,
        text_granularity="tokens",
        text_input_dim=len(words),
        embedding_dim=8,
        word_dim=5,
    )
    Processor(EncoderSpec("visual", "scenes"), None, words).save(VSEPlusPlus(config), root / "own")
    return root


def edited(file, **values):
    def edit(folder):
        content = json.loads((folder / file).read_text())
        for name, value in values.items():
            content.pop(name, None)
            if value is not None:
                content[name] = value
        (folder / file).write_text(json.dumps(content))

    return edit


def written(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def shortened(file, part=0.5):
    return lambda folder: (folder / file).write_bytes(
        (folder / file).read_bytes()[: int(part * (folder / file).stat().st_size)]
    )


def removed(*files):
    return lambda folder: [(folder / file).unlink() for file in files]


def as_pipe(file):
    def replace(folder):
        if not hasattr(os, "mkfifo"):
            pytest.skip("no named pipes here")
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return replace


def vocabulary(**words):
    def edit(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"] = words
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return edit


def not_finite(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).flatten()[0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


SPECIAL = {word: number for number, word in enumerate(WORDS[:4])}
DAMAGES = {
    "weights cut": (
        "vit bert cross clip",
        shortened("model.safetensors"),
        "expected a model that transformers can read",
    ),
    "weights empty": (
        "bert",
        written("model.safetensors", b""),
        "expected a model that transformers can read",
    ),
    "weights a pipe": (
        "bert",
        as_pipe("model.safetensors"),
        r"model\.safetensors: expected a regular file, got a named pipe",
    ),
    "weights not finite": (
        "vit bert cross",
        not_finite,
        "is damaged: expected finite weights, got NaN or infinity in",
    ),
    "config cut": ("vit bert cross clip", shortened("config.json"), r"config\.json is not JSON"),
    "config a list": (
        "vit bert",
        written("config.json", b"[1]"),
        r"config\.json: its content is \[1\]",
    ),
    "config without a kind": (
        "bert cross",
        edited("config.json", model_type=None),
        r"config\.json: model_type is missing",
    ),
    "another width": (
        "vit bert cross",
        edited("config.json", hidden_size=32),
        "its weights have other shapes than in its config",
    ),
    "a huge width": (
        "bert",
        edited("config.json", hidden_size=2**30),
        "its weights have other shapes than in its config",
    ),
    "a width in words": ("vit bert", edited("config.json", hidden_size="wide"), "hidden_size"),
    "fewer layers": (
        "vit bert cross",
        edited("config.json", num_hidden_layers=1),
        r"expected only weights of its config\.json, got also",
    ),
    "more layers": (
        "vit bert cross",
        edited("config.json", num_hidden_layers=3),
        r"expected all weights of its config\.json, got none for",
    ),
    "another kind": (
        "vit bert cross",
        edited("config.json", model_type="gpt2"),
        r"expected all weights of its config\.json|expected a model that reads texts",
    ),
    "no such function": ("bert", edited("config.json", hidden_act="nope"), "KeyError 'nope'"),
    "no tokenizer": (
        "bert cross clip",
        removed("tokenizer.json", "tokenizer_config.json"),
        "expected a working tokenizer|expected a tokenizer",
    ),
    "no words": ("bert cross", vocabulary(**SPECIAL), "expected a working tokenizer"),
    "one word": ("bert", vocabulary(**SPECIAL, a=4), "expected a working tokenizer"),
    "words of another": (
        "bert cross",
        vocabulary(**SPECIAL, a=4, dog=5, cat=99),
        "with ids below 12, got ids up to 99",
    ),
    "tokenizer cut": (
        "bert cross clip",
        shortened("tokenizer.json"),
        "expected a tokenizer that transformers can read",
    ),
    "tokenizer garbage": (
        "bert",
        written("tokenizer.json", b"{}"),
        "expected a tokenizer that transformers can read",
    ),
    "settings garbage": (
        "bert",
        written("tokenizer_config.json", b"[]"),
        r"tokenizer_config\.json: its content is \[\]",
    ),
    "no room for words": (
        "bert",
        edited("tokenizer_config.json", model_max_length=2),
        "expected room for words in a text, got a maximum of 2 tokens",
    ),
    "modules garbage": (
        "bert",
        written("modules.json", b"{}"),
        r"modules\.json: its content is \{\}",
    ),
    "modules without pooling": (
        "bert",
        written("modules.json", b"[]"),
        r"modules\.json: expected the steps of a sentence model",
    ),
    "modules elsewhere": (
        "bert",
        written("modules.json", b'[{"type": "Pooling", "path": "../bert"}]'),
        r"modules\.json: 0\.path is '\.\./bert'",
    ),
    "preparation a list": (
        "vit clip",
        written("preprocessor_config.json", b"[]"),
        r"preprocessor_config\.json: its content is \[\]",
    ),
    "no mean": (
        "vit",
        edited("preprocessor_config.json", image_mean=None),
        "image_mean, image_std: expected both",
    ),
    "no standard deviation": (
        "vit",
        edited("preprocessor_config.json", image_std=[0, 0, 0]),
        r"image_std\.0 is 0",
    ),
    "negative image size": (
        "vit",
        edited("preprocessor_config.json", size={"height": -4, "width": 32}),
        "size",
    ),
    "another image size": (
        "vit clip",
        edited("preprocessor_config.json", size={"height": 30, "width": 30}),
        (
            r"preprocessor_config\.json: expected images of 32 x 32 pixels, the image_size of "
            r"config\.json, got 30 x 30\. Set its size and crop_size to \d+ x \d+\."
        ),
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name, (kinds, *_) in DAMAGES.items() for kind in kinds.split()],
)
def test_damaged_folder_is_reported(folders, tmp_path, name, kind):
    _, damage, sentence = DAMAGES[name]
    folder = tmp_path / "encoder"
    shutil.copytree(folders / kind, folder)
    damage(folder)
    with pytest.raises(DataError, match=sentence) as error:
        OPEN[kind](str(folder))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


CODE = {
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoModelForSequenceClassification": "evil.Model",
}
FOREIGN = {
    "a kind of its own": (
        edited("config.json", model_type="evil", auto_map=CODE),
        "with code of its own .*Such code is never run",
    ),
    "attention of the hub": (
        edited("config.json", attn_implementation="evil/kernel"),
        r"expected no external code in config\.json, got 'evil/kernel'",
    ),
    "an adapter": (
        written("adapter_config.json", b'{"base_model_name_or_path": "evil/base"}'),
        "got an adapter of another model",
    ),
}
OF_TEXTS = {
    "a tokenizer of its own": (
        edited(
            "tokenizer_config.json",
            tokenizer_class="Evil",
            auto_map={"AutoTokenizer": ["evil.Tokenizer", None]},
        ),
        "expected a tokenizer of transformers, got one with code of its own",
    ),
}


def with_code(folder, source, change):
    shutil.copytree(source, folder)
    trap = f"open({str(folder.parent / 'sprung')!r}, 'w').close()\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    (folder / "evil.py").write_text(trap)
    change(folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            (kind, name)
            for kind in OPEN
            for name in FOREIGN
            if kind != "clip" or name != "a kind of its own"
        ),
        *(("bert", name) for name in OF_TEXTS),
    ],
)
def test_code_in_folder_is_refused(folders, tmp_path, kind, name):
    change, sentence = (FOREIGN | OF_TEXTS)[name]
    with_code(tmp_path / "encoder", folders / kind, change)
    with pytest.raises(DataError, match=sentence):
        OPEN[kind](str(tmp_path / "encoder"))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("answers", ["y\n" * 9, ""], ids=["yes to everything", "closed"])
def test_no_prompt_to_run_code(folders, tmp_path, monkeypatch, capfd, answers):
    with_code(tmp_path / "encoder", folders / "bert", FOREIGN["a kind of its own"][0])
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))
    with pytest.raises(DataError):
        OPEN["bert"](str(tmp_path / "encoder"))
    assert "[y/N]" not in "".join(capfd.readouterr())
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", ["vit", "bert", "cross"])
def test_known_model_type_is_read_without_its_own_code(folders, tmp_path, kind):
    with_code(tmp_path / "encoder", folders / kind, edited("config.json", auto_map=CODE))
    given, expected = (
        OPEN[kind](str(folder)).state_dict() for folder in (tmp_path / "encoder", folders / kind)
    )
    assert all(torch.equal(given[name], weight) for name, weight in expected.items())
    assert not (tmp_path / "sprung").exists()


def test_few_modules_open_files_of_others():
    source = Path(visavis.__file__).parent
    opening = [
        path.name
        for path in source.rglob("*.py")
        if re.search(r"\.from_pretrained\(|import pickle|torch\.load\(", path.read_text())
    ]
    # safe_pickle runs the instructions of a pickle without imports, calls and states.
    assert sorted(opening) == ["checkpoint_files.py", "pretrained_loading.py", "safe_pickle.py"]


@pytest.mark.parametrize("is_bin", [False, True], ids=["safetensors", "bin"])
def test_folder_of_loaded_model_can_be_removed(folders, tmp_path, is_bin):
    folder = shutil.copytree(folders / "vit", tmp_path / "vit")
    if is_bin:
        weights = storage.read_tensors(folder / "model.safetensors")
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    encoder, images = open_visual_encoder(str(folder)), [Image.new("RGB", (40, 30), "red")]
    before = encoder.encode(images).vectors
    shutil.rmtree(folder)
    assert torch.equal(encoder.encode(images).vectors, before)


def shaken(folder, chance):
    """Change one file of a folder: a value of its JSON, or some of its bytes."""
    file = folder / chance.choice(
        sorted(path.name for path in folder.iterdir() if path.suffix != ".txt")
    )
    if file.suffix == ".json" and chance.random() < 0.7:
        file.write_text(json.dumps(changed(json.loads(file.read_text()), chance), default=str))
    else:
        header = 400 if chance.random() < 0.5 else None
        content = file.read_bytes()
        file.write_bytes(flipped(content[:header], chance) + (content[header:] if header else b""))


def encoded(kind, folder):
    """Encode an ordinary item."""
    if kind in ("own", "clip"):
        return visavis.load(folder).encode_texts(["a red circle"])
    if kind == "cross":
        return OPEN[kind](str(folder)).encode(["a dog"], ["a cat"])
    return (
        OPEN[kind](str(folder))
        .encode([Image.new("RGB", (40, 30), "red")] if kind == "vit" else ["a dog"])
        .vectors
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("count", [15, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [*OPEN, "own"])
@pytest.mark.slow
def test_randomly_changed_folder_opens_or_is_reported(folders, tmp_path, kind, count):
    chance, whole = random.Random(kind), 0
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(folders / kind, folder)
        shaken(folder, chance)
        try:
            vectors = encoded(kind, folder)
        except VisavisError:
            continue
        except Exception as error:
            raise AssertionError(f"{number}: {type(error).__name__}: {error}") from error
        assert vectors.isfinite().all(), number
        whole += 1
    assert 0 < whole < count
