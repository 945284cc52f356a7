"""Which GPUs a replica's members are, for the ways in which SGLang spreads ranks over devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcached.engines.sglang.placement import name_members, read_placement

UUIDS = [f"{index}aaaaaaa-0000-0000-0000-00000000000{index}" for index in range(8)]


def scheduler(**changes: int) -> SimpleNamespace:
    """Return what a scheduler knows of its place: by default rank 0 of two tensor-parallel ranks."""
    sizes = {"tp_size": 2, "attn_tp_size": 2, "attn_cp_size": 1, "attn_dp_size": 1, "pp_size": 1}
    ranks = {
        "tp_rank": 0,
        "attn_tp_rank": 0,
        "attn_cp_rank": 0,
        "attn_dp_rank": 0,
        "pp_rank": 0,
        "dp_rank": 0,
        "gpu_id": 0,
    }
    args = {"nnodes": 1, "base_gpu_id": 0, "gpu_id_step": 1}
    state = {**sizes, **ranks, **{name: value for name, value in changes.items() if name not in args}}
    args.update({name: value for name, value in changes.items() if name in args})
    return SimpleNamespace(ps=SimpleNamespace(**state), server_args=SimpleNamespace(**args))


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process see four GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=UUIDS[index]))


@pytest.mark.parametrize(
    ("changes", "indices"),
    [
        ({}, [0, 1]),
        ({"base_gpu_id": 2, "gpu_id": 2}, [2, 3]),
        ({"gpu_id_step": 2}, [0, 2]),
        ({"tp_size": 1, "attn_tp_size": 1, "dp_rank": 1, "gpu_id": 1}, [1]),
        ({"attn_tp_size": 1, "attn_dp_size": 2, "attn_dp_rank": 1, "tp_rank": 1, "gpu_id": 1}, [1]),
        ({"tp_size": 4, "attn_tp_size": 4, "nnodes": 2}, [0, 1]),
        ({"tp_size": 8, "attn_tp_size": 8}, [0, 1, 2, 3]),
    ],
    ids=["plain", "offset", "step", "second-replica", "second-attention-replica", "first-of-two-nodes", "not-all-seen"],
)
def test_members_are_the_gpus_of_the_replica(changes: dict[str, int], indices: list[int]) -> None:
    """Members go by the physical UUID, from the rank's own device on, on this node only."""
    placement = read_placement(scheduler(**changes))
    assert name_members(placement, None, "cuda") == tuple(f"GPU-{UUIDS[index]}" for index in indices)
    assert name_members(placement, None, None) == name_members(placement, None, "cuda")


def test_a_cpu_server_has_cpu_members_even_beside_gpus() -> None:
    """With ``--device cpu`` members are named by index."""
    assert name_members(read_placement(scheduler(gpu_id=0)), None, "cpu") == ("cpu-0", "cpu-1")


def test_a_machine_without_gpus_has_cpu_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was said about the device and there is no GPU, members are named by index."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert name_members(read_placement(scheduler()), None, None) == ("cpu-0", "cpu-1")


def test_slices_of_a_gpu_go_by_their_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG device is the one named in CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-one, MIG-two")
    assert name_members(read_placement(scheduler()), None, "cuda") == ("MIG-one", "MIG-two")


@pytest.mark.parametrize(
    ("changes", "given", "members"),
    [
        ({}, "a b", "a b"),
        ({}, "a", "a"),
        ({"tp_size": 1, "attn_tp_size": 1, "dp_rank": 1, "gpu_id": 5, "base_gpu_id": 4}, "a b", "b"),
        ({"tp_size": 1, "attn_tp_size": 1, "dp_rank": 2, "gpu_id": 2}, "a b", "a b"),
    ],
)
def test_given_names_count_along_the_ranks_of_the_launch(changes: dict[str, int], given: str, members: str) -> None:
    """KVCACHED_GPU_IDS names the devices in the order of the ranks; too few of them are used for every replica."""
    placement = read_placement(scheduler(**changes))
    assert name_members(placement, tuple(given.split()), "cuda") == tuple(members.split())


@pytest.mark.parametrize(
    ("changes", "replica", "width", "is_source"),
    [
        ({}, 0, 2, True),
        ({"tp_rank": 1, "attn_tp_rank": 1}, 0, 2, False),
        ({"pp_size": 2, "pp_rank": 1}, 0, 2, False),
        ({"attn_tp_size": 1, "attn_dp_size": 2, "attn_dp_rank": 1, "tp_rank": 1}, 1, 1, True),
        ({"attn_tp_size": 1, "attn_cp_size": 2, "attn_cp_rank": 1, "tp_rank": 1}, 0, 2, False),
        ({"attn_tp_size": 1, "attn_dp_size": 2, "attn_dp_rank": 1, "ep_join_rank_offset": 4}, 5, 1, True),
        ({"ep_join_rank_offset": 4}, 2, 2, True),
    ],
    ids=[
        *("first", "second", "second-stage", "second-attention-replica", "second-context-rank"),
        *("second-that-joined-behind-four", "joined-behind-two-of-two"),
    ],
)
def test_one_rank_of_each_replica_is_its_source(
    changes: dict[str, int],
    replica: int,
    width: int,
    is_source: bool,  # noqa: FBT001
) -> None:
    """The source is the rank that takes requests in: the first of a replica's first stage."""
    placement = read_placement(scheduler(**changes))
    assert (placement.replica, placement.width, placement.is_source) == (replica, width, is_source)


def test_every_rank_that_gets_the_requests_of_a_replica_has_a_place_of_its_own() -> None:
    """Tensor, context and pipeline ranks of one replica count through without a gap."""
    places = {
        read_placement(
            scheduler(attn_cp_size=2, pp_size=3, attn_tp_rank=tensor, attn_cp_rank=context, pp_rank=stage)
        ).index
        for tensor in range(2)
        for context in range(2)
        for stage in range(3)
    }
    assert places == set(range(12))
