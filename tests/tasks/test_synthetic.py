"""The synthetic task: its answers follow from its documents, and no test person was trained on."""

import re

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError
from jaxrag.tasks.synthetic import KINDS, SyntheticTask, describe, sample, samples
from jaxrag.tasks.world import (
    FIRST_HE,
    FIRST_SHE,
    LAST,
    REFUSAL,
    RELATIONS,
    split_of,
    vocabulary,
    words,
)

PEOPLE = re.compile(rf"\b({'|'.join((*FIRST_SHE, *FIRST_HE))}) ({'|'.join(LAST)})\b")
WIDE = SyntheticTask(chunks=(4, 10), places=2, relations=4)


def said_in(chunk):
    """(subject or pronoun, relation, value) of every statement, read back from the English."""
    found = []
    for sentence in re.findall(r"[^.:]+\.", re.sub(r"^File \d+:", "", chunk)):
        for name, relation in RELATIONS.items():
            for wording in range(relation.wordings):
                for own in ("", "her", "his"):
                    pattern = re.escape(relation.said(wording, "<S>", own, "<V>"))
                    pattern = pattern.replace("<S>", r"(?P<s>[A-Z]\w+(?: [A-Z]\w+)?)")
                    match = re.fullmatch(pattern.replace("<V>", "(?P<v>.+)"), sentence.strip())
                    if match:
                        subject = match.groupdict().get("s") or own
                        found.append((subject, name, match["v"]))
    return found


def world_of(sample):
    """Facts as a careful reader takes them: pronouns mean the last person of the same file."""
    facts, last, file = {}, None, None
    for chunk in sample.chunks:
        header = re.match(r"File (\d+):", chunk)
        number = header and header[1]
        if header and number != file:
            last = None
        file = number
        for subject, relation, value in said_in(chunk):
            if subject.lower() not in ("she", "he", "her", "his"):
                last = subject
            assert last is not None, chunk
            facts[last, relation] = value
    return facts


def asked(question):
    """The chain of relations from the name, and the name."""
    for name, relation in RELATIONS.items():
        for wording in relation.questions:
            match = re.fullmatch(re.escape(wording).replace(r"\{X\}", "(.+)"), question)
            if match:
                inner = match[1]
                for bridge in ("teacher", "friend"):
                    lead = f"the {RELATIONS[bridge].noun} of "
                    if inner.startswith(lead):
                        return inner.removeprefix(lead), [bridge, name]
                return inner, [name]
    raise AssertionError(question)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_follows_from_the_documents(split):
    seen = set()
    for index in range(300):
        drawn = sample(SyntheticTask(chunks=(4, 8), places=1, split=split), 3, index)
        facts = world_of(drawn)
        people = {person for person, _ in facts}
        for question, answer, kind, _ in drawn.questions:
            name, chain = asked(question)
            full = [p for p in people if p == name or p.split()[0] == name]
            value = full[0] if full else name
            for relation in chain:
                value = facts.get((value, relation))
            assert (value or REFUSAL) == answer, (drawn, question)
            seen.add(kind)
    assert seen == set(KINDS)


def test_a_cross_chunk_does_not_name_its_person():
    count = 0
    for index in range(200):
        drawn = sample(SyntheticTask(), 5, index)
        for question, answer, kind, _ in drawn.questions:
            if kind != "cross":
                continue
            (_, (relation,)) = asked(question)
            holding = [
                (i, subject)
                for i, chunk in enumerate(drawn.chunks)
                for subject, name, value in said_in(chunk)
                if name == relation and value == answer and subject in ("She", "He", "her", "his")
            ]
            assert any(
                asked(question)[0].split()[0] in drawn.chunks[i - 1]
                and drawn.chunks[i].split()[1] == drawn.chunks[i - 1].split()[1]
                for i, _ in holding
            )
            count += 1
    assert count > 50


def test_no_person_is_in_both_splits():
    for split in ("train", "test"):
        for index in range(200):
            drawn = sample(SyntheticTask(split=split), 0, index)
            for first, last in PEOPLE.findall(" ".join(drawn.chunks)):
                assert split_of(first, last) == split
    first_names = (*FIRST_SHE, *FIRST_HE)
    shares = [split_of(first, last) == "test" for first in first_names for last in LAST]
    assert 0.1 < sum(shares) / len(shares) < 0.15


def test_samples_depend_on_seed_and_index_only():
    stream = samples(WIDE, 7, start=5)
    assert [next(stream), next(stream)] == [sample(WIDE, 7, 5), sample(WIDE, 7, 6)]
    assert sample(WIDE, 7, 5) != sample(WIDE, 8, 5)


def test_the_vocabulary_holds_every_word():
    known = set(vocabulary())
    for index in range(200):
        drawn = sample(WIDE, 1, index)
        assert 4 <= len(drawn.chunks) <= 10
        assert len(set(drawn.chunks)) == len(drawn.chunks)
        texts = (*drawn.chunks, *(f"{q.question} {q.answer}" for q in drawn.questions))
        assert set(words(" ".join(texts))) <= known


def test_distractors_never_part_a_pronoun_from_its_name():
    for index in range(200):
        world_of(sample(WIDE, 2, index))  # asserts that every pronoun has somebody to mean


def test_documents_of_the_first_lessons():
    task = SyntheticTask(
        chunks=(3, 3), relations=1, pairs=0.0, bridge=False, plain=1.0, pronouns=0.0, full_names=1.0
    )
    for index in range(50):
        drawn = sample(task, 4, index)
        assert {q.kind for q in drawn.questions} <= {"hop1", "unknown"}
        for chunk in drawn.chunks:
            assert re.fullmatch(r"(File \d+: )?The [a-z ]+ of [A-Z]\w+ [A-Z]\w+ is \w+\.", chunk)
        for question in drawn.questions:
            assert re.fullmatch(r"What is the [a-z ]+ of [A-Z]\w+ [A-Z]\w+\?", question.question)


def test_few_values():
    task = SyntheticTask(values=2)
    said = {name: set() for name in RELATIONS}
    for index in range(50):
        for chunk in sample(task, 6, index).chunks:
            for _, name, value in said_in(chunk):
                said[name].add(value)
    for name, values in said.items():
        assert RELATIONS[name].value == "person" or len(values) == 2


def test_the_shortcut_is_measured():
    rows = describe(SyntheticTask(), 0, 400)
    assert sum(rows[kind]["share"] for kind in KINDS) == pytest.approx(1)
    assert rows["unknown"]["shortcut"] == 0
    assert 0.25 < rows["all"]["shortcut"] < 0.45  # far below what the task asks for


def test_a_kind_that_never_occurs_is_an_error():
    with refused(ConfigError):
        sample(SyntheticTask(chunks=(1, 1), mix={"latest": 1.0}), 0, 0)
