"""Which GPUs an engine core's workers sit on, by names that no device masking changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def member_ids(engine: Any, replica: int, configured: tuple[str, ...] | None) -> list[str]:  # noqa: ANN401 - vLLM's EngineCore
    """Return the ids of the replica's members, one per device of its workers.

    ``configured`` (``KVCACHED_GPU_IDS``) wins: one entry per worker of all replicas, or of those of this node, each
    replica taking its share in order, or one entry per worker of a single replica, used by each. Without it the workers
    themselves are asked, so only call this while no step is in flight. A worker without a GPU is ``cpu-N``, counted
    over all replicas.
    """
    parallel = engine.vllm_config.parallel_config
    workers = int(parallel.world_size)
    if configured is not None:
        on_node = int(getattr(parallel, "data_parallel_rank_local", None) or 0)
        return list(dict.fromkeys(_share(configured, workers, (replica, on_node))))
    # No time limit: an executor that gives up on one worker leaves the others' answers to whoever asks next.
    names = engine.model_executor.collective_rpc(make_device_question())
    return list(dict.fromkeys(str(name) or f"cpu-{replica * workers + each}" for each, name in enumerate(names)))


def make_device_question() -> Callable[[Any], str]:
    """Return what every worker is asked: a function that travels by value and never raises.

    A worker that answers with an exception leaves the executor with answers that nobody reads, and the next question
    gets one of them. So a worker's node needs no installed kvcached: a function within a function is pickled as code.
    """

    def describe_device(worker: Any) -> str:  # noqa: ANN401 - vLLM's worker, or its wrapper
        """Return the id of the GPU that ``worker`` runs on, or "" if it has none or nobody knows."""
        import os  # noqa: PLC0415 - it travels along
        import sys  # noqa: PLC0415

        name = ""
        try:
            device = worker.device
            index = device.index or 0
            if device.type != "cpu":
                name = f"{device.type}-{index}"
            if device.type == "cuda":
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
                if index < len(visible) and visible[index].startswith("MIG-"):
                    return visible[index]  # two slices of one GPU may bear the GPU's own id
                uuid = str(getattr(sys.modules["torch"].cuda.get_device_properties(device), "uuid", ""))
                name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" if uuid else name
        except Exception:  # noqa: BLE001, S110 - never raises, see above; the name that is known so far will do
            pass
        return name

    return describe_device


def _share(configured: tuple[str, ...], workers: int, places: tuple[int, ...]) -> tuple[str, ...]:
    """Return the entries at the first of ``places`` for which ``configured`` has a whole share, else all."""
    for place in places:
        share = configured[place * workers : (place + 1) * workers]
        if len(share) == workers:
            return share
    return configured
