"""From annotations to classes: which classes a value may hold, found in the user's code and never in stored data."""

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import (
    Annotated,
    Any,
    Final,
    ForwardRef,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from everstep.model.untrusted import plain

Names = Mapping[str, object]
"""The names that are visible where an annotation was written."""


class _Visible(dict[str, object]):
    """Names for quoted annotations. An unknown name counts as `Any`, so that the rest of the annotation still
    counts.
    """

    def __missing__(self, name: str) -> object:
        return getattr(builtins, name, Any)


def resolved(annotation: object, names: Names) -> object:
    """Return an annotation with a quoted one evaluated. What cannot be evaluated counts as no annotation (`Any`)."""
    text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
    if not isinstance(text, str):
        return annotation
    try:
        alone = SimpleNamespace(__annotations__={"it": text})  # a mistake in another one does not matter
        return get_type_hints(alone, {}, _Visible(names), include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - an annotation may hold any expression
        return Any


def raw_annotations(owner: object) -> Mapping[str, object]:
    """Return the annotations of a class itself, unevaluated where Python keeps them so."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(owner, format=annotationlib.Format.FORWARDREF)
    found = vars(owner).get("__annotations__")
    return found if isinstance(found, dict) else {}


def names_around_class(cls: type, outer: Names) -> Names:
    """Return the names that annotations of a class may use: its module's, its own, and those of the code that
    refers to it.
    """
    module = sys.modules.get(cls.__module__)
    return {**outer, **(vars(module) if module else {}), cls.__name__: cls}


def names_around_function(function: Callable[..., object]) -> Names:
    """Return the names that annotations of a function may use: its module's and those that it closes over."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    closed: dict[str, object] = {}
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            closed[name] = cell.cell_contents
        except ValueError:  # the name is not bound yet
            continue
    return {**getattr(function, "__globals__", {}), **closed}


def fields_of(cls: type, names: Names) -> Iterator[tuple[object, Names]]:
    """Yield the annotations of a class and of its bases, each with the names that it may use."""
    for owner in cls.__mro__:
        if owner.__module__ in ("builtins", "typing", "enum", "msgspec", "pydantic.main"):
            continue
        around = names_around_class(owner, names)
        for annotation in raw_annotations(owner).values():
            yield annotation, around
        for base in getattr(owner, "__orig_bases__", ()):
            for argument in get_args(base):
                yield argument, around
    # pydantic has resolved its own annotations, also those that name local classes.
    model_fields = getattr(cls, "__pydantic_fields__", None)
    if isinstance(model_fields, dict):
        for field in model_fields.values():
            yield getattr(field, "annotation", Any), names


def classes_in(annotation: object, names: Names, wanted: Callable[[type], bool]) -> dict[type, None]:
    """Return the wanted classes that are reachable from an annotation, through generics, unions and fields."""
    found: dict[type, None] = {}
    seen: set[int] = set()
    pending: list[tuple[object, Names]] = [(annotation, names)]
    kept: list[object] = []  # keeps objects alive whose ids are in `seen`
    while pending:
        node, around = pending.pop()
        node = resolved(node, around)
        if id(node) in seen:
            continue
        seen.add(id(node))
        kept.append(node)
        pending.extend(_parts(node, around))
        if isinstance(node, type) and get_origin(node) is None:
            if wanted(node):
                found[node] = None
                pending.extend(fields_of(node, around))
            elif is_typeddict(node):
                pending.extend(fields_of(node, around))
    return found


def _parts(node: object, names: Names) -> Iterator[tuple[object, Names]]:
    """Yield the parts of an annotation."""
    origin = get_origin(node)
    if origin is Literal:
        for value in get_args(node):
            yield type(value), names
    elif origin is Annotated:
        yield get_args(node)[0], names
    elif origin is not None:
        yield origin, names
        for part in get_args(node):
            if isinstance(part, list):  # Callable[[A, B], C]
                yield from ((inner, names) for inner in part)
            else:
                yield part, names
    elif isinstance(node, TypeVar):
        yield node.__bound__, names
        yield from ((constraint, names) for constraint in node.__constraints__)
    else:
        for attribute in ("__supertype__", "__value__"):  # NewType; `type X = …`
            inner = getattr(node, attribute, None)
            if inner is not None and not isinstance(node, type):
                yield inner, names


def types_text(annotation: object) -> str:
    """Return a short, stable text of an annotation, such as `bool` or `list[Order]`."""
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, str):
        return plain(annotation)
    if isinstance(annotation, ForwardRef):
        return plain(annotation.__forward_arg__)
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return types_text(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " | ".join(map(types_text, arguments))
    if isinstance(annotation, list):
        return f"[{', '.join(map(types_text, annotation))}]"
    if annotation is Ellipsis:
        return "..."
    if origin is not None and arguments:
        return f"{types_text(origin)}[{', '.join(map(types_text, arguments))}]"
    name = getattr(annotation, "__qualname__", None) or getattr(annotation, "__name__", None)
    return plain(name if isinstance(name, str) else str(annotation).removeprefix("typing."))


_PLAIN: Final[dict[str, Any]] = {
    one.__name__: one for one in (bool, int, float, str, bytes, list, dict, set, frozenset, tuple, object)
} | {"None": None, "Any": Any}
_TEXT_MAX: Final = 500


def plain_type(text: str, names: Names = MappingProxyType({})) -> Any:
    """Return the type that a text of `types_text` names, of parts that are built in or classes of `names`; else `...`.

    Each name in the text is a key into a table; nothing is evaluated or imported.
    """
    import ast

    if len(text) > _TEXT_MAX:
        return ...
    try:
        return _plain_part(ast.parse(text, mode="eval").body, names)
    except (SyntaxError, ValueError, LookupError, TypeError, RecursionError, MemoryError):
        return ...


def _plain_part(node: Any, names: Names) -> Any:
    """Return the type that a part of a text names. Raises `LookupError` for any other name."""
    kind = type(node).__name__
    if kind == "Name":
        return _PLAIN[node.id] if node.id in _PLAIN else _class_named(node.id, names)
    if kind == "Constant" and (node.value is None or node.value is ...):
        return node.value
    if kind == "BinOp" and type(node.op).__name__ == "BitOr":
        left, right = _plain_part(node.left, names), _plain_part(node.right, names)
        return Union[left, right]  # noqa: UP007  # None | None is no union
    if kind != "Subscript":
        raise LookupError(kind)
    parts = node.slice.elts if type(node.slice).__name__ == "Tuple" else [node.slice]
    if node.value.id == "Literal":
        return Literal[tuple(one.value for one in parts)]
    return _plain_part(node.value, names)[tuple(_plain_part(part, names) for part in parts)]


def _class_named(name: str, names: Names) -> type:
    """Return the class that code calls by its own name."""
    found = names[name]
    if not isinstance(found, type) or found.__qualname__ != name:
        raise LookupError(name)
    return found
