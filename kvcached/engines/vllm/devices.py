"""Which GPUs an engine core's workers sit on, by names that no device masking changes."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 30.0


def member_ids(engine: Any, replica: int, configured: tuple[str, ...] | None) -> list[str]:  # noqa: ANN401 - vLLM's EngineCore
    """Return the ids of the replica's members, one per device of its workers.

    ``configured`` (``KVCACHED_GPU_IDS``) wins: one entry per worker of all replicas, each replica taking its share in
    order, or one entry per worker of a single replica, used by each. Without it the workers themselves are asked, so
    only call this while no step is in flight. A worker without a GPU is ``cpu-N``, counted over all replicas.
    """
    workers = int(engine.vllm_config.parallel_config.world_size)
    first = replica * workers
    if configured is not None:
        share = configured[first : first + workers]
        return list(dict.fromkeys(share if len(share) == workers else configured))
    names = _ask_workers(engine) or [""] * workers
    return list(dict.fromkeys(name or f"cpu-{first + index}" for index, name in enumerate(names)))


def describe_device(worker: Any) -> str:  # noqa: ANN401 - vLLM's worker, or its wrapper
    """Return the id of the GPU that ``worker`` runs on, or "" if it has none. Runs in the worker's process."""
    device = getattr(worker, "device", None)
    if device is None or device.type == "cpu":
        return ""
    if device.type == "cuda":
        import torch  # noqa: PLC0415 - only ever imported where vLLM's worker already did

        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if uuid:
            return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return f"{device.type}-{device.index or 0}"


def _ask_workers(engine: Any) -> list[str]:  # noqa: ANN401
    """Return what each worker says of its device, or nothing if they cannot be asked."""
    try:
        return [str(name) for name in engine.model_executor.collective_rpc(describe_device, timeout=_ANSWER_WITHIN_S)]
    except Exception:  # noqa: BLE001 - whatever an executor raises, the engine has to serve
        _log.warning("the workers did not tell their devices; set KVCACHED_GPU_IDS to name them", exc_info=True)
        return []
