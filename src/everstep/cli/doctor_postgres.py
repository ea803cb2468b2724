"""`everstep doctor` for a store on PostgreSQL: the server, what its settings mean for durability, and its workers."""

import platform
import sys
from typing import Final

from everstep import __version__
from everstep.cli.doctor_findings import Finding, Verdict, about_troubles
from everstep.cli.opening import line_to_paste
from everstep.stores.postgres import PostgresStore
from everstep.stores.postgres.opening import migrations, stored_version
from everstep.stores.postgres.store import Pin
from everstep.view.words import duration

APART_SECONDS: Final = 1.0
"""How far the server's clock may differ from the machine's before doctor reports it, in seconds."""

PINNED_SECONDS: Final = 300.0
"""The minimum age of a transaction that doctor reports, in seconds."""

LOSES: Final = {
    "fsync": "a power failure may lose or damage everything",
    "full_page_writes": "a power failure may damage pages, unless the file system writes them whole",
    "synchronous_commit": "a crash of the server may lose the last moment, which Everstep believes durable",
}
"""Settings that must be on, and the consequence if they are not."""


def about_server(url: str) -> list[Finding]:
    """Check the versions, and the store from outside."""
    version, newest = stored_version(url), len(migrations("everstep"))
    findings = [
        Finding("python", "ok", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})"),
        Finding("everstep", "ok", __version__),
    ]
    if not version:
        return [*findings, Finding("store", "warning", "there is no store yet; the first run makes it")]
    if version < newest:
        text = f"version {version}; this release needs {newest}: {line_to_paste('migrate', url=url)}"
        return [*findings, Finding("schema", "warning", text)]
    more = ", of a newer release that this one can work with" if version > newest else ""
    return [*findings, Finding("schema", "ok", f"version {version}{more}")]


def about_postgres(store: PostgresStore) -> list[Finding]:
    """Check the server: its settings, its clock, and its workers."""
    facts = store.facts()
    findings = [Finding("store", "ok", store.url), Finding("postgresql", "ok", facts["server_version"])]
    for name, loss in LOSES.items():
        value = facts[name]
        is_on = (
            value in ("on", "remote_apply", "remote_write", "local") if name == "synchronous_commit" else value == "on"
        )
        findings.append(Finding(name, "ok" if is_on else "wrong", value if is_on else f"{value}: {loss}"))
    return [*findings, *_about_standbys(facts), *_about_pins(store), *_about_clock(store), *_about_workers(store)]


def _about_standbys(facts: dict[str, str]) -> list[Finding]:
    """Report what promoting a standby would mean for data that Everstep believes durable."""
    names, count = facts["synchronous_standby_names"], int(facts["standbys"])
    if names and facts["synchronous_commit"] not in ("local", "off"):
        return [Finding("standbys", "ok", f"a commit waits for {names}: a promotion of it loses nothing")]
    if not count:
        return [Finding("standbys", "ok", "none; if there is one that this role cannot see, see the documentation")]
    text = (
        f"{count}, and no commit waits for them: a promotion may lose the last moment. Workers that saw more hold the "
        "runs concerned. Set synchronous_standby_names to lose nothing"
    )
    return [Finding("standbys", "warning", text)]


def _about_pins(store: PostgresStore) -> list[Finding]:
    """Name what prevents dead rows from being removed."""
    found = [Finding("horizon", "warning", _pinned(pin)) for pin in store.pins(PINNED_SECONDS)]
    return found or [Finding("horizon", "ok", "no transaction is older than five minutes")]


def _pinned(pin: Pin) -> str:
    since = f"for {duration(pin.seconds)}" if pin.seconds is not None else f"for {pin.transactions:,} transactions"
    role = f" of role {pin.role}" if pin.role else ""
    details = ", ".join(filter(None, [pin.application, pin.state]))
    what, end = {
        "session": (f"the transaction of process {pin.name}{role}", f"pg_terminate_backend({pin.name})"),
        "prepared": (f"the prepared transaction {pin.name}{role}", "COMMIT PREPARED or ROLLBACK PREPARED"),
        "slot": (f"the replication slot {pin.name}", "let its consumer catch up, or pg_drop_replication_slot"),
        "standby": (
            f"the standby behind process {pin.name}{role}",
            "end its long queries, or its hot_standby_feedback",
        ),
    }[pin.kind]
    shown = f" ({details})" if details else ""
    grows = "nothing dead is removed, and the store grows"
    return f"{what}{shown} has pinned the past of the database {since}: {grows}. To end it: {end}"


def _about_clock(store: PostgresStore) -> list[Finding]:
    ahead = store.ahead() / 1e6
    if abs(ahead) < APART_SECONDS:
        return [Finding("clock", "ok", "the server's, which is as the machine's")]
    where = "ahead of" if ahead > 0 else "behind"
    text = f"the server's counts; it is {duration(abs(ahead))} {where} the machine's"
    return [Finding("clock", "warning", text)]


def _about_workers(store: PostgresStore) -> list[Finding]:
    findings: list[Finding] = []
    for row in store.workers():
        is_alive, lapsed = store.is_alive(row), not row.has_lease
        state = "alive" if is_alive else "dead; its runs are free"
        if is_alive and lapsed:
            state = "its connection lives but it did not renew its lease: stopped or stuck"
        verdict: Verdict = "ok" if state == "alive" else "warning"
        findings.append(Finding("worker", verdict, f"{row.id} (process {row.pid} on {row.host}): {state}"))
        findings += about_troubles(row, store.now())
    return findings or [Finding("workers", "ok", "none at work")]
