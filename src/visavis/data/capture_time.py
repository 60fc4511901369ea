"""Times at which photos and clips were taken, from their metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from PIL import ExifTags, Image

TAKEN = "taken"
"""Name of the capture time in the metadata of an item."""
# Tags of a time, its fraction of a second, and its offset to UTC. The last one is the time of the
# last change, which cameras write, too.
_TAGS = (
    (
        ExifTags.Base.DateTimeOriginal,
        ExifTags.Base.SubsecTimeOriginal,
        ExifTags.Base.OffsetTimeOriginal,
    ),
    (
        ExifTags.Base.DateTimeDigitized,
        ExifTags.Base.SubsecTimeDigitized,
        ExifTags.Base.OffsetTimeDigitized,
    ),
    (ExifTags.Base.DateTime, ExifTags.Base.SubsecTime, ExifTags.Base.OffsetTime),
)
_TIME = re.compile(r"(\d{4})[:-](\d\d)[:-](\d\d)[ T](\d\d):(\d\d):(\d\d)")
READ_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}[+-][0-9]{2}:[0-9]{2}"
"""Pattern of the times that are read from files. Times of a table have another form."""
_OWN_FORM = re.compile(READ_TIME)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def exif_time(exif: Image.Exif) -> str:
    """Read the capture time of a photo.

    Args:
        exif: Its EXIF.

    Returns:
        ISO time in milliseconds with its offset to UTC. The time of a camera that does not record
        the offset is taken as local time. Empty if there is none, or it is damaged.

    Example:
        >>> exif = Image.Exif()
        >>> exif.get_ifd(ExifTags.IFD.Exif).update({36867: "2024:05:31 18:30:15", 36881: "+02:00"})
        >>> exif_time(exif)
        '2024-05-31T18:30:15.000+02:00'
    """
    try:
        tags: dict[int, Any] = {**exif, **exif.get_ifd(ExifTags.IFD.Exif)}
    except Exception:  # noqa: BLE001 - damaged metadata raises errors of every kind
        return ""
    for time, fraction, offset in _TAGS:
        if (match := _TIME.match(str(tags.get(time, "")).strip("\0 "))) is None:
            continue
        digits = re.match(r"\d*", str(tags.get(fraction, "")).strip("\0 "))
        milliseconds = f"{digits[0] if digits else '':0<3}"[:3]
        zone = re.match(r"[+-]\d\d:\d\d|Z", str(tags.get(offset, "")).strip("\0 "))
        year, month, day, *clock = match.groups()
        text = f"{year}-{month}-{day}T{':'.join(clock)}.{milliseconds}{zone[0] if zone else ''}"
        if normalized := normalize_time(text):
            return normalized
    return ""


def normalize_time(text: str) -> str:
    """Convert an ISO time to the form of ``exif_time``.

    Args:
        text: A date or time. Without an offset to UTC, it is local.

    Returns:
        The time. Empty if the text is not a time.
    """
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            time = time.astimezone()
        # Offsets of old dates have seconds.
        offset = time.utcoffset()
        assert offset is not None
        if offset.total_seconds() % 60:
            time = time.astimezone(UTC)
        return time.isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return ""


def time_to_ns(text: str) -> int | None:
    """Convert the capture time of an item.

    Args:
        text: A time as ``exif_time`` returns it, or any ISO time of a user.

    Returns:
        Time in ns since the epoch. None if the text is not a time.

    Example:
        >>> time_to_ns("1970-01-01T01:00:01.500+01:00")
        1500000000
    """
    if not (normalized := text if _OWN_FORM.fullmatch(text) else normalize_time(text)):
        return None
    try:
        elapsed = datetime.fromisoformat(normalized) - _EPOCH
    except (ValueError, OverflowError):
        return None
    return ((elapsed.days * 86_400 + elapsed.seconds) * 10**6 + elapsed.microseconds) * 1000


def read_time(metadata: Mapping[str, str]) -> str:
    """Return the capture time in the metadata of an item, if it came from its file and not from a
    table of the user.

    Args:
        metadata: Metadata of an item.

    Returns:
        The time. Empty if there is none.
    """
    time = metadata.get(TAKEN, "")
    return time if _OWN_FORM.fullmatch(time) else ""
