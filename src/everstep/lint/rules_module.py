"""What a file does when it is imported, as workers, `replay` and tests do."""

import ast
from collections.abc import Iterator, Sequence

from everstep.lint.module import Module
from everstep.lint.rules_outside import Found
from everstep.lint.scopes import dotted
from everstep.model.mistakes import runs_while_imported


def judge_import(module: Module) -> Found:
    """Find `everstep.run` at the top of a file, without a guard."""
    for node in _run_by_import(module.tree.body):
        if isinstance(node, ast.Call) and dotted(node.func, module.scope) == "everstep.run":
            yield node, runs_while_imported()


def _run_by_import(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case ast.If(test=test) if "__name__" in ast.unparse(test):
                continue
            case ast.If() | ast.For() | ast.While() | ast.With() | ast.Try():
                for part in ("body", "orelse", "finalbody"):
                    yield from _run_by_import(getattr(statement, part, []))
                for handler in getattr(statement, "handlers", []):
                    yield from _run_by_import(handler.body)
                heads = [value for name, value in ast.iter_fields(statement) if name in ("test", "iter", "items")]
                for head in heads:
                    for one in head if isinstance(head, list) else [head]:
                        yield from ast.walk(one)
            case _:
                yield from ast.walk(statement)
