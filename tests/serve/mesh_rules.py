"""One of several processes that hold one model: answers by several decode rules, and writes that.

python mesh_rules.py RANK COORDINATOR WORK.json
"""

import json
import sys
from pathlib import Path

import jax

rank, coordinator, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
work = json.loads(path.read_text())
jax.distributed.initialize(coordinator, work["processes"], rank)

from jaxrag import KnowledgeBase, generate  # noqa: E402
from jaxrag.base.errors import RequestError  # noqa: E402
from jaxrag.base.sharding import make_mesh  # noqa: E402
from jaxrag.engine.engine import engine_of  # noqa: E402
from jaxrag.models.model import load_model  # noqa: E402

found = {}
for name, (rule, placed) in work["cases"].items():
    mesh = make_mesh(*work["mesh"])
    try:
        model = load_model(work["model"], mesh=mesh, cache_tokens=1024, **placed)
    except RequestError as error:
        found[name] = str(error)
        continue
    given = {
        "decode": rule,
        "method": work["method"],
        "max_new_tokens": work["tokens"],
        "batch_size": work["batch"],
    }
    if "kb" in work:
        with KnowledgeBase.open(work["kb"], model=model) as kb:
            results = generate(work["questions"], kb=kb, **given)
    else:
        results = generate(work["questions"], model=model, documents=work["documents"], **given)
    host = engine_of(model).runner.cache.host
    found[name] = [[one.token_ids for one in results], host.nbytes if host else 0]
path.with_suffix(f".{rank}.json").write_text(json.dumps(found))
