"""Which clips belong to a photo: the clip of a Live Photo, which starts before the photo.

The same name is not enough. Cameras count their files again from 1, and a screen recording can have
the name of a screenshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

from PIL import ExifTags

from visavis.data.capture_time import MAX_OFFSET, TAKEN, exif_times, parse_time
from visavis.data.image_file import ByteRange
from visavis.data.images import read_exif
from visavis.data.video import read_recording

LIVE_SUFFIXES = (".mov", ".mp4")
# A larger file is a video. It is not opened.
MAX_LIVE_PHOTO_BYTES = 2**25
# The clip of a Live Photo lasts about 3 s.
MAX_LIVE_SECONDS = 4.0
# The photo is taken while the clip is recorded. Programs round times, and some write the end of the clip.
_MAX_DISTANCE = timedelta(seconds=10)
_QUARTER_HOUR = timedelta(minutes=15)


def photo_names(clip: str) -> Iterator[str]:
    """Return the names that the photo of a clip may have.

    Args:
        clip: Path of the clip.

    Yields:
        Paths in lower case, without a suffix or with that of an image.

    Example:
        >>> list(photo_names("IMG_2_HEVC.MOV")), list(photo_names("IMG_4.HEIC.MOV"))
        (['img_2_hevc', 'img_2'], ['img_4.heic'])
    """
    stem = stem_of(clip)
    yield stem
    # An iPhone that exports a photo as JPEG marks the clip that it did not convert.
    if stem.endswith("_hevc"):
        yield stem.removesuffix("_hevc")


def stem_of(path: str) -> str:
    """Return folder and name without the suffix. Cameras write suffixes, and names, in upper case."""
    return path.rpartition(".")[0].casefold()


def is_live_pair(photo: ByteRange, photo_name: str, clip: ByteRange, clip_name: str) -> bool:
    """Check whether a clip belongs to a photo: it has the same identifier, or it is short and was
    recorded when the photo was taken.
    """
    with clip.open() as source:
        recording = read_recording(source, clip_name)
    if not (recording.identifier or recording.seconds <= MAX_LIVE_SECONDS):
        return False
    exif = read_exif(photo.read(), photo_name)
    identifier = recording.identifier.encode()
    # The note of an Apple phone has the identifier. Damaged metadata raises errors of every kind.
    with suppress(Exception):
        note = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.MakerNote, b"")
        if identifier and isinstance(note, bytes) and identifier in note:
            return True
    taken = parse_time(exif_times(exif).get(TAKEN, ""))
    recorded = recording.time
    if taken is None or recorded is None or recording.seconds > MAX_LIVE_SECONDS:
        return False
    if taken.tzinfo is not None and recorded.tzinfo is not None:
        return abs(taken - recorded) <= _MAX_DISTANCE
    # One of them has no offset to UTC, so the clocks are compared.
    distance = abs(taken.replace(tzinfo=None) - recorded.replace(tzinfo=None))
    if not recording.has_clock and distance <= MAX_OFFSET + _MAX_DISTANCE:
        # The clip has its time in UTC. The offset of the photo is some multiple of quarter hours.
        distance %= _QUARTER_HOUR
        distance = min(distance, _QUARTER_HOUR - distance)
    return distance <= _MAX_DISTANCE
