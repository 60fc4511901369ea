"""Verdicts of the study: correct on generated runs, and the page matches the numbers."""

from __future__ import annotations

import itertools
import math
import re
import tomllib

import numpy as np
import pytest
from scipy.stats import false_discovery_control, ttest_1samp

from visavis.evaluation.statistics import more_seeds

from .conftest import PROJECT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(PROJECT / "studies")
    import claim_places
    import claim_power
    import claims
    import confirm_claims
    import gradient_flow
    import recompute_claims
    import study
    import verdicts


NOISE = (
    0.3,
    -0.2,
    0.2,
    -0.4,
    0.1,
    0.4,
    -0.1,
    -0.3,
    0.2,
    0.0,
    -0.2,
    0.3,
    0.1,
    -0.4,
    0.0,
    0.2,
    -0.3,
    0.4,
)
MEANS = {"low": 90.0, "high": 100.0, "as high": 100.0, "higher": 110.0, "over": 95.0} | {
    f"at {mean}": mean for mean in range(0, 90, 10)
}


@pytest.fixture
def runs(monkeypatch):
    """Generated runs: the mean of a setting's name, plus shared noise per seed and small noise per
    run.
    """
    lines = [
        {
            "setting": name,
            "seed": seed,
            "metrics": {"rsum": mean + seed + noise, "fewer": -mean + noise / 2},
            "counts": {},
        }
        for position, (name, mean) in enumerate(MEANS.items())
        for seed, noise in enumerate(NOISE[position : position + 5])
    ]
    monkeypatch.setattr(
        verdicts,
        "read_evidence",
        lambda _: [*lines, {"setting": "broken", "seed": 0, "failure": "its loss is NaN"}],
    )


HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@pytest.mark.parametrize(
    ("test", "arguments", "verdict"),
    [
        ("higher", {"a": "x/high", "b": "x/low"}, HOLDS),
        ("higher", {"a": "x/low", "b": "x/high"}, FAILS),
        ("higher", {"a": "x/high", "b": "x/as high"}, UNDECIDED),
        ("lower", {"a": "x/high", "b": "x/low"}, FAILS),
        ("lower", {"a": "x/high", "b": "x/low", "metric": "fewer"}, HOLDS),
        ("higher", {"a": "x/high", "b": "x/low", "metric": "rsum less fewer"}, HOLDS),
        ("not_lower", {"a": "x/high", "b": "x/as high", "allowed": 2.0}, HOLDS),
        ("not_lower", {"a": "x/low", "b": "x/high", "allowed": 2.0}, FAILS),
        ("same", {"a": "x/high", "b": "x/as high", "allowed": 2.0}, HOLDS),
        ("same", {"a": "x/high", "b": "x/low", "allowed": 2.0}, FAILS),
        ("same", {"a": "x/high", "b": "x/low", "allowed": 10.0}, UNDECIDED),
        ("same", {"a": "x/high", "b": "x/high", "allowed": 1.0}, HOLDS),
        ("best", {"a": "x/higher", "among": ["x/*"]}, HOLDS),
        ("best", {"a": "x/high", "among": ["x/*"]}, FAILS),
        ("best", {"a": "x/high", "among": ["x/low", "x/as high"]}, UNDECIDED),
        ("each", {"pairs": [["x/high", "x/low"], ["x/higher", "x/high"]]}, HOLDS),
        ("each", {"pairs": [["x/high", "x/low"], ["x/high", "x/higher"]]}, FAILS),
        ("each", {"pairs": [["x/high", "x/low"], ["x/high", "x/as high"]]}, UNDECIDED),
        ("grows", {"series": [[1, "x/high", "x/low"], [9, "x/higher", "x/low"]]}, HOLDS),
        (
            "grows",
            {"series": [[1, "x/high", "x/low"], [9, "x/higher", "x/low"]], "falls": True},
            FAILS,
        ),
        ("grows", {"series": [[1, "x/high", "x/low"], [9, "x/as high", "x/low"]]}, UNDECIDED),
        ("inner_peak", {"series": ["x/low", "x/high", "x/higher", "x/over"]}, HOLDS),
        ("inner_peak", {"series": ["x/low", "x/high", "x/higher"]}, FAILS),
        ("inner_peak", {"series": ["x/low", "x/high", "x/as high"]}, UNDECIDED),
        ("reaches", {"a": "x/high", "metric": "rsum", "at_least": 90.0}, HOLDS),
        ("reaches", {"a": "x/high", "metric": "rsum", "at_least": 110.0}, FAILS),
        ("stays_below", {"a": "x/high", "metric": "rsum", "at_most": 102.0}, UNDECIDED),
        ("related", {"x": "rsum", "y": "fewer", "among": ["x/*"], "sign": -1}, HOLDS),
        ("related", {"x": "rsum", "y": "fewer", "among": ["x/*"], "sign": 1}, FAILS),
    ],
)
def test_verdicts_match_generated_runs(runs, test, arguments, verdict):
    assert verdicts.TESTS[test](**arguments).verdict == verdict


def test_p_values_agree_with_verdicts(runs):
    """At 0.05, as the intervals are of 95 %. A random claim and one of several comparisons
    included.
    """
    settings = [f"x/{name}" for name in MEANS]
    for a, b in itertools.combinations(settings, 2):
        for allowed in (2.0, 10.0):
            for found in (
                verdicts.higher(a, b),
                verdicts.lower(a, b),
                verdicts.not_lower(a, b, allowed),
                verdicts.same(a, b, allowed),
            ):
                assert (found.p <= 0.05) == (found.verdict != "undecided"), (a, b, found)
        for found in (
            verdicts.best(a, settings),
            verdicts.each([[a, b], [b, a]]),
            verdicts.each([[a, b], [settings[-1], a]]),
        ):
            assert (found.p <= 0.05) == (found.verdict != "undecided"), (a, b, found)
        for bound in (MEANS[a[2:]], MEANS[b[2:]]):
            found = verdicts.reaches(a, "rsum", bound)
            assert (found.p <= 0.05) == (found.verdict != "undecided"), (a, bound, found)


def test_correction_covers_all_tested_claims():
    results = [("holds", 0.001), ("holds", 0.02), ("does not hold", 0.03), ("not run",)]
    rows = claims.corrected(
        [claims.Row({"name": "X1"}, verdicts.ClaimResult("", *result)) for result in results]
    )
    assert [row.any_wrong_p for row in rows] == pytest.approx([0.003, 0.04, 0.04, 1])
    assert [row.wrong_share_p for row in rows] == pytest.approx([0.003, 0.03, 0.03, 1])
    assert [row.verdicts for row in rows] == [(result[0],) * 3 for result in results]
    rows = claims.corrected([*rows, claims.Row({}, verdicts.ClaimResult("", "undecided", 0.4))])
    assert [row.verdicts for row in rows[1:3]] == [
        ("holds", "undecided", "holds"),
        ("does not hold", "undecided", "does not hold"),
    ]


def test_seeds_needed_extend_the_seeds_of_one_test():
    values = (1.0, 3.0, 2.5, 0.5)
    deviation = verdicts.statistics.stdev(values)
    for level in (0.05, 0.05 / 144):
        needed = claim_power.seeds_needed([verdicts.Comparison(values, bound=0.75)], level)
        assert needed == 4 + more_seeds(1.0, deviation, 4, level=level)
        of_four = claim_power.seeds_needed([verdicts.Comparison(values, 0.75, tests=4)], level)
        assert of_four == 4 + more_seeds(1.0, deviation, 4, level=level / 4)
    assert claim_power.seeds_needed([verdicts.Comparison(values, bound=1.74)], 0.05) is None


def test_seeds_needed_decide_every_comparison_in_80_percent():
    """Two dependent comparisons need at least 80 % and not much more."""
    random = np.random.default_rng(0)
    wide = verdicts.Comparison((0.0, 2.0, 1.0), tests=1)
    narrow = verdicts.Comparison((0.3, 1.7, 1.0), tests=2)
    needed = claim_power.seeds_needed([wide, narrow], 0.05)
    shared, own = random.normal(size=(2, 4000, needed))
    found = [
        ttest_1samp(1 + deviation * noise, 0, axis=1).pvalue <= 0.05 / tests
        for deviation, noise, tests in ((1.0, shared, 1), (0.7, (shared + own) / 2**0.5, 2))
    ]
    assert 0.79 < np.mean(found[0] & found[1]) < 0.92


@pytest.mark.parametrize("true_claims", [0, 4])
def test_false_discovery_rate_is_5_percent_with_shared_runs(true_claims):
    """Claims that compare settings with the same runs, so that their tests are dependent in both
    directions. Three seeds, as most of the study.
    """
    random = np.random.default_rng(1)
    settings = random.normal(size=(3000, 6, 3))
    pairs = list(itertools.combinations(range(6), 2))
    differences = np.stack([settings[:, a] - settings[:, b] for a, b in pairs], axis=1)
    differences[:, :true_claims] += 30
    p_values = ttest_1samp(differences, 0, axis=2).pvalue
    found = false_discovery_control(p_values, axis=1) <= 0.05
    wrong = found[:, true_claims:].sum(1) / np.maximum(found.sum(1), 1)
    assert wrong.mean() <= 0.05


def test_decided_claims_by_each_correction():
    """By hand: five tested claims, of which one is of other settings."""
    p_of = {"U1": 0.008, "U2": 0.012, "C1": 0.016, "C2": 0.024, "W1": 0.04}
    rows = [
        claims.Row({"name": name}, verdicts.ClaimResult("", "holds", p)) for name, p in p_of.items()
    ]
    assert claim_power.decided_by(rows) == {
        "Holm": 5,
        "shared": 2,
        "gate": 5,
        "each paper": 5,
        "papers": 3,
        "BH": 5,
        "BY": 0,
    }


def test_cost_of_claims_counts_shared_runs_once(monkeypatch):
    lines = [
        {"setting": name, "seed": seed, "seconds": 10.0} for name in "abc" for seed in (1, 2, 3)
    ]
    monkeypatch.setattr(claim_power, "read_evidence", lambda _: lines)
    plans = [
        claim_power.Plan("X1", ("x/a", "x/b"), 3, 4, 9),
        claim_power.Plan("X2", ("x/b", "x/c"), 3, 4, 5),
        claim_power.Plan("X3", ("x/a", "x/b"), 3, 4, None),
    ]
    ordered = [(plan.name, seconds) for plan, seconds in claim_power.by_cost(plans)]
    assert ordered == [("X2", 100), ("X1", 230)]


def test_missing_runs_have_no_verdict(runs):
    for address in ("x/unheard of", "x/broken"):
        with pytest.raises(verdicts.Missing, match=address):
            verdicts.higher(address, "x/low")


ENTRIES = tomllib.loads(claims.CLAIMS.read_text())["claims"]


def test_claims_have_place_measure_and_limits():
    assert list(claim_places.faults(ENTRIES, None)) == []


def test_claim_places_exist_in_papers():
    texts = PROJECT.parent / "shared" / "papers"
    if not texts.is_dir():
        pytest.skip("the texts of the papers are absent: ../shared/papers")
    assert list(claim_places.faults(ENTRIES, texts)) == []


PAPER = """
4.3. Results
Table 2: recalls
1.1 30.8
the triplet loss (3a)
We see that the new loss retrieves better
than every other one in our tables.
"""
COPIED = "The new loss retrieves better than every other one"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"limits": " "}, "no limits"),
        ({"statement": ""}, "no statement"),
        ({"statement": "In it the triplet loss with (3a) is best"}, None),
        ({"statement": COPIED}, "in words of the paper"),
        ({"measure": ""}, "no measure"),
        ({"place": ""}, "no place"),
        ({"measure": "none. No data"}, "a measure and a test"),
        ({"paper": "unheard of"}, "unknown paper"),
        ({"place": "at the end"}, "names no section"),
        ({"place": "section 4.4"}, "section 4.4 is not in"),
        ({"place": "section 4"}, "section 4 is not in"),
        ({"place": "table 1"}, "table 1 is not in"),
        ({"place": "figure 2"}, "figure 2 is not in"),
        ({"place": "tables 2 to 3"}, "table 3 is not in"),
        ({"place": "eqs. 3, 3 and 5"}, "eq 5 is not in"),
        ({"place": "eq. 4"}, "eq 4 is not in"),
        ({"place": "table 2, row 1.2"}, "row 1.2 is not in"),
        ({"place": '"Conclusion"'}, "'Conclusion' is not in"),
        ({"published": "R@1 30.9"}, "30.9 is not in"),
        ({"published": "R@1 0.8"}, "0.8 is not in"),
        ({"paper": "ladder", "place": "section 4.3"}, "no section numbers"),
        ({"paper": "visavis", "place": "docstring of Triplet, Advice"}, None),
        ({"paper": "visavis", "place": "docstring of Triplet, Memory"}, "does not exist"),
        ({"paper": "visavis", "place": 'docs/index.md, "No heading"'}, "does not exist"),
    ],
)
def test_claim_places_faults(tmp_path, change, fault):
    claim = {
        "name": "X1",
        "statement": "it is better",
        "paper": "goal",
        "place": 'section 4.3, table 2, row 1.1, eq. 3, "Results"',
        "published": "R@1 30.8",
        "measure": "RSUM",
        "limits": "other data",
        "test": "higher",
    }
    for name in claim_places.TEXTS.values():
        (tmp_path / name).write_text(PAPER)
    found = list(claim_places.faults([claim | change], tmp_path))
    assert (found == []) if fault is None else any(fault in line for line in found), found


def test_texts_name_no_sections_of_ladder_paper():
    """Its headings have no numbers."""
    cited = re.compile(r"Ladder (?:loss|paper)[^.\n]{0,40}section \d")
    assert cited.search("Zhou et al., Ladder loss (2020), section 4")
    texts = [
        path for folder in ("src", "docs", "studies") for path in PROJECT.glob(f"{folder}/**/*")
    ]
    assert [
        path.name
        for path in texts
        if path.suffix in (".py", ".md", ".toml") and cited.search(path.read_text())
    ] == []


def test_every_claim_uses_runs_of_study():
    plan = tomllib.loads(study.PLAN.read_text())
    made = dict.fromkeys(gradient_flow.DATA, gradient_flow.OBJECTIVES)
    for name, entry in plan["experiments"].items():
        tuned = plan["worlds"][entry["world"]]["of"] if "world" in entry else plan["objectives"]
        chosen = {objective: {study.RATE: 1e-3, study.SPEC: "VLC()"} for objective in tuned}
        made[name] = study._experiment(name, entry, chosen, {}).settings

    def named(value):
        if isinstance(value, list):
            return [address for part in value for address in named(part)]
        return [value] if isinstance(value, str) and "/" in value else []

    for claim in ENTRIES:
        for address in [
            address
            for key in ("a", "b", "among", "pairs", "series")
            for address in named(claim.get(key, []))
        ]:
            experiment, setting = address.split("/", 1)
            assert setting in {*made[experiment], "*"}, (claim["name"], address)


@pytest.fixture(scope="module")
def results():
    """The result of every claim. Their bootstraps take seconds."""
    return claims.results()


def test_page_matches_numbers(results, monkeypatch):
    monkeypatch.setattr(claims, "results", lambda: results)
    assert claims.PAGE.read_text() == claims.page()


def test_claims_agree_with_an_independent_computation(monkeypatch):
    assert recompute_claims.mistakes() == []
    column = recompute_claims.column
    monkeypatch.setattr(
        recompute_claims,
        "column",
        lambda *of: {seed: value + 9 * seed for seed, value in column(*of).items()},
    )
    monkeypatch.setattr(
        recompute_claims, "differences", lambda *of: recompute_claims.np.array([1.0, 2.0, 4.0])
    )
    assert len(recompute_claims.mistakes()) > 60


def test_advice_states_corrected_verdicts(results):
    verdict_of = claims.final_verdicts(results)
    page = (PROJECT / "docs/research/choosing.md").read_text()
    rows = re.findall(r"^\| .* \| ((?:[A-Z]\d+(?:, )?)+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 10
    assert [
        (names, verdict)
        for names, verdict in rows
        if {verdict_of[name] for name in names.split(", ")} != {verdict}
    ] == []
    settled = sum(verdict in ("holds", "does not hold") for verdict in verdict_of.values())
    assert f"tests {sum(verdict != 'not run' for verdict in verdict_of.values())} claims" in page
    assert f"{settled} verdicts remain" in page


def test_evidence_matches_the_plan_of_the_study():
    """No run would be trained again, and no line is of another setting."""
    plan = tomllib.loads(study.PLAN.read_text())
    experiments = list(study.experiments(plan["experiments"]))
    assert len(experiments) > len(plan["experiments"])
    assert {
        experiment.name: len(list(experiment.missing_runs()))
        for experiment in experiments
        if any(experiment.missing_runs())
    } == {}
    assert {
        experiment.name
        for experiment in experiments
        if not experiment.tunes
        and len(experiment.finished_lines()) != len(study.read_evidence(experiment.name))
    } == set()


def test_metrics_of_recorded_gradients_follow_from_their_records():
    """Of five seeds of each objective and data set."""
    for experiment in gradient_flow.DATA:
        lines = study.read_evidence(experiment)
        found = [(line["setting"], line["seed"]) for line in lines]
        assert sorted(found) == sorted(itertools.product(gradient_flow.OBJECTIVES, range(1, 6)))
        for line in lines:
            columns = line["gradients"]
            records = [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
            assert gradient_flow.rounded(gradient_flow.metrics_of(records)) == line["metrics"]


def test_early_gradient_matches_hand_values():
    """A gradient of 10 at the scores, of which 5, 1 and 2 reach the embeddings."""
    records = [
        {
            "step": step,
            "scores": 10.0,
            **{
                f"{side}_tangent": share * tangent
                for side, share in (("visual", 0.6), ("text", 0.8))
            },
            **{f"{side}_embedding": 1.0 for side in ("visual", "text")},
            **{f"{side}_parameters": tangent for side in ("visual", "text")},
        }
        for step, tangent in ((0, 5.0), (80, 1.0), (115, 2.0))
    ]
    metrics = gradient_flow.metrics_of(records)
    assert metrics["early gradient"] == pytest.approx(20)
    assert metrics["early gradient of 40 steps"] == pytest.approx(100)
    assert metrics["factor"] == pytest.approx(math.log(10) / 3)
    assert metrics["factor growth"] == pytest.approx(math.log(2) / 2 - math.log(5))


def test_new_tests_have_only_new_runs(results):
    planned = confirm_claims.planned_seeds()
    by_name = {row.claim["name"]: row for row in results}
    assert all(by_name[name].verdicts[1] == "undecided" for name in planned)
    for path in study.EVIDENCE.glob("*.jsonl"):
        is_new = path.stem.endswith(confirm_claims.AGAIN)
        seeds = {line["seed"] for line in study.read_evidence(path.stem)}
        assert {seed >= confirm_claims.FIRST_SEED for seed in seeds} == {is_new}
    for name, count in planned.items():
        for address in claim_power.settings_of(confirm_claims.again(by_name[name].claim)):
            assert len(verdicts.runs(address)) >= count, address


def test_new_test_of_a_claim_renames_only_its_settings():
    claim = {"name": "U1", "place": "table 1/2", "a": "x/high", "series": [[1, "x/low", "y/a/b"]]}
    assert confirm_claims.again(claim) == claim | {
        "a": "x-again/high",
        "series": [[1, "x-again/low", "y-again/a/b"]],
    }
