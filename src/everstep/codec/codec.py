"""The codec: values, arguments and exceptions to payloads and back.

A payload is JSON text, `[value]` or `[value, type tree]`. See `writer` for the tree.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any, Final, NamedTuple

import msgspec

from everstep.codec import exceptions
from everstep.codec.canonical import Tree, canonical_bytes, canonical_json
from everstep.codec.preview import harmless, preview_of
from everstep.codec.reader import Misfit, read
from everstep.codec.signature import Signature
from everstep.codec.tables import ANY, Types
from everstep.codec.writer import DEPTH_MAX, INT_MAX, INT_MIN, Refused, describer, is_plain, write
from everstep.errors import NotDecodable, NotEncodable
from everstep.model.digests import hex_digest_of
from everstep.model.untrusted import described, qualified_name, raise_if_no_answer, text_of

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode
_new_tuple = tuple.__new__  # what Arguments(…) does internally, in a third of the time


class Arguments(NamedTuple):
    """The arguments of a call: as stored, their digest, and the arguments for the body."""

    payload: bytes
    digest: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def is_immutable_scalar(value: object) -> bool:
    """Return True if a value is exactly what its payload would decode to, so that it need not be decoded."""
    kind = type(value)
    if kind is int:
        return INT_MIN <= value <= INT_MAX  # type: ignore[operator]
    if kind is str or kind is bool or value is None:
        return True
    return kind is float and isfinite(value)  # type: ignore[arg-type]


ERROR_BYTES_MAX: Final = 16_000_000
"""The maximum size of a stored error. A larger one is stored as its text, its causes and its traceback only."""


class Codec:
    """Values to payloads and back. It has no state; a subclass may wrap the bytes, to encrypt them for instance."""

    def encode(self, value: object, types: Types = ANY, where: str = "value") -> bytes:
        """Return the payload of a value. `where` is what the value is called in an error."""
        kind = type(value)
        try:
            if kind is str or (kind is int and INT_MIN <= value <= INT_MAX) or is_plain(value):  # type: ignore[operator]
                return _to_json((value,))
        except (UnicodeEncodeError, RecursionError, RuntimeError):
            pass  # lone surrogates, or a value that the code below describes
        return _payload(*_written(value, types, where))

    def decode(self, payload: bytes, types: Types = ANY) -> Any:
        """Return the value of a payload. Raises `NotDecodable`, and nothing else, for any bytes.

        (If the machine has no memory for it, that says nothing about the payload, and `MemoryError` is raised.)
        """
        try:
            envelope = _from_json(payload)
            if len(payload) > 2 * DEPTH_MAX:  # a shorter one has no room to be deep
                _check_depth(envelope)
            if type(envelope) is list:
                if len(envelope) == 1:
                    return envelope[0]
                if len(envelope) == 2:
                    return read(envelope[0], envelope[1], types)
        except Misfit as misfit:
            raise misfit.as_error() from misfit.__cause__
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise NotDecodable(f"A payload is damaged ({type(error).__name__}).") from error
        raise NotDecodable("A payload is damaged: it is not an envelope of a value.")

    def encode_arguments(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], where: str
    ) -> Arguments:
        """Return the arguments of a call in their one normal form: encoded, with their digest, and decoded for the
        body.
        """
        if kwargs or not signature.least <= len(args) <= signature.most:
            args, kwargs = signature.normalise(args, kwargs)
        if not kwargs and not signature.has_live:
            try:
                for value in args:
                    kind = type(value)
                    if kind is str or (kind is int and INT_MIN <= value <= INT_MAX):
                        continue
                    if not is_immutable_scalar(value):
                        break
                else:
                    payload = _to_json((args,))
                    return _new_tuple(Arguments, (payload, hex_digest_of(payload), args, kwargs))
            except UnicodeEncodeError:
                pass
        return _encode_arguments(signature, args, kwargs, where)

    def decode_arguments(self, signature: Signature, payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a payload. `Live` arguments, and a method's receiver, are None."""
        stored = _PLAIN.decode(payload, signature.arguments)
        if type(stored) is list:
            args, kwargs = stored, {}
        elif type(stored) is dict and type(stored.get("args")) is list and type(stored.get("kwargs")) is dict:
            args, kwargs = stored["args"], stored["kwargs"]
        else:
            raise NotDecodable("value cannot be restored: the payload does not hold call arguments.", "value")
        return ((None, *args) if signature.is_method else tuple(args)), kwargs

    def kept_arguments(self, signature: Signature, payload: bytes, given: Arguments) -> Arguments:
        """Return arguments as they were stored. `Live` arguments are taken from those that are given now."""
        args, kwargs = self.decode_arguments(signature, payload)
        if signature.has_live:
            args = tuple(
                given.args[index] if signature.is_live_position(index) and index < len(given.args) else value
                for index, value in enumerate(args)
            )
            kwargs = {
                name: given.kwargs.get(name) if signature.is_live_name(name) else value
                for name, value in kwargs.items()
            }
        return self.encode_arguments(signature, args, kwargs, "arguments")

    def encode_error(self, error: BaseException) -> bytes:
        """Return the payload of an exception. It never raises: parts that cannot be stored are stored as text."""
        try:
            payload = _payload(*write(describer(with_traceback=True).facts(error), ANY))
            if len(payload) <= ERROR_BYTES_MAX:
                return payload
            bare = exceptions.Describer(_keep_nothing, DEPTH_MAX, with_traceback=True)
            return _payload(*write(bare.facts(error), ANY))
        except Exception:  # noqa: BLE001 - what is among its facts cannot be stored: the failure itself must be kept
            return _payload({"type": qualified_name(error), "message": text_of(error), "traceback": ""}, None)

    def decode_error(self, payload: bytes) -> BaseException:
        """Return the exception of a payload. Its traceback, as text, is in `__everstep_traceback__`."""
        facts = _PLAIN.decode(payload, ANY)
        try:
            return exceptions.error_from(facts)
        except Exception as error:
            raise_if_no_answer(error)
            raise NotDecodable(
                f"A stored exception cannot be restored ({type(error).__name__}): its class is no longer registered, "
                "or the data is damaged.",
                "error",
            ) from error

    def with_notes(self, payload: bytes, notes: Sequence[str]) -> bytes:
        """Return the payload of an exception with more notes (`__notes__`). It never raises, and loses nothing."""
        try:
            envelope = _from_json(payload)
            facts = envelope[0]
            facts["notes"] = [*facts.get("notes", []), *notes]
            return _to_json(envelope) if notes else payload
        except (msgspec.MsgspecError, TypeError, LookupError, AttributeError):
            return payload

    def error_facts(self, payload: bytes) -> dict[str, Any]:
        """Return an exception's type, message, traceback, notes, cause, context and members, without restoring it."""
        try:
            return _facts_to_show(_from_json(payload)[0], 0)
        except (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError):
            return _facts_to_show({}, 0)

    def preview(self, payload: bytes, limit: int = 160) -> str:
        """Return a payload's value as bounded, harmless text. Never raises."""
        return preview_of(payload, limit)


_PLAIN: Final = Codec()


def error_facts(payload: bytes) -> dict[str, Any]:
    """Return an exception's facts for display, without restoring it."""
    return _PLAIN.error_facts(payload)


def _written(value: object, types: Types, where: str) -> tuple[Any, Tree]:
    try:
        return write(value, types)
    except Refused as refused:
        raise refused.as_error(where) from refused.__cause__
    except RecursionError:
        raise NotEncodable(f"{where} is nested too deeply to be stored here.", where) from None
    except RuntimeError as error:
        raise_if_no_answer(error)
        raise NotEncodable(f"{where} changed while it was being stored.", where) from error
    except BaseException as error:
        raise_if_no_answer(error)
        raise NotEncodable(f"{where} could not be read: {described(error)}", where) from error


def _keep_nothing(value: object, depth: int, within: exceptions.Describer) -> tuple[Any, Tree]:
    raise Refused("is left out", "")


def _payload(value: Any, tree: Tree) -> bytes:
    return _to_json((value,) if tree is None else (value, tree))


def _check_depth(envelope: Any) -> None:
    """Refuse a nesting that no encoder here writes: later code may walk a value recursively and must be able to."""
    level = [envelope]
    for _ in range(2 * DEPTH_MAX + 4):  # a level of a value may take two levels in its type tree
        level = [
            member
            for container in level
            for member in (container.values() if type(container) is dict else container)
            if type(member) is list or type(member) is dict
        ]
        if not level:
            return
    raise Misfit(f"it is nested deeper than {DEPTH_MAX} levels")


def _encode_arguments(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Arguments:
    """Encode arguments that are not all scalars by position."""
    first = 1 if signature.is_method else 0
    stored_args: list[Any] = list(args[first:])
    stored_kwargs = kwargs
    if signature.has_live:
        stored_args = [
            None if signature.is_live_position(index) else value for index, value in enumerate(args[first:], first)
        ]
        stored_kwargs = {name: None if signature.is_live_name(name) else value for name, value in kwargs.items()}
    call: Any = {"args": stored_args, "kwargs": stored_kwargs} if kwargs else stored_args
    payload, canonical = _both_forms(call, signature.arguments, where)
    digest = hex_digest_of(canonical)
    restored_args, restored_kwargs = _PLAIN.decode_arguments(signature, payload)
    if signature.has_live:
        restored_args = tuple(
            given if signature.is_live_position(index) else restored
            for index, (given, restored) in enumerate(zip(args, restored_args, strict=True))
        )
        restored_kwargs = {
            name: kwargs[name] if signature.is_live_name(name) else restored
            for name, restored in restored_kwargs.items()
        }
    return Arguments(payload, digest, restored_args, restored_kwargs)


def _both_forms(call: Any, types: Types, where: str) -> tuple[bytes, bytes]:
    """Return a call's payload and its canonical bytes."""
    try:
        if is_plain(call):
            return _to_json((call,)), canonical_json((call,))
    except (UnicodeEncodeError, RecursionError, RuntimeError):
        pass
    value, tree = _written(call, types, where)
    return _payload(value, tree), b"[%b]" % canonical_bytes(value, tree)


def _facts_to_show(facts: Any, level: int) -> dict[str, Any]:
    facts = facts if type(facts) is dict else {}
    shown: dict[str, Any] = {
        name: harmless_lines(facts[name]) if type(facts.get(name)) is str else ""
        for name in ("type", "message", "traceback")
    }
    if type(notes := facts.get("notes")) is list:
        shown["notes"] = [harmless_lines(note) for note in notes if type(note) is str]
    for name in ("cause", "context"):
        if type(facts.get(name)) is dict and level < DEPTH_MAX:
            shown[name] = _facts_to_show(facts[name], level + 1)
    if type(members := facts.get("members")) is list and level < DEPTH_MAX:
        shown["members"] = [_facts_to_show(member, level + 1) for member in members]
    return shown


def harmless_lines(text: str) -> str:
    """Return text of several lines without escape codes."""
    return "\n".join(harmless(line) for line in text.split("\n"))
