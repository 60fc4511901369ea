"""Safe reading of pickles: plain values round trip, and code, bombs and damage are refused."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import pickle
import pickletools
import struct
import subprocess
import time

import numpy as np
import pytest

from visavis.core.errors import DataError
from visavis.data import safe_pickle
from visavis.data.safe_pickle import read_plain_pickle

PROTOCOLS = range(6)


@pytest.fixture
def read(tmp_path):
    """Read a pickle of these bytes."""

    def read_bytes(content):
        (tmp_path / "x.pkl").write_bytes(content)
        return read_plain_pickle(tmp_path / "x.pkl")

    return read_bytes


PLAIN = {
    "numbers": [0, -1, 255, 65535, 2**31, -(2**70), 1.5, float("inf"), True, False, None],
    "texts": ["", "é", "two\nlines", "\x00", "a" * 300, "'\"\\"],
    "bytes": [b"", b"\xff\x00", b"y" * 70_000, bytearray(b"abc")],
    "nested": ([[(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], {"a": {"b": [{}]}}],),
    "sets": {1, 2, "a"},
    "frozen": frozenset(["a"]),
    "ordered": collections.OrderedDict([("b", 1), ("a", [2])]),
    "defaults": collections.defaultdict(list, {"a": [1]}),
    3: "a number for a key",
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_safe_pickle_round_trip_of_plain_values(read, protocol):
    assert read(pickle.dumps(PLAIN, protocol)) == PLAIN


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_safe_pickle_round_trip_of_arrays(read, protocol):
    arrays = [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(3),
        np.empty((0, 4)),
        np.arange(100_000) % 99,
    ]
    arrays = [
        array.astype(dtype)
        for array in arrays
        for dtype in ("f4", ">f8", "f2", "i8", "u1", "bool", "U5", "S3")
    ]
    for given, found in zip(arrays, read(pickle.dumps(arrays, protocol)), strict=True):
        assert np.array_equal(given, found), given.dtype
        assert given.shape == found.shape


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_safe_pickle_converts_numpy_scalars(read, protocol):
    words = np.array(["a", None, ["b"]], dtype=object)
    assert read(pickle.dumps([np.float32(1.5), np.int64(3), np.bool_(True), words], protocol)) == [
        1.5,
        3,
        True,
        ["a", None, ["b"]],
    ]


def test_safe_pickle_keeps_shared_values(read):
    words = ["a"]
    first, second = read(pickle.dumps([words, words]))
    assert first is second


def test_safe_pickle_decodes_python_2_strings(read):
    assert read(b"(lp0\nS'caf\\xc3\\xa9'\np1\naS'\\xe9'\np2\naI01\na.") == ["café", b"\xe9", True]
    assert read(b"\x80\x02U\x02\xc3\xa9q\x00.") == "é"


def test_safe_pickle_reads_python_2_array(read):
    """As written by numpy 1 with protocol 0: the bytes of the array are a quoted text."""
    content = (
        b"cnumpy.core.multiarray\n_reconstruct\np0\n(cnumpy\nndarray\np1\n(I0\ntp2\nS'b'\np3\ntp4\nRp5\n"
        b"(I1\n(I2\nI2\ntp6\ncnumpy\ndtype\np7\n(S'f4'\np8\nI0\nI1\ntp9\nRp10\n(I3\nS'<'\np11\nNNNI-1\nI-1\nI0\ntp12\nb"
        b"I00\nS'\\x00\\x00\\x80?\\x00\\x00\\x00@\\x00\\x00@@\\x00\\x00\\x80@'\np13\ntp14\nb."
    )
    assert read(content).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_safe_pickle_reads_npy_of_objects(tmp_path, version):
    features = {"video7": np.ones((2, 3), np.float32)}
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(
            file, np.array(features, dtype=object), version, allow_pickle=True
        )
    assert read_plain_pickle(tmp_path / "x.npy")["video7"].tolist() == [[1, 1, 1]] * 2
    np.save(tmp_path / "y.npy", np.ones(3))
    with pytest.raises(DataError, match=r"y\.npy is a \.npy of numbers, expected one of objects"):
        read_plain_pickle(tmp_path / "y.npy")


class Runs:
    """Executes code when it is unpickled."""

    def __init__(self, call, *arguments):
        self.parts = call, arguments

    def __reduce__(self):
        return self.parts


class Plain:
    pass


def call(module, name, arguments="tR"):
    return f"c{module}\n{name}\n(S'touch gone'\n{arguments}.".encode()


HOSTILE = {
    "a command": pickle.dumps(Runs(os.system, "touch gone")),
    "a process": pickle.dumps(Runs(subprocess.Popen, ["touch", "gone"])),
    "eval": pickle.dumps({"a": [1, Runs(eval, "1+1")]}),
    "an attribute of a module": call("builtins", "getattr"),
    "a name of names": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",
    "the globals of a function": b"\x80\x04\x8c\x05numpy\x8c\x13load.__globals__.os\x93.",
    "importing": call("importlib", "import_module"),
    "a function of numpy": call("numpy", "load"),
    "numpy's own test runner": call("numpy.testing._private.utils", "runstring"),
    "an object": pickle.dumps(Plain()),
    "an object, protocol 0": pickle.dumps(Plain(), 0),
    "an instance": b"(S'touch gone'\nios\nsystem\n.",
    "a class called": b"(cos\nsystem\nS'touch gone'\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "attributes of a list": b"](S'__class__'\nI1\ndb.",
    "attributes of a name": b"cnumpy\ndtype\n(S'call'\nI1\ndb.",
    "a type that is called": b"cbuiltins\nint\n(S'1'\ntR.",
    "a list that is called": b"](I1\ntR.",
    "an array of another class": b"cnumpy.core.multiarray\n_reconstruct\n(cbuiltins\nint\n(I0\ntS'b'\ntR.",
    "records": pickle.dumps(np.zeros(2, dtype=[("a", "f4"), ("b", "O")])),
    "dates": pickle.dumps(np.zeros(2, dtype="M8[s]")),
    "long doubles": pickle.dumps(np.zeros(2, dtype=np.longdouble)),
    "a matrix": pickle.dumps(np.ma.ones(3)),
    "a persistent value": b"Pabc\n.",
    "buffers elsewhere": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_safe_pickle_refuses_code(read, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError,
        match=r"x\.pkl (is a pickle with code in it: |has an array of |refers to values outside)",
    ) as error:
        read(HOSTILE[what])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "gone").exists()


def array_of(shape, dtype=b"S'f4'", data=b"S'aaaa'"):
    """A pickle of an array whose shape, dtype and bytes may contradict one another."""
    return (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n"
        + shape
        + b"cnumpy\ndtype\n("
        + dtype
        + b"\nI0\nI1\ntR"
        b"(I3\nS'<'\nNNNI-1\nI-1\nI0\ntbI00\n" + data + b"\ntb."
    )


def doubled(times):
    """Lists of lists, each with the previous one twice: a small file whose traversal takes
    exponential time.
    """
    return b"]" + b"p0\n0]g0\nag0\na" * times + b"."


HUGE = {
    "a text of 2^60 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",
    "bytes of 2^60 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"a.",
    "a negative length": b"T" + struct.pack("<i", -5) + b".",
    "a long of negative length": b"\x8b" + struct.pack("<i", -5) + b".",
    "a frame of 2^60 bytes": b"\x80\x04\x95"
    + struct.pack("<Q", 2**60)
    + b"\x8e"
    + struct.pack("<Q", 2**60),
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
    "an array of 10^15 numbers": array_of(b"(I1000000000000000\nt"),
    "a negative shape": array_of(b"(I-1\nt"),
    "a shape of texts": array_of(b"(S'a'\nt"),
    "many dimensions": array_of(b"(" + b"I1\n" * 64 + b"t"),
    "a text for a dtype": array_of(b"(I1\nt", dtype=b"S'f4,f4'"),
    "bytes that do not fit": array_of(b"(I7\nt"),
    "objects in bytes": array_of(b"(I1\nt", dtype=b"S'O8'"),
    "texts without width": array_of(b"(I99999999\nt", dtype=b"S'S0'", data=b"S''"),
    "a list for a key": b"}(]I1\nu.",
    "a large number for a key": b"}(I4294967296\nI1\nu.",
    "a fraction for a key": b"}(F0.5\nI1\nu.",
    "a tuple for a key": b"}(" + b")" + b"\x85" * 100_000 + b"I1\nu.",
    "a set of itself": b"\x8fp0\n(g0\n\x90.",
    "nothing": b".",
    "nothing at the end": b"]",
    "text": b"hello world\n",
    "a place that is not there": b"g7\n.",
    "a mark that is not there": b"t.",
    "half a line": b"S'abc",
    "an empty array in many sets": b"]("
    + b"I1\n" * 3000
    + b"ep0\n0"
    + b"cbuiltins\nlist\n(g0\ntR0" * 30_000
    + b"N.",
    "the bytes of one text in many arrays": b"S'"
    + b"a" * 4000
    + b"'\np0\n0"
    + b"ccollections\nOrderedDict\n(g0\ntR0" * 1000
    + b"N.",
}


@pytest.mark.parametrize("what", HUGE)
def test_safe_pickle_refuses_damaged_and_huge_pickles(read, what):
    with pytest.raises(
        DataError,
        match=r"x\.pkl (is not a readable pickle|has an array|has a \w+ for a key|copies the same values)",
    ) as error:
        read(HUGE[what])
    assert "\n" not in str(error.value)


def test_safe_pickle_memo_bomb_takes_no_memory(read):
    assert read(b"\x80\x02Kar" + struct.pack("<I", 2**32 - 1) + b".") == ord("a")


def test_safe_pickle_deep_nesting_takes_no_stack(read):
    deep = read(b"]" * 300_000 + b"a" * 299_999 + b".")
    assert isinstance(deep, list)
    assert len(read(doubled(10_000))) == 2
    endless = read(b"]p0\ng0\na.")
    assert endless[0] is endless


REPEATED = {
    "constants": b"N",
    "lists": b"]",
    "marks": b"(",
    "pops": b"N0",
    "memo": b"]q\x00",
    "memo reads": b"Np1\ng1\n",
    "duplicates": b"N2",
    "tuples": b")\x85",
    "items": b"}NNs",
    "texts": b"S'a'\n",
    "calls": b"cbuiltins\nlist\n)R",
}
"""Instructions that are repeated to make a file slow."""


@pytest.mark.parametrize("size", [2**14, pytest.param(2**26, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", REPEATED)
def test_safe_pickle_limits_number_of_instructions(read, kind, size, monkeypatch):
    if size < 2**20:
        monkeypatch.setattr(safe_pickle, "_MAX_INSTRUCTIONS", 1000)
    start = time.process_time()
    with pytest.raises(
        DataError,
        match=r"x\.pkl has more than [\d,]+ instructions\. Save plain containers .* in several files if it is large\.$",
    ):
        read(b"\x80\x02" + REPEATED[kind] * (size // len(REPEATED[kind])) + b".")
    assert time.process_time() - start < 10
    assert gc.isenabled()


def test_safe_pickle_refuses_truncated_pickles(read):
    whole = pickletools.optimize(
        pickle.dumps({"video7": np.ones((2, 2), np.float32), "a": [1, "b", 2.5]}, 4)
    )
    for end in range(1, len(whole)):
        with pytest.raises(DataError, match="not a readable pickle"):
            read(whole[:end])


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_safe_pickle_with_flipped_bytes_raises_only_data_error(
    read, protocol, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    whole = pickle.dumps(
        {"video7": np.ones((2, 2), np.float32), "a": [1, "b", {2}], "s": np.float64(2)}, protocol
    )
    random = np.random.default_rng(0)
    for _ in range(500):
        content = bytearray(whole)
        for place in random.integers(0, len(content), random.integers(1, 4)):
            content[place] = random.integers(0, 256)
        with contextlib.suppress(DataError):
            read(bytes(content))


def test_safe_pickle_refuses_empty_file_and_folder(tmp_path):
    (tmp_path / "x.pkl").touch()
    with pytest.raises(DataError, match="is empty"):
        read_plain_pickle(tmp_path / "x.pkl")
    with pytest.raises(DataError, match="expected a regular file, got a folder"):
        read_plain_pickle(tmp_path)
