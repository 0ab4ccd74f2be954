"""Compile every GPU kernel for an H200 on a machine without a GPU, and hold it to its budget.

Needs the extra `check-kernels` (`make check-kernels` installs it): XLA's CUDA plug-in, which
compiles for a described chip, and `ptxas`, which says what the kernels it emitted use. A whole step
of the model is compiled too, and its memory plan may hold no copy of the pool. Exit status 1 names
what is over budget or does not compile; `--self-test` compiles kernels that are broken on purpose
and fails unless each is refused for its reason.

    python scripts/kernels/check_kernels.py [--only NAME] [--self-test] [--json]
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARCHITECTURE = "sm_90a"
COMPILERS = ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "triton", "jax-triton")


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a thread of one compiled kernel uses."""

    registers: int
    spill_bytes: int  # stores and loads
    shared_bytes: int | None = None  # of a block; None: not known


def usage_of(report: str, kernel: str) -> Usage | None:
    """The usage of ``kernel`` in what `ptxas -v` prints; None where it is not compiled there."""
    for part in report.split("Compiling entry function ")[1:]:
        if not part.startswith(f"'{kernel}"):
            continue
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", part)
        if registers:
            return Usage(int(registers[1]), sum(map(int, spills)))
    return None


def shared_of(folder: Path, name: str, kernel: str) -> int:
    """Most shared memory of a block of the kernel, in bytes, as XLA launches it."""
    launch = re.compile(rf"\b{kernel}(?:_\d+)? .*shared_memory: (\d+) bytes")
    for path in folder.glob(f"*jit_{name}.*thunk_sequence.txt"):
        found = launch.findall(path.read_text("utf-8"))
        if found:
            return max(map(int, found))
    raise RuntimeError(f"XLA launches no kernel {kernel!r}")


def find_ptxas() -> Path:
    """The `ptxas` of the installed CUDA wheel."""
    import importlib.util

    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        for path in sorted(Path(root).rglob("bin/ptxas")):
            return path
    sys.exit("check-kernels: no ptxas is installed; run `make check-kernels`")


def assemble(ptx: Path, ptxas: Path) -> str:
    """What `ptxas -v` says of every kernel of a PTX file."""
    command = [str(ptxas), "-v", f"-arch={ARCHITECTURE}", "-o", os.devnull, str(ptx)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas: {_first_line(done.stderr)}")
    return done.stderr + done.stdout


@dataclasses.dataclass(frozen=True)
class Step:
    """A whole step of the model: some new tokens of each request against the pool.

    Attributes:
      temporary: budget of its memory plan in bytes, beside what goes in and comes out.
      layers_copied: of how many layers at a time the weights may be copied, on top of that.
      options: of XLA.
    """

    rows: int
    width: int
    temporary: int
    layers_copied: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "llama-3-8b"  # of configs/models
    context: int = 32_768
    pool_tokens: int = 65_536  # 8 GiB
    num_layers: int | None = None  # None: all
    kernels: Any = "pallas_triton"  # of the config
    values: int | None = None  # V of so many layers on the device; None: of all

    def program(self) -> tuple[Any, tuple[Any, ...]]:
        """The step, its pool donated, and shapes to compile it for."""
        import jax
        import jax.numpy as jnp

        from jaxrag.base.config import config_from_dict
        from jaxrag.base.tables import read_toml
        from jaxrag.kv.cache import PAGE, PagePool, PageTable
        from jaxrag.models.rope import RopeTable
        from jaxrag.models.spec import init_params

        path = Path(__file__).parents[2] / "configs" / "models" / f"{self.model}.toml"
        config = config_from_dict(read_toml(path), str(path))
        layers = self.num_layers or config.num_layers
        config = dataclasses.replace(config, num_layers=layers, kernels=self.kernels)

        def numbers(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        def pool(layers: int) -> Any:
            shape = (layers * self.pool_tokens // PAGE, PAGE, config.num_kv_heads, config.head_dim)
            return jax.ShapeDtypeStruct(shape, config.dtype)

        num_pages = (self.context + self.width) // PAGE + 1
        angles: Any = jax.ShapeDtypeStruct(
            (2 * self.context, config.rope.rotary_dim // 2), jnp.float32
        )
        table = PageTable(
            pages=numbers(self.rows, num_pages),
            offsets=numbers(self.rows, num_pages),
            slot_position=numbers(self.rows, num_pages * PAGE),
        )
        params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
        new = (numbers(self.rows, self.width),) * 3
        kv = PagePool(k=pool(layers), v=pool(layers if self.values is None else self.values))
        arguments = (params, kv, RopeTable(angles, angles), table, *new)
        step = self._dense(config) if self.values is None else self._kept(config, self.values)
        return jax.jit(step, donate_argnums=1), arguments

    def _dense(self, config: Any) -> Any:
        """Tokens that attend to every key."""
        import jax.numpy as jnp

        from jaxrag.base.types import FINAL, Tokens
        from jaxrag.models.attention import PagedAttend
        from jaxrag.models.decoder import forward

        def step(params: Any, pool: Any, rope: Any, table: Any, *new: Any) -> tuple[Any, Any]:
            ids, positions, slots = new
            tokens = Tokens(ids=ids, positions=positions, segments=jnp.full_like(ids, FINAL))
            attend = PagedAttend(config, rope, table.reveal(slots, positions), slots)
            hidden, pool, _ = forward(params, config, tokens, pool, attend)
            return hidden, pool

        return step

    def _kept(self, config: Any, layers: int) -> Any:
        """One token a row by KCache, V of all but the first layers at an address of the host."""
        import jax.numpy as jnp
        import numpy as np

        from jaxrag.base.types import Step as Tokens
        from jaxrag.engine.steps import Plan, run_by_rule
        from jaxrag.kv.cache import PAGE
        from jaxrag.kv.cache.host import HostValues, Mapped
        from jaxrag.models.decoder import Decoder
        from jaxrag.reuse.decode import Decoding, TopN

        shape = (config.num_layers - layers, 1, PAGE, config.num_kv_heads, config.head_dim)
        memory = np.zeros(shape, config.dtype)
        values = HostValues(layers, memory)
        slot = config.num_kv_heads * config.head_dim
        values.mapped = Mapped(1 << 46, (self.pool_tokens * slot, config.head_dim, slot))
        plan = Plan(TopN(n=128, device_layers=layers), None, values)

        def step(params: Any, pool: Any, rope: Any, table: Any, *new: Any) -> tuple[Any, Any]:
            decoder = Decoder(params=params, rope=rope, config=config)
            state = Decoding(order=jnp.zeros_like(table.slot_position), state=None)
            hidden, pool, _, _ = run_by_rule(decoder, pool, table, state, Tokens(*new), plan)
            assert memory.size  # HostValues holds it weakly
            return hidden, pool

        return step


# XLA's products in Triton take no slice at a place that is known only as the program runs, so each
# turn of the scan over the layers begins with a copy of that layer's weights (416 MiB of these
# models); cuBLAS reads those of the MLP in place. Which is faster is for a GPU to say:
# XLA_FLAGS=--xla_gpu_enable_triton_gemm=false benchmarks/gpu.py.
# With V in host memory keys are scored by XLA, which takes and turns all of a layer's in float32.
STEPS = {
    "step_of_1024_tokens": Step(1, 1_024, temporary=32 << 20),
    "step_of_eight_tokens": Step(8, 1, temporary=8 << 20),
    "step_of_eight_tokens_by_cublas": Step(
        8, 1, temporary=96 << 20, layers_copied=0, options={"xla_gpu_enable_triton_gemm": False}
    ),
    "step_with_values_in_host_memory": Step(1, 1, temporary=512 << 20, kernels="xla", values=1),
}


def check_step(step: Step) -> dict[str, Any]:
    """Compile a step: bytes of its memory plan, and the reason it is refused ("": it is not)."""
    from described import bytes_of, compiled_for

    try:
        function, arguments = step.program()
        program = compiled_for(function, arguments, options=step.options)
    except Exception as error:  # whatever tracing, lowering or XLA raises is the verdict
        return {"refused": _first_line(f"{type(error).__name__}: {error}")}
    plan = program.memory_analysis()
    params, pools, *_ = arguments
    pool, layers = bytes_of(pools), bytes_of(params.layers)
    budget = step.temporary + step.layers_copied * layers // params.layers.q.shape[0]
    found = {
        "pool_bytes": pool,
        "temporary_bytes": plan.temp_size_in_bytes,
        "donated_bytes": plan.alias_size_in_bytes,
    }
    refused = ""
    if plan.temp_size_in_bytes > budget:
        refused = f"{plan.temp_size_in_bytes} temporary bytes, the budget is {budget}"
    elif plan.alias_size_in_bytes < pool:
        refused = f"{plan.alias_size_in_bytes} bytes are donated, the pool has {pool}"
    return found | {"refused": refused}


@contextlib.contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """What this process prints, C++ included, goes to a file."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def compile_case(name: str, case: Any, folder: Path, ptxas: Path) -> Usage:
    """Compile for the H200: the most that one of its kernels uses; raises whatever XLA raises."""
    import jax
    from described import bytes_of, compiled_for

    def checked(*arguments: Any) -> Any:
        return case.function(*arguments)

    checked.__name__ = name
    report = folder / f"{name}.report"
    with printed_to(report):
        program = compiled_for(jax.jit(checked), case.arguments, case.host)
    arrays = jax.tree.leaves(case.arguments)
    stay_on_host(program.memory_analysis(), bytes_of([arrays[at] for at in case.host]))
    if case.impl == "pallas_mosaic":  # Mosaic asks `ptxas` itself and leaves no PTX behind
        (kernel,) = case.kernels
        usage = usage_of(report.read_text(encoding="utf-8"), kernel)
        if usage is None:
            raise RuntimeError(f"Mosaic reports no kernel {kernel!r}")
        return usage
    usages = [usage_in(folder, name, kernel, ptxas) for kernel in case.kernels]
    return Usage(
        registers=max(usage.registers for usage in usages),
        spill_bytes=max(usage.spill_bytes for usage in usages),
        shared_bytes=max(usage.shared_bytes or 0 for usage in usages),
    )


def stay_on_host(plan: Any, size: int) -> None:
    """RuntimeError where a memory plan moves or copies ``size`` bytes that lie in host memory."""
    if plan.host_argument_size_in_bytes < size:
        raise RuntimeError(
            f"{plan.host_argument_size_in_bytes} bytes are taken from host memory, {size} lie there"
        )
    copies = plan.temp_size_in_bytes + plan.host_temp_size_in_bytes
    if size and copies >= size:
        raise RuntimeError(f"{copies} temporary bytes hold a copy of {size} bytes of host memory")


def usage_in(folder: Path, name: str, kernel: str, ptxas: Path) -> Usage:
    """The most that a kernel of a compiled program uses, from the PTX that was left behind."""
    # Of a kernel in Triton's own language jax-triton leaves it, of all others XLA.
    own = sorted(folder.glob(f"jax_triton/*/{kernel}.ptx"))
    found = own or [
        ptx
        for ptx in sorted(folder.glob(f"*jit_{name}.*ptx"))
        if f".entry {kernel}" in ptx.read_text(encoding="utf-8")
    ]
    used = [usage for ptx in found if (usage := usage_of(assemble(ptx, ptxas), kernel))]
    if not used:
        raise RuntimeError(f"no kernel {kernel!r} was emitted")
    notes = [ptx.with_suffix(".compile_info").read_text(encoding="utf-8") for ptx in own]
    shared = [int(note.rsplit(":", 1)[1]) for note in notes] or [shared_of(folder, name, kernel)]
    return Usage(
        registers=max(usage.registers for usage in used),
        spill_bytes=max(usage.spill_bytes for usage in used),
        shared_bytes=max(shared),
    )


def verdict(usage: Usage, case: Any) -> str:
    """Why the kernel is over its budget; "" where it is not."""
    if usage.spill_bytes > case.spill_bytes:
        return f"spill of {usage.spill_bytes} bytes a thread, the budget is {case.spill_bytes}"
    if usage.registers > case.registers:
        return f"{usage.registers} registers a thread, the budget is {case.registers}"
    return ""


def check(name: str, case: Any, folder: Path, ptxas: Path) -> dict[str, Any]:
    """Compile a case: its usage, and the reason it is refused ("": it is not)."""
    try:
        usage = compile_case(name, case, folder, ptxas)
    except Exception as error:  # whatever tracing, lowering or XLA raises is the verdict
        return {"refused": _first_line(f"{type(error).__name__}: {error}")}
    return dataclasses.asdict(usage) | {"refused": verdict(usage, case)}


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]


def main() -> int:
    """Check, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="one case")
    parser.add_argument("--self-test", action="store_true", help="compile the broken ones instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    ptxas = find_ptxas()
    with tempfile.TemporaryDirectory() as folder:
        # Before jax is imported: no device is opened, nothing is tuned on one, PTX is kept.
        os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        # XLA takes the first it finds, and an older one would not know what Triton writes.
        os.environ["PATH"] = os.pathsep.join((str(ptxas.parent), os.environ.get("PATH", "")))
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        os.environ["JAX_TRITON_DUMP_DIR"] = f"{folder}/jax_triton"
        os.environ["LLVM_DISABLE_SYMBOLIZATION"] = "1"  # or each remark of MLIR names its stack
        os.environ["XLA_FLAGS"] = " ".join(
            (
                os.environ.get("XLA_FLAGS", ""),
                f"--xla_dump_to={folder}",
                "--xla_gpu_autotune_level=0",
                # PTX is kept with these only.
                "--xla_gpu_dump_llvmir --xla_dump_hlo_as_text --xla_dump_emitter_re=.*",
            )
        )
        import jax
        from cases import BROKEN, CASES

        jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled has no PTX
        jax.devices()
        reasons = {name: word for name, (_, word) in BROKEN.items()}
        cases: dict[str, Any] = {name: case for name, (case, _) in BROKEN.items()}
        if not args.self_test:
            cases = {**CASES, **STEPS}
        if args.only is not None:
            if args.only not in cases:
                parser.error(f"--only {args.only}: choose one of {', '.join(cases)}")
            cases = {args.only: cases[args.only]}
        results, failed = {}, []
        for name, case in cases.items():
            if isinstance(case, Step):
                result = check_step(case)
            else:
                result = check(name, case, Path(folder), ptxas)
            results[name] = result
            refused = result["refused"]
            wrong = reasons[name] not in refused.lower() if args.self_test else bool(refused)
            if wrong:
                failed.append(name)
            if not args.json:
                usage = {key: value for key, value in result.items() if key != "refused"}
                print(f"{'FAIL' if wrong else 'ok':5} {name}: {refused or usage}", flush=True)
    if args.json:
        from jaxrag.measure.machine import describe

        compilers = {name: importlib.metadata.version(name) for name in COMPILERS}
        found = {"machine": describe(), "compilers": compilers, "results": results}
        print(json.dumps(found | {"failed": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
