"""Where a filter or a question leaves nothing, the model is not asked, and that is said."""

import asyncio
import json

import pytest
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.cli import main
from jaxrag.engine.engine import Engine
from jaxrag.library.documents import Document
from jaxrag.serve.answers import NOTHING_FOUND
from jaxrag.serve.generate import agenerate, generate

NONE = {"year": {"$gte": 2020}}
DOCUMENTS = [
    Document("a", "amber birch amber", metadata={"year": 2018}),
    Document("b", "birch cedar", metadata={"year": 2019}),
]


@pytest.fixture
def kb(make_kb):
    made = make_kb()
    made.add(DOCUMENTS)
    return made


@pytest.fixture
def unasked(monkeypatch):
    """Fails where the engine is handed anything."""

    def refuse(*args, **options):
        raise AssertionError("the model was asked")

    for name in ("add", "add_all"):
        monkeypatch.setattr(Engine, name, refuse)


def test_a_filter_that_leaves_nothing_asks_nobody(kb, unasked):
    result = generate("amber?", kb=kb, where=NONE)
    assert (result.text, result.finish_reason) == (NOTHING_FOUND, "abstained")
    assert (result.token_ids, result.sources, result.flops) == ([], [], 0)
    assert result.counts == {"reused": 0, "recomputed": 0, "encoded": 0}
    assert result.timings["ttft"] == result.timings["retrieve"] > 0
    assert "it was not asked" in result.notes[0]
    assert json.loads(json.dumps(result.to_dict()))["finish_reason"] == "abstained"
    stream = generate("amber?", kb=kb, where=NONE, stream=True)
    assert list(stream) == [NOTHING_FOUND]
    assert stream.result.finish_reason == "abstained"


def test_asyncio_abstains_as_well(kb, unasked):
    async def both():
        whole = await agenerate("amber?", kb=kb, where=NONE)
        stream = agenerate("amber?", kb=kb, where=NONE, stream=True)
        return whole, [piece async for piece in stream], stream.result

    whole, pieces, result = asyncio.run(both())
    assert whole.text == result.text == "".join(pieces) == NOTHING_FOUND


def test_others_of_a_list_are_answered(kb):
    some, none = generate(["amber?", "heath?"], kb=kb, where={"year": 2018}, max_new_tokens=2)
    assert (some.finish_reason, none.finish_reason) == ("length", "abstained")
    assert len(some.token_ids) == 2
    assert [source.document_id for source in some.sources] == ["a"]


def test_it_is_asked_where_that_is_wanted(kb):
    result = generate("amber?", kb=kb, where=NONE, unanswerable="ask", max_new_tokens=2)
    assert (len(result.token_ids), result.finish_reason) == (2, "length")
    assert "it was asked without any" in result.notes[0]


def test_a_question_without_a_common_word_asks_nobody(kb, unasked):
    result = generate("heath?", kb=kb)
    assert (result.text, result.finish_reason) == (NOTHING_FOUND, "abstained")
    assert "unanswerable='ask'" in result.notes[0]


def test_a_least_score_leaves_out_what_scores_less(kb):
    best, other = (hit.score for hit in kb.search("amber birch", 5))
    assert best > other
    between = (best + other) / 2
    assert [hit.document_id for hit in kb.search("amber birch", 5, min_score=between)] == ["a"]
    assert len(kb.search("amber birch", 5, min_score=other)) == 2
    out = generate("amber birch", kb=kb, min_score=between, max_new_tokens=1)
    assert [source.document_id for source in out.sources] == ["a"]
    out = generate("amber birch", kb=kb, min_score=best + 1)
    assert out.finish_reason == "abstained"
    assert out.notes[1].startswith("only chunks with a score of ")


def test_ranks_have_no_least_score(make_kb, embedder):
    kb = make_kb("near", embedder=embedder, index="exact")
    kb.add(DOCUMENTS)
    with refused(RequestError):
        kb.search("amber", min_score=0.5)
    best = kb.search("amber", mode="vector")[0].score
    assert kb.search("amber", mode="vector", min_score=best)[0].score == best
    assert kb.search("amber", mode="vector", min_score=best + 1) == []
    out = generate("amber", kb=kb, search_mode="vector", min_score=best + 1)
    assert out.finish_reason == "abstained"
    kb.reranker = lambda question, texts: [len(text) for text in texts]
    assert [hit.document_id for hit in kb.search("amber", min_score=12)] == ["a"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unanswerable": "guess"}, "unanswerable='guess'"),
        ({"min_score": "high"}, "min_score='high'"),
        ({"min_score": float("nan")}, ""),
        ({"min_score": True}, ""),
        ({"search_mode": "magic"}, "mode='magic'"),
    ],
)
def test_bad_options_are_refused(kb, options, words):
    with refused(RequestError, words):
        generate("amber?", kb=kb, **options)


def test_the_command_says_so(tmp_path, model_dir, capsys):
    (tmp_path / "a.txt").write_text("The salt wells.")
    call = ["--kb", str(tmp_path / "cli")]
    made = ["--model", str(model_dir), "--template", "plain", "--chunk-tokens", "64"]
    assert main(["ingest", str(tmp_path / "a.txt"), *call, *made]) == 0
    capsys.readouterr()
    ask = ["ask", "Which salt?", *call, "--max-new-tokens", "2"]
    assert main([*ask, "--where", '{"year": 2020}']) == 0
    out, err = capsys.readouterr()
    assert out == f"{NOTHING_FOUND}\n"
    assert "abstained: the model was not asked" in err
    assert "no document has 'year' in its metadata" in err
    assert main([*ask, "--min-score", "1e9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "abstained"
    assert main([*ask, "--min-score", "1e9", "--unanswerable", "ask", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] != "abstained"
    assert main([*ask, "--search", "vector"]) == 1
    assert "has no embedder" in capsys.readouterr().err
