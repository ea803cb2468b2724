"""A step's body: one effect, with its key, and no inner step that needs a durable call of its own."""

import ast
from collections.abc import Sequence

from everstep.lint.module import Function, Module
from everstep.lint.reach import Reached
from everstep.lint.rules_outside import Found
from everstep.lint.scopes import dotted
from everstep.lint.tables import effect_of
from everstep.model.mistakes import key_unused, nested_key, nested_step, two_effects


def judge_nested(module: Module, group: Sequence[Reached]) -> Found:
    """Find `once` and `atomic` steps, and steps with a key, that are called inside another step."""
    step = group[0].function.node.name
    for reached in group:
        for call in reached.calls():
            target = module.called(call.func, reached.function)
            if target is None or not target.is_step:
                continue
            if target.effect in ("once", "atomic"):
                yield call, nested_step(target.node.name, target.effect, step)
            elif "key" in target.options:
                yield call, nested_key(target.node.name, step)


def judge_key(module: Module, group: Sequence[Reached]) -> Found:
    """Find a `repeat` step that sends something and never uses its key."""
    step = group[0].function
    if step.effect != "repeat" or "key" in step.options:
        return
    calls = [(one, call, dotted(call.func, one.function.scope) or "") for one in group for call in one.calls()]
    if any(name in ("everstep.key", "everstep.effects.body.key") for _, _, name in calls):
        return
    for reached, call, name in calls:
        if effect_of(name, call) == "send":
            # A helper may be shared by several steps, and some of them may be right.
            yield call if reached.function is step else step.node, key_unused(step.node.name)
            return


def judge_effects(module: Module, group: Sequence[Reached]) -> Found:
    """Find a step with two effects on one path through it.

    A write may be repeated, so in a `repeat` step only what is sent counts.
    """
    step = group[0].function
    if step.effect not in ("repeat", "once"):
        return
    helpers = {reached.function: reached for reached in group}
    counter = _Counter(module, step.effect, helpers)
    if counter.count(step) >= 2:
        yield counter.second or step.node, two_effects(step.node.name, step.effect)


class _Counter:
    """Counts the effects on the path through a function that has the most."""

    def __init__(self, module: Module, effect: str, known: dict[Function, Reached]) -> None:
        self.second: ast.AST | None = None
        """The last effect that was seen, which the finding points to."""
        self._module = module
        self._counts = ("send",) if effect == "repeat" else ("send", "write")
        self._known = known
        self._open: set[Function] = set()

    def count(self, function: Function) -> int:
        """Return how many effects a call of a function may have."""
        if function in self._open:
            return 0
        self._open.add(function)
        ended, goes_on = self._block(function.node.body, function)
        self._open.discard(function)
        return max(ended, goes_on)

    def _block(self, body: Sequence[ast.stmt], function: Function) -> tuple[int, int]:
        """Return the most effects of paths that end in a block, and of those that continue after it."""
        ended, here = 0, 0
        for statement in body:
            more_ended, more = self._statement(statement, function)
            ended = max(ended, here + more_ended)
            if more < 0:
                return ended, -1_000_000
            here += more
        return ended, here

    def _statement(self, statement: ast.stmt, function: Function) -> tuple[int, int]:
        match statement:
            case ast.Return() | ast.Raise() | ast.Continue() | ast.Break():
                return self._expressions(statement, function), -1
            case ast.If(test=test, body=body, orelse=other):
                before = self._expressions(test, function)
                ways = [self._block(body, function), self._block(other, function)]
                return before + max(one for one, _ in ways), before + max(one for _, one in ways)
            case ast.Match(cases=cases):
                ways = [(0, 0), *(self._block(one.body, function) for one in cases)]
                return max(one for one, _ in ways), max(one for _, one in ways)
            case (
                ast.Try(body=body, handlers=handlers, orelse=other, finalbody=last)
                | ast.TryStar(body=body, handlers=handlers, orelse=other, finalbody=last)
            ):
                # A handler runs because the body failed: it is another path, not a second effect.
                ways = [self._block([*body, *other], function), *(self._block(one.body, function) for one in handlers)]
                after = max(self._block(last, function))
                return after + max(one for one, _ in ways), after + max(one for _, one in ways)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                before = sum(self._expressions(one, function) for one in items)
                ended, goes_on = self._block(body, function)
                return before + ended, before + goes_on
            case ast.For(body=body) | ast.AsyncFor(body=body) | ast.While(body=body):
                ended, goes_on = self._block(body, function)
                is_left = any(isinstance(one, ast.Break | ast.Return) for part in body for one in ast.walk(part))
                most = max(ended, goes_on)
                return 0, most if is_left else most * 2
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return 0, 0
        return 0, self._expressions(statement, function)

    def _expressions(self, node: ast.AST, function: Function) -> int:
        found = 0
        for one in ast.walk(node):
            if not isinstance(one, ast.Call):
                continue
            helper = self._module.called(one.func, function)
            name = dotted(one.func, function.scope)
            if helper is not None and helper in self._known:
                more = self.count(helper)
                found += more
                self.second = one if more else self.second
            elif name is not None and effect_of(name, one) in self._counts:
                found += 1
                self.second = one
        return found
