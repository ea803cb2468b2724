"""The report of a crash test as one HTML page, which loads nothing and has a light and a dark theme."""

from html import escape
from typing import Final

from everstep.cli.terminal import clean
from everstep.testing.crash_boundaries import COLUMNS
from everstep.testing.crash_verdict import Broken
from everstep.testing.crashtest import Report
from everstep.view.words import duration

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --dim: #667; --line: #d8dce2; --good: #1a7f4b;
  --bad: #c02b2b; --held: #9a6b00; --soft: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #14171a; --dim: #99a; --line: #343a41;
  --good: #56c98b; --bad: #ff7b72; --held: #e3b341; --soft: #1c2024; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: center; }
th { color: var(--dim); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
.kept { color: var(--good); } .broken { color: var(--bad); font-weight: 700; } .held { color: var(--held); }
.dim { color: var(--dim); } .scroll { overflow-x: auto; }
section { border-left: 4px solid var(--bad); background: var(--soft); padding: .6rem 1rem; margin: 1rem 0; }
pre { overflow-x: auto; font: 13px/1.4 ui-monospace, monospace; }
"""


def page_of(report: Report) -> str:
    """Return a report as an HTML page."""
    about = f"{report.summary()}, {duration(report.seconds)}."
    verdict = "all promises hold" if report.holds else f"{len(report.broken)} broken"
    mark, colour = ("✓", "kept") if report.holds else ("✗", "broken")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Crash test of {_text(report.workflow)}</title><style>{STYLE}</style></head><body>",
        f'<h1><span class="{colour}">{mark}</span> {_text(report.workflow)}: {verdict}</h1>',
        f'<p class="dim">{about}</p>',
        *(_broken(one) for one in report.broken),
        _matrix(report),
        *(f'<p class="held">{_text(note)}</p>' for note in report.notes),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    return escape(clean(text))


def _matrix(report: Report) -> str:
    columns = [
        one for one in (*COLUMNS, "second kill", "order") if any(report.cell(step, one) for step in report.steps())
    ]
    if not columns:
        return ""
    heads = "".join(f"<th>{_text(column)}</th>" for column in columns)
    rows = []
    for step in report.steps():
        cells = "".join(f"<td>{_cell(report.cell(step, column))}</td>" for column in columns)
        name = _text(step) if step else '<span class="dim">(the run)</span>'
        rows.append(f"<tr><td>{name}</td>{cells}</tr>")
    table = f"<table><thead><tr><th>killed in …</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    legend = '<p class="dim">✓ trials that kept all promises · ◼ held for a person, as the contract says · ✗ broken</p>'
    return f'<h2>Step × boundary</h2><div class="scroll">{table}</div>{legend}'


def _cell(counts: dict[str, int]) -> str:
    marks = (("broken", "✗"), ("held", "◼"), ("kept", "✓"))
    shown = [f'<span class="{name}">{mark} {counts[name]}</span>' for name, mark in marks if counts.get(name)]
    return " ".join(shown) or '<span class="dim">·</span>'


def _broken(one: Broken) -> str:
    lines = [f"<h2>{_text(one.promise)}</h2>"]
    if one.place or one.why:
        lines.append(f"<p><strong>{_text(one.place)}</strong>: {_text(one.why)}</p>")
    if one.remedy:
        lines.append(f'<p><span class="kept">Remedy:</span> {_text(one.remedy)}</p>')
    lines += [f'<p class="dim">killed {_text(boundary)}</p>' for boundary in one.boundaries]
    lines += [f"<p>found: {_text(found)}</p>" for found in one.found]
    if one.history:
        history = "\n".join(_text(event) for event in one.history)
        lines.append(f"<details><summary>The history</summary><pre>{history}</pre></details>")
    return f"<section>{''.join(lines)}</section>"
