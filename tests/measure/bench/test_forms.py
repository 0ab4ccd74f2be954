"""Forms of computations: equal numbers, chosen by clear gains only, kept, and refused if broken."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError
from jaxrag.measure.bench import forms as measuring
from jaxrag.measure.bench.forms import chosen_of, measure_forms
from jaxrag.models.forms import forms_file, keep_forms, kept_forms, take_forms
from jaxrag.models.linear import product
from pallas_kernels import Pages, Pool, Rotary, paged_attention, paged_decode_attention
from pallas_kernels.forms import DECODE_TILES, KEY_TILES, Forms, forms, traced_with


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXRAG_FORMS")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 150])
def test_every_form_of_attention_gives_the_same_numbers(rng, dtype, length):
    heads, kv_heads, dim, page, pages = 6, 2, 16, 16, 40
    q = jnp.asarray(rng.normal(size=(1, length, heads, dim)), dtype)
    pool = Pool(*(jnp.asarray(rng.normal(size=(64, page, kv_heads, dim)), dtype) for _ in "kv"))
    table = Pages(
        rng.permutation(64)[None, :pages].astype(np.int32),
        np.repeat([0, 160, 7, 300], 10)[None].astype(np.int32),
        np.arange(pages * page, dtype=np.int32)[None],
    )
    at = np.arange(500, 500 + length, dtype=np.int32)[None]
    angles = np.outer(np.arange(700), 0.1 ** np.arange(dim // 2))
    rotary = Rotary(*(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)), False)

    def run(form):
        with traced_with(form):
            if length == 1:
                return paged_decode_attention(q[:, 0], pool, table, at[:, 0], rotary, scale=0.3)
            return paged_attention(q, pool, table, at, rotary, scale=0.3)

    expected = run(Forms(heads_apart=()))
    changed = [dataclasses.replace(Forms(), key_tile=size) for size in KEY_TILES]
    changed += [Forms(heads_apart=(dtype,))]
    changed += [dataclasses.replace(Forms(), decode_tiles=count) for count in DECODE_TILES]
    close = 3e-2 if dtype == "bfloat16" else 1e-5
    for form in changed:
        for one, other in zip(run(form), expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=close, atol=close
            )


def test_a_row_of_bfloat16_is_multiplied_alike(rng):
    x = jnp.asarray(rng.normal(size=(1, 96)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(96, 32)), jnp.bfloat16)
    outs = []
    for doubled in (True, False):
        with traced_with(Forms(doubled_row=doubled)):
            program = jax.jit(lambda x: product(x, weight, dtype=jnp.float32)).lower(x)
        assert ("optimization_barrier" in program.as_text()) is doubled
        outs.append(program.compile()(x))
    np.testing.assert_allclose(*outs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ([8.0] * 9, "other"),  # a fifth faster, always
        ([9.5] * 9, "default"),  # 5 %
        ([8.0] * 7 + [11.0] * 2, "default"),  # in seven rounds of nine
        ([8.0] * 8 + [30.0], "other"),  # one disturbed round
        ([12.0] * 9, "default"),
    ],
)
def test_only_what_is_clearly_faster_replaces_the_default(other, taken):
    assert chosen_of({"default": [10.0] * 9, "other": other}, "default") == taken


def test_measured_with_the_shapes_of_a_model(tiny_config, monkeypatch):
    monkeypatch.setattr(measuring, "_KEYS", 256)
    monkeypatch.setattr(measuring, "_WEIGHT_BYTES", 1 << 16)
    monkeypatch.setattr(measuring, "chosen_of", lambda times, default: max(times))
    found, told = measure_forms(tiny_config(dtype="bfloat16"))
    assert found == Forms(512, (), 8, False, True)  # the last names by the alphabet
    assert [len(one.seconds) for one in told] == [6, 4, 2, 2]
    assert all(it > 0 for one in told for it in one.seconds.values())


def test_kept_for_new_processes(home):
    assert kept_forms() == (Forms(), "the defaults")
    chosen = Forms(key_tile=512, heads_apart=("float32",), layers_apart=False)
    path = keep_forms(chosen, {"measured": []})
    assert path == forms_file()
    assert kept_forms() == (chosen, str(path))
    before = forms()
    take_forms()  # programs of this process are traced already
    assert forms() == before


def test_the_environment_goes_first(home, tmp_path, monkeypatch):
    path = keep_forms(Forms(key_tile=128), {})
    monkeypatch.setenv("JAXRAG_FORMS", "default")
    assert kept_forms() == (Forms(), "the defaults")
    other = path.rename(tmp_path / "other.json")
    monkeypatch.setenv("JAXRAG_FORMS", str(other))
    assert kept_forms() == (Forms(key_tile=128), str(other))
    monkeypatch.setenv("JAXRAG_FORMS", str(tmp_path / "missing.json"))
    with refused(ConfigError, "JAXRAG_FORMS=default"):
        kept_forms()


def test_several_processes_take_no_file_of_one_machine(home, monkeypatch):
    keep_forms(Forms(key_tile=128), {})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert kept_forms() == (Forms(), "the defaults")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"forms": {"key_tile": 256}}',
        json.dumps({"forms": dataclasses.asdict(Forms()) | {"key_tile": 200}}),
        json.dumps({"forms": dataclasses.asdict(Forms()) | {"decode_tiles": True}}),
        json.dumps({"forms": dataclasses.asdict(Forms()) | {"heads_apart": ["float64"]}}),
        json.dumps({"forms": dataclasses.asdict(Forms()) | {"unknown": 1}}),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(home, text):
    forms_file().parent.mkdir(parents=True)
    forms_file().write_text(text)
    with refused(ConfigError, "forms.json") as error:
        kept_forms()
    assert "\n" not in str(error.value)
