"""Robustness probes: minimal pairs of captions, and edits of captions and images that should not change the results."""

from visavis.robustness.probe_results import ProbeReport, ProbeResult, RecallChange
from visavis.robustness.probes import probe_run

__all__ = ["ProbeReport", "ProbeResult", "RecallChange", "probe_run"]
