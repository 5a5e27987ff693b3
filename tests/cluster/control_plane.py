"""The control plane of a cluster: etcd, API server, scheduler and controllers, in a network namespace to which its
nodes are connected.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.cluster.binaries import Binaries
from tests.cluster.certificates import Certificates
from tests.cluster.cluster_node import ClusterNode
from tests.cluster.kube_api import KubeApi, wait_for
from tests.container.engine_host import END_S, PATH, CommandResult

ADDRESS = "10.98.0.1"
NODES = "10.98.0.{}"
PODS = "10.244.{}.0/24"
SERVICES = "10.96.0.0/16"
SERVICE = "10.96.0.1"
"""Address of the API server's Service, which pods use. The API server itself listens on this
address, so that nodes need no kube-proxy.
"""
URL = f"https://{ADDRESS}"
START_S = 120.0


class ControlPlane:
    """A control plane: `start` brings it up, `close` stops it, `api` sends requests to it, `kubectl` runs a command as
    administrator.
    """

    def __init__(self, base: Path, binaries: Binaries, *, key_usage: bool = True) -> None:
        self.base = base
        self.binaries = binaries
        base.mkdir(parents=True)
        self.certificates = Certificates(base / "pki", key_usage=key_usage)
        self.socket = base / "api.sock"
        self.api = KubeApi(self.socket)
        self._namespace: subprocess.Popen[str] | None = None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._plugged = 0

    def start(self) -> None:
        """Start everything, and wait until the API server and the controllers work."""
        names = (f"IP:{ADDRESS}", f"IP:{SERVICE}", "DNS:kubernetes.default.svc")
        self.certificates.sign("apiserver", "kube-apiserver", names=names)
        self.certificates.sign("to-kubelets", "kube-apiserver", group="system:masters")
        for name, user, group in (
            ("admin", "admin", "system:masters"),
            ("scheduler", "system:kube-scheduler", ""),
            ("controllers", "system:kube-controller-manager", ""),
        ):
            self.certificates.sign(name, user, group=group)
            self.certificates.kubeconfig(name, URL)
        self._make_network()
        self._start_daemons()

    def _make_network(self) -> None:
        lines = [
            "ip link set lo up",
            f"ip address add {SERVICE}/32 dev lo",
            "ip link add nodes type bridge",
            f"ip address add {ADDRESS}/24 dev nodes",
            "ip link set nodes up",
            "echo 1 >/proc/sys/net/ipv4/ip_forward",
            "echo ready",
            "exec cat >/dev/null",
        ]
        self._namespace = subprocess.Popen(
            ["unshare", "--net", "sh", "-ec", "\n".join(lines)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": PATH},
            start_new_session=True,
        )
        assert self._namespace.stdout is not None
        assert self._namespace.stdout.readline() == "ready\n", "no network for the control plane"

    def plug(self, node: ClusterNode) -> None:
        """Connect a node that has just booted to the network."""
        assert self._namespace is not None
        self._plugged += 1
        port = f"port{self._plugged}"
        script = f"""
            ip link add {port} type veth peer name eth0 netns {node.pid}
            ip link set {port} master nodes up
            ip route replace {node.pods} via {node.address}
        """
        self._inside("sh", "-ec", script)
        node.check("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        node.check("ip", "link", "set", "eth0", "up")
        node.check("ip", "route", "add", "default", "via", ADDRESS)

    def _command_line(self, *arguments: str) -> list[str]:
        assert self._namespace is not None
        return ["nsenter", "-t", str(self._namespace.pid), "-n", "--", *arguments]

    def _inside(self, *arguments: str) -> None:
        done = subprocess.run(
            self._command_line(*arguments),
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": PATH},
        )
        assert done.returncode == 0, done.stderr

    def _start_daemons(self) -> None:
        pki = self.certificates
        etcd = "http://127.0.0.1:2379"
        self._start(
            "etcd", f"--data-dir={self.base}/etcd", f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}", "--listen-peer-urls=http://127.0.0.1:2380",
            # The data need not survive a crash of the machine.
            "--unsafe-no-fsync",
        )  # fmt: skip
        self._start(
            "kube-apiserver", f"--etcd-servers={etcd}", f"--advertise-address={ADDRESS}",
            "--bind-address=0.0.0.0", "--secure-port=443", "--allow-privileged=true",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            f"--client-ca-file={pki.certificate('ca')}", f"--service-cluster-ip-range={SERVICES}",
            f"--tls-cert-file={pki.certificate('apiserver')}",
            f"--tls-private-key-file={pki.key('apiserver')}",
            f"--kubelet-client-certificate={pki.certificate('to-kubelets')}",
            f"--kubelet-client-key={pki.key('to-kubelets')}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki.directory}/service-accounts.pub",
            f"--service-account-signing-key-file={pki.key('service-accounts')}",
        )  # fmt: skip
        self._start(
            "kubectl", "proxy", f"--unix-socket={self.socket}", "--append-server-path=false",
            "--reject-methods=", f"--kubeconfig={pki.directory}/admin.kubeconfig",
        )  # fmt: skip
        wait_for("the API server", self._serves, START_S, self._explain)
        self._start(
            "kube-controller-manager", f"--kubeconfig={pki.directory}/controllers.kubeconfig",
            "--leader-elect=false", "--use-service-account-credentials=true",
            f"--root-ca-file={pki.certificate('ca')}",
            f"--service-account-private-key-file={pki.key('service-accounts')}",
        )  # fmt: skip
        self._start(
            "kube-scheduler", f"--kubeconfig={pki.directory}/scheduler.kubeconfig",
            "--leader-elect=false",
        )  # fmt: skip
        made = lambda: self.api.get("serviceaccounts", "default")  # noqa: E731
        wait_for("the controllers to make a service account", made, START_S, self._explain)

    def _start(self, name: str, *arguments: str) -> None:
        with (self.base / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                self._command_line(self.binaries.path(name), *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": PATH, "HOME": str(self.base)},
            )

    def _serves(self) -> bool:
        self.check()
        try:
            return self.api.request("GET", "readyz").get("text") == "ok"
        except Exception:  # noqa: BLE001 - it has just been started
            return False

    def check(self) -> None:
        """Raise AssertionError if a part has ended unexpectedly."""
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, f"{name} has ended\n{self._tail(name)}"

    def _tail(self, name: str) -> str:
        path = self.base / f"{name}.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def _explain(self) -> str:
        return "\n".join(f"{name}: {self._tail(name)}" for name in self._daemons)

    def kubectl(self, *arguments: str, stdin: str = "", timeout: float = 120) -> CommandResult:
        """Run kubectl as the administrator, in the repository's root."""
        from tests.conftest import ROOT

        done = subprocess.run(
            self._command_line(self.binaries.path("kubectl"), *arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.base),
                "KUBECONFIG": f"{self.certificates.directory}/admin.kubeconfig",
            },
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def close(self) -> None:
        """Stop everything."""
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait(END_S)
        if self._namespace is not None:
            self._namespace.communicate(timeout=END_S)
