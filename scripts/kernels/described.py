"""Programs compiled for an H200 that is only described, on a machine without a GPU."""

from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir

# What XLA wants to know of the chip: an H200, as its driver describes it.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""


def described_mesh() -> Any:
    """A mesh of one H200 that is not there; needs XLA's CUDA plug-in."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("x",))


def compiled_for(
    function: Any,
    arguments: tuple[Any, ...],
    host: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> Any:
    """A jitted function compiled for the described chip.

    Args:
      function: what is compiled.
      arguments: shapes, of any tree.
      host: which arrays of the arguments, counted flat, lie in pinned host memory.
      options: of XLA.
    """
    mesh = described_mesh()
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), arguments
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = function.trace(*arguments).lower(lowering_platforms=("cuda",))
    if host:
        pin(lowered.compiler_ir(), host)
    return lowered.compile(options)


def pin(module: Any, arguments: tuple[int, ...]) -> None:
    """Say that arguments of a lowered program lie in pinned host memory.

    Of a chip that is only described JAX knows one memory, and shardings name no other.
    """
    with module.context:
        (main,) = (
            op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"'
        )
        attributes = list(main.attributes["arg_attrs"])
        for number in arguments:
            named = {each.name: each.attr for each in attributes[number]}
            named["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            attributes[number] = ir.DictAttr.get(named)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def bytes_of(shapes: Any) -> int:
    """Of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
