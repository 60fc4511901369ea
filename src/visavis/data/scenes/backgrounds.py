"""The painted backgrounds: float32 pixels [size, size, 3] in [0, 1] from soft gradients and a little texture.

Places are shares of the picture's side: x to the right, y downwards.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

Rgb = tuple[float, float, float]


def paint_background(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """A background by its name in `world.BACKGROUNDS`, varied by ``rng``."""
    return _PAINTERS[name](_Easel(size, rng))


class _Easel:
    """The places of all pixels, the randomness, and the few strokes that all painters use."""

    def __init__(self, size: int, rng: np.random.Generator):
        self.size, self.rng = size, rng
        axis = (np.arange(size, dtype=np.float32) + 0.5) / size
        self.x, self.y = axis[None, :], axis[:, None]

    def places(self, low: float, high: float, count: int) -> list[float]:
        return self.rng.uniform(low, high, count).tolist()

    def gradient(self, *stops: Rgb) -> np.ndarray:
        """Colors from top to bottom, evenly spaced."""
        places = np.linspace(0, 1, len(stops))
        rows = np.stack([np.interp(self.y[:, 0], places, channel) for channel in zip(*stops, strict=True)], -1)
        return np.repeat(rows[:, None].astype(np.float32), self.size, 1)

    def below(self, height: np.ndarray | float) -> np.ndarray:
        """Coverage [size, size] of everything below a curve ``height [size]``, with smooth edges."""
        return np.clip((self.y - np.asarray(height, np.float32)) * self.size + 0.5, 0, 1)

    def disc(self, x: float, y: float, radius: float, soft: float = 0.0) -> np.ndarray:
        distance = np.hypot(self.x - x, self.y - y)
        return np.clip((radius - distance) / max(soft, 1 / self.size) + 0.5, 0, 1)

    def stripe(self, x: np.ndarray, half: float) -> np.ndarray:
        """Coverage [size, size] of an upright band around ``x [size, 1]``."""
        return np.clip((half - np.abs(self.x - x)) * self.size + 0.5, 0, 1)

    def curve(self, middle: float, swing: float, waves: float = 1.0) -> np.ndarray:
        """A gently rolling line over x."""
        a, b = self.rng.uniform(0, 6.28, 2)
        return middle + swing * (np.sin(6.28 * waves * self.x[0] + a) + 0.4 * np.sin(14.0 * waves * self.x[0] + b))

    def grain(self, amount: float, across: int = 1, down: int = 1) -> np.ndarray:
        """Noise [size, size, 1] around 0, stretched: grass is tall, sand is even, wood is wide."""
        shape = (-(-self.size // down), -(-self.size // across))
        noise = self.rng.standard_normal(shape, np.float32)
        if across > 1 or down > 1:
            noise = np.asarray(Image.fromarray(noise).resize((self.size, self.size), Image.Resampling.BICUBIC))
        return amount * noise[..., None]

    def specks(self, count: int, low: float, high: float, radius: float) -> np.ndarray:
        """Coverage [size, size] of small soft dots at random places between two heights."""
        field = np.zeros((self.size, self.size), np.float32)
        for u, v, r in zip(
            self.places(0, 1, count), self.places(low, high, count), self.places(0.6 * radius, 1.4 * radius, count), strict=True
        ):
            reach = int(3 * r * self.size) + 1
            i, j = int(v * self.size), int(u * self.size)
            rows, columns = slice(max(i - reach, 0), i + reach + 1), slice(max(j - reach, 0), j + reach + 1)
            spot = np.exp(-((self.x[:, columns] - u) ** 2 + (self.y[rows] - v) ** 2) / (r * r))
            field[rows, columns] = np.maximum(field[rows, columns], spot)
        return field


def _lay(canvas: np.ndarray, color: Rgb | np.ndarray, coverage: np.ndarray) -> None:
    """Blend a color over the canvas in place."""
    canvas += (np.asarray(color, np.float32) - canvas) * coverage[..., None]


def _meadow(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.52, 0.78, 0.96), (0.80, 0.92, 0.98), (0.93, 0.97, 0.94))
    clouds = np.zeros((e.size, e.size), np.float32)
    for x, y in zip(e.places(0.1, 0.9, 2), e.places(0.08, 0.24, 2), strict=True):
        for step, radius in enumerate((0.045, 0.057, 0.057, 0.045)):
            clouds = np.maximum(clouds, e.disc(x + 0.055 * step - 0.08, y + 0.012 * (-1) ** step, radius, 0.05))
    _lay(canvas, (1, 1, 1), 0.85 * clouds)
    _lay(canvas, (0.60, 0.80, 0.52), e.below(e.curve(0.44, 0.035)))
    _lay(canvas, (0.50, 0.74, 0.38), e.below(e.curve(0.58, 0.035)))
    near = e.below(e.curve(0.74, 0.03))
    _lay(canvas, np.array((0.42, 0.68, 0.28), np.float32) + e.grain(0.035, 1, 4), near)
    _lay(canvas, (1.0, 0.98, 0.90), 0.9 * e.specks(10, 0.80, 0.99, 0.011))
    _lay(canvas, (1.0, 0.86, 0.40), 0.9 * e.specks(8, 0.80, 0.99, 0.009))
    return canvas


def _beach(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.55, 0.83, 0.97), (0.90, 0.97, 0.99))
    horizon = e.rng.uniform(0.30, 0.38)
    sea = e.gradient((0.12, 0.55, 0.72), (0.20, 0.66, 0.78), (0.50, 0.85, 0.86)) + e.grain(0.02, 12, 1)
    _lay(canvas, sea, e.below(horizon))
    shore = e.curve(0.58, 0.022)
    _lay(canvas, (0.97, 0.99, 1.0), e.below(shore - 0.03))
    _lay(canvas, (0.80, 0.70, 0.54), e.below(shore))
    sand = e.gradient((0.96, 0.88, 0.70), (0.95, 0.87, 0.69), (0.91, 0.80, 0.60)) + e.grain(0.014)
    _lay(canvas, sand, e.below(shore + 0.035))
    return canvas


def _night(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.03, 0.04, 0.14), (0.08, 0.09, 0.26), (0.20, 0.17, 0.40), (0.34, 0.25, 0.46))
    slope, height = e.rng.uniform(-0.8, 0.8), e.rng.uniform(0.2, 0.6)
    band = np.exp(-((e.y - height - slope * (e.x - 0.5)) ** 2) / 0.03)
    canvas += (band * np.float32(0.11))[..., None] * np.array((0.8, 0.8, 1.0), np.float32) + e.grain(0.006)
    _lay(canvas, (1.0, 1.0, 0.92), 0.95 * e.specks(34, 0.0, 0.85, 0.0065))
    _lay(canvas, (0.85, 0.92, 1.0), e.specks(5, 0.0, 0.75, 0.013))
    _lay(canvas, (0.07, 0.07, 0.16), e.below(e.curve(0.86, 0.025)))
    _lay(canvas, (0.03, 0.03, 0.09), e.below(e.curve(0.93, 0.02)))
    return canvas


def _snow(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.62, 0.73, 0.86), (0.80, 0.87, 0.94), (0.90, 0.94, 0.98))
    ridge = e.curve(0.50, 0.03)
    firs = np.min([0.54 - tall + 3.4 * np.abs(e.x[0] - x) for x, tall in zip(e.places(0, 1, 7), e.places(0.12, 0.22, 7), strict=True)], 0)
    _lay(canvas, (0.38, 0.52, 0.56), 0.85 * e.below(firs))
    _lay(canvas, (0.88, 0.92, 0.97), e.below(ridge))
    _lay(canvas, np.array((0.95, 0.97, 0.99), np.float32) + e.grain(0.008), e.below(e.curve(0.70, 0.035)))
    _lay(canvas, (1.0, 1.0, 1.0), 0.95 * e.specks(38, 0.0, 1.0, 0.012))
    return canvas


def _table(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.80, 0.60, 0.40), (0.74, 0.53, 0.34)) + e.grain(0.030, 24, 1) + e.grain(0.022, 48, 3)
    edges = np.linspace(0, 1, 5)[:-1] + e.rng.uniform(0, 0.25)
    tones = e.rng.uniform(-0.045, 0.045, 5)
    canvas += tones[np.searchsorted(edges, e.y[:, 0])][:, None, None].astype(np.float32)
    for edge in edges:
        canvas *= (1 - 0.38 * np.exp(-(((e.y - edge) * e.size / 0.9) ** 2)))[..., None]
        canvas *= (1 + 0.12 * np.exp(-(((e.y - edge) * e.size - 2.0) ** 2)))[..., None]
    return canvas


def _sea(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.25, 0.72, 0.85), (0.08, 0.46, 0.68), (0.03, 0.24, 0.46))
    rays = sum(np.exp(-(((e.x - x + 0.35 * e.y) / (0.05 + 0.08 * e.y)) ** 2)) for x in e.places(-0.2, 1.2, 4))
    canvas += (0.16 * rays * (1 - e.y))[..., None]
    weeds = np.zeros((e.size, e.size), np.float32)
    for x, top in zip(e.places(0.05, 0.95, 7), e.places(0.72, 0.86, 7), strict=True):
        sway = x + 0.012 * np.sin(26 * e.y + 20 * x)
        weeds = np.maximum(weeds, e.stripe(sway, 0.010) * e.below(top))
    _lay(canvas, (0.10, 0.46, 0.36), 0.8 * weeds)
    _lay(canvas, np.array((0.58, 0.60, 0.50), np.float32) + e.grain(0.02), 0.8 * e.below(e.curve(0.93, 0.015)))
    bubbles = np.zeros((e.size, e.size), np.float32)
    for x, y, r in zip(e.places(0, 1, 7), e.places(0, 0.9, 7), e.places(0.010, 0.026, 7), strict=True):
        bubbles = np.maximum(bubbles, np.clip(1.3 - np.abs(np.hypot(e.x - x, e.y - y) - r) * e.size, 0, 1))
    _lay(canvas, (0.85, 0.97, 1.0), 0.6 * bubbles)
    return canvas


def _desert(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.98, 0.78, 0.52), (0.99, 0.88, 0.68), (0.99, 0.93, 0.80))
    _lay(canvas, (1.0, 0.97, 0.86), 0.9 * e.disc(e.rng.uniform(0.15, 0.85), 0.18, 0.08, 0.03))
    for middle, lit, shade in ((0.46, (0.93, 0.72, 0.47), (0.84, 0.60, 0.38)), (0.62, (0.91, 0.66, 0.40), (0.79, 0.53, 0.31))):
        ridge = e.curve(middle, 0.05, 0.8)
        body = e.below(ridge)
        _lay(canvas, lit, body)
        _lay(canvas, shade, body * (1 - e.below(ridge + 0.16 * (0.5 + 0.5 * np.sin(6 * e.x[0] + 9 * middle)))) * 0.75)
    ripples = 0.018 * np.sin(120 * (e.y + 0.03 * np.sin(9 * e.x)))[..., None]
    _lay(canvas, np.array((0.89, 0.63, 0.37), np.float32) + ripples + e.grain(0.012), e.below(e.curve(0.80, 0.03)))
    return canvas


def _paper(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.985, 0.97, 0.93), (0.96, 0.94, 0.89)) + e.grain(0.006) + e.grain(0.006, 6, 6)
    pitch, shift = 1 / 12, e.rng.uniform(0, 1 / 12)
    for place in (e.x, e.y):
        near = np.abs((place - shift + pitch / 2) % pitch - pitch / 2) * e.size
        _lay(canvas, (0.62, 0.76, 0.90), 0.6 * np.broadcast_to(np.clip(1.05 - near, 0, 1), canvas.shape[:2]))
    return canvas


def _sunset(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.30, 0.20, 0.48), (0.72, 0.32, 0.52), (0.98, 0.56, 0.42), (1.0, 0.82, 0.46), (1.0, 0.85, 0.5), (1.0, 0.85, 0.5))
    x, horizon = e.rng.uniform(0.25, 0.75), e.rng.uniform(0.60, 0.68)
    canvas += (0.30 * np.exp(-((e.x - x) ** 2 + (e.y - horizon) ** 2) / 0.05))[..., None] * np.array((1, 0.8, 0.4), np.float32)
    _lay(canvas, (1.0, 0.95, 0.72), e.disc(x, horizon, 0.13))
    sea = e.gradient((0, 0, 0), (0, 0, 0), (0.80, 0.46, 0.46), (0.34, 0.22, 0.42)) + e.grain(0.03, 16, 1)
    _lay(canvas, sea, e.below(horizon))
    glitter = np.exp(-(((e.x - x) / (0.05 + 0.25 * (e.y - horizon))) ** 2)) * (0.5 + 0.5 * np.sin(150 * e.y + 8 * np.sin(20 * e.x)))
    _lay(canvas, (1.0, 0.88, 0.60), 0.75 * glitter * e.below(horizon))
    return canvas


def _forest(e: _Easel) -> np.ndarray:
    canvas = e.gradient((0.62, 0.78, 0.60), (0.42, 0.62, 0.44), (0.20, 0.36, 0.24))
    for depth, color in ((0.012, (0.36, 0.52, 0.38)), (0.022, (0.24, 0.36, 0.26)), (0.034, (0.17, 0.24, 0.18))):
        trunks = np.zeros((e.size, e.size), np.float32)
        for x in e.places(-0.02, 1.02, 5):
            trunks = np.maximum(trunks, e.stripe(x + 0.01 * np.sin(5 * e.y + 9 * x), depth))
        _lay(canvas, color, trunks)
    shaft = np.exp(-(((e.x - e.rng.uniform(0.2, 0.9) + 0.5 * e.y) / 0.10) ** 2)) * (1 - e.y)
    canvas += (0.20 * shaft)[..., None] * np.array((1, 1, 0.7), np.float32)
    _lay(canvas, np.array((0.16, 0.30, 0.16), np.float32) + e.grain(0.03, 2, 3), e.below(e.curve(0.86, 0.02)))
    _lay(canvas, (0.75, 0.90, 0.50), 0.35 * e.specks(24, 0.0, 0.9, 0.016))
    return canvas


_PAINTERS = {
    "meadow": _meadow,
    "beach": _beach,
    "night": _night,
    "snow": _snow,
    "table": _table,
    "sea": _sea,
    "desert": _desert,
    "paper": _paper,
    "sunset": _sunset,
    "forest": _forest,
}
