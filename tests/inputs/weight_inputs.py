"""Files of tensors, weights and vectors: safetensors, checkpoints and pickles, region features, item
vectors.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import pickletools
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tests.inputs.cases import Case, Kind
from tests.mutation import damaged

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.features.arrays import first_nonfinite_row
from visavis.data.features.expert_store import RegionFeatures
from visavis.data.features.item_vectors import ItemVectors
from visavis.data.safe_pickle import read_plain_pickle
from visavis.models.encoders.checkpoint_files import read_checkpoint


def sampled_tensors(rng: random.Random) -> dict[str, torch.Tensor]:
    """A few weights of several types."""
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    names = ["word.weight", "módulo.é", "a" * 200, "fc.bias", "x"]
    shapes = [(2, 3), (4,), (1, 2, 2), (0, 3), ()]
    types = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    return {
        name: torch.randn(rng.choice(shapes), generator=generator).to(rng.choice(types))
        for name in rng.sample(names, rng.choice([1, 2, 3]))
    }


def check_tensors(expected: dict[str, torch.Tensor], found: Any) -> str:
    """The tensors are exactly these."""
    if set(found) != set(expected):
        return f"expected {sorted(expected)}, got {sorted(found)}"
    for name, tensor in expected.items():
        other = found[name]
        if other.dtype != tensor.dtype or other.shape != tensor.shape or not other.equal(tensor):
            return f"{name} has changed"
    return ""


def as_header(header: Any, content: bytes, length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def wrong_safetensors(rng: random.Random) -> tuple[bytes, str]:
    """A file that breaks a rule of the format."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    content = bytes(8)
    cases: dict[str, Callable[[], bytes]] = {
        "huge header": lambda: as_header({"a": entry}, content, 2**63),
        "header beyond the end": lambda: as_header({"a": entry}, content, 10_000),
        "offsets beyond the end": lambda: as_header(
            {"a": {**entry, "data_offsets": [0, 800]}}, content
        ),
        "offsets swapped": lambda: as_header({"a": {**entry, "data_offsets": [8, 0]}}, content),
        "huge shape": lambda: as_header({"a": {**entry, "shape": [2**40, 2**40]}}, content),
        "shape of another size": lambda: as_header({"a": {**entry, "shape": [3]}}, content),
        "negative shape": lambda: as_header({"a": {**entry, "shape": [-2]}}, content),
        "unknown type": lambda: as_header({"a": {**entry, "dtype": "F31"}}, content),
        "overlap": lambda: as_header({"a": entry, "b": entry}, content),
        "bytes without a tensor": lambda: as_header({"a": entry}, content * 3),
        "no JSON": lambda: as_header(b"{" * 100, content),
        "deep": lambda: as_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", content),
        "duplicate key": lambda: as_header(
            b'{"a": %s, "a": %s}' % ((json.dumps(entry).encode(),) * 2), content
        ),
        "a list": lambda: as_header([1], content),
        "empty": lambda: b"",
        "half a length": lambda: b"\x10\0",
        "not UTF-8": lambda: as_header(b'{"\xff": 1}', content),
    }
    note = rng.choice(list(cases))
    return cases[note](), note


def make_safetensors(rng: random.Random, folder: Path, _: Any) -> Case:
    """Weights in our files, which have a hash, and in files of others."""
    path = folder / "model.safetensors"
    tensors = sampled_tensors(rng)
    way = rng.random()
    if way < 0.2:
        content, note = wrong_safetensors(rng)
        path.write_bytes(content)
        return Case(partial(read_checkpoint, path), "wrong", lambda _: "accepted", note)
    has_hash = rng.random() < 0.6
    if has_hash:
        storage.write_tensors(path, tensors)
    else:
        save_file(tensors, path)
    run = partial(storage.read_tensors, path)
    if way < 0.35:
        return Case(run, "right", partial(check_tensors, tensors), "valid")
    path.write_bytes(damaged(path.read_bytes(), rng))
    # With its hash, a file has the written tensors, or is refused, unless the hash is removed.
    has_hash = has_hash and b"tensors_sha256" in path.read_bytes()
    check: Any = partial(check_tensors, tensors) if has_hash else lambda _: ""
    return Case(run, "unknown", check, "damaged bytes, hash" if has_hash else "damaged bytes")


HARM = os.path.join(tempfile.gettempdir(), "visavis-inputs-harm")


class Harm:
    """An object whose pickle would create a file."""

    def __reduce__(self) -> Any:
        return os.mkdir, (HARM,)


def harmful_pickle(rng: random.Random) -> bytes:
    """A pickle that calls functions, in several spellings."""
    command = f"touch {HARM}".encode()
    return rng.choice(
        [
            pickle.dumps({"a": Harm()}, protocol=rng.randrange(6)),
            b"cos\nsystem\n(S'" + command + b"'\ntR.",
            b'c__builtin__\neval\n(S\'__import__("os").mkdir("' + HARM.encode() + b"\")'\ntR.",
            b"(S'" + command + b"'\nios\nsystem\n.",
            b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
            + bytes([len(command)])
            + command
            + b"\x85R.",
            b"ctorch.serialization\nload\n(S'/etc/passwd'\ntR.",
            b"ccollections\nOrderedDict\n(cos\nsystem\n(S'" + command + b"'\ntRtR.",
            b"cbuiltins\ngetattr\n(cbuiltins\ndict\nS'get'\ntR.",
        ]
    )


def random_pickle(rng: random.Random) -> bytes:
    """A random sequence of instructions."""
    parts = [b"\x80", bytes([rng.randrange(6)])]
    for _ in range(rng.choice([2, 8, 40])):
        opcode = rng.choice(pickletools.opcodes)
        parts.append(opcode.code.encode("latin-1"))
        if opcode.arg is None:
            continue
        size = opcode.arg.n
        if size >= 0:
            parts.append(
                rng.choice([rng.randbytes(size), bytes(size), b"\x01" + bytes(max(0, size - 1))])[
                    :size
                ]
            )
        elif size == pickletools.UP_TO_NEWLINE:
            parts.append(
                rng.choice(
                    [
                        b"1\n",
                        b"a b\n",
                        b"'x'\n",
                        b"os system\n",
                        b"numpy\ndtype\n",
                        b"9" * 5000 + b"\n",
                    ]
                )
            )
        else:
            width = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4}.get(
                size, 8
            )
            length = rng.choice([0, 1, 3, 3, 2 ** (8 * width - 1)])
            parts.append(length.to_bytes(width, "little") + b"abc"[: min(3, length)])
    return b"".join([*parts, b"."])


def without_harm(check: Callable[[Any], str], result: Any) -> str:
    """No function of a pickle was called."""
    if os.path.exists(HARM):
        return "a function in a pickle was called"
    return check(result)


def guarded(run: Callable[[], Any]) -> Any:
    """Run a reader, and check that no function of a pickle was called."""
    try:
        return run()
    finally:
        assert not os.path.exists(HARM), "a function in a pickle was called"


def with_zip_member(
    content: bytes, name: str, change: Callable[[bytes], bytes], kind: int
) -> bytes:
    """A zip file with a changed member, whose checksum is right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", kind) as new:
        for member in old.infolist():
            inside = old.read(member)
            new.writestr(
                member.filename, change(inside) if member.filename.endswith(name) else inside
            )
    return file.getvalue()


def make_checkpoint(rng: random.Random, folder: Path, _: Any) -> Case:
    """A file of ``torch.save``."""
    path = folder / "model.pt"
    tensors = {name: tensor for name, tensor in sampled_tensors(rng).items() if tensor.ndim}
    tensors = tensors or {"x": torch.ones(3)}
    is_zip = rng.random() < 0.6
    content: Any = rng.choice([tensors, {"state_dict": tensors}, {"model": tensors, "epoch": 3}])
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    way = rng.random()
    run = partial(guarded, partial(read_checkpoint, path))
    written = path.read_bytes()
    if way < 0.2:
        return Case(run, "right", partial(check_tensors, tensors), "valid")
    if way < 0.4:
        note = "code"
        if is_zip and rng.random() < 0.7:
            harmful = harmful_pickle(rng)
            path.write_bytes(
                with_zip_member(written, "data.pkl", lambda _: harmful, zipfile.ZIP_STORED)
            )
        else:
            path.write_bytes(harmful_pickle(rng))
        return Case(run, "wrong", lambda _: "code was accepted", note)
    if way < 0.5 and is_zip:
        # Bytes of a tensor change, and their checksum does not.
        with zipfile.ZipFile(path) as archive:
            members = [
                each for each in archive.infolist() if "/data/" in each.filename and each.file_size
            ]
        if members:
            member = rng.choice(members)
            names = struct.unpack(
                "<HH", written[member.header_offset + 26 : member.header_offset + 30]
            )
            start = member.header_offset + 30 + sum(names)
            changed = bytearray(written)
            changed[start + rng.randrange(member.file_size)] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(changed))
            return Case(run, "wrong", lambda _: "a wrong checksum was accepted", "wrong checksum")
    if way < 0.55 and is_zip:
        bomb = with_zip_member(
            written, "data.pkl", lambda inside: inside + bytes(10**8), zipfile.ZIP_DEFLATED
        )
        path.write_bytes(bomb)
        return Case(run, "wrong", lambda _: "accepted", "compressed, 100 MB")
    if way < 0.65 and is_zip:
        path.write_bytes(
            with_zip_member(
                written, "data.pkl", lambda inside: damaged(inside, rng), zipfile.ZIP_STORED
            )
        )
        return Case(run, note="damaged pickle")
    path.write_bytes(damaged(written, rng))
    return Case(run, note="damaged bytes")


def make_pickle(rng: random.Random, folder: Path, _: Any) -> Case:
    """A pickle of features, as published."""
    path = folder / "features.pkl"
    generator = np.random.default_rng(rng.getrandbits(31))
    features: dict[Any, Any] = {
        f"video{number}": rng.choice(
            [
                generator.standard_normal((2, 3)).astype(rng.choice(["f4", "f2", "f8", ">f4"])),
                [1, 2.5, "é", None, True, b"x"],
                generator.integers(0, 9, 4),
                np.float32(0.5),
                (1, (2, 3)),
            ]
        )
        for number in range(rng.choice([1, 3]))
    }
    run = partial(guarded, partial(read_plain_pickle, path))
    way = rng.random()
    if way < 0.2:
        path.write_bytes(pickle.dumps(features, protocol=rng.randrange(6)))

        def check(found: Any) -> str:
            same = found.keys() == features.keys() and all(
                np.array_equal(
                    np.asarray(found[key], dtype=object), np.asarray(value, dtype=object)
                )
                for key, value in features.items()
            )
            return "" if same else f"written {features!r:.300}, read {found!r:.300}"

        return Case(run, "right", check, "valid")
    if way < 0.4:
        path.write_bytes(harmful_pickle(rng))
        return Case(run, "wrong", lambda _: "code was accepted", "code")
    if way < 0.65:
        path.write_bytes(random_pickle(rng))
        return Case(run, note="random instructions")
    path.write_bytes(damaged(pickle.dumps(features, protocol=rng.randrange(6)), rng))
    return Case(run, note="damaged bytes")


def read_regions(path: Path, names: list[str]) -> np.ndarray:
    """Region features of all images, as training reads them."""
    features = RegionFeatures.open(path, lambda *_: None)
    encoded: Any = features.read(features.rows(names))
    vectors: np.ndarray = encoded.vectors.numpy()
    return vectors


def make_regions(rng: random.Random, folder: Path, _: Any) -> Case:
    """Region features: a ``.tsv`` of bottom-up-attention, or a folder of ``.npy`` or ``.npz``."""
    generator = np.random.default_rng(rng.getrandbits(31))
    names = ["7", "42", "100"]
    arrays = {name: generator.standard_normal((2, 3)).astype(np.float32) for name in names}
    way = rng.random()
    note, known = "valid", "right"
    if 0.3 <= way < 0.5:
        note, known = rng.choice(["NaN", "infinity", "width", "no rows", "text"]), "wrong"
        wrong = {
            "NaN": lambda: np.where(np.eye(2, 3), np.nan, arrays["42"]).astype(np.float32),
            "infinity": lambda: np.where(np.eye(2, 3), np.inf, arrays["42"]).astype(np.float32),
            "width": lambda: np.ones((2, 4), np.float32),
            "no rows": lambda: np.ones((0, 3), np.float32),
            "text": lambda: np.array([["a", "b", "c"]]),
        }
        arrays["42"] = wrong[note]()
    form = rng.choice(["tsv", "npy", "npz"]) if note != "text" else rng.choice(["npy", "npz"])
    path = folder / "regions"
    path.mkdir()
    if form == "tsv":
        lines = []
        for name, array in arrays.items():
            boxes = np.zeros((len(array), 4), np.float32)
            texts = (base64.b64encode(each.tobytes()).decode() for each in (boxes, array))
            lines.append("\t".join([name, "640", "480", str(len(array)), *texts]))
        file = path / "regions.tsv"
        file.write_text("\n".join(lines) + "\n")
    else:
        for name, array in arrays.items():
            file = path / f"{name}.{form}"
            if form == "npy":
                np.save(file, array)
            else:
                save = rng.choice([np.savez, np.savez_compressed])
                save(file, **{rng.choice(["features", "feat", "x"]): array})
    if way >= 0.5:
        note, known = "damaged bytes", "unknown"
        file.write_bytes(damaged(file.read_bytes(), rng))
    elif way >= 0.45 and form == "npz":
        note, known = "bomb", "unknown"
        np.savez_compressed(file, x=np.zeros((10_000, 3000), np.float32))

    def check(found: np.ndarray) -> str:
        if known == "right":
            expected = np.stack([arrays[name] for name in names])
            return "" if np.array_equal(found, expected) else "the features have changed"
        if known == "wrong":
            return "wrong features were accepted"
        return "" if np.isfinite(found).all() else "NaN or infinity was accepted"

    return Case(partial(read_regions, path, names), known, check, f"{form}: {note}")  # type: ignore[arg-type]


def read_vectors(path: Path) -> dict[str, np.ndarray]:
    """Item vectors by name, as training against an index of others reads them."""
    vectors = ItemVectors.open_items(path)
    if (row := first_nonfinite_row(vectors)) is not None:
        raise DataError(
            f"{path}: expected finite numbers, got others in {vectors.describe_row(row)}."
        )
    names = list(vectors._names)
    assert len(vectors.fingerprint) >= 16
    found: Any = vectors.read(vectors.rows(names)).vectors
    return dict(zip(names, found.numpy(), strict=True))


def make_vectors(rng: random.Random, folder: Path, _: Any) -> Case:
    """Item vectors: an array with ids, or a Parquet file."""
    generator = np.random.default_rng(rng.getrandbits(31))
    parts = ["a", "é", "b c", rng.choice(["東京/x", "a\u2028b", "a\x85b", "a\x0bb"])]
    names = [f"{part}{number}.jpg" for number, part in enumerate(parts)]
    vectors = generator.standard_normal((4, 3)).astype(rng.choice(["f4", "f2"]))
    way = rng.random()
    note, known = "valid", "right"
    if 0.3 <= way < 0.55:
        note = rng.choice(["NaN", "infinity", "id twice", "an id less", "no width"])
        known = "wrong"
        if note in ("NaN", "infinity"):
            vectors[1, 2] = np.nan if note == "NaN" else np.inf
        elif note == "id twice":
            names[2] = names[0]
        elif note == "no width":
            vectors = vectors[:, :0]
    if rng.random() < 0.5:
        path = folder / "vectors.npy"
        np.save(path, vectors)
        written = names[:-1] if note == "an id less" else names
        text = "\n".join(written) + rng.choice(["", "\n"])
        (folder / "vectors.ids.txt").write_text(text, encoding=rng.choice(["utf-8", "utf-8-sig"]))
        target = rng.choice([path, folder / "vectors.ids.txt"])
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = target = folder / "vectors.parquet"
        rows: list[Any] = vectors.astype(np.float32).tolist()
        ids: list[Any] = list(names)
        if note == "an id less":
            ids[1] = None
        pq.write_table(
            pa.table(
                {
                    rng.choice(["id", "key", "name"]): pa.array(ids, pa.string()),
                    "vector": pa.array(
                        rows, rng.choice([pa.list_(pa.float32()), pa.large_list(pa.float32())])
                    ),
                }
            ),
            path,
            write_page_checksum=rng.random() < 0.5,
        )
    if way >= 0.55:
        note, known = "damaged bytes", "unknown"
        target.write_bytes(damaged(target.read_bytes(), rng))

    def check(found: dict[str, np.ndarray]) -> str:
        if known == "wrong":
            return "wrong vectors were accepted"
        if not all(np.isfinite(each).all() for each in found.values()):
            return "NaN or infinity was accepted"
        if known == "right":
            same = list(found) == names and np.array_equal(
                np.stack(list(found.values())), vectors.astype(np.float32)
            )
            return "" if same else f"the vectors have changed: {list(found)}"
        return ""

    return Case(partial(read_vectors, path), known, check, f"{path.name}: {note}")  # type: ignore[arg-type]


KINDS = [
    Kind("safetensors", make_safetensors, inputs=1000),
    Kind("torch checkpoints", make_checkpoint, inputs=1000),
    Kind("pickles", make_pickle, inputs=1000),
    Kind("region features", make_regions, inputs=500),
    Kind("item vectors", make_vectors, inputs=500),
]
