"""How a replica's members are named, without a GPU: what the workers say, and what the operator says instead."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from kvcached.engines.vllm.devices import make_device_question, member_ids

UUID = "3d2f1c9e-7a51-4f0e-9f6a-0c8b1e2d3f4a"


def engine(workers: int, answers: list[str], on_node: int | None = None) -> Any:  # noqa: ANN401 - as much of an EngineCore as is asked
    """Return an engine core whose workers answer."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=workers, data_parallel_rank_local=on_node)
        ),
        model_executor=SimpleNamespace(collective_rpc=lambda _question: answers),
    )


@pytest.mark.parametrize(
    ("replica", "answers", "configured", "members"),
    [
        (0, ["GPU-a", "GPU-b"], None, ["GPU-a", "GPU-b"]),
        (1, ["GPU-c", "GPU-d"], None, ["GPU-c", "GPU-d"]),
        (0, ["GPU-a", "GPU-a"], None, ["GPU-a"]),
        (0, ["", ""], None, ["cpu-0", "cpu-1"]),
        (1, ["", ""], None, ["cpu-2", "cpu-3"]),
        (0, ["GPU-a", "GPU-b"], ("x", "y"), ["x", "y"]),
        (1, ["GPU-a", "GPU-b"], ("x", "y"), ["x", "y"]),
        (0, ["GPU-a", "GPU-b"], ("w", "x", "y", "z"), ["w", "x"]),
        (1, ["GPU-a", "GPU-b"], ("w", "x", "y", "z"), ["y", "z"]),
    ],
)
def test_members_are_what_the_workers_say_unless_the_operator_says_otherwise(
    replica: int,
    answers: list[str],
    configured: tuple[str, ...] | None,
    members: list[str],
) -> None:
    """UUIDs of the workers, cpu-N over all replicas without GPUs, or the replica's share of KVCACHED_GPU_IDS."""
    assert member_ids(engine(2, answers), replica, configured) == members


@pytest.mark.parametrize(
    ("replica", "on_node", "members"),
    [(0, 0, ["w", "x"]), (1, 1, ["y", "z"]), (2, 0, ["w", "x"]), (3, 1, ["y", "z"])],
)
def test_a_list_for_one_node_is_shared_out_among_its_replicas(replica: int, on_node: int, members: list[str]) -> None:
    """On the second of two nodes with two replicas each, the first replica there takes the first share."""
    assert member_ids(engine(2, [], on_node), replica, ("w", "x", "y", "z")) == members


@pytest.mark.parametrize(
    ("uuid", "described"),
    [(UUID, f"GPU-{UUID}"), (f"GPU-{UUID}", f"GPU-{UUID}"), (f"MIG-{UUID}", f"MIG-{UUID}"), ("", "cuda-3")],
)
def test_a_gpu_is_named_by_its_uuid(uuid: str, described: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device is named by the UUID that the driver gives it, whatever index masking left it."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    assert make_device_question()(SimpleNamespace(device=torch.device("cuda", 3))) == described


def test_slices_of_one_gpu_are_named_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two MIG slices, whose driver may tell the GPU's own UUID for both, are told apart by what is visible."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-one,MIG-two")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
    workers = [SimpleNamespace(device=torch.device("cuda", index)) for index in range(2)]
    assert [make_device_question()(worker) for worker in workers] == ["MIG-one", "MIG-two"]


class Faulty:
    """A worker of another make, whose device cannot even be asked for."""

    @property
    def device(self) -> object:
        """Raise what no caller expects."""
        raise RuntimeError


def test_a_worker_that_cannot_tell_answers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker answers with an exception, which would leave the other workers' answers to the next question."""
    question = make_device_question()
    assert question(SimpleNamespace(device=torch.device("cpu"))) == ""
    assert [question(SimpleNamespace()), question(Faulty()), question(SimpleNamespace(device=object()))] == [""] * 3

    def lost(_device: object) -> None:
        message = "CUDA error: the device was lost"
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lost)
    assert question(SimpleNamespace(device=torch.device("cuda", 1))) == "cuda-1"


def test_a_workers_node_needs_no_kvcached() -> None:
    """The question travels by value: a process that cannot import the plugin answers it."""
    program = """
import sys
sys.modules["kvcached"] = None
import cloudpickle
print(repr(cloudpickle.loads(sys.stdin.buffer.read())(object())))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=cloudpickle.dumps(make_device_question()),
        capture_output=True,
        check=False,
    )
    assert done.stdout.strip() == b"''", done.stderr
