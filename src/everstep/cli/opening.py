"""What commands share: options, opening the store, and lines to paste."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from everstep.engine.history.verify import refuse_deleted
from everstep.errors import StoreUnusable, UnknownRun
from everstep.model.ids import checked_run_id
from everstep.stores.opening import default_url, may_be_in_the_making, open_store
from everstep.stores.protocol import RunFilter, RunRow, Store
from everstep.view.store import place_of

if TYPE_CHECKING:  # start-up: who only looks does not wait for the engine
    from everstep.engine.app.app import App

F = TypeVar("F", bound=Callable[..., Any])

MAKING_SECONDS: Final = 2.0
"""How long a command waits for another process to finish creating a store, in seconds."""
URL_HELP: Final = (
    "The store, such as sqlite:///runs.db, a path or postgresql://host/database. "
    "Default: EVERSTEP_URL, else sqlite:///everstep.db."
)


def store_options(function: F) -> F:
    """Add `--url` and `--json` to a command."""
    function = click.option("--json", "in_json", is_flag=True, help="Print JSON. Times are microseconds since 1970.")(
        function
    )
    return click.option("--url", metavar="URL", help=URL_HELP)(function)


@contextmanager
def reading(url: str | None) -> Iterator[Store]:
    """Open a store that must exist, for reading."""
    store = _existing(url or default_url())
    try:
        yield store
    finally:
        store.close()


@asynccontextmanager
async def acting(url: str | None) -> "AsyncIterator[App]":
    """Open a store that must exist, to change something in it. Nothing is driven here."""
    from everstep.engine.app.app import App  # start-up: who only looks does not wait for the engine
    from everstep.engine.app.opening import default_on_hold  # start-up: as above

    on_hold = default_on_hold()
    app = App(_existing(url or default_url()), workflows=(), on_hold=on_hold)
    await app.open()
    try:
        yield app
    finally:
        await app.close()


def _existing(url: str) -> Store:
    """Open a store that must exist. If another process is creating it, wait for that."""
    until = time.monotonic() + MAKING_SECONDS
    while True:
        try:
            return open_store(url, create=False, migrate=False)
        except StoreUnusable:
            if time.monotonic() > until or not may_be_in_the_making(url):
                raise
        time.sleep(0.05)


def existing_run(store: Store, run: str) -> RunRow:
    """Return a run's row. If there is none, the error names the nearest id."""
    row = store.run(checked_run_id(run))
    if row is not None:
        refuse_deleted(store, row)
        return row
    import difflib

    near = difflib.get_close_matches(run, [one.id for one in store.runs(RunFilter(limit=200))], 1)
    hint = f" Did you mean {near[0]}?" if near else " `everstep ls` lists the runs there."
    raise UnknownRun(f"There is no run {run!r} in {place_of(store)}.{hint}")


def line_to_paste(*words: str, url: str | None) -> str:
    """Return a command line as a person can paste it into this shell."""
    from everstep.engine.run.holds import command_line  # start-up: who only looks does not wait for the engine

    return command_line(*words, url=url)


def user_name() -> str:
    """Return the name of the user at the keyboard, for the history."""
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        return ""
