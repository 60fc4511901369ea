"""The looks of the report on coherence, after those of all pages."""

from __future__ import annotations

from visavis.report.coherence.figures import BANDS


def _colors(theme: str) -> str:
    return " ".join(f"--band-{number}: {color};" for number, color in enumerate(BANDS[theme]))


STYLE = f""":root {{ {_colors("light")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_colors("dark")} }} }}"""
STYLE += """
.b0 { --band: var(--band-0); --bar: 0; } .b1 { --band: var(--band-1); --bar: 25%; } .b2 { --band: var(--band-2); --bar: 50%; }
.b3 { --band: var(--band-3); --bar: 75%; } .b4 { --band: var(--band-4); --bar: 100%; }
article { margin-top: 2.25rem; }
h4 { font-size: .95rem; margin: 1.1rem 0 .4rem; }
h4 .note { margin-left: .3rem; }
.asked { display: flex; gap: .9rem; align-items: center; }
.asked h3 { margin: 0; }
.asked .note { display: block; margin: .2rem 0 0; }
.asked img, .asked .words { flex: none; width: 7rem; height: 7rem; border-radius: .5rem; outline: 3px solid var(--right); }
.words { display: block; overflow: hidden; aspect-ratio: 1; font-size: .65rem; line-height: 1.25; background: var(--card); }
.images { display: grid; grid-template-columns: repeat(10, 1fr); gap: .55rem .45rem; list-style: none; margin: 0; padding: 0; }
.images li { position: relative; }
.images img { display: block; width: 100%; height: auto; aspect-ratio: 1; border-radius: .3rem; }
.images i, .key i { display: block; height: 5px; margin-top: 3px; border-radius: 3px;
  background: linear-gradient(var(--band) 0 0) 0 / var(--bar) no-repeat var(--line); }
.images small { display: block; text-align: center; font-size: .7rem; line-height: 1.3; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.images .b0 img, .images .b0 .words { outline: 2px solid var(--band-0); outline-offset: -1px; }
.images .b0::after { content: ""; position: absolute; inset: 0 0 auto; aspect-ratio: 1; border-radius: .3rem; opacity: .5;
  background: repeating-linear-gradient(45deg, transparent 0 7px, var(--band-0) 7px 9px); pointer-events: none; }
.images .own img, .images .own .words { outline: 4px solid var(--right); outline-offset: -1px; }
.right, .wrong { color: var(--paper); font-weight: 700; border-radius: 50%; width: 1.3em; height: 1.3em; line-height: 1.3em;
  font-size: .75rem; text-align: center; }
.right { background: var(--right); } .wrong { background: var(--band-0); }
.images b { position: absolute; z-index: 1; top: .15rem; right: .15rem; }
.images .right { right: auto; left: .15rem; }
.i2t .lists { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 0 1.5rem; }
.captions { margin: 0; padding-left: 2rem; font-size: .875rem; line-height: 1.4; }
.captions li { margin: .3rem 0; padding-left: .55rem; border-left: 5px solid var(--band); }
.captions li::marker { color: var(--soft); }
.captions .b0 { border-left-style: dotted; }
.captions .own { background: color-mix(in srgb, var(--right) 14%, transparent); }
.captions b { display: inline-block; margin-right: .35rem; }
.captions small { color: var(--soft); }
summary { cursor: pointer; color: var(--accent); font-size: .875rem; padding: .2rem 0 .2rem 2rem; }
.key { display: flex; flex-wrap: wrap; gap: .35rem 1.1rem; list-style: none; margin: 0; padding: 0; font-size: .8rem; color: var(--soft); }
.key li { display: flex; align-items: center; gap: .4rem; }
.key i { width: 2.2rem; margin: 0; }
@media (max-width: 34rem) {
  .images { grid-template-columns: repeat(5, 1fr); }
  .asked img, .asked .words { width: 5rem; height: 5rem; }
  .i2t .lists { grid-template-columns: 1fr; }
}
"""
