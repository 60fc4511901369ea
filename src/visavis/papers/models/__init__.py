"""Models that only papers need, registered by entry points of the group ``visavis.models``."""
