"""Synthetic scenes and clips with captions and ground truth, for the offline demo, tests and
studies.

Scenes are images with the true relevance of each pair. Clips are short videos in which order and
direction decide, with features of three experts.

Example:
    >>> folder = write_synthetic_scenes("data/scenes", num_train=2000, seed=0)   # doctest: +SKIP
    >>> relevance = SceneGraphs.open(folder).relevance()                         # doctest: +SKIP
    >>> folder = write_synthetic_clips("data/clips", num_train=2000, seed=0)     # doctest: +SKIP
    >>> partner_of = ClipAnnotations.open(folder).partner_of                     # doctest: +SKIP
"""

from __future__ import annotations

from visavis.data.synthetic.captions import (
    CaptionFacts,
    SceneCaption,
    fact_relevance,
    write_caption,
    write_captions,
)
from visavis.data.synthetic.clips import (
    ClipAnnotations,
    ClipEvent,
    SyntheticClip,
    sample_clip,
    write_synthetic_clips,
)
from visavis.data.synthetic.rendering import render_scene
from visavis.data.synthetic.scene import (
    HELD_OUT_COLORS,
    HELD_OUT_RELATIONS,
    Scene,
    SceneObject,
    resample_layout,
    sample_scene,
)
from visavis.data.synthetic.scene_dataset import SceneGraphs, write_synthetic_scenes

__all__ = [
    "CaptionFacts",
    "ClipAnnotations",
    "ClipEvent",
    "HELD_OUT_COLORS",
    "HELD_OUT_RELATIONS",
    "Scene",
    "SceneCaption",
    "SceneGraphs",
    "SceneObject",
    "SyntheticClip",
    "fact_relevance",
    "render_scene",
    "resample_layout",
    "sample_clip",
    "sample_scene",
    "write_caption",
    "write_captions",
    "write_synthetic_clips",
    "write_synthetic_scenes",
]
