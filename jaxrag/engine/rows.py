"""The rows of a lane: who holds one, and who gets the next."""

from collections.abc import Collection

from jaxrag.engine.admission import Entry, Status


class Lane:
    """Rows that decode together, and who is ready for one."""

    def __init__(self, rows: int | None) -> None:
        self.rows = rows  # None: of requests that need none
        self.members = 0  # live requests
        self.hungry = 0  # those of them that have no row yet
        self.ready: list[Entry] = []
        self.held: dict[int, Entry] = {}
        self._given = 0  # rows given since all were empty
        self._closed = False  # to more, until all are empty

    def room(self, leaving: Collection[Entry] = ()) -> int:
        """Rows to give, once those who leave are gone."""
        staying = [it for it in self.held.values() if it not in leaving]
        if self._closed or any(it.alone for it in staying):
            return 0
        return (self.rows or 0) - len(staying)

    def first(self, static: bool) -> Entry | None:
        """Who gets a row now; nobody overtakes one that waits to be alone."""
        entry = self.ready[0] if self.ready else None
        if self.rows is None:
            return entry
        able = entry is not None and self.room() > 0 and not (entry.alone and self.held)
        if static and self.held and (not able or self._given == self.rows):
            self._closed, able = True, False
        return entry if able else None

    def take(self, entry: Entry) -> None:
        """Its first ready request gets a row."""
        self.ready.remove(entry)
        if self.rows is not None:
            entry.row = next(row for row in range(self.rows) if row not in self.held)
            self.held[entry.row] = entry
            self._given += 1

    def leave(self, entry: Entry) -> None:
        """It gives its row back, or no longer wants one."""
        if entry.status is Status.READY:
            self.ready.remove(entry)
        if entry.row is not None:
            del self.held[entry.row]
            entry.row = None
            if not self.held:
                self._given, self._closed = 0, False
