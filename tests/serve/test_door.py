"""What is no question, no document and no setting is refused in one line, before any work."""

import asyncio

import numpy as np
import pytest

from jaxrag import KnowledgeBase, agenerate, generate
from jaxrag.base.errors import ModelError, RequestError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine.sampling import SamplingParams
from jaxrag.models import model
from jaxrag.models.model import load_model
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import questions_of

QUESTION = "Who carries the salt?"


@pytest.fixture(scope="module")
def kb(tmp_path_factory, text_model):
    with KnowledgeBase.open(tmp_path_factory.mktemp("door") / "kb", text_model) as kb:
        kb.add(["Salt is carried by mules."])
        yield kb


def refusal(call):
    with pytest.raises(RequestError) as refused:
        call()
    message = str(refused.value)
    assert "\n" not in message and len(message) < 200
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kb": "kbs/mixed"}, "kb='kbs/mixed': expected a KnowledgeBase, as KnowledgeBase.open"),
        ({"kb": None, "model": "models/a", "documents": ["x"]}, "model='models/a': expected a Mo"),
        ({"method": 3}, "method=3: expected a preset's name"),
        ({"template": 3}, "template=3: expected a template's name"),
        ({"k": "5"}, "k='5': expected a positive integer"),
        ({"batch_size": 1.5}, "batch_size=1.5: expected a positive integer"),
        ({"recompute_ratio": "half", "method": "epic"}, "recompute_ratio='half': expected a numb"),
        ({"prefix_cache": "yes"}, "prefix_cache='yes': expected True or False"),
        ({"stream": 1}, "stream=1: expected True or False"),
        ({"stop": None}, "stop=None: expected a list of non-empty strings"),
        ({"sampling": {"temperature": 1}}, "sampling={'temperature': 1}: expected jaxrag.Samplin"),
        ({"documents": "one text"}, "documents='one text' is one text: expected a list; write"),
        ({"documents": ["a", {"text": "b"}]}, "documents[1]={'text': 'b'}: expected a text or"),
    ],
)
def test_settings_of_another_kind(kb, changes, words):
    given = {"kb": kb, "max_new_tokens": 1, **changes}
    assert words in refusal(lambda: generate(QUESTION, **given))
    if given.keys() == {"kb", "max_new_tokens", "batch_size"}:
        return
    assert words in refusal(lambda: asyncio.run(agenerate(QUESTION, **given)))


@pytest.mark.parametrize("question", [None, 3, [None], [3.5], [["a"]]], ids=repr)
def test_what_is_no_question(kb, question):
    words = "expected a text, token ids, or a list of these"
    assert words in refusal(lambda: generate(question, kb=kb))
    assert words in refusal(lambda: asyncio.run(agenerate(question, kb=kb)))


def test_one_question_or_a_list():
    ids = np.arange(3)
    assert questions_of("who?") == (["who?"], True)
    assert questions_of([1, 2]) == ([[1, 2]], True)
    assert questions_of(ids)[0][0] is ids
    assert questions_of(["who?", [1]]) == (["who?", [1]], False)
    assert len(questions_of(np.ones((2, 3), np.int32))[0]) == 2
    assert questions_of([]) == ([], False)


def test_a_sampling_for_all_or_for_each():
    one, two = SamplingParams(), SamplingParams(seed=2)
    assert Ask().samplings(2) == Ask(sampling=one).samplings(2) == [one, one]
    assert Ask(sampling=(one, two)).samplings(2) == [one, two]
    assert "2 entries for 1 question" in refusal(lambda: Ask(sampling=[one, two]).samplings(1))


def test_one_question_at_a_time_in_asyncio(kb):
    words = "agenerate takes one question"
    assert words in refusal(lambda: asyncio.run(agenerate([QUESTION], kb=kb)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": 3}, "path=3: expected a folder"),
        ({"model": "models/a"}, "model='models/a': expected a Model, as load_model(DIR)"),
        ({"template": 3}, "template=3: expected a template's name"),
        ({"chunk_tokens": "20"}, "chunk_tokens='20': expected how many tokens"),
        ({"overlap": 1.5}, "overlap=1.5: expected how many tokens"),
        ({"encoders": "isolated"}, "encoders='isolated' is one text: expected a list of names"),
    ],
)
def test_a_knowledge_base_of_another_kind(tmp_path, text_model, changes, words):
    given = {"path": tmp_path / "kb", "model": text_model, **changes}
    assert words in refusal(lambda: KnowledgeBase.open(given.pop("path"), **given))
    assert not (tmp_path / "kb").exists()


def test_what_a_knowledge_base_is_handed(kb, tmp_path):
    for call, words in (
        (lambda: kb.add(["x"], shard=3), "shard=3: expected two integers"),
        (lambda: kb.remove(3), "ids=3: expected a list of document ids"),
        (lambda: kb.remove(["a", 3]), "ids[1]=3: expected a text, a document's id"),
        (lambda: kb.prefetch(3), "what=3: expected a question or a list of keys"),
        (lambda: kb.export(3), "out=3: expected a folder"),
        (lambda: kb.export(tmp_path, documents="a"), "documents='a' is one text: expected a list"),
    ):
        assert words in refusal(call)


def test_models_meshes_and_samplings_of_another_kind(model_dir, text_model):
    for call, words in (
        (lambda: load_model(3), "path=3: expected a directory, a GGUF file, or ORG/NAME"),
        (lambda: load_model(model_dir, mesh="1,1,2"), "mesh='1,1,2': expected one that make_mesh"),
        (lambda: load_model(model_dir, cache_tokens="4k"), "cache_tokens='4k': expected an integ"),
        (lambda: load_model(model_dir, kv=["host"]), "kv=['host']: expected one of device, host"),
        (lambda: make_mesh("1"), "data='1': expected how many devices"),
        (lambda: SamplingParams(temperature="hot"), "temperature='hot': expected a number"),
        (lambda: SamplingParams(top_p=None), "top_p=None: expected a number"),
        (lambda: text_model.logits([[1, 2], [3]]), "ids: expected integers [B, T], got rows of"),
    ):
        assert words in refusal(call)


def test_a_pool_that_finds_no_room_is_refused_before_weights_are_read(model_dir, monkeypatch):
    monkeypatch.setattr(model, "load_hf", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(ModelError) as refused:
        load_model(model_dir, cache_tokens=10**11)
    message = str(refused.value)
    assert "a pool of 100000000000 tokens takes" in message and "\n" not in message
    assert "GiB" in message and "lower cache_tokens, to " in message
