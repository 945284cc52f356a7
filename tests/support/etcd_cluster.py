"""A real etcd of one or three members on free ports of the loopback interface."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from kvcached.fleet.etcd.etcd_client import EtcdClient, EtcdError

if TYPE_CHECKING:
    from pathlib import Path

START_S = 60.0


class EtcdCluster:
    """Members that can be killed, frozen and started again. The gateway is off: nothing of ours uses it."""

    def __init__(self, directory: Path, members: int = 1) -> None:
        self.directory = directory
        ports = free_ports(2 * members)
        self.clients = [f"127.0.0.1:{port}" for port in ports[:members]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._cluster = ",".join(f"m{index}={peer}" for index, peer in enumerate(self._peers))

    def start(self) -> None:
        """Start all members, and wait until they serve."""
        self.processes = [self._launch(index) for index in range(len(self.clients))]
        self.wait_until_ready()

    def restart(self, index: int, *options: str) -> None:
        """Start one member again."""
        self.processes[index] = self._launch(index, *options)

    def url(self, name: str = "test", first: int = 0) -> str:
        """Return the fleet's URL, with another member first."""
        endpoints = self.clients[first:] + self.clients[:first]
        return f"etcd://{','.join(endpoints)}/{name}"

    def wait_until_ready(self) -> None:
        """Wait until every member answers a read that needs a leader."""
        deadline = time.monotonic() + START_S
        for endpoint in self.clients:
            client = EtcdClient([endpoint], None)
            while True:
                try:
                    client.get("/ready")
                    break
                except EtcdError:
                    assert time.monotonic() < deadline, f"no etcd at {endpoint}"
                    client.change_endpoint()
                    time.sleep(0.1)
            client.close()

    def revision(self) -> int:
        """Return the store's revision now."""
        client = EtcdClient(self.clients, None)
        try:
            return client.list_prefixes(("/none/",)).revision
        finally:
            client.close()

    def stop(self) -> None:
        """End all members."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def _launch(self, index: int, *options: str) -> subprocess.Popen[bytes]:
        client, peer = f"http://{self.clients[index]}", self._peers[index]
        command = ["etcd", "--name", f"m{index}", "--data-dir", str(self.directory / f"m{index}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", self._cluster, "--enable-grpc-gateway=false", "--logger=zap", *options]
        command += ["--heartbeat-interval=100", "--election-timeout=1000"]
        with (self.directory / f"m{index}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
