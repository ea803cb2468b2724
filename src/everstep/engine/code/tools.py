"""Tools: steps that a model may call. A person's approval is requested before a tool that needs one runs."""

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, overload

import msgspec

from everstep.effects.step import OPTIONS, Cost, Step
from everstep.effects.surroundings import CURRENT, code_here, persons_line
from everstep.engine.code.approvals import ask
from everstep.engine.code.execution import Execution
from everstep.engine.code.greenlets import in_greenlet, wait_in_greenlet
from everstep.errors import Misuse, Refused
from everstep.model.contracts import Effect
from everstep.model.durations import Duration
from everstep.model.options import checked_flag, checked_seconds, checked_text, refuse_generator, refuse_unknown
from everstep.model.retry import Retry

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)


class ToolSpec(TypedDict):
    """What a model is told about a tool."""

    name: str
    description: str
    inputSchema: dict[str, Any]  # it is called so wherever there are tools


class Tool(Step):
    """A declared tool. Called in a workflow it is a durable call, after a person has approved it if necessary."""

    asks: ClassVar[bool] = True

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        approval: bool | Callable[..., bool] = False,
        approval_timeout: Duration | None = None,
        description: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(function, **options)
        if approval_timeout is not None and not approval:
            raise Misuse("approval_timeout= is for tools with approval=.")
        if callable(approval):
            refuse_generator("approval=", approval)
        else:
            checked_flag("approval", approval)
        self.approval = approval
        self.approval_timeout = (
            None if approval_timeout is None else checked_seconds("approval_timeout", approval_timeout)
        )
        self._description = None if description is None else checked_text("description", description)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = CURRENT.get() or code_here()
        if not (self.approval and isinstance(current, Execution)):
            return super().__call__(*args, **kwargs)
        if self.is_async or not in_greenlet():
            if not self.is_async:
                return super().__call__(*args, **kwargs)  # which explains how a `def` step is called here
            return self.approved(current, args, kwargs)
        return wait_in_greenlet(self.approved(current, args, kwargs))

    def needs_approval(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a person must approve a call with these arguments."""
        return bool(self.approval(*args, **kwargs)) if callable(self.approval) else self.approval

    async def approved(self, execution: Execution, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ask a person if necessary, and do the call."""
        source = persons_line(sys._getframe(1))
        await self.ask_person(execution, args, kwargs, source)
        return await execution.issue_step(self, args, kwargs, source)

    async def ask_person(
        self, execution: Execution, args: tuple[Any, ...], kwargs: dict[str, Any], source: str
    ) -> None:
        """Ask a person if necessary. Raises `Refused`, or `TimeoutError` if no answer came in time."""
        if not self.needs_approval(args, kwargs):
            return
        shown, secret = self.shown(args, kwargs), self.secret
        try:
            given = await ask(
                execution, self.name, shown, Any, self.approval_timeout, source, secret=secret, whole=True
            )
        except TimeoutError:
            raise TimeoutError(f"it was not approved within {self.approval_timeout:g} s") from None
        refuse(given)

    def shown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, as an approver sees them. `Live` arguments are not shown."""
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if not self.signature.is_live_name(name)}

    @cached_property
    def spec(self) -> ToolSpec:
        """What a model is told: the name, the description from the docstring, the JSON schema of the arguments."""
        about, of_parameters = _documented(inspect.getdoc(self.function) or "")
        parameters = {
            name: one
            for name, one in inspect.signature(self.function).parameters.items()
            if name not in ("self", "cls") and not self.signature.is_live_name(name)
        }
        annotations = self.signature.annotations
        schemas, definitions = _schemas({name: annotations.get(name, Any) for name in parameters})
        for name, text in of_parameters.items():
            if name in schemas:
                schemas[name] = {"description": text, **schemas[name]}
        for name, one in parameters.items():
            if one.default is not one.empty and isinstance(one.default, str | int | float | bool | None):
                schemas[name] = {**schemas[name], "default": one.default}
        required = [name for name, one in parameters.items() if one.default is one.empty]
        schema: dict[str, Any] = {"type": "object", "properties": schemas, "required": required}
        if definitions:
            schema["$defs"] = definitions
        return {"name": self.name, "description": self._description or about or self.name, "inputSchema": schema}

    def __repr__(self) -> str:
        return f"<tool {self.name} ({self.effect})>"


def refuse(given: dict[str, Any]) -> None:
    """Raise `Refused` unless the answer is `true`. A text as answer, or the approver's note, becomes the reason."""
    answer = given["answer"]
    if answer is True:
        return
    why = answer if isinstance(answer, str) and answer else given.get("note") or ""
    by = f" ({given['by']})" if given.get("by") else ""
    raise Refused(f"refused by a person{by}" + (f": {why}" if why else ""))


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Return the docstring up to the arguments, and its text about each: `name: text`, indented under `Args:`."""
    lines = text.split("\n")
    sections = [n for n, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:", "Parameters:")]
    if not sections:
        return text.strip(), {}
    found: dict[str, str] = {}
    name = ""
    for line in lines[sections[0] + 1 :]:
        if line.strip() and not line.startswith(" "):
            break
        head, colon, rest = line.strip().partition(":")
        if colon and head.split("(")[0].strip().isidentifier():
            name = head.split("(")[0].strip()
            found[name] = rest.strip()
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return "\n".join(lines[: sections[0]]).strip(), found


def _schemas(annotations: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the JSON schemas of annotations, and the definitions that they refer to. A type without a schema
    accepts anything.
    """
    schemas: dict[str, dict[str, Any]] = {}
    definitions: dict[str, Any] = {}
    for name, annotation in annotations.items():
        pydantic = getattr(annotation, "model_json_schema", None)
        if pydantic is not None:
            schema = pydantic()
            definitions |= schema.pop("$defs", {})
            schemas[name] = schema
            continue
        try:
            (schemas[name],), more = msgspec.json.schema_components([annotation], ref_template="#/$defs/{name}")
            definitions |= more
        except TypeError:
            schemas[name] = {}
    return schemas, definitions


class Declared(Protocol[P, R_co]):
    """What type checkers see of a tool: the function's own signature, and what a model is told."""

    name: str
    spec: ToolSpec

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type[Any], /) -> Self: ...
    @overload
    def __get__(
        self: "Declared[Concatenate[S, Q], T_co]", instance: S, owner: type[Any] | None = ..., /
    ) -> "Declared[Q, T_co]": ...


class DeclaringTool(Protocol):
    """What `tool(…)` with options returns."""

    def __call__(self, function: Callable[P, R], /) -> Declared[P, R]: ...


class ToolOptions(TypedDict, total=False):
    """The options of a tool, for type checkers."""

    name: str | None
    effect: Effect
    retry: Retry | None
    timeout: Duration | None
    raises: Iterable[type[BaseException]]
    fallback: Any
    probe: Callable[..., Any] | None
    probe_for: Duration
    settle: Duration
    not_done: type[BaseException] | Iterable[type[BaseException]]
    key: str | Callable[..., str] | None
    compensate: Callable[..., Any] | None
    secret: bool
    cost: Cost | None
    limit: str | None
    approval: bool | Callable[..., bool]
    approval_timeout: Duration | None
    description: str | None


@overload
def tool(function: Callable[P, R], /, **options: Unpack[ToolOptions]) -> Declared[P, R]: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> DeclaringTool: ...
def tool(function: Any = None, /, **options: Any) -> Any:
    """Make a function a tool: a step that a model may call, with all options of `@step`, and those below.

    approval: `True`, or a function of the same arguments that says whether a person must approve this call. The person
        sees the exact arguments (`everstep approvals`). Any answer but `true` refuses it: the body does not run, and
        `everstep.errors.Refused` says by whom and why.
    approval_timeout: seconds after which it is refused with a `TimeoutError`.
    description: the description that the model sees (default: the docstring up to `Args:`).

    `tool.spec` has the name, the description and the JSON schema of the arguments, for the code that calls the model.
    The contract is `repeat` unless `effect=` says otherwise.
    """
    refuse_unknown("@tool", options, {*OPTIONS, "approval", "approval_timeout", "description"})
    if function is None:
        return lambda declared: Tool(declared, **options)
    return Tool(function, **options)
