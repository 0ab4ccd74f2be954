"""The numbers of scripts/structure.py on small trees whose numbers are known."""

import graphlib
import json

import pytest
import structure

FILES = {
    "jaxrag/__init__.py": "",
    "jaxrag/errors.py": "class E(Exception):\n    pass\n",
    "jaxrag/types.py": "from jaxrag.errors import E\n",
    "jaxrag/store/__init__.py": "from jaxrag.store import keys\n",
    "jaxrag/store/keys.py": "import types\n\nfrom jaxrag.errors import E\n",
    "jaxrag/serve/batch.py": "",
    "jaxrag/train/loop.py": "def g():\n    from jaxrag.serve.batch import f\nimport jaxrag.store\n",
    "pallas_kernels/tiles.py": "import jax\n",
    "scripts/make.py": "from jaxrag import serve\n",
    "benchmarks/gpu.py": "import scenes\n",
    "benchmarks/scenes.py": "import jaxrag.store\n",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_rooms_arrows_and_floors(tree):
    found = structure.measure(tree)
    rooms = {"jaxrag", "errors", "types", "store", "serve", "train", "pallas_kernels", "scripts",
             "benchmarks"}  # fmt: skip
    assert found["rooms"] == len(rooms)
    # types and store -> errors, train -> serve, train and benchmarks -> store, scripts -> jaxrag
    assert found["arrows between rooms"] == 6
    assert found["floors of rooms"] == 3  # errors, store, train
    assert found["floors of files, jaxrag"] == 4  # errors, keys, store, loop
    inner = (rooms - {"jaxrag"}) | {"__init__"}
    assert found["floors within a room"] == dict.fromkeys(inner, 1) | {"store": 2, "benchmarks": 2}


def test_a_circle_is_named():
    assert structure.floors_of({"a": {"b"}, "b": {"c"}, "c": set(), "d": set()}) == 3
    with pytest.raises(graphlib.CycleError, match="'b'"):
        structure.floors_of({"a": {"b"}, "b": {"a"}})


def test_code_lines():
    text = '"""Doc.\n\nMore.\n"""\nimport ast\n\n# alone\nx = 1  # beside\ny = """\n# text\n\n"""\n'
    assert structure.code_lines(text) == 3


def test_long_signatures(tree):
    eight = "a, b, /, c, *d, e, f, g=1, **h"
    code = f"class C:\n    def m(self, {eight}):\n        def n({eight}, i): ...\n"
    (tree / "jaxrag" / "types.py").write_text(code.replace("**h, i", "i, **h"))
    found = structure.measure(tree)
    assert found["functions, jaxrag"] == 3
    assert found["long signatures, jaxrag"] == 1


def test_type_names_with_two_homes(tree):
    one = """
from jaxrag.types import Shared
class Both: ...
class _Own: ...
Mode = Literal["r", "rw"]
type Made = dict[str, int]
MOST = least[0]
found = some[0]
Called = namedtuple("Called", "a b")
class Outer:
    class Inner: ...
"""
    other = """
class Both(Exception): ...
class _Own: ...
Mode = int | None
Made = Callable[[int], str]
MOST = least[1]
found = some[1]
Called = namedtuple("Called", "a b")
class Inner: ...
class Shared: ...
"""
    (tree / "jaxrag" / "serve" / "batch.py").write_text(one)
    (tree / "jaxrag" / "train" / "loop.py").write_text(other)
    (tree / "scripts" / "make.py").write_text(other)
    homes = ["jaxrag.serve.batch", "jaxrag.train.loop"]
    found = structure.measure(tree)["type names with two homes"]
    assert found == dict.fromkeys(("Both", "Made", "Mode"), homes)


@pytest.mark.parametrize(
    ("name", "leads"),
    [
        ("store", True),  # one word says nothing
        ("store.keys", True),
        ("jaxrag.store.keys", True),
        ("``store.keys.Key``", True),
        ("store.keys.Key.digest", True),
        ("store.keys.Key.length", True),  # a method sets it
        ("store.keys.Key.gone", False),
        ("store.keys.Name.anything", True),  # of a class that is not of the tree
        ("store.keys.MOST.anything", True),
        ("store.keys.within", True),  # a branch defines it
        ("store.keys.E", True),  # imported there
        ("store.gone", False),
        ("``store.keys.gone``, or not", False),
        ("jaxrag.keys", False),
        ("jaxrag.gone.keys", False),
        ("jaxrag.serve", True),  # a folder without __init__
        ("deep.rooms.here", True),  # at any depth
        ("deep.rooms.gone", False),
        ("numpy.gone", True),  # of somebody else
        ("types.gone", False),  # a loose file
        ("store.toml and store.jsonl.lost", True),
        ("an/store.gone", True),
        ("cache.store.gone", True),
        ("end of a store.Then another sentence", False),  # a point without a space
        ("what an argument holds: train.gone", True),
        ("what a field holds: serve.gone", True),
        ("a group of entry points: jaxrag.retrievers", True),  # a text of the code
    ],
)
def test_names_in_docstrings(tree, name, leads):
    keys = """
from jaxrag.errors import E
MOST: int = 3
if MOST:
    def within(): ...
class Key:
    def digest(self):
        self.length = 1
class Name(str): ...
"""
    (tree / "jaxrag" / "store" / "keys.py").write_text(keys)
    deep = tree / "jaxrag" / "store" / "deep" / "rooms.py"
    deep.parent.mkdir()
    deep.write_text("here = 1\n")
    code = f"""
class C:
    '''Text.'''
    serve: int
    group = "jaxrag.retrievers"

    async def f(self, train):
        '''Text of {name}.'''
"""
    (tree / "jaxrag" / "types.py").write_text(code)
    found = structure.measure(tree)["names in docstrings that do not resolve"]
    assert len(found) == (not leads)
    assert all(it.startswith("jaxrag.types: ") for it in found)


def test_the_command(tree, capsys):
    assert structure.main([str(tree), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found == structure.measure(tree)
    assert structure.main([str(tree)]) == 0
    shown = capsys.readouterr().out
    assert "| rooms | 9 |" in shown
    assert "| floors within a room | 2 |" in shown
    assert "| type names with two homes | 0 |" in shown
    with pytest.raises(SystemExit):
        structure.main([str(tree / "scripts")])
    assert "there is no jaxrag in it" in capsys.readouterr().err
