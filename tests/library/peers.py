"""Where tests that compare with another library find it."""

import importlib.util
import os
import sys

import pytest


def peer_python(*modules):
    """This interpreter where it has them, or that of PEER_PYTHON; else the test is skipped."""
    if all(importlib.util.find_spec(name) for name in modules):
        return sys.executable
    if "PEER_PYTHON" in os.environ:
        return os.environ["PEER_PYTHON"]
    pytest.skip(f"{', '.join(modules)} are not importable; set PEER_PYTHON to a python with them")
