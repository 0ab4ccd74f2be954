"""benchmarks/away.py: what is measured of K and V in host memory, at a small size."""

import json

import pytest
from away import main


@pytest.mark.slow
def test_a_small_context(tmp_path, capsys):
    out = tmp_path / "away.json"
    main([
        "--context", "2048", "--question", "512", "--steps", "4", "--out", str(out), "--rules",
        "retrieval:k=20,sink=16,recent=64,index=lists,index.exact_below=0;flat:k=20,sink=16,recent=64",
    ])  # fmt: skip
    result = json.loads(out.read_text())
    dense, drawn, flat, random = result["rows"]
    assert (dense["rule"], dense["kv"], flat["kv"]) == ("dense", "device", "host")
    assert (drawn["heads"], random["heads"]) == ("generated", "random")
    for row in (drawn, flat, random):
        assert row["device_bytes"] < dense["device_bytes"] / 5
        assert row["host_bytes"] >= row["host_kv_bytes"] == result["kv_bytes"]
        spent = row["host_seconds_a_step"]
        assert spent["elapsed"] >= spent["waited"] >= 0 and spent["attend"] > 0
        assert row["prefill_peak_bytes"] > 0
    for row in (drawn, random):
        assert 0 < row["index"]["recall"] <= 1
        assert 0 < row["index"]["scanned"] <= 1.2  # centroids of lists count
    assert "hidden" in capsys.readouterr().out
