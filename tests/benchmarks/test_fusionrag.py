"""benchmarks/fusionrag.py: what its two figures compare."""

from fusionrag import figures

from jaxrag.measure.bench.options import Traffic


def test_figures_of_fusionrag_are_ratios_of_two_arms():
    asked, tried = [], []

    def measure(arm, rate, traffic):
        asked.append((arm.name.split(":")[0], arm.recompute_ratio, arm.engine.lockstep, rate))
        assert (traffic.batch, traffic.requests, traffic.documents) == (10, 40, 160)
        return {"first_token": {"mean": 4.0 if arm.engine.lockstep else 3.0}}

    def highest(arm):
        tried.append(arm.method)
        return {"rate": 2.0 if arm.method == "full_attention" else 5.0, "tried": []}

    found = figures(Traffic(), measure, highest)
    assert asked == [("fusionrag_inline", 0.15, True, 2.0), ("fusionrag", 0.15, False, 2.0)]
    assert tried == ["fusionrag", "full_attention"]
    assert (found["figure_11"]["ratio"], found["figure_15"]["ratio"]) == (0.75, 2.5)
