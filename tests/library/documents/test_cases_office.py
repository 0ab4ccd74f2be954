"""Files of tables and office programs, made after reports of lost or wrong text."""

import itertools

import pytest
from documents.cases import judged, records, sheets, slides, word

from jaxrag.library.documents.left_out import left_out_of

CASES = list(itertools.chain(sheets.CASES, word.CASES, slides.CASES, records.CASES))


@pytest.mark.parametrize("case", CASES, ids=[f"{it.name}: {it.kind}" for it in CASES])
def test_a_case_is_read_as_a_person_reads_it(tmp_path, read, case):
    case.write(tmp_path / case.name)
    good, bad = read(tmp_path / case.name)
    if case.refused:
        assert good == []
        assert case.refused in bad[0].reason
        return
    assert bad == []
    text = "\n".join(it.text for it in good)
    assert judged(case, text) == ([], []), text
    said = [line for it in good for line in left_out_of(it.metadata)]
    assert bool(said) == bool(case.said), said
    for it in case.said:
        assert any(it in line for line in said), said


def test_every_kind_has_three_cases():
    kinds = [it.kind for it in CASES]
    assert {it: kinds.count(it) for it in kinds if kinds.count(it) < 3} == {}
    assert len({it.name for it in CASES}) == len(CASES)
