"""Atomic steps: what their body writes to a database, and that it happened, is one transaction of that database."""

import functools
import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from everstep.codec import Arguments, Signature
from everstep.effects.answers import Done
from everstep.effects.atomic import Permit, Work, look
from everstep.effects.body import StepBody
from everstep.effects.databases import Database, StoreDatabase, database_for, database_of
from everstep.effects.step import Cost, Step
from everstep.effects.surroundings import require
from everstep.errors import Misuse, NotDone
from everstep.model.contracts import Effect
from everstep.model.digests import step_key
from everstep.model.durations import Duration
from everstep.model.options import refuse_unknown
from everstep.model.retry import Retry

if TYPE_CHECKING:
    import os
    import sqlite3

    import apsw
    import psycopg
    import sqlalchemy
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    Se = TypeVar("Se", bound=Session)
    AsyncSe = TypeVar("AsyncSe", bound=AsyncSession)

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
C_contra = TypeVar("C_contra", contravariant=True)


class TransactionStep(Step):
    """A declared atomic step. Its function's first parameter is the connection, which the caller does not pass."""

    effects: ClassVar[tuple[Effect, ...]] = ("atomic",)

    def __init__(
        self,
        function: Callable[..., Any],
        database: Any,
        *,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        raises: Iterable[type[BaseException]] = (),
        fallback: Any = None,
        compensate: Callable[..., Any] | None = None,
        secret: bool = False,
        cost: Cost | None = None,
    ) -> None:
        super().__init__(
            function,
            name=name,
            effect="atomic",
            retry=retry,
            timeout=timeout,
            raises=raises,
            fallback=fallback,
            compensate=compensate,
            secret=secret,
            cost=cost,
        )
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_argcount and not code.co_flags & inspect.CO_VARARGS:
            raise Misuse(f"{self.name} needs a first parameter for the connection: def {self.name}(connection, …).")
        self.database = database_for(database, self.name, is_async=self.is_async)
        self.signature = Signature(MethodType(function, self))
        self.probe = self.ask_marker

    @functools.cached_property
    def _method_signature(self) -> Signature:
        """The signature of the method once it is bound: without its receiver and without the connection."""
        return Signature(MethodType(MethodType(self.function, self), self))

    def work(self, body: StepBody, arguments: Arguments, **more: Any) -> "Work":
        """Return what one attempt needs."""
        function, args, kwargs = self.function, arguments.args, arguments.kwargs
        return Work(
            database=self.database,
            body=lambda connection: function(connection, *args, **kwargs),
            is_async=self.is_async,
            types=self.signature.result,
            means=body.means(),
            key=step_key(body.entropy, body.step, body.arguments),
            run=body.run,
            step=body.step,
            attempt=body.attempt,
            permit=Permit(),
            **more,
        )

    def ask_marker(self, key: str, *args: Any, **kwargs: Any) -> Done | NotDone:
        """The probe of an atomic step in doubt: its marker."""
        body: StepBody = require("the marker of an atomic step", StepBody)
        work = self.work(body, Arguments(b"", "", args, kwargs))
        outcome = look(work)
        return NotDone() if outcome is None else Done(work.means.codec.decode(outcome, work.types))


class Transacted(Protocol, Generic[C_contra, P, R_co]):
    """What type checkers see: in a workflow it is called without the connection, anywhere else with one."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, connection: C_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Declaring(Protocol[C]):
    """What `transaction(database)` returns: a decorator for functions, and for methods."""

    @overload
    def __call__(self, function: Callable[Concatenate[C, P], R], /) -> Transacted[C, P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, C, P], R], /) -> Callable[Concatenate[S, P], R]: ...


class DeclaringOneOf(Protocol[C, D, E]):
    """The same for a database whose kind is not seen from here, or that depends on whether the body is `async`."""

    @overload
    def __call__(self, function: Callable[Concatenate[C, P], R], /) -> Transacted[C, P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[D, P], R], /) -> Transacted[D, P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[E, P], R], /) -> Transacted[E, P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, C, P], R], /) -> Callable[Concatenate[S, P], R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, D, P], R], /) -> Callable[Concatenate[S, P], R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, E, P], R], /) -> Callable[Concatenate[S, P], R]: ...


class TransactionOptions(TypedDict, total=False):
    """The options of `transaction`, as type checkers see them."""

    name: str | None
    retry: Retry | None
    timeout: Duration | None
    raises: Iterable[type[BaseException]]
    fallback: Any
    compensate: Callable[..., Any] | None
    secret: bool
    cost: Cost | None


@overload
def transaction(
    database: "StoreDatabase", /, **options: Unpack[TransactionOptions]
) -> "DeclaringOneOf[apsw.Connection, psycopg.Connection[Any], psycopg.AsyncConnection[Any]]": ...
@overload
def transaction(
    database: "str | os.PathLike[str]", /, **options: Unpack[TransactionOptions]
) -> "DeclaringOneOf[sqlite3.Connection, psycopg.Connection[Any], psycopg.AsyncConnection[Any]]": ...
@overload
def transaction(database: Database[C], /, **options: Unpack[TransactionOptions]) -> Declaring[C]: ...
@overload
def transaction(database: "sessionmaker[Se]", /, **options: Unpack[TransactionOptions]) -> "Declaring[Se]": ...
@overload
def transaction(
    database: "async_sessionmaker[AsyncSe]", /, **options: Unpack[TransactionOptions]
) -> "Declaring[AsyncSe]": ...
@overload
def transaction(database: "Engine", /, **options: Unpack[TransactionOptions]) -> "Declaring[sqlalchemy.Connection]": ...
@overload
def transaction(database: "AsyncEngine", /, **options: Unpack[TransactionOptions]) -> "Declaring[AsyncConnection]": ...
def transaction(database: Any, /, **options: Any) -> Any:
    """Make a function an atomic step: what it writes to a database happens once, or not at all.

    The first parameter is a live connection with an open transaction; the caller does not pass it. Everything that the
    body writes through it, and a marker under the step's key, are committed together. After a crash the marker tells
    whether the step has happened: if it is there, its outcome is adopted; if not, the body runs. An error rolls back.

    database: `everstep.STORE` (the store's own file, an APSW connection; or its database, a psycopg one); the path or
        URL of any SQLite file (a `sqlite3` connection), as in `sqlite:///shop.db?foreign_keys=on`, where a relative
        path counts from the current folder when the step is declared; the URL of any PostgreSQL database, as in
        `postgresql://user@host/shop` (a `psycopg.Connection`, for an `async def` body a `psycopg.AsyncConnection`); or
        an `Engine`, `AsyncEngine`, `sessionmaker` or `async_sessionmaker` of SQLAlchemy for PostgreSQL (what these
        make). In PostgreSQL the markers are in the schema `everstep`, unless the URL says `schema=`, or an engine's
        execution options `everstep_schema`.
    name: its name in the history (default: the function's qualified name).
    retry: a `Retry` policy (default: one attempt). Waiting for other writers does not count as an attempt.
    timeout: seconds that one attempt may take. One that takes longer cannot commit any more.
    raises: exception types that come back as themselves after a crash.
    fallback: a value, or a function of the same arguments, that takes the place of a failed step's outcome.
    compensate: what undoes the step when the run fails later or is rolled back, called as `f(outcome, *args)`: a step,
        which may be an atomic one as well, or a function.
    secret: what the step is given, returns and raises is never shown, as in `@step`. Its marker has the outcome.
    cost: an estimate of what one attempt uses, for a run with a budget: see `everstep.step`.

    A `def` body runs on a thread, an `async def` body on a loop of its own on such a thread: a connection belongs to
    one thread. The body cannot commit or roll back by itself. Called outside of any run it is the plain function, and
    the caller passes a connection.
    """
    refuse_unknown("@transaction", options, TransactionOptions.__annotations__)
    where = database_of(database)
    return lambda function: TransactionStep(function, where, **options)
