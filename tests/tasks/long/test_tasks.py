"""Every task hides what it asks for: once, among distractors that differ."""

import collections
import random
import re

import numpy as np
import pytest

from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.tasks.long.case import Frame
from jaxrag.tasks.long.scores import string_match_all
from jaxrag.tasks.long.tasks import DEPTHS, INFINITEBENCH, RULER, SUITES, Draw, common_words
from jaxrag.tasks.long.village_ruler import NAMES
from jaxrag.tasks.world import (
    BRIDGES,
    FIRST_HE,
    FIRST_SHE,
    LAST,
    PLACES,
    RELATIONS,
    split_of,
    vocabulary,
)
from jaxrag.tasks.world import words as words_of

PLAIN = [(suite, name) for suite in ("needle", "ruler", "infinitebench")
         for name in SUITES[suite, "plain"]]  # fmt: skip
VILLAGE = [(suite, name) for (suite, flavour), tasks in SUITES.items() if flavour == "village"
           and suite != "ruler" for name in tasks]  # fmt: skip
LONG = SUITES["ruler", "village"]
COUNTED = ("cwe", "fwe")  # nothing is hidden there
CODE = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def a_case(task, seed=1, depth=0.5):
    return task.make(Draw(random.Random(seed), depth))


@pytest.fixture(scope="module")
def text_of(byte_tokenizer):
    """The haystack of a case as text, whole but for the sentence that is cut."""
    frame = Frame(byte_tokenizer, TEMPLATES["plain"])

    def write(case, length=4000):
        return byte_tokenizer.decode(np.concatenate(frame.fit(case, length).chunks))

    return write


@pytest.mark.parametrize(("suite", "name"), [one for one in PLAIN if one[1] not in COUNTED])
def test_the_answer_can_be_read_and_stands_once(text_of, suite, name):
    case = a_case(SUITES[suite, "plain"][name])
    text = text_of(case)
    times = [len(re.findall(rf"\b{value}\b", text)) for value in case.expected]
    assert times == ([2, 2, 2, 2, 1] if name == "vt" else [1] * len(times))
    for needle in case.needles:
        assert text.count(needle) == 1
    assert string_match_all(" ".join(case.expected), case.expected) == 1
    assert not any(value in case.question + case.lead for value in case.expected)


@pytest.mark.parametrize(("suite", "name"), PLAIN + VILLAGE)
def test_cases_follow_from_the_seed(suite, name):
    task = SUITES[suite, "plain" if (suite, name) in PLAIN else "village"][name]
    one, same, other = (a_case(task, seed) for seed in (1, 1, 2))
    assert (one.needles, one.depths, one.question) == (same.needles, same.depths, same.question)
    first, again, third = (list(zip(range(200), case.filler(), strict=False))
                           for case in (one, same, other))  # fmt: skip
    assert first == again == list(zip(range(200), one.filler(), strict=False))
    assert one.expected != other.expected
    assert first != third


@pytest.mark.parametrize("name", [name for name, task in RULER.items() if task.one_needle])
def test_tasks_with_one_needle_put_it_where_they_are_told(name):
    assert a_case(RULER[name], depth=0.31).depths == (0.31,)
    assert len(a_case(RULER[name]).needles) == 1


@pytest.mark.parametrize(
    ("name", "needles", "asked", "expected"),
    [
        ("niah_multikey_1", 4, 1, 1),
        ("niah_multivalue", 4, 1, 4),
        ("niah_multiquery", 4, 4, 4),
    ],
)
def test_several_needles(name, needles, asked, expected):
    orders = set()
    for seed in range(20):
        case = a_case(RULER[name], seed)
        assert len(case.needles) == needles == len(set(case.depths))
        assert set(case.depths) <= set(DEPTHS) and len(case.expected) == expected
        form = re.compile(r"The secret number of the (.*) is (\d{7})\.")
        told = dict(form.fullmatch(needle).groups()[::-1] for needle in case.needles)
        assert len(told) == needles
        keys = [told[value] for value in case.expected]
        assert len(set(keys)) == asked and all(key in case.question for key in keys)
        others = set(told.values()) - set(keys)
        assert len(others) == (3 if name == "niah_multikey_1" else 0)
        assert not any(key in case.question for key in others)
        orders.add(tuple(told[value] == keys[0] for value in told))
    assert len(orders) > 1 or name == "niah_multivalue"


def test_values_are_of_their_kind():
    assert re.fullmatch(CODE, a_case(RULER["niah_single_3"]).expected[0])
    case = a_case(RULER["niah_multikey_3"])
    assert re.search(CODE, case.question) and re.fullmatch(CODE, case.expected[0])
    assert re.fullmatch(r"\d{5}", a_case(INFINITEBENCH["passkey"]).expected[0])


@pytest.mark.parametrize(
    ("task", "form"),
    [
        (RULER["niah_multikey_2"], r"The secret number of the (.*) is (\d{7})\."),
        (RULER["niah_multikey_3"], rf"The secret code of ({CODE}) is ({CODE})\."),
        (INFINITEBENCH["kv_retrieval"], rf'"({CODE})": "({CODE})"'),
    ],
)
def test_distractors_have_other_keys_and_other_values(task, form):
    case = a_case(task)
    pairs = [re.fullmatch(form, text).groups() for _, text in zip(range(3000), case.filler(),
                                                                  strict=False)]  # fmt: skip
    (needle,) = case.needles
    key, value = re.fullmatch(form, needle).groups()
    assert key in case.question and value == case.expected[0]
    assert len({key, *(k for k, _ in pairs)}) == 3001
    assert len({value, *(v for _, v in pairs)}) == 3001


def test_variables_can_be_tracked(text_of):
    case = a_case(RULER["vt"])
    text = text_of(case)
    (value,) = re.findall(r"Which 5 boxes hold (\d{5})", case.question)
    (first,) = re.findall(rf"Box (\w+) holds {value}\.", text)
    found = [first]
    while links := re.findall(rf"Box (\w+) holds what box {found[-1]} holds\.", text):
        assert text.index(f"Box {links[0]} holds") > text.index(f"Box {found[-1]} holds")
        found += links
    assert tuple(found) == case.expected and len(set(found)) == 5
    assert list(case.depths) == sorted(case.depths)


def test_common_words_are_counted(text_of):
    case = a_case(RULER["cwe"])
    counts = collections.Counter(text_of(case, 9000).split())
    assert {word for word, _ in counts.most_common(10)} == set(case.expected)
    assert {counts[word] for word in case.expected} == {30}
    assert max(n for word, n in counts.items() if word not in case.expected) <= 3
    small = common_words(Draw(random.Random(1), 0.5), common=2, often=4)
    assert len(small.needles) == 8 and len(small.expected) == 2


@pytest.mark.parametrize("length", [1300, 1901, 6000])
def test_frequent_words_are_counted(text_of, length):
    for seed in range(3):
        case = a_case(RULER["fwe"], seed)
        counts = collections.Counter(text_of(case, length).split())
        (dots, most), *others = counts.most_common(5)
        assert dots == "...." and tuple(word for word, _ in others[:3]) == case.expected
        assert others[2][1] > others[3][1]
        assert most / counts.total() == pytest.approx(6 / np.pi**2, abs=0.02)


def test_number_strings_repeat_their_digits():
    for seed in range(100):
        (number,) = a_case(INFINITEBENCH["number_string"], seed).expected
        assert re.fullmatch(r"\d{10}", number)
        runs = [len(run[0]) for run in re.finditer(r"(\d)\1*", number)]
        assert min(runs) >= 2 and max(runs) <= 4


@pytest.mark.parametrize(("suite", "name"), VILLAGE)
def test_the_village_speaks_the_words_of_the_synthetic_task(village_frame, suite, name):
    known = set(vocabulary())
    task = SUITES[suite, "village"][name]
    for seed in range(8):
        case = a_case(task, seed)
        (answer,) = case.expected
        filler = [text for _, text in zip(range(150), case.filler(), strict=False)]
        said = set(words_of(" ".join((*filler, *case.needles, case.question, answer))))
        assert said <= known
        around = set(words_of(" ".join(filler)))
        assert not around & set(answer.split())
        (asked,) = re.findall(r"([A-Z]\w+ [A-Z]\w+)(?: often meet)?\?", case.question)
        assert asked in case.needles[0] and answer in case.needles[0] and asked != answer
        assert not around & set(asked.split()) and split_of(*asked.split()) == "test"
        fitted = village_frame.fit(case, 1000)
        assert fitted.num_tokens == 1000


@pytest.mark.parametrize(("suite", "name"), VILLAGE)
def test_training_prompts_name_nobody_of_the_test_split(suite, name):
    form = re.compile(rf"({'|'.join(FIRST_SHE + FIRST_HE)}) ({'|'.join(LAST)})")
    met = {}
    for split in ("train", "test"):
        case = SUITES[suite, "village"][name].make(Draw(random.Random(3), 0.5, split=split))
        filler = [text for _, text in zip(range(300), case.filler(), strict=False)]
        named = form.findall(" ".join((*case.needles, case.question, *filler)))
        assert len(named) == 3 if name == "passkey" else len(named) > 300
        met[split] = {split_of(*person) for person in named}
    assert met["train"] == {"train"} and "test" in met["test"]


def test_village_keys_and_values_are_people_in_one_wording():
    case = a_case(SUITES["infinitebench", "village"]["kv_retrieval"])
    nouns = "|".join(RELATIONS[name].noun for name in BRIDGES)
    form = re.compile(rf"The ({nouns}) of (\w+ \w+) is (\w+ \w+)\.")
    told = [form.fullmatch(text).groups() for _, text in zip(range(500), case.filler(),
                                                            strict=False)]  # fmt: skip
    noun, *_ = form.fullmatch(case.needles[0]).groups()
    assert {one[0] for one in told} == {noun} and noun in case.question
    assert len({one[1] for one in told}) == 500


def test_village_passkeys_hide_in_facts_about_places():
    case = a_case(SUITES["infinitebench", "village"]["passkey"])
    said = " ".join(text for _, text in zip(range(300), case.filler(), strict=False))
    assert not re.search(r"teacher|friend|taught|learned|meets|summer", said)


def haystack(frame, case, length=1000):
    return frame.tokenizer.decode(np.concatenate(frame.fit(case, length).chunks))


@pytest.mark.parametrize("name", LONG)
def test_long_answers_are_in_the_haystack_in_known_words(village_frame, name):
    known, tokenizer = set(vocabulary()), village_frame.tokenizer
    for seed in range(4):
        case = a_case(LONG[name], seed)
        text = haystack(village_frame, case)
        answer = case.between.join(case.expected)
        ids = tokenizer.encode(answer)
        assert 16 <= len(ids) < LONG[name].max_new_tokens
        assert tokenizer.unk_id not in ids and set(words_of(text)) <= known
        assert set(words_of(answer)) <= set(words_of(text))
        assert LONG[name].score(answer, case.expected) == 1
        assert LONG[name].score("", case.expected) == 0
        one, same, other = (haystack(village_frame, a_case(LONG[name], n)) for n in (5, 5, 6))
        assert one == same != other
        assert len(case.expected) == (1 if name == "copy" else 16)
        assert village_frame.fit(case, 4000).num_tokens == 4000


@pytest.mark.parametrize("name", [name for name in LONG if name != "cwe"])
def test_long_training_prompts_name_nobody_of_the_test_split(village_frame, name):
    form = re.compile(rf"({'|'.join(FIRST_SHE + FIRST_HE)}) ({'|'.join(LAST)})")
    met = {}
    for split in ("train", "test"):
        case = LONG[name].make(Draw(random.Random(3), 0.5, split=split))
        text = haystack(village_frame, case, 2000)
        named = form.findall(text)
        assert len(named) > 30
        met[split] = {split_of(*person) for person in named}
        if name == "niah_multivalue":
            (asked,) = form.findall(case.question)
            assert split_of(*asked) == split
    assert met == {"train": {"train"}, "test": {"train", "test"}}


@pytest.mark.parametrize("answers", [2, 4, 8, 16])
def test_lessons_ask_for_fewer_names(village_frame, answers):
    for name in set(LONG) - {"copy"}:
        case = LONG[name].make(Draw(random.Random(4), 0.5, answers=answers))
        assert len(case.expected) == answers
    case = LONG["copy"].make(Draw(random.Random(4), 0.5, answers=answers))
    assert case.expected[0].count(".") == max(answers // 4, 1)


def owners(text):
    """place -> who it is said to belong to, counted."""
    found = collections.defaultdict(collections.Counter)
    for place, owner in re.findall(r"(\w+) belongs to (\w+)\.", text):
        found[place][owner] += 1
    return found


@pytest.mark.parametrize("length", [520, 2000])
def test_owners_of_places(village_frame, length):
    for seed in range(4):
        case = a_case(LONG["niah_multiquery"], seed)
        told = owners(haystack(village_frame, case, length))
        assert all(len(found) == 1 for found in told.values())
        asked = re.fullmatch(r"Who owns ([\w ]+)\?", case.question)[1].split()
        assert case.expected == tuple(f"{place} {min(told[place])}" for place in asked)
        assert len(set(told) - set(asked)) > 4  # others that nobody asks about
        case = a_case(LONG["majority"], seed)
        told = owners(haystack(village_frame, case, length))
        asked = re.fullmatch(r"Who often owns ([\w ]+)\?", case.question)[1].split()
        for place, answer in zip(asked, case.expected, strict=True):
            (most, three), (_, two) = told[place].most_common()
            assert (three, two) == (3, 2) and answer == f"{place} {most}"


def test_one_person_meets_sixteen_in_order(village_frame):
    case = a_case(LONG["niah_multivalue"])
    text = haystack(village_frame, case)
    (asked,) = re.findall(r"Whom does (\w+ \w+) meet every day\?", case.question)
    assert tuple(re.findall(rf"{asked} often meets (\w+)\.", text)) == case.expected
    assert len(re.findall(r"often meets", text)) > 20


def test_a_chain_of_places(village_frame):
    for seed in range(4):
        case = a_case(LONG["vt"], seed)
        text = haystack(village_frame, case)
        pairs = set(re.findall(r"(\w+) lies in (\w+)\.", text))
        within = dict(pairs)
        assert len(pairs) == len(within) > 20
        (place,) = re.findall(r"Where does (\w+) lie\?", case.question)
        for step in case.expected:
            assert within[place] == step
            place = step
        assert place not in within


@pytest.mark.parametrize("length", [300, 4000])
def test_common_names_are_the_most_frequent(village_frame, length):
    for seed in range(4):
        case = a_case(LONG["cwe"], seed)
        text = words_of(haystack(village_frame, case, length))
        counts = collections.Counter(text)
        assert {name for name, _ in counts.most_common(16)} == set(case.expected)
        assert counts.most_common(17)[15][1] > 3 * counts.most_common(17)[16][1]
        seen = dict.fromkeys(name for name in text if name in case.expected)
        assert tuple(seen) == case.expected


def test_a_paragraph_is_copied(village_frame):
    case = a_case(LONG["copy"])
    (number,) = re.findall(r"Read File (\d+)\.", case.question)
    text = haystack(village_frame, case)
    assert f"File {number}: {case.expected[0]}" in text
    assert len(re.findall(r"File \d+:", text)) == 4
    assert case.expected[0].count(".") == 4


def test_no_name_of_an_answer_is_part_of_another():
    names = [*NAMES, *PLACES]
    assert len(set(names)) == len(names)
    for name in names:
        assert not [other for other in names if other != name and name.lower() in other.lower()]
