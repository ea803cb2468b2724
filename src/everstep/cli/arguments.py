"""Arguments on the command line: each is JSON, and is converted to the type in the workflow's signature."""

import inspect
import shlex
from typing import Any

import msgspec

from everstep.codec import converted, types_text
from everstep.engine.code.workflow import Workflow
from everstep.errors import Misuse, NotDecodable


def decoded_arguments(workflow: Workflow, texts: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the arguments for a workflow from their JSON texts."""
    signature = workflow.signature
    if not signature.least <= len(texts) <= signature.most:
        raise Misuse(f"{workflow.name} takes {_parameters(workflow)}; {len(texts)} arguments were given. Each is JSON.")
    values = []
    for number, text in enumerate(texts, 1):
        name, annotation = _parameter(workflow, number - 1)
        values.append(_converted(decoded_json(text, f"argument {number} ({name})"), annotation, name))
    return tuple(values)


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
