"""COCOS: the text compared with its tables

The same paper, section 5.
"""

from __future__ import annotations

from findings.base import Shown


def table_1_rows() -> Shown:
    """A comparison of Triplet SH with SmoothAP names the row of the plain triplet loss.

    Kind: misprint
    Where: Section 5, SmoothAP: "(Table 1, row 1.5 and 1.8)".
    Found: Row 1.5 is the triplet loss, which is below SmoothAP.
    Correct: Row 1.6, Triplet SH, and row 1.8.
    Effect: A slip of one digit.
    visavis: Rows are named by their number and their loss.
    """
    sums = {number: sum(map(float, _TABLE_1[number].split())) for number in ("1.5", "1.6", "1.8")}
    return Shown(
        sums["1.5"] < sums["1.8"] < sums["1.6"] - 20,
        "rsum, the sum of the six recalls: "
        + ", ".join(f"row {number} {total:.1f}" for number, total in sums.items()),
    )


def only_large_margin() -> Shown:
    """Triplet SH is far above SmoothAP in two experiments, not in one.

    Kind: claim
    Where: Section 5, SmoothAP: "the only experiment where the Triplet loss SH outperforms SmoothAP with a large margin".
    Found: VSRN on Flickr30K, where SmoothAP takes the most negatives into account (table 4, row 1.8).
    Correct: VSRN on MS-COCO (rows 2.6 and 2.8) has a gap nearly as large, and its row of table 4 counts 1.67 for i2t and 1.42 for t2i,
        where VSE++ on Flickr30K (row 1.4), with the smallest gap, counts 1.27 and 1.47.
    Effect: The four gaps have the order of the i2t counts, which supports the observation better than the text does. They do not have the
        order of the t2i counts, which are not as defined.
    visavis: A gap is given in points of RSUM, next to the spread over seeds.
    """
    total = {number: sum(map(float, row.split())) for number, row in _TABLE_1.items()}
    gaps = {
        second: total[first] - total[second]
        for first, second in (("1.2", "1.4"), ("1.6", "1.8"), ("2.2", "2.4"), ("2.6", "2.8"))
    }
    counts = {"1.4": (1.27, 1.47), "1.8": (2.33, 1.62), "2.4": (1.48, 1.41), "2.8": (1.67, 1.42)}
    by_gap, by_image, by_text = (
        sorted(gaps, key=key)
        for key in (gaps.__getitem__, lambda row: counts[row][0], lambda row: counts[row][1])
    )
    return Shown(
        gaps["2.8"] > 15
        and gaps["2.8"] > 2 * max(gaps["1.4"], gaps["2.4"])
        and by_gap == by_image != by_text,
        "rsum of Triplet SH minus that of SmoothAP: "
        + ", ".join(f"row {number} {gap:.1f}" for number, gap in gaps.items()),
    )


def observation_4() -> Shown:
    """SmoothAP is closer to Triplet SH in the direction that an observation excludes.

    Kind: claim
    Where: Section 3, observation (4): "Only for the VSE++ method on the i2t task, SmoothAP performs similar to the Triplet-loss SH."
    Found: On Flickr30k, the gap in R@1 is 0.3 for i2t and 0.9 for t2i.
    Correct: On MS-COCO (rows 2.2 and 2.4), the gap is 1.7 for i2t and 1.0 for t2i: it is smaller for t2i.
    Effect: The observation describes Flickr30k only. Section 5 builds on it, with the number of positives of a query as the reason.
    visavis: Claim C4 tests i2t alone, and names what it leaves out.
    """
    recalls = {number: [float(value) for value in row.split()] for number, row in _TABLE_1.items()}
    gaps = {
        f"row {second}, {direction}": recalls[first][column] - recalls[second][column]
        for first, second in (("1.2", "1.4"), ("2.2", "2.4"))
        for direction, column in (("i2t", 0), ("t2i", 3))
    }
    return Shown(
        gaps["row 1.4, i2t"] < gaps["row 1.4, t2i"] < gaps["row 2.4, t2i"] < gaps["row 2.4, i2t"],
        "R@1 of Triplet SH minus that of SmoothAP: "
        + ", ".join(f"{name} {gap:.1f}" for name, gap in gaps.items()),
    )


def too_many_negatives() -> Shown:
    """The loss with the worst RSUM uses about one negative, not too many.

    Kind: claim
    Where: Section 5, NT-Xent: the gradient "is dominated by too many non-informative negatives", as the reason why Triplet SH is better.
    Found: VSRN on MS-COCO (row 2.7): 1.10 and 1.11 negatives per query, and the lowest RSUM of rows 2.5 to 2.8, 46.7 below Triplet SH, which uses one.
    Correct: The number of negatives does not explain this row. As printed, even the triplet loss has more (1.21 and 1.15, row 2.5) and is better.
        (Table 2 has means over queries that have a negative, table 3 over all queries.)
    Effect: The summary of section 5, that losses with lower scores use too many negatives, has an exception of the size of its examples.
    visavis: Claims C8 and C9 test the number of negatives with more objectives.
    """
    total = {
        number: sum(map(float, _TABLE_1[number].split())) for number in ("2.5", "2.6", "2.7", "2.8")
    }
    counts = {"2.5": 1.21, "2.6": 1.0, "2.7": 1.10, "2.8": 1.67}
    worst = min(total, key=total.__getitem__)
    return Shown(
        worst == "2.7" and counts["2.7"] < counts["2.5"] < counts["2.8"],
        "i2t negatives and rsum: "
        + ", ".join(f"row {row} {counts[row]:.2f} and {total[row]:.1f}" for row in total),
    )


_TABLE_1 = {
    "1.2": "42.4 71.2 80.7 30.0 59.0 70.4",
    "1.4": "42.1 70.8 80.6 29.1 58.1 69.7",
    "1.5": "56.4 83.6 90.1 43.1 74.4 83.1",
    "1.6": "68.3 89.6 94.0 51.2 78.0 85.6",
    "1.8": "63.1 86.6 92.4 45.8 73.7 82.3",
    "2.2": "32.5 61.6 73.8 21.3 48.1 61.5",
    "2.4": "30.8 60.3 73.6 20.3 46.5 60.1",
    "2.5": "42.9 74.3 84.9 33.5 65.1 77.1",
    "2.6": "48.9 78.1 87.4 37.8 68.1 78.9",
    "2.7": "37.9 69.2 80.7 29.5 61.0 74.0",
    "2.8": "46.0 76.1 85.9 33.8 64.1 76.0",
}
"""The six recalls of rows of table 1: R@1, R@5, R@10 for i2t, then for t2i."""
