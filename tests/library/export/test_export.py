"""Exported files hold the store's bytes, or their keys rotated once; whole, or not at all."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
from refusal import refused
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxrag.base.config import DTYPES, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from jaxrag.base.errors import StoreError
from jaxrag.kv.store import content_id
from jaxrag.library.export import MANIFEST, Bundle, ExportedChunk, KeyPlacement, export_bundles

ROPES = {
    "plain": RopeConfig(100.0, 10, False, None),
    "linear": RopeConfig(100.0, 10, False, LinearScaling(2.5)),
    "llama3": RopeConfig(100.0, 10, False, Llama3Scaling(8.0, 1.0, 4.0, 32)),
    "yarn": RopeConfig(100.0, 10, False, YarnScaling(4.0, 64, 8.0, 0.5, 1.139, True)),
    "partial interleaved": RopeConfig(100.0, 6, True, None),
}
ABSENT = "ab" * 20


def manifest_of(folder):
    return json.loads((folder / MANIFEST).read_text())


def metadata_of(path):
    with safe_open(path, "np") as file:
        return json.loads(file.metadata()["jaxrag"])


def heads_first(kv):
    """[L, 2, T, K, H] as {name: [1, K, T, H]}."""
    return {
        f"layers.{layer}.{name}": kv[layer, which].swapaxes(0, 1)[None]
        for layer in range(len(kv))
        for which, name in enumerate(("key", "value"))
    }


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_unrotated_files_hold_the_bytes_of_the_store(fill, tmp_path, dtype):
    chunks, config = fill(dtype)
    report = export_bundles(
        chunks.store, chunks.bundles, KeyPlacement(config, None), tmp_path / "out"
    )
    assert (report.files, report.kept, report.refused) == (3, 0, ())
    for bundle, kv in zip(chunks.bundles, chunks.kv, strict=True):
        path = tmp_path / "out" / "chunks" / f"{bundle.name}.safetensors"
        assert_same_bits(load_file(path), heads_first(kv))
        record = metadata_of(path)
        assert record["token_ids"] == bundle.pieces[0].token_ids.tolist()
        assert record["rope"]["applied"] is False
        assert record["chunks"][0]["content_id"] == chunks.store.head(bundle.keys)[0].content_id


def test_the_manifest_names_every_file_with_its_digest(fill, tmp_path):
    chunks, config = fill()
    documents = [{"id": "a", "chunks": [{"index": 0, "key": chunks.bundles[0].name}]}]
    placement = KeyPlacement(config, None)
    export_bundles(chunks.store, chunks.bundles, placement, tmp_path / "out", documents=documents)
    manifest = manifest_of(tmp_path / "out")
    assert manifest["complete"]
    assert manifest["documents"] == documents
    assert [file["tokens"] for file in manifest["files"]] == [7, 12, 5]
    on_disk = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert on_disk - {tmp_path / "out" / MANIFEST} == {
        tmp_path / "out" / file["path"] for file in manifest["files"]
    }
    for file in manifest["files"]:
        data = (tmp_path / "out" / file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])


@pytest.mark.parametrize("first", [0, 37])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_keys_are_rotated_once_to_their_positions(fill, tmp_path, rotated, rope, first):
    chunks, config = fill("float32", rope=rope)
    export_bundles(chunks.store, chunks.bundles, KeyPlacement(config, first), tmp_path / "out")
    for bundle, kv in zip(chunks.bundles, chunks.kv, strict=True):
        path = tmp_path / "out" / "chunks" / f"{bundle.name}.safetensors"
        found, wanted = load_file(path), kv.astype(np.float64)
        wanted[:, 0] = rotated(kv[:, 0], first, rope)
        for name, array in heads_first(wanted).items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
        record = metadata_of(path)["rope"]
        assert (record["applied"], record["first_position"]) == (True, first)
        assert record["attention_factor_applied"]


def test_every_layer_is_rotated_as_its_kind_is(fill, tmp_path, rotated):
    chunks, plain = fill("float32")
    yarn = YarnScaling(4.0, 32, 8.0, 0.5, 1.7, True)
    more = (dataclasses.replace(plain.rope, theta=7.0, scaling=yarn),)
    layers = tuple(i % 2 for i in range(plain.num_layers))
    config = dataclasses.replace(plain, more_ropes=more, rope_layers=layers)
    export_bundles(chunks.store, chunks.bundles[:1], KeyPlacement(config, 3), tmp_path / "out")
    (path,) = (tmp_path / "out" / "chunks").iterdir()
    found, kv = load_file(path), chunks.kv[0]
    for layer in range(plain.num_layers):
        wanted = rotated(kv[layer : layer + 1, 0], 3, config.rope_of(layer))[0].swapaxes(0, 1)
        np.testing.assert_allclose(found[f"layers.{layer}.key"][0], wanted, 1e-4, 1e-5)
    record = metadata_of(path)["rope"]
    assert (record["theta"], record["more_ropes"][0]["theta"]) == (plain.rope.theta, 7.0)
    assert record["rope_layers"] == list(layers)
    assert record["attention_factor"] == 1
    assert record["more_ropes"][0]["scaling"]["attention_factor"] == 1.7


def test_bfloat16_keys_are_rounded_once(fill, tmp_path, rotated):
    chunks, config = fill("bfloat16", rope=ROPES["yarn"])
    export_bundles(chunks.store, chunks.bundles[:1], KeyPlacement(config, 90), tmp_path / "out")
    (path,) = (tmp_path / "out" / "chunks").iterdir()
    kv = chunks.kv[0]
    wanted = rotated(kv[:, 0], 90, config.rope).astype(np.float32).astype(kv.dtype)
    found = np.stack([load_file(path)[f"layers.{i}.key"][0].swapaxes(0, 1) for i in range(len(kv))])
    different = found.view(np.uint16) != wanted.view(np.uint16)
    assert different.mean() < 0.01  # float32 rotation next to a rounding boundary


def test_a_prompt_is_its_chunks_side_by_side_even_twice(fill, tmp_path, rotated):
    chunks, config = fill("float32")
    prompt = chunks.joined(1, 0, 1)
    export_bundles(chunks.store, [prompt], KeyPlacement(config, 0), tmp_path / "out")
    path = tmp_path / "out" / "chunks" / "prompt.safetensors"
    kv = np.concatenate([chunks.kv[i] for i in (1, 0, 1)], axis=2).astype(np.float64)
    kv[:, 0] = rotated(kv[:, 0], 0, config.rope)
    for name, array in heads_first(kv).items():
        np.testing.assert_allclose(load_file(path)[name], array, rtol=1e-4, atol=1e-5)
    record = metadata_of(path)
    assert [chunk["first_token"] for chunk in record["chunks"]] == [0, 12, 19]
    assert len(record["token_ids"]) == record["tokens"] == 31


def test_lmcache_has_one_tensor_of_all_layers(fill, tmp_path, rotated):
    chunks, config = fill("float32")
    placement = KeyPlacement(config, 0)
    export_bundles(chunks.store, chunks.bundles, placement, tmp_path / "out", format="lmcache")
    for bundle, kv in zip(chunks.bundles, chunks.kv, strict=True):
        tensors = load_file(tmp_path / "out" / "chunks" / f"{bundle.name}.safetensors")
        assert list(tensors) == ["kv"]
        layers, _, tokens, heads, dim = kv.shape
        assert tensors["kv"].shape == (2, layers, tokens, heads * dim)
        shaped = tensors["kv"].reshape(2, layers, tokens, heads, dim)
        assert shaped[1].tobytes() == np.ascontiguousarray(kv[:, 1]).tobytes()
        np.testing.assert_allclose(shaped[0], rotated(kv[:, 0], 0, config.rope), 1e-4, 1e-5)


def test_exporting_again_writes_nothing(fill, tmp_path):
    chunks, config = fill()
    placement, out = KeyPlacement(config, 3), tmp_path / "out"
    first = export_bundles(chunks.store, chunks.bundles, placement, out)
    before = {path: path.stat().st_mtime_ns for path in (out / "chunks").iterdir()}
    manifest = manifest_of(out)
    again = export_bundles(chunks.store, chunks.bundles, placement, out)
    assert (again.files, again.kept, again.nbytes) == (first.files, 3, first.nbytes)
    assert {path: path.stat().st_mtime_ns for path in (out / "chunks").iterdir()} == before
    assert manifest_of(out) == manifest


def test_an_export_that_was_cut_short_goes_on(fill, tmp_path, monkeypatch):
    chunks, config = fill()
    placement, out = KeyPlacement(config, None), tmp_path / "out"

    class Killed(BaseException):
        pass

    real, reads = chunks.store.get_many, []

    def dies_at_the_third(keys, *arguments, **options):
        reads.append(keys)
        if len(reads) == 3:
            raise Killed
        return real(keys, *arguments, **options)

    monkeypatch.setattr(chunks.store, "get_many", dies_at_the_third)
    with pytest.raises(Killed):
        export_bundles(chunks.store, chunks.bundles, placement, out)
    assert manifest_of(out)["complete"] is False
    assert len(list((out / "chunks").iterdir())) == 2
    report = export_bundles(chunks.store, chunks.bundles, placement, out)
    assert (report.files, report.kept) == (3, 2)
    for bundle, kv in zip(chunks.bundles, chunks.kv, strict=True):
        assert_same_bits(load_file(out / "chunks" / f"{bundle.name}.safetensors"), heads_first(kv))


def test_a_replaced_or_shortened_file_is_written_again(fill, tmp_path):
    chunks, config = fill()
    placement, out = KeyPlacement(config, None), tmp_path / "out"
    export_bundles(chunks.store, chunks.bundles, placement, out)
    paths = [out / "chunks" / f"{bundle.name}.safetensors" for bundle in chunks.bundles]
    whole = [path.read_bytes() for path in paths]
    paths[0].write_bytes(whole[0][:-1])
    paths[1].write_bytes(b"something else")
    report = export_bundles(chunks.store, chunks.bundles, placement, out)
    assert report.kept == 1
    assert [path.read_bytes() for path in paths] == whole


def test_a_missing_and_a_damaged_chunk_do_not_stop_the_others(fill, tmp_path):
    chunks, config = fill()
    directory = tmp_path / "store-bfloat16-native"
    (shard,) = directory.glob(f"kv/*/*/{chunks.bundles[1].name}/*/c/0/0/0/0/0")
    damaged = bytearray(shard.read_bytes())
    damaged[5] ^= 1
    shard.write_bytes(damaged)
    bundles = [Bundle(ABSENT, (ExportedChunk(ABSENT, None),)), *chunks.bundles]
    report = export_bundles(chunks.store, bundles, KeyPlacement(config, None), tmp_path / "out")
    assert report.files == 2
    assert [name for name, _ in report.refused] == [ABSENT, chunks.bundles[1].name]
    manifest = manifest_of(tmp_path / "out")
    assert [entry["name"] for entry in manifest["refused"]] == [ABSENT, chunks.bundles[1].name]
    assert "xxh3" in manifest["refused"][1]["reason"]
    assert len(list((tmp_path / "out" / "chunks").iterdir())) == 2


def test_token_ids_of_another_chunk_are_refused(fill, tmp_path):
    chunks, config = fill()
    key, ids = chunks.bundles[0].name, np.zeros(7, np.int32)
    short = Bundle("short", (ExportedChunk(key, ids[:6]),))
    other = Bundle("other", (ExportedChunk(key, ids, content_id("tok", ids)),))
    placement = KeyPlacement(config, None)
    report = export_bundles(chunks.store, [short, other], placement, tmp_path / "out")
    assert report.files == 0
    reasons = dict(report.refused)
    assert "holds 7 tokens, expected 6" in reasons["short"]
    assert "holds the content" in reasons["other"]


def test_what_cannot_be_exported_is_refused_before_anything_is_written(fill, tmp_path):
    chunks, config = fill()
    out = tmp_path / "out"

    for first, options, named in (
        (None, {"format": "gguf"}, "format='gguf'"),
        (None, {"format": "lmcache"}, "position"),
        (0, {"format": "zarr"}, "RoPE"),
        (-1, {}, "first_position=-1"),
        (512, {}, "first_position=512"),
    ):
        with refused(StoreError, named):
            export_bundles(
                chunks.store, chunks.bundles, KeyPlacement(config, first), out, **options
            )
        assert not out.exists()
    with refused(StoreError, "12"):  # tokens behind the last position
        export_bundles(chunks.store, chunks.bundles, KeyPlacement(config, 501), out)


def test_a_folder_of_another_export_or_with_something_else_is_refused(fill, tmp_path):
    chunks, config = fill()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    export_bundles(chunks.store, chunks.bundles, KeyPlacement(config, None), tmp_path / "out")
    for name, first, format in (
        ("out", 4, "safetensors"), ("out", None, "zarr"), ("other", None, "safetensors"),
        ("file", None, "safetensors"),
    ):  # fmt: skip
        placement = KeyPlacement(config, first)
        with refused(StoreError):
            export_bundles(chunks.store, chunks.bundles, placement, tmp_path / name, format=format)


def test_two_exports_to_one_folder_do_not_mix(fill, tmp_path, monkeypatch):
    chunks, config = fill()
    placement, out = KeyPlacement(config, None), tmp_path / "out"
    real, second = chunks.store.get_many, []

    def another_begins(keys, *arguments, **options):
        with refused(StoreError):
            export_bundles(chunks.store, chunks.bundles, placement, out)
        second.append(keys)
        return real(keys, *arguments, **options)

    monkeypatch.setattr(chunks.store, "get_many", another_begins)
    assert export_bundles(chunks.store, chunks.bundles, placement, out).files == len(second) == 3


def test_a_deep_manifest_is_that_of_another_export(fill, tmp_path):
    chunks, config = fill()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST).write_text('{"a":' + "[" * 100_000)
    with refused(StoreError):
        export_bundles(chunks.store, chunks.bundles, KeyPlacement(config, None), tmp_path / "out")
