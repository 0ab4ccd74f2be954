"""Citations: where they begin and end, by which votes, and as marks in the text."""

import numpy as np
import pytest
from refusal import refused

import jaxrag
from jaxrag.base.errors import RequestError
from jaxrag.engine.attribution import Attribution
from jaxrag.serve.citing import Citation, citations_of, marked


class Spelled:
    """A tokenizer whose tokens are these pieces of text."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def stream(self):
        return self

    def push(self, token_id):
        return self.pieces[token_id]


def looked(*chosen, passages=3):
    """Attribution of tokens that were surely chosen for a passage, or for none (None)."""
    votes = np.full((len(chosen), passages), 1 / passages, np.float32)
    for at, one in enumerate(chosen):
        if one is not None:
            votes[at] = 0.2 / (passages - 1)
            votes[at, one] = 0.8
    return Attribution(votes, np.full_like(votes, 0.9))


def cited(pieces, attribution, text=None, numbers=(1, 2, 3)):
    text = "".join(pieces) if text is None else text
    found = citations_of(Spelled(*pieces), range(len(pieces)), text, attribution, numbers)
    assert all(text[it.start : it.end] == text[it.start : it.end].strip() for it in found)
    return [(text[it.start : it.end], it.source) for it in found]


@pytest.mark.parametrize(
    ("text", "chosen", "found"),
    [
        ("In| 1912| she| left|.| It| rained|.", {1: 1}, [("1912 she left", 2)]),
        ("He| lives| in| Ulm|,| she| in| Bern|.", {3: 2, 7: 0}, [("Ulm, she in", 3), ("Bern", 1)]),
        (
            "Ulm| and| Bern|.| Rome|.",
            dict.fromkeys((0, 2, 4), 1),
            [("Ulm and Bern", 2), ("Rome", 2)],
        ),
        *((f"a|{end}|b", {0: 0}, [("a", 1)]) for end in ".!?\n\u3002\uff01\uff1f"),
        ("Ulm|.", {}, []),  # the model looked everywhere
    ],
)
def test_a_citation_goes_to_the_end_of_its_sentence_or_where_another_begins(text, chosen, found):
    pieces = text.split("|")
    assert cited(pieces, looked(*map(chosen.get, range(len(pieces))))) == found


def test_a_glance_what_a_stop_string_cut_and_no_passage_are_not_cited():
    attribution = looked(1, None)
    assert cited(("Ulm", "."), Attribution(attribution.votes, attribution.most * 0.5)) == []
    assert cited(("Ulm", "\n", "Bern"), looked(1, None, 2), text="Ulm") == [("Ulm", 2)]
    assert cited(("Ulm", "\n", "Bern"), looked(None, None, 2), text="Ulm") == []
    assert cited(("Ulm",), Attribution(*np.zeros((2, 1, 0), np.float32)), numbers=()) == []


def test_marks_stand_behind_what_they_are_for():
    text = "Ulm, she in Bern."
    found = [Citation(0, 11, 3, 0.8), Citation(12, 16, 1, 0.9)]
    told, moved = marked(text, found)
    assert told == "Ulm, she in [3] Bern [1]."
    assert [told[it.start : it.end] for it in moved] == ["Ulm, she in", "Bern"]
    assert marked(text, []) == (text, [])


@pytest.fixture(scope="module")
def village():
    return jaxrag.load_model("checkpoints/synthetic-0.8m/dual", dtype="float32")


DOCUMENTS = ["The home of Giso Berow is Tondorf.", "The home of Helo Mimer is Darham.", "File 12."]


@pytest.mark.parametrize("method", ["turborag", "full_attention", "epic", "cache_craft"])
def test_the_passage_of_the_fact_is_cited(village, method):
    for name, passage in (("Giso Berow", 1), ("Helo Mimer", 2)):
        asked = {"documents": DOCUMENTS, "model": village, "method": method, "max_new_tokens": 8}
        plain = jaxrag.generate(f"What is the home of {name}?", **asked)
        result = jaxrag.generate(f"What is the home of {name}?", **asked, cite="spans")
        assert (plain.text, plain.citations) == (result.text, [])
        [one] = result.citations
        assert one.source == passage and result.text[one.start : one.end] in DOCUMENTS[passage - 1]
        marks = jaxrag.generate(f"What is the home of {name}?", **asked, cite="marks")
        assert marks.text == f"{result.text} [{passage}]" and marks.token_ids == result.token_ids


def test_a_stream_cites_at_its_end(village):
    asked = {"documents": DOCUMENTS, "model": village, "max_new_tokens": 8, "stream": True}
    stream = jaxrag.generate("What is the home of Giso Berow?", **asked, cite="spans")
    assert "".join(stream) == stream.result.text and stream.result.citations[0].source == 1
    marks = jaxrag.generate("What is the home of Giso Berow?", **asked, cite="marks")
    assert list(marks) == [marks.result.text] == ["Tondorf [1]"]


def test_refused_before_work_begins():
    with refused(RequestError, "cite='yes'"):
        jaxrag.generate("?", documents=["a"], cite="yes")
    model = jaxrag.load_model("checkpoints/synthetic-0.8m/dual", kv="host")
    with refused(RequestError, "kv='host'"):
        jaxrag.generate("What is the home of Giso Berow?", documents=DOCUMENTS, model=model,
            decode="retrieval", cite="spans")  # fmt: skip
