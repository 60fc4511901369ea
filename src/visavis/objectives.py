"""The objectives and ``parse``, under their public import path."""

from visavis.losses.objectives import *  # noqa: F403 - the names of losses.objectives.__all__
