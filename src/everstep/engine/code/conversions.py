"""Plain data that becomes what the code declares, where a run begins and where an outcome was given by hand."""

from typing import TYPE_CHECKING, Any

from everstep.effects.step import Step
from everstep.engine.code import calls
from everstep.errors import NotDecodable

if TYPE_CHECKING:  # a real cycle: an execution converts, and hands itself over
    from everstep.engine.code.execution import Execution


def declared_arguments(
    execution: "Execution", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as the parameters are declared: the run was started where its code was not known."""
    signature = execution.workflow.signature
    placed, named = list(args), dict(kwargs)
    for place, name, annotation in signature.declared(args, kwargs):
        given: Any = placed if isinstance(place, int) else named
        what = f"argument {name}"
        try:
            given[place] = execution.convert(given[place], signature.arguments, annotation, what, always=True)
        except NotDecodable as refused:
            raise NotDecodable(f"the argument {name} is {refused}") from None
    return tuple(placed), named


def adopted_outcome(execution: "Execution", value: Any, step: Step) -> Any:
    """Return an outcome that a person or a probe gave, perhaps as plain data, as the type that the step returns."""
    annotation = step.signature.annotations.get("return", Any)
    what = f"outcome of {step.name}"
    recorded = execution.next_conversion()
    if execution.replaying and (recorded is None or recorded.what != what):
        return calls.as_declared(value, step)  # no code of the type had a say in it
    try:
        return execution.convert(value, step.signature.result, annotation, what)
    except NotDecodable:
        return value
