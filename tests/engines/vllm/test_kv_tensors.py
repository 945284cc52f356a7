"""Where the KV of a block lies in a worker's tensors, for every layout that vLLM gives them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from kvcached.engines.vllm import kv_tensors
from kvcached.engines.vllm.worker_memory import travel_by_value

BLOCKS = 8


def worker(*entries: Any) -> Any:  # noqa: ANN401 - tensors, or lists of them
    """Return what has KV tensors as a worker of vLLM has them."""
    return SimpleNamespace(model_runner=SimpleNamespace(kv_caches=list(entries)))


def test_a_block_is_one_piece_of_each_layer_and_shared_layers_count_once() -> None:
    """Layers that share their KV are views of one tensor, and are given back once."""
    first, second = (torch.zeros(BLOCKS, 2, 16, 32, dtype=torch.bfloat16) for _ in range(2))
    regions, obstacle = kv_tensors.find_regions(worker(first, second, first, None, torch.zeros(0)), BLOCKS)
    assert obstacle == ""
    assert regions == sorted((each.data_ptr(), 2 * 16 * 32 * 2, BLOCKS) for each in (first, second))


def test_a_block_may_be_several_rows_of_the_kernel() -> None:
    """Where the kernel's blocks are smaller, a block is as many of them as it takes."""
    tensor = torch.zeros(BLOCKS * 4, 2, 16, 32)
    regions, _ = kv_tensors.find_regions(worker(tensor), BLOCKS)
    assert regions == [(tensor.data_ptr(), 4 * 2 * 16 * 32 * 4, BLOCKS)]


def test_all_states_of_a_layer_lie_in_one_row() -> None:
    """A Mamba layer has two tensors side by side in each block, padded to the block's size; the row has all of it."""
    raw = torch.zeros(BLOCKS * 1024, dtype=torch.int8).view(torch.float32)
    convolution = torch.as_strided(raw, (BLOCKS, 3, 8), (256, 8, 1))
    state = torch.as_strided(raw, (BLOCKS, 4, 32), (256, 32, 1), storage_offset=24)
    attention = raw.view(BLOCKS, 256)
    regions, obstacle = kv_tensors.find_regions(worker([convolution, state], attention), BLOCKS)
    assert (regions, obstacle) == ([(raw.data_ptr(), 1024, BLOCKS)], "")


@pytest.mark.parametrize(
    "entries",
    [
        (torch.zeros(2, BLOCKS * 3, 16, 32),),
        (torch.zeros(BLOCKS + 1, 64),),
        (torch.zeros(BLOCKS, 64, 32).transpose(0, 1),),
        ([torch.zeros(BLOCKS, 64), torch.zeros(BLOCKS, 64)],),
        ([torch.zeros(BLOCKS, 64), torch.zeros(BLOCKS, 32)],),
    ],
    ids=["keys before values", "another number of blocks", "not outermost", "two tensors apart", "two sizes"],
)
def test_an_unknown_layout_is_refused(entries: tuple[Any, ...]) -> None:
    """Where a block's place is not certain, nothing is returned, and the size of a block is not guessed."""
    regions, obstacle = kv_tensors.find_regions(worker(*entries), BLOCKS)
    assert (regions, obstacle) == ([], kv_tensors.UNKNOWN_LAYOUT)
    assert kv_tensors.return_blocks(worker(*entries), [(0, 1)], BLOCKS, first=True) == (0, kv_tensors.UNKNOWN_LAYOUT)


def test_tensors_that_overlap_are_refused() -> None:
    """Two views of one tensor that cut it differently would take each other's blocks."""
    tensor = torch.zeros(BLOCKS, 64)
    assert kv_tensors.find_regions(worker(tensor, tensor[1:, :].view(7, 64)), 7)[1] == kv_tensors.UNKNOWN_LAYOUT


def test_tensors_on_a_device_are_measured_and_not_returned() -> None:
    """The memory of a device needs another way back; the size of a block is known all the same."""
    tensor = torch.zeros(BLOCKS, 2, 16, 32, device="meta")
    row_bytes, _, obstacle = kv_tensors.describe_memory(worker(tensor), BLOCKS)
    assert row_bytes == 2 * 16 * 32 * 4
    assert obstacle.startswith("its KV is in the memory of a device (meta)")


@pytest.mark.parametrize("broken", [SimpleNamespace(), None])
def test_a_worker_without_tensors_answers_with_a_reason(broken: object) -> None:
    """Nothing that a worker is asked raises there."""
    assert kv_tensors.describe_memory(broken, BLOCKS)[2].startswith("its KV tensors cannot be looked at (")
    returned, reason = kv_tensors.return_blocks(broken, [(0, 1)], BLOCKS, first=True)
    assert (returned, reason[:15]) == (0, "AttributeError:")


def test_a_worker_needs_no_kvcached() -> None:
    """The functions travel by value, with all that they call."""
    travel_by_value()
    tensor = torch.zeros(BLOCKS, 2048)
    sent = [cloudpickle.dumps(each) for each in (kv_tensors.describe_memory, kv_tensors.return_blocks)]
    program = f"""
import pickle, sys, types
sys.modules["kvcached"] = None
describe, give = (pickle.loads(each) for each in {sent!r})
nothing = types.SimpleNamespace(model_runner=types.SimpleNamespace(kv_caches=[]))
print(describe(nothing, 8), give(nothing, [(0, 1)], 8, True))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(0, 0, 'it has no KV tensors in main memory') (0, '')"
    assert pickle.loads(sent[0]) is not kv_tensors.describe_memory  # noqa: S301 - our own
    assert kv_tensors.find_regions(worker(tensor), BLOCKS)[1] == ""
