"""What somebody with few rights can put in the way of statements: a namesake of everything that they name.

Each function, operator, type and cast that our SQL uses gets namesakes in `public`, with the same types of arguments
and with ones that fit a literal better. They are derived from the texts, so a new statement needs no new line here.
"""

import itertools
import re
from collections.abc import Iterator

import psycopg

from everstep.effects import postgres_markers
from everstep.stores.postgres import opening, queries

WORDS = """
    all and any array as by cast check coalesce conflict exists extract filter from greatest in into key lateral least
    not nullif on operator or over references returning row select set then unique using values when where with
"""
SYNTAX = frozenset(WORDS.split())
"""What may be before a parenthesis without being the name of a function."""
OPERATOR = re.compile(r"<>|<=|>=|\|\||[-+*/<>=]")
QUALIFIED_OPERATOR = re.compile(r"\bOPERATOR\(pg_catalog\.([^)]+)\)")
LITERAL = re.compile(r"'(?:[^']|'')*'")
TYPE = re.compile(r"(?:::|\bAS )(?:pg_catalog\.)?(text|bytea|oid|xid|name|regclass|numeric|interval)\b(?! )")
SWAPS = {
    "bigint": ("integer",),
    "integer": ("bigint",),
    "numeric": ("integer", "bigint"),
    "text": ("character varying",),
}
"""Types that a literal, or a value of the other type, may fit better."""
ELEMENTS = ("text", "bigint", "bytea", "integer")
ARRAYS = ("text[]", "bigint[]", "bytea[]")
TIMES = ("interval", "timestamp with time zone")
TYPES = {
    *ELEMENTS,
    *ARRAYS,
    *TIMES,
    "numeric",
    "boolean",
    "oid",
    "xid",
    "xid8",
    "tid",
    "name",
    '"char"',
    "double precision",
}


def texts() -> dict[str, str]:
    """Return all our statements for PostgreSQL by their names, without comments; migrations among them."""
    found = dict(queries.statements("everstep"))
    found |= {f"migration {number}": text for number, text in enumerate(opening.migrations("everstep"), 1)}
    found |= {f"marker {name}": text for name, text in postgres_markers.statements("everstep").items()}
    return {name: re.sub(r"--.*", "", text) for name, text in found.items()}


def functions_in(text: str) -> set[str]:
    """Return the functions that a statement calls, with their schema if it has one; and rows with names of columns."""
    return set(re.findall(r"(?<![\w\".])((?:\w+\.)?[a-z_]\w*) ?\(", LITERAL.sub("''", text))) - SYNTAX


def operators_in(text: str) -> set[str]:
    """Return the operators of a statement."""
    return set(OPERATOR.findall(QUALIFIED_OPERATOR.sub(r" \1 ", LITERAL.sub("''", text))))


class Planter:
    """Somebody who may make things in the schema `public`."""

    def __init__(self, connection: "psycopg.Connection[tuple[str, ...]]") -> None:
        self._connection = connection
        self._numbers = itertools.count()
        self._made: set[str] = set()

    def plant(self) -> None:
        """Make a namesake of everything."""
        whole = " ".join(texts().values())
        with self._connection.transaction():
            self._plant_functions({name.removeprefix("pg_catalog.") for name in functions_in(whole)})
            self._plant_operators(operators_in(whole))
            for name in sorted(set(TYPE.findall(whole))):
                self._do(f"CREATE TYPE public.{name} AS (planted pg_catalog.int4)")
                cast = self._function("planted", f"pg_catalog.{name}", f"public.{name}")
                self._do(f"CREATE CAST (pg_catalog.{name} AS public.{name}) WITH FUNCTION {cast} AS IMPLICIT")

    def _plant_functions(self, names: set[str]) -> None:
        rows = self._connection.execute(
            "SELECT proname, prokind, pg_get_function_result(oid), "
            "ARRAY(SELECT format_type(one, NULL) FROM unnest(proargtypes) WITH ORDINALITY AS a (one, n) ORDER BY n) "
            "FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY (%s) AND pronargs <= 7 "
            "AND prokind IN ('f', 'a') AND NOT 'internal'::regtype = ANY (proargtypes)",
            (sorted(names),),
        ).fetchall()
        assert len({row[0] for row in rows}) > 30, "the functions of the texts were not found"
        for name, kind, result, arguments in rows:
            for given, returned in _forms(list(arguments), result):
                if f"{name}({given})" in self._made or "any" in returned or "record" in returned:
                    continue
                self._made.add(f"{name}({given})")
                if kind == "a":
                    step = self._function("planted", f"{returned}, {given}".rstrip(", "), returned, with_number=True)
                    self._do(f"CREATE AGGREGATE public.{name}({given or '*'}) (SFUNC = {step}, STYPE = {returned})")
                else:
                    self._function(name, given, returned, with_number=False)

    def _plant_operators(self, names: set[str]) -> None:
        rows = self._connection.execute(
            "SELECT oprname, format_type(oprleft, NULL), format_type(oprright, NULL), format_type(oprresult, NULL) "
            "FROM pg_operator WHERE oprname = ANY (%s) AND oprleft <> 0 AND oprresult <> 0",
            (sorted(names),),
        ).fetchall()
        wanted = {(name, left, right): result for name, left, right, result in rows if {left, right} <= TYPES}
        for (name, left, right), result in list(wanted.items()):
            for pair in itertools.product(_fitting(left), _fitting(right)):
                wanted.setdefault((name, *pair), result)
        assert len(wanted) > 100, "the operators of the texts were not found"
        for (name, left, right), result in wanted.items():
            function = self._function("planted", f"{left}, {right}", result).partition("(")[0]
            self._do(f"CREATE OPERATOR public.{name} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = {function})")

    def _function(self, name: str, arguments: str, result: str, *, with_number: bool = True) -> str:
        end = "RETURN" if result.startswith(("SETOF", "TABLE", "void")) else "RETURN NULL"
        whole = f"public.{name}{f'_{next(self._numbers)}' if with_number else ''}"
        self._do(f"CREATE FUNCTION {whole}({arguments}) RETURNS {result} LANGUAGE plpgsql AS 'BEGIN {end}; END'")
        return f"{whole}({arguments})" if with_number and result.startswith("public.") else whole

    def _do(self, statement: str) -> None:
        self._connection.execute(statement)  # type: ignore[call-overload]  # put together from names of the server's own


def _fitting(type: str) -> tuple[str, ...]:
    return (type, *SWAPS.get(type, ()))


def _forms(arguments: list[str], result: str) -> Iterator[tuple[str, str]]:
    """Return lists of arguments, and what is returned for each, without those that stand for any type."""
    is_polymorphic = any("any" in one for one in arguments)
    for element in ELEMENTS if is_polymorphic else ("",):
        named = [_concrete(one, element) for one in arguments] if is_polymorphic else arguments
        for given in itertools.product(*map(_fitting, named)):
            yield ", ".join(given), _concrete(result, element) if is_polymorphic else result


def _concrete(type: str, element: str) -> str:
    return re.sub(
        r'"any"|any(?:compatible)?(?:nonarray|element)?\b', element, re.sub(r"any\w*array\b", f"{element}[]", type)
    )
