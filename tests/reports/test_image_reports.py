"""Public reports about images: orientation, metadata, modes, sizes, threads and suffixes."""

from __future__ import annotations

import io
import logging
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from visavis.cli.logs import log_to_stderr
from visavis.data.images import ImageError, decode_image, image_size, make_thumbnail, upright_size
from visavis.models.retriever import read_image
from visavis.retrieval.source_files import list_source_files


def saved(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photo() -> Image.Image:
    """An image of 30 x 20 pixels whose left third is red."""
    image = Image.new("RGB", (30, 20), "white")
    image.paste("red", (0, 0, 10, 20))
    return image


def is_red_at_top(image: Image.Image) -> bool:
    """Whether the photo was turned by 90 degrees clockwise."""
    return (
        image.size == (20, 30)
        and image.getpixel((10, 4))[1] < 60
        and image.getpixel((10, 25))[1] > 200
    )


def exif_of(**tags: object) -> Image.Exif:
    exif = Image.Exif()
    for name, value in tags.items():
        exif[ExifTags.Base[name]] = value
    return exif


@pytest.mark.report(
    "python-pillow/Pillow#7381", "a TIFF is turned twice, because Pillow turns it while it loads"
)
@pytest.mark.parametrize("compression", [None, "tiff_lzw", "jpeg"])
def test_tiff_with_orientation_is_turned_once(compression):
    content = saved(
        photo(), "TIFF", compression=compression, tiffinfo={ExifTags.Base.Orientation: 6}
    )
    assert is_red_at_top(decode_image(content, "x.tif"))
    assert is_red_at_top(make_thumbnail(content, "x.tif", 30))
    assert upright_size(content, "x.tif") == image_size(content, "x.tif") == (20, 30)


@pytest.mark.report(
    "mk-minchul/AdaFace#163", "a photo taken upright gets the vector of a turned one"
)
def test_opened_photo_is_turned_as_its_file():
    content = saved(photo(), exif=exif_of(Orientation=6))
    assert is_red_at_top(read_image(content, "x"))
    assert is_red_at_top(read_image(Image.open(io.BytesIO(content)), "x"))


@pytest.mark.report(
    "python-pillow/Pillow#8965", "turning a photo fails, because other metadata cannot be written"
)
def test_photo_with_damaged_metadata_is_turned():
    content = saved(photo(), exif=exif_of(Orientation=6, XResolution=72.0))
    # The resolution becomes a text.
    content = content.replace(
        struct.pack(">HH", ExifTags.Base.XResolution, 5),
        struct.pack(">HH", ExifTags.Base.XResolution, 2),
    )
    with (
        pytest.raises((struct.error, TypeError, AttributeError)),
        warnings.catch_warnings(action="ignore"),
    ):
        ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert is_red_at_top(decode_image(content, "x"))
    assert upright_size(content, "x") == (20, 30)


@pytest.mark.report(
    "python-pillow/Pillow#8348", "a photo is refused, because its EXIF has no valid header"
)
def test_photo_without_valid_exif_header_is_read():
    valid = exif_of(Orientation=1).tobytes()
    for exif in (b"Exif\0\0" + valid, b"Exif\0\0", b"Exif\0\0garbage"):
        assert (
            decode_image(saved(photo(), "PNG", exif=exif), "x").size
            == upright_size(saved(photo(), "PNG", exif=exif), "x")
            == (30, 20)
        )


@pytest.mark.report("python-pillow/Pillow#2574", "16-bit gray becomes white in RGB")
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_keeps_its_levels(kind):
    ramp = np.arange(256, dtype=np.uint16)[None] * 257
    content = saved(Image.fromarray(np.repeat(ramp, 2, 0)), kind)
    for image in (read_image(content, "x"), read_image(Image.open(io.BytesIO(content)), "x")):
        np.testing.assert_array_equal(np.asarray(image)[0, :, 0], np.arange(256))


@pytest.mark.report("NVIDIA/DIGITS#85", "transparency becomes black in RGB")
def test_transparent_pixels_are_white():
    content = saved(Image.new("RGBA", (4, 4)), "PNG")
    for image in (read_image(content, "x"), read_image(Image.open(io.BytesIO(content)), "x")):
        assert image.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.report(
    "mpetroff/pannellum#596", "a panorama of 220 megapixels is refused as a decompression bomb"
)
def test_panorama_of_220_megapixels_is_read():
    content = bytearray(saved(photo()))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", 10_496, 20_992)
    assert upright_size(bytes(content), "x") == (20_992, 10_496)
    # The decoder fills the rows that this small file lacks.
    assert decode_image(bytes(content), "x", min_side=448).size == (2_624, 1_312)


@pytest.mark.report(
    "GeiserX/Telegram-Archive#449",
    "a progressive JPEG needs the memory of its full size, also at a reduced one",
)
def test_large_progressive_jpeg_is_refused():
    content = bytearray(saved(photo(), progressive=True))
    frame = content.index(b"\xff\xc2")
    content[frame + 5 : frame + 9] = struct.pack(">HH", 12_000, 12_000)
    with pytest.raises(ImageError, match="12000 x 12000 pixels, expected at most 128 million"):
        make_thumbnail(bytes(content), "x", 480)


@pytest.mark.report("saimn/sigal#394", "warnings about metadata are printed without a file name")
@pytest.mark.filterwarnings("always")
def test_warnings_about_metadata_are_not_printed(capfd):
    content = saved(photo(), exif=b"Exif\0\0II*\0\x08\0\0\0\1\0")
    with log_to_stderr():
        assert decode_image(content, "x").size == (30, 20)
    assert capfd.readouterr().err == ""
    assert not logging.getLogger("visavis").isEnabledFor(logging.DEBUG)


@pytest.mark.report("python-pillow/Pillow#4848", "threads that share an opened image damage it")
def test_threads_read_one_opened_image():
    noise = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    )
    for kind in ("PNG", "JPEG", "WEBP"):
        with Image.open(io.BytesIO(saved(noise, kind))) as image, ThreadPoolExecutor(8) as threads:
            assert (
                len(
                    set(
                        threads.map(
                            lambda _, shared=image: read_image(shared, "x").tobytes(), range(32)
                        )
                    )
                )
                == 1
            )


@pytest.mark.report("AntonyCorbett/OnlyM#320", "JPEG files named .jfif are not listed")
def test_jfif_files_are_listed(tmp_path):
    (tmp_path / "slide.jfif").write_bytes(saved(photo()))
    assert [file.path for file in list_source_files(tmp_path).files] == ["slide.jfif"]


@pytest.mark.report("haukesomm/apple-photos-export#8", "MTS files of cameras are unknown")
def test_mts_files_are_videos(tmp_path):
    pytest.importorskip("av")
    from tests.videos import write_video

    from visavis.data.video import iter_frames

    frames = [np.full((48, 64, 3), level, np.uint8) for level in range(0, 250, 10)]
    write_video(tmp_path / "00001.ts", frames).rename(tmp_path / "00001.MTS")
    [file] = list_source_files(tmp_path).files
    assert file.is_video
    assert len(list(iter_frames(tmp_path / "00001.MTS", "00001.MTS", 5.0))) >= 12
