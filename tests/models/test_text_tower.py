"""Text towers: the vectors of the model on texts of every kind, without torch, or one message."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.dual_encoder_kinds import DAILY_KINDS, PAIRS

import visavis
from visavis.core import storage
from visavis.core.errors import DataError, RunError, ShapeError, SpecError, VisavisError
from visavis.core.progress import NoProgress
from visavis.data.vocabulary import Vocabulary
from visavis.models import text_tower_export
from visavis.models.clip.model import CLIP
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.image_text.cross_attention import SCAN, MaxSim
from visavis.models.image_text.global_matchers import Heads, VSEInfinity, VSEPlusPlus
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.models.text_side import text_side
from visavis.models.text_tower import (
    CONFIG_FILE,
    GRAPH_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    TextTower,
    first_line,
    missing_reason,
    tower_folder,
    verify_tower,
)
from visavis.models.text_tower_export import (
    SAMPLE_TEXTS,
    add_text_tower,
    check_equal_vectors,
    remove_text_towers,
    text_tower,
    write_text_tower,
)
from visavis.papers.models.xvlm import XVLM

pytest.importorskip("onnxruntime")

WORDS = Vocabulary.from_captions(
    ["a red circle and a blue square", "两只狗 ein Café ΣΟΦΟΣ สุนัข cafe\u0301"], min_count=1
)
PHOTOS = EncoderSpec("visual", "scenes", "pooled")
REGIONS = EncoderSpec("visual", "scenes", "regions")
VISUAL = {"visual_input_dim": 8, "embedding_dim": 12}
TOKENS = {"text_granularity": "tokens", "text_input_dim": len(WORDS), "word_dim": 6}


@pytest.fixture(scope="module", autouse=True)
def text_towers(tmp_path_factory):
    """Text towers are on, in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VISAVIS_TEXT_TOWERS", raising=False)
        patch.setenv("VISAVIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def of_words(kind, *, matryoshka_dims=(), **config):
    torch.manual_seed(0)
    matcher = kind(kind.Config(**(VISUAL | TOKENS | config)))
    for parameter in matcher.parameters():
        parameter.data *= 4  # so that different texts have different vectors
    matcher.matryoshka_dims = matryoshka_dims
    return Retriever(matcher, Processor(PHOTOS, None, WORDS))


def frozen(folder, granularity="pooled"):
    torch.manual_seed(0)
    text = EncoderSpec("text", str(folder), granularity)
    kind = Heads if granularity == "pooled" else VSEInfinity
    sizes = {"text_granularity": granularity, "text_input_dim": 8}
    return Retriever(kind(kind.Config(**VISUAL, **sizes)), Processor(PHOTOS, text, None))


def written(model, folder):
    write_text_tower(model, folder / "tower")
    return TextTower.open(folder / "tower")


WORD_MODELS = {
    "vse++": lambda: of_words(VSEPlusPlus),
    "vse++ both directions": lambda: of_words(VSEPlusPlus, bidirectional=True, word_pool="mean"),
    "vse++ max": lambda: of_words(VSEPlusPlus, word_pool="max"),
    "heads of words": lambda: of_words(Heads, num_filters=4),
}


@pytest.mark.parametrize("kind", WORD_MODELS)
def test_tower_equals_word_model(kind, tmp_path):
    model = WORD_MODELS[kind]()
    tower = written(model, tmp_path)
    check_equal_vectors(model, tower)
    texts = ["a red circle", "ΣΟΦΟΣ 狗 café", "a blue square and a circle"]
    vectors = np.stack(tower.encode_texts(texts))
    np.testing.assert_allclose(vectors, model.encode_texts(texts).numpy(), atol=1e-6)
    assert vectors.std(0).min() > 1e-3, "a constant model proves nothing"
    assert tower.count_tokens(texts) == model.count_tokens(texts)
    assert tower.fingerprint == model.fingerprint


def test_tower_equals_frozen_text_encoder(towers, tmp_path):
    model = frozen(towers / "bert")
    tower = written(model, tmp_path)
    check_equal_vectors(model, tower)
    texts = [text for text in SAMPLE_TEXTS if len(text) < 200]
    assert tower.count_tokens(texts) == model.count_tokens(texts)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_tower_equals_dual_encoder(kind, dual_encoders, tmp_path):
    model = visavis.load(dual_encoders / kind, device="cpu")
    tower = written(model, tmp_path)
    check_equal_vectors(model, tower)
    assert tower.count_tokens(SAMPLE_TEXTS) == model.count_tokens(SAMPLE_TEXTS)


@pytest.mark.parametrize(
    "kind", [*DAILY_KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in PAIRS)]
)
def test_tower_equals_other_dual_encoder(kind, kind_folders, tmp_path):
    model = visavis.load(kind_folders(kind), device="cpu")
    tower = written(model, tmp_path)
    check_equal_vectors(model, tower)
    assert tower.count_tokens(SAMPLE_TEXTS) == model.count_tokens(SAMPLE_TEXTS)


@pytest.mark.parametrize("text_only", [False, True])
def test_tower_equals_clip_with_adapters(text_only, dual_encoders, tmp_path):
    pytest.importorskip("peft")
    kind = text_side(CLIP) if text_only else CLIP
    sizes = {"visual_input_dim": 10, "text_input_dim": 14}
    given = {"visual_granularity": "pooled"} if text_only else {}
    matcher = kind(CLIP.Config(backbone=str(dual_encoders / "clip"), lora_rank=2, **sizes, **given))
    for name, parameter in matcher.named_parameters():
        torch.nn.init.normal_(parameter)
        assert "lora_" in name
    processor = visavis.load(dual_encoders / "clip", device="cpu").processor
    items = "0123456789abcdef" if text_only else None
    model = Retriever(matcher, dataclasses.replace(processor, items=items))
    tower = written(model, tmp_path)
    check_equal_vectors(model, tower)
    base = visavis.load(dual_encoders / "clip", device="cpu")
    with pytest.raises(VisavisError, match="expected a text tower with the vectors"):
        check_equal_vectors(base, tower)


def test_tower_equals_text_side(tmp_path):
    matcher = text_side(VSEPlusPlus)(VSEPlusPlus.Config(**VISUAL, **TOKENS))
    model = Retriever(matcher, Processor(None, None, WORDS, items="0123456789abcdef"))
    check_equal_vectors(model, written(model, tmp_path))


POOLED = {
    "generalized pooling of words": lambda towers: of_words(VSEInfinity),
    "generalized pooling of frozen words": lambda towers: frozen(towers / "bert", "words"),
}


@pytest.mark.parametrize("kind", POOLED)
def test_tower_equals_generalized_pooling(kind, towers, tmp_path):
    model = POOLED[kind](towers)
    tower = written(model, tmp_path)
    check_equal_vectors(model, tower)
    # The model, which still encodes photos, is as before.
    pooling = model.matcher.text_pool
    assert pooling.weight_table is None
    if model.processor.vocabulary is not None:
        with pytest.raises(DataError, match="expected at most 510 words, got 600"):
            tower.encode_texts(["a " * 600])


@pytest.mark.parametrize("kind", [VSEPlusPlus, VSEInfinity, MaxSim])
def test_tower_equals_trained_text_backbone(kind, towers, tmp_path):
    torch.manual_seed(0)
    config = kind.Config(
        **VISUAL, text_granularity="tokens", text_input_dim=24, text_backbone=str(towers / "bert")
    )
    model = Retriever(kind(config), Processor(REGIONS, None, None, str(towers / "bert")))
    check_equal_vectors(model, written(model, tmp_path))


LATE = {
    "words": lambda towers: of_words(MaxSim),
    "frozen words": lambda towers: Retriever(
        MaxSim(MaxSim.Config(**VISUAL, text_granularity="words", text_input_dim=8, context_dim=4)),
        Processor(REGIONS, EncoderSpec("text", str(towers / "bert"), "words"), None),
    ),
}


@pytest.mark.parametrize("kind", LATE)
def test_tower_of_late_interaction_has_a_vector_per_token(kind, towers, tmp_path):
    model = LATE[kind](towers)
    tower = written(model, tmp_path)
    check_equal_vectors(model, tower)
    texts = ["a", "a red circle and a blue square"]
    expected = model.item_vectors(model.encode_text(texts))
    for rows, tokens in zip(tower.encode_texts(texts), expected, strict=True):
        assert rows.shape == tokens.shape
        np.testing.assert_allclose(rows, tokens.numpy(), atol=1e-6)


def test_tower_equals_first_stage_of_model_with_two_stages(towers, tmp_path):
    torch.manual_seed(0)
    folder = str(towers / "bert")
    config = XVLM.Config(
        backbone=str(towers / "vit"),
        text_backbone=folder,
        visual_input_dim=8,
        text_input_dim=23,
        fusion_layers=2,
        embedding_dim=6,
        rerank_top_k=3,
    )
    pixels = EncoderSpec("visual", str(towers / "vit"), "regions")
    model = Retriever(XVLM(config), Processor(pixels, None, None, folder))
    check_equal_vectors(model, written(model, tmp_path))


@pytest.mark.parametrize("kind", ["dense", "router"])
def test_tower_equals_sentence_transformers(kind, embedders, tmp_path):
    model = visavis.load(embedders / kind, device="cpu")
    tower = written(model, tmp_path)
    check_equal_vectors(model, tower)
    # Both add the prompt.
    assert tower._config.prompt == "Find the image."


def test_weights_of_8_bits_are_smaller_or_refused(tmp_path, monkeypatch):
    model = of_words(VSEPlusPlus, word_dim=400)
    write_text_tower(model, tmp_path / "float32")
    write_text_tower(model, tmp_path / "int8", int8=True)
    tower = TextTower.open(tmp_path / "int8")
    check_equal_vectors(model, tower, 1 - 1e-3)
    sizes = [(tmp_path / name / WEIGHTS_FILE).stat().st_size for name in ("float32", "int8")]
    assert sizes[1] < sizes[0]
    verify_tower(tmp_path / "int8")
    with pytest.raises(VisavisError, match=r"cosines of at least 0.99999 are needed"):
        check_equal_vectors(model, tower)
    monkeypatch.setattr(text_tower_export, "MIN_INT8_COSINE", 1.1)
    with pytest.raises(VisavisError, match=r"cosines of at least 1.1 are needed"):
        write_text_tower(model, tmp_path / "coarse", int8=True)
    assert not (tmp_path / "coarse").exists()


def with_prompt(bert, folder):
    """A sentence model with a prompt, which only sentence-transformers can run."""
    shutil.copytree(bert, folder)
    types = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": "the star "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return frozen(folder)


def test_sentence_model_with_prompt_is_refused(towers, tmp_path):
    pytest.importorskip("sentence_transformers")
    model = with_prompt(towers / "bert", tmp_path / "prompted")
    with pytest.raises(VisavisError, match="a model that only sentence-transformers can run"):
        text_tower(model)
    # The reason is recorded.
    assert tower_folder(storage.cache_folder(), model.fingerprint).with_suffix(".json").is_file()


REFUSED = {
    "vision-language model": (
        lambda paths: visavis.load(paths["embedders"] / "embedder", device="cpu"),
        "EmbeddingModel: expected a text encoder of its own, got .* language model of gigabytes",
    ),
    "scores of pairs": (
        lambda paths: of_words(SCAN),
        "SCAN: expected one vector per text, or late interaction, got a model that scores pairs",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_without_text_side_are_refused(kind, embedders, tmp_path):
    build, message = REFUSED[kind]
    model = build({"embedders": embedders})
    with pytest.raises(VisavisError, match=message):
        written(model, tmp_path)
    assert os.listdir(tmp_path) == []
    add_text_tower(tmp_path, model, NoProgress())
    assert re.match(message, missing_reason(tmp_path, model.fingerprint))


@pytest.fixture(scope="module")
def word_tower(tmp_path_factory):
    model = of_words(VSEPlusPlus, matryoshka_dims=(4, 12))
    folder = tmp_path_factory.mktemp("towers") / "tower"
    write_text_tower(model, folder)
    return model, folder


def test_first_dimensions_equal_the_model(word_tower):
    model, folder = word_tower
    texts = ["a red circle", "a square"]
    vectors = TextTower.open(folder, 4).encode_texts(texts)
    expected = model.with_embedding_dim(4).encode_texts(texts).numpy()
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    with pytest.raises(RunError, match="expected vectors of 13 dimensions, got 12"):
        TextTower.open(folder, 13)


@pytest.mark.parametrize(
    ("texts", "error"),
    [([], ShapeError), ("a dog", SpecError), (["a", " "], DataError), (["\ud800"], DataError)],
)
def test_bad_texts_are_refused_as_by_the_model(word_tower, texts, error):
    model, folder = word_tower
    with pytest.raises(error) as by_model:
        model.encode_texts(texts)
    with pytest.raises(error) as by_tower:
        TextTower.open(folder).encode_texts(texts)
    assert str(by_tower.value) == str(by_model.value)


def test_unknown_words_equal_the_model(word_tower):
    model, folder = word_tower
    tower = TextTower.open(folder)
    assert tower.unknown_words("a red zebra") == model.unknown_words("a red zebra") == ["zebra"]
    with pytest.raises(VisavisError, match="got unknown words only"):
        tower.unknown_words("zebra")
    with pytest.warns(UserWarning, match="knows no word of 1 of 2 texts"):
        tower.encode_texts(["zebra", "a"])


def test_progress_counts_texts(word_tower):
    calls = []
    TextTower.open(word_tower[1]).encode_texts(["a"] * 70, lambda *call: calls.append(call))
    assert calls == [(32, 70), (64, 70), (70, 70)]


def test_order_of_texts_does_not_change_vectors(word_tower):
    tower = TextTower.open(word_tower[1])
    texts = ["a " * number for number in range(1, 70)]
    forward = np.stack(tower.encode_texts(texts))
    backward = np.stack(tower.encode_texts(texts[::-1]))
    np.testing.assert_allclose(forward, backward[::-1], atol=1e-6)


@pytest.mark.parametrize("name", [CONFIG_FILE, GRAPH_FILE, WEIGHTS_FILE, VOCABULARY_FILE])
@pytest.mark.parametrize("damage", ["removed", "cut", "empty", "foreign"])
def test_damaged_files_are_one_message(word_tower, name, damage, tmp_path):
    folder = shutil.copytree(word_tower[1], tmp_path / "tower")
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage != "removed":
        given = {"cut": content[:-2], "empty": b"", "foreign": b"{}"}[damage]
        (folder / name).write_bytes(given)
    with pytest.raises(RunError, match=r"expected a complete text tower, got .* Remove /"):
        TextTower.open(folder)


@pytest.mark.parametrize("name", [GRAPH_FILE, WEIGHTS_FILE, VOCABULARY_FILE])
def test_changed_bytes_are_found_by_verification(word_tower, name, tmp_path):
    folder = shutil.copytree(word_tower[1], tmp_path / "tower")
    verify_tower(folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(RunError, match=f"checksum mismatch of {name}"):
        verify_tower(folder)


@pytest.mark.parametrize("name", [GRAPH_FILE, VOCABULARY_FILE])
def test_foreign_bytes_of_equal_size_are_one_message(word_tower, name, tmp_path):
    folder = shutil.copytree(word_tower[1], tmp_path / "tower")
    (folder / name).write_bytes(b"\xff" * (folder / name).stat().st_size)
    with pytest.raises(RunError, match="expected a complete text tower, got a damaged"):
        TextTower.open(folder)


def rewritten(folder, target, **changes):
    """A copy of a text tower with other settings or another vocabulary."""
    folder = shutil.copytree(folder, target / "tower")
    config = json.loads((folder / CONFIG_FILE).read_text())
    if words := changes.pop("words", None):
        (folder / VOCABULARY_FILE).write_text(json.dumps(words))
        content = (folder / VOCABULARY_FILE).read_bytes()
        config["files"][VOCABULARY_FILE] = {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **changes}))
    return folder


def test_vocabulary_without_markers_is_refused(word_tower, tmp_path):
    folder = rewritten(word_tower[1], tmp_path, words=["<pad>", "<start>", "<end>", "dog"])
    with pytest.raises(RunError, match=r"damaged or foreign one \(.*no word <unk>\)"):
        TextTower.open(folder)


@pytest.mark.parametrize("change", [{"embedding_dim": 16}, {"late_interaction": True}])
def test_graph_with_other_vectors_is_refused(change, word_tower, tmp_path):
    tower = TextTower.open(rewritten(word_tower[1], tmp_path, **change))
    with pytest.raises(RunError, match=r"1 texts have vectors of the shape \[1, 12\]"):
        tower.encode_texts(["a dog"])


def test_error_without_text_has_the_name_of_its_class():
    assert first_line(ValueError()) == first_line(ValueError("\n")) == "ValueError"
    assert first_line(ValueError("no graph.\nmore")) == "no graph"


@pytest.mark.parametrize("step", ["_write_tokens", "check_equal_vectors", "example_tokens"])
def test_unexpected_errors_of_export_are_a_reason(step, tmp_path, monkeypatch):
    def fail(*_):
        raise AttributeError

    messages = []

    class Messages(NoProgress):
        def message(self, text):
            messages.append(text)

    model = of_words(VSEPlusPlus, bidirectional=True, word_pool="max")
    monkeypatch.setattr(text_tower_export, step, fail)
    monkeypatch.setattr(text_tower_export, "text_tower", lambda given: written(given, tmp_path))
    add_text_tower(tmp_path, model, Messages())
    reason = missing_reason(tmp_path, model.fingerprint)
    assert re.fullmatch(
        r"VSE\+\+: expected a .*, got an error \(AttributeError\)\. The model .*", reason
    )
    assert messages == [f"The model itself encodes texts, because it has no text tower: {reason}"]


def test_tower_of_another_model_is_written_again(word_tower, tmp_path):
    model, folder = word_tower
    shutil.copytree(
        rewritten(folder, tmp_path, fingerprint="0" * 16), tower_folder(tmp_path, model.fingerprint)
    )
    add_text_tower(tmp_path, model, NoProgress())
    tower = TextTower.open(tower_folder(tmp_path, model.fingerprint))
    assert tower.fingerprint == model.fingerprint


def test_tower_of_another_version_is_refused(word_tower, tmp_path):
    folder = shutil.copytree(word_tower[1], tmp_path / "tower")
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(RunError, match="format 99, this version reads 1"):
        TextTower.open(folder)


def test_tower_encodes_without_torch(word_tower):
    code = f"""
import sys
from pathlib import Path
from visavis.models.text_tower import TextTower
encoder = TextTower.open(Path({str(word_tower[1])!r}))
print(encoder.encode_texts(["a red circle"])[0].shape)
loaded = [name for name in ("torch", "transformers", "onnx", "scipy") if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(12,)"


def test_cached_tower_is_written_once(monkeypatch):
    model = of_words(VSEPlusPlus, word_pool="mean")
    folder = text_tower(model)
    monkeypatch.setattr(text_tower_export, "write_text_tower", None)
    assert text_tower(model) == folder
    TextTower.open(folder)


def test_damaged_tower_in_cache_is_written_again():
    model = of_words(VSEPlusPlus, word_pool="mean")
    folder = text_tower(model)
    content = bytearray((folder / WEIGHTS_FILE).read_bytes())
    content[100] ^= 255
    (folder / WEIGHTS_FILE).write_bytes(content)
    verify_tower(text_tower(model))


@pytest.mark.slow
def test_processes_that_export_one_model_share_its_tower(tmp_path):
    code = """
import sys, torch
from tests.models.test_text_tower import of_words, VSEPlusPlus
from visavis.models.text_tower_export import text_tower
print(text_tower(of_words(VSEPlusPlus, word_pool="max", bidirectional=True)))
"""
    environment = os.environ | {
        "VISAVIS_CACHE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    folders = {each.communicate()[0].decode().strip() for each in running}
    assert [each.returncode for each in running] == [0, 0]
    [folder] = folders
    verify_tower(Path(folder))
    assert [name for name in os.listdir(Path(folder).parent) if name.endswith(".part")] == []


def test_other_vectors_are_refused_and_recorded(monkeypatch):
    model = of_words(VSEPlusPlus, word_pool="max")
    trace = text_tower_export.TracedTextEncoder.forward
    shift = torch.nn.functional.one_hot(torch.tensor(0), 12).float()

    def forward(self, *tokens):
        return torch.nn.functional.normalize(trace(self, *tokens) + 0.02 * shift)

    with monkeypatch.context() as patch:
        patch.setattr(text_tower_export.TracedTextEncoder, "forward", forward)
        with pytest.raises(VisavisError, match=r"VSE\+\+: expected a text tower .* a cosine of 0"):
            text_tower(model)
    # Not tried again with the same versions.
    with pytest.raises(VisavisError, match="a cosine of 0"):
        text_tower(model)
    monkeypatch.setattr(text_tower_export, "_versions", lambda: {"torch": "99"})
    TextTower.open(text_tower(model))


def test_failing_disk_at_export_is_not_recorded_as_refusal(tmp_path, monkeypatch):
    """ONNX Runtime reports it as it reports a graph that it cannot run."""
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path))
    model = of_words(VSEPlusPlus, word_pool="max")

    def fail(*_):
        raise RuntimeError("Protobuf serialization failed")

    with monkeypatch.context() as patch:
        patch.setattr(text_tower_export, "_save_optimized", fail)
        with pytest.raises(VisavisError, match="Protobuf serialization failed"):
            text_tower(model)
    TextTower.open(text_tower(model))
    storage.remove_folder(text_tower(model))
    monkeypatch.setattr(text_tower_export, "_save_optimized", fail)
    for _ in range(2):
        with pytest.raises(VisavisError, match="Protobuf serialization failed"):
            text_tower(model)
    # It was repeated, and is not tried again.
    monkeypatch.setattr(text_tower_export, "write_text_tower", None)
    with pytest.raises(VisavisError, match="Protobuf serialization failed"):
        text_tower(model)


def test_index_has_towers_of_its_query_models(tmp_path):
    first, second = of_words(VSEPlusPlus), of_words(Heads, num_filters=4)
    for model in (first, second, first):
        add_text_tower(tmp_path, model, NoProgress())
    folders = [tower_folder(tmp_path, model.fingerprint) for model in (first, second)]
    for folder, model in zip(folders, (first, second), strict=True):
        assert TextTower.open(folder).fingerprint == model.fingerprint
    assert os.path.samefile(folders[0] / WEIGHTS_FILE, text_tower(first) / WEIGHTS_FILE)
    remove_text_towers(tmp_path, [second.fingerprint])
    assert os.listdir(folders[0].parent) == [second.fingerprint]
    # The cache keeps it.
    TextTower.open(text_tower(first))
