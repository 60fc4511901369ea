"""Minimal pairs of synthetic scenes: a true and a false caption that are written from facts which differ in one edit.

The edited caption is checked against the scene. If it happens to be true, another edit is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from visavis.synthetic import lexicon
from visavis.synthetic.captions import CaptionFacts, SceneCaption
from visavis.synthetic.lexicon import DEFAULT_STYLE, Style
from visavis.synthetic.relevance import fact_relevance
from visavis.synthetic.scene import ATTRIBUTES, BACKGROUNDS, MAX_OBJECTS, Scene

# Edits of a kind that are sampled for a scene before the kind is skipped.
MAX_TRIES = 12


@dataclass(frozen=True)
class ScenePair:
    """A true caption and a false one.

    Attributes:
        kind: What was edited.
        true: The true caption.
        edited: The false caption. A negation has no facts of its own and negates those of ``true``.
    """

    kind: str
    true: SceneCaption
    edited: SceneCaption


def make_scene_pairs(scene: Scene, rng: np.random.Generator, style: Style = DEFAULT_STYLE) -> list[ScenePair]:
    """Make at most one pair of each kind.

    Args:
        scene: The scene.
        rng: Random generator.
        style: Words of the captions.

    Returns:
        The pairs.
    """
    pairs = []
    for kind, sample in EDIT_KINDS.items():
        for _ in range(MAX_TRIES):
            if (fact_pair := next(sample(scene, rng), None)) is None:
                break
            true, edited = (_write(facts, style) for facts in fact_pair)
            if _is_true(scene, true.facts) and not _is_true(scene, edited.facts):
                pairs.append(ScenePair(kind, true, edited))
                break
    mention = _mention(scene, int(rng.integers(len(scene.things))))
    negated = SceneCaption(f"There is no {_noun(mention, style, bare=True)}", CaptionFacts())
    pairs.append(ScenePair("negated", SceneCaption(f"There is {_noun(mention, style)}", CaptionFacts((mention,))), negated))
    return pairs


def _is_true(scene: Scene, facts: CaptionFacts) -> bool:
    return bool(fact_relevance([scene], [facts])[0, 0] == 1)


FactPairs = Iterator[tuple[CaptionFacts, CaptionFacts]]


def _replaced(name: str) -> Callable[[Scene, np.random.Generator], FactPairs]:
    def sample(scene: Scene, rng: np.random.Generator) -> FactPairs:
        index = int(rng.integers(len(scene.things)))
        others = [value for value in ATTRIBUTES[name] if value != getattr(scene.things[index], name)]
        stated = _mention(scene, index) | {name: getattr(scene.things[index], name)}
        yield CaptionFacts((stated,)), CaptionFacts((stated | {name: others[int(rng.integers(len(others)))]},))

    return sample


def _swapped_colors(scene: Scene, rng: np.random.Generator) -> FactPairs:
    for i, j in _two_things(scene, rng):
        a, b = _mention(scene, i), _mention(scene, j)
        yield CaptionFacts((a, b)), CaptionFacts((a | {"color": b["color"]}, b | {"color": a["color"]}))


def _related(scene: Scene, rng: np.random.Generator) -> Iterator[CaptionFacts]:
    relations = sorted(scene.relations)
    if relations:
        i, name, j = relations[int(rng.integers(len(relations)))]
        yield CaptionFacts((_mention(scene, i), _mention(scene, j)), ((0, name, 1),))


def _swapped_roles(scene: Scene, rng: np.random.Generator) -> FactPairs:
    for true in _related(scene, rng):
        yield true, replace(true, mentions=true.mentions[::-1])


def _replaced_relation(scene: Scene, rng: np.random.Generator) -> FactPairs:
    for true in _related(scene, rng):
        yield true, replace(true, relations=((1, true.relations[0][1], 0),))


def _replaced_number(scene: Scene, rng: np.random.Generator) -> FactPairs:
    index = int(rng.integers(len(scene.things)))
    mention = _mention(scene, index)
    number = sum(_mention(scene, other) == mention for other in range(len(scene.things)))
    if 1 < number < MAX_OBJECTS:
        yield CaptionFacts((mention,) * number), CaptionFacts((mention,) * (number + 1))


def _replaced_total(scene: Scene, rng: np.random.Generator) -> FactPairs:
    total, mention = len(scene.things), _mention(scene, int(rng.integers(len(scene.things))))
    others = [number for number in lexicon.NUMBER_WORDS if number != total]
    if total > 1:
        yield CaptionFacts((mention,), total=total), CaptionFacts((mention,), total=others[int(rng.integers(len(others)))])


def _replaced_background(scene: Scene, rng: np.random.Generator) -> FactPairs:
    mention = _mention(scene, int(rng.integers(len(scene.things))))
    others = [background for background in BACKGROUNDS if background != scene.background]
    yield CaptionFacts((mention,), background=scene.background), CaptionFacts((mention,), background=others[int(rng.integers(len(others)))])


# Samplers of the facts of a true and of a false caption, by what is edited.
EDIT_KINDS: dict[str, Callable[[Scene, np.random.Generator], FactPairs]] = {
    **{f"{name} replaced": _replaced(name) for name in ("color", "shape", "pattern", "size")},
    "background replaced": _replaced_background,
    "colors swapped": _swapped_colors,
    "relation replaced": _replaced_relation,
    "roles swapped": _swapped_roles,
    "number replaced": _replaced_number,
    "total replaced": _replaced_total,
}


def _mention(scene: Scene, index: int) -> dict[str, str]:
    thing = scene.things[index]
    return {"shape": thing.shape, "color": thing.color}


def _two_things(scene: Scene, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    if len(scene.things) > 1:
        i, j = rng.permutation(len(scene.things))[:2].tolist()
        yield i, j


def _write(facts: CaptionFacts, style: Style) -> SceneCaption:
    """Write facts in the plainest words."""
    if facts.relations:
        first, name, _ = facts.relations[0]
        relation = (lexicon.INVERSE_RELATIONS if first else lexicon.RELATIONS)[name][0]
        body = f" {relation} ".join(_noun(mention, style) for mention in facts.mentions)
    elif len(facts.mentions) > 1 and all(mention == facts.mentions[0] for mention in facts.mentions):
        attributes = facts.mentions[0]
        body = f"{lexicon.NUMBER_WORDS[len(facts.mentions)]} {lexicon.pluralize(_noun(attributes, style, bare=True))}"
    else:
        body = lexicon.join_phrases([_noun(mention, style) for mention in facts.mentions])
    if facts.total is not None:
        body = f"{lexicon.NUMBER_WORDS[facts.total]} things, one of them {body}"
    if facts.background is not None:
        body = f"{body} {lexicon.BACKGROUND_PHRASES[facts.background][0]}"
    return SceneCaption(body[0].upper() + body[1:], facts)


def _noun(attributes: dict[str, str], style: Style, *, bare: bool = False) -> str:
    adjectives = [
        vocabulary[attributes[name]][0]
        for name, vocabulary in (("size", lexicon.SIZES), ("pattern", lexicon.PATTERNS))
        if name in attributes
    ]
    phrase = " ".join([*adjectives, style.colors[attributes["color"]][0], style.shapes[attributes["shape"]][0]])
    return phrase if bare else lexicon.with_article(phrase)
