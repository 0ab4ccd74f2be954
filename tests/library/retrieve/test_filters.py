"""Filters mean in SQLite what is said of them, and refuse what they do not know by name."""

import contextlib
import functools
import json
import operator

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused

from jaxrag.base.errors import RequestError
from jaxrag.library.retrieve.filters import MAX_VALUES, Filter, Joined

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
NUMBER = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 0.1, 1.0, 1e22, 2.0**53, 2**53 + 1]),
)
SCALAR = st.one_of(st.none(), st.booleans(), NUMBER, TEXT, st.sampled_from(["a", "true", "1"]))
FIELD = st.one_of(st.sampled_from(["a", "b", 'q"uote', "back\\slash", "a.b", "", "$.a"]), TEXT)
METADATA = st.dictionaries(
    FIELD,
    st.one_of(
        SCALAR,
        st.integers(-(2**70), 2**70),
        st.lists(st.one_of(SCALAR, st.just({}), st.just([1])), max_size=3),
        st.dictionaries(TEXT, SCALAR, max_size=2),
    ),
    max_size=4,
)
CONDITION = st.one_of(
    SCALAR,
    st.lists(SCALAR, max_size=3),
    st.fixed_dictionaries({"$ne": SCALAR}),
    st.fixed_dictionaries({"$in": st.lists(SCALAR, max_size=3)}),
    st.dictionaries(
        st.sampled_from(["$gt", "$gte", "$lt", "$lte"]),
        st.one_of(NUMBER, TEXT),
        min_size=1,
        max_size=2,
    ),
)


@pytest.fixture(scope="module")
def connection():
    with contextlib.closing(apsw.Connection(":memory:")) as made:
        made.execute("CREATE TABLE documents (metadata TEXT)")
        yield made


def found_by_sql(connection, where, metadata):
    connection.execute("DELETE FROM documents")
    connection.execute(
        "INSERT INTO documents VALUES (?)", (json.dumps(metadata, ensure_ascii=False),)
    )
    clause, parameters = Filter.parse(where).sql()
    rows = connection.execute(f"SELECT 1 FROM documents WHERE {clause}", parameters).fetchall()
    return len(rows) == 1


ORDERED = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
KINDS = {bool: "boolean", int: "number", float: "number", str: "text", type(None): "null"}


def matches(one, metadata):
    """The meaning of a filter in Python; huge integers are floats, as in SQLite."""
    if isinstance(one, Filter):
        return all(matches(condition, metadata) for condition in one.conditions)
    if isinstance(one, Joined):
        fits = any if one.operator == "$or" else all
        return fits(matches(inner, metadata) for inner in one.filters)
    values = metadata.get(one.field, [])
    values = values if isinstance(values, list) else [values]
    huge = (float(it) if type(it) is int and not -(2**63) <= it < 2**63 else it for it in values)
    alike = [(it, to) for it in huge for to in one.operands
             if type(it) in KINDS and KINDS[type(it)] == KINDS[type(to)]]  # fmt: skip
    if one.operator in ORDERED:
        return any(ORDERED[one.operator](it, to) for it, to in alike)
    equal = any(it == to for it, to in alike)
    equal = equal or (None in one.operands and one.field not in metadata)
    return equal != (one.operator == "$ne")


@settings(max_examples=150, deadline=None)
@given(data=st.data(), metadata=METADATA)
def test_python_and_sql_agree(connection, data, metadata):
    # Fields and operands that occur in the metadata make matches likely.
    held = [
        item
        for value in metadata.values()
        for item in (value if isinstance(value, list) else [value])
        if not isinstance(item, dict | list) and not (type(item) is int and abs(item) >= 2**63)
    ]
    fields = st.sampled_from(sorted(metadata)) if metadata else FIELD
    condition = st.one_of(CONDITION, st.sampled_from(held)) if held else CONDITION
    plain = st.dictionaries(
        st.one_of(fields, FIELD).filter(lambda name: not name.startswith("$")),
        condition,
        max_size=3,
    )
    joined = st.recursive(
        plain,
        lambda inner: st.dictionaries(
            st.sampled_from(["$and", "$or"]), st.lists(inner, min_size=1, max_size=3), min_size=1
        ),
        max_leaves=4,
    )
    where = data.draw(joined)
    assert matches(Filter.parse(where), metadata) == found_by_sql(connection, where, metadata)


DOCUMENT = {
    "year": 2020,
    "score": 0.5,
    "lang": "en",
    "tags": ["sea", "lamp"],
    "draft": False,
    "none": None,
    "nested": {"x": 1},
}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, True),
        ({"year": 2020}, True),
        ({"year": "2020"}, False),
        ({"year": {"$gte": 2020, "$lt": 2021}}, True),
        ({"year": {"$lte": "z"}}, False),
        ({"lang": ["de", "en"]}, True),
        ({"lang": []}, False),
        ({"tags": {"$ne": "lamp"}}, False),
        ({"tags": {"$ne": "rain"}}, True),
        ({"draft": False}, True),
        ({"draft": 0}, False),
        ({"absent": None}, True),
        ({"absent": {"$ne": 1}}, True),
        ({"absent": {"$ne": None}}, False),
        ({"absent": {"$gte": 0}}, False),
        ({"year": 2020, "lang": "de"}, False),
        ({"$or": [{"year": 1999}, {"lang": "en"}]}, True),
        ({"$and": [{"tags": {"$ne": "rain"}}, {"tags": {"$ne": "lamp"}}]}, False),
        ({"year": 1999, "$or": [{"lang": "en"}]}, False),
    ],
)
def test_meaning(connection, where, expected):
    assert matches(Filter.parse(where), DOCUMENT) is expected
    assert found_by_sql(connection, where, DOCUMENT) is expected


@pytest.mark.parametrize("field", ["a') OR 1 --", 'a"]', "$", "x'; DROP TABLE documents; --", "a?"])
def test_no_name_or_value_is_read_as_sql(connection, field):
    if field.startswith("$"):
        field = "x" + field
    where = {field: field}
    assert found_by_sql(connection, where, {field: field})
    assert not found_by_sql(connection, where, {"a": 1})
    clause, _ = Filter.parse(where).sql()
    assert field not in clause


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"year": {"$regex": "2.*"}}, "'year'"),
        ({"year": {"gte": 2}}, "'gte'"),
        ({"year": {}}, ""),
        ({"$not": [{"a": 1}]}, "'$not'"),
        ({"$or": []}, ""),
        ({"$or": {"a": 1}}, ""),
        ({"$and": [{"$or": ["a"]}]}, "where='a'"),
        (functools.reduce(lambda inner, _: {"$or": [inner]}, range(17), {"a": 1}), ""),
        ({3: 1}, ""),
        ({"a": object}, "'a'"),
        ({"a": float("nan")}, ""),
        ({"a": 2**64}, "64"),
        ({"a": [[1]]}, "'a'"),
        ({"a": {"$in": "text"}}, ""),
        ({"a": {"$gt": None}}, ""),
        ({"a": {"$gt": True}}, ""),
        ({"a": {"$eq": {"b": 1}}}, "'a'"),
        ({"a": "\ud800"}, "'a'"),
        ({"a": "x\0y"}, "'a'"),
        ("year", ""),
        ([("year", 1)], ""),
    ],
)
def test_refusals_name_the_value_and_the_fix(where, message):
    with refused(RequestError, message) as caught:
        Filter.parse(where)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({"a": list(range(MAX_VALUES))}, True),
        ({"a": [*range(1, MAX_VALUES), None]}, False),
        ({"a": [-0.5 - n for n in range(MAX_VALUES - 1)] + ["x"]}, False),
        ({f"f{n}": None for n in range(MAX_VALUES)}, True),
        ({**{f"f{n}": None for n in range(MAX_VALUES - 1)}, "a": 1}, False),
        ({"$or": [{"a": n} for n in range(MAX_VALUES)]}, True),
    ],
    ids=["many values", "and null", "fractions", "many fields", "one that fails", "joined"],
)
def test_filters_of_the_most_values_are_searched(connection, where, found):
    assert found_by_sql(connection, where, {"a": 0}) is found
    assert matches(Filter.parse(where), {"a": 0}) is found


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"$or": [{"lang": "en"}, {"year": 2020}]}, False),
        ({"$or": [{"lang": "en"}, {"year": "2020"}]}, True),
        ({"$and": [{"year": 2020}, {"lang": "en"}]}, True),
    ],
)
def test_why_nothing_is_found_looks_into_joined_filters(where, why):
    assert bool(Filter.parse(where).cannot_match({"year": {"integer": 3}})) is why
