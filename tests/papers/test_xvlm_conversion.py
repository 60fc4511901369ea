"""Conversion of X-VLM checkpoints: every published weight is converted, and other content is
rejected.
"""

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
from visavis.core.errors import DataError, RunError
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation import rank_scores
from visavis.models.encoders.pretrained_loading import load_pretrained_model

WIDTH, WINDOW, SIDE, WORDS = (
    8,
    2,
    16,
    14,
)  # two stages of two blocks and one block, images of 16 x 16, patches of 2
BERT = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 12,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "a",
        "red",
        "blue",
        "green",
        "circle",
        "square",
        "star",
        "large",
        "small",
    ]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    transformers.BertConfig(**BERT, vocab_size=WORDS, architectures=["BertModel"]).save_pretrained(
        folder
    )
    return folder


def published(*, bert="", mask=True):
    """Sample weights with names and shapes as released: Swin, BERT with cross-attention in its last
    layers, and heads.
    """
    shapes = {
        "vision_encoder.patch_embed.proj.weight": (WIDTH, 3, 2, 2),
        "vision_encoder.patch_embed.proj.bias": (WIDTH,),
    }

    def module(name, *sizes):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = sizes, sizes[:1]

    module("vision_encoder.patch_embed.norm", WIDTH)
    for stage, depth in enumerate((2, 1)):
        width = WIDTH * 2**stage
        for block in range(depth):
            name = f"vision_encoder.layers.{stage}.blocks.{block}"
            module(f"{name}.norm1", width)
            shapes[f"{name}.attn.relative_position_bias_table"] = (
                (2 * WINDOW - 1) ** 2,
                2 * 2**stage,
            )
            shapes[f"{name}.attn.relative_position_index"] = (WINDOW**2, WINDOW**2)
            module(f"{name}.attn.qkv", 3 * width, width)
            module(f"{name}.attn.proj", width, width)
            module(f"{name}.norm2", width)
            module(f"{name}.mlp.fc1", 4 * width, width)
            module(f"{name}.mlp.fc2", width, 4 * width)
    if mask:
        shapes["vision_encoder.layers.0.blocks.1.attn_mask"] = (
            (SIDE // 2 // WINDOW) ** 2,
            WINDOW**2,
            WINDOW**2,
        )
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
    return {"temp": torch.tensor(0.0625)} | {
        name: torch.randn(shape) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_convert_xvlm_maps_every_weight(prefix, bert, tmp_path):
    given = published(bert=prefix)
    torch.save(
        {"model": given, "config": {"k_test": 128}} if prefix else given, tmp_path / "xvlm.pth"
    )
    converted = visavis.papers_convert(
        tmp_path / "xvlm.pth", tmp_path / "out", text_encoder=str(bert)
    )
    model = converted.to_recipe_sections()["model"]
    assert (model["fusion_layers"], model["embedding_dim"], model["temperature"]) == (2, 6, 0.0625)
    visual, text = (load_pretrained_model(tmp_path / "out" / part) for part in ("visual", "text"))
    rest = load_file(tmp_path / "out" / "fusion.safetensors")
    config = visual.config
    assert (
        config.depths,
        config.num_heads,
        config.window_size,
        config.image_size,
        config.patch_size,
    ) == ([2, 1], [2, 4], WINDOW, SIDE, 2)
    weights = [*visual.state_dict().values(), *text.state_dict().values(), *rest.values()]
    arrived = sorted(
        round(part.double().sum().item(), 4) for part in weights if part.is_floating_point()
    )
    cut = [
        part
        for name, tensor in given.items()
        for part in (tensor.chunk(3) if ".qkv." in name else [tensor])
        if not left_out(name)
    ]
    assert arrived == sorted(round(part.double().sum().item(), 4) for part in cut)
    assert torch.equal(
        rest["fusion.layer.1.crossattention.self.key.weight"],
        given[f"text_encoder.{prefix}encoder.layer.2.crossattention.self.key.weight"],
    )
    assert torch.equal(
        text.encoder.layer[2].output.dense.weight,
        given[f"text_encoder.{prefix}encoder.layer.2.output.dense.weight"],
    )
    assert torch.equal(rest["match.3.bias"], given["itm_head.3.bias"])
    blocks = load_file(tmp_path / "out" / "visual" / "model.safetensors")
    key = given["vision_encoder.layers.0.blocks.1.attn.qkv.weight"][WIDTH : 2 * WIDTH]
    assert torch.equal(blocks["encoder.layers.0.blocks.1.attention.self.key.weight"], key)
    assert visual(torch.zeros(1, 3, SIDE, SIDE)).last_hidden_state.shape == (1, 16, 2 * WIDTH)


def test_convert_command_prints_recipe(bert, tmp_path):
    torch.save(published(), tmp_path / "xvlm.pth")
    command = [
        "papers",
        "convert",
        str(tmp_path / "xvlm.pth"),
        "--text-encoder",
        str(bert),
        "--out",
    ]
    output = CliRunner().invoke(app, [*command, str(tmp_path / "one")]).stdout
    sections = tomllib.loads(output[output.index("[visual]") :])
    assert sections["visual"] == {
        "encoder": str(tmp_path / "one" / "visual"),
        "granularity": "pixels",
    }
    assert sections["model"]["pretrained"] == str(tmp_path / "one" / "fusion.safetensors")
    assert (
        json.loads(CliRunner().invoke(app, [*command, str(tmp_path / "two"), "--json"]).stdout)[
            "model"
        ]["fusion_layers"]
        == 2
    )


def test_converted_xvlm_evaluates_and_searches(bert, tmp_path):
    torch.save(published(), tmp_path / "xvlm.pth")
    visavis.papers_convert(tmp_path / "xvlm.pth", tmp_path / "out", text_encoder=str(bert))
    scenes = write_synthetic_scenes(
        tmp_path / "scenes", num_train=4, num_val=4, num_test=6, captions_per_image=2, size=32
    )
    result = visavis.evaluate(tmp_path / "out", data=scenes)
    test = open_dataset(scenes).split("test")
    model = visavis.load(tmp_path / "out")
    scores = model.score([image.open() for image in test.images], test.captions)
    expected = rank_scores(scores.float(), torch.arange(6), torch.from_numpy(test.image_of))
    assert result.metrics["t2i_meanr"] == expected.metrics["t2i_meanr"]
    assert len(visavis.search(tmp_path / "out", "a red circle", collection=scenes, top=3)) == 3
    with pytest.raises(RunError, match=r"expected a data set, but .* Name one with --data"):
        visavis.evaluate(tmp_path / "out")


def left_out(name):
    return re.search(
        r"relative_position_index|attn_mask|position_ids|\.cls\.|bbox_head|^temp", name
    )


def test_convert_xvlm_scales_windows_with_image_size(bert, tmp_path):
    torch.save(published(), tmp_path / "xvlm.pth")
    visavis.papers_convert(
        tmp_path / "xvlm.pth", tmp_path / "out", text_encoder=str(bert), image_size=2 * SIDE
    )
    config = load_pretrained_model(tmp_path / "out" / "visual").config
    assert (config.image_size, config.window_size) == (2 * SIDE, 2 * WINDOW)
    with pytest.raises(DataError, match="scales windows of 2 for 16 pixels to an integer, got 20"):
        visavis.papers_convert(
            tmp_path / "xvlm.pth", tmp_path / "odd", text_encoder=str(bert), image_size=20
        )
    torch.save(published(mask=False), tmp_path / "bare.pth")
    with pytest.raises(DataError, match="expected the image size of its training"):
        visavis.papers_convert(tmp_path / "bare.pth", tmp_path / "odd", text_encoder=str(bert))
    assert not (tmp_path / "odd").exists()


class Trap:
    """Code that an unpickled file would run."""

    def __reduce__(self):
        return (pytest.fail, ("code of a checkpoint was run",))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda given: given.pop("itm_head.0.bias"), r"got missing weights itm_head\.0\.bias\."),
        (lambda given: given.update(extra=torch.ones(1)), r"got unknown weights extra\."),
        (lambda given: given["text_proj.bias"].fill_(torch.nan), r"expected finite weights, got NaN or infinity in text_proj\.bias"),
        (lambda given: given.update({"itm_head.0.bias": Trap()}), "expected a checkpoint of tensors and plain values"),
        (lambda given: given.update(step=7), "expected the state_dict of a model"),
        (
            lambda given: given.update({"text_encoder.embeddings.word_embeddings.weight": torch.ones(20, 8)}),
            "expected 14 words of 8 dimensions and 3 text layers .*, got 20 of 8 and 3",
        ),
    ],
)  # fmt: skip
def test_convert_xvlm_reports_invalid_checkpoint(change, sentence, bert, tmp_path):
    given = published()
    change(given)
    torch.save(given, tmp_path / "xvlm.pth", pickle_module=pickle)
    with pytest.raises(DataError, match=sentence):
        visavis.papers_convert(tmp_path / "xvlm.pth", tmp_path / "out", text_encoder=str(bert))
    assert not (tmp_path / "out").exists()


def test_convert_xvlm_checks_checkpoint_before_text_encoder(bert, tmp_path):
    def check(file, message):
        with pytest.raises(DataError, match=message):
            visavis.papers_convert(file, tmp_path / "out", text_encoder=str(tmp_path / "nowhere"))

    check(tmp_path / "none.pth", r"none\.pth")
    torch.save({"fc.weight": torch.ones(2, 2)}, tmp_path / "other.pth")
    check(
        tmp_path / "other.pth",
        r"other\.pth: expected an X-VLM of Swin and BERT, got missing weights",
    )
    torch.save({0: torch.ones(2, 2)}, tmp_path / "numbered.pth")
    check(tmp_path / "numbered.pth", "expected the state_dict of a model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(
            tmp_path / "script.pth"
        )  # torch warns of it when it is read
    check(tmp_path / "script.pth", "got a TorchScript archive, which holds code")
    torch.save(published(), tmp_path / "xvlm.pth")
    named = r"xvlm\.pth needs the config and tokenizer of the BERT .*, which it does not contain\. "
    check(tmp_path / "xvlm.pth", named + ".*nowhere: expected a folder")
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "config.json").write_text((bert / "config.json").read_text())
    check(tmp_path / "xvlm.pth", named + ".*nowhere: expected a working tokenizer")


def test_convert_xvlm_rejects_bert_with_fewer_layers(bert, tmp_path):
    torch.save(
        {name: part for name, part in published().items() if ".layer.2." not in name},
        tmp_path / "xvlm.pth",
    )
    with pytest.raises(DataError, match=r"and 3 text layers .* and 2\. Pass the text model"):
        visavis.papers_convert(tmp_path / "xvlm.pth", tmp_path / "out", text_encoder=str(bert))


def test_read_checkpoint_rejects_other_files(bert, tmp_path):
    (tmp_path / "xvlm.pth").write_bytes(b"no archive")
    with pytest.raises(DataError, match="expected a checkpoint of tensors"):
        visavis.papers_convert(tmp_path / "xvlm.pth", tmp_path / "out", text_encoder=str(bert))
