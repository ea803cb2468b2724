"""Looking at a user's object without trusting it: its text, its class, its attributes.

Each of them may run a user's code, which may raise anything, `KeyboardInterrupt` too, or return a value of the wrong
type. An error must be recorded all the same, or its run would never end: nothing here raises. (Code that never returns
blocks its thread here as it does anywhere else.)

The one exception is what a program's handler of a signal raises meanwhile, which is no fault of the object: it passes
through. (Ctrl-C by Python's own handler cannot be told from an object that raises `KeyboardInterrupt`.)
"""

import errno
import functools
import logging
import signal
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

TEXT_MAX: Final = 8_000
"""The maximum number of characters of a user's text that are kept."""

# The slots themselves: a class or its metaclass may put properties of its own over their names.
bases_of: Final = type.__dict__["__mro__"].__get__
_NAME: Final = type.__dict__["__name__"].__get__
_QUALNAME: Final = type.__dict__["__qualname__"].__get__
cause_of: Final = BaseException.__dict__["__cause__"].__get__
context_of: Final = BaseException.__dict__["__context__"].__get__
traceback_of: Final = BaseException.__dict__["__traceback__"].__get__
_MEMBERS: Final = BaseExceptionGroup.__dict__["exceptions"].__get__


REFUSED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class Stopped(Exception):
    """A user's function raised what stops a program, in a place where it must stop nothing else."""

    def __init__(self, stop: BaseException) -> None:
        super().__init__(described(stop))
        self.stop = stop


def raise_if_no_answer(error: BaseException) -> None:
    """Raise an error that says nothing about the user's function: a stop, or a refusal by the machine.

    A stop that ends the process is raised as it is. Any other becomes `Stopped`, which ends only the current work.
    """
    from asyncio import CancelledError  # a program that only declares does without

    if is_a(error, Stopped) or is_refusal(error):
        raise error
    if is_a(error, KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError):
        raise error if ends_process(error) else Stopped(error) from error


def is_refusal(error: BaseException) -> bool:
    """Return True if the machine refused memory, a thread or a descriptor. That is no fault of the run that asked for
    it.
    """
    if is_a(error, OSError):
        return attribute(error, "errno") in REFUSED
    return is_a(error, MemoryError) or (is_a(error, RuntimeError) and "start new thread" in text_of(error))


def attempted(function: Callable[..., Any], *args: Any, default: Any = None) -> Any:
    """Return what a user's function returns, or `default` if it raises anything."""
    try:
        return function(*args)
    except BaseException as error:  # a `__str__` may raise SystemExit, and that must not end the process
        if was_signalled(error):
            raise
        return default


def attribute(value: object, name: str, default: Any = None) -> Any:
    """Return an attribute of a user's object, or `default` if it has none or raises."""
    return attempted(getattr, value, name, default, default=default)


def is_a(value: object, *classes: type) -> bool:
    """Return True if a value is of one of these classes, as `except` decides: without its `__class__` or metaclass."""
    for base in bases_of(type(value)):  # a loop: this is called for each member of a group, and `any` takes far longer
        for one in classes:
            if base is one:
                return True
    return False


def type_name(value: object) -> str:
    """Return the name of a value's class."""
    return plain(_NAME(type(value)))


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions in a group; an empty tuple for any other error."""
    members: tuple[BaseException, ...] = _MEMBERS(error) if is_a(error, BaseExceptionGroup) else ()
    return members


def name_of(cls: type) -> str:
    """Return the name of a class."""
    return plain(_NAME(cls))


def qualified_name_of(cls: type) -> str:
    """Return the qualified name of a class."""
    return plain(_QUALNAME(cls))


def qualified_name(value: object) -> str:
    """Return the qualified name of a value's class."""
    return qualified_name_of(type(value))


def plain(text: str) -> str:
    """Return a text, perhaps of a subclass of `str`, as a plain `str` that UTF-8 can encode."""
    return str.__str__(text).encode("utf-8", "backslashreplace").decode()


def is_encodable(text: str) -> bool:
    """Return True if UTF-8 can encode a text: it cannot encode a lone surrogate."""
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return False
    return True


def text_of(value: object, by: Callable[[Any], Any] = str, most: int = TEXT_MAX) -> str:
    """Return a bounded text of any object. If the object raises, the text says so."""
    try:
        text = by(value)
        length = str.__len__(text)
        text = str.__getitem__(text, slice(most))
        return plain(text) if length <= most else f"{plain(text)}… ({length} characters)"
    except BaseException as error:  # see above
        if was_signalled(error):
            raise
        return f"<{qualified_name(value)}: its text could not be read, {type_name(error)} was raised>"


def described(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    text = text_of(error)
    return f"{type_name(error)}: {text}" if text else type_name(error)


def ends_process(error: BaseException) -> bool:
    """Return True if an error was raised to end this process: by Ctrl-C, or by a signal handler.

    `sys.exit()` in a run's own code does not count: what one run does must not end the others.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    return is_a(error, KeyboardInterrupt) or (is_a(error, SystemExit) and _came_from_a_handler(error))


def was_signalled(error: BaseException) -> bool:
    """Return True if the program's own signal handler raised this, and not the code that it interrupted."""
    return is_a(error, KeyboardInterrupt, SystemExit) and _came_from_a_handler(error)


def _came_from_a_handler(error: BaseException) -> bool:
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    traceback = traceback_of(error)
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger that ignores what its handlers raise: a lost record changes nothing about a run."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a record; errors of the handlers are ignored."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        try:
            super().log(level, msg, *args, **kwargs)
        except BaseException as error:
            if ends_process(error):
                raise


def logger(name: str) -> Log:
    """Return the logger of this name."""
    return Log(logging.getLogger(name), {})


def log_error(log: Log, message: str, *args: Any, error: BaseException) -> None:
    """Log that a user's code raised, with its traceback. If the error cannot be formatted, with its text."""
    try:
        log.logger.error(message, *args, exc_info=(type(error), error, traceback_of(error)))
    except BaseException as raised:  # formatting a traceback runs the error's own code: its text, cause and notes
        if raised is not error and ends_process(raised):
            raise
        log.error(message + ": %s", *args, described(error))  # noqa: G003  # the message has places for its arguments
