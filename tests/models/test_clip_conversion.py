"""Conversion of open_clip checkpoints, compared with a plain model of the same names and formulas."""

import argparse
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import normalize
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core import storage
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, VisavisError
from visavis.models.encoders.checkpoint_files import read_checkpoint
from visavis.training.recipes.files import read_recipe

SIDE, PATCH, WIDTH, WORDS, EMBEDDED, LONGEST = 16, 4, 12, 8, 6, 10
CONFIG = {
    "embed_dim": EMBEDDED,
    "vision_cfg": {
        "image_size": SIDE,
        "layers": 2,
        "width": WIDTH,
        "head_width": 4,
        "patch_size": PATCH,
    },
    "text_cfg": {
        "context_length": LONGEST,
        "vocab_size": 0,
        "width": WORDS,
        "heads": 2,
        "layers": 3,
    },
}


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, width, heads, inner, act):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        for name, part in (
            ("c_fc", nn.Linear(width, inner)),
            ("act", act()),
            ("c_proj", nn.Linear(inner, width)),
        ):
            self.mlp.add_module(name, part)

    def forward(self, x, mask=None):
        seen = self.ln_1(x)
        x = x + self.attn(seen, seen, seen, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


def layers(width, heads, inner, number, act):
    transformer = nn.Module()
    transformer.resblocks = nn.ModuleList(Block(width, heads, inner, act) for _ in range(number))
    return transformer


class Plain(nn.Module):
    """CLIP (Radford et al., 2021) with the weight names of its authors and of open_clip."""

    def __init__(self, words, act=nn.GELU):
        super().__init__()
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.visual.class_embedding = nn.Parameter(torch.empty(WIDTH))
        self.visual.positional_embedding = nn.Parameter(
            torch.empty((SIDE // PATCH) ** 2 + 1, WIDTH)
        )
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.visual.transformer = layers(WIDTH, 3, 20, 2, act)
        self.visual.proj = nn.Parameter(torch.empty(WIDTH, EMBEDDED))
        self.token_embedding = nn.Embedding(words, WORDS)
        self.positional_embedding = nn.Parameter(torch.empty(LONGEST, WORDS))
        self.transformer, self.ln_final = layers(WORDS, 2, 32, 3, act), nn.LayerNorm(WORDS)
        self.text_projection, self.logit_scale = (
            nn.Parameter(torch.empty(WORDS, EMBEDDED)),
            nn.Parameter(torch.empty(())),
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def images(self, pixels):
        own = self.visual
        x = own.conv1(pixels).flatten(2).transpose(1, 2)
        x = own.ln_pre(
            torch.cat([own.class_embedding.expand(len(x), 1, -1), x], 1) + own.positional_embedding
        )
        for block in own.transformer.resblocks:
            x = block(x)
        return own.ln_post(x[:, 0]) @ own.proj

    def texts(self, ids, end):
        x = self.token_embedding(ids) + self.positional_embedding[: ids.shape[1]]
        for block in self.transformer.resblocks:
            x = block(x, torch.full((ids.shape[1],) * 2, float("-inf")).triu(1))
        return (
            self.ln_final(x[torch.arange(len(x)), (ids == end).long().argmax(1)])
            @ self.text_projection
        )


@pytest.fixture(scope="module")
def donor(tmp_path_factory):
    """Write a folder with a tokenizer of CLIP whose vocabulary is letters."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = [f"{letter}{end}" for end in ("", "</w>") for letter in "abcdefghijklmnopqrstuvwxyz"]
    words = [*letters, "re", "red</w>", "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(
        json.dumps({word: number for number, word in enumerate(words)})
    )
    (folder / "merges.txt").write_text("#version: 0.2\nr e\nre d</w>\n")
    transformers.CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt")
    ).save_pretrained(folder)
    transformers.CLIPTextConfig(vocab_size=len(words)).save_pretrained(folder)
    return folder, len(words)


@pytest.fixture
def checkpoint(donor, tmp_path):
    """Write the file of an open_clip training with its configuration, and return it with the plain
    model.
    """
    torch.manual_seed(0)
    plain = Plain(donor[1]).eval()
    torch.save(
        {
            "epoch": 3,
            "name": "mine",
            "state_dict": {f"module.{key}": part for key, part in plain.state_dict().items()},
        },
        tmp_path / "epoch_3.pt",
    )
    write_config(tmp_path / "open_clip_config.json", donor, {})
    return tmp_path / "epoch_3.pt", plain


def write_config(file, donor, changes, prepared=None):
    model = CONFIG | {"text_cfg": CONFIG["text_cfg"] | {"vocab_size": donor[1]}} | changes
    file.write_text(
        json.dumps(
            {
                "model_cfg": model,
                "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.2] * 3} | (prepared or {}),
            }
        )
    )


@torch.no_grad()
def assert_same(folder, plain, texts=("a red circle", "red")):
    model = visavis.load(folder)
    tokens = model.processor.process_texts(list(texts))
    pixels = torch.randn(3, 3, SIDE, SIDE)
    torch.testing.assert_close(
        model.matcher.encode_visual(Encoded(pixels)).vectors, normalize(plain.images(pixels), dim=1)
    )
    expected = plain.texts(tokens.vectors, int(tokens.vectors.max()))
    torch.testing.assert_close(model.encode_texts(list(texts)), normalize(expected, dim=1))
    torch.testing.assert_close(model.matcher.temperature["logit_scale"], plain.logit_scale.detach())
    return model


def test_converted_clip_matches_open_clip(checkpoint, donor, tmp_path):
    file, plain = checkpoint
    converted = visavis.papers_convert(file, tmp_path / "out", text_encoder=str(donor[0]))
    model = assert_same(tmp_path / "out", plain)
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    )
    pixels = (torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255 - 0.5) / 0.2
    torch.testing.assert_close(
        model.encode_images([image]), normalize(plain.images(pixels), dim=1).detach()
    )
    storage.write_toml(tmp_path / "mine.toml", converted.to_recipe_sections())
    assert read_recipe(tmp_path / "mine.toml", {}).visual.encoder == str(tmp_path / "out")


def test_convert_open_clip_supports_quick_gelu_and_wrappers(donor, tmp_path):
    torch.manual_seed(1)
    plain = Plain(donor[1], QuickGELU).eval()
    text = ("transformer", "token_embedding", "positional_embedding", "ln_final", "text_projection")
    tensors = {
        f"text.{key}" if key.startswith(text) else key: part.contiguous()
        for key, part in plain.state_dict().items()
    }
    save_file(
        tensors | {"text.attn_mask": torch.zeros(LONGEST, LONGEST)},
        tmp_path / "open_clip_model.safetensors",
    )
    write_config(
        tmp_path / "mine.json",
        donor,
        {"quick_gelu": True, "custom_text": True},
        {"resize_mode": "squash", "interpolation": "bilinear"},
    )
    command = [
        "papers",
        "convert",
        str(tmp_path / "open_clip_model.safetensors"),
        "--config",
        str(tmp_path / "mine.json"),
        "--text-encoder",
        str(donor[0]),
    ]
    output = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert output.exit_code == 0 and "clip/small-data" in output.stdout
    assert_same(tmp_path / "out", plain)
    images = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert (images["size"], images["do_center_crop"], images["resample"]) == (
        {"height": SIDE, "width": SIDE},
        False,
        2,
    )


def test_convert_open_clip_rejects_other_checkpoints(checkpoint, donor, tmp_path):
    file, plain = checkpoint
    out = tmp_path / "out"

    def refused(sentence, config="", checkpoint=file, **more):
        with pytest.raises(VisavisError, match=sentence):
            visavis.papers_convert(
                checkpoint, out, text_encoder=str(donor[0]), config=config, **more
            )
        assert not out.exists()

    refused("image_size", image_size=32)
    refused("got 'ViT-Z-99', which is not a file. Weights alone do not define", config="ViT-Z-99")
    for changes, sentence in (
        (
            {"vision_cfg": CONFIG["vision_cfg"] | {"timm_model_name": "vit"}},
            r"got vision_cfg\.timm_model_name",
        ),
        ({"text_cfg": None}, "expected a configuration of open_clip with text_cfg, got none"),
        (
            {"vision_cfg": CONFIG["vision_cfg"] | {"layers": 3}},
            (
                r"expected a CLIP of open_clip .*, got missing weights "
                r"visual\.transformer\.resblocks\.2\.\S+, .* and 9 more"
            ),
        ),
        (
            {"vision_cfg": CONFIG["vision_cfg"] | {"layers": 1}},
            r"got unknown weights visual\.transformer\.resblocks\.1",
        ),
        (
            {"vision_cfg": {"layers": 2, "width": WIDTH}},
            (
                r"conv1\.weight of shape \[12, 3, 16, 16\], got \[12, 3, 4, 4\]\. Pass the "
                r"configuration and tokenizer"
            ),
        ),
        (
            {"vision_cfg": CONFIG["vision_cfg"] | {"head_width": 5}},
            r"divisible by 2\.4 heads, got 12",
        ),
        ({"embed_dim": 7}, r"visual\.proj of shape \[12, 7\], got \[12, 6\]"),
    ):
        write_config(tmp_path / "other.json", donor, changes)
        refused(sentence, config=str(tmp_path / "other.json"))
    write_config(tmp_path / "other.json", donor, {}, {"resize_mode": "longest"})
    refused(
        "resize_mode: expected shortest or squash, got 'longest'",
        config=str(tmp_path / "other.json"),
    )
    (tmp_path / "alone").mkdir()
    torch.save(plain.state_dict(), tmp_path / "alone" / "model.pt")
    refused(
        r"no open_clip_config\.json next to .*model\.pt\. Weights alone",
        checkpoint=tmp_path / "alone" / "model.pt",
    )
    small = {
        key: part[:40] if key == "token_embedding.weight" else part
        for key, part in plain.state_dict().items()
    }
    torch.save(small, tmp_path / "small.pt")
    refused(
        r"token_embedding\.weight of shape \[56, 8\], got \[40, 8\]",
        checkpoint=tmp_path / "small.pt",
    )
    torch.save({"vision_proj.weight": torch.zeros(2, 2)}, tmp_path / "other.pt")
    refused(
        "config: expected an open_clip checkpoint",
        checkpoint=tmp_path / "other.pt",
        config="ViT-B-32",
    )


def test_extension_names_the_options_that_do_not_apply(tmp_path):
    with pytest.raises(
        VisavisError,
        match=r"^max_length: expected no other option, got config=c\.json, image_size=32\. Convert .* first",
    ):
        visavis.papers_convert(
            tmp_path / "clip", tmp_path / "long", max_length=99, config="c.json", image_size=32
        )
    with pytest.raises(
        VisavisError,
        match=r"^max_length: expected an integer from 1 to .*, got 0\. Set max_length to a number in this range\.$",
    ):
        visavis.papers_convert(tmp_path / "clip", tmp_path / "long", max_length=0)


WRAPPED = {
    "plain": lambda weights: weights,
    "open_clip": lambda weights: {
        "epoch": 3,
        "state_dict": prefixed("module.", weights),
        "optimizer": {"state": {}, "param_groups": []},
    },
    "compiled": lambda weights: prefixed("_orig_mod.", weights),
    "compiled in DistributedDataParallel": lambda weights: {
        "state_dict": prefixed("module._orig_mod.", weights)
    },
    "compiled inner module": lambda weights: {
        key.replace("visual.", "visual._orig_mod."): part for key, part in weights.items()
    },
    "Lightning": lambda weights: {
        "state_dict": prefixed("model.", weights),
        "loops": {},
        "lr_schedulers": [],
    },
    "Fabric": lambda weights: {"model": prefixed("_forward_module.", weights)},
    "model_state_dict": lambda weights: {"model_state_dict": weights, "loss": 0.5},
    "another key": lambda weights: {"net": weights},
    "OpenAI's numbers as tensors": lambda weights: weights | dict.fromkeys(SIZES, torch.tensor(4)),
    "OpenAI's numbers": lambda weights: {"model": weights | dict.fromkeys(SIZES, 4)},
    "ema": lambda weights: {
        "state_dict": {key: part + 1 for key, part in weights.items()},
        "state_dict_ema": weights,
    },
}
SIZES = ("input_resolution", "context_length", "vocab_size")


def prefixed(prefix, weights):
    return {prefix + key: part for key, part in weights.items()}


@pytest.mark.parametrize("form", WRAPPED)
def test_checkpoint_of_any_wrapper_has_published_names(form, donor, tmp_path):
    weights = dict(Plain(donor[1]).state_dict())
    torch.save(WRAPPED[form](weights), tmp_path / "weights.pt")
    found = read_checkpoint(tmp_path / "weights.pt", "state_dict_ema" if form == "ema" else "")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], part) for key, part in weights.items())


def test_convert_names_the_models_of_a_checkpoint_with_several(checkpoint, donor, tmp_path):
    file, plain = checkpoint
    torch.save(WRAPPED["ema"](dict(plain.state_dict())), file)
    with pytest.raises(
        DataError,
        match=r"got no key for the weights state_dict, state_dict_ema\. Pass --key state_dict, or another one",
    ):
        visavis.papers_convert(file, tmp_path / "out", text_encoder=str(donor[0]))
    visavis.papers_convert(file, tmp_path / "out", text_encoder=str(donor[0]), key="state_dict_ema")
    assert_same(tmp_path / "out", plain)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # people still have such archives
def test_convert_names_the_fix_for_checkpoints_with_code(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "jit.pt"))
    with pytest.raises(
        DataError, match=r"got a TorchScript archive, which holds code.*torch\.jit\.load"
    ):
        read_checkpoint(tmp_path / "jit.pt")
    torch.save(
        {"state_dict": nn.Linear(2, 2).state_dict(), "hparams": argparse.Namespace(a=1)},
        tmp_path / "lightning.ckpt",
    )
    with pytest.raises(
        DataError,
        match=r"got objects of argparse\.Namespace, which could run code\. .* save its state_dict alone",
    ):
        read_checkpoint(tmp_path / "lightning.ckpt")
