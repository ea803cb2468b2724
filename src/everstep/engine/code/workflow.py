"""Workflows: functions whose execution is durable. Declaring one starts nothing; an `App` runs them."""

import functools
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, overload

from everstep.codec import Signature
from everstep.effects.step import declared_name
from everstep.effects.surroundings import CURRENT, code_here
from everstep.errors import Misuse, UnknownWorkflow
from everstep.model.budgets import Budget
from everstep.model.durations import Duration
from everstep.model.ids import checked_name
from everstep.model.options import checked_choice, checked_seconds, refuse_generator, refuse_unknown, refused
from everstep.model.untrusted import attempted, is_a, is_encodable

F = TypeVar("F", bound=Callable[..., Any])
OnExisting = Literal["attach", "retry", "restart", "fail"]
OnParentEnd = Literal["cancel", "abandon", "wait"]

ON_EXISTING: Final = ("attach", "retry", "restart", "fail")
ON_PARENT_END: Final = ("cancel", "abandon", "wait")


class Workflow:
    """A declared workflow. Called inside a workflow it is a child run; anywhere else it is the plain function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        version: str = "",
        queue: str = "default",
        timeout: Duration | None = None,
        on_existing: OnExisting = "attach",
        on_parent_end: OnParentEnd = "cancel",
        budget: "Budget | None" = None,
    ) -> None:
        if not inspect.isfunction(function):
            raise _no_function(function)
        refuse_generator("The workflow", function)
        if budget is not None:
            _check_budget(budget)
        self.function = function
        self.budget = budget
        self.name = declared_name(function) if name is None else checked_name(name, "workflow")
        self.version = _checked_version(version)
        self.queue = checked_name(queue, "queue")
        self.timeout = None if timeout is None else checked_seconds("timeout", timeout, above=True)
        self.on_existing = checked_choice("on_existing", on_existing, ON_EXISTING)
        self.on_parent_end = checked_choice("on_parent_end", on_parent_end, ON_PARENT_END)
        self.is_async = inspect.iscoroutinefunction(function)
        self.signature = Signature(function)
        last = self.name.rpartition(".")[2]
        self.id_prefix = "".join(c if c.isascii() and c.isalnum() else "-" for c in last)[:60].strip("-") or "run"
        functools.update_wrapper(self, function, updated=())
        DECLARED.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = CURRENT.get() or code_here()
        if current is None:
            return self.function(*args, **kwargs)
        return current.call_workflow(self, args, kwargs, sys._getframe().f_back)

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"


def _no_function(given: Any) -> Misuse:
    """Return the error for a workflow that is not a function."""
    if is_a(given, str):
        return Misuse(f"@workflow({given!r}): a name is an option. Write @workflow(name={given!r}).")
    if is_a(given, type):
        return Misuse(f"@workflow is for functions, and {given.__qualname__} is a class. Put it on an `async def`.")
    return Misuse(f"@workflow is for functions, not for {type(given).__name__}. Put it on an `async def`.")


OPTIONS: Final = frozenset(Workflow.__init__.__kwdefaults__ or ())
"""The names of a workflow's options."""


def _checked_version(version: Any) -> str:
    if is_a(version, int, float) and not is_a(version, bool):
        version = attempted(str, version)  # a number with thousands of digits has none
    if version is None or not is_a(version, str) or not is_encodable(version):
        raise refused("version", version, 'it is a text, such as version="2"')
    return str.__str__(version)


def _check_budget(budget: object) -> None:

    if not isinstance(budget, Budget):
        raise Misuse(f"budget= is an everstep.Budget(usd=…, tokens=…), not {type(budget).__name__}.")


class Declarations:
    """The workflows declared in this process, by name.

    A later declaration with the same name in the same file replaces the earlier one (a notebook's cell run again, a
    module reloaded, a script imported under its own name). If two files declare one name, using that name is an error.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, dict[str, Workflow]] = {}

    def add(self, workflow: Workflow) -> None:
        self._by_name.setdefault(workflow.name, {})[_place(workflow.function)] = workflow

    def named(self, name: str) -> Workflow:
        """Return the workflow with this name."""
        found = self._by_name.get(name, {}).values()
        if len(found) == 1:
            return next(iter(found))
        if found:
            places = " and ".join(sorted(_place(one.function) for one in found))
            raise Misuse(f"Two workflows are named {name!r}, in {places}. Give one of them another `name=`.")
        raise UnknownWorkflow(
            f"No workflow named {name!r} is declared in this process. Import the module that declares it; "
            f"declared now: {', '.join(sorted(self._by_name)) or 'none'}."
        )

    def names(self) -> list[str]:
        """Return the names that are declared exactly once."""
        return sorted(name for name, found in self._by_name.items() if len(found) == 1)


def _place(function: Any) -> str:
    """Return the file that declares a function. The cells of a notebook have no files: they are one place together."""
    filename: str = function.__code__.co_filename
    is_cell = not filename.endswith(".py") or "ipykernel" in filename
    return f"<{function.__module__}>" if is_cell else filename


DECLARED: Final = Declarations()


def workflow_of(target: Any) -> Workflow:
    """Return the workflow that a caller named: the declared function, or its name."""
    if isinstance(target, Workflow):
        DECLARED.named(target.name)  # raises if two files declare this name
        return target
    if isinstance(target, str):
        return DECLARED.named(target)
    raise Misuse(f"{getattr(target, '__qualname__', target)!r} is not a workflow: put @everstep.workflow on it.")


@overload
def workflow(function: F, /) -> F: ...
@overload
def workflow(
    *,
    name: str | None = ...,
    version: str = ...,
    queue: str = ...,
    timeout: Duration | None = ...,
    on_existing: OnExisting = ...,
    on_parent_end: OnParentEnd = ...,
    budget: "Budget | None" = ...,
) -> Callable[[F], F]: ...
def workflow(function: Any = None, /, **options: Any) -> Any:
    """Make a function a workflow: its execution is durable and resumes after a crash.

    name: under which its runs are kept (default: the function's qualified name).
    version: your own label for this version of the code, recorded in each run.
    queue: which queue its runs belong to.
    timeout: seconds after which a run is cancelled and fails with `RunTimedOut`.
    on_existing: what `start` does with an id that exists: `attach` (default), `retry`, `restart` or `fail`.
    on_parent_end: what happens to a child run when its parent ends: `cancel` (default), `abandon`, or `wait`.
    budget: a `Budget`: how much a run may use, with its children.
    """
    refuse_unknown("@workflow", options, OPTIONS)
    if function is None:
        return lambda declared: Workflow(declared, **options)
    return Workflow(function, **options)


def _unknown(*args: Any, **kwargs: Any) -> Any:
    """Replaces a function of which only the name is known."""


ANYTHING: Final = Signature(_unknown)
"""The signature that accepts any arguments, as they are."""


class NamedWorkflow:
    """A workflow of which only the name is known here, without its code's timeout and budget."""

    def __init__(self, name: str, *, version: str = "", queue: str = "default", timeout: float | None = None) -> None:
        self.name = checked_name(name, "workflow")
        self.version = version
        self.queue = queue
        self.timeout = timeout
        self.budget = None
        self.signature = ANYTHING
        last = name.rpartition(".")[2]
        self.id_prefix = "".join(c if c.isascii() and c.isalnum() else "-" for c in last)[:60].strip("-") or "run"


def new_run_id(workflow: Workflow | NamedWorkflow, at: int, randomness: random.Random) -> str:
    """Return an unused id. It begins with the time, so that runs of one time are adjacent in the store."""
    return f"{workflow.id_prefix}-{at // 1000:011x}{randomness.getrandbits(40):010x}"


def target_of(workflow: Any) -> Workflow | NamedWorkflow:
    """Return the workflow that a caller names: the declared one, or one of which only the name is known here."""
    if isinstance(workflow, str) and workflow not in DECLARED.names():
        try:
            return workflow_of(workflow)  # raises if two files declare this name
        except UnknownWorkflow:
            return NamedWorkflow(workflow)
    return workflow_of(workflow)
