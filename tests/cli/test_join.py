"""Processes that cannot come together end with one line, before a model is read."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("join_program.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def joining():
    """``joining(seconds, *options)`` starts a process; it is killed at the end."""
    started = []

    def start(seconds, *options):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, PROGRAM, str(seconds), *options]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, env=environment))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def rank(port, number, processes=2):
    return (
        *("--coordinator", f"127.0.0.1:{port}"),
        *("--processes", str(processes), "--process-id", str(number)),
    )


def refused(process):
    """Its one line; it ended with code 1."""
    [line] = process.communicate(timeout=200)[1].decode().splitlines()
    assert process.returncode == 1
    assert line.startswith("jaxrag: error: ")
    return line


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
def test_two_leaders(joining, port):
    """One has the port, and waits for the others; the other ends at once."""
    both = [joining(30, *rank(port, 0)) for _ in range(2)]
    lines = sorted(map(refused, both))
    assert "all 2 processes did not come within 30 s" in lines[1]
    assert "its port is taken, by another process 0" in lines[0]


def test_a_port_that_another_program_has(joining):
    with socket.create_server(("", 0)) as server:
        assert "its port is taken" in refused(joining(30, *rank(server.getsockname()[1], 0)))


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nobody_else_comes(joining, port, number):
    line = refused(joining(1, *rank(port, number)))
    assert "all 2 processes did not come within 1 s; start all of them" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ((2, 3), "--processes 3: the first process counts 2; start all with the same number"),
        ((3, 2), "all 3 processes did not come within 10 s"),
    ],
)
def test_unequal_numbers_of_processes(joining, port, counts, why):
    """Whoever was told three says why it ends; the other may have gone on."""
    both = [joining(10, *rank(port, at, count)) for at, count in enumerate(counts)]
    three = both[counts.index(3)]
    assert why in refused(three)


def test_a_rank_beyond_the_number(joining, port):
    assert "process_id < num_processes" in refused(joining(30, *rank(port, 2)))
