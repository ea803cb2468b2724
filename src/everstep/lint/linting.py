"""Reading files and calling the rules."""

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from everstep.errors import Misuse
from everstep.lint.finding import Finding, finding
from everstep.lint.module import Module
from everstep.lint.reach import Reached, steps, workflows
from everstep.lint.rules_calls import judge_arguments, judge_calls, judge_defaults
from everstep.lint.rules_module import judge_import
from everstep.lint.rules_outside import Found, judge_outside
from everstep.lint.rules_state import judge_globals, judge_globals_of_steps, judge_handlers, judge_order
from everstep.lint.rules_steps import judge_effects, judge_key, judge_nested
from everstep.model.mistakes import RULES, Mistake

OF_WORKFLOWS: Final[tuple[Callable[[Module, Reached], Found], ...]] = (
    judge_outside,
    judge_calls,
    judge_arguments,
    judge_order,
    judge_globals,
    judge_handlers,
)
"""Rules about code that is replayed, called for each workflow and each of its helpers."""
OF_STEPS: Final[tuple[Callable[[Module, Sequence[Reached]], Found], ...]] = (
    judge_nested,
    judge_key,
    judge_effects,
    judge_globals_of_steps,
)
"""Rules about a step, with its helpers."""
OF_MODULES: Final[tuple[Callable[[Module], Found], ...]] = (judge_defaults, judge_import)
"""Rules about a file."""

SPOKEN_OF: Final = "everstep"
"""A file without this word does not use Everstep."""
NOT_LOOKED_INTO: Final = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})


class Linted(NamedTuple):
    """How many files were read, and what was found. `using` of the files use Everstep; the others have no findings."""

    files: int
    findings: list[Finding]
    using: int


def lint_paths(paths: Sequence[str]) -> Linted:
    """Lint files, and all Python files below folders."""
    files = sorted({file for path in paths for file in _files(path)})
    if not files:
        raise Misuse(f"There is no Python file in {', '.join(paths)}.")
    findings: list[Finding] = []
    using = 0
    for file in files:
        text = _text_of(file)
        found = [text] if isinstance(text, Finding) else lint_text(file, text)
        if not isinstance(text, Finding) and not found and file in paths:
            found = _unread(file, text)
        using += not isinstance(text, Finding) and SPOKEN_OF in text
        findings += found
    return Linted(len(files), findings, using)


def _unread(file: str, text: str) -> list[Finding]:
    """Report a named file that is not Python, because its user must not be told that all is well."""
    if SPOKEN_OF in text:
        return []
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return [_not_python(file, error)]
    return []


def lint_file(file: str, *, heed_silence: bool = True) -> list[Finding]:
    """Lint a file. With `heed_silence=False`, also report findings that `# everstep: ok` silences."""
    text = _text_of(file)
    return [text] if isinstance(text, Finding) else lint_text(file, text, heed_silence=heed_silence)


def _text_of(file: str) -> str | Finding:
    """Return the text of a file, or a finding that it is not Python."""
    import tokenize

    try:
        with tokenize.open(file) as opened:
            return opened.read()
    except (SyntaxError, UnicodeDecodeError) as error:
        return _not_python(file, error)
    except OSError as error:
        raise Misuse(f"{file} cannot be read: {error.strerror}.") from None


def lint_text(file: str, text: str, *, heed_silence: bool = True) -> list[Finding]:
    """Lint the text of a file. A file that does not mention Everstep has no findings."""
    if SPOKEN_OF not in text:
        return []
    try:
        module = Module(file, text)
    except (SyntaxError, ValueError) as error:
        return [_not_python(file, error)]
    if not module.uses_everstep:
        return []
    found: dict[tuple[int, int, str], Finding] = {}
    for one in _findings(module):
        found.setdefault((one.line, one.column, one.rule), one)
    left = [one for one in found.values() if not (heed_silence and _is_silenced(module, one))]
    return sorted([*left, *_without_reason(module)])


def _findings(module: Module) -> Iterator[Finding]:
    for group in workflows(module):
        for reached in group:
            for rule in OF_WORKFLOWS:
                for node, mistake in rule(module, reached):
                    yield finding(
                        module.file, node, mistake, lines=module.lines, function=reached.function.name, via=reached.via
                    )
    for group in steps(module):
        for step_rule in OF_STEPS:
            for node, mistake in step_rule(module, group):
                yield finding(module.file, node, mistake, lines=module.lines, function=group[0].function.name)
    for module_rule in OF_MODULES:
        for node, mistake in module_rule(module):
            yield finding(module.file, node, mistake, lines=module.lines)


def _is_silenced(module: Module, found: Finding) -> bool:
    first, last = found.lines
    return any(module.silenced.get(line) for line in range(first, last + 1))


def _without_reason(module: Module) -> Iterator[Finding]:
    for line, reason in module.silenced.items():
        if not reason:
            source = module.lines[line - 1].strip()
            what = "`# everstep: ok` silences nothing without a reason"
            yield Finding(module.file, line, 1, "reason", what, "write why: `# everstep: ok, because …`", source)


def _not_python(file: str, error: Exception) -> Finding:
    line = getattr(error, "lineno", None) or 1
    mistake = Mistake("syntax", f"This is not Python: {getattr(error, 'msg', None) or error}", RULES["syntax"])
    return Finding(file, line, getattr(error, "offset", None) or 1, "syntax", mistake.what, "put it right")


def _files(path: str) -> Iterator[str]:
    found = Path(path)
    if found.is_dir():
        for folder, folders, names in os.walk(found):
            folders[:] = sorted(one for one in folders if one not in NOT_LOOKED_INTO and not one.startswith("."))
            yield from (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
    elif found.exists():
        yield path
    else:
        raise Misuse(f"There is no file or folder {path}.")
