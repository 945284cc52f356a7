"""How a replica's members are named, without a GPU: what the workers say, and what the operator says instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached.engines.vllm.devices import describe_device, member_ids

UUID = "3d2f1c9e-7a51-4f0e-9f6a-0c8b1e2d3f4a"


def engine(workers: int, answers: list[str] | None) -> Any:  # noqa: ANN401 - as much of an EngineCore as is asked
    """Return an engine core whose workers answer, or fail to."""

    def collective_rpc(method: object, timeout: float) -> list[str]:
        assert method is describe_device
        assert timeout > 0
        if answers is None:
            raise TimeoutError
        return answers

    return SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=workers)),
        model_executor=SimpleNamespace(collective_rpc=collective_rpc),
    )


@pytest.mark.parametrize(
    ("replica", "answers", "configured", "members"),
    [
        (0, ["GPU-a", "GPU-b"], None, ["GPU-a", "GPU-b"]),
        (1, ["GPU-c", "GPU-d"], None, ["GPU-c", "GPU-d"]),
        (0, ["GPU-a", "GPU-a"], None, ["GPU-a"]),
        (0, ["", ""], None, ["cpu-0", "cpu-1"]),
        (1, ["", ""], None, ["cpu-2", "cpu-3"]),
        (0, None, None, ["cpu-0", "cpu-1"]),
        (0, ["GPU-a", "GPU-b"], ("x", "y"), ["x", "y"]),
        (1, ["GPU-a", "GPU-b"], ("x", "y"), ["x", "y"]),
        (0, ["GPU-a", "GPU-b"], ("w", "x", "y", "z"), ["w", "x"]),
        (1, ["GPU-a", "GPU-b"], ("w", "x", "y", "z"), ["y", "z"]),
    ],
)
def test_members_are_what_the_workers_say_unless_the_operator_says_otherwise(
    replica: int,
    answers: list[str] | None,
    configured: tuple[str, ...] | None,
    members: list[str],
) -> None:
    """UUIDs of the workers, cpu-N over all replicas without GPUs, or the replica's share of KVCACHED_GPU_IDS."""
    assert member_ids(engine(2, answers), replica, configured) == members


@pytest.mark.parametrize(
    ("uuid", "described"),
    [(UUID, f"GPU-{UUID}"), (f"GPU-{UUID}", f"GPU-{UUID}"), (f"MIG-{UUID}", f"MIG-{UUID}"), ("", "cuda-3")],
)
def test_a_gpu_is_named_by_its_uuid(uuid: str, described: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device is named by the UUID that the driver gives it, whatever index masking left it."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    assert describe_device(SimpleNamespace(device=torch.device("cuda", 3))) == described


def test_a_worker_without_a_gpu_has_no_name() -> None:
    """A CPU worker, or one that knows no device, leaves the name to the engine core."""
    assert describe_device(SimpleNamespace(device=torch.device("cpu"))) == ""
    assert describe_device(SimpleNamespace()) == ""
