"""Possible causes of a broken promise: the mistakes that lint finds in the workflow's file.

A crash test proves that something is wrong. Where lint sees it as well, both name the same line and the same remedy.
"""

import ast
import os
from collections.abc import Sequence
from typing import Final

from everstep.lint.finding import Finding
from everstep.lint.linting import lint_file

BY_CHANCE: Final = ("clock", "chance")
BY_ORDER: Final = ("order",)
IN_MEMORY: Final = ("globals",)
IN_THE_BODY: Final = ("outside",)
REFUSED: Final = ("outside", "sleep", "thread", "blocks", "loop")
"""The rules whose mistakes the engine refuses as soon as workflow code makes them."""


NAMES: Final = (ast.Name, ast.Attribute)


class Causes:
    """The mistakes of a file, for one of its workflows."""

    def __init__(self, file: str, workflow: str) -> None:
        self._file, self._workflow = file, workflow
        strangers = other_workflows(file, workflow)
        found = lint_file(file, heed_silence=False)  # a silenced one may be a mistake after all
        self._found = [one for one in found if _last(_owner(one)) not in strangers]

    def likeliest(self, groups: Sequence[tuple[str, ...]], line: int = 0) -> Finding | None:
        """Return the mistake of the first group that has any: in the workflow's own code, nearest above a line."""
        for rules in groups:
            found = [one for one in self._found if one.rule in rules]
            if found:
                return max(found, key=lambda one: self._nearness(one, line))
        return None

    def of_step(self, rule: str, step: str) -> Finding | None:
        """Return the mistake that a step makes, by the rule."""
        last = _last(step)
        return next((one for one in self._found if one.rule == rule and _last(one.function) == last), None)

    def refused(self, line: int) -> Finding | None:
        """Return the mistake on a line that the engine refuses."""
        return next((one for one in self._found if one.rule in REFUSED and one.line <= line <= one.lines[1]), None)

    def at(self, line: int) -> str:
        """Return a line of the file, in the form of all places."""
        return f"{os.path.basename(self._file)}:{line}" if line else os.path.basename(self._file)

    def place_of(self, step: str) -> str:
        """Return where a step is defined."""
        return self.at(line_of_function(self._file, step)) if step else ""

    def own_place(self) -> str:
        """Return where the workflow itself is defined."""
        return self.at(line_of_function(self._file, self._workflow))

    def _nearness(self, found: Finding, line: int) -> tuple[bool, bool, int]:
        is_own = _owner(found) == self._workflow
        return is_own, found.line <= line, found.line if found.line <= line else -found.line


def _owner(found: Finding) -> str:
    """Return the workflow or step that makes the mistake, also by a helper."""
    return (found.via or (found.function,))[0]


def other_workflows(path: str, workflow: str) -> set[str]:
    """Return the unrelated workflows of a file: neither this workflow nor what it calls names them."""
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    workflows = {
        name
        for name, node in functions.items()
        if any("workflow" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    reached: set[str] = set()
    waiting = [_last(workflow)]
    while waiting:
        name = waiting.pop()
        if name in functions and name not in reached:
            reached.add(name)
            parts = ast.walk(functions[name])
            waiting += [one.id if isinstance(one, ast.Name) else one.attr for one in parts if isinstance(one, NAMES)]
    return workflows - reached


def line_of_function(path: str, name: str) -> int:
    """Return the line on which a function is defined, by the last part of its name; 0 if there is none."""
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return next((function.lineno for function in functions if function.name == _last(name)), 0)


def _last(name: str) -> str:
    return name.partition("#")[0].rpartition(".")[2]
