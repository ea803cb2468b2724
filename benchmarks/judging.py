"""Medians of what was measured, and whether they clear the bars."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from measuring import Figures
from plan import Limit, Plan, Ratio

KEPT = (
    "p50_milliseconds",
    "p99_milliseconds",
    "step_bytes",
    "wal_bytes",
    "step_commits",
    "peak_megabytes",
    "cpu_microseconds",
    "server_microseconds",
)
"""What is kept of a measurement of throughput, beside its rate."""


@dataclass
class Findings:
    """Everything that was measured, by key: throughput in `rates`, and single figures (seconds, bytes) in `figures`."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_rate(self, key: str, system: str, found: Figures) -> None:
        self.rates.setdefault(key, []).append(found["rate"])
        if "settings" in found:
            self.settings.setdefault(system, found["settings"])
        for name in KEPT:
            if name in found:
                self.add(f"{key} {name}", found[name])

    def add(self, key: str, value: float) -> None:
        self.figures.setdefault(key, []).append(value)

    def rate(self, key: str) -> float | None:
        """Return a median throughput. That of a resume is its seconds turned over."""
        if key in self.rates:
            return statistics.median(self.rates[key])
        seconds = self.figure(key)
        return 1 / seconds if seconds else None

    def figure(self, key: str) -> float | None:
        return statistics.median(self.figures[key]) if key in self.figures else None


CALM_SPREAD = 1.5
"""Bare commits do the same work each time. If their rates differ by more than this, somebody else used the machine."""


def disturbances(findings: Findings, plan: Plan) -> list[str]:
    """Return what makes the figures doubtful: floors that were not the same in all rounds."""
    found = []
    for key in plan.floors:
        rates = findings.rates.get(key, [])
        if rates and max(rates) > CALM_SPREAD * min(rates):
            found.append(
                f"the machine was busy. Bare commits ({key}) varied from {min(rates):,.0f} to {max(rates):,.0f} "
                "per second, so neither the figures nor the verdicts can be relied on. "
                "Measure again when nothing else runs."
            )
    return found


@dataclass(frozen=True)
class Verdict:
    """A bar and how it was met."""

    text: str
    bar: str
    found: str
    passed: bool


def judge(findings: Findings, ratios: Iterable[Ratio], limits: Iterable[Limit]) -> list[Verdict]:
    """Compare with every bar for which there are figures."""
    verdicts = []
    for bar in ratios:
        ours = findings.rate(bar.ours)
        theirs = [rate for key in bar.theirs if (rate := findings.rate(key)) is not None]
        if ours is not None and theirs:
            ratio = ours / max(theirs)
            verdicts.append(Verdict(bar.text, f"≥ {times(bar.at_least)}", times(ratio), ratio >= bar.at_least))
    for limit in limits:
        value = findings.figure(limit.figure)
        if value is not None:
            found = value * limit.scale
            shown = f"{found:.3g} {limit.unit}"
            verdicts.append(Verdict(limit.text, f"< {limit.below:g} {limit.unit}", shown, found < limit.below))
    return verdicts


def times(ratio: float) -> str:
    """Return a ratio as a person says it: a share below one, a multiple above."""
    return f"{ratio:.0%}" if ratio < 1 else f"{ratio:.1f}×"
