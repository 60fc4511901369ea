"""The budget with which the learning rates of the demo's recipes were chosen, the same for each: ``studies/demo_rates.py`` spends it."""

from __future__ import annotations

from collections.abc import Mapping

RATES = (3.75e-4, 7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
SEEDS = (1, 2, 3)
WORLD = 1
"""The seed of the scenes on which they were chosen: others than those that the demo draws."""
NUM_VAL = 500


def how_chosen(rates: Mapping[str, float]) -> str:
    """The learning rate of each objective, and how it was chosen, in a sentence."""
    each = ", ".join(f"{name} {lr:g}" for name, lr in rates.items())
    return (
        f"Learning rates: {each}; each the best of the same {len(RATES)} from {RATES[0]:g} to {RATES[-1]:g} by the mean validation "
        f"RSUM of {len(SEEDS)} seeds on another drawn world"
    )
