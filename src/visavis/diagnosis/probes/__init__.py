"""What a model does not understand: minimal pairs of captions, and edits that should change nothing."""

from visavis.diagnosis.probes.result import Cost, Probes, Slice
from visavis.diagnosis.probes.running import probe_run

__all__ = ["Cost", "Probes", "Slice", "probe_run"]
