"""Karpathy's JSON: ``{"images": [{"filename", "split", "sentences": [{"raw", "tokens"}], "imgid", "filepath"}]}``.

Images lie in folders beside the file, in ``.tar`` archives, or nowhere (texts only, then ``filename`` may be absent and
``cocoid`` or ``imgid`` is the name). The split ``restval`` counts as train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visavis import storage
from visavis.data.archives import attach_files
from visavis.data.layout import Layout
from visavis.data.listing import Entry, Listing, evaluation_first, split_name
from visavis.data.source_text import RepeatedKey, decode, parse_json, printable, shown
from visavis.errors import DataError


def list_karpathy(path: Path) -> Listing:
    """All images and captions of a Karpathy file, in its order. Raises DataError if it is not JSON with a list ``images``."""
    content = storage.read_bytes(path)
    listing = Listing(path)
    try:
        listed = parse_json(decode(content))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.") from None
    images = listed.get("images") if isinstance(listed, dict) else None
    if isinstance(listed, RepeatedKey):
        raise DataError(f"{path} names one of its keys twice ({printable(', '.join(listed)):.80}): which of them is meant is not known.")
    if not isinstance(images, list):
        content_kind = f"the keys {printable(', '.join(listed)):.80}" if isinstance(listed, dict) else f"a {type(listed).__name__}"
        raise DataError(f"{path} has no list of images: expected {{'images': [...]}}, found {content_kind}.")
    _note_broken_lines(listing, content)
    ids: dict[str, str] = {}
    for record in images:
        _read_image(listing, record, ids)
    _find_names_twice(listing)
    attach_files(listing, path.parent, may_lack_pixels=True)
    listing.finish()
    return listing


def _read_image(listing: Listing, record: Any, ids: dict[str, str]) -> None:
    index, place = len(listing.entries), f"{listing.source.name}, image {len(listing.entries)}"
    if not isinstance(record, dict):
        listing.entries.append(Entry(place, None))
        listing.lose("malformed entry", place, f"expected an object with filename, split and sentences, found {shown(record)}", image=index)
        return
    file, number = record.get("filename"), record.get("cocoid", record.get("imgid"))
    file = file if isinstance(file, str) and file else None
    name = file or (place if number is None else shown(number) if isinstance(number, list | dict) else str(number))
    folder, split = record.get("filepath"), record.get("split")
    listing.entries.append(Entry(name, split_name(split), f"{folder}/{file}" if folder and file and isinstance(folder, str) else file))
    for key, value, kind in (("split", split, str), ("filepath", folder, str), ("cocoid or imgid", number, str | int | float)):
        if value is not None and not isinstance(value, kind):
            listing.lose("malformed entry", name, f"its {key} is {shown(value)}, expected another kind of value", image=index)
    if isinstance(record, RepeatedKey):
        listing.lose("malformed entry", name, "it names one of its keys twice", image=index)
    if file is None and number is None:
        listing.lose("caption without image", place, "the captions name no image: no filename, cocoid or imgid", image=index)
    for key in ("imgid", "cocoid"):
        if earlier := _earlier(ids, key, record, name):
            listing.lose("id twice", name, f"its {key} {record[key]} is that of {earlier} already", image=index)
    _read_sentences(listing, record.get("sentences", []), index, name, ids)


def _read_sentences(listing: Listing, sentences: Any, image: int, name: str, ids: dict[str, str]) -> None:
    if not isinstance(sentences, list):
        listing.lose("malformed entry", name, f"sentences is {shown(sentences)}, expected a list", image=image)
        return
    for number, sentence in enumerate(sentences, 1):
        place = f"{name}, caption {number}"
        sentence = sentence if isinstance(sentence, dict) else {"raw": sentence}
        text = sentence.get("raw", sentence.get("tokens"))
        if isinstance(text, list) and all(isinstance(token, str | int | float) for token in text):
            text = " ".join(map(str, text))
        caption = listing.add_caption(text if isinstance(text, str) else "", image, place)
        if not isinstance(text, str) or isinstance(sentence, RepeatedKey):
            once = ", each once" * isinstance(sentence, RepeatedKey)
            listing.lose("malformed entry", place, f"expected raw or tokens{once}, found {shown(sentence)}", caption=caption)
        elif earlier := _earlier(ids, "sentid", sentence, place):
            listing.lose("id twice", place, f"its sentid {sentence['sentid']} is that of {earlier} already", caption=caption)


def _earlier(ids: dict[str, str], key: str, record: dict[str, Any], owner: str) -> str | None:
    """The earlier owner of the record's id; None if it is new."""
    if record.get(key) is None:
        return None
    first = ids.setdefault(f"{key} {record[key] if isinstance(record[key], str | int | float) else shown(record[key])}", owner)
    return None if first == owner else first


def _find_names_twice(listing: Listing) -> None:
    """Of images with the same name the first is kept; across splits, the one in the evaluation split."""
    kept: dict[str, int] = {}
    for index, entry in enumerate(listing.entries):
        first = kept.setdefault(entry.name, index)
        if first == index or index in listing.lost_images:
            continue
        earlier = listing.entries[first]
        if earlier.split == entry.split:
            listing.lose("name twice", entry.name, "the name is listed twice; the first is used", image=index)
            continue
        left = index if evaluation_first(entry.split) >= evaluation_first(earlier.split) else first
        kept[entry.name] = index + first - left
        what = f"the image is listed in two splits, {earlier.split} and {entry.split}; that of {listing.entries[left].split} is to go"
        listing.lose("image in two splits", entry.name, what, image=left)


def _note_broken_lines(listing: Listing, content: bytes) -> None:
    try:
        content.decode()
    except UnicodeDecodeError:
        for number, line in enumerate(content.split(b"\n"), 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                what = f"byte {error.start + 1} of the line ({line[error.start]:#04x}) is not UTF-8"
                listing.note("broken UTF-8", f"{listing.source.name}:{number}", what)


KARPATHY = Layout(
    name="Karpathy JSON",
    files="dataset_NAME.json (Karpathy's list of images with splits and sentences)",
    patterns=("dataset*.json",),
    endings=(".json",),
    read=list_karpathy,
)
