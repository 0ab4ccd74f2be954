"""Threads, tasks and a library that changes, on the shipped model: every answer right, no leak."""

import asyncio
import gc
import itertools
import os
import random
import signal
import threading
from pathlib import Path

import pytest

import jaxrag
from jaxrag import agenerate, generate
from jaxrag.engine.engine import engine_of
from jaxrag.library.documents import Document
from jaxrag.tasks.synthetic import SyntheticTask, samples

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "synthetic-0.8m" / "dual"
METHODS = ["turborag", "full_attention", "fusionrag", "turborag"]
KEPT = {"kind": "kept"}


@pytest.fixture(scope="module")
def kb(tmp_path_factory):
    """Documents of a few samples; the pool holds some forty of their chunks."""
    model = jaxrag.load_model(SHIPPED, cache_tokens=1024)
    path = tmp_path_factory.mktemp("kb")
    with jaxrag.KnowledgeBase.open(
        path, model=model, chunk_by="sentence", chunk_tokens=20, overlap=0
    ) as kb:
        drawn = list(itertools.islice(samples(SyntheticTask(), 7), 12))
        kb.add(
            Document(f"kept-{i}-{j}", text, metadata=KEPT)
            for i, sample in enumerate(drawn)
            for j, text in enumerate(sample.chunks)
        )
        kb.questions = [it.question for sample in drawn for it in sample.questions][:48]
        yield kb


def options(kb, number):
    method = METHODS[number % len(METHODS)]
    return {"kb": kb, "k": 4, "where": KEPT, "method": method, "max_new_tokens": 10}


def resources(model):
    """What is held when nobody asks."""
    engine = engine_of(model)
    engine.call(lambda runner: None)
    state = engine._core.state
    state.scheduler.check()
    allocator = engine.runner.cache.allocator
    gc.collect()
    return {
        "pages": allocator.num_pages - allocator.num_available,
        "live": len(state.live) + len(state.ending) + len(state.scheduler.live),
        "indexed": len(engine.runner.host_search._requests),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def resident_mib():
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


@pytest.mark.parametrize(
    "total", [pytest.param(12, id="12"), pytest.param(2000, id="2000", marks=pytest.mark.slow)]
)
def test_every_answer_is_right_whoever_else_asks(kb, total):
    """Eight threads, fifty tasks, a writer; some leave early, some are cancelled."""
    model, questions = kb.model, kb.questions[:total]
    expected = [
        generate(question, **options(kb, n), batch_size=8).token_ids
        for n, question in enumerate(questions)
    ]
    before, threads = resources(model), threading.active_count()
    taken, wrong, errors = itertools.count(), [], []
    over = threading.Event()

    def check(number, result):
        if result.token_ids != expected[number]:
            wrong.append((number, result.token_ids, expected[number]))

    def asks(seed):
        rng = random.Random(seed)
        while next(taken) < total:
            number = rng.randrange(len(questions))
            mine = {**options(kb, number), "batch_size": 8}
            try:
                if rng.random() < 0.15:
                    pieces = iter(generate(questions[number], **mine, stream=True))
                    for _ in range(rng.randrange(3)):
                        next(pieces, None)
                    pieces.close()
                else:
                    check(number, generate(questions[number], **mine))
            except Exception as error:
                errors.append(error)

    async def task(seed):
        rng = random.Random(seed)
        while next(taken) < total:
            number = rng.randrange(len(questions))
            mine = options(kb, number)
            asked = asyncio.create_task(agenerate(questions[number], **mine))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.05)
                asked.cancel()
            try:
                check(number, await asked)
            except asyncio.CancelledError:
                pass
            except Exception as error:
                errors.append(error)

    async def tasks():
        await asyncio.gather(*(task(1000 + n) for n in range(50)))

    def writes():
        for number in itertools.count():
            if over.is_set():
                return
            text = f"The salt number {number} is in town {number}."
            kb.add([Document(f"other-{number}", text, metadata={"kind": "other"})])
            kb.remove([f"other-{number}"])

    crew = [threading.Thread(target=asks, args=(seed,)) for seed in range(8)]
    crew.append(threading.Thread(target=lambda: asyncio.run(tasks())))
    writer = threading.Thread(target=writes)
    for one in (*crew, writer):
        one.start()
    for one in crew:
        one.join()
    over.set()
    writer.join()
    assert not errors and not wrong
    assert resources(model) == before
    assert threading.active_count() <= threads + 8  # pools of threads that wait for work


@pytest.mark.usefixtures("interruptible")
def test_a_thread_that_is_interrupted_harms_nobody(kb):
    """Ctrl-C falls on the main thread while others ask."""
    questions, wrong = kb.questions[:4], []
    expected = [generate(q, **options(kb, n)).token_ids for n, q in enumerate(questions)]
    before, over = resources(kb.model), threading.Event()

    def asks():
        for number in itertools.cycle(range(4)):
            if over.is_set():
                return
            got = generate(questions[number], **options(kb, number)).token_ids
            if got != expected[number]:
                wrong.append(number)

    crew = [threading.Thread(target=asks) for _ in range(2)]
    for one in crew:
        one.start()
    hit = 0
    for at in range(30):
        timer = threading.Timer(0.001 * (at % 7), signal.raise_signal, (signal.SIGINT,))
        try:
            timer.start()
            generate(questions[at % 4], **options(kb, at % 4))
            timer.join()
        except KeyboardInterrupt:
            hit += 1
    over.set()
    for one in crew:
        one.join()
    assert hit and not wrong
    assert resources(kb.model) == before


@pytest.mark.slow
def test_ten_thousand_requests_leave_memory_as_it_was(kb):
    questions = kb.questions[:16]

    def ask(count):
        for at in range(0, count, len(questions)):
            generate(questions, **options(kb, at))

    ask(1000)
    before, memory = resources(kb.model), resident_mib()
    ask(10_000)
    assert resources(kb.model) == before
    assert resident_mib() - memory < 48


def test_tasks_read_a_stream(kb):
    question, mine = kb.questions[0], options(kb, 0)

    async def read():
        stream = agenerate(question, **mine, stream=True)
        pieces = [piece async for piece in stream]
        return "".join(pieces), stream.result

    text, result = asyncio.run(read())
    assert text == result.text == generate(question, **mine, batch_size=8).text


def test_a_task_that_leaves_a_stream_aborts_it(kb):
    async def leave():
        stream = agenerate(kb.questions[0], **{**options(kb, 0), "max_new_tokens": 64}, stream=True)
        async for _ in stream:
            break

    before = resources(kb.model)
    asyncio.run(leave())
    assert resources(kb.model) == before
