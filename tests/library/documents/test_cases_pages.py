"""Pages, PDF, mail and Markdown, made after reports of lost text, are read as they are seen."""

import pytest
from documents.cases import judged, mail, markdown, pdf, web

from jaxrag.library.documents.left_out import left_out_of

CASES = [*web.CASES, *pdf.CASES, *mail.CASES, *markdown.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_is_read_as_it_is_seen(case, tmp_path, read):
    path = tmp_path / case.name
    case.write(path)
    if case.refused:
        assert case.refused in read.refused(path)
        return
    document = read.only(path)
    assert judged(case, document.text) == ([], []), document.text
    lines = left_out_of(document.metadata)
    assert all(any(it in line for line in lines) for it in case.said), lines
    assert bool(lines) == bool(case.said), lines


def test_kinds_have_several_files():
    kinds = [case.kind for case in CASES]
    assert len({case.name for case in CASES}) == len(CASES) > 100
    assert min(kinds.count(kind) for kind in ("encoding", "tables", "columns", "charset")) > 2
