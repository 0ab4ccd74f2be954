"""zarr-python opens the exported tree, lists its arrays and reads the store's bits."""

import json

import numpy as np
import pytest

from jaxrag.base.config import DTYPES
from jaxrag.library.export import MANIFEST, KeyPlacement, export_bundles

zarr = pytest.importorskip("zarr")


def export(chunks, config, out):
    return export_bundles(
        chunks.store, chunks.bundles, KeyPlacement(config, None), out, format="zarr"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_root_group_lists_every_chunk(fill, tmp_path, dtype):
    chunks, config = fill(dtype)
    report = export(chunks, config, tmp_path / "out")
    assert (report.files, report.refused) == (3, ())
    root = zarr.open_group(tmp_path / "out" / "chunks.zarr", mode="r")
    assert root.attrs["jaxrag"]["fingerprint"] == chunks.store.fingerprint
    assert {name for name, _ in root.groups()} == {bundle.name for bundle in chunks.bundles}
    arrays = dict(root.members(max_depth=None))
    for bundle, kv in zip(chunks.bundles, chunks.kv, strict=True):
        array = arrays[f"{bundle.name}/kv"]
        assert array.attrs["dtype"] == dtype
        assert array.metadata.dimension_names == ("layer", "kv", "token", "kv_head", "head_dim")
        np.testing.assert_array_equal(array[...].view(kv.dtype), kv)
        record = root[bundle.name].attrs["jaxrag"]
        assert record["token_ids"] == bundle.pieces[0].token_ids.tolist()
        assert record["rope"]["applied"] is False


def test_one_layer_is_read_alone(fill, tmp_path):
    chunks, config = fill()
    export(chunks, config, tmp_path / "out")
    root = zarr.open_group(tmp_path / "out" / "chunks.zarr", mode="r")
    array = root[f"{chunks.bundles[1].name}/kv"]
    assert array.chunks == (1, *chunks.kv[1].shape[1:])
    np.testing.assert_array_equal(array[2, 1].view(chunks.kv[1].dtype), chunks.kv[1][2, 1])


def test_int8_chunks_are_dequantised_and_auxiliary_arrays_go_along(fill, tmp_path):
    aux = {"importance": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)}
    chunks, config = fill("bfloat16", "int8", aux=aux)
    export(chunks, config, tmp_path / "out")
    root = zarr.open_group(tmp_path / "out" / "chunks.zarr", mode="r")
    for bundle in chunks.bundles:
        wanted = chunks.store.get(bundle.name)
        np.testing.assert_array_equal(root[f"{bundle.name}/kv"][...].view(wanted.dtype), wanted)
        group = root[f"{bundle.name}/aux"]
        assert [name for name, _ in group.arrays()] == ["importance"]
        found = group["importance"]
        np.testing.assert_array_equal(found[...].view(found.attrs["dtype"]), aux["importance"])


def test_exporting_again_writes_nothing_and_a_replaced_chunk_is_written_again(fill, tmp_path):
    chunks, config = fill()
    out = tmp_path / "out"
    export(chunks, config, out)
    before = {path: path.stat().st_mtime_ns for path in (out / "chunks.zarr").rglob("*")}
    assert export(chunks, config, out).kept == 3
    assert {path: path.stat().st_mtime_ns for path in (out / "chunks.zarr").rglob("*")} == before
    name, other = chunks.bundles[0].name, np.ascontiguousarray(chunks.kv[0][..., ::-1])
    record = chunks.store.head([name])[0].provenance
    assert chunks.store.put(name, other, record=record, replace=True).won
    assert export(chunks, config, out).kept == 2
    root = zarr.open_group(out / "chunks.zarr", mode="r")
    np.testing.assert_array_equal(root[f"{name}/kv"][...].view(other.dtype), other)


def test_a_failed_write_leaves_no_half_a_chunk(fill, tmp_path, monkeypatch):
    chunks, config = fill()
    out = tmp_path / "out"
    monkeypatch.setattr("jaxrag.library.export.files._write_arrays", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(chunks, config, out)
    assert {path.name for path in out.iterdir()} == {MANIFEST, "chunks.zarr"}
    assert [path.name for path in (out / "chunks.zarr").iterdir()] == ["zarr.json"]
    assert json.loads((out / MANIFEST).read_text())["complete"] is False
    monkeypatch.undo()
    assert export(chunks, config, out).files == 3


def test_a_committed_attempt_of_the_store_itself_opens(fill, tmp_path):
    chunks, _ = fill("bfloat16", ways=2)
    for bundle, kv in zip(chunks.bundles, chunks.kv, strict=True):
        (record,) = chunks.store.head(bundle.keys)
        (attempt,) = (tmp_path / "store-bfloat16-native").glob(f"kv/*/*/*/{record.attempt}")
        array = zarr.open_array(attempt, mode="r")
        np.testing.assert_array_equal(array[...].view(kv.dtype), kv)
        assert array.attrs["rope_applied"] is False
