"""Coverage of the interval of ``visavis data audit --part learning_curve`` over simulated learning
curves.

    python studies/curve_coverage.py [--curves 300] [--seed 3]

Each curve has three models of 750, 1,500, 3,000 and 6,000 images. Their RSUM has a standard
deviation of 2 around 400 - 40 (n / 6,000)^-c, or, for c = 0, around 300 + 40 log(n / 6,000). Prints
the true gain of twice as many images, the share of 95 % intervals that contain it, and their mean
width.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from visavis.research.audit.learning_curve import extrapolate

SIZES = np.repeat([750, 1500, 3000, 6000], 3)
EXPONENTS = 0.0, 0.05, 0.2, 0.5, 1.0, 2.0
DEVIATION = 2.0


def law(sizes: np.ndarray, exponent: float) -> np.ndarray:
    share = sizes / SIZES[-1]
    return 300 + 40 * np.log(share) if exponent == 0 else 400 - 40 * share**-exponent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=int, default=300)
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    print("| exponent | gain | coverage | width |\n|---|---|---|---|")
    for exponent in EXPONENTS:
        random = np.random.default_rng(options.seed)
        [gain] = np.diff(law(np.array([SIZES[-1], 2 * SIZES[-1]]), exponent))
        intervals = [
            extrapolate(SIZES, law(SIZES, exponent) + random.normal(0, DEVIATION, len(SIZES)), n)
            for n in range(options.curves)
        ]
        holds = statistics.fmean(one.low <= gain <= one.high for one in intervals)
        print(
            f"| {exponent:g} | {gain:.1f} | {100 * holds:.1f} % | "
            f"{statistics.fmean(one.high - one.low for one in intervals):.1f} |"
        )


if __name__ == "__main__":
    main()
