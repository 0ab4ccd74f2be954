"""What a result says where method, model, template and knowledge base do not suit each other."""

import dataclasses
from pathlib import Path

import pytest
from refusal import refused

from jaxrag import KnowledgeBase, generate
from jaxrag.base.errors import ConfigError
from jaxrag.models.model import load_model, random_model
from jaxrag.models.reading import Reading, read_reading, write_reading
from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.reuse.methods import METHODS, choices, default_choice
from jaxrag.serve.ask import Ask
from jaxrag.serve.compatibility import default_method, gate_subject, stored_otherwise, suited
from jaxrag.serve.questions import resolve

DOCUMENTS = {
    "tea": "Tea grows on the hills of the village and is sold in blue boxes.",
    "salt": "Salt is carried to the village by mules every second week.",
}
SHIPPED = Path(__file__).parents[2] / "checkpoints" / "synthetic-0.8m"
QUESTION = "Who carries the salt to the village?"

OF_BASES = [name for name, one in METHODS.items() if not one.wraps]  # which no base keeps


@pytest.fixture(scope="module")
def stock(text_model):
    """As ``text_model``, but nobody knows how it was trained."""
    return dataclasses.replace(text_model, reading=Reading(), cache_tokens=4096)


@pytest.fixture
def kb(tmp_path, stock):
    with KnowledgeBase.open(tmp_path / "kb", stock, encoders=["isolated"]) as kb:
        kb.add([{"id": name, "text": text} for name, text in DOCUMENTS.items()])
        yield kb


def notes(kb=None, model=None, method="turborag", template=None, **options):
    return resolve(
        Ask(method=method, template=template, k=2, max_new_tokens=1, **options), kb=kb, model=model
    ).notes


def untuned(*arguments, **options):
    found = [note for note in notes(*arguments, **options) if "trained to read chunks" in note]
    assert len(found) <= 1
    return bool(found)


def test_plain_reuse_by_a_model_that_was_not_trained_for_it_is_told(kb, stock):
    (note,) = notes(kb)
    assert len(note) < 2 * 80 - len("note: ")
    for advice in ("--encoder after_prefix", "--method cacheblend"):  # its vocabulary is small
        assert advice in note
    roomy = dataclasses.replace(stock.config, vocab_size=8192, max_positions=2048)
    (note,) = notes(model=dataclasses.replace(stock, config=roomy))
    assert "--encoder primed, then --method primed" in note
    assert untuned(model=stock)
    plain = [name for name, one in METHODS.items() if one.encoder and not one.recomputes]
    apart = ["full_reuse", "turborag", "turborag_composite", "block_attention", "ape"]
    assert plain == [*apart, "primed", "packets"]
    assert {name for name in OF_BASES if untuned(kb, method=name)} == set(apart)
    assert not notes(kb, method="primed")
    assert not notes(kb, method="primed_fusion")
    assert untuned(kb, method="fusionrag", recompute_ratio=0)


def test_a_family_that_needs_a_bos_gets_no_chunks_alone(tiny_config, stock):
    """Neither by default nor, without a note, by methods that compute parts of them again."""
    config = tiny_config("gemma3", vocab_size=stock.config.vocab_size, max_positions=1024)
    model = random_model(config, tokenizer=stock.tokenizer, cache_tokens=2048)
    model = dataclasses.replace(model, reading=Reading())
    named = [it.method.name for it in choices(config, Reading())]
    assert "epic" in [it.method.name for it in choices(stock.config, Reading())]
    assert named and "epic" not in named
    assert default_choice(config, Reading()).encoders == ("after_prefix",)
    for method in ("epic", "turborag"):
        (note,) = notes(model=model, method=method)
        assert "without the BOS token" in note and "--method cacheblend" in note
    assert not untuned(model=model, method="cacheblend")
    assert not untuned(model=stock, method="epic")
    trained = dataclasses.replace(model, reading=Reading(("reordered",)))
    assert not untuned(model=trained, method="epic")


def test_training_speaks_for_the_positions_it_had(text_model, stock):
    trained = dataclasses.replace(stock, reading=Reading(("reordered",)))
    assert not untuned(model=trained)
    assert untuned(model=trained, method="turborag_composite")
    assert not untuned(model=text_model, method="turborag_composite")


def test_a_gate_that_was_passed_without_recomputing_speaks_for_a_method(kb):
    subject = gate_subject(METHODS["full_reuse"], kb.template)
    kb.set_gate("full_reuse", {"subject": subject, "ratio": 0.0, "questions": 9})
    assert not untuned(kb, method="full_reuse")
    assert untuned(kb)  # of another method
    assert untuned(kb, method="full_reuse", template="plain")  # of another prompt
    subject = gate_subject(METHODS["fusionrag"], kb.template)
    kb.set_gate("fusionrag", {"subject": subject, "ratio": 0.2, "questions": 9})
    assert untuned(kb, method="fusionrag", recompute_ratio=0)


def test_the_record_is_read_from_the_directory_and_refused_where_it_is_none(tmp_path):
    assert read_reading(tmp_path) == Reading()
    for reading in (Reading(), Reading(("reordered", "composite"))):
        write_reading(tmp_path, reading)
        assert read_reading(tmp_path) == reading
    (tmp_path / "reading.toml").write_text('block_positions = ["sideways"]')
    with refused(ConfigError):
        read_reading(tmp_path)


@pytest.mark.parametrize(
    ("name", "told"), [("full", True), ("long", True), ("dual", False)], ids=str
)
def test_the_shipped_weights(name, told):
    model = load_model(SHIPPED / name, cache_tokens=1024)
    assert untuned(model=model) == told


def test_a_preset_that_the_template_turns_into_another_is_told(kb, text_model):
    (note,) = (n for n in notes(kb, method="block_attention") if "the same as" in n)
    assert note == (
        "block_attention with the template 'turborag' is the same as turborag: only the template "
        "sets them apart; pass --template block_attention for its own"
    )
    assert notes(model=text_model, method="block_attention") == ()
    assert notes(model=text_model, method="block_attention", template="block_attention") == ()
    (note,) = notes(model=text_model, template="block_attention")
    assert "turborag with the template 'block_attention' is the same as block_attention" in note
    for name in OF_BASES:
        found = notes(model=text_model, method=name, template="plain")
        assert any("the same as" in note for note in found) == (name == "block_attention")


def test_encoders_that_the_knowledge_base_lacks_are_named_with_what_they_cost(kb):
    kb.add([{"id": "beside", "text": "Mules of the village rest beside the salt every week."}])
    out = generate(QUESTION, kb=kb, method="fusionrag", k=2, max_new_tokens=1)
    (note,) = (note for note in out.notes if "jaxrag ingest" in note)
    assert note == (
        "fusionrag reads chunks encoded as neighbours and after_prefix, the knowledge base keeps "
        f"isolated: 2 chunks of {out.counts['encoded']} tokens were encoded for this answer; "
        f"`jaxrag ingest PATH... --kb {kb.path} --encoder neighbours --encoder after_prefix` does "
        "it once, before questions"
    )
    assert any("passes over" in note for note in out.notes)  # the third was not retrieved
    again = generate(QUESTION, kb=kb, method="fusionrag", k=2, max_new_tokens=1)
    assert again.counts["encoded"] == 0
    assert not any("jaxrag ingest" in note for note in again.notes)


def test_chunks_of_another_template_are_not_called_evicted(kb):
    marked = dataclasses.replace(TEMPLATES["plain"], name="mine", chunk="({text})")
    out = generate(QUESTION, kb=kb, template=marked, method="turborag", max_new_tokens=1)
    whys = {row.why for row in out.reuse if row.part != "prefix"}
    assert whys == {"not in the store; stored under the template 'turborag', asked under 'mine'"}
    # The same chunks behind another prefix: only what sees the prefix is another.
    moved = dataclasses.replace(kb.template, prefix="Read:\n", name="moved")
    out = generate(QUESTION, kb=kb, template=moved, method="turborag", max_new_tokens=1)
    assert out.counts["encoded"] == 0
    out = generate(QUESTION, kb=kb, template=moved, method="full_reuse", max_new_tokens=1)
    assert out.counts["encoded"] > 0
    assert all("asked under 'moved'" in row.why for row in out.reuse[1:])


def test_plain_reuse_suits_only_weights_that_were_trained_for_it(kb, monkeypatch):
    found = suited(kb)
    assert found[0] == "full_attention" and "epic" in found  # it recomputes
    assert "turborag" not in found
    assert "fusionrag" not in found  # its chunks are not there
    monkeypatch.setattr(kb.model, "reading", Reading(block_positions=("reordered",)))
    assert "turborag" in suited(kb)


def test_a_chat_template_makes_other_kv_of_what_sees_the_prefix(kb):
    other = dataclasses.replace(kb.template, chat=not kb.template.chat)
    assert stored_otherwise(kb, METHODS["full_reuse"], other)
    assert not stored_otherwise(kb, METHODS["turborag"], other)
    assert not stored_otherwise(kb, METHODS["full_reuse"], kb.template)


def test_a_new_knowledge_base_keeps_what_its_model_reads_well(tmp_path, stock, text_model):
    for model, encoder, method in (
        (stock, "after_prefix", "cacheblend"),
        (text_model, "isolated", "turborag"),
    ):
        with KnowledgeBase.open(tmp_path / encoder, model) as made:
            made.add([{"id": name, "text": text} for name, text in DOCUMENTS.items()])
            assert made.encoders == (encoder,)
            out = generate(QUESTION, kb=made, k=2, max_new_tokens=1)
            assert (out.method, out.counts["encoded"], out.notes) == (method, 0, [])
        assert default_method(model, None).name == method


def test_large_vocabularies_get_a_primer(tmp_path, stock):
    """A real one of some ten thousand sub-words has room for its text."""
    large = dataclasses.replace(stock.config, vocab_size=8192, max_positions=2048)
    found = default_choice(large, Reading())
    assert (found.method, found.encoders) == (METHODS["primed"], ("primed",))
    assert default_choice(large, Reading(("reordered",))).method == METHODS["turborag"]
    for name in ("vocab_size", "max_positions"):
        small = dataclasses.replace(large, **{name: 1024})
        assert default_choice(small, Reading()).method == METHODS["cacheblend"]
        assert not any(it.method.sees_primer for it in choices(small, Reading()))
    with KnowledgeBase.open(tmp_path / "primed", stock, encoders=["primed"], chunk_tokens=64) as kb:
        assert default_method(stock, kb).name == "primed"


def test_what_a_knowledge_base_keeps_decides_how_it_is_asked(tmp_path, kb, stock):
    assert default_method(stock, kb).name == "turborag"  # nothing is encoded anew unasked
    assert untuned(kb, method=None)
    both = ["isolated", "after_prefix", "neighbours"]
    with KnowledgeBase.open(tmp_path / "both", stock, encoders=both) as made:
        assert default_method(stock, made).name == "fusionrag"
        subject = gate_subject(METHODS["turborag"], made.template)
        made.set_gate("turborag", {"subject": subject, "ratio": 0.0, "questions": 9})
        assert default_method(stock, made).name == "turborag"
    assert resolve(Ask(recompute_ratio=0.3), model=stock).method.recompute_ratio == 0.3


def test_turns_stay_where_a_chat_has_no_chunks(stock):
    talk = [("user", "Who?"), ("assistant", "Clay."), ("user", "Why?")]
    messages = [{"role": role, "content": text} for role, text in talk]
    out = generate(messages=messages, model=stock, template="plain", max_new_tokens=1)
    assert out.method == "turborag" and not any("computed again" in note for note in out.notes)
    named = generate(
        messages=messages, model=stock, template="plain", method="cacheblend", max_new_tokens=1
    )
    assert named.method == "cacheblend"
