"""Stored chunks, and the connector with stand-ins for what it imports."""

import importlib
import sys

import fake_vllm
import pytest
from stored_chunks import drawn


@pytest.fixture
def stored(tmp_path):
    return drawn(tmp_path)


@pytest.fixture
def connector(monkeypatch):
    """The connector's module, with stand-ins for vLLM and torch."""
    fake_vllm.install(monkeypatch)
    for name in ("counts", "vllm"):
        monkeypatch.delitem(sys.modules, f"jaxrag.connectors.{name}", raising=False)
    module = importlib.import_module("jaxrag.connectors.vllm")
    yield module
    for name in ("counts", "vllm"):
        sys.modules.pop(f"jaxrag.connectors.{name}", None)
