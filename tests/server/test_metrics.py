"""GET /metrics: what is counted adds up, and no label is made up by a client."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxrag.engine.links import LinkState
from jaxrag.server.http.metrics import link_name

QUESTION = "Which animal does Kora Felell keep?"


def scrape(server):
    """Every sample of a server: {(name, labels as a sorted tuple): value}."""
    answer = server.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def value(samples, name, **labels):
    return samples.get((f"jaxrag_{name}", tuple(sorted(labels.items()))), 0.0)


def total(samples, name):
    return sum(found for (sample, _), found in samples.items() if sample == f"jaxrag_{name}")


def test_prompt_tokens_by_source_are_the_prompt_tokens(server):
    before = scrape(server)
    told = [
        server.chat(QUESTION).json(),
        server.chat(QUESTION, method="full_attention").json(),
        server.chat("What is the home of Giso Berow?", documents=["Giso Berow lives here."]).json(),
    ]
    after = scrape(server)

    def grew(name, **labels):
        return value(after, name, **labels) - value(before, name, **labels)

    prompt = sum(it["usage"]["prompt_tokens"] for it in told)
    grown = total(after, "prompt_tokens_total") - total(before, "prompt_tokens_total")
    assert grown == prompt
    sources = {
        name: grew("prompt_tokens_total", source=name)
        for name in ("pool", "host", "store", "encoded", "computed")
    }
    assert sum(sources.values()) == prompt
    cached = sum(it["usage"]["prompt_tokens_details"]["cached_tokens"] for it in told)
    assert sources["pool"] + sources["host"] + sources["store"] == cached > 0
    assert sources["encoded"] > 0 and sources["computed"] > 0
    answers = sum(it["usage"]["completion_tokens"] for it in told)
    assert grew("completion_tokens_total") == answers
    assert grew("generation_tokens_total") >= answers
    assert grew("requests_total", outcome="finished") == 3
    for phase in ("prepare", "wait", "load", "prefill", "decode"):
        assert grew("phase_seconds_count", phase=phase) == 3, phase
    assert grew("ttft_seconds_count") == grew("e2e_seconds_count") == 3
    parts = sum(it["jaxrag"]["timings"]["wait"] for it in told)
    assert grew("phase_seconds_sum", phase="wait") == pytest.approx(parts)


def test_streams_tell_the_time_between_tokens(server):
    before = scrape(server)
    server.chat(QUESTION, stream=True, ignore_eos=True, max_tokens=6)
    after = scrape(server)
    deliveries = value(after, "inter_token_seconds_count") - value(
        before, "inter_token_seconds_count"
    )
    assert 1 <= deliveries <= 5
    assert value(after, "ttft_seconds_count") - value(before, "ttft_seconds_count") == 1


def test_refusals_are_counted_by_their_code(server):
    before = scrape(server)
    assert server.chat(QUESTION, temperature=-1).status_code == 400
    assert server.chat("Kora " * 9000).status_code == 400
    assert server.chat(QUESTION, model="synthetic@nowhere").status_code == 404
    after = scrape(server)
    grown = {
        dict(labels)["reason"]: found - before.get((name, labels), 0.0)
        for (name, labels), found in after.items()
        if name == "jaxrag_refused_total"
    }
    assert {name: n for name, n in grown.items() if n} == {
        "invalid_request": 1,
        "context_length_exceeded": 1,
        "not_found": 1,
    }
    assert "nowhere" not in str(after)


def test_what_the_engine_holds(server):
    server.chat(QUESTION)
    while any(server.state.engine.status().requests.values()):  # the last step may still be out
        pass
    samples = scrape(server)
    pages = sum(found for (name, _), found in samples.items() if name == "jaxrag_pages")
    assert pages == server.state.engine.runner.num_pages
    assert value(samples, "ready") == 1
    assert total(samples, "engine_requests") == 0 == value(samples, "http_requests")
    assert value(samples, "waiting_seconds", of="longest") == 0
    standing = server.state.engine.status()
    assert value(samples, "engine_restarts_total") == standing.restarts
    assert value(samples, "preemptions_total") == 0
    assert value(samples, "link_bytes_total", link="village") > 0
    assert value(samples, "loads_total", link="village", result="ok") > 0
    assert value(samples, "last_step_timestamp_seconds") > 1.6e9
    phases = [value(samples, "compilations_total", phase=name) for name in ("starting", "serving")]
    assert sum(phases) == sum(server.state.engine.compiled.values())
    links = {dict(it)["link"] for name, it in samples if name == "jaxrag_loads_total"}
    assert links <= {"village", "memory", "host", "other", "memory_writes", "village_writes"}


def test_no_histogram_knows_a_tenant_and_no_name_comes_from_a_client(server):
    server.chat(QUESTION, model="synthetic@village", user="somebody")
    labels = {}
    for name, it in scrape(server):
        assert name.startswith("jaxrag_")
        labels.setdefault(name, set()).update(dict(it))
    for name, found in labels.items():
        assert "tenant" not in found, name
        assert found <= {"source", "outcome", "reason", "phase", "state", "of", "link", "tier",
                         "result", "le"}, name  # fmt: skip


def test_links_have_short_names():
    state = LinkState("/kb/store", None, 0, 0, 0, 0, 0, 0, "closed", 0)
    names = {"/kb/store": "village"}
    assert link_name(state, names) == "village"
    assert link_name(dataclasses.replace(state, name="/kb/store (writes)"), names) == (
        "village_writes"
    )
    assert link_name(dataclasses.replace(state, name="memory"), names) == "memory"
    assert link_name(dataclasses.replace(state, name="s3://secret"), names) == "other"


def test_the_state_of_the_engine(server, monkeypatch):
    server.chat(QUESTION)
    monkeypatch.setitem(server.state.engine.compiled, "jit(one)", 3)  # others may share its own
    while any(server.state.engine.status().requests.values()):
        pass
    told = server.client.get("/v1/engine").json()
    assert told["phase"] == "ready"
    assert sum(told["standing"]["pages"].values()) == server.state.engine.runner.num_pages
    assert {it["name"] for it in told["tiers"]["links"]} >= {"village"}
    assert told["programs"]["jit(one)"] == 3
    assert sum(told["programs"].values()) == sum(told["compilations"].values())


DASHBOARD = Path(__file__).parents[2] / "configs/grafana/jaxrag.json"
ALERTS = DASHBOARD.with_name("alerts.yaml")
SELECTOR = re.compile(r"\b(jaxrag_\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"by \(([^)]*)\) \(rate\((jaxrag_\w+)")


def test_every_metric_of_the_alerts_is_there_with_its_labels(server):
    server.chat(QUESTION)
    there = {}
    for name, labels in scrape(server):
        there.setdefault(name, set()).update({f'{key}="{value}"' for key, value in labels})
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    assert len({it["alert"] for it in group["rules"]}) == len(group["rules"]) > 5
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")
        found = SELECTOR.findall(rule["expr"])
        assert found
        for name, selector in found:
            assert name in there, rule["expr"]
            wanted = {it for it in selector.split(",") if it}
            assert wanted <= there[name] | {'outcome="failed"'}, rule["expr"]


def test_every_metric_of_the_dashboard_is_there_with_its_labels(server):
    server.chat(QUESTION, stream=True)
    assert server.chat(QUESTION, temperature=-1).status_code == 400
    there = {}
    for name, labels in scrape(server):
        there.setdefault(name, set()).update(dict(labels))
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    used = {name for expr in asked for name, _ in SELECTOR.findall(expr)}
    assert used <= there.keys()
    for expr in asked:
        for name, selector in SELECTOR.findall(expr):
            wanted = {part.split("=")[0].rstrip("!~") for part in selector.split(",") if part}
            assert wanted <= there[name], expr
        for labels, name in BY.findall(expr):
            assert set(labels.split(", ")) <= there[name], expr
    families = {it.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
                for it in used}  # fmt: skip
    told = {it.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for it in there}
    assert told - families <= {"jaxrag_pool_chunks"}  # what is counted is shown
    places = [(it["gridPos"]["x"], it["gridPos"]["y"]) for it in panels]
    assert len(set(places)) == len(places) == len({it["id"] for it in panels})
