"""Write behind each test that docs/guarantees.md names how many trials it makes: python docs/make_trials.py

The figures are those of the newest test runs, which leave them in `build/trials.json`. A trial is a process that is
killed, stopped or robbed of its power; for other tests it is a case. Examples that Hypothesis draws are not counted.
"""

import json
import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).resolve().parent
PAGE: Final = DOCS / "guarantees.md"
FIGURES: Final = DOCS.parent / "build" / "trials.json"
LINE: Final = re.compile(r"^- `(tests/[\w/]+\.py::\w+)`(?: · [\d,]+ trials?)?$", re.MULTILINE)


def main() -> None:
    """Renew the page."""
    figures: dict[str, int] = json.loads(FIGURES.read_text("utf-8"))
    unknown: list[str] = []

    def with_figure(found: re.Match[str]) -> str:
        count = figures.get(found[1])
        if count is None:
            unknown.append(found[1])
            return found[0]
        return f"- `{found[1]}` · {count:,} trial{'s' if count > 1 else ''}"

    PAGE.write_text(LINE.sub(with_figure, PAGE.read_text("utf-8")), "utf-8")
    for test in unknown:
        print(f"no figure, since it was not run here: {test}")


if __name__ == "__main__":
    main()
