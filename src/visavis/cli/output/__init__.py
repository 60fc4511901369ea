"""Printers of the command line: progress bars, tables of results, and thumbnails on terminals that support them."""

from visavis.cli.output.console import ProgressBars
from visavis.cli.output.dataset_tables import (
    print_audit,
    print_catalog,
    print_check,
    print_converted,
    print_converted_model,
    print_environment,
    print_feature_stores,
    print_scenes,
)
from visavis.cli.output.diagnostic_tables import print_diagnosis, print_explanation, print_objective_profiles, print_probes
from visavis.cli.output.experiment_tables import (
    print_agreement,
    print_coherence,
    print_comparison,
    print_distributions,
    print_estimator_evaluation,
    print_fitted,
    print_reproduction,
)
from visavis.cli.output.run_tables import print_evaluation, print_trained
from visavis.cli.output.search_tables import print_index_report, print_ranked_texts, print_results

__all__ = [
    "ProgressBars",
    "print_agreement",
    "print_audit",
    "print_catalog",
    "print_check",
    "print_coherence",
    "print_comparison",
    "print_converted",
    "print_converted_model",
    "print_diagnosis",
    "print_distributions",
    "print_environment",
    "print_estimator_evaluation",
    "print_evaluation",
    "print_explanation",
    "print_feature_stores",
    "print_fitted",
    "print_index_report",
    "print_objective_profiles",
    "print_probes",
    "print_ranked_texts",
    "print_reproduction",
    "print_results",
    "print_scenes",
    "print_trained",
]
