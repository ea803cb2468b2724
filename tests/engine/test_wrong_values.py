"""Every public method with wrong values: an error of Everstep that says what to write, never one of Python's own."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import workflow
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


# What is asked of an app: the method, its arguments, and for each option the values that it takes.
METHODS: dict[str, tuple[tuple[Any, ...], dict[str, list[Any]]]] = {
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
CLIENT: dict[str, tuple[tuple[Any, ...], dict[str, list[Any]]]] = {
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
SCHEDULE: dict[str, tuple[tuple[Any, ...], dict[str, list[Any]]]] = {
    "pause": ((), {"note": TEXTS, "by": TEXTS}),
    "backfill": ((), {"start": [], "end": []}),
}
FIRST = ["signal", "ask", "approve", "retry", "rollback", "hold", "resolve", "free_key", "settle_key", "cancel", "get"]
RUN: dict[str, tuple[tuple[Any, ...], dict[str, list[Any]]]] = {
    "history": ((), {"generation": MAYBE}),
    "holds": ((), {"open_only": [True]}),
    "verify": ((), {"outside": [True]}),
    "stream": ((), {"name": TEXTS, "after": []}),
}


async def _tried(app: Any, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> BaseException | None:
    try:
        called = getattr(app, method)(*args, **options)
        if asyncio.iscoroutine(called):
            await asyncio.wait_for(called, 60)
    except BaseException as error:  # noqa: BLE001  # the point is which one
        return error
    return None


def _wrong(said: BaseException | None, value: Any, taken: list[Any]) -> str:
    if said is None:
        return "" if any(value is one or (value == one and type(value) is type(one)) for one in taken) else "taken"
    if isinstance(said, FileNotFoundError) and value is True:
        return ""  # the option is right, and there is no such file to import
    return "" if isinstance(said, Error) and not isinstance(said, Damaged) else f"{type(said).__name__}: {said}"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_no_wrong_value_is_taken_or_raises_an_error_of_pythons_own(kind: str, tmp_path: Path) -> None:
    found: list[str] = []

    async def look(app: Any, method: str, args: tuple[Any, ...], option: str, value: Any, taken: list[Any]) -> None:
        more: dict[str, Any] = {"at": 1} if method == "fork" and option != "at" else {}
        more |= {"resolution": "retry"} if method == "resolve" and option != "resolution" else {}
        if method == "export":
            more |= {"path": str(tmp_path / "x")} | ({"runs": ["r"]} if option != "runs" else {})
        more |= {"name": "s"} if method == "stream" and option != "name" else {}
        more |= {"every": 60} if method == "schedule" and option not in ("every", "cron") else {}
        more |= {"start": NOON, "end": NOON} if method == "backfill" else {}
        said = await _tried(app, method, args, {**more, option: value} if option else more)
        if why := _wrong(said, value, taken):
            found.append(f"{method}({option}={value!r}) {why[:100]}")

    async def main() -> None:
        url = "memory:" if kind == "memory" else f"sqlite:///{tmp_path}/runs.db"
        async with everstep.open(url) as app:
            run = await app.start(waits, 1, id="r")
            schedule = await app.schedule(waits, 1, name="s", every=3600)
            for value in VALUES:
                for method, (args, options) in METHODS.items():
                    for option, taken in options.items():
                        await look(app, method, args, option, value, taken)
                for method in FIRST:
                    rest = {"signal": ("go",), "ask": ("go",)}.get(method, ())
                    if value != "seven":  # that is the id of a run by now
                        await look(app, method, (value, *rest), "", value, [])
                if value != "seven":  # that could be a file
                    await look(app, "import_", (value,), "", value, [])
                for method, (args, options) in RUN.items():
                    for option, taken in options.items():
                        await look(run, method, args, option, value, taken)
                for method, (args, options) in SCHEDULE.items():
                    for option, taken in options.items():
                        await look(schedule, method, args, option, value, taken)
                if value != "seven":  # that is the name of a schedule by now
                    await look(app, "get_schedule", (value,), "", value, [])
                if value is not None:
                    with pytest.raises(Error):
                        everstep.open(url, codec=value)
            assert await run.status() in ("running", "waiting")
            assert (await schedule.show()).name == "s"
            assert all(one.name for one in await app.schedules())
        if kind == "memory":
            return  # a client has to reach the same store
        async with everstep.connect(url) as client:
            for value in VALUES:
                for method, (args, options) in CLIENT.items():
                    for option, taken in options.items():
                        await look(client, method, args, option, value, taken)

    asyncio.run(main())
    assert not found, "\n".join(found)


@pytest.mark.parametrize("option", ["threads", "schedules", "runs"])
@pytest.mark.parametrize("value", [5, ["x"], None, HALF])
def test_what_is_exported_is_named_by_texts(option: str, value: Any, tmp_path: Path) -> None:
    with everstep.open(f"sqlite:///{tmp_path}/runs.db") as app:
        options: dict[str, Any] = {"runs": [], option: [value]}
        with pytest.raises(Misuse):
            app.export(options.pop("runs"), str(tmp_path / "file"), **options)
    assert not (tmp_path / "file").exists()
