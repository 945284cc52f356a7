"""A real etcd of one or three members on free ports of the loopback interface."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from kvcached.fleet.etcd.certificates import Certificates
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
        self.etcdctl_options: list[str] = []
        self.certificates: Certificates | None = None
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
        scheme = "etcd" if self.certificates is None else "etcds"
        return f"{scheme}://{','.join(endpoints)}/{name}"

    def wait_until_ready(self) -> None:
        """Wait until every member answers a read that needs a leader."""
        deadline = time.monotonic() + START_S
        for endpoint in self.clients:
            client = EtcdClient([endpoint], self.certificates)
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
        client = EtcdClient(self.clients, self.certificates)
        try:
            return client.list_prefixes(("/none/",)).revision
        finally:
            client.close()

    def leader(self) -> int:
        """Return the index of the member that leads."""
        found = json.loads(self.etcdctl("endpoint", "status", "--write-out=json"))
        leaders = [one["Endpoint"] for one in found if one["Status"]["leader"] == one["Status"]["header"]["member_id"]]
        return self.clients.index(leaders[0])

    def etcdctl(self, *arguments: str) -> str:
        """Run etcdctl on all members; what it printed."""
        command = ["etcdctl", f"--endpoints={','.join(self.clients)}", *self.etcdctl_options, *arguments]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def restore(self, snapshot: Path) -> None:
        """Make the data folder of the only member from a snapshot."""
        peer = self._peers[0]
        options = ["--name=m0", f"--initial-cluster=m0={peer}", f"--initial-advertise-peer-urls={peer}"]
        self.etcdctl("snapshot", "restore", str(snapshot), f"--data-dir={self.directory / 'm0'}", *options)

    def stop(self) -> None:
        """End all members."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def _launch(self, index: int, *options: str) -> subprocess.Popen[bytes]:
        scheme = "http" if self.certificates is None else "https"
        client, peer = f"{scheme}://{self.clients[index]}", self._peers[index]
        command = ["etcd", "--name", f"m{index}", "--data-dir", str(self.directory / f"m{index}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", self._cluster, "--enable-grpc-gateway=false", "--logger=zap", *options]
        if self.certificates is not None:
            command += [f"--cert-file={self.directory / 'server.pem'}", f"--key-file={self.directory / 'server.key'}"]
            command += ["--client-cert-auth", f"--trusted-ca-file={self.directory / 'ca.pem'}"]
        command += ["--heartbeat-interval=100", "--election-timeout=1000"]
        with (self.directory / f"m{index}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def use_tls(self) -> None:
        """Make certificates for the server and its users ``root`` and ``agent-n1``, before the start."""
        folder = self.directory
        names = "subjectAltName=IP:127.0.0.1"
        authority = ["-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "1"]
        self._openssl("req", *_NEW_KEY, *authority)
        (folder / "names").write_text(names)
        for name in ("server", "root", "agent-n1"):
            self._openssl("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            sign = ["-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
            self._openssl("x509", "-req", *sign, "-out", f"{name}.pem", "-days", "1", "-extfile", "names")
        ca, cert, key = (str(folder / file) for file in ("ca.pem", "root.pem", "root.key"))
        self.certificates = Certificates(ca, cert, key)
        self.etcdctl_options = [f"--cacert={ca}", f"--cert={cert}", f"--key={key}"]

    def turn_accounts_on(self, fleet: str) -> None:
        """Let root do everything, and the agent of node n1 what docs/fleet.md gives to its role."""
        keys = f"/kvcached/{fleet}/"
        for name in ("root", "agent-n1"):
            self.etcdctl("user", "add", name, "--no-password")
            self.etcdctl("role", "add", name)
        for part in ("desired/", "holds/", "agents/"):
            self.etcdctl("role", "grant-permission", "agent-n1", "read", "--prefix=true", f"{keys}{part}")
        self.etcdctl("role", "grant-permission", "agent-n1", "readwrite", f"{keys}agents/n1")
        self.etcdctl("role", "grant-permission", "agent-n1", "readwrite", "--prefix=true", f"{keys}status/n1/")
        for name in ("root", "agent-n1"):
            self.etcdctl("user", "grant-role", name, name)
        self.etcdctl("auth", "enable")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.directory, capture_output=True, check=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
