"""One of several processes that hold one model: answers what it is told, writes what it got.

python one_model.py RANK COORDINATOR WORK.json
"""

import json
import sys
from pathlib import Path

import jax

rank, coordinator, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
work = json.loads(path.read_text())
jax.distributed.initialize(coordinator, work["processes"], rank)

from jaxrag import KnowledgeBase, generate  # noqa: E402
from jaxrag.base.sharding import make_mesh  # noqa: E402
from jaxrag.models.digest import params_digest  # noqa: E402
from jaxrag.models.model import load_model  # noqa: E402

devices = jax.devices()
mesh = make_mesh(*work["mesh"], devices=[devices[i] for i in work["order"]])
model = load_model(work["model"], mesh=mesh, cache_tokens=4096)
share = model.head_share
found = {"digest": params_digest(model.params), "share": [share.rank, share.ways, share.writes]}
with KnowledgeBase.open(work["kb"], model=model) as kb:
    for method in work["methods"]:
        given = {"max_new_tokens": work["tokens"], "batch_size": work["batch"], "method": method}
        sets = {
            "retrieved": generate(work["questions"], kb=kb, k=2, **given),
            "stored": generate(work["questions"][:8], kb=kb, documents=work["documents"], **given),
            "in memory": generate(
                work["questions"][:8], model=model, documents=work["documents"], **given
            ),
        }
        found[method] = {
            name: [[one.token_ids, one.counts, one.notes] for one in results]
            for name, results in sets.items()
        }
found["talk"], messages = [], []
for question in work["questions"][:3]:
    messages.append({"role": "user", "content": question})
    one = generate(messages=messages, model=model, documents=work["documents"], max_new_tokens=20)
    found["talk"].append([one.token_ids, [row.how for row in one.reuse if row.part[0] == "t"]])
    messages.append({"role": "assistant", "content": one.token_ids})
path.with_suffix(f".{rank}.json").write_text(json.dumps(found))
