"""Where compiled programs are kept, and what the processor multiplies."""

import os

import pytest

from jaxrag.cli.opening import tell_slow_dtype
from jaxrag.models import compiled
from jaxrag.models.compiled import _programs, multiplies_bfloat16


def test_programs_for_other_numbers_of_processors_lie_apart(monkeypatch):
    """Loops of a program that one processor compiled run on one thread wherever it is read."""
    places = set()
    for processors in (1, 2, 16):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _, n=processors: set(range(n)), raising=False
        )
        places.add(_programs())
    assert len(places) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("Features\t: asimd", True),  # nothing that we know
        (None, True),
    ],
)
def test_slow_products_of_bfloat16_are_told(tmp_path, monkeypatch, capsys, text, expected):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(f"processor\t: 0\n{text}\nprocessor\t: 1\n{text}\n")
    monkeypatch.setattr(compiled, "_CPUINFO", path)
    assert multiplies_bfloat16() is expected
    tell_slow_dtype()
    told = capsys.readouterr().err
    assert ("--dtype float32" in told) is not expected and told.count("\n") == (not expected)
