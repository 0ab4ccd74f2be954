"""The files of scripts/cluster start commands that exist, each process with its own part."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxrag.cli import PROGRAM
from jaxrag.cli.command import parse

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "scripts" / "cluster"
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do
    [[ "$1" == --ntasks=1 ]] && SLURM_NTASKS=1
    shift
done
export SLURM_NTASKS
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i "$@" || exit; done
"""
JAXRAG = """#!/bin/bash
printf '%q ' "$@" >>"$COMMANDS"
echo >>"$COMMANDS"
"""


def started(tmp_path, name, *arguments):
    """What the file starts with two processes: the arguments of jaxrag, parsed."""
    for path, text in {"bin/srun": SRUN, ".venv/bin/jaxrag": JAXRAG}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    commands = tmp_path / "commands"
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "COMMANDS": str(commands),
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "1",
    }
    subprocess.run(
        ["bash", CLUSTER / name, *arguments], cwd=tmp_path, env=environment, check=True, timeout=600
    )
    lines = commands.read_text().splitlines()
    return [parse(PROGRAM, shlex.split(line)) for line in lines]


def test_ingest_is_shared_and_one_process_ends_it(tmp_path):
    runs = started(tmp_path, "ingest.slurm", "my docs", "kb", "--model", "a model")
    assert [run.shard for run in runs] == ["0/2", "1/2", None]
    assert all(run.paths == ("my docs",) and run.kb == "kb" for run in runs)
    assert all(run.model == "a model" for run in runs)


def test_generate_shares_the_questions(tmp_path):
    runs = started(tmp_path, "generate.slurm", "nq.jsonl", "my answers", "--kb", "a kb")
    assert [run.shard for run in runs] == ["0/2", "1/2"]
    assert [run.out for run in runs] == ["my answers.0.jsonl", "my answers.1.jsonl"]
    assert all(run.questions == "nq.jsonl" and run.kb == "a kb" for run in runs)
    assert not any(run.distributed for run in runs)


def test_generate_with_one_model_makes_one_file(tmp_path):
    given = ("nq.jsonl", "answers.jsonl", "--kb", "kb", "--distributed")
    runs = started(tmp_path, "generate.slurm", *given)
    assert {(run.out, run.shard, run.distributed) for run in runs} == {
        ("answers.jsonl", "0/1", True)
    }
    assert len(runs) == 2


def test_train_and_serve_run_as_one(tmp_path):
    (train, _) = started(tmp_path, "train.slurm", "a.toml", "runs/a", "optimizer.lr=1e-4")
    assert (train.config, train.set, train.distributed) == ("a.toml", ("optimizer.lr=1e-4",), True)
    (tmp_path / "commands").unlink()
    (serve, _) = started(tmp_path, "serve.slurm", "kb", "--keys", "keys.toml")
    assert (serve.kb, serve.keys, serve.distributed) == (("kb",), "keys.toml", True)


def secure(pod):
    """No root, nothing beyond it, and a share of the machine that is asked for."""
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        own = container["securityContext"]
        assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


def test_pods_of_a_ray_cluster_are_no_roots():
    cluster = yaml.safe_load((CLUSTER / "kuberay/raycluster.yaml").read_text())["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        secure(group["template"]["spec"])


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*.yaml")), ids=lambda path: path.name)
def test_pods_run_a_command_that_exists(path):
    """As many pods as processes, and pod 0 is the coordinator that the others are told."""
    parts = {part["kind"]: part for part in yaml.safe_load_all(path.read_text())}
    job = parts.get("Job") or parts["StatefulSet"]
    pods = job["spec"].get("completions") or job["spec"]["replicas"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (line,) = container["args"]
    words = shlex.split(line)
    assert words[:2] == ["exec", "jaxrag"]
    args = parse(PROGRAM, ["0" if word.startswith("$") else word for word in words[2:]])
    assert args.distributed and args.processes == pods
    name = job["metadata"]["name"]
    domain = job["spec"].get("serviceName") or job["spec"]["template"]["spec"]["subdomain"]
    assert args.coordinator.startswith(f"{name}-0.{domain}:")
    secure(job["spec"]["template"]["spec"])
    if "StatefulSet" in parts:
        probes = {it: container[f"{it}Probe"] for it in ("startup", "liveness", "readiness")}
        asked = {it: probe["exec"]["command"][-1] for it, probe in probes.items()}
        assert all(it.startswith('test "$RANK" != 0 ||') for it in asked.values())
        paths = {it: text.rpartition("8000")[2].removesuffix("')\"") for it, text in asked.items()}
        # /health is 200 while it loads and compiles
        assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
        assert probes["startup"]["failureThreshold"] * probes["startup"]["periodSeconds"] >= 3600
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
