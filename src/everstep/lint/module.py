"""A file as the rules see it: its functions, which of them are workflows and steps, and the silenced lines."""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from everstep.lint.graphs import node_functions
from everstep.lint.scopes import Binding, FunctionNode, Scope, dotted, own_nodes, scope_of

_DECORATORS: Final = {
    "everstep.workflow": "workflow",
    "everstep.step": "step",
    "everstep.transaction": "transaction",
    "everstep.engine.code.workflow.workflow": "workflow",
    "everstep.effects.step.step": "step",
}
_OK: Final = re.compile(r"#\s*everstep:\s*ok\b[\s:,;.()\[\]–—-]*(?P<reason>[^)\]]*)", re.IGNORECASE)


@dataclass(eq=False)
class Function:
    """A function of the file. `kind` is `workflow`, `step`, `transaction` or nothing."""

    node: FunctionNode
    name: str
    scope: Scope
    kind: str = ""
    effect: str = ""
    options: dict[str, ast.expr] = field(default_factory=dict)
    owner: str = ""
    """The class whose method it is."""
    is_node: bool = False
    """Whether it is a node of a graph without a contract: then it is workflow code."""

    @property
    def is_async(self) -> bool:
        """Whether it is `async def`."""
        return isinstance(self.node, ast.AsyncFunctionDef)

    @property
    def is_step(self) -> bool:
        """Whether a call of it in a workflow is a durable one."""
        return self.kind in ("step", "transaction")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of its body, without functions that are defined in it."""
        return list(own_nodes(self.node))


class Module:
    """A parsed file."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.lines = text.splitlines()
        self.tree = ast.parse(text, file)
        self.scope = scope_of(self.tree, None)
        self.functions: dict[ast.AST, Function] = {}
        self._steps_by_name: dict[str, Function] = {}
        self._collect(self.tree, self.scope, "", "")
        self._mark_nodes()
        self.silenced = _silenced(text)

    def _mark_nodes(self) -> None:
        found = node_functions(own_nodes(self.tree), self.scope)
        for function in self.functions.values():
            found += node_functions(function.nodes, function.scope)
        for node in found:
            if node in self.functions and not self.functions[node].kind:
                self.functions[node].is_node = True

    @property
    def uses_everstep(self) -> bool:
        """Whether anything of Everstep is imported here."""
        bindings = [one for scope in self._scopes() for found in scope.names.values() for one in found]
        return any(one.kind == "import" and one.target.split(".")[0] == "everstep" for one in bindings)

    def _scopes(self) -> list[Scope]:
        return [self.scope, *(function.scope for function in self.functions.values())]

    def _collect(self, node: ast.AST, scope: Scope, prefix: str, owner: str) -> None:
        for one in own_nodes(node):
            if isinstance(one, FunctionNode):
                function = Function(one, f"{prefix}{one.name}", scope_of(one, scope), owner=owner)
                self._classify(function, scope)
                self.functions[one] = function
                self._collect(one, function.scope, f"{function.name}.", "")
            elif isinstance(one, ast.ClassDef):
                self._collect(one, scope, f"{prefix}{one.name}.", one.name)

    def _classify(self, function: Function, scope: Scope) -> None:
        for decorator in function.node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            kind = _DECORATORS.get(dotted(call.func if call else decorator, scope) or "", "")
            if kind:
                function.kind = kind
                function.options = {one.arg: one.value for one in call.keywords if one.arg} if call else {}
                effect = function.options.get("effect")
                if kind == "transaction":
                    function.effect = "atomic"
                elif kind == "step":
                    function.effect = (
                        str(effect.value) if isinstance(effect, ast.Constant) else "?" if effect else "repeat"
                    )

    def called(self, node: ast.expr, within: Function) -> Function | None:
        """Return the function of this file that an expression names, if it names one."""
        match node:
            case ast.Name(id=name):
                _, bindings = within.scope.find(name)
                nodes = [one.node for one in bindings if one.kind == "function" and one.node is not None]
                return self.functions.get(nodes[0]) if len(nodes) == len(bindings) == 1 else None
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                owner = self._class_of(within)
                return next(
                    (one for one in self.functions.values() if owner and one.owner == owner and one.node.name == name),
                    None,
                )
        return None

    def _class_of(self, within: Function) -> str:
        if within.owner:
            return within.owner
        outer = within.name.rpartition(".")[0]
        return next((self._class_of(one) for one in self.functions.values() if one.name == outer), "")

    def module_bindings(self, name: str, within: Function) -> list[Binding]:
        """Return how a module-level name is bound, if a function that uses the name means that binding."""
        where, bindings = within.scope.find(name)
        return bindings if where is self.scope else []


def _silenced(text: str) -> dict[int, str]:
    """Return the lines with `# everstep: ok`, and the reason that each gives."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := _OK.search(token.string)):
            found[token.start[0]] = match["reason"].strip()
    return found
