"""What starts replicas on a cluster: KubeRay's manifests, and Slurm's job."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxrag.cli import PROGRAM
from jaxrag.cli.command import parse

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "scripts" / "cluster"
KUBERAY = CLUSTER / "kuberay"


@pytest.fixture
def cluster():
    return yaml.safe_load((KUBERAY / "raycluster.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def network():
    text = (KUBERAY / "network.yaml").read_text(encoding="utf-8")
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def test_volumes_that_are_mounted_are_there(cluster):
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        [container] = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_head_serves_with_as_many_engines_as_there_are_workers(cluster):
    [container] = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    [script] = container["args"]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    command = re.search(r"jaxrag (serve .*?);", script)[1]
    args = parse(PROGRAM, shlex.split(command))
    [workers] = cluster["spec"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert args.replicas == workers["replicas"] == workers["maxReplicas"]
    assert args.replica_gpus == limits["nvidia.com/gpu"]
    assert args.keys and (args.host, args.port) == ("0.0.0.0", 8000)
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {args.tier, str(Path(args.keys).parent), str(Path(args.kb[0]).parent)} <= mounts
    # KubeRay starts Ray by what the script runs, in place of a command of its own.
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    assert "$KUBERAY_GEN_RAY_START_CMD" in script


def test_only_the_http_port_is_open_to_all(cluster, network):
    [port] = network["Service"]["spec"]["ports"]
    assert port["targetPort"] == 8000
    selector = network["Service"]["spec"]["selector"]
    assert selector == {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}
    policy = network["NetworkPolicy"]["spec"]
    labels = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert policy["podSelector"]["matchLabels"] == labels and policy["policyTypes"] == ["Ingress"]
    open_to_all = [rule["ports"] for rule in policy["ingress"] if "from" not in rule]
    assert open_to_all == [[{"protocol": "TCP", "port": 8000}]]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}


def test_the_kustomization_takes_every_file_and_the_image(cluster):
    found = yaml.safe_load((KUBERAY / "kustomization.yaml").read_text(encoding="utf-8"))
    files = {path.name for path in KUBERAY.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(found["resources"]) == files
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    images = {it["template"]["spec"]["containers"][0]["image"] for it in groups}
    assert images == {it["name"] for it in found["images"]}


def test_slurm_starts_ray_on_every_node_and_the_server_again(tmp_path):
    log = tmp_path / "log"
    programs = {
        "bin/srun": 'while [[ "$1" == --* ]]; do echo "srun $1" >>"$LOG"; shift; done; "$@"',
        "bin/hostname": "echo node7",
        "bin/sleep": ":",
        ".venv/bin/ray": 'printf "ray %s\\n" "$*" >>"$LOG"; echo "$RAY_AUTH_TOKEN" >>"$LOG.token"',
        ".venv/bin/jaxrag": 'echo "$(printf "%q " "$@")" >>"$LOG"\n'
        'until grep -q -- --block "$LOG"; do :; done; [ "$(grep -c ^serve "$LOG")" -ge 2 ]',
    }
    for path, text in programs.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / path).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_NNODES": "3",
    }
    command = ["bash", str(CLUSTER / "replicas.slurm"), "a kb", "--replicas", "16"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=600)
    lines = log.read_text().splitlines()
    assert lines.count("ray start --head --node-ip-address node7 --port 6379") == 1
    assert lines.count("ray start --address node7:6379 --block") == 1
    assert {"srun --nodes=2", "srun --ntasks=2", "srun --exclude=node7"} <= set(lines)
    served = [parse(PROGRAM, shlex.split(it)) for it in lines if it.startswith("serve")]
    assert len(served) == 2  # the first ended with an error
    assert {(it.kb[0], it.replicas, it.ray_address) for it in served} == {
        ("a kb", 16, "node7:6379")
    }
    assert lines[-1] == "ray stop"
    [token] = set((tmp_path / "log.token").read_text().split())
    assert re.fullmatch("[0-9a-f]{64}", token)
