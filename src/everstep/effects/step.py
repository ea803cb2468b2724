"""Steps: functions whose outcome is recorded once and never recomputed."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, ClassVar, Final, Literal, TypeVar, overload

from everstep.codec import Signature, register
from everstep.effects.keying import KeyMaker
from everstep.effects.saga import compensation_of, is_of_the_same_class, note_declared
from everstep.effects.surroundings import OUTSIDE, code_here
from everstep.effects.surroundings import current as now_running
from everstep.errors import Misuse
from everstep.model.budgets import estimate_from
from everstep.model.contracts import Effect, may_run_again, needs_intent
from everstep.model.durations import Duration
from everstep.model.ids import checked_name
from everstep.model.options import (
    checked_errors,
    checked_flag,
    checked_function,
    checked_seconds,
    refuse_generator,
    refuse_unknown,
    refused,
)
from everstep.model.retry import ONE_ATTEMPT, Retry
from everstep.model.untrusted import is_a, type_name

F = TypeVar("F", bound=Callable[..., Any])
Cost = Mapping[str, Any] | Callable[..., Mapping[str, Any]]


class Step:
    """A declared step. Called in a workflow it is a durable call; called anywhere else it is the plain function."""

    effects: ClassVar[tuple[Effect, ...]] = ("read", "repeat", "once")
    database: Any = None
    """Where an atomic step writes."""
    asks: ClassVar[bool] = False
    """Whether a person may have to approve a call, as for a tool."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        effect: Effect = "repeat",
        retry: Retry | None = None,
        timeout: Duration | None = None,
        raises: Iterable[type[BaseException]] = (),
        fallback: Any = None,
        probe: Callable[..., Any] | None = None,
        probe_for: Duration = 600.0,
        settle: Duration = 0.0,
        not_done: type[BaseException] | Iterable[type[BaseException]] = (),
        key: str | Callable[..., str] | None = None,
        compensate: Callable[..., Any] | None = None,
        secret: bool = False,
        cost: Cost | None = None,
        limit: str | None = None,
    ) -> None:
        if not callable(function):
            raise Misuse(f"@step is for functions, not for {type_name(function)}. A name is an option: @step(name=…).")
        refuse_generator("The step", function)
        self.not_done = checked_errors("not_done", not_done)
        self.settle = checked_seconds("settle", settle)
        self._check_contract(effect, for_once=probe is not None or self.not_done or settle, has_key=key is not None)
        if retry is not None and type(retry) is not Retry:
            raise refused("retry", retry, "it is an everstep.Retry, such as retry=Retry(attempts=3)")
        self.limit = checked_name(limit, "limit") if limit is not None else None
        self.function = function
        self.name = checked_name(declared_name(function) if name is None else name, "step")
        self.effect: Effect = effect
        self.retry = retry or ONE_ATTEMPT
        self.timeout = None if timeout is None else checked_seconds("timeout", timeout, above=True)
        self.fallback = fallback
        if callable(fallback):
            refuse_generator("fallback=", fallback)
        self.probe = None if probe is None else checked_function("probe", probe, "ask_the_receiver")
        self.probe_for = checked_seconds("probe_for", probe_for)
        self.secret = checked_flag("secret", secret)
        self.key = _key_maker(key, function, self.name) if key is not None else None
        if callable(cost):
            refuse_generator("cost=", cost)
        elif cost is not None:
            estimate_from(cost, self.name)
        self.cost = cost
        self.is_async = is_async_callable(function)
        self.signature = Signature(function)
        self.compensate: Step | None = None
        if compensate is not None:
            self.compensate = compensation_of(self, compensate)
            note_declared(self)
        self.needs_intent = needs_intent(effect)
        self.is_accounted_for = self.compensate is not None or not may_run_again(effect)
        """Whether its arguments are kept whole, and it is settled before the run may end or the code may see a
        cancel.
        """
        self.is_plain = not (self.is_accounted_for or limit or secret) and key is None and cost is None
        """True if no option (key, cost, limit, secret, compensate) changes how it starts or ends."""
        for error in checked_errors("raises", raises):
            register(error)
        functools.update_wrapper(self, function, updated=())

    def _check_contract(self, effect: Any, *, for_once: Any, has_key: bool) -> None:
        """Refuse an unknown contract, and options that belong to another one."""
        if not is_a(effect, str) or str.__str__(effect) not in self.effects:
            raise refused(
                "effect", effect, 'a step is "read", "repeat" or "once"; "atomic" is @everstep.transaction(database)'
            )
        if effect != "once" and for_once:
            raise Misuse(f'probe=, settle= and not_done= are for effect="once", not for effect={effect!r}.')
        if effect == "read" and has_key:
            raise Misuse('key= is for effects, not for effect="read": a read changes nothing that could happen twice.')

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = now_running() or code_here()
        if current is None:
            return OUTSIDE[-1](self, args, kwargs) if OUTSIDE else self.function(*args, **kwargs)
        return current.call_step(self, args, kwargs, sys._getframe().f_back if current.wants_places else None)

    def __get__(self, instance: Any, owner: type | None = None) -> "Step":
        """Bind a step that is a method: `self` reaches the body and is not encoded."""
        if instance is None or not hasattr(self.function, "__get__"):
            return self
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound.function = self.function.__get__(instance, owner)
        bound.signature = self._method_signature
        if self.compensate is not None and is_of_the_same_class(self, self.compensate):
            bound.compensate = self.compensate.__get__(instance, owner)
        return bound

    @functools.cached_property
    def _method_signature(self) -> Signature:
        """The signature of the method after binding, for any receiver."""
        return Signature(MethodType(self.function, self))

    def __repr__(self) -> str:
        return f"<step {self.name} ({self.effect})>"


OPTIONS: Final = frozenset(Step.__init__.__kwdefaults__ or ())
"""The names of a step's options."""


def _key_maker(key: str | Callable[..., str], function: Callable[..., Any], name: str) -> "KeyMaker":

    return KeyMaker(key, function, name)


def is_async_callable(function: Any) -> bool:
    """Return True if calling this returns an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # so may a call of an object
    )


def declared_name(function: Callable[..., Any]) -> str:
    """Return a function's qualified name without its module."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
    return str(name)


@overload
def step(function: F, /) -> F: ...
@overload
def step(
    function: F,
    /,
    *,
    name: str | None = ...,
    effect: Literal["read", "repeat", "once"] = ...,
    retry: Retry | None = ...,
    timeout: Duration | None = ...,
    raises: Iterable[type[BaseException]] = ...,
    fallback: Any = ...,
    probe: Callable[..., Any] | None = ...,
    probe_for: Duration = ...,
    settle: Duration = ...,
    not_done: type[BaseException] | Iterable[type[BaseException]] = ...,
    key: str | Callable[..., str] | None = ...,
    compensate: Callable[..., Any] | None = ...,
    secret: bool = ...,
    cost: Cost | None = ...,
    limit: str | None = ...,
) -> F: ...
@overload
def step(
    *,
    name: str | None = ...,
    effect: Literal["read", "repeat", "once"] = ...,
    retry: Retry | None = ...,
    timeout: Duration | None = ...,
    raises: Iterable[type[BaseException]] = ...,
    fallback: Any = ...,
    probe: Callable[..., Any] | None = ...,
    probe_for: Duration = ...,
    settle: Duration = ...,
    not_done: type[BaseException] | Iterable[type[BaseException]] = ...,
    key: str | Callable[..., str] | None = ...,
    compensate: Callable[..., Any] | None = ...,
    secret: bool = ...,
    cost: Cost | None = ...,
    limit: str | None = ...,
) -> Callable[[F], F]: ...
def step(function: Any = None, /, **options: Any) -> Any:
    """Make a function a step: its outcome is recorded once and never recomputed.

    name: its name in the history (default: the function's qualified name).
    effect: the contract. `"read"` changes nothing outside; `"repeat"` (default) is safe to do again with the same
        `everstep.key()`; `"once"` must never happen twice: when its outcome is unknown it is settled by its probe or by
        a person, and never repeated automatically.
    retry: a `Retry` policy (default: one attempt).
    timeout: seconds that one attempt may take.
    raises: exception types that come back as themselves after a crash.
    probe: for `once`. `probe(key, *args)` asks the outside about an attempt whose outcome is unknown, and returns
        `everstep.Done(value)`, `everstep.NotDone()` or `everstep.Unknown()`.
    probe_for: seconds for which a probe that does not know is asked again, before a person is asked (default 600). One
        question may take as long, but no more than 60 seconds (and 10 in any case).
    settle: seconds to wait before the first question, for receivers that list late.
    not_done: exception types that mean that the effect certainly did not happen, so that `retry` may apply.
    key: your own key for what the action is, unique across all runs of the store: a format string over the parameters,
        such as `"invoice:{invoice.id}"`, or a function of the arguments. A second step with the same key and arguments
        gets the first one's outcome and does not run; with other arguments: `everstep.errors.KeyConflict`.
    fallback: a value, or a function of the same arguments, that takes the place of a failed step's outcome, and of a
        step for which a budget with `then="fallback"` has no room.
    compensate: what undoes the step when the run fails later or is rolled back: a step with its own contract, or a
        function, which becomes a `repeat` step named `<step>.compensate`. It is called as `f(outcome, *args)`.
    secret: the arguments, outcome and errors of the step are never shown: not by commands, `run.history()`, logs or
        holds. They are stored all the same, and what the workflow does with them is shown as usual.
    cost: an estimate of what one attempt uses, such as `{"usd": 0.02, "tokens": 900}`, or a function of the same
        arguments that returns one. A run with a budget reserves it before the body starts. `{}` says that the step uses
        nothing: it still runs when money and tokens are used up.
    limit: the name of a limit over all workers: its body starts when the limit has a slot. See `App.limit`.

    Use it as `@step`, as `@step(effect="read")`, or in place on a function of a library:
    `await step(client.create, name="create", effect="read")(…)`.
    """
    refuse_unknown("@step", options, OPTIONS)
    if function is None:
        return lambda declared: Step(declared, **options)
    return Step(function, **options)
