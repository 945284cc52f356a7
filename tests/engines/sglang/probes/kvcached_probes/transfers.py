"""Lets HiCache run without a GPU: stand-ins for what only CUDA has, and copies between the tiers that take time.

Scheduler and radix trees are the real ones; the transfers are plain copies whose completion events stay pending for
``KVCACHED_PROBE_TRANSFER_S`` seconds. Written for sglang 0.5.23.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Event:
    """A CUDA event that completes some time after it was recorded."""

    def __init__(self, **_: object) -> None:
        self._done_at = 0.0

    def record(self, *_: object) -> None:
        """Start the clock."""
        self._done_at = time.monotonic() + float(os.environ["KVCACHED_PROBE_TRANSFER_S"])

    def query(self) -> bool:
        """Return whether the time is up."""
        return time.monotonic() >= self._done_at

    def synchronize(self) -> None:
        """Sleep until the time is up."""
        time.sleep(max(0.0, self._done_at - time.monotonic()))

    def wait(self, *_: object) -> None:
        """Order nothing: the copies are done by the one thread there is."""

    def elapsed_time(self, _other: object) -> float:
        """Return a duration in milliseconds."""
        return 1.0


class Stream:
    """A CUDA stream on which everything happens at once."""

    cuda_stream = 0

    def wait_event(self, *_: object) -> None:
        """Order nothing."""

    def wait_stream(self, *_: object) -> None:
        """Order nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""


class Device:
    """What ``torch.cuda`` is to the modules that move cache between tiers."""

    Event = Event
    Stream = Stream

    @staticmethod
    @contextlib.contextmanager
    def stream(_stream: object) -> Iterator[None]:
        """Enter a stream."""
        yield

    @staticmethod
    def current_stream() -> Stream:
        """Return the only stream."""
        return Stream()


def backup(host: Any, _pool: object, host_indices: Any, device_indices: Any, *_: object) -> None:  # noqa: ANN401
    """Copy tokens of all layers from the "device" to the host."""
    for layer, (keys, values) in enumerate(zip(host.device_k_buffers, host.device_v_buffers, strict=True)):
        host.k_buffer[layer][host_indices] = keys[device_indices]
        host.v_buffer[layer][host_indices] = values[device_indices]


def load(
    host: Any,  # noqa: ANN401
    _pool: object,
    host_indices: Any,  # noqa: ANN401
    device_indices: Any,  # noqa: ANN401
    layer: int,
    *_: object,
    **__: object,
) -> None:
    """Copy tokens of one layer from the host to the "device"."""
    if 0 <= layer < host.target_layer_num:
        host.device_k_buffers[layer][device_indices] = host.k_buffer[layer][host_indices]
        host.device_v_buffers[layer][device_indices] = host.v_buffer[layer][host_indices]


def install() -> None:
    """Put the stand-ins where SGLang has CUDA."""
    for name in ("managers.cache_controller", "mem_cache.l2_transfer"):
        importlib.import_module(f"sglang.srt.{name}").device_module = Device
    transfer = importlib.import_module("sglang.srt.mem_cache.l2_transfer")
    transfer.make_timing_event_pair = lambda: (Event(), Event(), False)
    host = importlib.import_module("sglang.srt.mem_cache.pool_host.mha").MHATokenToKVPoolHost
    host.backup_from_device_all_layer = backup
    host.load_to_device_per_layer = load
    for module in list(sys.modules.values()):
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            if name in getattr(module, "__dict__", {}):
                setattr(module, name, lambda *_args, **_kwargs: None)
