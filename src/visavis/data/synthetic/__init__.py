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

from typing import TYPE_CHECKING

from visavis.core.lazy_imports import lazy_names

if TYPE_CHECKING:
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

__getattr__ = lazy_names(
    __name__,
    {
        "CaptionFacts": "visavis.data.synthetic.captions",
        "SceneCaption": "visavis.data.synthetic.captions",
        "fact_relevance": "visavis.data.synthetic.captions",
        "write_caption": "visavis.data.synthetic.captions",
        "write_captions": "visavis.data.synthetic.captions",
        "ClipAnnotations": "visavis.data.synthetic.clips",
        "write_synthetic_clips": "visavis.data.synthetic.clips",
        "ClipEvent": "visavis.data.synthetic.clips",
        "SyntheticClip": "visavis.data.synthetic.clips",
        "sample_clip": "visavis.data.synthetic.clips",
        "render_scene": "visavis.data.synthetic.rendering",
        "HELD_OUT_COLORS": "visavis.data.synthetic.scene",
        "HELD_OUT_RELATIONS": "visavis.data.synthetic.scene",
        "Scene": "visavis.data.synthetic.scene",
        "SceneObject": "visavis.data.synthetic.scene",
        "resample_layout": "visavis.data.synthetic.scene",
        "sample_scene": "visavis.data.synthetic.scene",
        "SceneGraphs": "visavis.data.synthetic.scene_dataset",
        "write_synthetic_scenes": "visavis.data.synthetic.scene_dataset",
    },
)
