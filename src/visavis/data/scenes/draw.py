"""A scene as pixels: things cut out of paper, with soft shadows, on a painted background.

Outlines are filled at four times the resolution and reduced, so edges are smooth; everything else is computed at
the final size in float32. All lengths scale with the picture's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from visavis.data.scenes.backgrounds import paint_background
from visavis.data.scenes.world import Scene, Thing

FINER = 4
"""Supersampling of outlines and patterns."""

Paint = Mapping[str, tuple[float, float, float]]
PAINT: Paint = {
    "red": (0.88, 0.16, 0.18),
    "blue": (0.15, 0.36, 0.85),
    "yellow": (0.99, 0.82, 0.16),
    "green": (0.18, 0.64, 0.28),
    "orange": (0.98, 0.52, 0.10),
    "purple": (0.52, 0.24, 0.72),
    "white": (0.97, 0.97, 0.98),
    "pink": (0.98, 0.56, 0.74),
    "teal": (0.10, 0.70, 0.70),
    "black": (0.13, 0.13, 0.16),
    "brown": (0.50, 0.30, 0.16),
}
ACCENT = {"white": (0.60, 0.66, 0.76), "yellow": (1.0, 0.97, 0.84), "black": (0.72, 0.73, 0.78)}
"""The second color of stripes, dots and squares, where it is not a pale tint of the first."""


def draw(scene: Scene, size: int = 96, paint: Paint = PAINT) -> Image.Image:
    """The picture of a scene, RGB, ``size`` x ``size`` pixels; the same scene and paint give the same pixels."""
    canvas = paint_background(scene.background, size, np.random.default_rng(scene.grain))
    for thing in scene.things:
        _draw_thing(canvas, thing, size, paint, dark=scene.background in ("night", "forest", "sea"))
    return Image.fromarray((np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8))


def _draw_thing(canvas: np.ndarray, thing: Thing, size: int, palette: Paint, *, dark: bool) -> None:
    """Shadow or halo, then the thing itself, blended into ``canvas [size, size, 3]`` in place."""
    radius = thing.radius * size
    half = int(radius * 1.6) + 3
    left, top = int(thing.x * size) - half, int(thing.y * size) - half
    center = (thing.x * size - left, thing.y * size - top)
    tile = 2 * half
    mask = _fill(outline(thing.shape), thing.angle, center, radius, tile)
    alpha = np.asarray(mask.reduce(FINER), np.float32)[..., None] / 255
    rows, columns = slice(max(top, 0), min(top + tile, size)), slice(max(left, 0), min(left + tile, size))
    window = canvas[rows, columns]
    inner = (slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left))

    paint = np.array(palette[thing.color], np.float32)
    if thing.pattern == "glowing":
        halo = _blur(alpha, 0.30 * radius)[inner]
        light = 0.55 * paint + 0.45
        window += (light - window) * np.minimum(1.25 * halo, 0.85)
    else:
        shift = max(1, round(0.10 * radius))
        shadow = np.roll(_blur(alpha, 0.13 * radius), (shift, shift), (0, 1))[inner]
        window *= 1 - (0.55 if dark else 0.38) * shadow
    color = _surface(thing, paint, center, radius, tile, alpha)[inner]
    window += (color - window) * alpha[inner]


def _surface(thing: Thing, paint: np.ndarray, center: tuple[float, float], radius: float, tile: int, alpha: np.ndarray) -> np.ndarray:
    """The thing's own colors ``[tile, tile, 3]``: pattern, light from the upper left, a darker rim."""
    accent = np.array(ACCENT.get(thing.color, 0.12 * paint + 0.88), np.float32)
    color = np.broadcast_to(paint, (tile, tile, 3))
    if thing.pattern in ("striped", "dotted", "checkered"):
        share = np.asarray(_pattern(thing.pattern, thing.angle, center, radius, tile).reduce(FINER), np.float32)[..., None] / 255
        color = color + (accent - color) * share
    x = ((np.arange(tile, dtype=np.float32) + 0.5 - center[0]) / radius)[None, :, None]
    y = ((np.arange(tile, dtype=np.float32) + 0.5 - center[1]) / radius)[:, None, None]
    light = (-x - y) / 2
    rim = _blur(1 - alpha, 0.09 * radius)
    if thing.pattern == "glowing":
        return color + (1 - color) * np.clip(0.7 - 1.2 * (x * x + y * y), 0.0, 0.7)
    if thing.pattern == "shiny":
        color = color * (1 + 0.28 * light)
        spot = np.exp(-(((x + 0.26) ** 2 + (y + 0.30) ** 2) / 0.045)) + 0.45 * np.exp(-((x + y - 0.85) ** 2) / 0.02)
        gleam = np.exp(-((x - y + 0.08) ** 2 + 0.18 * (x + y) ** 2) / 0.03)
        return (color + (1 - color) * np.clip(0.95 * spot + 0.5 * gleam, 0, 0.95)) * (1 - 0.45 * rim)
    if thing.color == "black":
        return color * (1 + 0.5 * light) + 0.22 * rim
    return color * (1 + 0.12 * light) * (1 - 0.50 * rim)


def _fill(shape: Outline, angle: float, center: tuple[float, float], radius: float, tile: int) -> Image.Image:
    """A mask, ``FINER`` times the tile: the first outline filled, the second (a hole) cut out."""
    mask = Image.new("L", (tile * FINER, tile * FINER))
    pen = ImageDraw.Draw(mask)
    cos, sin = np.cos(angle), np.sin(angle)
    turn = np.array([[cos, sin], [-sin, cos]]) * radius * FINER
    for points, fill in zip(shape, (255, 0), strict=False):
        pen.polygon([tuple(point) for point in (points @ turn + np.array(center) * FINER).tolist()], fill=fill)
    return mask


def _pattern(name: str, angle: float, center: tuple[float, float], radius: float, tile: int) -> Image.Image:
    """Where the accent color shows, ``FINER`` times the tile."""
    mask = Image.new("L", (tile * FINER, tile * FINER))
    pen = ImageDraw.Draw(mask)
    step = max(0.46 * radius, 5.0) * FINER
    cos, sin = np.cos(angle + (0.7 if name == "striped" else 0.0)), np.sin(angle + (0.7 if name == "striped" else 0.0))
    middle = np.array(center) * FINER
    along, across = np.array([cos, sin]), np.array([-sin, cos])
    reach = int(1.5 * radius * FINER / step) + 1

    def box(a: float, b: float, width: float, height: float) -> list[tuple[float, float]]:
        corners = ((a, b), (a + width, b), (a + width, b + height), (a, b + height))
        return [tuple(middle + step * (u * along + v * across)) for u, v in corners]

    for i in range(-reach, reach):
        if name == "striped":
            pen.polygon(box(-reach, i, 2 * reach, 0.48), fill=255)
            continue
        for j in range(-reach, reach):
            if name == "checkered" and (i + j) % 2:
                pen.polygon(box(i * 0.8, j * 0.8, 0.8, 0.8), fill=255)
            if name == "dotted":
                x, y = middle + step * ((i + 0.5 * (j % 2)) * along + j * 0.87 * across)
                dot = 0.27 * step
                pen.ellipse((x - dot, y - dot, x + dot, y + dot), fill=255)
    return mask


def _blur(alpha: np.ndarray, radius: float) -> np.ndarray:
    """``alpha [tile, tile, 1]`` blurred by a Gaussian of ``radius`` pixels."""
    soft = Image.fromarray((alpha[..., 0] * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(radius))
    return np.asarray(soft, np.float32)[..., None] / 255


Outline = tuple[np.ndarray, ...]


@lru_cache
def outline(shape: str) -> Outline:
    """The corners ``[K, 2]`` of a shape of radius 1 around (0, 0), y downwards; a second array is a hole."""
    turn = np.linspace(0, 2 * np.pi, 90, endpoint=False)
    circle = np.stack([np.cos(turn), np.sin(turn)], 1)
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
            points[1::2] *= 0.45
            return (1.08 * points + np.array([0.0, 0.06]),)
        case "cross":
            a, b = 0.33, 0.95
            return (np.array([(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]),)
        case "heart":
            x, y = 16 * np.sin(turn) ** 3, 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
            return (np.stack([x, -y - 2], 1) / 15.5,)
        case "drop":
            x, y = np.sin(turn) * np.sin(turn / 2) ** 1.6, -np.cos(turn)
            return (np.stack([0.92 * x, 1.05 * y], 1),)
        case "flower":
            return (circle * (0.42 + 0.58 * np.abs(np.cos(2.5 * turn)) ** 0.6)[:, None], 0.17 * circle)
        case _:
            outer = np.linspace(0.28 * np.pi, 1.72 * np.pi, 40)
            inner = np.linspace(1.62 * np.pi, 0.38 * np.pi, 40)
            moon = np.concatenate(
                [np.stack([np.cos(outer), np.sin(outer)], 1), np.stack([0.40 + 0.83 * np.cos(inner), 0.83 * np.sin(inner)], 1)]
            )
            return (moon + np.array([0.12, 0.0]),)


def _corners(count: int, start: float) -> np.ndarray:
    turn = start + np.linspace(0, 2 * np.pi, count, endpoint=False)
    return np.stack([np.cos(turn), np.sin(turn)], 1)
