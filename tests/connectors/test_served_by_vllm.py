"""vLLM's server with the connector, over HTTP: `make test-vllm VLLM_PYTHON=...`."""

import dataclasses
import http.client
import json
import os
import re
import socket
import subprocess
import time

import pytest
from test_in_vllm import CONFIG, ROOT

import jaxrag
from jaxrag.base.installed import config_path
from jaxrag.measure.bench.serve_peer import end, until_ready
from jaxrag.models.export import export_hf
from jaxrag.models.model import random_model
from jaxrag.models.reading import Reading
from jaxrag.models.text import byte_level
from jaxrag.serve.connector import write_connector

pytestmark = pytest.mark.vllm
PASTED = [
    f"The {name} of the {ordinal} river. " + " ".join(
        f"In {1900 + 9 * at + year} they ate {year} fish and slept {year + at} hours."
        for year in range(5)
    )
    for at, (name, ordinal) in enumerate(
        zip(("otters", "herons", "minks"), ("first", "second", "third"), strict=True)
    )
]  # fmt: skip
CHAT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}<|assistant|>\n"


@pytest.fixture
def base(tmp_path):
    """A knowledge base without documents, of a model that reads blocks and chats."""
    specials = ["<pad>", "<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>"]
    settings = {
        "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "chat_template": CHAT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    words = byte_level.train([*PASTED, "Use these. What do they eat?"], 600, specials)
    (tmp_path / "tokenizer").mkdir()
    byte_level.save(words, tmp_path / "tokenizer", settings)
    config = dataclasses.replace(CONFIG, vocab_size=600)
    params = random_model(config, 3).params
    export_hf(
        tmp_path / "model", params, config, tmp_path / "tokenizer", reading=Reading(("reordered",))
    )
    model = jaxrag.load_model(tmp_path / "model", dtype="float32")
    with jaxrag.KnowledgeBase.open(tmp_path / "kb", model=model, template="plain") as kb:
        yield kb


@pytest.fixture
def serve(tmp_path):
    """Starts vLLM's server on a folder of the connector; returns its port."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("set VLLM_PYTHON to a python with vLLM for CPUs")
    started = []

    def start(**extra):
        connector = {
            "kv_connector": "JaxragConnector",
            "kv_connector_module_path": "jaxrag.connectors.vllm",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"manifest": str(tmp_path / "manifest"), **extra},
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [
            os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model",
            tmp_path / "model", "--served-model-name", "model", "--host", "127.0.0.1", "--port",
            str(port), "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager",
            "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector),
        ]  # fmt: skip
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1",
        }  # fmt: skip
        log = tmp_path / "messages.txt"
        with log.open("wb") as messages:
            process = subprocess.Popen(
                words, stdout=messages, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path,
                start_new_session=True,
            )  # fmt: skip
        started.append(process)
        until_ready(process, f"http://127.0.0.1:{port}", log)
        return port

    yield start
    for process in started:
        end(process)


def asked(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        given = None if body is None else json.dumps(body)
        connection.request(method, path, given, {"Content-Type": "application/json"})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def metrics(port):
    """The connector's counters, by name and reason."""
    found = {}
    for name, labels, value in re.findall(
        r"^vllm:jaxrag_(\w+)_total\{(.*)\} (\S+)$", asked(port, "GET", "/metrics"), re.MULTILINE
    ):
        reason = re.search(r'reason="(\w+)"', labels)
        found[name + (f":{reason[1]}" if reason else "")] = float(value)
    return found


def test_a_chat_with_pasted_passages_and_what_vllm_counts(base, serve, tmp_path):
    """Cold, noted, encoded while the server runs, and warm; /metrics says each."""
    rules = tmp_path / "rules.toml"
    common = config_path("common", "passages").read_text()
    rules.write_text(common.replace("worth = 1024 ", "worth = 100 "))
    out = tmp_path / "manifest"
    write_connector(base, out, serve=tmp_path / "model")
    port = serve(wanted_bytes=100_000)

    def chat(order, **more):
        sources = "\n".join(
            f'<source id="{number}">\n{PASTED[at]}\n</source>' for number, at in enumerate(order, 1)
        )
        messages = [
            {"role": "system", "content": "Use these."},
            {"role": "user", "content": f"{sources}\nWhat do they eat?"},
        ]
        body = {"model": "model", "messages": messages, "temperature": 0, "max_tokens": 8}
        said = json.loads(asked(port, "POST", "/v1/chat/completions", body | more))
        details = said["usage"]["prompt_tokens_details"] or {}
        return said, details.get("cached_tokens") or 0

    told = {"kv_transfer_params": {"jaxrag": {}}}
    _, cached = chat((0, 1, 2))
    assert cached == 0
    report = write_connector(base, out, serve=tmp_path / "model", passage_rules=str(rules))
    assert report.encoded == report.noted >= 6
    time.sleep(1.5)  # the folder is looked at once a second
    warm, cached = chat((2, 0, 1), **told)
    stored = warm["kv_transfer_params"]["jaxrag"]["stored"]
    assert stored == cached > 0.8 * warm["usage"]["prompt_tokens"]
    off, cached = chat((2, 0, 1), kv_transfer_params={"jaxrag": {"off": True}})
    assert cached == 0
    until = time.monotonic() + 20  # vLLM gives its counts away from time to time
    while (counted := metrics(port)).get("requests") is None and time.monotonic() < until:
        time.sleep(0.2)
        chat((2, 0, 1), **told)
    nbytes = base.store.layout.nbytes(stored)
    assert counted["requests"] >= 1
    assert counted["tokens"] == stored * counted["requests"]
    assert counted["bytes"] == nbytes * counted["requests"]
    assert counted["seconds"] > 0
    assert counted["computed:unknown"] == counted["computed:off"] == 1
    assert off["usage"]["prompt_tokens"] == warm["usage"]["prompt_tokens"]
