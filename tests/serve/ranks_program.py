"""One of several processes that hold one model, led by the first; its clients answer in JSON.

python ranks_program.py RANK COORDINATOR WORK.json
"""

import json
import os
import sys
from pathlib import Path

import jax

rank, coordinator, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
work = json.loads(path.read_text())
jax.distributed.initialize(coordinator, work["processes"], rank)

from jaxrag.base.errors import JaxragError  # noqa: E402
from jaxrag.base.sharding import make_mesh  # noqa: E402
from jaxrag.engine.admission import SchedulerSettings  # noqa: E402
from jaxrag.engine.engine import Engine  # noqa: E402
from jaxrag.engine.ranks import Leader, meet  # noqa: E402
from jaxrag.engine.state import EngineSettings  # noqa: E402
from jaxrag.models.model import load_model  # noqa: E402
from jaxrag.serve.ask import Ask  # noqa: E402
from jaxrag.serve.questions import prepare, resolve  # noqa: E402


def lost(why):
    print(why, file=sys.stderr, flush=True)
    os._exit(9)


model = load_model(work["model"], mesh=make_mesh(*work["mesh"]), cache_tokens=work["pool"])
settings = EngineSettings(scheduler=SchedulerSettings(classes=3))
model.engine = engine = Engine(model, settings)
stores = {"memory": engine.memory}
about = {"weights": model.fingerprint, **work.get("about", {}).get(str(rank), {})}
try:
    met = meet(model, ("127.0.0.1", 0), about, stores, lost)
except JaxragError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(3)
if not isinstance(met, Leader):
    engine.follow(met)
    os._exit(0)

engine.lead(met)
served = resolve(Ask(method=work["method"], max_new_tokens=work["tokens"]), model=model)
found = {}


def asked(question, **how):
    import dataclasses

    request = prepare(served, question, work["documents"]).request
    return dataclasses.replace(request, rows=4, **how)


def plain():
    """Every question's tokens."""
    answers = [[] for _ in work["questions"]]
    for news in engine.iterate([asked(it) for it in work["questions"]]):
        if news.error is not None:
            raise news.error
        answers[news.number] += news.new
    return answers


found["plain"] = plain()
found["turns"] = engine.turns
path.with_suffix(".json.out").write_text(json.dumps(found))
met.close()
os._exit(0)
