"""What the crash tests really did, for the last line of the test run."""

from dataclasses import dataclass, field


@dataclass
class Figures:
    points: frozenset[str] = frozenset()
    fired: set[str] = field(default_factory=set)
    kills_wanted: int = 0
    kills: int = 0
    losses: int = 0
    trials: int = 0
    lost: int = 0
    doubled: int = 0

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


FIGURES = Figures()
