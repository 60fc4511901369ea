"""Hostile inputs of ``papers convert`` and ``data convert``: each is converted or refused with one error,
within seconds.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import visavis
from visavis.core.errors import DataError, VisavisError
from visavis.models.encoders.checkpoint_files import read_checkpoint

from ..papers.test_xvlm_conversion import bert, published  # noqa: F401
from .test_clip_conversion import CONFIG, Plain, donor, write_config  # noqa: F401 - fixtures

# Of processor time, because other processes may delay a test.
SLOWEST_S = 10.0
SURROGATE, NUL = "a\ud800", "a\0b"
VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    10**9,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x",
    SURROGATE,
    NUL,
    [],
    {},
    [[]],
    {"a": [1]},
    [1] * 100,
]
PATHS = ["~nosuchuser/a", NUL, SURROGATE, "", "/dev/null", "/proc/self/mem", "a" * 300, "nowhere"]
TENSORS = {
    "sparse": lambda t: t.to_sparse(),
    "compressed sparse": lambda t: torch.ones(2, 2).to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "meta": lambda t: t.to("meta"),
    "expanded": lambda t: torch.zeros(1).expand(10**11),
    "expanded to its shape": lambda t: torch.zeros(1).expand(t.shape),
    "complex": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "scalar": lambda t: torch.ones(()),
    "empty": lambda t: torch.ones(0),
    "one row": lambda t: torch.ones(1),
    "more dimensions": lambda t: t[None],
    "other shape": lambda t: torch.ones(3, 5),
    "nan": lambda t: torch.full_like(t, torch.nan, dtype=torch.float32),
    "bool": lambda t: t > 0,
    "transposed": lambda t: t.transpose(0, -1) if t.ndim else t,
    "large": lambda t: t.double() * 1e300,
}
NAMES = [
    "text_encoder.encoder.layer.1000000000.output.dense.bias",
    f"text_encoder.encoder.layer.{'9' * 5000}.output.dense.bias",
    "vision_encoder.layers.1000000000.blocks.1000000000.norm1.bias",
    "vision_encoder.layers.7.blocks.99.norm1.bias",
    "transformer.resblocks.1000000000.ln_1.weight",
    "visual.conv1.weight",
    NUL,
    SURROGATE,
    "",
]


def nested_key(depth: int) -> bytes:
    """A pickle of a dict whose key takes 2^depth steps to hash."""
    tuples = b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(depth)
    )
    return b"\x80\x02}K\x01q\x00" + tuples + b"K\x01s."


def archive(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Write a checkpoint of ``torch.save`` with another pickle in it."""
    plain = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", compression) as target:
        for member in source.infolist():
            target.writestr(
                member.filename,
                pickled if member.filename.endswith("data.pkl") else source.read(member),
            )


def flip(content: bytes, rng: random.Random) -> bytes:
    kind, place = rng.randrange(4), rng.randrange(len(content))
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + rng.randbytes(rng.randrange(1, 9)) + content[place:]
    if kind == 2:
        return content[:place] + content[place + rng.randrange(1, 65) :]
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def change_json(value: dict, rng: random.Random) -> dict:
    """Replace, remove or add one value at any depth."""
    value = json.loads(json.dumps(value))
    parts = [value, *(part for part in value.values() if isinstance(part, dict))]
    part = rng.choice(parts)
    key = rng.choice([*part, "custom", NUL])
    if rng.random() < 0.2:
        part.pop(key, None)
    else:
        part[key] = rng.choice(VALUES)
    return value


def hostile_checkpoint(rng: random.Random, folder: Path, text: str, words: tuple) -> dict:
    """Write a hostile checkpoint. Return the arguments of its conversion."""
    path, arguments = folder / "weights.pt", {"out": folder / "out", "text_encoder": text}
    kind = rng.choice(
        ["tensor", "tensor", "tensor", "name", "config", "bytes", "pickle", "argument", "several"]
    )
    clip = rng.random() < 0.5
    tensors = dict(Plain(words[1]).state_dict()) if clip else published(mask=rng.random() < 0.7)
    config = json.loads(json.dumps(CONFIG)) | {
        "text_cfg": CONFIG["text_cfg"] | {"vocab_size": words[1]}
    }
    if clip:
        arguments["text_encoder"] = str(words[0])
    for name in rng.sample(
        sorted(tensors), rng.randint(2, 9) if kind == "several" else kind == "tensor"
    ):
        tensors[name] = TENSORS[rng.choice(sorted(TENSORS))](tensors[name])
    if kind == "name":
        tensors[rng.choice(NAMES)] = tensors[rng.choice(sorted(tensors))]
    if kind == "config":
        config = change_json(config, rng)
    torch.save(tensors, path, _use_new_zipfile_serialization=rng.random() < 0.7)
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    if kind == "bytes":
        path.write_bytes(flip(path.read_bytes(), rng))
    if kind == "pickle":
        size = rng.choice([10, 2**20, 2**26])
        pickled = rng.choice(
            [
                nested_key(80),
                b"\x80\x02" + b"N" * size + b".",
                b"\x80\x02" + b"]" * size + b".",
                b"\x80\x02(" + b"N0" * size,
            ]
        )
        rng.choice([
            lambda: archive(path, pickled),
            lambda: archive(path, pickled, zipfile.ZIP_DEFLATED),
            lambda: path.write_bytes(pickled),
        ])()  # fmt: skip
    if kind == "argument":
        name = rng.choice(["out", "text_encoder", "config", "image_size", "checkpoint"])
        arguments[name] = rng.choice(
            [0, -1, 1, 7, 10**9, 10**30] if name == "image_size" else PATHS
        )
    return {"checkpoint": path} | arguments


def hostile_features(rng: random.Random, folder: Path) -> list:
    """Write hostile sources of video features."""
    import h5py

    kind = rng.choice(["values", "bytes", "pickle", "h5", "list", "json", "path", "key"])
    file = folder / {"h5": "video.h5", "list": "train_list.txt", "json": "captions.json"}.get(
        kind, "expert.pkl"
    )
    table = {f"video{i}": np.ones((2, 3), np.float32) for i in range(4)}
    odd = [
        *VALUES,
        np.ones(()),
        np.ones((2, 0)),
        np.ones((1, 2, 3)),
        np.array(["a"]),
        np.ones((2, 3), np.int8),
        np.full((2, 3), np.inf),
    ]
    if kind == "values":
        table[rng.choice([*table, "other"])] = rng.choice(odd)
    if kind == "key":
        table[rng.choice([NUL, SURROGATE, "", 7, b"\xff", "a/../../b", "video0.mp4"])] = np.ones(
            (2, 3), np.float32
        )
    try:
        file.write_bytes(pickle.dumps(table, protocol=rng.randrange(2, 5)))
    except UnicodeEncodeError:
        file.write_bytes(pickle.dumps({"a": 7}))
    if kind == "bytes":
        file.write_bytes(flip(file.read_bytes(), rng))
    if kind == "pickle":
        size = rng.choice([10, 2**20])
        file.write_bytes(
            rng.choice(
                [
                    nested_key(80),
                    b"\x80\x02" + b"N" * size + b".",
                    b"\x80\x02" + b"]" * size + b".",
                    b"\x80\x02(" * (size // 4),
                ]
            )
        )
    if kind == "h5":
        with h5py.File(file, "w") as video:
            shape = rng.choice([(2, 3), (0, 3), (), (3,), (1, 2, 3), (10**9, 1000)])
            video.create_dataset(
                "features.audio",
                shape,
                rng.choice(["f4", "i8", "c8", "S3"]),
                **({"chunks": True} if shape and 0 not in shape else {}),
            )
            text = rng.choice([[b"a", b"dog"], b"\xff", b"", 7.0, [[b"a"]]])
            video[
                rng.choice(
                    [
                        "raw_captions.0",
                        "raw_captions.9999999999",
                        "raw_captions.x",
                        "raw_captions.\u00b2",
                    ]
                )
            ] = text
        if rng.random() < 0.5:
            file.write_bytes(flip(file.read_bytes(), rng))
    if kind == "list":
        file.write_bytes(
            rng.choice(
                [
                    b"",
                    b"video0\n" * 3,
                    b"\xff\xfe\n",
                    b"\0\n",
                    b"video0\nvideo0.mp4\n",
                    b"a" * 10**7,
                ]
            )
        )
    if kind == "json":
        videos = [
            {"video_id": "a", "split": "train"},
            {"video_id": rng.choice(VALUES), "split": rng.choice(VALUES)},
        ]
        sentences = [
            {"video_id": rng.choice(["a", *VALUES]), "caption": rng.choice(["a dog", *VALUES])}
        ]
        file.write_text(
            json.dumps(rng.choice([{"videos": videos, "sentences": sentences}, rng.choice(VALUES)]))
        )
    sources = [file] if kind != "path" else [rng.choice([*PATHS, f"{rng.choice(PATHS)}={file}"])]
    return sources + [folder / "expert.pkl"] * (kind in ("list", "json"))


def attempt(case: int, folder: Path, text: str, words: tuple) -> None:
    rng = random.Random(case)
    torch.manual_seed(case)
    folder.mkdir()
    if case % 2:
        arguments = hostile_checkpoint(rng, folder, text, words)
        call = lambda: visavis.papers_convert(**arguments)  # noqa: E731
    else:
        arguments = hostile_features(rng, folder)
        call = lambda: visavis.data_convert(arguments, out=folder / "out")  # noqa: E731
    start = time.process_time()
    try:
        call()
    except VisavisError as error:
        str(error).encode()
        assert not (folder / "out").exists(), f"case {case}"
    except Exception as error:
        raise AssertionError(f"case {case}: {str(arguments)[:300]}") from error
    assert time.process_time() - start < SLOWEST_S, f"case {case}: {str(arguments)[:300]}"


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize(
    "cases", [range(40), pytest.param(range(40, 440), marks=pytest.mark.long)], ids=["40", "400"]
)
@pytest.mark.slow
def test_hostile_inputs_are_refused_in_time(cases, bert, donor, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    torch.save(published(), tmp_path / "valid.pt")
    visavis.papers_convert(tmp_path / "valid.pt", tmp_path / "valid", text_encoder=str(bert))
    for case in cases:
        attempt(case, tmp_path / str(case), str(bert), donor)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", TENSORS)
def test_checkpoint_accepts_only_plain_tensors(kind, tmp_path):
    refused = (
        "sparse",
        "compressed sparse",
        "quantized",
        "meta",
        "expanded",
        "expanded to its shape",
        "complex",
        "float8",
    )
    torch.save({"a": torch.zeros(2, 3), "b": TENSORS[kind](torch.randn(2, 3))}, tmp_path / "a.pt")
    if kind in refused:
        with pytest.raises(
            DataError,
            match=r"expected dense weights of real numbers, got 'b'|expected a checkpoint of tensors",
        ):
            read_checkpoint(tmp_path / "a.pt")
    else:
        assert list(read_checkpoint(tmp_path / "a.pt")) == ["a", "b"]


@pytest.mark.parametrize(
    "pickled",
    [nested_key(80), b"\x80\x02(" + b"N0" * 2**25 + b"t."],
    ids=["nested key", "64 MB of opcodes"],
)
@pytest.mark.parametrize(
    "compression",
    [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, None],
    ids=["stored", "compressed", "legacy"],
)
def test_checkpoint_with_slow_pickle_is_refused_quickly(pickled, compression, tmp_path):
    if compression is None:
        (tmp_path / "a.pt").write_bytes(pickled)
    else:
        archive(tmp_path / "a.pt", pickled, compression)
    start = time.process_time()
    with pytest.raises(DataError, match=r"a\.pt"):
        read_checkpoint(tmp_path / "a.pt")
    assert time.process_time() - start < SLOWEST_S


@pytest.mark.parametrize("zipped", [True, False])
def test_checkpoint_of_training_is_read(zipped, tmp_path):
    layer = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    content = {
        "model": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "epoch": 3,
    }
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert torch.equal(read_checkpoint(tmp_path / "a.pt")["weight"], layer.weight)
