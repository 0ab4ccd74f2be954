"""What every test shares: eight CPU devices, full matmul precision, a small odd-sized config."""

import ctypes
import dataclasses
import gc
import json
import logging
import os
import shutil
import signal
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Inherited by the subprocesses of the tests. Most of the time of a test is XLA's, which compiles
# programs that run once: without LLVM's optimisations, an MLIR context for each fused kernel and an
# LLVM module for each few, it takes a fifth as long. A scatter stays one: of a single update XLA
# makes a read, a choice and a write, for which the emitters without MLIR copy the whole pool.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAXRAG_FORMS"] = "default"  # no test depends on what was measured on a machine
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # Faiss's threads spin while they wait for work
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        " --xla_cpu_parallel_codegen_split_count=1 --xla_disable_hlo_passes=scatter_expander"
    )

import hypothesis
import jax
import numpy as np
import pytest

import jaxrag.cli.waiting
from jaxrag.base.config import (
    ExpertsConfig,
    InParts,
    LinearScaling,
    ModelConfig,
    NoRotation,
    RopeConfig,
    YarnScaling,
)
from jaxrag.base.recurrent import RecurrentConfig
from jaxrag.cli import main
from jaxrag.measure.zoo import llama
from jaxrag.models.export import export_hf
from jaxrag.models.model import Model, load_model
from jaxrag.models.reading import Reading
from jaxrag.models.spec import init_params
from jaxrag.models.text import byte_level
from jaxrag.models.text.prompts import TEMPLATES, template_named
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.tasks.long.case import Frame

jaxrag.cli.waiting.AFTER = float("inf")  # how long a test compiles decides nothing that it sees

# The same examples in every run, however slow the machine: no test fails by chance.
hypothesis.settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")

# Tracing makes a million objects that live on; at the usual threshold of 700 new ones, to look for
# garbage among them is a thirtieth of a run.
gc.set_threshold(50_000, 10, 10)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")

CONFIGS = Path(__file__).parents[1] / "configs"
BLOCKWISE = Reading(("reordered", "composite"))  # it goes without a note
SLOW = Path(__file__).with_name("slow.txt")
PROCESS, MEMORY = Path("/proc/self"), Path("/proc/meminfo")  # Linux
MOST_MAPS = 20_000  # of the 65,530 that Linux lets a process have
MOST_BYTES, MOST_WITHIN = 1_200_000_000, 1_600_000_000  # resident between two files, and two tests
MOST_MORE = 500_000_000  # than was resident when programs had been forgotten
A_WORKER = 3_000_000_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """--data-dir, for tests that read the data sets' own files."""
    said = "folder with the data sets' own files, which are not in the repository"
    parser.addoption("--data-dir", type=Path, metavar="DIR", help=said)


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what tests/slow.txt names; the names in files that are collected whole and lack them."""
    slow = set(SLOW.read_text(encoding="utf-8").splitlines())
    files = {item.nodeid.split("::")[0] for item in items if not config.getoption("lf", False)}
    gone = {it for it in slow if it.split("::")[0] in files} - {item.nodeid for item in items}
    config.slow_without_test = gone if not any("::" in it for it in config.args) else set()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def pytest_xdist_auto_num_workers() -> int:
    """A worker for each core that has the memory a worker needs."""
    if not MEMORY.exists():
        return os.cpu_count() or 1
    lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    return max(1, min(len(os.sched_getaffinity(0)), free // A_WORKER))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget compiled programs before they use up the memory, or the maps: compiling crashes."""
    if not (PROCESS / "statm").exists():
        return
    ends = nextitem is None or nextitem.path != item.path or item.get_closest_marker("slow")
    # What stays once they are forgotten may be more than all that: it is no reason to forget again.
    full = resident() > max(MOST_BYTES if ends else MOST_WITHIN, left[-1] + MOST_MORE)
    if full or (ends and (PROCESS / "maps").read_bytes().count(b"\n") > MOST_MAPS):
        jax.clear_caches()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc keeps what was freed
            libc.malloc_trim(0)
        left.append(resident())


def resident() -> int:
    """Bytes of this process in memory."""
    return int((PROCESS / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


left = [0]  # what was resident each time that programs had been forgotten


# No two sizes are equal, N * H != D and no constant is a common default, so that a swapped axis or
# a forgotten field changes the numbers.
TINY = llama(
    vocab_size=101, num_layers=3, model_dim=24, mlp_dim=40, num_heads=6, num_kv_heads=2,
    head_dim=10, norm_eps=3e-5, theta=5_300.0, max_positions=512, tie_embeddings=False,
)  # fmt: skip
GLM_ROPE = RopeConfig(theta=5_300.0, rotary_dim=6, interleaved=True, scaling=None)
SCALES = {
    "embedding_scale": 1.7, "attention_scale": 0.21, "residual_scale": 0.6, "logit_scale": 1 / 3,
}  # fmt: skip
OLMO = {"qk_norm": True, "joint_qk_norm": True, "post_norms": True, "pre_norms": False}
DELTA_NET = RecurrentConfig((True, False, True), 2, 6, key_dim=5, value_dim=7, width=4)
HYBRID: dict[str, Any] = {
    "qk_norm": True, "unit_norms": True, "output_gate": True, "recurrent": DELTA_NET,
    "rope": RopeConfig(5_300.0, 6, False, None),
}  # fmt: skip
FAMILY_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True},
    "gemma2": {
        "post_norms": True,
        "unit_norms": True,
        "activation": "gelu_tanh",
        "tie_embeddings": True,
        "embedding_scale": 24**0.5,
        "attention_scale": 13**-0.5,
        "score_cap": 1.3,
        "logit_cap": 6.0,
    },
    "gemma3": {
        "qk_norm": True,
        "post_norms": True,
        "unit_norms": True,
        "activation": "gelu_tanh",
        "tie_embeddings": True,
        "embedding_scale": 24**0.5,
        "attention_scale": 13**-0.5,
        "rope": RopeConfig(5_300.0, 10, False, LinearScaling(3.0)),
        "more_ropes": (RopeConfig(90.0, 10, False, None),),
    },
    "gemma4": {
        "qk_norm": True,
        "value_norm": True,
        "post_norms": True,
        "wide_norms": True,
        "layer_scales": True,
        "activation": "gelu_tanh",
        "tie_embeddings": True,
        "head_dim": 12,
        "embedding_scale": 24**0.5,
        "attention_scale": 1.0,
        "logit_cap": 6.0,
        "rope": RopeConfig(5_300.0, 12, False, InParts(1, 2)),
        "more_ropes": (RopeConfig(90.0, 12, False, InParts(2, 3)),),
    },
    "mixtral": {"experts": ExpertsConfig(count=5, active=2, normalise=True)},
    "qwen3_moe": {"qk_norm": True, "experts": ExpertsConfig(count=6, active=3, normalise=False)},
    "qwen3_next": {
        **HYBRID,
        "recurrent": dataclasses.replace(DELTA_NET, fused=True),
        "experts": ExpertsConfig(count=6, active=3, normalise=False, shared=11),
    },
    "qwen3_5": HYBRID,
    "qwen3_5_moe": {
        **HYBRID,
        "experts": ExpertsConfig(count=5, active=2, normalise=True, shared=9),
    },
    "gpt_oss": {
        "sink_logits": True,
        "experts": ExpertsConfig(5, 2, True, router_bias=True, clamp=(1.3, 0.9)),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "sliding_window": 7,
        "window_layers": (True, False, True),
    },
    "glm": {"qkv_bias": True, "rope": GLM_ROPE},
    "glm4": {"qkv_bias": True, "post_norms": True, "rope": GLM_ROPE},
    "granite": SCALES,
    "granite4": SCALES,
    "olmo2": OLMO,
    "olmo3": {
        **OLMO,
        "rope": RopeConfig(5_300.0, 10, False, YarnScaling(4.0, 32, 8.0, 0.5, 1.7, True)),
        "more_ropes": (RopeConfig(90.0, 10, False, None),),
    },
    "smollm3": {"more_ropes": (RopeConfig(5_300.0, 10, False, NoRotation()),)},
}


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """``tiny_config(family="llama", **changes)``: a ModelConfig small enough for any test."""

    def make(family: str = "llama", **changes: Any) -> ModelConfig:
        if family in ("gemma2", "gemma3", "gemma4", "olmo3"):
            local = [layer != 1 for layer in range(changes.get("num_layers", TINY.num_layers))]
            kinds: dict[str, Any] = {"sliding_window": 7, "window_layers": tuple(local)}
            if family != "gemma2":
                kinds["rope_layers"] = tuple(map(int, local))
            if family == "gemma4":
                kinds["own_kv_heads"] = tuple(2 if it else 1 for it in local)
            changes = {**kinds, **changes}
        if family == "smollm3":
            bare = [layer % 3 == 1 for layer in range(changes.get("num_layers", TINY.num_layers))]
            changes = {"rope_layers": tuple(map(int, bare)), **changes}
        changes = {**FAMILY_CHANGES[family], **changes}
        if "recurrent" in changes:  # every other one, from the first on
            kinds = [layer % 2 == 0 for layer in range(changes.get("num_layers", TINY.num_layers))]
            recurrent = dataclasses.replace(changes["recurrent"], layers=tuple(kinds))
            changes = {**changes, "recurrent": recurrent}
        return dataclasses.replace(TINY, family=family, **changes)

    return make


@pytest.fixture(scope="session")
def yarn_rope() -> RopeConfig:
    """YaRN over a part of the head, with an attention factor that no test can overlook.

    ``tiny_config(rope=yarn_rope)``: that factor multiplies the rotary dims of q and k, and those
    only, in each of the forwards; where it is 1, as by default, a forward may leave it out unseen.
    """
    scaling = YarnScaling(
        factor=4.0,
        original_max_positions=32,
        beta_fast=8.0,
        beta_slow=0.5,
        attention_factor=1.7,
        truncate=True,
    )
    return RopeConfig(theta=100.0, rotary_dim=6, interleaved=False, scaling=scaling)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer that knows the words of the templates, with BOS and specials."""
    corpus = [t.prefix + t.chunk + t.final for t in TEMPLATES.values()]
    specials = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    specials += ["<|doc_start|>", "<|doc_end|>"]  # TurboRAG's markers
    directory = tmp_path_factory.mktemp("tokenizer")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    byte_level.save(byte_level.train(corpus, 600, specials), directory, settings)
    return directory


@pytest.fixture(scope="session")
def model_dir(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_config: Callable[..., ModelConfig],
    tokenizer_dir: Path,
) -> Path:
    """A Hugging Face directory of a random Llama that takes text. Copy it to change it."""
    config = tiny_config(vocab_size=600, num_layers=2, max_positions=1024)
    directory = tmp_path_factory.mktemp("model") / "llama"
    params = init_params(config, jax.random.key(3))
    export_hf(directory, params, config, tokenizer_dir, reading=BLOCKWISE)
    return directory


@pytest.fixture(scope="session")
def chat_model_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., ModelConfig]
) -> Path:
    """A directory as Qwen2.5-Instruct is published, small and random: ChatML, two ends."""
    tokenizer = tmp_path_factory.mktemp("chat-tokenizer")
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    corpus = [t.prefix + t.chunk + t.final for t in TEMPLATES.values()]
    settings = {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": (
            "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
            "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    }
    byte_level.save(byte_level.train(corpus, 600, specials), tokenizer, settings)
    ends = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True, "temperature": 0.7}
    (tokenizer / "generation_config.json").write_text(json.dumps(ends))
    config = tiny_config(
        "qwen2", vocab_size=600, num_layers=2, max_positions=2048, bos_id=None, eos_ids=(2, 0)
    )
    directory = tmp_path_factory.mktemp("chat-model") / "qwen"
    export_hf(directory, init_params(config, jax.random.key(6)), config, tokenizer)
    return directory


@pytest.fixture(scope="session")
def text_model(model_dir: Path) -> Model:
    """The model of ``model_dir``."""
    return load_model(model_dir, cache_tokens=8192)


@pytest.fixture(scope="session")
def word_model_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., ModelConfig]
) -> Path:
    """A Hugging Face directory of a random Llama that knows 470 words and brings its prompt."""
    configs = Path(__file__).parents[1] / "configs"
    config = tiny_config(vocab_size=512, num_layers=1, max_positions=1024)
    directory = tmp_path_factory.mktemp("word-model") / "llama"
    params = init_params(config, jax.random.key(4))
    template = template_named(str(configs / "templates" / "short.toml"))
    tokenizer = configs / "tokenizers" / "synthetic"
    export_hf(directory, params, config, tokenizer, template=template, reading=BLOCKWISE)
    return directory


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The URL of a local S3 server with a bucket named "chunks"."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        server.start()
        try:
            endpoint = "http://{}:{}".format(*server.get_host_and_port())
            bucket = urllib.request.Request(f"{endpoint}/chunks", method="PUT")
            urllib.request.urlopen(bucket).close()
            yield endpoint
        finally:
            server.stop()


@pytest.fixture
def s3_location(s3_endpoint: str) -> str:
    """A location in the bucket that no other test uses."""
    return f"s3://chunks/{uuid.uuid4().hex}/?endpoint={s3_endpoint}&aws_region=us-east-1"


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run, whatever ran before."""
    return np.random.default_rng(20)


@pytest.fixture(scope="session")
def word_tokenizer() -> Tokenizer:
    """That of the synthetic task: a list of words."""
    return Tokenizer.load(CONFIGS / "tokenizers" / "synthetic")


@pytest.fixture(scope="session")
def village_frame(word_tokenizer: Tokenizer) -> Frame:
    """The frame of prompts in which the shipped model is asked."""
    return Frame(word_tokenizer, template_named(str(CONFIGS / "templates" / "short.toml")))


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def jaxrag(capsys):
    """Run the program in this process: exit code, stdout, stderr."""

    def call(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = leaving.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(jaxrag):
    """Run what must fail with one line on stderr that holds these words, and nothing on stdout."""

    def call(*arguments, words):
        code, out, err = jaxrag(*arguments)
        assert code == 1
        assert out == ""
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("jaxrag: error: ")
        for word in [words] if isinstance(words, str) else words:
            assert word in lines[0], lines[0]

    return call


@pytest.fixture(scope="session")
def rules_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The common rules of passages, for prompts of a few hundred tokens."""
    common = Path(__file__).parents[1] / "configs" / "passages" / "common.toml"
    path = tmp_path_factory.mktemp("rules") / "small.toml"
    path.write_text(common.read_text(encoding="utf-8").replace("worth = 1024", "worth = 60"))
    return str(path)


@pytest.fixture(scope="session")
def chromium_driver() -> Iterator[Any]:
    """Selenium's driver of one headless Chromium; a test without one is skipped."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    chromium = chromium or shutil.which("google-chrome")
    driver = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium and chromedriver on the path, nor in CHROMIUM and CHROMEDRIVER")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield browser
    browser.quit()
