"""Every erratum holds, and docs/papers/errata.md matches the computed results."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(PROJECT / "studies")
    errata = importlib.import_module("errata")
    claim_places = importlib.import_module("claim_places")


@pytest.mark.parametrize("name", errata.CATALOG)
def test_errata_claim_holds(name):
    assert errata.main(["--check", name]) == 0


def test_errata_page_is_current(capsys):
    assert errata.main(["--check"]) == 0, capsys.readouterr().err


def test_errata_places_exist_in_papers():
    texts = PROJECT.parent / "shared" / "papers"
    if not texts.is_dir():
        pytest.skip("the texts of the papers are absent: ../shared/papers")
    checked, missing = 0, []
    for name, erratum in errata.CATALOG.items():
        if file := claim_places.TEXTS.get(name.partition(".")[0].removesuffix("_text")):
            located = claim_places.located_numbers(erratum.fields["Where"])
            text = (texts / file).read_text()
            missing += [(name, part) for part in claim_places.missing_numbers(located, text)]
            checked += len(located)
    assert missing == []
    assert checked > 50


def test_errata_failing_claim_is_reported_and_not_written(monkeypatch, tmp_path, capsys):
    erratum = errata.CATALOG["unified.table_6_sum"]
    monkeypatch.setitem(
        errata.CATALOG,
        "wrong",
        replace(erratum, show=lambda: errata.Shown(holds=False, lines="1 = 2")),
    )
    monkeypatch.setattr(errata, "PAGE", tmp_path / "errata.md")
    assert errata.main(["--check", "wrong"]) == errata.main(["--write"]) == 1
    assert capsys.readouterr().err == 2 * "No longer true: wrong.\n"
    assert not errata.PAGE.exists()


def test_errata_stale_page_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(errata, "PAGE", tmp_path / "errata.md")
    errata.PAGE.write_text(errata.page().replace("435.8", "429.5"))
    assert errata.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err


def test_errata_without_arguments_shows_all(capsys):
    assert errata.main([]) == 0
    output = capsys.readouterr().out
    assert all(f"{name}: {erratum.title}" in output for name, erratum in errata.CATALOG.items())


def test_errata_unknown_name_is_rejected(capsys):
    with pytest.raises(SystemExit):
        errata.main(["unified.eq_99"])
    assert "unknown entry unified.eq_99" in capsys.readouterr().err
