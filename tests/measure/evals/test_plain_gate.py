"""The gate over recorded requests: full attention passes, what flips answers is refused."""

import json
import random

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.cli import main
from jaxrag.measure.evals.options import GateOptions, Target
from jaxrag.measure.evals.plain_gate import gate_requests, read_requests
from jaxrag.models.model import load_model
from jaxrag.reuse.methods import METHODS
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.state import make_state

WORDS = ["salt", "wells", "bamboo", "bridge", "river", "hands", "worked", "crosses", "brick", "tea"]


@pytest.fixture(scope="module")
def model(chat_model_dir):
    return load_model(chat_model_dir, cache_tokens=4096)


def recorded(path, count):
    draw = random.Random(7)
    lines = []
    for _ in range(count):
        passages = (" ".join(draw.choices(WORDS, k=24)) for _ in range(3))
        pasted = "\n".join(f"<source>{it}</source>" for it in passages)
        messages = [{"role": "user", "content": f"{pasted}\n\nWhat {draw.choice(WORDS)}?"}]
        lines.append({"model": "m", "messages": messages} if count % 2 else messages)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def passed(model, rules_file, tmp_path_factory):
    """The report and the gate of a method that is refused at ratio 0 and passes at 1."""
    requests = read_requests(recorded(tmp_path_factory.mktemp("recorded") / "requests.jsonl", 3))
    target = Target(agreement=1.0, max_kl=1e-4)
    options = GateOptions("cacheblend", (0.0, 1.0), target, answer_tokens=2)
    return gate_requests(model, requests, options, rules_file, least=3)


def test_all_tokens_computed_again_are_full_attention(passed):
    """They meet the hardest target; plain reuse, which the weights do not know, does not."""
    report, gate = passed
    assert (report.questions, report.ratio) == (3, 1.0)
    least, most = report.measured
    assert least.recomputed == 0 and most.recomputed == 1
    assert most.kl < 1e-4 < least.kl
    assert gate["subject"]["method"]["recompute_ratio"] == 1.0


def test_requests_that_say_too_little_are_refused(model, rules_file, tmp_path):
    requests = read_requests(recorded(tmp_path / "requests.jsonl", 3))
    with refused(RequestError, "3"):
        gate_requests(model, requests, GateOptions(), rules_file)
    with refused(RequestError, "0"):
        gate_requests(model, requests, GateOptions(), "common", least=1)
    path = tmp_path / "wrong.jsonl"
    path.write_text('[{"role": "user", "content": "Who?"}]\n{"messages": 3}\n')
    with refused(RequestError, "2"):
        read_requests(path)


def test_a_server_takes_a_gate_that_was_passed(model, passed, rules_file, tmp_path):
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(passed[1] | {"questions": 50}))
    given = {"plain": "passages", "plain_gate": str(path), "warm_up": False}
    settings = {"passage_rules": rules_file, **given}
    state = make_state(ServerSettings(**settings), model)
    state.close()
    assert state.default_method(None) == METHODS["cacheblend"].with_ratio(1.0)
    assert not state.chooses(None)
    for change, why in (({"passage_rules": "common"}, ""), ({"method": "epic"}, "")):
        with refused(ConfigError, why):
            make_state(ServerSettings(**settings | change), model)
    path.write_text(json.dumps(passed[1]))
    with refused(ConfigError, "50"):
        make_state(ServerSettings(**settings), model)
    path.write_text("{}")
    with refused(ConfigError):
        make_state(ServerSettings(**settings), model)


def test_the_command_writes_what_passed_alone(chat_model_dir, rules_file, tmp_path, capsys):
    requests, out = recorded(tmp_path / "requests.jsonl", 50), tmp_path / "gate.json"
    words = ["gate", "--requests", requests, "--model", str(chat_model_dir), "--out", str(out)]
    words += ["--passage-rules", rules_file, "--method", "turborag", "--answer-tokens", "1"]
    words += ["--cache-tokens", "4096"]
    assert main([*words, "--out", str(tmp_path / "none" / "gate.json")]) != 0
    assert "its folder does not exist" in capsys.readouterr().err
    assert main([*words, "--max-kl", "0"]) == 3
    assert "refused: turborag" in capsys.readouterr().err and not out.exists()
    assert main([*words, "--max-kl", "1000", "--target-agreement", "0"]) == 0
    assert "50 questions" in capsys.readouterr().out
    assert json.loads(out.read_text())["questions"] == 50
