"""One word for one thing, in names, comments, docstrings and everything that is printed."""

import ast
import re
from collections.abc import Iterator
from typing import get_args

import pytest

from everstep.model import contracts, events, status
from tests.house.sources import Source, modules, report, statements

STATUSES = ("queued", "running", "waiting", "held", "completed", "failed", "cancelled")
CONTRACTS = ("read", "repeat", "once", "atomic")

# A second word for a thing of the glossary → the word. Each is matched as whole words of a name: `job` is found in
# `job`, `job_id` and `NextJob`, not in `jobless`. Tasks of asyncio and locks of Python keep their names.
SECOND_NAMES: dict[str, str] = {
    "activity": "step",
    "activities": "step",
    "execution_id": "run",
    "instance_id": "run",
    "job": "run",
    "jobs": "run",
    "task_id": "run, step or call",
    "workflow_execution": "run",
    "workflow_id": "run",
    "workflow_instance": "run",
    "workflow_run": "run",
    "run_state": "status",
    "fencing_token": "epoch",
    "history_entry": "event",
    "journal_entry": "event",
    "log_entry": "event",
    "sequence_number": "seq",
    "lock_expires": "lease",
    "lock_expiry": "lease",
    "lock_owner": "lease",
    "lock_until": "lease",
    "run_lock": "lease",
    "mailbox": "inbox",
    "message_id": "signal",
    "message_name": "signal",
    "send_message": "signal",
    "snapshot_id": "checkpoint",
    "state_snapshot": "checkpoint",
    "pause_run": "hold",
    "suspend_run": "hold",
    "retry_count": "attempt",
    "retries": "attempts",
    "tries": "attempts",
    "canceled": "cancelled",
    "cancelation": "cancel",
}

# The same in sentences.
SECOND_WORDS: dict[str, str] = {
    r"activit(y|ies)": "step",
    r"jobs?": "run",
    r"workflow (execution|instance|run)s?": "run",
    r"(journal|history|log) entr(y|ies)": "event",
    r"fencing tokens?": "epoch",
    r"mailbox(es)?": "inbox",
    r"cancel(ed|ing|ation)": "cancelled, cancelling",
    r"idempotence keys?": "idempotency key",
}

# Words that other systems have for our statuses, as whole strings. Not `done`, which is a resolution of a hold.
SECOND_STATUSES: dict[str, str] = {
    "canceled": "cancelled",
    "errored": "failed",
    "in_progress": "running",
    "paused": "held",
    "sleeping": "waiting",
    "succeeded": "completed",
    "success": "completed",
    "suspended": "waiting or held",
}

# A run is held; what begins no more runs is paused.
PAUSING_ROOMS = (
    "cli/queueing.py",
    "cli/watching.py",
    "engine/process/queues.py",
    "engine/verbs/queues.py",
    "view/store.py",
    "stores/rows/queues.py",
)

# Frameworks have words of their own, and an integration speaks to them in those.
FOREIGN_ROOMS = ("integrations/",)


def words_of(name: str) -> str:
    """Return a name in snake case with a mark on either side, so that whole words can be looked for."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return f"_{snake.strip('_')}_"


def names(source: Source) -> Iterator[tuple[int, str]]:
    """Give each name that a module defines or binds. What it merely uses may be somebody else's."""
    for node in ast.walk(source.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def name_violations(source: Source) -> list[str]:
    """Return names that are a second word for something."""
    found = []
    for line, name in names(source):
        words = words_of(name)
        for second, first in SECOND_NAMES.items():
            if f"_{second}_" in words:
                found.append(source.at(line, f"the name {name!r}: the word is {first!r}"))
    return found


def sentence_violations(source: Source, sentences: Iterator[tuple[int, str]]) -> list[str]:
    """Return sentences that use a second word for something."""
    found = []
    for line, sentence in sentences:
        for second, first in SECOND_WORDS.items():
            if match := re.search(rf"\b{second}\b", sentence, re.IGNORECASE):
                found.append(source.at(line, f"{match.group()!r}: the word is {first!r}"))
    return found


def sentences_of(source: Source) -> Iterator[tuple[int, str]]:
    """Give each comment and each string: docstrings, messages, texts of commands."""
    yield from source.comments()
    yield from ((line, text) for line, text, _ in source.strings())


def status_violations(source: Source) -> list[str]:
    """Return strings that are another system's word for one of our statuses."""
    return [
        source.at(line, f"{text!r}: the status is {SECOND_STATUSES[text]!r}")
        for line, text, is_docstring in source.strings()
        if text in SECOND_STATUSES and not is_docstring and not (text == "paused" and source.path in PAUSING_ROOMS)
    ]


def ours() -> list[Source]:
    return [source for source in modules() if not source.path.startswith(FOREIGN_ROOMS)]


def test_names_use_the_words_of_the_glossary() -> None:
    violations = [violation for source in ours() for violation in name_violations(source)]
    assert not violations, report(violations)


def test_sentences_use_the_words_of_the_glossary() -> None:
    violations = [v for source in ours() for v in sentence_violations(source, sentences_of(source))]
    violations += [v for source in statements() for v in sentence_violations(source, source.lines())]
    assert not violations, report(violations)


def test_no_other_word_stands_for_a_status() -> None:
    violations = [violation for source in ours() for violation in status_violations(source)]
    assert not violations, report(violations)


def test_the_statuses_are_those_of_the_glossary() -> None:
    assert status.STATUSES == STATUSES
    assert get_args(status.Status) == STATUSES
    assert set(status.ARROWS) == set(STATUSES)
    assert set(STATUSES) == status.ENDED | status.UNFINISHED


def test_the_contracts_are_those_of_the_glossary() -> None:
    assert contracts.EFFECTS == CONTRACTS
    assert get_args(contracts.Effect) == CONTRACTS


def test_each_kind_of_event_has_a_body() -> None:
    assert set(get_args(events.EventKind)) == set(events.BODIES)


@pytest.mark.parametrize(
    "code",
    [
        "workflow_id = 1",
        "def f(task_id): ...",
        "class NextJob: ...",
        "async def poll_activities(): ...",
        "self.lock_until = 0",
        "def f(*, fencing_token=None): ...",
        "for retries in range(3): ...",
    ],
)
def test_a_second_name_is_found(code: str) -> None:
    assert name_violations(Source("engine/x.py", code))


@pytest.mark.parametrize(
    "code",
    [
        "task = asyncio.create_task(f())",
        "lock = threading.Lock()",
        "run_id = other.workflow_id",
        "message = 'text of an error'",
        "entries = [1]",
    ],
)
def test_the_words_of_python_are_fine(code: str) -> None:
    assert not name_violations(Source("engine/x.py", code))


@pytest.mark.parametrize(
    "code",
    [
        "# Each journal entry is written once.",
        '"""Runs a job."""',
        "print('the workflow execution has ended')",
        "print(f'{n} activities')",
        "raise Error('canceled')",
    ],
)
def test_a_second_word_in_a_sentence_is_found(code: str) -> None:
    source = Source("cli/x.py", code)
    assert sentence_violations(source, sentences_of(source))


def test_a_second_word_in_sql_is_found() -> None:
    source = Source("stores/sqlite/x.sql", "-- The jobs that are due.\n")
    assert sentence_violations(source, source.lines())


def test_a_foreign_status_is_found() -> None:
    assert status_violations(Source("engine/x.py", "status = 'succeeded'"))
    assert not status_violations(Source("engine/x.py", "status = 'completed'"))
