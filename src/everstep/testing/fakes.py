"""Fakes for steps: `with replaced(ask_model, lambda prompt: "yes"):` runs a function in place of a step's body."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from everstep.effects.step import Step, is_async_callable
from everstep.errors import Misuse
from everstep.model.options import checked_function

P = ParamSpec("P")
R = TypeVar("R")


class Fake:
    """A function that takes the place of a step's body."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        """The arguments of each attempt, by the names of the step's parameters, with defaults."""


@overload
@contextmanager
def replaced(
    step: Callable[P, Coroutine[Any, Any, R]], fake: Callable[P, Coroutine[Any, Any, R]], /
) -> Iterator[Fake]: ...
@overload
@contextmanager
def replaced(step: Callable[P, Coroutine[Any, Any, R]], fake: Callable[P, R], /) -> Iterator[Fake]: ...
@overload
@contextmanager
def replaced(step: Callable[P, R], fake: Callable[P, R], /) -> Iterator[Fake]: ...
@contextmanager
def replaced(step: Any, fake: Any, /) -> Iterator[Fake]:
    """Run `fake` in place of a step's body, wherever the step is called, until the block ends.

    The step keeps its name, its contract, its retries and its arguments, so the history is what it would be with the
    real body. The fake takes the same arguments. For an `async` step it may be `async` or plain. What the block yields
    has the arguments of each attempt in `calls`.
    """
    if not isinstance(step, Step):
        raise Misuse(f"replaced() is for steps, and {step!r} is none. Anything else is for monkeypatch.")
    body = checked_function("fake", fake.function if isinstance(fake, Step) else fake, "lambda prompt: 'yes'")
    if is_async_callable(body) and not step.is_async:
        raise Misuse(f"The step {step.name} is a `def`, so its fake has to be one: write `def` instead of `async def`.")
    noted = Fake()

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        noted.calls.append(step.signature.bound(args, kwargs))

    @wraps(body)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        note(args, kwargs)
        value = body(*args, **kwargs)
        return await value if is_async_callable(body) else value

    @wraps(body)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(args, kwargs)
        return body(*args, **kwargs)

    real = step.function
    step.function = call_async if step.is_async else call
    try:
        yield noted
    finally:
        step.function = real
