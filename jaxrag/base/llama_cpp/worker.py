"""The process that has llama.cpp: it does what it is told on a socket, one thing after the other.

It imports nothing of jaxrag but the file beside it, so that it starts at once; and it is a process
of its own because llama.cpp ends the one that it is in where an assertion of its own fails.
"""

import contextlib
import ctypes
import mmap
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent)
    from state import Octets, StateError, StateForm  # type: ignore[import-not-found]
else:
    from jaxrag.base.llama_cpp.state import Octets, StateError, StateForm

KINDS = {"f16": 1, "q8_0": 8, "q4_0": 2}  # types of ggml
_BATCH = 2048  # tokens of one call
_ERROR = 4  # level of what ggml logs
_LEARNED = 2  # tokens of the sequence from which the form of states is learned


class Worker:
    """A context of llama.cpp: rows of sequences, and two more in which chunks are read and moved.

    Everything raises RuntimeError with what llama.cpp last said, where it failed.
    """

    def __init__(self, path: str, kv: str, cells: int, rows: int, threads: int) -> None:
        """Load the model. ``cells`` tokens of KV are there for all sequences together."""
        self._said = ""
        self._log = lib.llama_log_callback(self._heard)
        lib.llama_log_set(self._log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise self._failed("loads no model from this file")
        asked = lib.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_seq_max = cells, _BATCH, rows + 2
        asked.type_k = asked.type_v = KINDS[kv]
        asked.kv_unified = asked.swa_full = True
        # On a CPU plain attention takes half the time of the flash kernel, which blocks of V need.
        plain = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        asked.flash_attn_type = plain if kv == "f16" else lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        asked.n_threads = asked.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, asked)
        if not self._context:
            raise self._failed(f"makes no context of {cells} tokens")
        self._memory = lib.llama_get_memory(self._context)
        if not lib.llama_memory_can_shift(self._memory):
            raise RuntimeError("llama.cpp cannot move the KV of this model")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.vocab_size = lib.llama_vocab_n_tokens(self._vocab)
        self._front, self._moved = rows, rows + 1
        self._before = np.zeros(0, np.int32)  # what ``_front`` holds
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)
        ids = np.zeros(_LEARNED, np.int32)
        self._decode([(self._moved, 0, ids, False)])
        window = lib.llama_model_n_swa(self._model)
        self.form = StateForm.learn(self._saved().tobytes(), window)
        self._forget(self._moved)

    def encode(self, before: Octets, ids: Octets) -> Octets:
        """KV uint8 [L, 2, T, row] of a chunk read behind some tokens, which may be none."""
        if not np.array_equal(before, self._before):
            self._forget(self._front)
            self._before = before[:0]
            self._decode([(self._front, 0, before, False)])
            self._before = before
        try:
            if len(before):
                lib.llama_memory_seq_cp(self._memory, self._front, self._moved, -1, -1)
            self._decode([(self._moved, len(before), ids, False)])
            lib.llama_memory_seq_rm(self._memory, self._moved, 0, len(before))
            return self.form.taken(self._saved())
        finally:
            self._forget(self._moved)

    def restore(self, row: int, kv: Octets, first: int, place: int) -> None:
        """Put KV [L, 2, T, row] that was read from position ``first`` on to ``place`` of a row."""
        state = self.form.joined(kv, first)
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if not lib.llama_state_seq_set_data(self._context, data, state.nbytes, self._moved):
            raise self._failed("takes a state not back")
        lib.llama_memory_seq_add(self._memory, self._moved, -1, -1, place - first)
        lib.llama_memory_seq_cp(self._memory, self._moved, row, -1, -1)
        self._forget(self._moved)

    def step(self, runs: list[tuple[int, int, Octets, bool]], logits: Any) -> None:
        """Run tokens: of each a row, its place, ids, and whether logits [V] are wanted behind it.

        ``logits`` float32 [*, V] gets these in order.
        """
        outputs = self._decode(runs)
        for at, place in enumerate(outputs):
            found = lib.llama_get_logits_ith(self._context, place)
            logits[at] = np.ctypeslib.as_array(found, (self.vocab_size,))

    def leave(self, row: int) -> None:
        """Nobody has the row any more."""
        self._forget(row)

    def _decode(self, runs: list[tuple[int, int, Octets, bool]]) -> list[int]:
        """One call a batch; where the logits that are wanted stand in the last one."""
        batch, count = self._batch, 0
        outputs = list[int]()
        for row, place, ids, ends in runs:
            for at, token in enumerate(ids.tolist()):
                if count == _BATCH:
                    self._run(count)
                    count = 0
                batch.token[count], batch.pos[count] = token, place + at
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, row
                batch.logits[count] = last = ends and at == len(ids) - 1
                if last:
                    outputs.append(count)
                count += 1
        if count:
            self._run(count)
        return outputs

    def _run(self, count: int) -> None:
        self._batch.n_tokens = count
        if code := lib.llama_decode(self._context, self._batch):
            raise self._failed(f"runs no batch of {count} tokens (code {code})")

    def _saved(self) -> Octets:
        size = lib.llama_state_seq_get_size(self._context, self._moved)
        state = np.empty(size, np.uint8)
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if lib.llama_state_seq_get_data(self._context, data, size, self._moved) != size:
            raise self._failed("saves no state")
        return state

    def _forget(self, row: int) -> None:
        lib.llama_memory_seq_rm(self._memory, row, -1, -1)

    def _heard(self, level: int, text: bytes, _: Any) -> None:
        if level == _ERROR:
            self._said = " ".join(text.decode("utf-8", "replace").split())[:300]

    def _failed(self, what: str) -> RuntimeError:
        said, self._said = self._said, ""
        return RuntimeError(f"llama.cpp {what}{': ' * bool(said)}{said}")


def serve(link: Connection, shared: mmap.mmap) -> None:
    """Do what is asked on the link until it ends; KV and logits lie in what is shared."""
    area = np.frombuffer(shared, np.uint8)
    worker: Worker | None = None
    while True:
        name, *given = link.recv()
        try:
            if worker is None:
                worker = Worker(*given)
                answer: Any = {
                    "vocab_size": worker.vocab_size,
                    "layers": worker.form.layers,
                    "row": worker.form.row,
                }
            elif name == "encode":
                kv = worker.encode(*given)
                area[: kv.size] = kv.reshape(-1)
                answer = kv.shape
            elif name == "restore":
                row, shape, at, first, place = given
                kv = area[at : at + int(np.prod(shape))].reshape(shape)
                worker.restore(row, kv, first, place)
                answer = None
            elif name == "step":
                size = 4 * worker.vocab_size
                rows = area[: len(area) // size * size].view(np.float32)
                worker.step(given[0], rows.reshape(-1, worker.vocab_size))
                answer = None
            else:
                worker.leave(*given)
                answer = None
        except (RuntimeError, StateError) as error:
            answer = RuntimeError(str(error))  # whatever its class: the other side has no such
        link.send(answer)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        serve(Connection(int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 0))
