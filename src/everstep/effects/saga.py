"""Compensations: steps that undo another step, declared with `compensate=`.

A compensation is a step like any other, with its own contract, attempts and probe. Its arguments are the outcome of the
step that it undoes, and then that step's arguments: `f(outcome, *args)`.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from everstep.codec.signature import inspected
from everstep.effects.surroundings import CURRENT
from everstep.errors import Misuse
from everstep.model.options import refuse_generator

if TYPE_CHECKING:  # a real cycle: a step is declared with its compensation, which is a step
    from everstep.effects.step import Step

_DECLARED: "dict[str, list[weakref.ref[Step]]]" = {}
"""The steps with a compensation that were declared outside of runs, by name: the newest last."""


def note_declared(step: "Step") -> None:
    """Remember a step, so that code which has not called it can compensate it. Steps that a workflow makes itself
    are not.
    """
    if CURRENT.get() is None:
        alive = [one for one in _DECLARED.get(step.name, ()) if one() is not None]
        _DECLARED[step.name] = [*alive, weakref.ref(step)]


def declared_step(name: str, where: str) -> "Step | None":
    """Return the step of a name whose function is at `where`; or the only one of that name."""
    steps = [step for one in _DECLARED.get(name, ()) if (step := one()) is not None]
    exact = [step for step in steps if place_of(step) == where]
    if not exact and len({place_of(step) for step in steps}) == 1:
        exact = steps
    return exact[-1] if exact else None


def place_of(step: "Step") -> str:
    """Return the module and the qualified name of a step's function."""
    function = step.function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}:{name}"


def compensation_of(step: "Step", function: Callable[..., Any]) -> "Step":
    """Return the step that undoes another one: the given step, or a `repeat` step made of a function.

    It is a copy, because workflow code may also call the same step directly, where it is no compensation.
    """
    from everstep.effects.step import Step  # a real cycle: see above

    if step.effect == "read":
        raise Misuse(f'{step.name}: compensate= is for steps with an effect; effect="read" changes nothing outside.')
    if not callable(function):
        raise Misuse(f"{step.name}: compensate= is a step or a function, not {type(function).__name__}.")
    refuse_generator(f"compensate= of {step.name}:", function)
    if isinstance(function, Step):
        undoing = object.__new__(type(function))
        undoing.__dict__.update(function.__dict__)
    else:
        undoing = Step(function, name=f"{step.name}.compensate")
    if undoing.effect == "read":
        raise Misuse(f'{step.name}: {undoing.name} cannot undo it, because effect="read" changes nothing outside.')
    undoing.compensate = undoing.key = None  # the step that it undoes identifies its action
    undoing.is_accounted_for = True
    undoing.is_plain = False
    _check_call(step, undoing)
    return undoing


def knowing(undoing: "Step", step: "Step") -> "Step":
    """Return a compensation that also takes the classes of the arguments and outcome of its step."""
    made: Step = object.__new__(type(undoing))
    made.__dict__.update(undoing.__dict__)
    known, undone = undoing.signature, step.signature
    made.signature = known.with_types(known.arguments | undone.arguments | undone.result, known.result)
    return made


def is_of_the_same_class(step: "Step", undoing: "Step") -> bool:
    """Return True if both are methods of one class, so that they are bound to the same object."""
    return _class_around(step.function) == _class_around(undoing.function) != ""


def _class_around(function: Any) -> str:
    """Return the qualified name of the class in whose body a function was written; "" for a plain function."""
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        return ""
    around = function.__qualname__.rpartition(".")[0]
    return "" if around.endswith("<locals>") else around


def _check_call(step: "Step", undoing: "Step") -> None:
    """Refuse a compensation that does not take the step's outcome and arguments, when it is declared."""
    try:
        taken = list(inspected(step.function).parameters.values())
        called = inspected(undoing.function)
    except (TypeError, ValueError):  # some functions in C do not say what they take
        return
    given: list[Any] = ["connection"] if undoing.effect == "atomic" else []
    if step.effect == "atomic":
        del taken[1 if _class_around(step.function) else 0]  # nor is the connection, which the engine passes
    if _class_around(step.function) and not is_of_the_same_class(step, undoing):
        taken = taken[1:]  # the receiver is not an argument
    for needed in (taken, [one for one in taken if one.default is one.empty]):
        args = [one for one in needed if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        kwargs = {one.name: one for one in needed if one.kind is one.KEYWORD_ONLY}
        try:
            called.bind(*given, "outcome", *args, **kwargs)
        except TypeError as error:
            plain = [one.replace(annotation=one.empty, default=one.empty) for one in taken]
            named = [one.name if one.kind is not one.KEYWORD_ONLY else f"{one.name}={one.name}" for one in plain]
            call = ", ".join(["outcome", *named])
            has = inspect.Signature([one.replace(annotation=one.empty) for one in called.parameters.values()])
            raise Misuse(
                f"{undoing.name} cannot undo {step.name}: it would be called as {undoing.name}({call}), with the "
                f"outcome of {step.name} first and then its arguments, and it takes {has} ({error})."
            ) from None
