"""X-VLM's published checkpoint: every weight under its published name arrives where it is read, and nothing else is accepted."""

import json
import pickle
import re
import tomllib
import warnings

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.data import open_dataset
from visavis.data.scenes import write_scenes
from visavis.errors import DataError, RunError
from visavis.evaluation import rank_scores
from visavis.models.foreign import open_model

WIDTH, WINDOW, SIDE, WORDS = 8, 2, 16, 14  # two stages of two blocks and of one; pictures of 16 x 16, patches of 2
BERT = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 12}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "green", "circle", "square", "star", "large", "small"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    transformers.BertConfig(**BERT, vocab_size=WORDS, architectures=["BertModel"]).save_pretrained(folder)
    return folder


def published(*, bert="", mask=True):
    """The names and shapes of the released models: Swin, then BERT with cross-attention in its last layers, then the heads."""
    shapes = {"vision_encoder.patch_embed.proj.weight": (WIDTH, 3, 2, 2), "vision_encoder.patch_embed.proj.bias": (WIDTH,)}

    def module(name, *sizes):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = sizes, sizes[:1]

    module("vision_encoder.patch_embed.norm", WIDTH)
    for stage, depth in enumerate((2, 1)):
        width = WIDTH * 2**stage
        for block in range(depth):
            name = f"vision_encoder.layers.{stage}.blocks.{block}"
            module(f"{name}.norm1", width)
            shapes[f"{name}.attn.relative_position_bias_table"] = ((2 * WINDOW - 1) ** 2, 2 * 2**stage)
            shapes[f"{name}.attn.relative_position_index"] = (WINDOW**2, WINDOW**2)
            module(f"{name}.attn.qkv", 3 * width, width)
            module(f"{name}.attn.proj", width, width)
            module(f"{name}.norm2", width)
            module(f"{name}.mlp.fc1", 4 * width, width)
            module(f"{name}.mlp.fc2", width, 4 * width)
    if mask:
        shapes["vision_encoder.layers.0.blocks.1.attn_mask"] = ((SIDE // 2 // WINDOW) ** 2, WINDOW**2, WINDOW**2)
    shapes["vision_encoder.layers.0.downsample.reduction.weight"] = (2 * WIDTH, 4 * WIDTH)
    module("vision_encoder.layers.0.downsample.norm", 4 * WIDTH)
    module("vision_encoder.norm", 2 * WIDTH)
    text = f"text_encoder.{bert}"
    shapes[f"{text}embeddings.position_ids"] = (1, 12)
    for name, rows in (("word", WORDS), ("position", 12), ("token_type", 2)):
        shapes[f"{text}embeddings.{name}_embeddings.weight"] = (rows, 8)
    module(f"{text}embeddings.LayerNorm", 8)
    for layer in range(3):
        name = f"{text}encoder.layer.{layer}"
        for attention, seen in (("attention", 8), ("crossattention", 2 * WIDTH))[: 1 + (layer > 0)]:
            module(f"{name}.{attention}.self.query", 8, 8)
            module(f"{name}.{attention}.self.key", 8, seen)
            module(f"{name}.{attention}.self.value", 8, seen)
            module(f"{name}.{attention}.output.dense", 8, 8)
            module(f"{name}.{attention}.output.LayerNorm", 8)
        module(f"{name}.intermediate.dense", 12, 8)
        module(f"{name}.output.dense", 8, 12)
        module(f"{name}.output.LayerNorm", 8)
    if bert:
        module("text_encoder.cls.predictions.transform.dense", 8, 8)
        module("bbox_head.0", 16, 8)
    module("vision_proj", 6, 2 * WIDTH)
    module("text_proj", 6, 8)
    module("itm_head.0", 16, 8)
    module("itm_head.1", 16)
    module("itm_head.3", 2, 16)
    return {"temp": torch.tensor(0.0625)} | {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_every_weight_arrives(prefix, bert, tmp_path):
    given = published(bert=prefix)
    torch.save({"model": given, "config": {"k_test": 128}} if prefix else given, tmp_path / "xvlm.pth")
    converted = visavis.convert(tmp_path / "xvlm.pth", tmp_path / "out", text=str(bert))
    assert (converted.fusion_layers, converted.width, converted.temperature) == (2, 6, 0.0625)
    visual, text = (open_model(tmp_path / "out" / part) for part in ("visual", "text"))
    rest = load_file(tmp_path / "out" / "fusion.safetensors")
    config = visual.config
    assert (config.depths, config.num_heads, config.window_size, config.image_size, config.patch_size) == ([2, 1], [2, 4], WINDOW, SIDE, 2)
    weights = [*visual.state_dict().values(), *text.state_dict().values(), *rest.values()]
    arrived = sorted(round(part.double().sum().item(), 4) for part in weights if part.is_floating_point())
    cut = [part for name, tensor in given.items() for part in (tensor.chunk(3) if ".qkv." in name else [tensor]) if not left_out(name)]
    assert arrived == sorted(round(part.double().sum().item(), 4) for part in cut)
    assert torch.equal(
        rest["fusion.layer.1.crossattention.self.key.weight"], given[f"text_encoder.{prefix}encoder.layer.2.crossattention.self.key.weight"]
    )
    assert torch.equal(text.encoder.layer[2].output.dense.weight, given[f"text_encoder.{prefix}encoder.layer.2.output.dense.weight"])
    assert torch.equal(rest["match.3.bias"], given["itm_head.3.bias"])
    blocks = load_file(tmp_path / "out" / "visual" / "model.safetensors")
    key = given["vision_encoder.layers.0.blocks.1.attn.qkv.weight"][WIDTH : 2 * WIDTH]
    assert torch.equal(blocks["encoder.layers.0.blocks.1.attention.self.key.weight"], key)
    assert visual(torch.zeros(1, 3, SIDE, SIDE)).last_hidden_state.shape == (1, 16, 2 * WIDTH)


def test_the_command_says_what_a_recipe_says(bert, tmp_path):
    torch.save(published(), tmp_path / "xvlm.pth")
    command = ["convert", str(tmp_path / "xvlm.pth"), "--text", str(bert), "--out"]
    said = CliRunner().invoke(app, [*command, str(tmp_path / "one")]).stdout
    sections = tomllib.loads(said.partition("recipe says")[2])
    assert sections["visual"] == {"tower": str(tmp_path / "one" / "visual"), "view": "pixels"}
    assert sections["model"]["pretrained"] == str(tmp_path / "one" / "fusion.safetensors")
    assert json.loads(CliRunner().invoke(app, [*command, str(tmp_path / "two"), "--json"]).stdout)["model"]["fusion_layers"] == 2


def test_a_converted_model_is_evaluated_and_searched_as_it_is(bert, tmp_path):
    torch.save(published(), tmp_path / "xvlm.pth")
    visavis.convert(tmp_path / "xvlm.pth", tmp_path / "out", text=str(bert))
    scenes = write_scenes(tmp_path / "scenes", num_train=4, num_val=4, num_test=6, captions_per_image=2, size=32)
    result = visavis.evaluate(tmp_path / "out", data=scenes)
    test = open_dataset(scenes).split("test")
    model = visavis.load(tmp_path / "out")
    scores = model.score([image.open() for image in test.images], test.captions)
    expected = rank_scores(scores.float(), torch.arange(6), torch.from_numpy(test.image_of))
    assert result.metrics["t2i_meanr"] == expected.metrics["t2i_meanr"]
    assert len(visavis.search(tmp_path / "out", "a red circle", inside=scenes, top=3)) == 3
    with pytest.raises(RunError, match="was not trained here and brings no data: name a data set with --data"):
        visavis.evaluate(tmp_path / "out")


def left_out(name):
    return re.search(r"relative_position_index|attn_mask|position_ids|\.cls\.|bbox_head|^temp", name)


def test_windows_grow_with_pictures(bert, tmp_path):
    torch.save(published(), tmp_path / "xvlm.pth")
    visavis.convert(tmp_path / "xvlm.pth", tmp_path / "out", text=str(bert), image_size=2 * SIDE)
    config = open_model(tmp_path / "out" / "visual").config
    assert (config.image_size, config.window_size) == (2 * SIDE, 2 * WINDOW)
    with pytest.raises(DataError, match="has windows of 2 for pictures of 16 pixels, which do not grow evenly to image_size = 20"):
        visavis.convert(tmp_path / "xvlm.pth", tmp_path / "odd", text=str(bert), image_size=20)
    torch.save(published(mask=False), tmp_path / "bare.pth")
    with pytest.raises(DataError, match="does not say for which size of pictures it was trained: give image_size"):
        visavis.convert(tmp_path / "bare.pth", tmp_path / "odd", text=str(bert))
    assert not (tmp_path / "odd").exists()


class Trap:
    """What an unpickled file could do."""

    def __reduce__(self):
        return (pytest.fail, ("code of a checkpoint was run",))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda given: given.pop("itm_head.0.bias"), "lacks the weights itm_head.0.bias: expected"),
        (lambda given: given.update(extra=torch.ones(1)), "holds, beyond what is known, the weights extra: expected"),
        (lambda given: given["text_proj.bias"].fill_(torch.nan), "its weights text_proj.bias hold values that are not finite"),
        (lambda given: given.update({"itm_head.0.bias": Trap()}), "is no checkpoint of tensors and plain values, which alone are read"),
        (lambda given: given.update(step=7), "holds no weights by name"),
        (
            lambda given: given.update({"text_encoder.embeddings.word_embeddings.weight": torch.ones(20, 8)}),
            "has 20 words of width 8 and 3 layers of text, but .* has 14 of width 8 and 3: name the text model that it was made from",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(change, sentence, bert, tmp_path):
    given = published()
    change(given)
    torch.save(given, tmp_path / "xvlm.pth", pickle_module=pickle)
    with pytest.raises(DataError, match=sentence):
        visavis.convert(tmp_path / "xvlm.pth", tmp_path / "out", text=str(bert))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_looked_at_before_its_text_encoder(bert, tmp_path):
    def said(file, sentence):
        with pytest.raises(DataError, match=sentence):
            visavis.convert(file, tmp_path / "out", text=str(tmp_path / "nowhere"))

    said(tmp_path / "none.pth", r"none\.pth")
    torch.save({"fc.weight": torch.ones(2, 2)}, tmp_path / "other.pth")
    said(tmp_path / "other.pth", r"other\.pth lacks the weights .*: expected an X-VLM of Swin and BERT")
    torch.save({0: torch.ones(2, 2)}, tmp_path / "numbered.pth")
    said(tmp_path / "numbered.pth", "holds no weights by name")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pth")  # torch warns of it when it is read
    said(tmp_path / "script.pth", "is no checkpoint of tensors and plain values")
    torch.save(published(), tmp_path / "xvlm.pth")
    named = r"xvlm\.pth reads texts by the config and tokenizer of the BERT .*, which it does not hold: name it as text; "
    said(tmp_path / "xvlm.pth", named + ".*nowhere is no folder")
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "config.json").write_text((bert / "config.json").read_text())
    said(tmp_path / "xvlm.pth", named + ".*nowhere has no working tokenizer")


def test_a_bert_of_fewer_layers_is_not_the_one_it_was_made_from(bert, tmp_path):
    torch.save({name: part for name, part in published().items() if ".layer.2." not in name}, tmp_path / "xvlm.pth")
    with pytest.raises(DataError, match=r"and 2 layers of text, but .* and 3: name the text model that it was made from"):
        visavis.convert(tmp_path / "xvlm.pth", tmp_path / "out", text=str(bert))


def test_what_is_no_archive_is_one_sentence(bert, tmp_path):
    (tmp_path / "xvlm.pth").write_bytes(b"no archive")
    with pytest.raises(DataError, match="is no checkpoint of tensors"):
        visavis.convert(tmp_path / "xvlm.pth", tmp_path / "out", text=str(bert))
