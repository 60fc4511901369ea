"""Captions of a scene, each with the facts that it states, and how many of them hold for any scene.

A caption is planned first (which things it mentions, which of their attributes, which relations).
Then it is written with synonyms and in one of several word orders. Idioms that contain colors or
shapes ("once in a blue moon") state no facts and are distractors.

A minimal pair is a true and a false caption that are written from facts which differ in one edit.
The edited caption is checked against the scene. If it happens to be true, another edit is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from visavis.core.errors import DataError
from visavis.data.synthetic import lexicon
from visavis.data.synthetic.lexicon import DEFAULT_STYLE, Style
from visavis.data.synthetic.scene import (
    ATTRIBUTES,
    BACKGROUNDS,
    MAX_OBJECTS,
    RELATIONS,
    Scene,
    SceneObject,
    T,
    pick,
)


@dataclass(frozen=True)
class CaptionFacts:
    """Facts that a caption states.

    Attributes:
        mentions: Stated attributes of each mentioned thing, such as ``{"shape": "star", "color":
            "red"}``. "Two red stars" are two mentions.
        relations: Index of a mention, relation, and index of another mention.
        background: The background. None: not stated.
        total: Number of things in the scene. None: not stated.
    """

    mentions: tuple[dict[str, str], ...] = ()
    relations: tuple[tuple[int, str, int], ...] = ()
    background: str | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        problem = ""
        for name, value in (stated for mention in self.mentions for stated in mention.items()):
            if value not in ATTRIBUTES.get(name, ()):
                problem = f"attributes of synthetic things, got {name}={value!r}"
        totals = (None, *range(1, MAX_OBJECTS + 1))
        if self.background not in (None, *BACKGROUNDS) or self.total not in totals:
            problem = (
                f"1 to {MAX_OBJECTS} things on a known background, got {self.total!r} on "
                f"{self.background!r}"
            )
        count = len(self.mentions)
        for i, name, j in self.relations:
            if name not in RELATIONS or not 0 <= min(i, j) <= max(i, j) < count <= MAX_OBJECTS:
                problem = f"{', '.join(RELATIONS)} of {count} mentions, got {name!r} of {i} and {j}"
        if problem:
            raise DataError(f"a caption: expected {problem}.")


@dataclass(frozen=True)
class SceneCaption:
    """A caption and its facts.

    Attributes:
        text: The caption.
        facts: The facts that it states.
    """

    text: str
    facts: CaptionFacts


def write_caption(
    scene: Scene, rng: np.random.Generator, style: Style = DEFAULT_STYLE
) -> SceneCaption:
    """Write a random true caption of a scene.

    Args:
        scene: The scene.
        rng: Random generator.
        style: Words of the caption.

    Returns:
        The caption.
    """
    return _Writer(scene, rng, style).write()


def write_captions(
    scene: Scene, count: int, rng: np.random.Generator, style: Style = DEFAULT_STYLE
) -> list[SceneCaption]:
    """Write different true captions of a scene.

    Args:
        scene: The scene.
        count: Number of captions.
        rng: Random generator.
        style: Words of the captions.

    Returns:
        The captions.
    """
    # A caption may be sampled twice.
    by_text: dict[str, SceneCaption] = {}
    while len(by_text) < count:
        caption = write_caption(scene, rng, style)
        by_text.setdefault(caption.text, caption)
    return list(by_text.values())


class _Writer:
    """State of writing one caption: the scene, the random generator, and the facts so far."""

    def __init__(self, scene: Scene, rng: np.random.Generator, style: Style):
        self.scene = scene
        self.rng = rng
        self.style = style
        self.mentions: list[dict[str, str]] = []
        self.relations: list[tuple[int, str, int]] = []
        self.background: str | None = None
        self.total: int | None = None

    def write(self) -> SceneCaption:
        several = len(self.scene.things) > 1
        kinds = (
            (self._plain, 0.2),
            (self._related, 0.7 * bool(self._evident_relations())),
            (self._counted, 0.45 * bool(self._similar_things())),
            (self._totaled, 0.12 * several),
        )
        chances = np.array([chance for _, chance in kinds])
        kind, _ = kinds[int(self.rng.choice(len(kinds), p=chances / chances.sum()))]
        body = kind()
        # Complete the sentence: an opening, the background before or after, perhaps an idiom.
        location = ""
        if self._happens(0.55):
            self.background = self.scene.background
            location = self._pick(lexicon.BACKGROUND_PHRASES[self.background])
        if not location:
            text = self._pick(lexicon.OPENINGS) + body
        elif self._happens(0.3):
            is_plural = body.split(maxsplit=1)[0] in lexicon.NUMBER_WORDS.values() or (
                not self.relations and len(self.mentions) > 1
            )
            verb = "are" if is_plural else "is"
            text = f"{location}{',' if self._happens(0.5) else f' {verb}'} {body}"
        elif "," in body or self._happens(0.15):
            text = f"{self._pick(lexicon.OPENINGS)}{body}, {'all' if len(self.mentions) > 2 else 'seen'} {location}"
        else:
            text = f"{self._pick(lexicon.OPENINGS)}{body} {location}"
        if self._happens(0.12):
            text = f"{text}, {self._pick(lexicon.IDIOMS)}"
        text = text[0].upper() + text[1:]
        text = text + "." if self._happens(0.7) else text
        return SceneCaption(
            text,
            CaptionFacts(tuple(self.mentions), tuple(self.relations), self.background, self.total),
        )

    # Kinds of captions

    def _plain(self) -> str:
        """Write one thing, or a list of up to three."""
        things = self._shuffled(range(len(self.scene.things)))[: 1 if self._happens(0.45) else 3]
        return lexicon.join_phrases([self._mention(i) for i in things])

    def _related(self) -> str:
        """Write a relation of two things, sometimes with a third that is related to the second or
        only mentioned.
        """
        i, name, j = self._pick(self._evident_relations())
        if self._happens(0.5):
            text = f"{self._mention(i)} {self._pick(lexicon.RELATIONS[name])} {self._mention(j)}"
            self.relations.append((0, name, 1))
            last = j
        else:
            text = f"{self._mention(j)} {self._pick(lexicon.INVERSE_RELATIONS[name])} {self._mention(i)}"
            self.relations.append((1, name, 0))
            last = i
        others = [k for k in range(len(self.scene.things)) if k not in (i, j)]
        if not others or self._happens(0.45):
            return text
        onward = [
            (name, k)
            for start, name, k in self._evident_relations()
            if start == last and k in others
        ]
        if onward and self._happens(0.6):
            name, k = self._pick(onward)
            self.relations.append((1, name, 2))
            return f"{text}, which is {self._pick(lexicon.RELATIONS[name])} {self._mention(k)}"
        form = self._pick(
            ("{text}, and {other}", "{text}, with {other} too", "{other}, and {text}")
        )
        return form.format(text=text, other=self._mention(self._pick(others)))

    def _counted(self) -> str:
        """Write several things that share a shape, a color or both, and sometimes another one."""
        shared, group = self._pick(self._similar_things())
        attributes = {name: getattr(self.scene.things[group[0]], name) for name in shared}
        pattern = {self.scene.things[i].pattern for i in group}
        if len(pattern) == 1 and pattern != {"plain"} and self._happens(0.5):
            attributes["pattern"] = pattern.pop()
        self.mentions += [attributes] * len(group)
        text = f"{lexicon.NUMBER_WORDS[len(group)]} {self._noun(attributes, plural=True)}"
        others = [i for i in range(len(self.scene.things)) if i not in group]
        if others and self._happens(0.6):
            return lexicon.join_phrases([text, self._mention(self._pick(others))])
        return text

    def _totaled(self) -> str:
        """Write the number of things, and one or two of them."""
        self.total = len(self.scene.things)
        things = self._shuffled(range(self.total))[: 1 if self._happens(0.6) else 2]
        number = lexicon.NUMBER_WORDS[self.total]
        named = lexicon.join_phrases([self._mention(i) for i in things])
        if len(things) == self.total:
            return f"{number} things: {named}"
        if len(things) == 1:
            return self._pick(
                (f"{number} things, one of them {named}", f"{number} shapes, and one is {named}")
            )
        return f"{number} things, among them {named}"

    # Wording

    def _mention(self, index: int) -> str:
        """Write a noun phrase for one thing. Its stated attributes are sampled each time."""
        thing = self.scene.things[index]
        stated = {"shape": thing.shape, "color": thing.color}
        # A mention states the shape, the color or both.
        drop = self.rng.random()
        if drop < 0.10:
            del stated["color"]
        elif drop < 0.18:
            del stated["shape"]
        if self._happens(0.55 if thing.pattern != "plain" else 0.08):
            stated["pattern"] = thing.pattern
        if self._happens(0.35):
            stated["size"] = thing.size
        self.mentions.append(stated)
        return self._noun(stated)

    def _noun(self, attributes: dict[str, str], *, plural: bool = False) -> str:
        adjectives = [self._pick(lexicon.SIZES[attributes["size"]])] if "size" in attributes else []
        tail = ""
        middle = (
            [self._pick(self.style.colors[attributes["color"]])] if "color" in attributes else []
        )
        if "pattern" in attributes:
            if attributes["pattern"] in lexicon.PATTERN_SUFFIXES and self._happens(0.3):
                tail = f" {self._pick(lexicon.PATTERN_SUFFIXES[attributes['pattern']])}"
            else:
                middle.insert(
                    len(middle) if self._happens(0.2) else 0,
                    self._pick(lexicon.PATTERNS[attributes["pattern"]]),
                )
        noun = (
            self._pick(self.style.shapes[attributes["shape"]])
            if "shape" in attributes
            else self._pick(lexicon.GENERIC_NOUNS)
        )
        phrase = (
            " ".join([*adjectives, *middle, lexicon.pluralize(noun) if plural else noun]) + tail
        )
        return phrase if plural else lexicon.with_article(phrase)

    # Content of the scene

    def _evident_relations(self) -> list[tuple[int, str, int]]:
        """Return the relations that a person would name: of two directions the more evident one,
        and all contacts.
        """
        evident = []
        for i, name, j in self.scene.relations:
            a = self.scene.things[i]
            b = self.scene.things[j]
            is_horizontal = abs(a.x - b.x) > abs(a.y - b.y)
            if name in ("front", "inside") or is_horizontal == (name == "left"):
                evident.append((i, name, j))
        return sorted(evident)

    def _similar_things(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Return shared attributes and the things that share them, if there are at least two."""
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
        for shared in (("shape", "color"), ("shape",), ("color",)):
            for i, thing in enumerate(self.scene.things):
                groups.setdefault(
                    (shared, tuple(getattr(thing, name) for name in shared)), []
                ).append(i)
        return [(shared, tuple(group)) for (shared, _), group in groups.items() if len(group) > 1]

    def _happens(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def _pick(self, choices: Sequence[T]) -> T:
        return pick(self.rng, choices)

    def _shuffled(self, indices: range) -> list[int]:
        return [int(i) for i in self.rng.permutation(indices)]


# Integers, so that a true caption has a relevance of exactly 1.
FACT_WEIGHTS = {
    "shape": 2,
    "color": 2,
    "pattern": 2,
    "size": 1,
    "relation": 2,
    "background": 2,
    "total": 1,
}

_COLUMN = {
    key: i
    for i, key in enumerate(
        (name, value) for name, values in ATTRIBUTES.items() for value in values
    )
}


def fact_relevance(
    scenes: Sequence[Scene], facts: Sequence[CaptionFacts], *, block_size: int = 64
) -> np.ndarray:
    """Compute graded relevance of captions for scenes: the weighted share of the stated facts that
    hold.

    Each mention of a caption is matched with a different thing of the scene, in the way that makes
    most facts hold. A stated attribute holds if the matched thing has it. A relation holds if it is
    between the two matched things. All facts of a mention fail if there are more mentions than
    things. So "two red stars" is true for three red stars, and a relevance of 1 means that
    everything in the caption is true.

    Formula:
        $max_m (sum_{f in H_m} w_f) / (sum_f w_f)$ over matchings $m$, with $w_f$ the weight of a stated
        fact $f$, and $H_m$ the stated facts that hold. Computed as one matrix product of the scenes, with their
        things in each of 24 orders, and the captions.

    Args:
        scenes: The scenes.
        facts: Facts of the captions.
        block_size: Number of scenes that are scored at once.

    Returns:
        Float32 relevance in [0, 1], shape ``[scenes, facts]``. 1 if all facts are true.
    """
    weights = np.stack([_stated_weights(caption_facts) for caption_facts in facts])
    totals = weights.sum(1)
    relevance = np.empty((len(scenes), len(facts)), np.float32)
    for start in range(0, len(scenes), block_size):
        true_facts = np.concatenate(
            [_true_facts(scene) for scene in scenes[start : start + block_size]]
        )
        # [scenes, orders, facts], then the best order of each scene.
        points = (true_facts @ weights.T).reshape(-1, len(_ORDERS), len(facts)).max(1)
        relevance[start : start + block_size] = points / totals
    return relevance


_ORDERS = list(permutations(range(MAX_OBJECTS)))


def _true_facts(scene: Scene) -> np.ndarray:
    """Return what is true for a scene ``[24, F]``: a row for each order of its things in the slots
    of a caption.
    """
    attributes = np.zeros((MAX_OBJECTS, len(_COLUMN)), np.float32)
    relations = np.zeros((len(RELATIONS), MAX_OBJECTS, MAX_OBJECTS), np.float32)
    for i, thing in enumerate(scene.things):
        for name in ATTRIBUTES:
            attributes[i, _COLUMN[name, getattr(thing, name)]] = 1
    for i, name, j in scene.relations:
        relations[RELATIONS.index(name), i, j] = 1
    orders = np.array(_ORDERS)
    # [24, relations, slots, slots]: relations of the things in each order.
    related = relations[:, orders[:, :, None], orders[:, None, :]].swapaxes(0, 1)
    scene_facts = np.concatenate(
        [
            _one_hot(BACKGROUNDS, scene.background),
            _one_hot(range(1, MAX_OBJECTS + 1), len(scene.things)),
        ]
    )
    rows = len(orders)
    return np.concatenate(
        [
            attributes[orders].reshape(rows, -1),
            related.reshape(rows, -1),
            np.tile(scene_facts, (rows, 1)),
        ],
        1,
    )


def _stated_weights(facts: CaptionFacts) -> np.ndarray:
    """Return the weights of the stated facts of a caption ``[F]``, in the layout of
    ``_true_facts``.
    """
    attributes = np.zeros((MAX_OBJECTS, len(_COLUMN)), np.float32)
    relations = np.zeros((len(RELATIONS), MAX_OBJECTS, MAX_OBJECTS), np.float32)
    for i, mention in enumerate(facts.mentions):
        for name, value in mention.items():
            attributes[i, _COLUMN[name, value]] = FACT_WEIGHTS[name]
    for i, relation, j in facts.relations:
        relations[RELATIONS.index(relation), i, j] = FACT_WEIGHTS["relation"]
    background = FACT_WEIGHTS["background"] * _one_hot(BACKGROUNDS, facts.background)
    total = FACT_WEIGHTS["total"] * _one_hot(range(1, MAX_OBJECTS + 1), facts.total)
    return np.concatenate([attributes.ravel(), relations.ravel(), background, total])


def _one_hot(values: Sequence[object], value: object) -> np.ndarray:
    return np.array([candidate == value for candidate in values], np.float32)


# Edits of a kind that are sampled for a scene before the kind is skipped.
MAX_TRIES = 12


@dataclass(frozen=True)
class ScenePair:
    """A true caption and a false one.

    Attributes:
        kind: Kind of the edit.
        true: The true caption.
        edited: The false caption. A negation has no facts of its own and negates those of the other
            caption.
    """

    kind: str
    true: SceneCaption
    edited: SceneCaption


def make_scene_pairs(
    scene: Scene, rng: np.random.Generator, style: Style = DEFAULT_STYLE
) -> list[ScenePair]:
    """Make at most one pair of each kind."""
    pairs = []
    for kind in EDIT_KINDS:
        for _ in range(MAX_TRIES):
            if (fact_pair := _sample_edit(kind, scene, rng)) is None:
                break
            # An edit may be true, too: "a star" of a scene with a star and a heart.
            true, edited = fact_relevance([scene], fact_pair)[0]
            if true == 1 and edited < 1:
                pairs.append(
                    ScenePair(kind, *(_plain_caption(facts, style) for facts in fact_pair))
                )
                break
    if (negation := _sample_negation(scene, rng, style)) is not None:
        pairs.append(negation)
    return pairs


def _sample_negation(scene: Scene, rng: np.random.Generator, style: Style) -> ScenePair | None:
    """Negate a thing of the scene, or a thing that it does not have. Then the negation is true, so
    that the word "no" does not show which text is false.
    """
    mention = _mention(pick(rng, scene.things))
    negation_is_true = bool(rng.random() < 0.5)
    if negation_is_true:
        mention = {name: pick(rng, ATTRIBUTES[name]) for name in ("shape", "color")}
        if fact_relevance([scene], [CaptionFacts((mention,))])[0, 0] == 1:
            return None
    stated = SceneCaption(f"There is {_noun(mention, style)}", CaptionFacts((mention,)))
    negated = SceneCaption(f"There is no {_noun(mention, style, bare=True)}", CaptionFacts())
    return ScenePair("negated", *((negated, stated) if negation_is_true else (stated, negated)))


FactPair = tuple[CaptionFacts, CaptionFacts]
EDIT_KINDS = (
    *(f"{name} replaced" for name in ("color", "shape", "pattern", "size")),
    "background replaced",
    "colors swapped",
    "relation replaced",
    "roles swapped",
    "number replaced",
    "total replaced",
    "thing added",
)


def _sample_edit(kind: str, scene: Scene, rng: np.random.Generator) -> FactPair | None:
    """Sample facts of a true caption, and the same facts after an edit of a kind. None: the scene
    has nothing to edit.
    """
    several = len(scene.things) > 1
    # The order of the calls of the generator is a part of a seed.
    match kind:
        case "colors swapped":
            if not several:
                return None
            a, b = (_mention(scene.things[i]) for i in rng.permutation(len(scene.things))[:2])
            swapped = a | {"color": b["color"]}, b | {"color": a["color"]}
            return CaptionFacts((a, b)), CaptionFacts(swapped)
        case "thing added":
            # A second thing of the scene, or one that is not in it.
            if not several:
                return None
            a, b = (_mention(scene.things[i]) for i in rng.permutation(len(scene.things))[:2])
            other = {name: pick(rng, ATTRIBUTES[name]) for name in b}
            return CaptionFacts((a, b)), CaptionFacts((a, other))
        case "relation replaced" | "roles swapped":
            if not scene.relations:
                return None
            i, name, j = pick(rng, sorted(scene.relations))
            mentions = _mention(scene.things[i]), _mention(scene.things[j])
            # Either word of a relation, "above" or "below", is as often true as false.
            order = 1 if rng.random() < 0.5 else -1
            first, second = (0, 1)[::order]
            true = CaptionFacts(mentions[::order], ((first, name, second),))
            if kind == "roles swapped":
                return true, replace(true, mentions=mentions[::-order])
            return true, replace(true, relations=((second, name, first),))
    thing = pick(rng, scene.things)
    mention = _mention(thing)
    match kind:
        case "number replaced":
            number = sum(_mention(other) == mention for other in scene.things)
            if not 1 < number < MAX_OBJECTS:
                return None
            return CaptionFacts((mention,) * number), CaptionFacts((mention,) * (number + 1))
        case "total replaced":
            if not several:
                return None
            true = CaptionFacts((mention,), total=len(scene.things))
            return true, replace(
                true, total=_pick_other(rng, tuple(lexicon.NUMBER_WORDS), len(scene.things))
            )
        case "background replaced":
            true = CaptionFacts((mention,), background=scene.background)
            return true, replace(true, background=_pick_other(rng, BACKGROUNDS, scene.background))
    name = kind.removesuffix(" replaced")
    stated = mention | {name: getattr(thing, name)}
    other = stated | {name: _pick_other(rng, ATTRIBUTES[name], stated[name])}
    return CaptionFacts((stated,)), CaptionFacts((other,))


def _mention(thing: SceneObject) -> dict[str, str]:
    return {"shape": thing.shape, "color": thing.color}


def _pick_other(rng: np.random.Generator, values: Sequence[T], value: T) -> T:
    return pick(rng, [candidate for candidate in values if candidate != value])


def _plain_caption(facts: CaptionFacts, style: Style) -> SceneCaption:
    """Write facts in the plainest words."""
    if facts.relations:
        first, name, _ = facts.relations[0]
        relation = (lexicon.INVERSE_RELATIONS if first else lexicon.RELATIONS)[name][0]
        body = f" {relation} ".join(_noun(mention, style) for mention in facts.mentions)
    elif len(facts.mentions) > 1 and all(
        mention == facts.mentions[0] for mention in facts.mentions
    ):
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
    phrase = " ".join(
        [*adjectives, style.colors[attributes["color"]][0], style.shapes[attributes["shape"]][0]]
    )
    return phrase if bare else lexicon.with_article(phrase)
