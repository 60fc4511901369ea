"""Parallel reading: results do not depend on threads, worker processes or ranks, and errors and
signals arrive as without them.
"""

import contextlib
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from tests.platforms import posix
from tests.processes import Command

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, VisavisError
from visavis.data import loader as loader_module
from visavis.data import workers as workers_module
from visavis.data.dataset import Dataset
from visavis.data.image_file import ByteRange, Image
from visavis.data.images import decode_image
from visavis.data.item_sources import PixelSource
from visavis.data.loader import BatchSchedule, Loader, share_workers
from visavis.data.parallel import map_in_order
from visavis.data.random_transforms import CROP_FUNCTIONS, RandomCrops, random_horizontal_flip
from visavis.data.tokenized_captions import TokenizedCaptions
from visavis.data.vocabulary import Vocabulary
from visavis.data.workers import (
    MIN_IMAGES_FOR_WORKERS,
    MIN_SHARED_MEMORY,
    BatchReader,
    choose_readers,
    choose_workers,
)
from visavis.models.encoders.preprocessing import MAX_JPEG_SIDE, ImageConverter, Preprocessing

CONVERTER = ImageConverter(Preprocessing(resize=(16, 16), crop=None))


@dataclass(frozen=True)
class CountedImage(Image):
    """An image that counts how often its file is read."""

    reads: tuple[list[int], ...] = ([],)

    def read(self):
        self.reads[0].append(1)
        return super().read()


@pytest.fixture
def photos(tmp_path):
    """Twelve JPEG images of 160 x 120 pixels with two captions each."""
    smooth = np.random.default_rng(0).integers(0, 255, (12, 5, 6, 3), np.uint8)
    for i, pixels in enumerate(smooth):
        Pillow.fromarray(pixels).resize((160, 120), Pillow.Resampling.BICUBIC).save(
            tmp_path / f"{i}.jpg"
        )
    images = tuple(Image(f"{i}.jpg", "train", ByteRange(tmp_path / f"{i}.jpg")) for i in range(12))
    data = Dataset("photos", images, tuple(f"photo {i}" for i in range(24)), np.arange(24) // 2)
    tokens = TokenizedCaptions(data.captions, Vocabulary.from_captions(data.captions, min_count=1))
    in_bytes = CONVERTER.to_bytes
    source = PixelSource(
        images,
        in_bytes,
        RandomCrops(in_bytes),
        min_side=32,
        normalize=CONVERTER.preprocessing.normalize,
    )
    return Loader(data, source, tokens, BatchSchedule(batch_size=5), 0)


@pytest.fixture
def photos_with_workers(photos):
    (loader,) = share_workers([photos], 2)
    yield loader
    loader.close()


def contents(batches):
    return [
        (batch.index, batch.captions.tolist(), batch.visual.vectors, batch.text.vectors)
        for batch in batches
    ]


def equal(one, other):
    return len(one) == len(other) and all(
        a[:2] == b[:2] and torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])
        for a, b in zip(one, other, strict=True)
    )


def test_batches_do_not_depend_on_workers(photos, photos_with_workers, tmp_path):
    """Workers stay between epochs, an abandoned epoch does not disturb the next one, and an error
    ends only its epoch.
    """
    whole = contents(photos.epoch(1))
    assert equal(contents(photos_with_workers.epoch(1)), whole)
    assert not equal(contents(photos.epoch(2)), whole)
    next(photos_with_workers.epoch(2))
    assert equal(contents(photos_with_workers.epoch(1, start=2)), whole[2:])
    assert equal(
        contents(photos_with_workers.epoch(1, training=False)),
        contents(photos.epoch(1, training=False)),
    )
    saved = (tmp_path / "3.jpg").read_bytes()
    (tmp_path / "3.jpg").write_bytes(saved[:300])
    with pytest.raises(DataError, match=r"^image 3\.jpg is truncated or damaged: [^\n]*\.$"):
        list(photos_with_workers.epoch(1))
    (tmp_path / "3.jpg").write_bytes(saved)
    assert equal(contents(photos_with_workers.epoch(1)), whole)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("captions_per_image", [None, 2])
def test_large_batch_is_read_in_parts(
    photos_with_workers, photos, captions_per_image, device, monkeypatch
):
    """The parts have the seeds, the order and the captions of the batch, on the requested device."""
    if device == "cuda":
        torch.cuda.init()  # pins the memory of the workers' batches
    schedule = BatchSchedule(batch_size=11, captions_per_image=captions_per_image)
    whole = contents(replace(photos, schedule=schedule).epoch(1))
    monkeypatch.setattr(loader_module, "MAX_IMAGES_PER_READ", 3)
    photos_with_workers = replace(photos_with_workers, schedule=schedule)
    try:
        batches = list(photos_with_workers.epoch(1, device=device))
        assert (
            {batch.visual.vectors.device.type for batch in batches}
            == {batch.text_ids.device.type for batch in batches}
            == {device}
        )
        assert equal(contents(batch.to("cpu") for batch in batches), whole)
        assert equal(contents(photos_with_workers.epoch(1, start=1)), whole[1:])
    finally:
        photos_with_workers.close()


@dataclass(frozen=True)
class Regions:
    """Items of one to three regions, padded to the most in a read."""

    def read(self, index, seeds=None):
        counts = torch.from_numpy(index) % 3 + 1
        mask = torch.arange(int(counts.max())) < counts[:, None]
        return Encoded(mask * torch.from_numpy(index)[:, None], mask)


def test_large_batch_of_regions_is_read_in_parts(photos, monkeypatch):
    schedule = BatchSchedule(batch_size=11, captions_per_image=2)
    regions = replace(photos, visual=Regions(), text=Regions(), schedule=schedule)
    monkeypatch.setattr(loader_module, "MAX_IMAGES_PER_READ", 3)
    (with_workers,) = share_workers([regions], 1)
    try:
        for batch, expected in zip(with_workers.epoch(1), regions.epoch(1), strict=True):
            assert torch.equal(batch.visual.vectors, expected.visual.vectors)
            assert torch.equal(batch.visual.mask, expected.visual.mask)
    finally:
        with_workers.close()


@posix
def test_killed_worker_is_one_error(photos_with_workers):
    next(photos_with_workers.epoch(1))
    for worker in photos_with_workers.pool._loader._iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        DataError,
        match=r"^training\.workers: expected running processes that read batches, got one that ended \([^\n]*set training\.workers to 0",
    ):
        list(photos_with_workers.epoch(2))


def test_image_of_two_captions_is_decoded_once(photos):
    images = tuple(
        CountedImage(image.name, image.split, image.location) for image in photos.data.images
    )
    source = PixelSource(images, CONVERTER, RandomCrops(CONVERTER), min_side=32)
    index, seeds = np.array([4, 1, 4, 4]), np.array([7, 8, 9, 7])
    images[0].reads[0].clear()
    crops = source.read(index, seeds).vectors
    assert len(images[0].reads[0]) == 2
    assert torch.equal(crops[0], crops[3])
    assert not torch.equal(crops[0], crops[2])
    for position in range(4):
        assert torch.equal(
            source.read(index[[position]], seeds[[position]]).vectors[0], crops[position]
        )
    whole = source.read(index).vectors
    assert torch.equal(whole[0], whole[2])
    assert not torch.equal(whole[0], whole[1])


def test_reduced_crops_match_full_ones(photos):
    """Crops are sampled in the whole image, so that the same parts are seen."""
    full = PixelSource(photos.data.images, CONVERTER, RandomCrops(CONVERTER), min_side=10_000)
    index, seeds = np.arange(12), np.arange(12)
    difference = full.read(index, seeds).vectors - photos.visual.read(index, seeds).vectors
    assert difference.abs().mean() < 0.02


@pytest.mark.parametrize(
    ("preprocessing", "crops", "random_crops", "expected"),
    [
        (Preprocessing((224,), (224, 224)), 1, False, 448),
        (Preprocessing((64, 96), None), 1, False, 192),
        (Preprocessing((256,), (224, 224)), 10, False, 512),
        (Preprocessing((224,), (224, 224)), 10, False, 512),
        (Preprocessing((256,), (224, 224)), 10, True, 0),
        (Preprocessing(None, None), 1, False, 0),
        (Preprocessing(None, (224, 224)), 1, False, 0),
    ],
)
def test_min_side_is_twice_the_resized_image(preprocessing, crops, random_crops, expected):
    assert ImageConverter(preprocessing, crops, random_crops).min_side == expected
    assert ImageConverter(preprocessing, crops, random_crops, full_decoding=True).min_side == (
        MAX_JPEG_SIDE if expected else 0
    )


def test_full_decoding_reads_all_pixels(photos):
    wide = photos.data.images[0].open()
    converter = replace(CONVERTER, full_decoding=True)
    source = PixelSource(
        photos.data.images, converter, RandomCrops(converter), min_side=converter.min_side
    )
    assert torch.equal(source.read(np.array([0])).vectors, converter([wide]))
    assert not torch.equal(photos.visual.read(np.array([0])).vectors, converter([wide]))
    seeds = np.array([7])
    generator = torch.Generator().manual_seed(7)
    crop = random_horizontal_flip(
        wide.crop(CROP_FUNCTIONS["random_area"](wide.size, generator)), generator
    )
    assert torch.equal(source.read(np.array([0]), seeds).vectors, converter([crop]))


def test_idle_workers_read_batches_without_transforms(photos):
    """Between epochs only: in an epoch, they read ahead. Neither the batches nor the epoch depend
    on it.
    """
    images = tuple(
        CountedImage(image.name, image.split, image.location) for image in photos.data.images
    )
    counted = replace(
        photos, visual=PixelSource(images, CONVERTER, RandomCrops(CONVERTER), min_side=32)
    )
    counted, validation = share_workers(
        [counted, replace(counted, schedule=BatchSchedule(batch_size=3))], 2
    )
    reads, expected = images[0].reads[0], contents(photos.epoch(0, stop=2, training=False))

    def reads_here(loader):
        reads.clear()
        assert equal(contents(loader.epoch(0, stop=2, training=False)), expected)
        return bool(reads)

    assert len(expected) == 2
    assert reads_here(counted), "no workers were started"
    epoch = counted.epoch(1)
    first = next(epoch)
    assert reads_here(counted)
    assert equal(contents([first, *epoch]), contents(photos.epoch(1)))
    assert not reads_here(counted)
    rank = replace(counted, rank=1, world_size=2)
    assert len(next(iter(rank.epoch(1))).images) == 2
    assert not reads_here(rank.for_all_ranks())
    reads.clear()
    assert equal(
        contents(validation.epoch(0)),
        contents(replace(photos, pool=None, schedule=validation.schedule).epoch(0)),
    )
    index = [np.arange(12)[::-1], np.array([4, 4])]
    for read, batch in zip(validation.read_images(index), index, strict=True):
        assert torch.equal(read.vectors, photos.visual.read(batch).vectors)
    assert not reads
    counted.close()
    assert len(list(validation.read_images(index))) == 2
    assert reads, "the workers have ended"


def test_batches_are_normalized_after_workers_sent_bytes(photos_with_workers):
    source = photos_with_workers.visual
    normalized = PixelSource(source.images, CONVERTER, RandomCrops(CONVERTER), min_side=32)
    direct = replace(photos_with_workers, pool=None, visual=normalized)
    for batch, expected in zip(photos_with_workers.epoch(1), direct.epoch(1), strict=True):
        assert torch.equal(batch.visual.vectors, expected.visual.vectors)
        assert batch.visual.vectors.dtype == torch.float32
    sent, _ = next(
        photos_with_workers.pool.read(
            [photos_with_workers._request(*np.arange(10).reshape(2, 5), 1, 0, True)]
        )
    )
    assert sent.vectors.dtype == torch.uint8


def test_map_in_order_keeps_order_and_first_error():
    def work(number):
        time.sleep(0.001 * (number % 3))
        if number in (7, 8):
            raise DataError(f"{number}")
        return number

    for threads in (1, 4):
        assert list(map_in_order(work, range(7), threads=threads)) == list(range(7))
        results = []
        with pytest.raises(DataError, match="7"):
            results.extend(map_in_order(work, range(100), threads=threads))
    taken = []
    results = map_in_order(
        str, (taken.append(number) or number for number in range(100)), threads=2
    )
    assert next(results) == "0"
    results.close()
    assert len(taken) < 10


def test_default_number_of_workers(monkeypatch):
    cpu, gpu, shared_memory = torch.device("cpu"), torch.device("cuda"), 2 * MIN_SHARED_MEMORY
    monkeypatch.setattr(workers_module, "cpu_cores", lambda: 8)
    monkeypatch.setattr(workers_module.os.path, "isdir", lambda path: True)
    monkeypatch.setattr(
        workers_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=shared_memory)
    )
    assert (
        choose_workers(-1, MIN_IMAGES_FOR_WORKERS, has_gpu=False)
        == choose_readers(None, gpu, MIN_IMAGES_FOR_WORKERS)
        == 8
    )
    assert (
        choose_workers(-1, MIN_IMAGES_FOR_WORKERS - 1, has_gpu=True)
        == choose_readers(None, gpu, MIN_IMAGES_FOR_WORKERS - 1)
        == 0
    )
    assert choose_readers(None, cpu, 10**6) == 0
    assert choose_workers(3, 0, has_gpu=False) == choose_readers(3, cpu, 0) == 3
    assert choose_workers(0, 10**6, has_gpu=True) == choose_readers(0, gpu, 10**6) == 0
    with pytest.raises(VisavisError, match=r"workers: expected an integer >= 0, got -1"):
        choose_readers(-1, cpu, 10**6)
    shared_memory = MIN_SHARED_MEMORY - 1
    assert choose_workers(-1, 10**6, has_gpu=True) == 0
    shared_memory = MIN_SHARED_MEMORY
    monkeypatch.setattr(workers_module, "cpu_cores", lambda: 2)
    assert (choose_workers(-1, 10**6, has_gpu=False), choose_workers(-1, 10**6, has_gpu=True)) == (
        0,
        2,
    )


def processes_of_session(number: int) -> list[str]:
    """Processes that a command has started and that are still running."""
    states = list[list[str]]()
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            states.append(Path(stat).read_text().rpartition(")")[2].split())
    return [state for state, _, _, session, *_ in states if int(session) == number and state != "Z"]


@posix
@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_stop_signal_ends_training_and_workers(tmp_path, stop):
    """SIGTERM to the whole process group, as job schedulers and terminals send it. SIGKILL to the
    training alone.
    """
    random = np.random.default_rng(0)
    for i in range(40):
        Pillow.fromarray(random.integers(0, 255, (60, 80, 3), np.uint8)).save(tmp_path / f"{i}.jpg")
    splits = ["train"] * 28 + ["val"] * 6 + ["test"] * 6
    lines = [
        json.dumps({"filename": f"{i}.jpg", "caption": f"photo {i % 4} of {i % 3}", "split": s})
        for i, s in enumerate(splits)
    ]
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    run, settings = (
        tmp_path / "run",
        [
            "training.batch_size=8",
            "training.threads=1",
            "phases.0.epochs=30",
            "training.checkpoint_s=0",
        ],
    )
    command = Command(
        tmp_path / "output",
        "train",
        "photos/pixels-words",
        *settings,
        "training.workers=2",
        "--data",
        tmp_path,
        "--out",
        run,
    )
    deadline = time.monotonic() + 60
    while (
        not list(run.glob("checkpoint/*[1-9]*"))
        and not command.ended
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    (os.kill if stop == signal.SIGKILL else os.killpg)(command.process.pid, stop)
    code = command.wait(60)
    deadline = time.monotonic() + 20
    while processes_of_session(command.process.pid):
        assert time.monotonic() < deadline, "a worker outlives the training"
        time.sleep(0.05)
    if stop == signal.SIGKILL:
        return
    assert code == 128 + signal.SIGTERM, command.output_text
    assert re.search(rf"visavis train --resume {re.escape(str(run))}\n", command.output_text)
    assert "Traceback" not in command.output_text


@posix
@pytest.mark.slow
def test_killed_program_with_workers_prints_no_warning():
    """Its own interpreter, because a process of the test server shares the resource tracker of the
    server.
    """
    program = (
        "import os, signal\n"
        "from visavis.data.workers import WorkerPool\n"
        "for batch in WorkerPool([abs], 1).read([-1, -2]):\n"
        "    print('read', batch, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The output ends when the tracker has ended, which removes the semaphores last.
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGKILL, "read 1\n", "")


def test_reduced_decoding_keeps_modes_and_orientation(tmp_path):
    smooth = np.random.default_rng(0).integers(0, 255, (6, 8, 3), np.uint8)
    photo = Pillow.fromarray(smooth).resize((640, 480), Pillow.Resampling.BICUBIC)
    exif = Pillow.Exif()
    exif[0x0112] = 6
    variants = {
        "gray": (photo.convert("L"), {}),
        "cmyk": (photo.convert("CMYK"), {}),
        "rotated": (photo, {"exif": exif}),
    }
    variants["progressive"] = (photo, {"progressive": True})
    for name, (image, options) in variants.items():
        image.save(tmp_path / name, "JPEG", quality=95, **options)
        content = (tmp_path / name).read_bytes()
        full, reduced = decode_image(content, name), decode_image(content, name, min_side=100)
        assert reduced.mode == "RGB"
        assert reduced.size == (full.width // 4, full.height // 4)
        pixels = [
            np.asarray(part.resize((32, 32), Pillow.Resampling.BOX), dtype=float)
            for part in (full, reduced)
        ]
        assert np.abs(pixels[0] - pixels[1]).mean() < 2, name


@pytest.mark.slow
def test_training_with_workers_equals_training_without(tmp_path, monkeypatch):
    """Workers read the batches and all validations after the first, also those within an epoch."""
    scenes = visavis.data_scenes(tmp_path / "scenes", num_train=16, num_val=6, num_test=6, size=48)
    recipe = {
        "training.batch_size": 4,
        "training.evaluate_every": 3,
        "training.threads": 1,
        "phases.0.epochs": 2,
    }
    logs, read_batch, validations_before_read = [], BatchReader.__call__, {0: [], 1: []}
    for workers in (0, 1):
        log = tmp_path / f"{workers}" / "metrics.jsonl"

        def read_in_training_process(reader, request, workers=workers, log=log):
            validations_before_read[workers].append(
                len(log.read_text().splitlines()) if log.exists() else 0
            )
            return read_batch(reader, request)

        monkeypatch.setattr(BatchReader, "__call__", read_in_training_process)
        visavis.train(
            "photos/pixels-words",
            data=scenes,
            out=log.parent,
            overrides=recipe | {"training.workers": workers},
        )
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        for row in rows:
            del row["time"]
            # The start of a worker counts, which takes seconds without a fork server.
            with contextlib.suppress(ValueError):
                row["health"].get("alerts", []).remove("waiting for data")
        logs.append(rows)
    assert logs[0] == logs[1]
    assert set(validations_before_read[0]) == set(range(len(logs[0]) + 1))
    assert set(validations_before_read[1]) == {0, len(logs[1])}
