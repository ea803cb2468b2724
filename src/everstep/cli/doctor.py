"""`everstep doctor`: whether the machine and the store are in order."""

import os
import platform
import stat
import sys
from collections.abc import Callable
from typing import Any, Final

import apsw
import click

from everstep import __version__
from everstep.cli.doctor_findings import Finding, Verdict, about_troubles
from everstep.cli.drawing import counts_text
from everstep.cli.migrating import file_of, schema_version
from everstep.cli.mistakes import EXIT_DONE, EXIT_FAILED
from everstep.cli.opening import line_to_paste, reading, store_options
from everstep.cli.terminal import clean, console, say_json, styled
from everstep.errors import Error
from everstep.stores.opening import default_url, is_postgres
from everstep.stores.protocol import Store, WorkerRow
from everstep.stores.sqlite import SqliteStore
from everstep.stores.sqlite.connections import Patience, connect
from everstep.stores.sqlite.liveness import LiveLocks
from everstep.stores.sqlite.opening import migrations
from everstep.view.holds import notices_of
from everstep.view.store import unserved
from everstep.view.words import duration

WAL_RESET_BUG: Final = ((3, 7, 0), (3, 51, 2))
"""SQLite versions, first and last, whose WAL can be corrupted by one process that checkpoints while another writes."""
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"9p", "afpfs", "ceph", "cifs", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "lustre"}
    | {"nfs", "nfs4", "smb3", "smbfs"}
)
AHEAD_SECONDS: Final = 60.0
"""How far the store's clock may be ahead of the machine's before doctor reports it, in seconds."""
NAMED_MAX: Final = 5
MARKS: Final = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "wrong": ("✗", "bold red")}


@click.command("doctor")
@store_options
def doctor_command(url: str | None, in_json: bool) -> int:
    """Look at versions, the store's file, its workers and what waits; exits with 1 if anything is wrong."""
    named = url or default_url()
    if is_postgres(named):
        path, findings = _look_at_postgres(named, url)
    else:
        path, findings = _look_at_file(url)
    wrong = [one for one in findings if one.verdict == "wrong"]
    if in_json:
        say_json({"sound": not wrong, "store": path, "findings": findings})
    else:
        _print(findings)
    return EXIT_FAILED if wrong else EXIT_DONE


def _look_at_file(url: str | None) -> tuple[str, list[Finding]]:
    findings = [*about_versions(), *about_file(url)]
    path = file_of(url)
    if os.path.exists(path) and not any(one.verdict == "wrong" and one.name == "store" for one in findings):
        try:
            with reading(url) as store:
                findings += [*about_database(path), *about_clock(store), *about_workers(store, path)]
                findings += [*about_runs(store, url), *about_notifications(store, url), *about_unserved(store)]
        except Error as error:
            findings.append(Finding("store", "wrong", str(error)))
    return path, findings


def _look_at_postgres(named: str, url: str | None) -> tuple[str, list[Finding]]:
    from everstep.cli.doctor_postgres import about_postgres, about_server  # psycopg is an optional dependency
    from everstep.stores.postgres import PostgresStore  # psycopg is an optional dependency
    from everstep.stores.postgres.addresses import address_of  # psycopg is an optional dependency

    shown = address_of(named).shown
    try:
        findings = about_server(named)
        if any(one.name == "schema" and one.verdict == "ok" for one in findings):
            with reading(url) as store:
                assert isinstance(store, PostgresStore)
                findings += [*about_postgres(store), *about_runs(store, url), *about_notifications(store, url)]
    except Error as error:
        findings = [Finding("store", "wrong", str(error))]
    return shown, findings


def _print(findings: list[Finding]) -> None:
    out = console()
    width = max(len(one.name) for one in findings)
    for one in findings:
        mark, style = MARKS[one.verdict]
        line = styled(f"{mark} ", style).append(f"{one.name:<{width}}  ", style="dim")
        out.print(line.append(clean(one.text), style="" if one.verdict == "ok" else style), soft_wrap=True)


def about_versions() -> list[Finding]:
    """Check the versions of Python, Everstep and SQLite."""
    return [
        Finding("python", "ok", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})"),
        Finding("everstep", "ok", __version__),
        sqlite_finding(apsw.sqlite_lib_version(), apsw.apsw_version()),
    ]


def sqlite_finding(sqlite: str, binding: str) -> Finding:
    """Judge a version of SQLite."""
    number = tuple(int(part) for part in sqlite.split(".")[:3])
    first, last = WAL_RESET_BUG
    if first <= number <= last:
        text = f"{sqlite}: it has the WAL-reset bug (3.7.0 to 3.51.2), which can corrupt a store that two processes use"
        return Finding("sqlite", "wrong", f"{text}. Install a newer apsw.")
    return Finding("sqlite", "ok", f"{sqlite} by apsw {binding}; it is free of the WAL-reset bug")


def about_file(url: str | None) -> list[Finding]:
    """Check the store's file from outside."""
    path = file_of(url)
    if not os.path.exists(path):
        return [Finding("store", "warning", f"{path} does not exist yet; the first run makes it"), _file_system(path)]
    findings = [Finding("store", "ok", path), _file_system(path)]
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        findings.append(Finding("mode", "warning", f"{mode:04o}: others can read payloads; `chmod 600` it"))
    else:
        findings.append(Finding("mode", "ok", f"{mode:04o}"))
    try:
        version, newest = schema_version(url), len(migrations())
    except Error as error:
        return [*findings, Finding("store", "wrong", str(error))]
    if version < newest:
        text = f"version {version}; this release needs {newest}: {line_to_paste('migrate', url=url)}"
        return [*findings, Finding("schema", "warning", text)]
    return [*findings, Finding("schema", "ok", f"version {version}")]


def _file_system(path: str) -> Finding:
    kind = file_system_of(os.path.dirname(path))
    if kind in NETWORK_FILE_SYSTEMS:
        text = f"{kind} is a network file system, where SQLite's locks cannot be trusted. Move the store."
        return Finding("file system", "wrong", text)
    return Finding("file system", "ok", kind or "unknown here; it must not be a network file system")


def file_system_of(folder: str, mounts: str = "/proc/self/mountinfo") -> str:
    """Return the kind of file system that a folder lies on, or an empty text where the system does not say."""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ")
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def about_database(path: str) -> list[Finding]:
    """Check the file: its journal mode and its structure."""
    connection = connect(path, durability="power", patience=Patience(), flags=apsw.SQLITE_OPEN_READWRITE, vfs=None)
    try:
        journal = str(connection.pragma("journal_mode"))
        check = connection.pragma("quick_check")
    finally:
        connection.close()
    is_wal = journal == "wal"
    return [
        Finding("journal", "ok" if is_wal else "wrong", journal if is_wal else f"{journal}: it should be wal"),
        Finding("durability", "ok", "power, unless a program opens it with durability='process'"),
        Finding("integrity", "ok" if check == "ok" else "wrong", f"quick check: {check}"),
    ]


def about_workers(store: Store, path: str) -> list[Finding]:
    """Check which workers drive runs, and which died while they did."""
    rows = store.workers()
    locks = LiveLocks(path + "-live")
    try:
        states = [(row, _life_of(row, locks.is_held)) for row in rows]
    finally:
        locks.close()
    if not states:
        return [Finding("workers", "ok", "none at work")]
    findings = []
    for row, state in states:
        verdict: Verdict = "ok" if state == "alive" else "warning"
        findings.append(Finding("worker", verdict, f"{row.id} (process {row.pid} on {row.host}): {state}"))
        findings += about_troubles(row, store.now())
    return findings


def about_unserved(store: Store) -> list[Finding]:
    """Find runs that wait for a worker that does not exist."""
    lonely = unserved(store)
    if not lonely:
        return []
    kinds = sorted({f"{row.workflow} in queue {row.queue}" for row in lonely})
    text = f"{len(lonely)} runs wait, and no worker serves {', '.join(kinds)}: `everstep worker ls`"
    return [Finding("unserved", "warning", text)]


def about_clock(store: Store) -> list[Finding]:
    """Compare the store's clock with the machine's."""
    ahead = store.ahead() / 1e6 if isinstance(store, SqliteStore) else 0.0
    if ahead < AHEAD_SECONDS:
        return [Finding("clock", "ok", "the machine's")]
    text = f"the store's is {duration(ahead)} ahead of the machine's, so that no timer is lost: a clock was set back, "
    text += "or was ahead. Until the machine's has caught up, time passes only while a process is at work"
    return [Finding("clock", "warning", text)]


def _life_of(row: WorkerRow, is_held: Callable[[int], bool]) -> str:
    if not is_held(row.place):
        return "dead; its runs are free"
    return "alive" if row.has_lease else "its process lives but did not renew its lease: stopped or stuck"


def about_runs(store: Store, url: str | None) -> list[Finding]:
    """Count the runs, and say what waits for a person."""
    counts = store.counts()
    summary = counts_text(counts) or "none yet"
    findings = [Finding("runs", "ok", summary)]
    if damaged := store.runs_without_status(NAMED_MAX + 1):
        named = ", ".join(damaged[:NAMED_MAX]) + (", and more" if len(damaged) > NAMED_MAX else "")
        text = f"{named}: damaged, without a status. Repair each with {line_to_paste('repair', 'RUN', url=url)}"
        findings.append(Finding("runs", "wrong", text))
    holds: list[Any] = store.holds()
    if holds:
        reasons = sorted({hold.reason for hold in holds})
        text = f"{len(holds)} wait for a person ({', '.join(reasons)}): {line_to_paste('holds', url=url)}"
        findings.append(Finding("holds", "warning", text))
    return findings


def about_notifications(store: Store, url: str | None) -> list[Finding]:
    """Count who has not been told of a hold."""
    notices = [one for of_hold in notices_of(store).values() for one in of_hold]
    if not notices:
        return []
    text = f"{len(notices)} undelivered"
    if lonely := sum(one.state == "pending" and not one.is_served for one in notices):
        text += f", {lonely} of them without a worker that has their target"
    if given_up := sum(one.state == "given up" for one in notices):
        text += f", {given_up} given up"
    return [Finding("notifications", "warning", f"{text}: {line_to_paste('holds', url=url)}")]
