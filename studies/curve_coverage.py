"""How often the interval of ``visavis data audit --part curve`` holds the truth, over simulated learning curves.

    python studies/curve_coverage.py [--curves 300] [--seed 3]

Each curve has three models of 750, 1,500, 3,000 and 6,000 pictures, whose RSUM scatters by 2 about 400 - 40 (n / 6,000)^-c, or, for c = 0,
about 300 + 40 log(n / 6,000). Printed: what twice as many would truly bring, how often the interval of 95 % holds it, and its mean width.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from visavis.auditing.power_law import outlook

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
    print("| exponent | gain | holds it | width |\n|---|---|---|---|")
    for exponent in EXPONENTS:
        random = np.random.default_rng(options.seed)
        [gain] = np.diff(law(np.array([SIZES[-1], 2 * SIZES[-1]]), exponent))
        told = [outlook(SIZES, law(SIZES, exponent) + random.normal(0, DEVIATION, len(SIZES)), n) for n in range(options.curves)]
        holds = statistics.fmean(one.low <= gain <= one.high for one in told)
        print(f"| {exponent:g} | {gain:.1f} | {100 * holds:.1f} % | {statistics.fmean(one.high - one.low for one in told):.1f} |")


if __name__ == "__main__":
    main()
