"""Mistakes in workflows and steps, in words: what is wrong, and the remedy.

The guard raises them when code runs into one, `everstep lint` reports them when it reads the code, and `everstep
crashtest` when a crash has shown one. The words are the same everywhere, so a person who has read one knows the others.
"""

import ast
from typing import Final, NamedTuple


class Mistake(NamedTuple):
    """What is wrong, and what to do about it. `rule` is its name in `everstep lint`, if lint can find it."""

    rule: str
    what: str
    remedy: str

    def at(self, line: str) -> str:
        """Return the sentence with the line that it is about."""
        return f"{self.what} at {line} — {self.remedy}."


RULES: Final[dict[str, str]] = {
    "outside": "workflow code touches files, the network, processes, threads or the keyboard",
    "sleep": "workflow code sleeps by `time.sleep`",
    "clock": "workflow code asks the machine for the time",
    "chance": "workflow code draws random values or makes ids by itself",
    "order": "what the workflow does depends on the order of a set",
    "globals": "a module's variable is changed where a crash or a replay makes it another one",
    "loop": "workflow code starts an event loop of its own",
    "thread": "workflow code runs a plain function on a thread",
    "blocks": "an `async` workflow calls a `def` step or workflow directly",
    "await": "a `def` workflow calls something `async`",
    "unawaited": "a call is never awaited, and so does nothing",
    "swallowed": "an `except` swallows the cancelling of the run",
    "nested": "a `once` or `atomic` step, or one with a key, is called inside another step",
    "key": "a `repeat` step sends or appends something and never uses its key",
    "effects": "one step has two effects",
    "encode": "a value is given to a step that cannot be stored",
    "import": "`everstep.run` is called while the file is being imported",
    "reason": "`# everstep: ok` does not say why",
    "syntax": "the file is not Python",
}
"""What `everstep lint` looks for."""

MOVE_INTO_A_STEP: Final = "workflow code is replayed, so move this into a step (@everstep.step)"
SLEEP_DURABLY: Final = (
    "use `await asyncio.sleep(…)` (in a `def` workflow `everstep.blocking.sleep(…)`), which survives a crash"
)

EFFECT_FIRST: Final = "do the effect first, with everstep.key(), and leave it to Everstep to record that it is done"

OUTSIDE: Final[dict[str, str]] = {
    "open": "opens a file",
    "os.remove": "removes a file",
    "os.rename": "renames a file",
    "os.mkdir": "makes a folder",
    "os.rmdir": "removes a folder",
    "os.link": "links a file",
    "os.symlink": "links a file",
    "os.truncate": "cuts a file",
    "os.chmod": "changes a file",
    "os.chdir": "changes the working folder",
    "os.listdir": "lists a folder",
    "os.scandir": "lists a folder",
    "os.putenv": "changes the environment",
    "os.unsetenv": "changes the environment",
    "os.system": "starts a process",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.exec": "replaces the process",
    "os.kill": "sends a signal to a process",
    "subprocess.Popen": "starts a process",
    "socket.__new__": "opens a socket",
    "socket.connect": "connects to the network",
    "socket.getaddrinfo": "asks the network for an address",
    "sqlite3.connect": "opens a database",
    "_thread.start_new_thread": "starts a thread",
    "_thread.start_joinable_thread": "starts a thread",
    "builtins.input": "asks at the keyboard",
    "time.sleep": "sleeps without letting anything else run",
}
"""What a workflow body did that raised this audit event of Python. The guard refuses exactly these events."""

UNGUARDED: Final[dict[str, str]] = {
    "os.stat": "looks at a file",
    "file.write": "writes to a file",
    "file.read": "reads a file",
    "socket.send": "uses the network",
    "sqlite3.execute": "uses a database",
}
"""The same for calls that raise no audit event: only reading the code, or a crash, finds them."""


def outside(event: str) -> Mistake:
    """Workflow code touches the outside."""
    does = OUTSIDE.get(event) or UNGUARDED[event]
    if event == "time.sleep":
        return Mistake("sleep", f"The workflow body {does}", SLEEP_DURABLY)
    return Mistake("outside", f"The workflow body {does}", MOVE_INTO_A_STEP)


def asks_the_clock(call: str) -> Mistake:
    """Workflow code asks the machine for the time. Nothing stops it when it runs."""
    what = f"The workflow body asks the machine for the time ({call}), which is another one in every replay"
    return Mistake("clock", what, "use everstep.now()")


def draws_by_itself(call: str, instead: str) -> Mistake:
    """Workflow code draws a random value. Nothing stops it when it runs."""
    what = f"The workflow body draws a random value ({call}), which is another one in every replay"
    return Mistake("chance", what, f"use {instead}")


def asks_the_process(call: str) -> Mistake:
    """Workflow code asks for what belongs to one process. Nothing stops it when it runs."""
    what = f"The workflow body asks for a number of its process ({call}), which is another one in every replay"
    return Mistake("chance", what, "ask for it in a step (@everstep.step), or use everstep.uuid()")


def goes_by_a_set(what: str) -> Mistake:
    """The order of a set decides what is asked for, or with which arguments."""
    text = f"The order of a set decides {what}, and that is another one in every process"
    return Mistake("order", text, "put it into an order: sorted(…)")


def changes_a_global(name: str, who: str, *, in_step: bool) -> Mistake:
    """A variable of the module is changed by code that is replayed, or whose outcome is recorded without it."""
    if in_step:
        what = f"The step {who} changes {name}, which others read: a crash keeps its outcome and loses the change"
        return Mistake("globals", what, "return what they need, and hand it on as an argument")
    what = f"The workflow body changes {name} of the module, and does so again in every replay"
    return Mistake("globals", what, "keep it in a local variable, and return or publish it")


def starts_a_loop(call: str) -> Mistake:
    """`asyncio.run` in workflow code."""
    what = f"The workflow body starts an event loop of its own ({call}), and the run's own loop is running"
    return Mistake("loop", what, "`await` the coroutine; a `def` workflow calls `def` steps")


def plain_function_on_thread(name: str) -> Mistake:
    """`asyncio.to_thread` of something that is no step."""
    what = f"asyncio.to_thread({name}, …) in a workflow body: threads are for steps"
    return Mistake("thread", what, f"Put @everstep.step on {name}")


def blocks(kind: str, name: str, line: str = "") -> Mistake:
    """An `async` workflow calls a `def` step or workflow directly, in a line of its source if that is known."""
    what = f"the `def` {kind} {name} blocks, and this workflow is `async`"
    return Mistake("blocks", what, f"write `{_on_a_thread(line, name) or f'await asyncio.to_thread({name}, …)'}`")


TAKE_AWAITABLES: Final = frozenset({"gather", "wait_for", "create_task", "ensure_future", "shield"})
"""Functions that await what they are given: a coroutine that is awaited before would run alone."""


def _on_a_thread(line: str, name: str) -> str:
    """Return a line of source with the call of this name made by `asyncio.to_thread`; empty if that is not clear."""
    try:
        tree = ast.parse(line)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    last = name.rpartition(".")[2]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    meant = [one for one in calls if ast.unparse(one.func).rpartition(".")[2] == last]
    if len(meant) != 1 or not line.isascii() or "\n" in line:
        return ""
    call = meant[0]
    assert call.end_col_offset is not None
    text = line[call.col_offset : call.end_col_offset]
    function = ast.unparse(call.func)
    given = text.partition("(")[2] if text.startswith(function) else ""
    if not given:
        return ""
    comma = "" if given == ")" else ", "
    is_taken = any(call in one.args and ast.unparse(one.func).rpartition(".")[2] in TAKE_AWAITABLES for one in calls)
    awaited = f"{'' if is_taken else 'await '}asyncio.to_thread({function}{comma}{given}"
    before, after = line[: call.col_offset], line[call.end_col_offset :]
    return f"{before}({awaited}){after}" if after[:1] in (".", "[") else f"{before}{awaited}{after}"


def cannot_await(kind: str, name: str) -> Mistake:
    """A `def` workflow calls something `async`."""
    what = f"the {kind} {name} is `async`, and this workflow is `def`, which cannot await it"
    return Mistake("await", what, f"make the workflow `async`, or {name} a `def`")


def never_awaited(name: str) -> Mistake:
    """A coroutine is made and dropped."""
    return Mistake("unawaited", f"The call of {name} is never awaited, so it does nothing", f"write `await {name}(…)`")


def starts_a_run(call: str) -> Mistake:
    """`everstep.run` or `everstep.open` in workflow code."""
    what = f"{call} in a workflow body starts runs from outside"
    return Mistake("loop", what, "call the other workflow, which makes it a child run: `await other(…)`")


def swallows_cancelling(caught: str) -> Mistake:
    """An `except` that catches what unwinds the code."""
    what = f"`{caught}` swallows what unwinds the code when its run is cancelled or leaves memory"
    return Mistake("swallowed", what, "catch `Exception`, or end the block with `raise`")


def nested_step(name: str, effect: str, step: str) -> Mistake:
    """A step whose contract needs a durable call is called in the body of another step."""
    what = f"{name} ({effect}) was called inside the step {step}"
    return Mistake("nested", what, "call it in the workflow")


def nested_key(name: str, step: str) -> Mistake:
    """The same, for a step with a key."""
    return Mistake("nested", f"{name} has a key and was called inside the step {step}", "call it in the workflow")


def key_unused(step: str) -> Mistake:
    """A `repeat` step that sends without its key. A history marks the outcome of a repeated one as `key_unused`."""
    what = f"The `repeat` step {step} sends or appends and never uses its key, so a second attempt may do it twice"
    return Mistake("key", what, 'hand everstep.key() on to the other side, or declare effect="once"')


def two_effects(step: str, effect: str) -> Mistake:
    """A step with two effects: there is an instant between them."""
    what = f"The step {step} ({effect}) has two effects, and a crash may come between them"
    return Mistake("effects", what, "make each of them a step of its own")


def read_changes(step: str) -> Mistake:
    """A `read` that was repeated, and could be seen outside. Only a crash shows it."""
    what = f"The step {step} is declared a read, was done again after the crash, and changes something outside"
    return Mistake("", what, "declare the contract that it keeps: a read changes nothing")


def key_ignored(step: str) -> Mistake:
    """A receiver that is given the key and does it twice all the same. Only a crash shows it."""
    what = f"The step {step} was done again after the crash, with the same key, and its receiver ignores keys"
    remedy = (
        'declare effect="once" with a probe that asks the receiver what it has done, or use a receiver that does one '
        "key once"
    )
    return Mistake("", what, remedy)


def marked_too_early(step: str) -> Mistake:
    """A step that records that it is done before it is. Only a crash shows it."""
    what = f"The step {step} notes that it is done before it is done: killed in between, it is never done"
    return Mistake("", what, EFFECT_FIRST)


def written_in_part() -> Mistake:
    """A file that is incomplete after a crash."""
    return Mistake("", "What was written before the crash is not all that is written without one", EFFECT_FIRST)


def takes_another_way() -> Mistake:
    """Workflow code that does something else in another process, for no reason that its text shows."""
    what = "The workflow body took another way after the crash than before"
    remedy = (
        "whatever may differ between two processes belongs into a step (@everstep.step); if concurrent calls race "
        "here, and either may win, let the workflow end alike in both cases"
    )
    return Mistake("", what, remedy)


def not_storable(type_name: str) -> tuple[str, str]:
    """Return why a value of a type that no codec knows cannot be stored, and the remedy."""
    if type_name == "coroutine":
        return "is a coroutine: a call that was not awaited", "Put `await` in front of the call that made it."
    remedy = (
        f"Use something simpler, everstep.register({type_name}, encode=…, decode=…), or, for a parameter that need not "
        f"be stored, annotate it everstep.Live[{type_name}]."
    )
    return f"is of the type {type_name}", remedy


def not_encodable(where: str, type_name: str) -> Mistake:
    """A value that cannot be stored is given to a step, or may be."""
    why, remedy = not_storable(type_name)
    return Mistake("encode", f"{where} {why}, so it cannot be stored and restored", remedy.removesuffix("."))


def runs_while_imported() -> Mistake:
    """`everstep.run` without a guard, in a file that a worker imports."""
    guard = 'Put it under a guard:\n    if __name__ == "__main__":\n        everstep.run(…)'
    return Mistake("import", "calls everstep.run() while the file is being imported", guard)
