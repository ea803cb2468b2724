"""Everstep beside other systems and bare commits, measured in one go: `make bench`.

    python benchmarks               on SQLite, everything, in less than twelve minutes
    python benchmarks --postgres    on PostgreSQL, in less than ten minutes
    python benchmarks --quick       only W1, measured once each; nothing is kept

It ends with status 1 if a bar is not cleared. The quick figures are too few for that, so they only show.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from bench import Bench
from chart import chart
from judging import disturbances, judge
from measuring import HERE, ROOT
from plan import SQLITE
from report import page


@contextmanager
def bench_on(postgres: bool, quick: bool) -> Iterator[Bench]:
    """Give the bench of a database; PostgreSQL's server runs as long as that."""
    if not postgres:
        yield Bench(SQLITE, quick)
        return
    from bench_postgres import PostgresBench
    from server import started

    with started() as server:
        yield PostgresBench(server, quick)


def main() -> int:
    """Measure, print the page, and keep it and its picture if everything was measured."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only W1, once; nothing is kept")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    given = parser.parse_args()
    with bench_on(given.postgres, given.quick) as bench:
        bench.run()
    plan = bench.plan
    bench.findings.notes += disturbances(bench.findings, plan)
    verdicts = judge(bench.findings, plan.ratios, plan.limits)
    text = page(bench.findings, verdicts, bench.seconds() / 60, plan)
    print(text)
    if not bench.quick:
        write(HERE / "results" / f"{plan.results}.md", text)
        write(HERE / "results" / f"{plan.results}.json", json.dumps(asdict(bench.findings), indent=1) + "\n")
        if picture := chart(bench.findings, plan):
            write(ROOT / "docs" / "pictures" / f"{plan.picture}.svg", picture)
    return 0 if bench.quick or all(verdict.passed for verdict in verdicts) else 1


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
