"""Robustness probes: minimal pairs of captions, and edits of captions and images that should not
change the results.
"""

from visavis.research.robustness.probes import ProbeReport, ProbeResult, RecallChange, probe_run

__all__ = ["ProbeReport", "ProbeResult", "RecallChange", "probe_run"]
