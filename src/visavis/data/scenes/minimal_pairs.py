"""Minimal pairs of drawn scenes, true and false by the truth: both captions are written from facts, which differ in one edit.

What the edited caption states is checked against the scene: where it happens to be true, another edit is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from visavis.data.scenes import words
from visavis.data.scenes.captions import Caption, Facts
from visavis.data.scenes.relevance import relevance
from visavis.data.scenes.style import PAPER, Style
from visavis.data.scenes.world import ATTRIBUTES, BACKGROUNDS, MOST_THINGS, Scene

TRIED = 12
"""Edits of a kind that are drawn for a scene before it is left out."""


@dataclass(frozen=True)
class ScenePair:
    """One case. edited: a false caption; negation states no fact of its own, it denies those of ``true``."""

    kind: str
    true: Caption
    edited: Caption


def scene_pairs(scene: Scene, rng: np.random.Generator, style: Style = PAPER) -> list[ScenePair]:
    """At most one case of each kind."""
    found = []
    for kind, draw in KINDS.items():
        for _ in range(TRIED):
            if (drawn := next(draw(scene, rng), None)) is None:
                break
            true, edited = (_write(facts, style) for facts in drawn)
            if _is_true(scene, true.facts) and not _is_true(scene, edited.facts):
                found.append(ScenePair(kind, true, edited))
                break
    one = _mention(scene, int(rng.integers(len(scene.things))))
    denied = Caption(f"There is no {_noun(one, style, bare=True)}", Facts())
    found.append(ScenePair("negated", Caption(f"There is {_noun(one, style)}", Facts((one,))), denied))
    return found


def _is_true(scene: Scene, facts: Facts) -> bool:
    return bool(relevance([scene], [facts])[0, 0] == 1)


Drawn = Iterator[tuple[Facts, Facts]]


def _replaced(name: str) -> Callable[[Scene, np.random.Generator], Drawn]:
    def draw(scene: Scene, rng: np.random.Generator) -> Drawn:
        index = int(rng.integers(len(scene.things)))
        others = [value for value in ATTRIBUTES[name] if value != getattr(scene.things[index], name)]
        stated = _mention(scene, index) | {name: getattr(scene.things[index], name)}
        yield Facts((stated,)), Facts((stated | {name: others[int(rng.integers(len(others)))]},))

    return draw


def _swapped_colors(scene: Scene, rng: np.random.Generator) -> Drawn:
    for i, j in _two(scene, rng):
        a, b = _mention(scene, i), _mention(scene, j)
        yield Facts((a, b)), Facts((a | {"color": b["color"]}, b | {"color": a["color"]}))


def _related(scene: Scene, rng: np.random.Generator) -> Iterator[Facts]:
    relations = sorted(scene.relations)
    if relations:
        i, name, j = relations[int(rng.integers(len(relations)))]
        yield Facts((_mention(scene, i), _mention(scene, j)), ((0, name, 1),))


def _swapped_roles(scene: Scene, rng: np.random.Generator) -> Drawn:
    for true in _related(scene, rng):
        yield true, replace(true, mentions=true.mentions[::-1])


def _replaced_relation(scene: Scene, rng: np.random.Generator) -> Drawn:
    for true in _related(scene, rng):
        yield true, replace(true, relations=((1, true.relations[0][1], 0),))


def _replaced_number(scene: Scene, rng: np.random.Generator) -> Drawn:
    index = int(rng.integers(len(scene.things)))
    one = _mention(scene, index)
    number = sum(_mention(scene, other) == one for other in range(len(scene.things)))
    if 1 < number < MOST_THINGS:
        yield Facts((one,) * number), Facts((one,) * (number + 1))


def _replaced_total(scene: Scene, rng: np.random.Generator) -> Drawn:
    total, one = len(scene.things), _mention(scene, int(rng.integers(len(scene.things))))
    others = [number for number in words.NUMBERS if number != total]
    if total > 1:
        yield Facts((one,), total=total), Facts((one,), total=others[int(rng.integers(len(others)))])


def _replaced_background(scene: Scene, rng: np.random.Generator) -> Drawn:
    one = _mention(scene, int(rng.integers(len(scene.things))))
    others = [background for background in BACKGROUNDS if background != scene.background]
    yield Facts((one,), background=scene.background), Facts((one,), background=others[int(rng.integers(len(others)))])


KINDS: dict[str, Callable[[Scene, np.random.Generator], Drawn]] = {
    **{f"{name} replaced": _replaced(name) for name in ("color", "shape", "pattern", "size")},
    "background replaced": _replaced_background,
    "colors swapped": _swapped_colors,
    "relation replaced": _replaced_relation,
    "roles swapped": _swapped_roles,
    "number replaced": _replaced_number,
    "total replaced": _replaced_total,
}
"""How the facts of a true caption and of a false one are drawn, by what is edited."""


def _mention(scene: Scene, index: int) -> dict[str, str]:
    thing = scene.things[index]
    return {"shape": thing.shape, "color": thing.color}


def _two(scene: Scene, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    if len(scene.things) > 1:
        i, j = rng.permutation(len(scene.things))[:2].tolist()
        yield i, j


def _write(facts: Facts, style: Style) -> Caption:
    """Facts in the plainest words that captions of the world have."""
    if facts.relations:
        first, name, _ = facts.relations[0]
        relation = (words.CONVERSES if first else words.RELATIONS)[name][0]
        body = f" {relation} ".join(_noun(mention, style) for mention in facts.mentions)
    elif len(facts.mentions) > 1 and all(mention == facts.mentions[0] for mention in facts.mentions):
        looks = facts.mentions[0]
        body = f"{words.NUMBERS[len(facts.mentions)]} {words.plural(_noun(looks, style, bare=True))}"
    else:
        body = words.join([_noun(mention, style) for mention in facts.mentions])
    if facts.total is not None:
        body = f"{words.NUMBERS[facts.total]} things, one of them {body}"
    if facts.background is not None:
        body = f"{body} {words.PLACES[facts.background][0]}"
    return Caption(body[0].upper() + body[1:], facts)


def _noun(looks: dict[str, str], style: Style, *, bare: bool = False) -> str:
    adjectives = [known[looks[name]][0] for name, known in (("size", words.SIZES), ("pattern", words.PATTERNS)) if name in looks]
    phrase = " ".join([*adjectives, style.colors[looks["color"]][0], style.shapes[looks["shape"]][0]])
    return phrase if bare else words.article(phrase)
