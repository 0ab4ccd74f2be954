"""Where compiled programs are kept."""

import os

from jaxrag.models.compiled import _programs


def test_programs_for_other_numbers_of_processors_lie_apart(monkeypatch):
    """Loops of a program that one processor compiled run on one thread wherever it is read."""
    places = set()
    for processors in (1, 2, 16):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _, n=processors: set(range(n)), raising=False
        )
        places.add(_programs())
    assert len(places) == 3
