"""Preparing a request: which template it gets, and words that the model cannot read."""

import dataclasses

import numpy as np
import pytest
import tokenizers
from refusal import refused
from tokenizers import models, pre_tokenizers

from jaxrag import KnowledgeBase, generate
from jaxrag.base.errors import ContextExceeded, RequestError, TokenizerError
from jaxrag.engine.sampling import SamplingParams
from jaxrag.models.model import load_model, random_model
from jaxrag.models.text.prompts import TEMPLATES, PromptTemplate
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Conversation, Passage, check_size
from jaxrag.serve.questions import prepare, resolve

DOCUMENTS = ["File 23: Kora Felell lives in Baldorf.", "File 41: She works as a weaver."]


@pytest.fixture(scope="module")
def word_model(word_model_dir):
    return load_model(word_model_dir, cache_tokens=4096)


class Unasked:
    """A retriever that must not be asked."""

    def search(self, questions, k, *, where=None):
        raise AssertionError(questions)


def prepared(model, question, documents=DOCUMENTS, template=None):
    settings = resolve(
        Ask(method="turborag", template=template, k=5, max_new_tokens=1), model=model
    )
    return prepare(settings, question, documents, SamplingParams())


def chosen(model, kb=None, template=None):
    settings = resolve(
        Ask(method="block_attention", template=template, k=5, max_new_tokens=1),
        kb=kb,
        model=None if kb else model,
    )
    return settings.template.name


def test_the_template_of_caller_knowledge_base_model_and_method(word_model, text_model, tmp_path):
    assert chosen(text_model) == "block_attention"
    assert chosen(word_model) == "prompt"
    assert chosen(word_model, template="plain") == "plain"
    with KnowledgeBase.open(tmp_path / "own", word_model) as kb:
        assert kb.template == word_model.template
        assert chosen(word_model, kb=kb) == "prompt"
    with KnowledgeBase.open(tmp_path / "named", word_model, template="plain") as kb:
        assert chosen(word_model, kb=kb) == "plain"
        assert chosen(word_model, kb=kb, template="turborag") == "turborag"
    with KnowledgeBase.open(tmp_path / "named", word_model) as kb:  # remembered, not the model's
        assert kb.template == TEMPLATES["plain"]
    with KnowledgeBase.open(tmp_path / "none", text_model) as kb:
        assert kb.template == TEMPLATES["turborag"]


def test_a_word_level_model_refuses_words_it_does_not_know(word_model):
    assert prepared(word_model, "Where does Kora Felell live?").settings.notes == ()
    with refused(RequestError, "'Hamburg'"):
        prepared(word_model, "Where is Hamburg Hamburg!")
    with refused(RequestError, "'f'"):
        prepared(word_model, "b c d e f g h")


def test_the_refusal_comes_before_any_work(word_model, tmp_path):
    with KnowledgeBase.open(tmp_path, word_model) as kb:
        kb.add(DOCUMENTS)
        kb.retriever = Unasked()
        with refused(RequestError, "'there'"):
            generate("is there anybody?", kb=kb)


def test_what_fits_no_context_is_refused_before_it_is_tokenised(word_model, monkeypatch):
    words = "Kora keeps a falcon. " * 4000
    most = 64 * word_model.config.max_positions
    check_size(word_model, [words[:most]])
    prepared(word_model, "Where does Kora live?")  # the template is tokenised once

    def encode(self, text, special=False):
        assert len(text) < 100
        return np.zeros(1, np.int32)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    for name in ("encode_with_offsets", "encode_batch"):
        monkeypatch.setattr(Tokenizer, name, None)
    talk = Conversation(("Who?", "Who?"), (words,))
    documents = [words[: most // 2]] * 3
    titled = [Passage("a", title=words)]
    for question, given in (
        (words, DOCUMENTS), (talk, DOCUMENTS), ("Who?", documents), ("Who?", titled),
        ("Who?", [[2] * 600, [2] * 600]), (Conversation(("Who?",), (), words), DOCUMENTS),
        (Conversation(("Who?",), query=words), DOCUMENTS),
    ):  # fmt: skip
        with refused(ContextExceeded, "1024"):
            prepared(word_model, question, given)


def test_texts_of_long_tokens_may_have_more_characters(word_model, monkeypatch):
    monkeypatch.setattr(word_model.tokenizer, "longest_token", 100)
    check_size(word_model, ["x" * 100 * 1024])
    with refused(ContextExceeded, "102401"):
        check_size(word_model, ["x" * 100 * 1024, "x"])


def test_a_question_is_given_up_between_two_texts(word_model, monkeypatch):
    texts, real = [], Tokenizer.encode

    def encode(self, text, special=False):
        texts.append(text)
        return real(self, text, special)

    def check_cancelled():
        if "third" in texts:
            raise TimeoutError

    settings = resolve(Ask(method="turborag", max_new_tokens=1), model=word_model)
    settings = dataclasses.replace(settings, check_cancelled=check_cancelled)
    monkeypatch.setattr(Tokenizer, "encode", encode)
    with pytest.raises(TimeoutError):
        prepare(settings, "Where does Kora live?", ["first", "second", "third", "fourth"])
    assert texts[-1] == "third"


def test_a_sub_word_model_refuses_only_a_question_it_cannot_read_at_all(tiny_config):
    pieces = [
        ("<unk>", -9.0),
        ("\u2581", -2.0),
        *((c, -3.0) for c in "abcdefghijklmnopqrstuvwxyz?"),
    ]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    model = random_model(
        tiny_config(num_layers=1), tokenizer=Tokenizer(made.to_str().encode(), {}, {})
    )
    plain = PromptTemplate("t", "", "{text}", "{question}")
    with refused(RequestError, "'桑桑'"):
        prepared(model, "\u6851\u6851?", ["text"], plain)
    assert prepared(model, "who is \u6851\u6851?", ["text"], plain).settings.notes == (
        "the model's vocabulary lacks words of the question: '\u6851\u6851'",
    )


def test_unknown_words_of_documents_and_templates_are_notes(word_model):
    notes = prepared(word_model, "Who taught Kora Felell?", ["a lighthouse", "a lighthouse tower"])
    assert notes.settings.notes == (
        "the model's vocabulary lacks words of the documents: 'lighthouse', 'tower'",
    )
    (note,) = prepared(word_model, "Who taught Kora Felell?", template="turborag").settings.notes
    assert "tokens of the template 'turborag'; use the one that it was trained with" in note


def test_token_ids_are_not_looked_at(word_model):
    for documents in ([[2]], np.full((2, 3), 2)):
        assert prepared(word_model, [2, 2], documents).settings.notes == ()


def test_a_recorded_template_with_split_markers_is_used_with_a_note(text_model, tmp_path):
    marked = dataclasses.replace(TEMPLATES["plain"], name="old", chunk="<|passage|>{text}")
    old = dataclasses.replace(text_model, template=marked, cache_tokens=4096)
    with KnowledgeBase.open(tmp_path / "kb", old) as kb:
        assert kb.template == marked
        settings = resolve(Ask(method="turborag", k=1, max_new_tokens=1), kb=kb)
        assert settings.template == marked
        (note,) = settings.notes
        assert "template 'old' holds <|passage|>, which is no token" in note
        with refused(TokenizerError):
            generate("Who?", kb=kb, template=marked)
    with refused(TokenizerError):
        KnowledgeBase.open(tmp_path / "new", text_model, template=marked)
