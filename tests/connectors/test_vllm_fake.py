"""The connector against a stand-in for vLLM: what is promised, salted, written, refused."""

import dataclasses
import json
import shutil
import threading
import time

import fake_vllm
import numpy as np
import pytest
from fake_vllm import Engine, config_of, exact
from refusal import refused
from stored_chunks import LAYOUT, ROPE, drawn

from jaxrag.base.errors import ConfigError, StoreError
from jaxrag.connectors import manifest
from jaxrag.connectors.rotation import place, rope_table
from jaxrag.kv.store import ChunkStore


def wanted(stored, numbers, ids):
    """What the pages are to hold: stored parts at their places, the rest computed."""
    found = np.array(exact(ids, stored.layout))
    at = 0
    for number in (None, *numbers):
        key = stored.prefix_key if number is None else stored.key(stored.chunks[number])
        kv = np.array(stored.kv[key])
        table = rope_table(ROPE, at, at + kv.shape[2])
        place(kv[:, 0], table, ROPE)
        found[:, :, at : at + kv.shape[2]] = kv
        at += kv.shape[2]
    return found


def write(path, fields):
    path.write_text(json.dumps(fields | {"digest": manifest.digest_of(fields)}))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("numbers", [(0, 1), (2, 0, 4), (3, 3, 1), (4,)])
def test_parts_are_written_where_they_stand(connector, stored, numbers, named):
    engine = Engine(connector, stored)
    ids = stored.prompt(*numbers)
    request = engine.add(ids, {"spans": stored.spans(*numbers)} if named else None)
    seen, (own, loaded) = engine.run(request)
    assert (own, loaded) == (0, len(ids) - 5)
    np.testing.assert_array_equal(seen, wanted(stored, numbers, ids))
    assert engine.end(request) == (False, {"jaxrag": {"stored": loaded}} if named else None)
    engine.close()


def test_heads_of_two_workers(connector, stored):
    engine = Engine(connector, stored, ways=2)
    ids = stored.prompt(1, 0)
    seen, (_, loaded) = engine.run(engine.add(ids))
    assert loaded == len(ids) - 5
    np.testing.assert_array_equal(seen, wanted(stored, (1, 0), ids))
    engine.close()


@pytest.mark.parametrize("first_exact", [True, False])
@pytest.mark.parametrize("salted", [True, False])
def test_pages_of_parts_and_exact_pages_stay_apart(connector, stored, first_exact, salted):
    """Over the same tokens, one after the other; without the salts each reads the other's."""
    kind = connector.JaxragConnector
    if not salted:
        kind = type("Unsalted", (kind,), {"_salt": lambda self, request, salt: None})
    engine = Engine(connector, stored, kind=kind)
    ids = stored.prompt(0, 2)
    answers = {}
    for off in (first_exact, not first_exact):
        seen, _ = engine.run(engine.add(ids, {"off": True} if off else None))
        answers[off] = seen
    right = {True: exact(ids, LAYOUT), False: wanted(stored, (0, 2), ids)}
    good = {off: np.array_equal(answers[off], right[off]) for off in answers}
    assert good[first_exact]
    assert good[not first_exact] == salted
    engine.close()


def test_the_same_parts_again_are_the_engine_s_own_pages(connector, stored):
    engine = Engine(connector, stored)
    ids = stored.prompt(0, 2)
    engine.run(engine.add(ids))
    seen, (own, loaded) = engine.run(engine.add(ids))
    assert own >= len(ids) - 5 - fake_vllm.BLOCK
    assert own + loaded in (own, len(ids) - 5)
    np.testing.assert_array_equal(seen, wanted(stored, (0, 2), ids))
    seen, (own, _) = engine.run(engine.add(stored.prompt(2, 0)))
    assert own == 0  # the prefix too: the salt names the whole plan
    engine.close()


def test_the_users_salt_stays(connector, stored):
    engine = Engine(connector, stored)
    ids = stored.prompt(0)
    for salt in ("a", "b"):
        _, (own, _) = engine.run(engine.add(ids, salt=salt))
        assert own == 0
    engine.close()


@pytest.mark.parametrize("fault", ["flipped", "missing", "removed", "no store"])
def test_what_cannot_be_read_is_computed(connector, stored, fault):
    engine = Engine(connector, stored)
    ids = stored.prompt(1, 2)
    key = stored.key(stored.chunks[2])
    folder = next((stored.folder / "store").rglob(key))
    if fault == "flipped":
        [file] = folder.glob("*/c/0/0/0/0/0")
        bits = bytearray(file.read_bytes())
        bits[len(bits) // 3] ^= 4
        file.write_bytes(bits)
    elif fault == "missing":
        shutil.rmtree(folder)
    elif fault == "removed":
        stored.write(stored.chunks[:2])  # the manifest goes on without it
        time.sleep(1.1)
    else:
        shutil.rmtree(stored.folder / "store")
    request = engine.add(ids, {"spans": stored.spans(1, 2)})
    seen, (own, loaded) = engine.run(request)
    assert (own, loaded) == (0, 0)
    np.testing.assert_array_equal(seen, exact(ids, LAYOUT))
    _, told = engine.end(request)
    reason = {"flipped": "damaged", "no store": "missing"}.get(fault, "missing")
    assert told == {"jaxrag": {"stored": 0, "computed": reason}}
    # Exact pages are found by exact requests only.
    _, (own, _) = engine.run(engine.add(ids, {"off": True}))
    assert own == (len(ids) - 1) // fake_vllm.BLOCK * fake_vllm.BLOCK
    engine.close()


def test_a_store_that_hangs_costs_the_deadline(connector, stored, monkeypatch):
    release = threading.Event()
    read = ChunkStore.get_many

    def hangs(self, *args, **options):
        release.wait(20)
        return read(self, *args, **options)

    monkeypatch.setattr(ChunkStore, "get_many", hangs)
    engine = Engine(connector, stored, extra={"threads": 1, "deadline": 1.0})
    ids = stored.prompt(1)
    for _ in range(2):
        request = engine.add(ids, {"spans": stored.spans(1)})
        _, (_, loaded) = engine.run(request)
        assert loaded == 0
        assert engine.end(request)[1] == {"jaxrag": {"stored": 0, "computed": "late"}}
    release.set()
    monkeypatch.setattr(ChunkStore, "get_many", read)
    seen, (_, loaded) = engine.run(engine.add(ids))
    assert loaded == len(ids) - 5
    np.testing.assert_array_equal(seen, wanted(stored, (1,), ids))
    engine.close()


def test_a_preempted_request_is_loaded_again_from_memory(connector, stored, monkeypatch):
    engine = Engine(connector, stored)
    ids = stored.prompt(0, 1)
    request = engine.add(ids)
    engine.run(request)
    engine.cached.clear()  # its pages went to others
    shutil.rmtree(stored.folder / "store")
    seen, (own, loaded) = engine.run(request)
    assert (own, loaded) == (0, len(ids) - 5)
    np.testing.assert_array_equal(seen, wanted(stored, (0, 1), ids))
    engine.end(request)
    assert not engine.scheduler._fetches._held
    engine.close()


@pytest.mark.parametrize("when", ["planned", "reading", "written"])
def test_a_client_that_leaves_leaves_nothing(connector, stored, when):
    engine = Engine(connector, stored)
    request = engine.add(stored.prompt(0, 1))
    if when == "reading":
        engine.scheduler.get_num_new_matched_tokens(request, 0)
    elif when == "written":
        engine.run(request)
    engine.end(request)
    assert not engine.scheduler._asked
    assert not engine.scheduler._fetches._held
    engine.close()


@pytest.mark.parametrize("params", [{"spans": [1000]}, {"spans": "37"}, {"span": [3]}, 5])
def test_parameters_that_are_none_make_an_exact_request(connector, stored, params):
    engine = Engine(connector, stored)
    request = engine.add(stored.prompt(0), params)
    _, (_, loaded) = engine.run(request)
    assert loaded == 0
    assert engine.end(request)[1] == {"jaxrag": {"stored": 0, "computed": "spans"}}
    engine.close()


@pytest.mark.parametrize(
    "changes", [{"lora_request": 1}, {"mm_features": [1]}, {"skip_reading_prefix_cache": True}]
)
def test_requests_that_are_left_alone(connector, stored, changes):
    engine = Engine(connector, stored)
    request = fake_vllm.Request("r", stored.prompt(0))
    for name, value in changes.items():
        setattr(request, name, value)
    engine.scheduler.on_new_request(request)
    assert request.cache_salt is None
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec": fake_vllm.MLASpec}, ""),
        ({"window": 128}, ""),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
        ({"rope": {"rope_theta": 5000.0}}, ""),
        ({"rope": {"mrope_section": [1]}}, ""),
        ({"rope": {"partial_rotary_factor": 0.5}}, ""),
        ({"device": "cuda"}, "untested_devices"),
        ({"extra": {"manifests": "x"}}, "'manifests'"),
        ({"extra": {"threads": 0}}, "threads=0"),
        ({"extra": {"wanted_bytes": -1}}, "wanted_bytes=-1"),
    ],
)
def test_other_engines_are_refused_in_one_line(connector, stored, changes, said):
    vllm, pages = config_of(stored, **changes)
    with refused(ConfigError, said) as told:
        connector.JaxragConnector(vllm, "worker", pages)
    assert "\n" not in str(told.value)


def test_other_weights_are_refused(connector, stored, monkeypatch, tmp_path):
    fake_vllm.weights_path(stored).write_bytes(b"others")
    with refused(ConfigError):
        connector.JaxragConnector(*Engine._split(config_of(stored)))


def test_what_no_gate_passed_is_refused(connector, stored):
    path = stored.out / "connector.json"
    fields = json.loads(path.read_text())
    del fields["digest"]
    write(path, {**fields, "gates": []})
    with refused(ConfigError):
        connector.JaxragConnector(*Engine._split(config_of(stored)))
    insists = {"require_gate": False}
    connector.JaxragConnector(*Engine._split(config_of(stored, extra=insists))).shutdown()
    # One that was passed with the last chunk computed says nothing of none.
    gate = {"method": "turborag", "compute_last": 1, "questions": 50}
    write(path, {**fields, "gates": [gate]})
    with refused(ConfigError):
        connector.JaxragConnector(*Engine._split(config_of(stored)))
    last = {"compute_last": 1}
    connector.JaxragConnector(*Engine._split(config_of(stored, extra=last))).shutdown()


def test_the_last_chunk_may_be_computed(connector, stored):
    engine = Engine(connector, stored, extra={"compute_last": 1})
    ids = stored.prompt(0, 1)
    seen, (_, loaded) = engine.run(engine.add(ids))
    assert loaded == sum(stored.spans(0))
    np.testing.assert_array_equal(seen, wanted(stored, (0,), ids))
    engine.close()


def test_a_manifest_of_another_model_stops_promises(connector, stored):
    engine = Engine(connector, stored)
    stored.write(stored.chunks, tokenizer="u")
    time.sleep(1.1)
    _, (_, loaded) = engine.run(engine.add(stored.prompt(0)))
    assert loaded == 0
    engine.close()


def test_without_a_manifest_nothing_starts(connector, stored):
    shutil.rmtree(stored.out)
    with refused(StoreError):
        connector.JaxragConnector(*Engine._split(config_of(stored)))


def test_chunks_without_some_of_their_tokens_are_refused(connector, tmp_path):
    stored = drawn(tmp_path)
    stored.write(stored.chunks, layout=dataclasses.replace(LAYOUT, stored="int4-half"))
    with refused(ConfigError):
        connector.JaxragConnector(*Engine._split(config_of(stored)))


@pytest.mark.parametrize(("form", "near"), [("int8", 0.05), ("int4", 0.6)])
def test_chunks_in_fewer_bits(connector, tmp_path, form, near):
    stored = drawn(tmp_path, layout=dataclasses.replace(LAYOUT, stored=form))
    engine = Engine(connector, stored)
    ids = stored.prompt(0, 2)
    seen, (_, loaded) = engine.run(engine.add(ids))
    assert loaded == len(ids) - 5
    np.testing.assert_allclose(seen, wanted(stored, (0, 2), ids), atol=near)
    engine.close()


def test_it_counts_in_the_engine_s_metrics(connector, stored):
    from prometheus_client import CollectorRegistry, Counter

    engine = Engine(connector, stored)
    ids = stored.prompt(0, 1)
    engine.run(engine.add(ids))
    engine.run(engine.add(ids, {"off": True}))
    engine.run(engine.add(ids[::-1]))
    counts = engine.scheduler.get_kv_connector_stats()
    assert engine.scheduler.get_kv_connector_stats() is None
    assert counts.data.pop("seconds") > 0
    loaded = len(ids) - 5
    told = {"requests": 1, "tokens": loaded, "bytes": LAYOUT.nbytes(loaded)}
    assert counts.data == told | {"computed:off": 1, "computed:unknown": 1}
    kind, registry = connector.JaxragConnector, CollectorRegistry()
    types = {"counter": lambda **options: Counter(**options, registry=registry)}
    metrics = kind.build_prom_metrics(None, types, ["engine"], {0: ["0"]})
    metrics.observe(kind.build_kv_connector_stats(dict(counts.data)).aggregate(counts).data)
    found = registry.get_sample_value
    assert found("vllm:jaxrag_tokens_total", {"engine": "0"}) == 2 * loaded
    of = {"engine": "0", "reason": "unknown"}
    assert found("vllm:jaxrag_computed_total", of) == 2
    engine.close()
