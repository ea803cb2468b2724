"""The seam between operations and a database: named statements, done one after the other on one connection."""

from collections.abc import Sequence
from typing import Any, Protocol

from everstep.model.status import Status
from everstep.stores.rows.runs import RunRow
from everstep.stores.sql.rows import Row


class Statements(Protocol):
    """The statements that operations consist of. A statement's name means the same in every database."""

    def all(self, name: str, *parameters: Any) -> list[Row]:
        """Do a statement and return its rows."""
        ...

    def run(self, name: str, *parameters: Any) -> int:
        """Do a statement and return how many rows it has changed."""
        ...

    def many(self, name: str, rows: Sequence[Row]) -> None:
        """Do a statement once for each row of parameters."""
        ...

    def insert(self, name: str, width: int, rows: Sequence[Row]) -> int:
        """Insert rows of `width` columns with one statement, or a few, and return how many were new."""
        ...

    def replace_run(self, row: RunRow) -> None:
        """Replace a run's row, except for its epoch, and its tags."""
        ...

    def lock_keys(self, keys: Sequence[str]) -> None:
        """Lock these keys until the transaction ends."""
        ...

    # -- how parameters are passed ----------------------------------------------------------------------------------
    def texts(self, values: Sequence[str]) -> Any:
        """Return a list of texts as one parameter."""
        ...

    def numbers(self, values: Sequence[int]) -> Any:
        """Return a list of numbers as one parameter."""
        ...

    def statuses(self, values: Sequence[Status]) -> Sequence[Any]:
        """Return the statuses that a claim allows, as the last parameters of its statement."""
        ...
