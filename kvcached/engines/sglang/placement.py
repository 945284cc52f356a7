"""The place of a scheduler process: its replica, its index among the ranks, and the GPUs of its replica."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.guards import call_guarded

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Placement:
    """One scheduler process among the others of its launch.

    ``width`` is the number of ranks that share one request queue, and therefore hold equal prefix caches: the tensor
    (and context) parallel group of one data-parallel replica.
    """

    replica: int
    width: int
    index: int
    """The place of this rank among all that get the replica's requests, its pipeline stages included."""
    pp_rank: int
    pp_size: int
    is_source: bool
    """Whether this rank takes requests in and broadcasts them to the others of its replica."""
    gpu_indices: tuple[int, ...]
    """Device indices of the replica's ranks on this node, this rank's own first (meant for source ranks)."""
    first_gpu_index: int
    """Device index of the launch's first rank on this node."""
    gpu_index_step: int

    @property
    def ranks(self) -> int:
        """How many ranks get the replica's requests."""
        return self.width * self.pp_size


def read_placement(scheduler: Any) -> Placement:  # noqa: ANN401 - SGLang's scheduler, whose type is not importable here
    """Read the placement of ``scheduler``; valid from ``Scheduler.init_request_dispatcher`` on."""
    parallel = _parallel_state(scheduler)
    args = scheduler.server_args
    width = parallel.attn_tp_size * parallel.attn_cp_size
    # Data parallelism is either by separate schedulers (dp_rank) or inside one tensor-parallel group (attn_dp_rank).
    replica = parallel.attn_dp_rank if parallel.attn_dp_size > 1 else parallel.dp_rank
    # Ranks that join a running launch count from 0 among themselves.
    joined_behind = getattr(parallel, "ep_join_rank_offset", 0) // width
    within_stage = parallel.attn_cp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
    return Placement(
        replica=joined_behind + (replica or 0),
        width=width,
        index=parallel.pp_rank * width + within_stage,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
        is_source=parallel.pp_rank == 0 and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0,
        gpu_indices=_local_gpu_indices(args, parallel, width),
        first_gpu_index=args.base_gpu_id,
        gpu_index_step=args.gpu_id_step,
    )


def guess_placement(scheduler: Any) -> Placement:  # noqa: ANN401
    """Return the placement of ``scheduler`` as far as it can be told of an SGLang that keeps its ranks elsewhere.

    Good for a slot that only says that nothing is controlled: the first rank of all opens it, for all.
    """
    return call_guarded(lambda _: _guess_from_options(scheduler), read_placement, scheduler)


def name_members(placement: Placement, given: Sequence[str] | None, device: str | None) -> tuple[str, ...]:
    """Return the member ids of the replica on this node: GPU UUIDs, or ``cpu-N`` where there are no GPUs.

    ``given`` ids (``KVCACHED_GPU_IDS``) name the devices of the whole launch in the order of its ranks; a replica takes
    its own ones, or all of them if they are too few to tell. A device that this process cannot see, because each
    process was given just its own one, is left out. ``device`` is SGLang's option; None lets the machine decide.
    """
    indices = placement.gpu_indices
    if given is not None:
        positions = [(index - placement.first_gpu_index) // placement.gpu_index_step for index in indices]
        return tuple(given[position] for position in positions if position < len(given)) or tuple(given)
    if device in (None, "cuda"):
        found = tuple(uuid for index in indices if (uuid := _gpu_uuid(index)) is not None)
        if found:
            return found
    return tuple(f"cpu-{index}" for index in indices)


def _guess_from_options(scheduler: Any) -> Placement:  # noqa: ANN401
    args = getattr(scheduler, "server_args", None)
    rank = _global_rank()
    width = int(getattr(args, "tp_size", 1))
    first = int(getattr(args, "base_gpu_id", 0))
    step = int(getattr(args, "gpu_id_step", 1))
    return Placement(
        replica=0,
        width=width,
        index=rank,
        pp_rank=0,
        pp_size=int(getattr(args, "pp_size", 1)),
        is_source=rank == 0,
        gpu_indices=tuple(first + step * place for place in range(width)),
        first_gpu_index=first,
        gpu_index_step=step,
    )


def _parallel_state(scheduler: Any) -> Any:  # noqa: ANN401
    """Return SGLang's own record of ranks and sizes; releases up to 0.5.20 keep it on the scheduler."""
    state = getattr(scheduler, "ps", None)
    return state if state is not None else importlib.import_module("sglang.srt.runtime_context").get_parallel()


def _local_gpu_indices(args: Any, parallel: Any, width: int) -> tuple[int, ...]:  # noqa: ANN401
    """Return the device indices of the ranks that follow this one, within its replica and its node.

    SGLang numbers devices along the tensor-parallel rank with a fixed step, and splits a group that is wider than a
    node evenly over the nodes.
    """
    nodes_per_group = max(args.nnodes // parallel.pp_size, 1)
    ranks_per_node = max(parallel.tp_size // nodes_per_group, 1)
    count = min(width, ranks_per_node - parallel.tp_rank % ranks_per_node)
    own = _own_gpu_index(parallel)
    return tuple(own + step * args.gpu_id_step for step in range(count))


def _global_rank() -> int:
    distributed = importlib.import_module("torch.distributed")
    return int(distributed.get_rank()) if distributed.is_initialized() else 0


def _own_gpu_index(parallel: Any) -> int:  # noqa: ANN401
    index = getattr(parallel, "gpu_id", None)
    if index is None:
        index = importlib.import_module("sglang.srt.runtime_context").get_device().gpu_id
    return int(index)


def _gpu_uuid(index: int) -> str | None:
    """Return the UUID of the CUDA device ``index`` as seen by this process, or None if it sees no such device."""
    cuda = importlib.import_module("torch").cuda
    if index >= cuda.device_count():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].strip().startswith("MIG-"):
        return visible[index].strip()  # a slice of a GPU: torch reports the whole GPU's UUID for it
    return f"GPU-{cuda.get_device_properties(index).uuid}"
