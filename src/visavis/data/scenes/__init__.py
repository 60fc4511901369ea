"""A captioned world drawn by the program: pictures, captions, and the true relevance of every pair.

    folder = write_scenes("data/scenes", num_train=2000, seed=0)
    degrees = SceneGraphs.open(folder).relevance()                 # [images, captions] in [0, 1]

It is made of `world` (what there is), `draw` and `backgrounds` (pixels), `captions` and `words` (sentences and
the facts they state), `style` (another paint, other names), `relevance` (how true a caption is of a picture) and `folder` (files).
`moving` is its sister: clips.
"""

from visavis.data.scenes.captions import Caption, Facts, caption, captions
from visavis.data.scenes.draw import draw
from visavis.data.scenes.folder import SceneGraphs, write_scenes
from visavis.data.scenes.moving import MovingScenes, write_moving_scenes
from visavis.data.scenes.relevance import relevance
from visavis.data.scenes.world import Scene, Thing, draw_scene, held_out_colors, held_out_relations, redraw

__all__ = [
    "Caption",
    "Facts",
    "MovingScenes",
    "Scene",
    "SceneGraphs",
    "Thing",
    "caption",
    "captions",
    "draw",
    "draw_scene",
    "held_out_colors",
    "held_out_relations",
    "redraw",
    "relevance",
    "write_moving_scenes",
    "write_scenes",
]
