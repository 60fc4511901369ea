"""Models that only papers need, registered by entry points of the group ``visavis.models``. Each is
a `Matcher` with a ``Config``, so recipes and commands name it like the other models.
"""
