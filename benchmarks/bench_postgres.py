"""One run of everything on PostgreSQL: the same scripts, each in a database of its own on one server."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path

from bench import ROUNDS, Bench
from failover import failovers
from halving import DONE_SECONDS_MAX, HALF_SECONDS_MAX
from measuring import Failed, Figures, empty_folder, measure, quick_folder
from plan_postgres import FINISHED, POSTGRES
from resuming import FILL_SECONDS_MAX, RESUME_SECONDS_MAX, run_until_mark
from server import Server

IDLE_SECONDS = 15.0
SETTLE_SECONDS = 12.0
"""A session at rest tells within ten seconds what it has done."""


class PostgresBench(Bench):
    """One run of everything. The store of a killed process is a database that later ones are copied from."""

    def __init__(self, server: Server, quick: bool) -> None:
        super().__init__(POSTGRES, quick)
        self.server = server

    def run(self) -> None:
        if self.quick:
            self.throughput("W1", 1)
            return
        self.claims()
        self.idle_statements()
        self.failovers()
        for number in range(1, ROUNDS + 1):
            self.throughput("W1", number)
            self.throughput("W2", number)
            self.throughput("W3", number)
        with empty_folder() as folder:
            if self.has_time("W4 and W5"):
                self.kill_all(folder)
                self.kill_half_way(folder)
            for number in range(1, ROUNDS + 1):
                self.resumes(folder, number)
                self.halves(folder, number)

    def measured(self, script: str, measurement: str) -> Figures:
        """Make a measurement in an empty database."""
        with self.server.database() as database, empty_folder() as folder:
            return self.measure_in(database, script, measurement, folder)

    def measure_in(self, database: str, script: str, measurement: str, folder: Path) -> Figures:
        return measure(script, measurement, folder, seconds_max=120.0, BENCH_POSTGRES=self.server.uri(database))

    # -- killed processes ----------------------------------------------------------------------------------------------
    def kill_in_last_step(self, script: str, killed: Path, steps: int) -> None:
        self.killed(script, killed, FILL_SECONDS_MAX, str(steps))

    def kill_in_the_middle(self, script: str, killed: Path, *more: str) -> None:
        self.killed(script, killed, HALF_SECONDS_MAX, *more)

    def killed(self, script: str, killed: Path, seconds_max: float, *more: str) -> None:
        """Run a script until it is to be killed, and note in a file which database it leaves behind."""
        database = self.server.make()
        self.server.ask(f"ALTER DATABASE {database} SET synchronous_commit = off")  # it is not measured
        with quick_folder() as folder:
            variables = {"BENCH_POSTGRES": self.server.uri(database)}
            (folder / "store").mkdir()
            run_until_mark(script, folder / "store", folder / "mark", seconds_max, *more, **variables)
        killed.write_text(database)

    def seconds_to_next_body(self, script: str, killed: Path, steps: int, again: Path) -> float:
        return self.seconds_after(script, killed, again, RESUME_SECONDS_MAX, str(steps))

    def seconds_until_done(self, script: str, killed: Path, again: Path, *more: str) -> float:
        return self.seconds_after(script, killed, again, DONE_SECONDS_MAX, *more)

    def seconds_after(self, script: str, killed: Path, again: Path, seconds_max: float, *more: str) -> float:
        """Start a script again on a copy of what the kill has left; return the seconds until it makes its mark."""
        again.mkdir(exist_ok=True)
        with self.server.database(template=killed.read_text()) as database:
            variables = {"BENCH_POSTGRES": self.server.uri(database)}
            began, reached = run_until_mark(script, again, again / "mark", seconds_max, *more, **variables)
        return (reached - began) / 1e9

    # -- workers -------------------------------------------------------------------------------------------------------
    def claims(self) -> None:
        """Measure claims beside no, many and very many finished runs, in turn."""
        with ExitStack() as made, empty_folder() as folder, self.noted("claims"):
            databases = [made.enter_context(self.server.database()) for _ in FINISHED]
            for database, count in zip(databases, FINISHED, strict=True):
                filled = self.measure_in(database, "claiming.py", f"fill-{count}", folder)
                self.say(f"{count:,} finished runs, made in {filled['seconds']:.0f} s")
            stores = " ".join(map(self.server.uri, databases))
            found = measure("claiming.py", "claim", folder, BENCH_POSTGRES=stores.split()[0], BENCH_CLAIMS=stores)
            for count, claim, body in zip(FINISHED, found["claim_seconds"], found["body_seconds"], strict=True):
                self.findings.add(f"claim {count}", claim)
                self.findings.add(f"body {count}", body)
                self.say(
                    f"beside {count:,} finished runs: claimed in {1000 * claim:.2f} ms, "
                    f"first body after {1000 * body:.1f} ms"
                )

    def idle_statements(self) -> None:
        """Count the transactions in the database of a worker that has nothing to do. Each is one statement."""
        with self.server.database() as database, empty_folder() as folder, self.noted("idle worker"):
            found: list[Figures] = []
            thread = threading.Thread(
                target=lambda: found.append(self.measure_in(database, "claiming.py", "idle", folder)), daemon=True
            )
            thread.start()
            while not (folder / "idle").exists():
                if not thread.is_alive():
                    raise Failed("the idle worker has not begun")
                time.sleep(0.05)
            time.sleep(SETTLE_SECONDS)
            before = self.transactions(database)
            time.sleep(IDLE_SECONDS)
            statements = (self.transactions(database) - before) / IDLE_SECONDS
            thread.join()
            self.findings.add("idle statements", statements)
            self.findings.add("idle connections", found[0]["connections"])
            self.say(f"an idle worker: {statements:.2f} statements/s, {found[0]['connections']} connections")

    def transactions(self, database: str) -> int:
        query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"
        ((count,),) = self.server.ask(query, database)
        return int(count)

    def failovers(self) -> None:
        """Kill workers."""
        with self.server.database() as database, empty_folder() as folder, self.noted("failover"):
            for seconds in failovers(folder, BENCH_POSTGRES=self.server.uri(database)):
                self.findings.add("failover", seconds)
            self.say(f"failover: {self.findings.figure('failover'):.2f} s")
