"""Dataclasses from tables and texts: every key and value checked, every refusal in one line."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError
from jaxrag.base.tables import build, build_named, flatten, override, read_toml, table_from


@dataclasses.dataclass(frozen=True)
class Round:
    radius: float


@dataclasses.dataclass(frozen=True)
class Square:
    side: float = 1.0
    rotated: bool = False


@dataclasses.dataclass(frozen=True)
class Drawing:
    name: str
    layer: int | None
    shape: Round | Square
    pen: Literal["thin", "thick"] = "thin"
    size: tuple[int, int] = (1, 1)
    tags: tuple[str, ...] = ()
    colours: Mapping[str, float] = dataclasses.field(default_factory=dict)
    frame: Square | None = None
    later: "int | None" = None


SHAPES: dict[str, type[Round | Square]] = {"round": Round, "square": Square}
LEAST = {"name": "x", "shape": Round(1.0)}


def test_every_kind_of_annotation():
    values = {
        "name": "x", "layer": 3, "shape": Square(2.0), "pen": "thick", "size": [4, 5],
        "tags": ["a", "b"], "colours": {"red": 1}, "frame": {"rotated": True}, "later": 7,
    }  # fmt: skip
    made = build(Drawing, values, "here")
    assert made == Drawing(
        "x", 3, Square(2.0), "thick", (4, 5), ("a", "b"), {"red": 1.0}, Square(rotated=True), 7
    )
    assert type(made.colours["red"]) is float
    assert build(Drawing, {**values, "frame": made.frame}, "here") == made


def test_what_may_be_none_may_be_left_out():
    assert build(Drawing, LEAST, "here") == Drawing("x", None, Round(1.0))
    assert build(Drawing, {**LEAST, "layer": None}, "here").layer is None


def test_an_int_stands_for_a_float():
    assert type(build(Round, {"radius": 2}, "here").radius) is float
    assert type(build(Round, {"radius": 2}, "here", keep_ints=True).radius) is int


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"nmae": "y"},
            "here: unknown key 'nmae'; did you mean 'name'? The keys are colours",
        ),
        ({"name": 3}, "here.name=3: expected a text"),
        ({"layer": True}, "here.layer=True: expected an integer"),
        ({"layer": "3"}, "here.layer='3': expected an integer"),
        ({"shape": {"radius": 1}}, "here.shape={'radius': 1}: expected one of Round, Square"),
        ({"shape": None}, "here.shape=None: expected one of Round, Square"),
        ({"pen": "fat"}, "here.pen='fat': expected one of thin, thick"),
        ({"size": [1]}, "here.size=[1]: expected 2 values"),
        ({"size": 3}, "here.size=3: expected a list"),
        ({"tags": "ab"}, "here.tags='ab': expected a list"),
        ({"tags": ["a", 2]}, r"here.tags[1]=2: expected a text"),
        ({"colours": 3}, "here.colours=3: expected a table"),
        ({"colours": {"red": "1"}}, "here.colours.red='1': expected a number"),
        ({"frame": {"rotated": 1}}, "here.frame.rotated=1: expected true or false"),
        ({"frame": 1}, "here.frame=1: expected a table"),
    ],
)
def test_what_is_refused(change, message):
    with refused(ConfigError, message) as caught:
        build(Drawing, {**LEAST, **change}, "here")
    assert "\n" not in str(caught.value)


def test_a_missing_key_and_no_table():
    with refused(ConfigError, "'shape'"):
        build(Drawing, {"name": "x"}, "here")
    with refused(ConfigError, "here=['name']"):
        build(Drawing, ["name"], "here")


def test_the_dataclass_that_a_table_names():
    assert build_named(SHAPES, {"name": "round", "radius": 2}, "here") == Round(2.0)
    assert build_named(SHAPES, {"kind": "square"}, "here", "kind") == Square()
    for name in ("oval", None, ["round"]):
        with refused(ConfigError):
            build_named(SHAPES, {"name": name}, "here")
    with refused(ConfigError, "'side'"):
        build_named(SHAPES, {"name": "round", "side": 1}, "here")


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("flat", {"name": "flat"}),
        ("flat:", {"name": "flat"}),
        ("flat:k=50", {"name": "flat", "k": 50}),
        ("flat:k=-3,x=-0.5,y=2.0", {"name": "flat", "k": -3, "x": -0.5, "y": 2.0}),
        ("a:b=true,c=False,d=word,e=1.", {"name": "a", "b": True, "c": False, "d": "word",
                                          "e": "1."}),
        ("a:b=x=y,c=\u0663", {"name": "a", "b": "x=y", "c": "\u0663"}),
        ("a:part=lists,part.n=4", {"name": "a", "part": {"kind": "lists", "n": 4}}),
        ("a:part.n=4,part=lists", {"name": "a", "part": {"kind": "lists", "n": 4}}),
        ("a:other.n=4", {"name": "a", "other": {"n": 4}}),
    ],
)  # fmt: skip
def test_a_text_stands_for_a_table(text, table):
    assert table_from(text, "here", parts={"part": "kind"}) == table


def test_a_table_stands_for_itself_and_may_be_changed():
    table = {"kind": "lists"}
    made = table_from(table, "here", "kind")
    made["n"] = 4
    assert table == {"kind": "lists"} == table_from("lists", "here", "kind")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("flat:k", "here: 'k' of 'flat:k': expected field=value, such as k=50"),
        ("flat:k=", "here: 'k=' of 'flat:k=': expected field=value"),
        ("flat:=3", "here: '=3' of 'flat:=3': expected field=value"),
        ("flat:k=3,k.x=4", "here: 'k.x=4' of 'flat:k=3,k.x=4': 'k' is no table"),
        (3, "here=3: expected a name or a table"),
    ],
)
def test_texts_that_are_refused(value, message):
    with refused(ConfigError, message):
        table_from(value, "here")


def test_one_key_replaced_and_every_leaf_named():
    values = {"a": {"b": [1, {"c": 2}]}}
    assert override(values, "a.b.1.c=3") == {"a": {"b": [1, {"c": 3}]}}
    assert flatten(values) == {"a.b.0": 1, "a.b.1.c": 2}
    with refused(ConfigError, "'2'"):
        override(values, "a.b.2=3")


def test_toml_files_that_cannot_be_read(tmp_path):
    with refused(ConfigError):
        read_toml(tmp_path / "none.toml")
    with refused(ConfigError):
        read_toml(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    with refused(ConfigError):
        read_toml(tmp_path / "bad.toml")
