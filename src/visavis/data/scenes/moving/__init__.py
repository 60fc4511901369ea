"""The drawn world in motion: short clips in which order and direction decide, what three experts say of them, and captions.

    folder = write_moving_scenes("data/moving", num_train=2000, seed=0)
    truth = MovingScenes.open(folder)                              # truth.partner_of: the same frames in another order

It is made of `clips` (what happens), `wording` (sentences), `senses` (features of experts) and `folder` (files).
"""

from visavis.data.scenes.moving.clips import Clip, Event, draw_clip
from visavis.data.scenes.moving.folder import MovingScenes, write_moving_scenes

__all__ = ["Clip", "Event", "MovingScenes", "draw_clip", "write_moving_scenes"]
