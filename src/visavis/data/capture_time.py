"""Times at which photos and clips were taken, from their metadata.

A time is compared by the clock at the place where the photo was taken, because people mean the day
on the photo. Microseconds in int64 hold each year of the calendar, which nanoseconds do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Exif

TAKEN = "taken"
"""Name of the capture time in the metadata of an item."""
UNREADABLE_TIME = "unreadable_time"
"""Name of the text in place of a capture time in the metadata of an item."""
# Numbers of the EXIF tags of a time, its fraction of a second, and its offset to UTC: the original,
# the digitized one, and the time of the last change, which cameras write, too. ExifTags has the
# names, but a search compares times without Pillow.
_TAGS = ((36867, 37521, 36881), (36868, 37522, 36882), (306, 37520, 36880))
_OFFSET = r"Z|[+-]\d\d?(?::?\d\d)?"
# What cameras and programs write, beyond ISO 8601.
_TIME = re.compile(
    r"(?P<year>\d{4})[-:/.](?P<month>\d\d?)[-:/.](?P<day>\d\d?)"
    r"(?:[T ]\s*(?P<hour>\d\d?):(?P<minute>\d\d?)(?::(?P<second>\d\d?)(?:[.,](?P<fraction>\d+))?)?"
    rf"\s*(?P<half>[AP]\.?M\.?)?\s*(?P<offset>{_OFFSET})?)?",
    re.IGNORECASE,
)
READ_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}(?:[+-][0-9]{2}:[0-9]{2})?"
"""Pattern of the times that are read from files. Times of a table have another form."""
_OWN_FORM = re.compile(READ_TIME)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_OFFSET = timedelta(hours=14)
"""Largest offset to UTC of any place, and in ISO 8601 of XML, in both directions."""


def parse_time(text: str) -> datetime | None:
    """Parse a date, or a date and time, of a photo, a table or a user.

    Args:
        text: ISO 8601, or a form that cameras write. ``2024`` and ``2024-05`` are the start of the
            year and the month.

    Returns:
        The time, with a time zone if the text has an offset to UTC. None if the text is not a time,
        or no place has its offset.

    Example:
        >>> parse_time("2024:05:31 06:30:15 PM"), parse_time("2024-05")
        (datetime.datetime(2024, 5, 31, 18, 30, 15), datetime.datetime(2024, 5, 1, 0, 0))
    """
    text = text.strip("\0 ")
    if re.fullmatch(r"\d{4}(-\d\d)?", text):
        text += "-01" if "-" in text else "-01-01"
    # Some versions of Python accept an offset of 60 minutes and more after the hours.
    if re.search(r"[+-]\d\d:?[6-9]\d$", text):
        return None
    with suppress(ValueError):
        time = datetime.fromisoformat(text)
        return time if _is_of_a_place(time.utcoffset()) else None
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    names = ("year", "month", "day", "hour", "minute", "second")
    year, month, day, hour, minute, second = (int(match[name] or 0) for name in names)
    if match["half"]:
        # 12 AM is midnight, 12 PM is noon.
        hour = hour % 12 + 12 * match["half"].upper().startswith("P") if 1 <= hour <= 12 else 24
    microsecond = int(f"{match['fraction'] or '':0<6}"[:6])
    zone = _parse_offset(match["offset"] or "")
    if match["offset"] and zone is None:
        return None
    with suppress(ValueError):
        return datetime(year, month, day, hour, minute, second, microsecond, zone)
    return None


def _parse_offset(text: str) -> timezone | None:
    """Parse an offset to UTC, such as ``+02:00``, ``+0200`` or ``Z``. None: it is not one."""
    match = re.fullmatch(_OFFSET, text.strip("\0 "), re.IGNORECASE)
    if match is None:
        return None
    digits = match[0][1:].replace(":", "")
    hours = int(digits[:-2] if len(digits) > 2 else digits or 0)
    minutes = int(digits[-2:]) if len(digits) > 2 else 0
    sign = -1 if match[0][0] == "-" else 1
    offset = sign * timedelta(hours=hours, minutes=minutes)
    return timezone(offset) if minutes < 60 and _is_of_a_place(offset) else None


def _is_of_a_place(offset: timedelta | None) -> bool:
    """Whether the clock of some place has an offset to UTC. A time may have none."""
    return offset is None or abs(offset) <= MAX_OFFSET


def exif_times(exif: Exif) -> dict[str, str]:
    """Read the capture time of a photo.

    Args:
        exif: Its EXIF.

    Returns:
        The time as ``taken``, see ``format_time``, or as ``unreadable_time`` the text that is not a
        time. Empty if there is neither, also for zeros and spaces of a camera without a set clock.
        The time of a GPS receiver, which is in UTC, counts if there is no other.

    Example:
        >>> from PIL import ExifTags, Image
        >>> exif = Image.Exif()
        >>> exif.get_ifd(ExifTags.IFD.Exif).update({36867: "2024:05:31 18:30:15", 36881: "+0200"})
        >>> exif_times(exif)
        {'taken': '2024-05-31T18:30:15.000+02:00'}
    """
    from PIL import ExifTags

    try:
        tags: dict[int, Any] = {**exif, **exif.get_ifd(ExifTags.IFD.Exif)}
    except Exception:  # noqa: BLE001 - damaged metadata raises errors of every kind
        return {}
    unreadable = ""
    for tag, fraction, offset in _TAGS:
        text = _text(tags.get(tag))
        # Without a date, or with one of zeros.
        if not re.search("[1-9]", text):
            continue
        time = parse_time(text)
        if time is None:
            unreadable = unreadable or text
            continue
        if not time.microsecond and (digits := re.match(r"\d+", _text(tags.get(fraction)))):
            time = time.replace(microsecond=int(f"{digits[0]:0<6}"[:6]))
        if time.tzinfo is None:
            time = time.replace(tzinfo=_parse_offset(_text(tags.get(offset))))
        return {TAKEN: format_time(time)}
    # The time of the GPS receiver, which is in UTC. Damaged metadata raises errors of every kind.
    with suppress(Exception):
        gps = exif.get_ifd(ExifTags.IFD.GPSInfo)
        date = parse_time(_text(gps[ExifTags.GPS.GPSDateStamp]))
        hours, minutes, seconds = map(float, gps[ExifTags.GPS.GPSTimeStamp])
        elapsed = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        if date is not None:
            return {TAKEN: utc_time(date.replace(tzinfo=UTC) + elapsed)}
    return {UNREADABLE_TIME: unreadable} if unreadable else {}


def _text(value: Any) -> str:
    """Text of a tag, which may be stored as bytes."""
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value or "")
    return text.split("\0")[0].strip()


def takeout_times(content: bytes) -> dict[str, str]:
    """Read the capture time in a JSON file that Google Takeout writes for a photo.

    Args:
        content: Content of the file.

    Returns:
        The time, as ``exif_times``. Empty if there is none.

    Example:
        >>> sorted(takeout_times(b'{"photoTakenTime": {"timestamp": "1717173015"}}'))
        ['taken']
    """
    try:
        seconds = int(json.loads(content)["photoTakenTime"]["timestamp"])
        return {TAKEN: utc_time(_EPOCH + timedelta(seconds=seconds))}
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return {}


def format_time(time: datetime) -> str:
    """Format the capture time of a file in ISO form: milliseconds, and the offset to UTC if known."""
    # Offsets of the time before time zones have seconds, or more hours. The clock is kept.
    offset = time.utcoffset()
    if offset is not None and (offset % timedelta(minutes=1) or not _is_of_a_place(offset)):
        time = time.replace(tzinfo=None)
    return time.isoformat(timespec="milliseconds")


def utc_time(time: datetime) -> str:
    """Format the capture time of a file that contains it in UTC only, as ``format_time``."""
    # By the clock of this machine, because the clock at the place is not known.
    return format_time(_to_local(time))


def _to_local(time: datetime) -> datetime:
    """Time by the clock of this machine. A time without a zone is local."""
    try:
        return time.astimezone()
    except (ValueError, OverflowError, OSError):
        # The first and last day of the calendar, and times that the system cannot convert.
        return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def modified_time(modified_ns: int) -> datetime:
    """Convert a modification time in ns since the epoch to the clock of this machine."""
    instant = _EPOCH + timedelta(microseconds=modified_ns // 1000)
    return _to_local(instant)


def time_us(time: datetime, *, clock: bool) -> int:
    """Convert a time to a number that can be compared.

    Args:
        time: The time. Without a time zone, it is local where instants are compared.
        clock: Whether to compare what the clock showed, and not the instant.

    Returns:
        Microseconds since the start of 1970 by this clock, or in UTC.

    Example:
        >>> time = parse_time("1970-01-01T01:00:01.5+01:00")
        >>> time_us(time, clock=True), time_us(time, clock=False)
        (3601500000, 1500000)
    """
    if clock:
        time = time.replace(tzinfo=UTC)
    elif time.tzinfo is None:
        time = _to_local(time)
    return (time - _EPOCH) // timedelta(microseconds=1)


def file_times(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Select the capture time in the metadata of an item or image, if it came from the file and not
    from a table of the user.
    """
    times = {name: metadata[name] for name in (TAKEN, UNREADABLE_TIME) if name in metadata}
    if TAKEN in times and not _OWN_FORM.fullmatch(times[TAKEN]):
        del times[TAKEN]
    return times
