"""Rendering of synthetic scenes: paper cutouts with soft shadows on a painted background.

Outlines are filled at four times the resolution and reduced, so that edges are smooth. Everything
else is computed at the final size in float32. All lengths scale with the size of the image.
Positions are shares of the image's side, with x to the right and y downwards.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from visavis.data.synthetic.lexicon import DEFAULT_STYLE, Palette
from visavis.data.synthetic.scene import BACKGROUNDS, Scene, SceneObject

Rgb = tuple[float, float, float]


class _Draw:
    """Drawing operations of the backgrounds, with the positions of pixels and the random generator."""

    def __init__(self, size: int, rng: np.random.Generator):
        self.size = size
        self.rng = rng
        # Centers of pixels, so that an image of any size shows the same scene.
        axis = (np.arange(size, dtype=np.float32) + 0.5) / size
        self.x = axis[None, :]
        self.y = axis[:, None]

    def positions(self, low: float, high: float, count: int) -> list[float]:
        return self.rng.uniform(low, high, count).tolist()

    def gradient(self, *stops: Rgb) -> np.ndarray:
        """Return a vertical gradient of evenly spaced colors."""
        # [size, 3], then [size, size, 3].
        stop_positions = np.linspace(0, 1, len(stops))
        rows = np.stack(
            [
                np.interp(self.y[:, 0], stop_positions, channel)
                for channel in zip(*stops, strict=True)
            ],
            -1,
        )
        return np.repeat(rows[:, None].astype(np.float32), self.size, 1)

    def below(self, height: np.ndarray | float) -> np.ndarray:
        """Return the coverage [size, size] of everything below a curve ``height [size]``, with
        smooth edges.
        """
        return np.clip((self.y - np.asarray(height, np.float32)) * self.size + 0.5, 0, 1)

    def disc(self, x: float, y: float, radius: float, soft: float = 0.0) -> np.ndarray:
        # At least a pixel of softness: an edge without it would look jagged.
        distance = np.hypot(self.x - x, self.y - y)
        return np.clip((radius - distance) / max(soft, 1 / self.size) + 0.5, 0, 1)

    def stripe(self, x: np.ndarray, half: float) -> np.ndarray:
        """Return the coverage [size, size] of a vertical band around ``x [size, 1]``."""
        return np.clip((half - np.abs(self.x - x)) * self.size + 0.5, 0, 1)

    def curve(self, middle: float, swing: float, waves: float = 1.0) -> np.ndarray:
        """Return a gently rolling line over x."""
        # Two waves of unrelated lengths, so that hills do not repeat.
        a, b = self.rng.uniform(0, 6.28, 2)
        return middle + swing * (
            np.sin(6.28 * waves * self.x[0] + a) + 0.4 * np.sin(14.0 * waves * self.x[0] + b)
        )

    def grain(self, amount: float, stretch_x: int = 1, stretch_y: int = 1) -> np.ndarray:
        """Return stretched noise [size, size, 1] around 0: grass is tall, sand is even, wood is
        wide.
        """
        # Noise of fewer pixels, enlarged.
        shape = (-(-self.size // stretch_y), -(-self.size // stretch_x))
        noise = self.rng.standard_normal(shape, np.float32)
        if stretch_x > 1 or stretch_y > 1:
            noise = np.asarray(
                Image.fromarray(noise).resize((self.size, self.size), Image.Resampling.BICUBIC)
            )
        return amount * noise[..., None]

    def specks(self, count: int, low: float, high: float, radius: float) -> np.ndarray:
        """Return the coverage [size, size] of small soft dots at random positions between two
        heights.
        """
        field = np.zeros((self.size, self.size), np.float32)
        for u, v, r in zip(
            self.positions(0, 1, count),
            self.positions(low, high, count),
            self.positions(0.6 * radius, 1.4 * radius, count),
            strict=True,
        ):
            # Beyond three radii a Gaussian is invisible. Only this window is computed.
            reach = int(3 * r * self.size) + 1
            i = int(v * self.size)
            j = int(u * self.size)
            rows = slice(max(i - reach, 0), i + reach + 1)
            columns = slice(max(j - reach, 0), j + reach + 1)
            spot = np.exp(-((self.x[:, columns] - u) ** 2 + (self.y[rows] - v) ** 2) / (r * r))
            field[rows, columns] = np.maximum(field[rows, columns], spot)
        return field


def _blend(canvas: np.ndarray, color: Rgb | np.ndarray, coverage: np.ndarray) -> None:
    """Blend a color over the canvas in place."""
    canvas += (np.asarray(color, np.float32) - canvas) * coverage[..., None]


def _meadow(draw: _Draw) -> np.ndarray:
    canvas = draw.gradient((0.52, 0.78, 0.96), (0.80, 0.92, 0.98), (0.93, 0.97, 0.94))
    # Four discs in a row for each of two clouds.
    clouds = [
        draw.disc(x + 0.055 * step - 0.08, y + 0.012 * (-1) ** step, radius, 0.05)
        for x, y in zip(draw.positions(0.1, 0.9, 2), draw.positions(0.08, 0.24, 2), strict=True)
        for step, radius in enumerate((0.045, 0.057, 0.057, 0.045))
    ]
    _blend(canvas, (1, 1, 1), 0.85 * np.max(clouds, 0))
    _blend(canvas, (0.60, 0.80, 0.52), draw.below(draw.curve(0.44, 0.035)))
    _blend(canvas, (0.50, 0.74, 0.38), draw.below(draw.curve(0.58, 0.035)))
    foreground = draw.below(draw.curve(0.74, 0.03))
    _blend(canvas, np.array((0.42, 0.68, 0.28), np.float32) + draw.grain(0.035, 1, 4), foreground)
    _blend(canvas, (1.0, 0.98, 0.90), 0.9 * draw.specks(10, 0.80, 0.99, 0.011))
    _blend(canvas, (1.0, 0.86, 0.40), 0.9 * draw.specks(8, 0.80, 0.99, 0.009))
    return canvas


def _beach(draw: _Draw) -> np.ndarray:
    canvas = draw.gradient((0.55, 0.83, 0.97), (0.90, 0.97, 0.99))
    horizon = draw.rng.uniform(0.30, 0.38)
    sea = draw.gradient((0.12, 0.55, 0.72), (0.20, 0.66, 0.78), (0.50, 0.85, 0.86)) + draw.grain(
        0.02, 12, 1
    )
    _blend(canvas, sea, draw.below(horizon))
    shore = draw.curve(0.58, 0.022)
    _blend(canvas, (0.97, 0.99, 1.0), draw.below(shore - 0.03))
    _blend(canvas, (0.80, 0.70, 0.54), draw.below(shore))
    sand = draw.gradient((0.96, 0.88, 0.70), (0.95, 0.87, 0.69), (0.91, 0.80, 0.60)) + draw.grain(
        0.014
    )
    _blend(canvas, sand, draw.below(shore + 0.035))
    return canvas


def _night(draw: _Draw) -> np.ndarray:
    canvas = draw.gradient(
        (0.03, 0.04, 0.14), (0.08, 0.09, 0.26), (0.20, 0.17, 0.40), (0.34, 0.25, 0.46)
    )
    slope = draw.rng.uniform(-0.8, 0.8)
    height = draw.rng.uniform(0.2, 0.6)
    band = np.exp(-((draw.y - height - slope * (draw.x - 0.5)) ** 2) / 0.03)
    canvas += (band * np.float32(0.11))[..., None] * np.array(
        (0.8, 0.8, 1.0), np.float32
    ) + draw.grain(0.006)
    _blend(canvas, (1.0, 1.0, 0.92), 0.95 * draw.specks(34, 0.0, 0.85, 0.0065))
    _blend(canvas, (0.85, 0.92, 1.0), draw.specks(5, 0.0, 0.75, 0.013))
    _blend(canvas, (0.07, 0.07, 0.16), draw.below(draw.curve(0.86, 0.025)))
    _blend(canvas, (0.03, 0.03, 0.09), draw.below(draw.curve(0.93, 0.02)))
    return canvas


def _snow(draw: _Draw) -> np.ndarray:
    canvas = draw.gradient((0.62, 0.73, 0.86), (0.80, 0.87, 0.94), (0.90, 0.94, 0.98))
    ridge = draw.curve(0.50, 0.03)
    firs = np.min(
        [
            0.54 - tall + 3.4 * np.abs(draw.x[0] - x)
            for x, tall in zip(draw.positions(0, 1, 7), draw.positions(0.12, 0.22, 7), strict=True)
        ],
        0,
    )
    _blend(canvas, (0.38, 0.52, 0.56), 0.85 * draw.below(firs))
    _blend(canvas, (0.88, 0.92, 0.97), draw.below(ridge))
    _blend(
        canvas,
        np.array((0.95, 0.97, 0.99), np.float32) + draw.grain(0.008),
        draw.below(draw.curve(0.70, 0.035)),
    )
    _blend(canvas, (1.0, 1.0, 1.0), 0.95 * draw.specks(38, 0.0, 1.0, 0.012))
    return canvas


def _table(draw: _Draw) -> np.ndarray:
    canvas = (
        draw.gradient((0.80, 0.60, 0.40), (0.74, 0.53, 0.34))
        + draw.grain(0.030, 24, 1)
        + draw.grain(0.022, 48, 3)
    )
    edges = np.linspace(0, 1, 5)[:-1] + draw.rng.uniform(0, 0.25)
    tones = draw.rng.uniform(-0.045, 0.045, 5)
    canvas += tones[np.searchsorted(edges, draw.y[:, 0])][:, None, None].astype(np.float32)
    for edge in edges:
        canvas *= (1 - 0.38 * np.exp(-(((draw.y - edge) * draw.size / 0.9) ** 2)))[..., None]
        canvas *= (1 + 0.12 * np.exp(-(((draw.y - edge) * draw.size - 2.0) ** 2)))[..., None]
    return canvas


def _sea(draw: _Draw) -> np.ndarray:
    canvas = draw.gradient((0.25, 0.72, 0.85), (0.08, 0.46, 0.68), (0.03, 0.24, 0.46))
    rays = sum(
        np.exp(-(((draw.x - x + 0.35 * draw.y) / (0.05 + 0.08 * draw.y)) ** 2))
        for x in draw.positions(-0.2, 1.2, 4)
    )
    canvas += (0.16 * rays * (1 - draw.y))[..., None]
    weeds = [
        draw.stripe(x + 0.012 * np.sin(26 * draw.y + 20 * x), 0.010) * draw.below(top)
        for x, top in zip(draw.positions(0.05, 0.95, 7), draw.positions(0.72, 0.86, 7), strict=True)
    ]
    _blend(canvas, (0.10, 0.46, 0.36), 0.8 * np.max(weeds, 0))
    _blend(
        canvas,
        np.array((0.58, 0.60, 0.50), np.float32) + draw.grain(0.02),
        0.8 * draw.below(draw.curve(0.93, 0.015)),
    )
    bubbles = [
        np.clip(1.3 - np.abs(np.hypot(draw.x - x, draw.y - y) - r) * draw.size, 0, 1)
        for x, y, r in zip(
            draw.positions(0, 1, 7),
            draw.positions(0, 0.9, 7),
            draw.positions(0.010, 0.026, 7),
            strict=True,
        )
    ]
    _blend(canvas, (0.85, 0.97, 1.0), 0.6 * np.max(bubbles, 0))
    return canvas


def _desert(draw: _Draw) -> np.ndarray:
    canvas = draw.gradient((0.98, 0.78, 0.52), (0.99, 0.88, 0.68), (0.99, 0.93, 0.80))
    _blend(
        canvas, (1.0, 0.97, 0.86), 0.9 * draw.disc(draw.rng.uniform(0.15, 0.85), 0.18, 0.08, 0.03)
    )
    for middle, lit, shade in (
        (0.46, (0.93, 0.72, 0.47), (0.84, 0.60, 0.38)),
        (0.62, (0.91, 0.66, 0.40), (0.79, 0.53, 0.31)),
    ):
        ridge = draw.curve(middle, 0.05, 0.8)
        body = draw.below(ridge)
        _blend(canvas, lit, body)
        _blend(
            canvas,
            shade,
            body
            * (1 - draw.below(ridge + 0.16 * (0.5 + 0.5 * np.sin(6 * draw.x[0] + 9 * middle))))
            * 0.75,
        )
    ripples = 0.018 * np.sin(120 * (draw.y + 0.03 * np.sin(9 * draw.x)))[..., None]
    _blend(
        canvas,
        np.array((0.89, 0.63, 0.37), np.float32) + ripples + draw.grain(0.012),
        draw.below(draw.curve(0.80, 0.03)),
    )
    return canvas


def _paper(draw: _Draw) -> np.ndarray:
    canvas = (
        draw.gradient((0.985, 0.97, 0.93), (0.96, 0.94, 0.89))
        + draw.grain(0.006)
        + draw.grain(0.006, 6, 6)
    )
    pitch = 1 / 12
    shift = draw.rng.uniform(0, 1 / 12)
    for axis in (draw.x, draw.y):
        distance = np.abs((axis - shift + pitch / 2) % pitch - pitch / 2) * draw.size
        _blend(
            canvas,
            (0.62, 0.76, 0.90),
            0.6 * np.broadcast_to(np.clip(1.05 - distance, 0, 1), canvas.shape[:2]),
        )
    return canvas


def _sunset(draw: _Draw) -> np.ndarray:
    canvas = draw.gradient(
        (0.30, 0.20, 0.48),
        (0.72, 0.32, 0.52),
        (0.98, 0.56, 0.42),
        (1.0, 0.82, 0.46),
        (1.0, 0.85, 0.5),
        (1.0, 0.85, 0.5),
    )
    x = draw.rng.uniform(0.25, 0.75)
    horizon = draw.rng.uniform(0.60, 0.68)
    canvas += (0.30 * np.exp(-((draw.x - x) ** 2 + (draw.y - horizon) ** 2) / 0.05))[
        ..., None
    ] * np.array((1, 0.8, 0.4), np.float32)
    _blend(canvas, (1.0, 0.95, 0.72), draw.disc(x, horizon, 0.13))
    sea = draw.gradient((0, 0, 0), (0, 0, 0), (0.80, 0.46, 0.46), (0.34, 0.22, 0.42)) + draw.grain(
        0.03, 16, 1
    )
    _blend(canvas, sea, draw.below(horizon))
    glitter = np.exp(-(((draw.x - x) / (0.05 + 0.25 * (draw.y - horizon))) ** 2)) * (
        0.5 + 0.5 * np.sin(150 * draw.y + 8 * np.sin(20 * draw.x))
    )
    _blend(canvas, (1.0, 0.88, 0.60), 0.75 * glitter * draw.below(horizon))
    return canvas


def _forest(draw: _Draw) -> np.ndarray:
    canvas = draw.gradient((0.62, 0.78, 0.60), (0.42, 0.62, 0.44), (0.20, 0.36, 0.24))
    for depth, color in (
        (0.012, (0.36, 0.52, 0.38)),
        (0.022, (0.24, 0.36, 0.26)),
        (0.034, (0.17, 0.24, 0.18)),
    ):
        trunks = [
            draw.stripe(x + 0.01 * np.sin(5 * draw.y + 9 * x), depth)
            for x in draw.positions(-0.02, 1.02, 5)
        ]
        _blend(canvas, color, np.max(trunks, 0))
    shaft = np.exp(-(((draw.x - draw.rng.uniform(0.2, 0.9) + 0.5 * draw.y) / 0.10) ** 2)) * (
        1 - draw.y
    )
    canvas += (0.20 * shaft)[..., None] * np.array((1, 1, 0.7), np.float32)
    _blend(
        canvas,
        np.array((0.16, 0.30, 0.16), np.float32) + draw.grain(0.03, 2, 3),
        draw.below(draw.curve(0.86, 0.02)),
    )
    _blend(canvas, (0.75, 0.90, 0.50), 0.35 * draw.specks(24, 0.0, 0.9, 0.016))
    return canvas


_PAINTERS = dict(
    zip(
        BACKGROUNDS,
        (_meadow, _beach, _night, _snow, _table, _sea, _desert, _paper, _sunset, _forest),
        strict=True,
    )
)


# Factor of the resolution of outlines and patterns.
SUPERSAMPLING = 4

# Second color of stripes, dots and squares, if it is not a pale tint of the first.
ACCENT_COLORS = {
    "white": (0.60, 0.66, 0.76),
    "yellow": (1.0, 0.97, 0.84),
    "black": (0.72, 0.73, 0.78),
}


def render_scene(
    scene: Scene, size: int = 96, palette: Palette = DEFAULT_STYLE.palette
) -> Image.Image:
    """Render a scene. The same scene and palette give the same pixels.

    Args:
        scene: The scene.
        size: Width and height in pixels.
        palette: Red, green and blue of each color, from 0 to 1.

    Returns:
        An RGB image.
    """
    canvas = _PAINTERS[scene.background](_Draw(size, np.random.default_rng(scene.grain)))
    for thing in scene.things:
        _draw_thing(
            canvas, thing, size, palette, dark=scene.background in ("night", "forest", "sea")
        )
    return Image.fromarray((np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8))


def _draw_thing(
    canvas: np.ndarray, thing: SceneObject, size: int, palette: Palette, *, dark: bool
) -> None:
    """Blend the shadow or halo and then the thing into ``canvas [size, size, 3]``, in place."""
    radius = thing.radius * size
    # A tile around the thing, with room for its shadow or halo.
    half = int(radius * 1.6) + 3
    left = int(thing.x * size) - half
    top = int(thing.y * size) - half
    center = (thing.x * size - left, thing.y * size - top)
    tile = 2 * half
    mask, pen = _new_mask(tile)
    turn = _rotation(thing.angle) * radius * SUPERSAMPLING
    # The first outline is filled, and the second one is a hole.
    for outline, fill in zip(shape_outline(thing.shape), (255, 0), strict=False):
        corners = outline @ turn + np.array(center) * SUPERSAMPLING
        pen.polygon([tuple(corner) for corner in corners.tolist()], fill=fill)
    # [tile, tile, 1]
    alpha = np.asarray(mask.reduce(SUPERSAMPLING), np.float32)[..., None] / 255
    rows = slice(max(top, 0), min(top + tile, size))
    columns = slice(max(left, 0), min(left + tile, size))
    # A view: what follows changes the canvas.
    window = canvas[rows, columns]
    inner = (
        slice(rows.start - top, rows.stop - top),
        slice(columns.start - left, columns.stop - left),
    )

    paint = np.array(palette[thing.color], np.float32)
    if thing.pattern == "glowing":
        # Light is added before the thing, which covers its middle.
        halo = _blur(alpha, 0.30 * radius)[inner]
        light = 0.55 * paint + 0.45
        window += (light - window) * np.minimum(1.25 * halo, 0.85)
    else:
        shift = max(1, round(0.10 * radius))
        shadow = np.roll(_blur(alpha, 0.13 * radius), (shift, shift), (0, 1))[inner]
        window *= 1 - (0.55 if dark else 0.38) * shadow
    color = _surface(thing, paint, center, radius, tile, alpha)[inner]
    window += (color - window) * alpha[inner]


def _surface(
    thing: SceneObject,
    paint: np.ndarray,
    center: tuple[float, float],
    radius: float,
    tile: int,
    alpha: np.ndarray,
) -> np.ndarray:
    """Return the colors ``[tile, tile, 3]`` of a thing: pattern, light from the upper left, a
    darker rim.
    """
    # Of most colors a pale tint.
    accent = np.array(ACCENT_COLORS.get(thing.color, 0.12 * paint + 0.88), np.float32)
    color = np.broadcast_to(paint, (tile, tile, 3))
    if thing.pattern in ("striped", "dotted", "checkered"):
        share = (
            np.asarray(
                _pattern(thing.pattern, thing.angle, center, radius, tile).reduce(SUPERSAMPLING),
                np.float32,
            )[..., None]
            / 255
        )
        color = color + (accent - color) * share
    x = ((np.arange(tile, dtype=np.float32) + 0.5 - center[0]) / radius)[None, :, None]
    y = ((np.arange(tile, dtype=np.float32) + 0.5 - center[1]) / radius)[:, None, None]
    # From the upper left: 1 there, -1 at the lower right.
    light = (-x - y) / 2
    # The outside, blurred, reaches over the edge.
    rim = _blur(1 - alpha, 0.09 * radius)
    if thing.pattern == "glowing":
        return color + (1 - color) * np.clip(0.7 - 1.2 * (x * x + y * y), 0.0, 0.7)
    if thing.pattern == "shiny":
        color = color * (1 + 0.28 * light)
        spot = np.exp(-(((x + 0.26) ** 2 + (y + 0.30) ** 2) / 0.045)) + 0.45 * np.exp(
            -((x + y - 0.85) ** 2) / 0.02
        )
        gleam = np.exp(-((x - y + 0.08) ** 2 + 0.18 * (x + y) ** 2) / 0.03)
        return (color + (1 - color) * np.clip(0.95 * spot + 0.5 * gleam, 0, 0.95)) * (
            1 - 0.45 * rim
        )
    if thing.color == "black":
        return color * (1 + 0.5 * light) + 0.22 * rim
    return color * (1 + 0.12 * light) * (1 - 0.50 * rim)


def _pattern(
    name: str, angle: float, center: tuple[float, float], radius: float, tile: int
) -> Image.Image:
    """Return a supersampled mask of the accent color."""
    mask, pen = _new_mask(tile)
    # At least five pixels, below which a pattern could not be seen.
    step = max(0.46 * radius, 5.0) * SUPERSAMPLING
    middle = np.array(center) * SUPERSAMPLING
    along, normal = _rotation(angle + (0.7 if name == "striped" else 0.0))
    reach = int(1.5 * radius * SUPERSAMPLING / step) + 1

    def box(a: float, b: float, width: float, height: float) -> list[tuple[float, float]]:
        corners = ((a, b), (a + width, b), (a + width, b + height), (a, b + height))
        return [tuple(middle + step * (u * along + v * normal)) for u, v in corners]

    for i in range(-reach, reach):
        if name == "striped":
            pen.polygon(box(-reach, i, 2 * reach, 0.48), fill=255)
            continue
        for j in range(-reach, reach):
            if name == "checkered" and (i + j) % 2:
                pen.polygon(box(i * 0.8, j * 0.8, 0.8, 0.8), fill=255)
            if name == "dotted":
                # Rows of dots are shifted by a half, as in a honeycomb. 0.87 is the sine of 60
                # degrees.
                x, y = middle + step * ((i + 0.5 * (j % 2)) * along + j * 0.87 * normal)
                dot = 0.27 * step
                pen.ellipse((x - dot, y - dot, x + dot, y + dot), fill=255)
    return mask


def _new_mask(tile: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    mask = Image.new("L", (tile * SUPERSAMPLING, tile * SUPERSAMPLING))
    return mask, ImageDraw.Draw(mask)


def _rotation(angle: float) -> np.ndarray:
    cos = np.cos(angle)
    sin = np.sin(angle)
    return np.array([[cos, sin], [-sin, cos]])


def _blur(alpha: np.ndarray, radius: float) -> np.ndarray:
    """Blur ``alpha [tile, tile, 1]`` with a Gaussian of ``radius`` pixels."""
    soft = Image.fromarray((alpha[..., 0] * 255).astype(np.uint8)).filter(
        ImageFilter.GaussianBlur(radius)
    )
    return np.asarray(soft, np.float32)[..., None] / 255


Outline = tuple[np.ndarray, ...]


@lru_cache
def shape_outline(shape: str) -> Outline:
    """Return the corners ``[K, 2]`` of a shape of radius 1 around (0, 0), y downwards. A second array
    is a hole.
    """
    turn = np.linspace(0, 2 * np.pi, 90, endpoint=False)
    circle = _unit_vectors(turn)
    match shape:
        case "circle":
            return (0.93 * circle,)
        case "ring":
            return circle, 0.58 * circle
        case "square":
            return (0.84 * np.array([(-1.0, -1), (1, -1), (1, 1), (-1, 1)]),)
        case "triangle":
            return (_corners(3, -np.pi / 2) + np.array([0.0, 0.16]),)
        case "diamond":
            return (np.array([(0.0, -1.05), (0.68, 0), (0, 1.05), (-0.68, 0)]),)
        case "hexagon":
            return (_corners(6, 0.0) * 0.98,)
        case "star":
            points = _corners(10, -np.pi / 2)
            # Every second corner is an inner one.
            points[1::2] *= 0.45
            return (1.08 * points + np.array([0.0, 0.06]),)
        case "cross":
            a, b = 0.33, 0.95
            return (
                np.array(
                    [
                        (-a, -b),
                        (a, -b),
                        (a, -a),
                        (b, -a),
                        (b, a),
                        (a, a),
                        (a, b),
                        (-a, b),
                        (-a, a),
                        (-b, a),
                        (-b, -a),
                        (-a, -a),
                    ]
                ),
            )
        case "heart":
            x = 16 * np.sin(turn) ** 3
            y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
            return (np.stack([x, -y - 2], 1) / 15.5,)
        case "drop":
            x = np.sin(turn) * np.sin(turn / 2) ** 1.6
            y = -np.cos(turn)
            return (np.stack([0.92 * x, 1.05 * y], 1),)
        case "flower":
            return (
                circle * (0.42 + 0.58 * np.abs(np.cos(2.5 * turn)) ** 0.6)[:, None],
                0.17 * circle,
            )
        case _:
            # A crescent: the outer arc, and back along a smaller one that is shifted.
            outer = _unit_vectors(np.linspace(0.28 * np.pi, 1.72 * np.pi, 40))
            inner = 0.83 * _unit_vectors(np.linspace(1.62 * np.pi, 0.38 * np.pi, 40)) + np.array(
                [0.40, 0.0]
            )
            return (np.concatenate([outer, inner]) + np.array([0.12, 0.0]),)


def _corners(count: int, start: float) -> np.ndarray:
    return _unit_vectors(start + np.linspace(0, 2 * np.pi, count, endpoint=False))


def _unit_vectors(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], 1)
