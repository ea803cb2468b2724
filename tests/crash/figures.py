"""What the crash tests really did, for the last line of the test run."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Figures:
    points: set[str] = field(default_factory=set)
    fired: set[str] = field(default_factory=set)
    kills_wanted: int = 0
    kills: int = 0
    losses: int = 0
    trials: int = 0
    lost: int = 0
    doubled: int = 0

    effects: dict[tuple[str, str], str] = field(default_factory=dict)
    """How often an effect was applied, by contract and by the place where the process was killed."""

    lines: list[str] = field(default_factory=list)
    """What single tests say about themselves."""

    def told(self) -> dict[str, Any]:
        """Return all of this as plain data, for the process that sums up."""
        told = asdict(self)
        told["effects"] = [[*place, what] for place, what in self.effects.items()]
        return told | {"points": sorted(self.points), "fired": sorted(self.fired)}

    def add(self, told: dict[str, Any]) -> None:
        """Add what another process did."""
        self.points |= set(told["points"])
        self.fired |= set(told["fired"])
        for name in ("kills_wanted", "kills", "losses", "trials", "lost", "doubled"):
            setattr(self, name, getattr(self, name) + told[name])
        self.lines += told["lines"]
        self.effects |= {(contract, place): what for contract, place, what in told["effects"]}

    def table(self) -> list[str]:
        """Return the lines of the table contract × place × count."""
        contracts = list(dict.fromkeys(contract for contract, _ in self.effects))
        lines = ["killed" + " " * 40 + "".join(f"{contract:<24}" for contract in contracts)]
        for place in dict.fromkeys(place for _, place in self.effects):
            cells = "".join(f"{self.effects.get((contract, place), '-'):<24}" for contract in contracts)
            lines.append(f"{place:<46}{cells}")
        return lines

    def line(self) -> str:
        parts = []
        if self.points:
            parts.append(f"crash points {len(self.fired)}/{len(self.points)} fired")
        if self.kills_wanted:
            parts.append(f"system-call kills {self.kills}/{self.kills_wanted}")
        if self.losses:
            parts.append(f"power losses {self.losses}")
        if self.trials:
            parts.append(f"trials {self.trials}")
            parts.append(f"lost {self.lost}")
            parts.append(f"doubled {self.doubled}")
        return " · ".join(parts)


def note_again(table: dict[tuple[str, str], str], contract: str, point: str, applied: int) -> None:
    """Enter a second kill into the table of effects: how often an effect was applied in the end, from the least on."""
    row = f"…and again at {point.partition(':')[0]}"
    least, _, most = table.get((contract, row), str(applied)).partition("–")
    counts = sorted({int(least), int(most or least), applied})
    table[contract, row] = "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


FIGURES = Figures()
