"""Capture times: EXIF of photos in the forms that cameras write, damaged EXIF, and files of Google
Takeout.
"""

from __future__ import annotations

import json
import random
import re
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image
from tests import photos
from tests.inputs.cases import Case, Kind
from tests.mutation import ODD, changed, damaged

from visavis.data.capture_time import READ_TIME, exif_times, takeout_times
from visavis.data.images import decode_image, read_times

TIME_TAGS = (36867, 36868, 306)
ODD_TAGS: list[Any] = [
    *(
        b"2024:05:31 18:30:15\0\0",
        b"\xff\xfe",
        b"",
        "",
        0,
        7,
        (1, 2),
        (0,),
        2**31,
        "\0",
        "a" * 70_000,
    ),
    *(
        "2024:05:31 18:30:15\0garbage",
        "２０２４:05:31",
        "٢٠٢٤:05:31 01:02:03",
        "2024:05:31 18:30:15+99:99",
    ),
]


def written_time(rng: random.Random) -> tuple[str, str, str, str]:
    """A time as a camera writes it, its fraction and offset, and the form in which it is read."""
    try:
        time = datetime(  # noqa: DTZ001 - EXIF has no time zone
            rng.choice([1826, 1900, 1970, 1999, 2024, 2038, 9999]),
            rng.randint(1, 12),
            rng.choice([1, 15, 28, 29, 30, 31]),
            rng.randint(0, 23),
            rng.randint(0, 59),
            rng.randint(0, 59),
        )
    except ValueError:
        time = datetime(2024, 2, 29, 23, 59, 59)  # noqa: DTZ001
    minutes = rng.choice([None, None, 0, 60, -60, 330, 345, 840, -720])
    offset = ""
    if minutes is not None:
        sign = "-" if minutes < 0 else "+"
        offset = f"{sign}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
        time = time.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    digits = rng.choice(["", "", "5", "123", "123456", "000"])
    expected = time.replace(microsecond=int(f"{digits:0<6}"[:6]) if digits else 0)
    separator = rng.choice([":", ":", ":", "-", "/", "."])
    day = time.strftime(f"%Y{separator}%m{separator}%d").rjust(10, "0")
    clock = time.strftime("%H:%M:%S")
    if rng.random() < 0.1:
        clock = time.strftime("%I:%M:%S %p")
    text = f"{day} {clock}"
    if offset and rng.random() < 0.3:
        text, offset = f"{text}{offset}", ""
    return text, digits, offset, expected.isoformat(timespec="milliseconds")


WRONG_TIMES = (
    *("2024:13:31 18:30:15", "2024:02:30 00:00:00", "2024:05:31 25:00:00", "2024:05:31 18:61:15"),
    *("31/05/2019 18:30", "yesterday 7", "24:05:31 18:30:15", "2024:05:31 18:30:15+23:00"),
    *("2019:05:31 13:30:15 PM", "1e9", "2024:05:31T", "0x7e8:05:31"),
)


def read_photo(content: bytes) -> dict[str, str]:
    """Times by the header. The decoded image must have the same ones."""
    times = read_times(content, "photo.jpg")
    info = decode_image(content, "photo.jpg").info
    decoded = {key: info[key] for key in ("taken", "unreadable_time") if key in info}
    assert decoded == times, f"the decoded image has {decoded}, the header {times}"
    return times


def check_form(times: dict[str, str]) -> str:
    """A time has the form in which an index keeps times."""
    if "taken" in times and not re.fullmatch(READ_TIME, times["taken"]):
        return f"taken has another form: {times}"
    return "" if set(times) <= {"taken", "unreadable_time"} and len(times) < 2 else f"got {times}"


def check_equal(expected: dict[str, str], times: dict[str, str]) -> str:
    """The times are exactly these."""
    return "" if times == expected else f"expected {expected}, got {times}"


def make_exif(rng: random.Random, folder: Path, _: Any) -> Case:
    """A JPEG with a time."""
    tags = Image.Exif()
    inside = tags.get_ifd(ExifTags.IFD.Exif)
    known: Any = "right"
    way, note = rng.random(), "valid"
    check: Any
    if way < 0.4:
        text, digits, offset, expected = written_time(rng)
        number = rng.randrange(2)
        inside[TIME_TAGS[number]] = text
        if digits:
            inside[(37521, 37522)[number]] = digits
        if offset:
            inside[(36881, 36882)[number]] = offset
        check = partial(check_equal, {"taken": expected})
    elif way < 0.6:
        note, text = "wrong time", rng.choice(WRONG_TIMES)
        # The result reports the text.
        inside[36867] = text
        check = partial(check_equal, {"unreadable_time": text})
    else:
        known, note, check = "unknown", "odd tags", check_form
        for tag in (*TIME_TAGS, 37521, 36881):
            if rng.random() < 0.5:
                holder = tags if tag == 306 else inside
                holder[tag] = rng.choice(ODD_TAGS)
        if rng.random() < 0.3:
            gps = tags.get_ifd(ExifTags.IFD.GPSInfo)
            gps[29] = rng.choice(["2024:05:31", "0000:00:00", "x", b"2024:05:31"])
            gps[7] = rng.choice(
                [(1.0, 2.0, 3.0), (25.0, 61.0, 61.0), (1e300, 0.0, 0.0), "x", (1.0,)]
            )
    try:
        exif = tags.tobytes()
    except Exception:  # noqa: BLE001 - Pillow does not write some odd values
        return Case(partial(exif_times, tags), "unknown", check_form, "EXIF in memory")
    if way >= 0.75:
        note = "damaged EXIF"
        exif = exif[:6] + damaged(exif[6:], rng)
    content = photos.encode(photos.scene(0, (16, 12)), "JPEG", exif=exif[:60_000])
    (folder / "photo.jpg").write_bytes(content)
    return Case(partial(read_photo, content), known, check, note)


def make_takeout(rng: random.Random, folder: Path, _: Any) -> Case:
    """The JSON file of a photo in a Google Takeout."""
    seconds = rng.choice([1717173015, 0, -1, 10**9, rng.randrange(2**31)])
    content: dict[str, Any] = {
        "title": "a.jpg",
        "photoTakenTime": {"timestamp": str(seconds), "formatted": "31.05.2024, 16:30:15 UTC"},
    }
    known: Any = "right"
    text = json.dumps(content).encode()

    def check(times: dict[str, str]) -> str:
        taken = datetime.fromisoformat(times.get("taken", "0001-01-01T00:00+00:00"))
        return "" if taken.timestamp() == seconds else f"expected {seconds}, got {times}"

    note = "valid"
    result: Any = check
    way = rng.random()
    if way > 0.3:
        known, note, result = "unknown", "damaged", check_form
        if way < 0.5:
            content["photoTakenTime"]["timestamp"] = rng.choice(ODD)
            text = json.dumps(content, default=str).encode()
        elif way < 0.7:
            text = json.dumps(changed(content, rng), default=str).encode()
        else:
            text = damaged(text, rng)
    (folder / "a.jpg.json").write_bytes(text)
    return Case(partial(takeout_times, text), known, result, note)


KINDS = [
    Kind("EXIF times", make_exif, inputs=1000),
    Kind("Takeout times", make_takeout, inputs=500),
]
