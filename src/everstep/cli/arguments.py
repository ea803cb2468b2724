"""Arguments on the command line: each is JSON, and is converted to the type in the workflow's signature."""

import inspect
import shlex
from typing import Any

import msgspec

from everstep.codec import converted, types_text
from everstep.engine.code.workflow import Workflow
from everstep.errors import Misuse, NotDecodable

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by place, and by name."""


def decoded_arguments(workflow: Workflow, texts: tuple[str, ...]) -> Call:
    """Return the arguments for a workflow from their texts: JSON, or `name=JSON`."""
    placed, named = _split(texts)
    try:
        workflow.signature.normalise(tuple(placed), dict(named))
    except TypeError as error:
        given = f"{len(texts)} argument{'' if len(texts) == 1 else 's'} {'was' if len(texts) == 1 else 'were'} given"
        raise Misuse(
            f"{workflow.name} takes {_parameters(workflow)}; {given}: {error}. Each is JSON, or NAME=JSON."
        ) from None
    values = []
    for number, text in enumerate(placed, 1):
        name, annotation = _parameter(workflow, number - 1)
        values.append(_converted(decoded_json(text, f"argument {number} ({name})"), annotation, name))
    annotations = workflow.signature.annotations
    by_name = {
        name: _converted(decoded_json(text, f"argument {name}"), annotations.get(name, Any), name)
        for name, text in named.items()
    }
    return tuple(values), by_name


def decoded_unchecked(texts: tuple[str, ...]) -> Call:
    """Return the arguments for a workflow of which only the name is known."""
    placed, named = _split(texts)
    values = tuple(decoded_json(text, f"argument {place}") for place, text in enumerate(placed, 1))
    return values, {name: decoded_json(text, f"argument {name}") for name, text in named.items()}


def _split(texts: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Return the texts of arguments by place and by name. No JSON text begins with a name and `=`."""
    placed: list[str] = []
    named: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            placed.append(text)
        elif name in named:
            raise Misuse(f"The argument {name} was given twice.")
        else:
            named[name] = value
    return placed, named


def decoded_json(text: str, what: str) -> Any:
    """Return the value of a JSON text from the command line. For a bare word, the error shows how to quote it."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if text.startswith(('"', "{", "[")):  # meant as JSON, so the hint must not be to quote it once more
            raise Misuse(f"{what} is not JSON: {text[:80]} ({error}). Is a quote, comma or bracket missing?") from None
        quoted = shlex.quote(msgspec.json.encode(text).decode())
        raise Misuse(f"{what} is not JSON ({error}). If it is a text, write it as {quoted}") from None


def _parameters(workflow: Workflow) -> str:
    try:
        parameters = list(inspect.signature(workflow.function).parameters.values())
    except (TypeError, ValueError):
        return "other arguments"
    annotations = workflow.signature.annotations
    listed = [f"{one.name}: {types_text(annotations.get(one.name, Any))}" for one in parameters]
    return f"({', '.join(listed)})" if listed else "no arguments"


def _parameter(workflow: Workflow, index: int) -> tuple[str, Any]:
    """Return the name and annotation of the parameter that takes the argument at this place."""
    parameters = list(inspect.signature(workflow.function).parameters.values())
    spread = next((one for one in parameters if one.kind is one.VAR_POSITIONAL), None)
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    one = positional[index] if index < len(positional) else spread
    name = one.name if one is not None else str(index + 1)
    return name, workflow.signature.annotations.get(name, Any)


def _converted(value: Any, annotation: Any, name: str) -> Any:
    """Return a JSON value as the annotated type."""
    try:
        return converted(value, annotation).value
    except NotDecodable as refused:
        raise Misuse(f"The argument {name} is {refused}.") from None
