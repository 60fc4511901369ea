"""What the command line shows: progress bars, tables of results, thumbnails where the terminal can."""

from visavis.cli.output.bars import Bars
from visavis.cli.output.comparison import print_comparison, print_reproduction
from visavis.cli.output.data import print_audit, print_catalog, print_check, print_converted, print_converted_model, print_findings
from visavis.cli.output.graded import print_agreement, print_coherence, print_distributions, print_fitted, print_judged
from visavis.cli.output.objectives import print_anatomy
from visavis.cli.output.probes import print_probes
from visavis.cli.output.retrieval import print_built, print_judgements, print_results, print_texts
from visavis.cli.output.runs import print_diagnosis, print_evaluation, print_explanation, print_trained

__all__ = [
    "Bars",
    "print_agreement",
    "print_anatomy",
    "print_audit",
    "print_built",
    "print_catalog",
    "print_check",
    "print_converted",
    "print_converted_model",
    "print_coherence",
    "print_comparison",
    "print_diagnosis",
    "print_distributions",
    "print_evaluation",
    "print_explanation",
    "print_findings",
    "print_fitted",
    "print_judged",
    "print_judgements",
    "print_probes",
    "print_reproduction",
    "print_results",
    "print_texts",
    "print_trained",
]
