"""The picture of the figures: bars in SVG, in colours that are readable on light and on dark."""

from html import escape
from typing import NamedTuple

from judging import Findings
from plan import Plan

WIDTH, PANEL_WIDTH, GAP = 880, 420, 40
BAR_HEIGHT, BAR_STEP, TOP = 18, 28, 52
LABEL_WIDTH, FIGURE_WIDTH = 118, 78
OURS, THEIRS, FLOOR, TEXT = "#0f9d8a", "#8b94a3", "#c08a2d", "#7a8494"


class Bar(NamedTuple):
    """One bar: whose it is, how long, and the text behind it."""

    label: str
    value: float
    text: str


class Panel(NamedTuple):
    """One question and its answers."""

    title: str
    subtitle: str
    bars: list[Bar]


def chart(findings: Findings, plan: Plan) -> str:
    """Return the picture, or an empty text if there are not enough figures for it."""
    panels = [panel for panel in panels_of(findings, plan.floors[0]) if len(panel.bars) > 1]
    if len(panels) < 4:
        return ""
    return picture(f"{plan.title}: Everstep beside other systems and bare commits", panels)


def picture(about: str, panels: list[Panel]) -> str:
    """Return panels in two columns."""
    panel_height = TOP + BAR_STEP * max(len(panel.bars) for panel in panels) + 18
    height = panel_height * ((len(panels) + 1) // 2) + 10
    drawn = [
        draw(panel, (index % 2) * (PANEL_WIDTH + GAP), (index // 2) * panel_height)
        for index, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(about)}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" font-size="13">\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def panels_of(findings: Findings, floor: str) -> list[Panel]:
    """Return the six questions that a reader has first."""
    return [
        Panel(
            "One run, step after step",
            "1,000 steps, a durable commit for each; steps/s, more is better",
            rates(findings, {"bare commits": [floor], "Everstep": ["everstep w1-repeat"], **peers("w1")}),
        ),
        Panel(
            "The same, with steps that only read",
            "all outcomes durable at the end; steps/s, more is better",
            rates(findings, {"Everstep": ["everstep w1-read"], **peers("w1")}),
        ),
        Panel(
            "Many runs at once",
            "2,000 runs of 5 steps, 100 at a time; steps/s, more is better",
            rates(
                findings,
                {"Everstep": ["everstep w2-async"], "Everstep, def": ["everstep w2-def"], **peers("w2")},
            ),
        ),
        Panel(
            "Large results",
            "200 steps that return 100 KB each; steps/s, more is better",
            rates(findings, {"Everstep": ["everstep w3"], **peers("w3")}),
        ),
        Panel(
            "A thousand runs, killed half-way",
            "process start until all have ended; less is better",
            [
                Bar(system, seconds, f"{seconds:.1f} s")
                for system in ("Everstep", "DBOS")
                if (seconds := findings.figure(f"W4 {system}")) is not None
            ],
        ),
        Panel(
            "Going on after a kill",
            "process start to the next step after 10,000; less is better",
            [
                Bar(system, seconds, f"{seconds:.2f} s")
                for system in ("Everstep", "LangGraph", "DBOS")
                if (seconds := findings.figure(f"W5 {system}")) is not None
            ],
        ),
    ]


def peers(workload: str) -> dict[str, list[str]]:
    """Return the others' figures for a workload, all ways of calling each."""
    ways = ("def", "async", "one", "several")
    return {name: [f"{name.lower()} {workload}-{way}" for way in ways] for name in ("LangGraph", "Absurd", "DBOS")}


def rates(findings: Findings, keys: dict[str, list[str]]) -> list[Bar]:
    """Return a bar for each label: the best of its figures."""
    found = []
    for label, names in keys.items():
        values = [rate for name in names if (rate := findings.rate(name)) is not None]
        if values:
            found.append(Bar(label, max(values), f"{max(values):,.0f}"))
    return found


def draw(panel: Panel, left: int, top: int) -> str:
    """Return one panel."""
    longest = max(bar.value for bar in panel.bars)
    room = PANEL_WIDTH - LABEL_WIDTH - FIGURE_WIDTH
    lines = [
        f'<g transform="translate({left},{top})">',
        f'<text x="0" y="18" font-size="15" font-weight="600" fill="{TEXT}">{escape(panel.title)}</text>',
        f'<text x="0" y="37" font-size="12" fill="{TEXT}">{escape(panel.subtitle)}</text>',
    ]
    for index, bar in enumerate(panel.bars):
        y = TOP + index * BAR_STEP
        length = max(2.0, room * bar.value / longest)
        is_ours = bar.label.startswith("Everstep")
        colour = OURS if is_ours else FLOOR if bar.label == "bare commits" else THEIRS
        style = f'fill="{TEXT}"' + (' font-weight="600"' if is_ours else "")
        lines += [
            f'<text x="{LABEL_WIDTH - 10}" y="{y + 13}" text-anchor="end" {style}>{escape(bar.label)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" rx="3" fill="{colour}"/>',
            f'<text x="{LABEL_WIDTH + length + 8:.1f}" y="{y + 13}" {style}>{escape(bar.text)}</text>',
        ]
    return "\n".join([*lines, "</g>"])
