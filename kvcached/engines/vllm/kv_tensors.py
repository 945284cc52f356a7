"""What runs inside vLLM's workers: find where the KV of a block lies, and give the memory of free blocks back.

These functions travel by value, together with those of ``kvcached.memory.madvise`` and ``kvcached.guards``, so a
worker's node needs no kvcached. What a worker is asked never raises: one that answers with an exception leaves the
executor with an answer that the next question would get.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvcached.guards import call_guarded
from kvcached.memory.madvise import avoid_huge_pages, find_obstacle, name_error, return_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    RegionTuple = tuple[int, int, int]

ON_DEVICE = "its KV is in the memory of a device ({}), which is not returned by this release"
UNKNOWN_LAYOUT = "the layout of its KV tensors is not known"


def describe_memory(worker: Any, blocks: int) -> tuple[int, int, str]:  # noqa: ANN401 - vLLM's worker, or its wrapper
    """Return the bytes of one block in this worker, its regions, and why its memory cannot be returned (or ``""``).

    Reads smaps once. Where memory is not returned, the bytes are still told if they are known.
    """
    return call_guarded(unknown_memory, find_memory, worker, blocks)


def return_blocks(
    worker: Any,  # noqa: ANN401
    runs: list[tuple[int, int]],
    blocks: int,
    first: bool,  # noqa: FBT001 - passed by position through vLLM's executor
) -> tuple[int, str]:
    """Return the memory of ``runs`` of block ids; bytes that are back, and why others are not (or ``""``).

    The tensors are looked up anew each time, because an engine may replace them. With ``first`` they are told to do
    without huge pages from now on.
    """
    return call_guarded(nothing_returned, find_and_return, worker, runs, blocks, first)


def find_memory(worker: Any, blocks: int) -> tuple[int, int, str]:  # noqa: ANN401
    """Do what :func:`describe_memory` does; may raise."""
    regions, obstacle = find_regions(worker, blocks)
    obstacle = obstacle or find_obstacle(regions)
    block_bytes = sum(region[1] for region in regions) or measure(worker) // blocks
    return block_bytes, len(regions), obstacle


def unknown_memory(error: Exception) -> tuple[int, int, str]:
    """Answer for tensors that cannot be looked at."""
    return 0, 0, f"its KV tensors cannot be looked at ({name_error(error)})"


def find_and_return(worker: Any, runs: list[tuple[int, int]], blocks: int, first: bool) -> tuple[int, str]:  # noqa: ANN401, FBT001
    """Do what :func:`return_blocks` does; may raise."""
    regions, obstacle = find_regions(worker, blocks)
    if obstacle:
        return 0, obstacle
    if first:
        avoid_huge_pages(regions)
    return return_rows(regions, runs)


def nothing_returned(error: Exception) -> tuple[int, str]:
    """Answer for memory that could not be returned."""
    return 0, name_error(error)


def find_regions(worker: Any, blocks: int) -> tuple[list[RegionTuple], str]:  # noqa: ANN401
    """Return the regions of all KV tensors, each with ``blocks`` rows, and why their memory is not returnable."""
    found: dict[RegionTuple, None] = {}
    for tensors in layers_of(worker):
        devices = {each.device.type for each in tensors} - {"cpu"}
        if devices:
            return [], ON_DEVICE.format(", ".join(sorted(devices)))
        region = region_of(tensors, blocks)
        if region is None:
            return [], UNKNOWN_LAYOUT
        found[region] = None  # layers that share their KV are views of one tensor
    regions = sorted(found)
    for (address, row_bytes, rows), (following, _, _) in pairwise(regions):
        if address + row_bytes * rows > following:
            return [], UNKNOWN_LAYOUT
    return regions, ""


def layers_of(worker: Any) -> Iterator[list[Any]]:  # noqa: ANN401
    """Yield the tensors of each layer that keeps any."""
    for entry in worker.model_runner.kv_caches:
        tensors = entry if isinstance(entry, (list, tuple)) else (entry,)
        kept = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
        if kept:
            yield kept


def measure(worker: Any) -> int:  # noqa: ANN401
    """Return the bytes of all KV tensors, each counted once, whatever their layout."""
    sizes = {each.data_ptr(): each.numel() * each.element_size() for layer in layers_of(worker) for each in layer}
    return sum(sizes.values())


def region_of(tensors: list[Any], blocks: int) -> RegionTuple | None:
    """Return the region of one layer, whose state may be several tensors side by side in each block; None if unclear.

    The first dimension counts blocks, or a fixed number of smaller ones for each block.
    """
    rows = set()
    for tensor in tensors:
        inner = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:]))  # noqa: B905
        if inner >= tensor.stride(0) or tensor.shape[0] % blocks:
            return None
        rows.add(tensor.stride(0) * tensor.element_size() * (tensor.shape[0] // blocks))
    address = min(tensor.data_ptr() for tensor in tensors)
    if len(rows) > 1 or (len(tensors) > 1 and not fits_one_row(tensors, address, blocks)):
        return None
    return address, rows.pop(), blocks


def fits_one_row(tensors: list[Any], address: int, blocks: int) -> bool:
    """Return whether all of ``tensors`` lie within one row that begins at ``address``."""
    for tensor in tensors:
        inner = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:]))  # noqa: B905
        end = tensor.data_ptr() + (inner + 1) * tensor.element_size()
        if tensor.shape[0] != blocks or end > address + tensor.stride(0) * tensor.element_size():
            return False
    return True
