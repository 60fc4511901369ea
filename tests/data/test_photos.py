"""Photos of phones and cameras: HEIC, JPEG XL and raw files, color profiles, and decoders that
crash.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import random
import re
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visavis.core.errors import DataError, MissingExtra
from visavis.data import photo_decoder, photo_worker
from visavis.data.capture_time import exif_times, parse_time, time_us
from visavis.data.file_names import LAST_CASED, any_case_expression, fold_case
from visavis.data.formats.image_files import Exclusion
from visavis.data.images import (
    ImageError,
    convert_image,
    decode_image,
    image_size,
    make_thumbnail,
    read_times,
    upright_size,
)

from .. import photos as make
from ..retrieval.device_photos import device_photos

pytest.importorskip("pillow_heif", reason="photos need: pip install 'visavis[photos]'")
pytest.importorskip("pillow_jxl", reason="photos need: pip install 'visavis[photos]'")
pytest.importorskip("rawpy", reason="photos need: pip install 'visavis[photos]'")

KINDS = ("HEIF", "JPEG XL", "camera raw")


@pytest.fixture(scope="module")
def devices(tmp_path_factory):
    return device_photos(tmp_path_factory.mktemp("devices"))


def blocks(image):
    """Mean colors of 20 x 15 blocks, so that lossy encoders do not matter."""
    return np.asarray(image.resize((20, 15), Image.Resampling.BOX), np.float64)


def encoded(kind, size=(96, 64), seed=0):
    """A small photo of a format."""
    image = make.scene(seed, size)
    if kind == "camera raw":
        return make.encode_dng(image)
    return make.encode(image, {"HEIF": "HEIF", "JPEG XL": "JXL"}.get(kind, kind))


def current_process():
    """The process that decodes the next photo of this thread."""
    return photo_decoder._processes_of(os.getpid()).idle.queue[-1].process


@pytest.mark.parametrize("group", ["turned", "p3", "adobe", "depths", "cmyk", "raw", "pairs"])
def test_device_photo_is_upright_with_right_colors(devices, group):
    chosen = [file for file in devices if file.name.startswith(group) and file.expected]
    assert chosen and len(devices) >= 60
    for file in chosen:
        image = decode_image(file.content, file.name)
        assert image.mode == "RGB" and image.size == file.expected.size, file.name
        # 2 % of 255 levels.
        difference = np.abs(blocks(image) - blocks(file.expected)).max()
        assert difference <= 0.02 * 255, (file.name, difference)
        assert image.info.get("taken", "") == file.time, file.name


def test_device_photo_header_agrees_with_decoding(devices):
    for file in devices:
        if file.expected is not None and file.name.startswith(("raw", "turned/5", "depths")):
            assert upright_size(file.content, file.name) == file.expected.size
            assert read_times(file.content, file.name).get("taken", "") == file.time


@pytest.mark.parametrize("kind", KINDS)
def test_reduced_photo_keeps_the_shorter_side(kind):
    content = encoded(kind, (800, 600))
    full = decode_image(content, "photo")
    small = decode_image(content, "photo", min_side=70)
    assert full.size == image_size(content, "photo") == upright_size(content, "photo")
    assert 70 <= min(small.size) < 140
    assert np.abs(blocks(full) - blocks(small)).max() < 4


def test_second_conversion_changes_nothing():
    profile = make.rgb_profile("Display P3", make.DISPLAY_P3, 2.2)
    image = make.convert_colors(make.scene(3), make.DISPLAY_P3, 2.2)
    once = decode_image(make.encode(image, "PNG", icc_profile=profile), "photo")
    assert np.array_equal(convert_image(once, "photo"), once)
    assert not np.array_equal(once, image)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "I;16"])
def test_profile_that_does_not_fit_is_ignored(mode):
    """Damaged bytes, and a profile of another color space."""
    scene = make.scene(4)
    image = scene.quantize(64) if mode == "P" else scene.convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    profile = make.gray_profile("gray", 1.0) if mode == "CMYK" else make.cmyk_profile()
    plain = decode_image(make.encode(image, "TIFF"), "photo")
    for unusable in (b"no profile", profile, profile[:200]):
        content = make.encode(image, "TIFF", icc_profile=unusable)
        assert np.array_equal(decode_image(content, "photo"), plain)


def test_srgb_profile_changes_no_value():
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = make.scene(5)
    content = make.encode(image, "PNG", icc_profile=profile)
    assert np.array_equal(decode_image(content, "photo"), image)


def test_thumbnail_of_a_photo_has_srgb_colors_and_no_metadata():
    image = make.convert_colors(make.scene(6), make.DISPLAY_P3, 2.2)
    content = make.encode(
        image,
        "HEIF",
        quality=95,
        exif=make.exif(1, "2024:05:31 18:30:15"),
        icc_profile=make.rgb_profile("Display P3", make.DISPLAY_P3, 2.2),
    )
    thumbnail = make_thumbnail(content, "photo", 80)
    assert thumbnail.size == (80, 60) and not thumbnail.info
    assert np.abs(blocks(thumbnail) - blocks(make.scene(6))).max() < 0.02 * 255


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ({36867: "2024:05:31 18:30:15", 36881: "+02:00"}, "2024-05-31T18:30:15.000+02:00"),
        ({36867: "2024:05:31 18:30:15", 36881: "Z", 37521: "5"}, "2024-05-31T18:30:15.500+00:00"),
        # A digitized slide, and a first tag without a date.
        ({36867: "0000:00:00 00:00:00", 36868: "1999:01:02 03:04:05", 36882: "-05:30"}, "1999-01-02T03:04:05.000-05:30"),
        ({36867: "9999:12:31 23:59:59", 36881: "-12:00"}, "9999-12-31T23:59:59.000-12:00"),
        ({36867: "2019-05-31T18:30:15+02:00"}, "2019-05-31T18:30:15.000+02:00"),
        ({36867: "2019:05:31 18:30:15Z"}, "2019-05-31T18:30:15.000+00:00"),
        ({36867: "2019:05:31 18:30:15", 36881: "+0200"}, "2019-05-31T18:30:15.000+02:00"),
        ({36867: "2019:05:31 18:30:15", 36881: "-3"}, "2019-05-31T18:30:15.000-03:00"),
        ({36867: "2019:05:31 18:30:15", 36881: "   :  "}, "2019-05-31T18:30:15.000"),
        ({36867: "2019:05:31 18:30:15", 36881: "+99:00"}, "2019-05-31T18:30:15.000"),
        ({36867: "2019:05:31 18:30:15", 36881: "+14:15"}, "2019-05-31T18:30:15.000"),
        ({36867: "2019:05:31 18:30:15", 36881: "-14:15"}, "2019-05-31T18:30:15.000"),
        ({36867: "2019:05:31 18:30:15", 36881: "+05:75"}, "2019-05-31T18:30:15.000"),
        ({36867: "2019:05:31 06:30:15 PM"}, "2019-05-31T18:30:15.000"),
        ({36867: "2019:05:31 12:30:15 am"}, "2019-05-31T00:30:15.000"),
        ({36867: "2019/05/31 18:30:15.25"}, "2019-05-31T18:30:15.250"),
        ({36867: "2019.05.31 9:05:07"}, "2019-05-31T09:05:07.000"),
        ({36867: b"2019:05:31 18:30:15\0"}, "2019-05-31T18:30:15.000"),
        ({36867: "2019:05:31"}, "2019-05-31T00:00:00.000"),
        ({36867: "2024:05:31 18:30:15"}, "2024-05-31T18:30:15.000"),
        ({36867: "    :  :     :  :  "}, ""),
        ({36867: "0000:00:00 00:00:00"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_capture_time_of_exif(tags, expected):
    exif = Image.Exif()
    exif.get_ifd(34665).update(tags)
    assert exif_times(exif) == ({"taken": expected} if expected else {})


@pytest.mark.parametrize(
    "text",
    ["2024:13:31 18:30:15", "31/05/2019 18:30", "2019:05:31 13:30:15 PM", "2019:05:31 25:00:00", "2019:05:31 18:30:15+23:00", "x7"],
)  # fmt: skip
def test_unreadable_capture_time_is_kept_as_text(text):
    exif = Image.Exif()
    exif.get_ifd(34665)[36867] = text
    assert exif_times(exif) == {"unreadable_time": text}
    # Another tag counts instead.
    exif.get_ifd(34665)[36868] = "2019:05:31 18:30:15"
    assert exif_times(exif) == {"taken": "2019-05-31T18:30:15.000"}


def test_capture_time_in_microseconds():
    def instant(text):
        return time_us(parse_time(text), clock=False)

    assert instant("1970-01-02T00:00:00.001+00:00") == 86_400_001_000
    assert instant("1969-12-31T23:59:59.000+00:00") == -(10**6)
    assert instant("2024-05-31T02:00:00.000+02:00") == instant("2024-05-31T00:00:00Z")
    assert time_us(parse_time("1970-01-01T02:00+02:00"), clock=True) == 7200 * 10**6
    assert parse_time("last summer") is None and parse_time("") is None


@pytest.mark.parametrize("form", ["2024-05-31T18:30:15{}", "2024:05:31 6:30:15 PM {}"])
def test_offset_of_a_time_is_that_of_a_place(form):
    for offset in ("+14:00", "-14:00", "+05:45", "+1400", "Z"):
        assert parse_time(form.format(offset)).utcoffset() is not None, offset
    for offset in ("+14:01", "-14:01", "+23:00", "+25:00", "-2300", "+05:75"):
        assert parse_time(form.format(offset)) is None, offset


def test_letters_of_both_cases_are_equal():
    for letter in map(chr, range(LAST_CASED + 1)):
        folded = fold_case(letter)
        assert len(folded) == 1 and fold_case(folded) == folded
        if folded != letter:
            assert re.fullmatch(any_case_expression(folded), letter)
    others = "".join(map(chr, range(LAST_CASED + 1, sys.maxunicode + 1)))
    assert fold_case(others) == others
    for one, other in (("ß", "ẞ"), ("K", "k"), ("ſ", "S"), ("ς", "Σ"), ("Å", "å"), ("ǅ", "ǆ")):
        assert fold_case(one) == fold_case(other)
    for one, other in (("ß", "s"), ("İ", "i"), ("ı", "i"), ("é", "e")):
        assert fold_case(one) != fold_case(other)
    assert Exclusion(("KELVIN*",)).covers("photos/Kelvin.jpg")
    assert not Exclusion(("i*",)).covers("İstanbul.jpg")


def test_jpeg_xl_header_of_all_ratios():
    """Headers written by hand: bits of the size, least significant first."""
    ratios = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}

    def header(fields, orientation):
        fields = [
            *fields,
            *([(1, 1)] if orientation == 1 else [(0, 1), (1, 1), (orientation - 1, 3)]),
        ]
        bits = position = 0
        for value, count in fields:
            bits |= value << position
            position += count
        return b"\xff\x0a" + bits.to_bytes(40, "little")

    for number, (width, height) in ratios.items():
        small = header([(1, 1), (14, 5), (number, 3)], 1)
        assert photo_worker._read_jxl_header(small) == ((120 * width // height, 120), 1)
    for selector, count, height in ((0, 9, 500), (1, 13, 8000), (2, 18, 200_000), (3, 30, 2**30)):
        size = [(0, 1), (selector, 2), (height - 1, count), (0, 3), (0, 2), (99, 9)]
        assert photo_worker._read_jxl_header(header(size, 6)) == ((100, height), 6)
    box = header([(1, 1), (14, 5), (1, 3)], 1)
    container = struct.pack(">I4s4xI4s4x", 12, b"JXL ", 12, b"ftyp")
    assert photo_worker._read_jxl_header(container + struct.pack(">I4s", 0, b"jxlc") + box)[0] == (
        120,
        120,
    )
    part = struct.pack(">I4sI", 0, b"jxlp", 0) + box
    assert photo_worker._read_jxl_header(container + part)[0] == (120, 120)


@pytest.mark.parametrize("kind", KINDS)
def test_huge_photo_is_rejected_by_its_header(kind):
    if kind == "JPEG XL":
        # 2^18 x 2^18 pixels, whose bytes would not fit into any memory.
        bits = 2 << 1 | (2**18 - 1) << 3 | 1 << 21 | 1 << 24
        content = b"\xff\x0a" + bits.to_bytes(32, "little")
    else:
        content = bytearray(encoded(kind))
        if kind == "HEIF":
            places = [
                place for place in range(len(content)) if content[place : place + 4] == b"ispe"
            ]
            assert places
            for place in places:
                struct.pack_into(">II", content, place + 8, 16_000, 16_000)
        else:
            for tag in (256, 257):
                place = bytes(content).rindex(struct.pack("<HHI", tag, 4, 1))
                struct.pack_into("<I", content, place + 8, 40_000)
    with pytest.raises(ImageError) as caught:
        decode_image(bytes(content), "photo")
    if kind != "camera raw":
        assert caught.value.kind == "decompression bomb"
        assert "expected at most 64 million" in str(caught.value)


def test_photo_formats_are_found_by_content():
    assert photo_decoder.photo_format(encoded("HEIF"), "photo.jpg") == "HEIF"
    assert photo_decoder.photo_format(encoded("JPEG XL"), "photo") == "JPEG XL"
    assert photo_decoder.photo_format(encoded("camera raw"), "photo.tif") == "camera raw"
    assert photo_decoder.photo_format(make.encode(make.scene(), "TIFF"), "scan.tif") is None
    assert photo_decoder.photo_format(make.encode(make.scene(), "AVIF"), "photo.heic") is None
    assert photo_decoder.photo_format(make.encode(make.scene(), "JPEG"), "photo.dng") is None
    for head in (b"IIU\0\x18\0\0\0", b"IIRO\x08\0\0\0", b"FUJIFILMCCD-RAW ", b"\0\0\0\x18ftypcrx "):
        assert photo_decoder.photo_format(head.ljust(64, b"\0"), "photo") == "camera raw"


@pytest.mark.parametrize("kind", KINDS)
def test_missing_decoder_names_the_command(kind, monkeypatch):
    package, module = photo_decoder.PACKAGES[kind]
    content = encoded(kind)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"pip install 'visavis\[photos\]'") as caught:
        decode_image(content, "photo.x")
    assert package in str(caught.value) and "photo.x" in str(caught.value)


@pytest.mark.slow
def test_pillow_formats_start_no_process():
    script = (
        "import sys; from visavis.data.images import decode_image; from visavis.data import photo_decoder as d;"
        "decode_image(sys.stdin.buffer.read(), 'photo.jpg');"
        "assert not d._processes_of.cache_info().currsize;"
        "assert not {'pillow_heif', 'rawpy', 'pillow_jxl'} & set(sys.modules)"
    )
    content = make.encode(make.scene(), "JPEG")
    subprocess.run([sys.executable, "-c", script], input=content, check=True)


def test_photo_survives_the_death_of_its_decoder():
    expected = decode_image(encoded("HEIF"), "photo")
    process = current_process()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert np.array_equal(decode_image(encoded("HEIF"), "photo"), expected)
    assert current_process() is not process


def test_photo_that_crashes_its_decoder_is_damaged(monkeypatch, tmp_path):
    """A decoder that ends on one file: a program that stands for a crash in native code."""
    script = tmp_path / "photo_worker.py"
    source = Path(photo_worker.__file__).read_text()
    crash = "if b'crash' in content: os.abort()\n    "
    script.write_text(source.replace("try:\n        photo =", f"{crash}try:\n        photo =", 1))
    monkeypatch.setattr(photo_decoder, "__file__", str(tmp_path / "photo_decoder.py"))
    photo_decoder._processes_of(os.getpid()).close()
    try:
        good = encoded("JPEG XL")
        decode_image(good, "photo")
        with pytest.raises(ImageError, match=r"the decoder has crashed \(exit code -6\)"):
            decode_image(good + b"crash", "photo")
        decode_image(good, "photo")
    finally:
        photo_decoder._processes_of(os.getpid()).close()


def test_photo_that_takes_too_long_is_not_damaged(monkeypatch):
    monkeypatch.setattr(photo_decoder, "MAX_SECONDS", 0.02)
    photo_decoder._processes_of(os.getpid()).close()
    # Starting takes longer.
    with pytest.raises(DataError, match="decoding takes longer than") as caught:
        decode_image(encoded("HEIF"), "photo")
    assert not isinstance(caught.value, ImageError)
    monkeypatch.undo()
    assert decode_image(encoded("HEIF"), "photo").size == (96, 64)


@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux limits the memory of a process")
def test_photo_that_takes_too_much_memory_fails_alone(monkeypatch):
    monkeypatch.setattr(photo_decoder, "MAX_BYTES", 80 * 2**20)
    photo_decoder._processes_of(os.getpid()).close()
    large = make.encode(make.scene(0, (3000, 2000)), "JXL", effort=1)
    try:
        with pytest.raises(DataError):
            decode_image(large, "photo")
        assert decode_image(encoded("JPEG XL"), "photo").size == (96, 64)
    finally:
        photo_decoder._processes_of(os.getpid()).close()
    monkeypatch.undo()
    assert decode_image(large, "photo", min_side=64).height >= 64


@pytest.mark.slow
def test_decoders_end_with_their_program():
    script = (
        "import os, sys; from visavis.data.images import decode_image; from visavis.data import photo_decoder as d;"
        "decode_image(sys.stdin.buffer.read(), 'photo.heic');"
        "print(d._processes_of(os.getpid()).idle.queue[-1].process.pid, flush=True); os._exit(1)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=encoded("HEIF"), capture_output=True, check=False)
    pid = int(done.stdout)
    ended = threading.Event()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            ended.set()
            break
        ended.wait(0.1)
    # A process that nobody waits for stays as a zombie where there is no init process.
    assert (
        ended.is_set()
        or b"Z"
        in subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False
        ).stdout
    )


def damaged_photos(content, count, seed=0):
    """Copies that are cut off, or have some bits flipped."""
    generator = random.Random(seed)
    for number in range(count):
        damaged = bytearray(content)
        if number % 2:
            for _ in range(generator.choice((1, 4, 30))):
                damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        else:
            del damaged[generator.randrange(1, len(damaged)) :]
        yield bytes(damaged)


@pytest.mark.parametrize("kind", [*KINDS, "AVIF"])
def test_damaged_photos_are_decoded_or_have_a_reason(kind):
    results = Counter()
    for number, content in enumerate(damaged_photos(encoded(kind), 10)):
        try:
            decode_image(content, f"{number}.x", allow_animated=True)
        except ImageError as error:
            results["reason"] += f"image {number}.x " in str(error)
        else:
            results["decoded"] += 1
    assert results["reason"] >= 4 and results.total() == 10


def test_versions_of_decoders_are_recorded():
    from visavis.data.images import decoder_version, readable_formats

    assert set(KINDS) <= set(readable_formats())
    for package, _ in photo_decoder.PACKAGES.values():
        assert f"{package} {importlib.metadata.version(package)}" in decoder_version()


def test_program_ends_with_its_input():
    """Without a request, and with a part of one."""
    for content in (b"", b"\0\0\0\x10{"):
        done = subprocess.run(
            [sys.executable, "-P", photo_worker.__file__, str(2**32)],
            input=content,
            capture_output=True,
            check=True,
        )
        assert done.stdout == b""


def test_fields_of_the_reply_are_limited():
    header = b'{"parts": [99999999999]}'
    with pytest.raises(ValueError):
        photo_decoder._read_reply(io.BytesIO(struct.pack(">I", len(header)) + header), 1000)
    with pytest.raises(ValueError):
        photo_decoder._read_reply(io.BytesIO(b"\xff\xff\xff\xff"), 1000)
