"""Compressed vectors of late-interaction indexes: laws, hand-computed values, and updates."""

import shutil
from contextlib import closing

import numpy as np
import pytest
from typer.testing import CliRunner

from visavis.cli import app
from visavis.core.errors import RunError, VisavisError
from visavis.core.progress import NoProgress
from visavis.retrieval.build import index_compression
from visavis.retrieval.build.compression import choose_codec, noisy_set_queries, possible_encodings
from visavis.retrieval.build.index_builder import build_index
from visavis.retrieval.index_folder import CODEC_FILE, read_manifest
from visavis.retrieval.items import IndexItem, ItemFilter
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection
from visavis.retrieval.stores import maxsim_search
from visavis.retrieval.stores.base import VectorSets
from visavis.retrieval.stores.catalog import open_store
from visavis.retrieval.stores.maxsim_search import MaxSimSearch
from visavis.retrieval.stores.set_codec import (
    SetCodec,
    SetEncoding,
    allocate_bits,
    pool_hierarchically,
)

DIM = 16
FLOAT32_ROUNDING = 2.0**-23


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def sets():
    """Items whose vectors share a direction, as regions of an image do."""
    random = np.random.default_rng(0)
    scale = 0.8 ** np.arange(DIM)
    counts = random.integers(1, 9, 400)
    return VectorSets.from_arrays(
        [
            unit(random.standard_normal(DIM) + random.standard_normal((n, DIM)) * scale)
            for n in counts
        ]
    )


def test_allocate_bits_by_hand():
    # Gains of the first bit are 0.6366 v, of the second 0.2446 v, and of each of the next two 0.0536 v.
    assert allocate_bits(np.array([16.0, 1.0, 0.0]), 3).tolist() == [2, 1, 0]
    assert allocate_bits(np.array([1.0, 1.0]), 3).tolist() == [2, 1]
    assert allocate_bits(np.array([100.0, 1.0]), 4).tolist() == [4, 0]
    assert allocate_bits(np.array([1.0, 1.0]), 99).tolist() == [8, 8]


def test_pool_hierarchically_by_hand():
    pairs = unit(np.array([[1.0, 0, 0], [1, 0.2, 0], [0, 0, 1], [0, 0.2, 1]]))
    pooled = pool_hierarchically(VectorSets.from_arrays([pairs, pairs[:2]]), 2)
    expected = unit(np.stack([pairs[:2].sum(0), pairs[2:].sum(0)]))
    assert pooled.counts.tolist() == [2, 2]
    assert min(np.abs(pooled[:1].rows[order] - expected).max() for order in ([0, 1], [1, 0])) < 1e-6
    np.testing.assert_array_equal(pooled[1:].rows, pairs[:2])
    assert pool_hierarchically(pooled, None) is pooled


def test_codec_error_falls_with_bytes(sets):
    errors = []
    for vector_bytes in (1, 2, 4, 8, 16):
        codec = SetCodec.fit(sets, SetEncoding(None, vector_bytes))
        codes = codec.encode(sets)
        decoded = codes.decoded()
        assert decoded.counts.tolist() == sets.counts.tolist()
        assert np.linalg.norm(decoded.rows, axis=1).max() < 1.5
        errors.append(float(((decoded.rows - sets.rows) ** 2).sum(1).mean()))
        size = codes.rows.size / len(codes)
        assert size == pytest.approx(codec.encoding.item_bytes(sets.counts.mean(), DIM))
        # A matrix product adds in an order that depends on its size: sums of 16 products of at most 1.
        part = codes[[7, 3]].decoded().rows
        np.testing.assert_allclose(part, decoded[[7, 3]].rows, rtol=0, atol=16 * FLOAT32_ROUNDING)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 < errors[0]


@pytest.mark.parametrize("direction", ["both", "t2i", "i2t"])
def test_compressed_search_equals_search_of_decoded(sets, direction, monkeypatch):
    monkeypatch.setattr(maxsim_search, "MIN_CANDIDATES", 500)
    codes = SetCodec.fit(sets, SetEncoding(4, 4)).encode(sets)
    queries = noisy_set_queries(sets[:5])
    mask = np.random.default_rng(1).random(400) < 0.5
    for allowed in (None, mask):
        found = MaxSimSearch(codes, direction).search(queries, 10, allowed)
        expected = MaxSimSearch(codes.decoded(), direction).search(queries, 10, allowed)
        np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
        assert (found[1] == expected[1]).mean() > 0.95


@pytest.mark.slow
def test_recall_rises_with_bytes(sets):
    queries = noisy_set_queries(sets[:40])
    true = MaxSimSearch(sets, "both").search(queries, 10)[1]

    def recall(item_bytes):
        codec = choose_codec(sets, item_bytes, "both", queries)
        found = MaxSimSearch(codec.encode(sets), "both").search(queries, 10)[1]
        return np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, true, strict=True)])

    recalls = [recall(item_bytes) for item_bytes in (24, 40, 64, 128)]
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.9
    assert recalls[-1] > 0.97


def test_possible_encodings_fit(sets):
    for item_bytes in (20, 50, 1000):
        encodings = list(possible_encodings(sets, item_bytes))
        for each in encodings:
            codes = SetCodec.fit(sets, each).encode(sets)
            assert codes.rows.size / len(codes) <= item_bytes
        # With 8 bits per dimension, fewer vectors gain nothing.
        assert (len(encodings) == 1) == (item_bytes == 1000)
    with pytest.raises(VisavisError, match=r"^item_bytes: expected at least 18 for .*, got 3\. "):
        choose_codec(sets, 3, "both")


def test_compressed_store_keeps_codes(sets, tmp_path, monkeypatch):
    monkeypatch.setattr(maxsim_search, "MIN_CANDIDATES", 50)
    codec = SetCodec.fit(sets, SetEncoding(None, 4))
    items = [
        IndexItem(f"{n:03d}", f"{n % 2}/{n:03d}.jpg", "image", "", 1, n) for n in range(len(sets))
    ]
    with closing(
        open_store(tmp_path / "a", DIM, index_id="ab", late_interaction="both", codec=codec)
    ) as store:
        store.add(items[:300], sets[:300])
        # Stored codes are added as they are, as for a moved file.
        store.add(items[300:], codec.encode(sets[300:]))
        store.add(items[:9], store.vectors([item.key for item in items[:9]]))
        stored = store.all_vectors()
        np.testing.assert_array_equal(stored.rows, codec.encode(sets).rows)
        [query] = noisy_set_queries(sets[5:6])
        found = store.search([query], 10, ItemFilter(path="1/*"))[0]
        assert found[0].key == "005"
        assert all(int(near.key) % 2 for near in found)
        store.verify()
    with closing(
        open_store(tmp_path / "a", index_id="ab", late_interaction="both", codec=codec)
    ) as opened:
        assert opened.embedding_dim == DIM
        assert opened.search([query], 10, ItemFilter(path="1/*"))[0] == found
    for other in (None, SetCodec.fit(sets, SetEncoding(None, 8))):
        with pytest.raises(VisavisError, match="expected"):
            open_store(tmp_path / "a", DIM, index_id="ab", late_interaction="both", codec=other)
    with pytest.raises(VisavisError, match="for a model with several vectors"):
        open_store(tmp_path / "a.db", DIM, late_interaction="both", codec=codec)


@pytest.fixture
def photos(scenes, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for image in sorted((scenes / "images").iterdir())[:30]:
        shutil.copy(image, folder)
    return folder


def build(run, source, out, **options):
    return build_index(run, source, out, progress=NoProgress(), **options)


def stored_rows(folder):
    with closing(open_index(folder).store) as store:
        return store.all_vectors()


@pytest.mark.slow
def test_update_of_compressed_index_equals_new_index(late_run, photos, tmp_path, monkeypatch):
    index, plain = tmp_path / "index", tmp_path / "plain"
    moved = sorted(photos.iterdir())[25:]
    for file in moved:
        shutil.move(file, tmp_path)
    build(late_run, photos, index)
    # A process that is killed before the manifest leaves the index as it was.
    with monkeypatch.context() as patch:
        patch.setattr(index_compression, "set_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(late_run, photos, index, item_bytes=300)
    assert stored_rows(index).codec is None
    build(late_run, photos, index, item_bytes=300)
    manifest = read_manifest(index)
    assert (manifest.item_bytes, manifest.store) == (300, ".")
    assert [path.name for path in (index / "vectors").glob("1.*")] == []
    for file in moved:
        shutil.move(tmp_path / file.name, file)
    assert build(late_run, photos, index).num_encoded == 5
    assert build(late_run, photos, index, item_bytes=300).num_encoded == 0
    build(late_run, photos, plain)
    codes, exact = stored_rows(index), stored_rows(plain)
    assert len(codes) == 30
    assert codes.rows.size / len(codes) <= 300
    expected = codes.codec.encode(exact)
    # Vectors differ by rounding between batch sizes, which may change a code at a boundary.
    assert (codes.rows == expected.rows).mean() > 0.999
    opened = open_index(index)
    [best] = search_collection(opened, SearchQuery(like=((1.0, moved[0].name),)), top=1)
    assert best.item.key == moved[0].name
    opened.store.close()
    with pytest.raises(
        RunError, match=r"item_bytes: expected 300, the value of this index, got 400"
    ):
        build(late_run, photos, index, item_bytes=400)
    array = np.load(index / CODEC_FILE)
    np.save(index / CODEC_FILE, array + 1)
    with pytest.raises(RunError, match=r"codec\.npy: has another checksum"):
        open_index(index)


def test_compress_command(late_run, run, photos, tmp_path):
    def invoke(name, size):
        command = ["indexes", "compress", tmp_path / name, size]
        return CliRunner().invoke(app, list(map(str, command)))

    build(run, photos, tmp_path / "one-vector")
    build(late_run, photos, tmp_path / "index")
    for name, size, message in (
        ("one-vector", "2KB", "expected a model with several vectors per item"),
        ("index", "2 apples", "item_bytes: expected bytes"),
    ):
        result = invoke(name, size)
        assert result.exit_code == 1, result.output
        assert message in str(result.exception)
    result = invoke("index", "0.4KB")
    assert result.exit_code == 0, result.output
    assert read_manifest(tmp_path / "index").item_bytes == 400
