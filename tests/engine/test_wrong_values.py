"""Every public method with wrong values: an error of Everstep that says what to write, never one of Python's own."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import everstep
from everstep import workflow
from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp, BlockingRun, BlockingSchedule
from everstep.engine.app.client import BlockingClient, Client
from everstep.engine.app.handles import Run
from everstep.engine.process.host import Host
from everstep.engine.verbs.schedules import Schedule
from everstep.errors import Damaged, Error, Misuse

HALF = "\ud800"
NOON = "2026-11-16T12:00:00Z"
VALUES: list[Any] = ["seven", [], {}, None, math.nan, math.inf, -1, 10**30, True, HALF]
TEXTS = ["seven"]
MAYBE = [None]
NUMBERS = [-1]


@workflow(name="wrong-values")
async def waits(number: int = 0) -> Any:
    return await everstep.receive("never")


Table = dict[str, tuple[tuple[Any, ...], dict[str, list[Any]]]]
"""By method: its arguments, and for each option the values that it takes."""
METHODS: Table = {
    "start": (
        (waits, 1),
        {
            "id": ["seven", None],
            "on_existing": MAYBE,
            "queue": ["seven", None],
            "priority": NUMBERS,
            "delay": [],
            "tags": [{}, None],
        },
    ),
    "list": (
        (),
        {
            "status": [[]],
            "workflow": ["seven", None],
            "parent": ["seven", None],
            "tags": [{}, None],
            "text": TEXTS,
            "before": MAYBE,
            "limit": [],
            "offset": [],
        },
    ),
    "signal": (("r", "go"), {"id": ["seven", None]}),
    "ask": (("gone", "go"), {"id": [], "answer": [], "timeout": []}),
    "approvals": ((), {"run": ["seven", None]}),
    "approve": (("r",), {"what": [], "id": [], "by": [], "note": []}),
    "retry": (("r",), {"by": [], "across_once": []}),
    "rollback": (("gone",), {"note": [], "by": [], "allow_uncompensated": []}),
    "fork": (
        ("r",),
        {
            "at": [],
            "args": [[], None],
            "id": ["seven", None],
            "generation": MAYBE,
            "allow_effects": [[], True],
            "note": TEXTS,
            "by": TEXTS,
        },
    ),
    "hold": (("gone",), {"note": [], "by": []}),
    "holds": ((), {"run": ["seven", None], "open_only": [True]}),
    "resolve": (("r",), {"resolution": [], "hold": [], "note": [], "by": []}),
    "forget_markers": ((everstep.STORE,), {"older_than": []}),
    "effects": (
        (),
        {
            "prefix": TEXTS,
            "run": ["seven", None],
            "step": ["seven", None],
            "state": MAYBE,
            "limit": [],
            "offset": [],
        },
    ),
    "free_key": (("k",), {"note": [], "by": []}),
    "settle_key": (("k",), {"note": [], "by": []}),
    "forget_keys": ((), {"older_than": []}),
    "worker_gone": (("gone",), {"note": [], "by": []}),
    "host_gone": (("gone",), {"note": [], "by": [], "never_seen": [True]}),
    "get": (("seven",), {}),
    "get_schedule": (("seven",), {}),
    "gc": ((), {"older_than": [], "keep": [], "keys_older_than": [], "dry_run": []}),
    "queue": (
        ("q",),
        {"concurrency": MAYBE, "per_worker": MAYBE, "per_key": MAYBE, "rate": MAYBE, "paused": [True]},
    ),
    "limit": (("l",), {"concurrency": MAYBE, "rate": MAYBE}),
    "export": ((), {"runs": [[]], "unfinished": [], "by": []}),
    "import_": (("nowhere",), {"skip_existing": [], "copies": []}),
    "repair": (("r",), {"note": TEXTS, "by": TEXTS, "dry_run": [True]}),
    "cancel": (("gone",), {"reason": [], "grace": [], "now": [], "by": []}),
    "schedule": (
        (waits, 1),
        {
            "name": ["seven", None],
            "cron": [],
            "zone": [],
            "every": [],
            "offset": NUMBERS,
            "jitter": [],
            "overlap": [],
            "catch_up": [],
            "catch_up_max": [],
            "queue": ["seven", None],
            "priority": NUMBERS,
            "tags": [{}, None],
        },
    ),
}
CLIENT: Table = {
    "start": (
        ("wrong-values", 1),
        {
            "id": ["seven", None],
            "on_existing": [],
            "queue": ["seven"],
            "priority": NUMBERS,
            "delay": [],
            "tags": [{}, None],
            "timeout": MAYBE,
            "version": TEXTS,
        },
    ),
    **{method: METHODS[method] for method in ("list", "signal", "ask", "approvals", "approve", "cancel")},
}
SCHEDULE: Table = {
    "pause": ((), {"note": TEXTS, "by": TEXTS}),
    "backfill": ((), {"start": [], "end": []}),
}
FIRST = (
    *("signal", "ask", "approve", "retry", "rollback", "hold", "resolve", "free_key", "settle_key", "cancel", "get"),
    *("fork", "repair", "worker_gone", "host_gone", "import_", "get_schedule", "queue", "limit", "start"),
)
"""Methods whose first argument is a name or an id."""
NAMES = ("r", "s", "seven")
"""What is the id of a run, the name of a schedule, or could be that of a file."""
RUN: Table = {
    "history": ((), {"generation": MAYBE}),
    "holds": ((), {"open_only": [True]}),
    "verify": ((), {"outside": [True]}),
    "stream": ((), {"name": TEXTS, "after": []}),
    "signal": (("go",), {"name": TEXTS, "id": ["seven", None]}),
    "approve": ((), {"what": [], "id": [], "by": [], "note": []}),
}
GONE: Table = {
    "ask": (("go",), {"id": [], "answer": [], "timeout": []}),
    "cancel": ((), {"reason": [], "grace": [], "now": []}),
}
"""What would wait, or end the run: it is asked of one that is not there."""
MORE: dict[str, dict[str, Any]] = {
    "fork": {"at": 1},
    "resolve": {"resolution": "retry"},
    "stream": {"name": "s"},
    "backfill": {"start": NOON, "end": NOON},
    "export": {"runs": ["r"]},
    "worker_gone": {"note": "off"},
    "host_gone": {"note": "off"},
}
"""What a method needs besides the option that is tried."""
WITHOUT = {
    *("close", "run", "result", "schedules", "row", "status", "published", "children", "approvals", "show", "resume"),
    *("trigger", "delete"),
}
"""Methods that take nothing to be wrong, or what another one takes: `run` what `start` does; `result` is below."""
OF_BLOCKING = {"begin", "wait", "wait_here", "refuse_elsewhere"}
"""What the blocking app offers the engine."""


class Case(NamedTuple):
    """One call with a wrong value in one place."""

    thing: Any
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    option: str
    value: Any
    taken: list[Any]


def cases_of(thing: Any, table: Table, folder: Path) -> Iterator[Case]:
    """Give each option of each method with each value, and each value as the name of what a method is about."""
    for value in VALUES:
        for method, (args, options) in table.items():
            more = dict(MORE.get(method, {}))
            more |= {"path": str(folder / "x")} if method == "export" else {}
            for option, taken in options.items():
                given = args[1:] if option == "name" and method == "signal" and table is RUN else args
                every = {"every": 60} if method == "schedule" and option not in ("every", "cron") else {}
                yield Case(thing, method, given, {**more, **every, option: value}, option, value, taken)
            if (
                isinstance(thing, App | BlockingApp | Client | BlockingClient)
                and method in FIRST
                and value not in NAMES
            ):
                yield Case(thing, method, (value, *args[1:]), more, "", value, [])


def _wrong(case: Case, said: BaseException | None) -> list[str]:
    """Say what is wrong with the outcome of a call."""
    value = case.value
    if said is None:
        is_right = any(value is one or (value == one and type(value) is type(one)) for one in case.taken)
        why = "" if is_right else "taken"
    elif isinstance(said, FileNotFoundError) and value is True:
        why = ""  # the option is right, and there is no such file to import
    else:
        why = "" if isinstance(said, Error) and not isinstance(said, Damaged) else f"{type(said).__name__}: {said}"
    face = type(case.thing).__name__
    return [f"{face}.{case.method}({case.option}={value!r}) {why[:100]}"] if why else []


async def _found(thing: Any, table: Table, folder: Path) -> list[str]:
    """Try all cases on a loop."""
    found = []
    for case in cases_of(thing, table, folder):
        said: BaseException | None = None
        try:
            called = getattr(thing, case.method)(*case.args, **case.options)
            if asyncio.iscoroutine(called):
                await asyncio.wait_for(called, 60)
        except BaseException as error:  # noqa: BLE001  # the point is which one
            said = error
        found += _wrong(case, said)
    return found


def _found_blocking(thing: Any, table: Table, folder: Path) -> list[str]:
    """Try all cases in blocking code."""
    found = []
    for case in cases_of(thing, table, folder):
        said: BaseException | None = None
        try:
            getattr(thing, case.method)(*case.args, **case.options)
        except BaseException as error:  # noqa: BLE001  # the point is which one
            said = error
        found += _wrong(case, said)
    return found


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_no_wrong_value_is_taken_or_raises_an_error_of_pythons_own(kind: str, tmp_path: Path) -> None:
    async def main() -> list[str]:
        url = "memory:" if kind == "memory" else f"sqlite:///{tmp_path}/runs.db"
        async with everstep.open(url) as app:
            run = await app.start(waits, 1, id="r")
            schedule = await app.schedule(waits, 1, name="s", every=3600)
            found = await _found(app, METHODS, tmp_path)
            found += [*await _found(run, RUN, tmp_path), *await _found(app.get("gone"), GONE, tmp_path)]
            found += await _found(schedule, SCHEDULE, tmp_path)
            for value in VALUES:
                if value is not None:
                    with pytest.raises(Error):
                        everstep.open(url, codec=value)
            assert await run.status() in ("running", "waiting")
            assert (await schedule.show()).name == "s"
            assert all(one.name for one in await app.schedules())
        if kind == "sqlite":  # a client has to reach the same store
            async with everstep.connect(url) as client:
                found += await _found(client, CLIENT, tmp_path)
        return found

    found = asyncio.run(main())
    assert not found, "\n".join(found)


def test_no_wrong_value_is_taken_by_a_blocking_face(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    with everstep.open(url) as app:
        run = app.start(waits, 1, id="r")
        schedule = app.schedule(waits, 1, name="s", every=3600)
        found = _found_blocking(app, METHODS, tmp_path)
        found += [*_found_blocking(run, RUN, tmp_path), *_found_blocking(app.get("gone"), GONE, tmp_path)]
        found += _found_blocking(schedule, SCHEDULE, tmp_path)
        assert run.status() in ("running", "waiting")
    with everstep.connect(url) as client:
        found += _found_blocking(client, CLIENT, tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("cls", "table"),
    [
        *((App, METHODS), (BlockingApp, METHODS), (Client, CLIENT), (BlockingClient, CLIENT)),
        *((Run, RUN | GONE), (BlockingRun, RUN | GONE), (Schedule, SCHEDULE), (BlockingSchedule, SCHEDULE)),
    ],
)
def test_each_method_that_takes_anything_is_in_the_table(cls: type, table: Table) -> None:
    inherited = {*dir(Host)} - {"close"} if cls is App else OF_BLOCKING if cls is BlockingApp else set()
    methods = {name for name in set(dir(cls)) - inherited if name[0] != "_" and callable(getattr(cls, name))}
    assert methods - set(table) - WITHOUT - {"get", "result_types"} == set()


@pytest.mark.parametrize("timeout", ["seven", [], math.nan, -1, HALF])
def test_a_timeout_is_a_number_of_seconds(timeout: Any, tmp_path: Path) -> None:
    with everstep.open(f"sqlite:///{tmp_path}/runs.db") as app, pytest.raises((Misuse, TimeoutError)):
        app.start(waits, 1, id="r").result(timeout)


@pytest.mark.parametrize("option", ["threads", "schedules", "runs"])
@pytest.mark.parametrize("value", [5, ["x"], None, HALF])
def test_what_is_exported_is_named_by_texts(option: str, value: Any, tmp_path: Path) -> None:
    with everstep.open(f"sqlite:///{tmp_path}/runs.db") as app:
        options: dict[str, Any] = {"runs": [], option: [value]}
        with pytest.raises(Misuse):
            app.export(options.pop("runs"), str(tmp_path / "file"), **options)
    assert not (tmp_path / "file").exists()
