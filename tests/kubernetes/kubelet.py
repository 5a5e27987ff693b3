"""A stand-in for the kubelet's plugin side, written from the published protocols.

It finds registration sockets in a directory, asks the plugin for its name and versions, chooses a version as the kubelet
does, reports the result to the plugin, and calls it. An answer that the kubelet would treat as a mistake fails the test.
After a restart the stand-in has forgotten what it prepared; a real kubelet remembers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from kube.api import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    pluginregistration_v1_pb2,
    pluginregistration_v1_pb2_grpc,
)

PREFERRED = {
    "v1.DRAPlugin": (dra_v1_pb2, dra_v1_pb2_grpc),
    "v1beta1.DRAPlugin": (dra_v1beta1_pb2, dra_v1beta1_pb2_grpc),
}

HEALTH = {
    "v1.DRAResourceHealth": (dra_health_v1_pb2, dra_health_v1_pb2_grpc),
    "v1alpha1.DRAResourceHealth": (dra_health_v1alpha1_pb2, dra_health_v1alpha1_pb2_grpc),
}


def wait_for(condition: Callable[[], Any], awaited: str, seconds: float = 30.0) -> Any:
    """Wait until `condition` returns a true value, and return that value."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{awaited}: not within {seconds:g} s")


QUICK = [
    # The default reconnect delays of gRPC are meant for networks. A client can have other delays
    # only with a separate pool of subchannels.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
]


ENDED = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
"""Statuses of a call to a server that ends."""

CDI = re.compile(r"[a-z0-9][a-z0-9.-]*/[A-Za-z][A-Za-z0-9_-]*=[A-Za-z0-9][A-Za-z0-9_.:-]*")
"""A device's qualified name: vendor, class and name."""


def _require_all(answers: Any, claims: Sequence[tuple[str, str, str]]) -> None:
    """Fail if the answers do not match the claims, which the kubelet treats as a mistake."""
    assert set(answers) == {uid for _, _, uid in claims}


class Kubelet:
    """Watches `<directory>/plugins_registry` for one driver."""

    def __init__(
        self,
        directory: Path,
        driver: str = "tidegate.gpu",
        speaks: Sequence[str] = tuple(PREFERRED),
    ) -> None:
        self.directory = directory
        self.driver = driver
        self.speaks = speaks
        self.registry = directory / "plugins_registry"
        self.chosen = ""
        self.info: Any = None
        self.registered = 0.0
        """Time at which the last result of a registration was sent, on the monotonic clock."""
        self._channel: Any = None

    def register(self, seconds: float = 60.0, *, accept: bool = True, instance: str = "") -> None:
        """Wait for the registration socket of the given instance, or of any, and register the plugin.

        A plugin that replaces its sockets ends the calls to the old ones. In that case the
        registration is repeated, as a kubelet does.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._register(seconds, accept=accept, instance=instance)
                break
            except grpc.RpcError as e:
                if e.code() not in ENDED or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self.connect()

    def _register(self, seconds: float, *, accept: bool, instance: str) -> None:
        path = wait_for(
            lambda: next(iter(self.registry.glob(f"*{instance}-reg.sock")), None),
            "a registration socket",
            seconds,
        )
        with grpc.insecure_channel(f"unix:{path}", QUICK) as channel:
            stub = pluginregistration_v1_pb2_grpc.RegistrationStub(channel)
            self.info = stub.GetInfo(
                pluginregistration_v1_pb2.InfoRequest(), timeout=seconds, wait_for_ready=True
            )
            assert (self.info.type, self.info.name) == ("DRAPlugin", self.driver)
            # The first known version in the plugin's list, even if a later one is newer.
            self.chosen = next((v for v in self.info.supported_versions if v in self.speaks), "")
            self.registered = time.monotonic()
            stub.NotifyRegistrationStatus(
                pluginregistration_v1_pb2.RegistrationStatus(
                    plugin_registered=accept and bool(self.chosen),
                    error="" if accept else "the test does not want it",
                ),
                timeout=10,
            )

    def connect(self) -> None:
        """Connect to the plugin again."""
        self.close()
        self._channel = grpc.insecure_channel(f"unix:{self.info.endpoint}", QUICK)

    def close(self) -> None:
        """Close the connection to the plugin."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def prepare(
        self, *claims: tuple[str, str, str], timeout: float | None = 20.0
    ) -> dict[str, Any]:
        """Call NodePrepareResources for (namespace, name, uid); return the answers by uid."""
        messages, services = PREFERRED[self.chosen]
        stub = services.DRAPluginStub(self._channel)
        request = messages.NodePrepareResourcesRequest(
            claims=[messages.Claim(namespace=n, name=m, uid=u) for n, m, u in claims]
        )
        answers = stub.NodePrepareResources(request, timeout=timeout, wait_for_ready=True).claims
        _require_all(answers, claims)
        for answer in answers.values():
            for device in () if answer.error else answer.devices:
                assert device.pool_name, device
                assert device.device_name, device
                assert all(CDI.fullmatch(one) for one in device.cdi_device_ids), device
        return dict(answers)

    def begin(self, *claims: tuple[str, str, str], timeout: float = 45.0) -> Any:
        """Start NodePrepareResources and return the call, which `cancel` ends as the deletion of a pod does."""
        messages, services = PREFERRED[self.chosen]
        request = messages.NodePrepareResourcesRequest(
            claims=[messages.Claim(namespace=n, name=m, uid=u) for n, m, u in claims]
        )
        stub = services.DRAPluginStub(self._channel)
        return stub.NodePrepareResources.future(request, timeout=timeout, wait_for_ready=True)

    def unprepare(self, *claims: tuple[str, str, str], timeout: float = 20.0) -> dict[str, Any]:
        """Call NodeUnprepareResources for (namespace, name, uid); return the answers by uid."""
        messages, services = PREFERRED[self.chosen]
        stub = services.DRAPluginStub(self._channel)
        request = messages.NodeUnprepareResourcesRequest(
            claims=[messages.Claim(namespace=n, name=m, uid=u) for n, m, u in claims]
        )
        answers = stub.NodeUnprepareResources(request, timeout=timeout, wait_for_ready=True).claims
        _require_all(answers, claims)
        return dict(answers)

    def watch_health(self, version: str = "v1alpha1", timeout: float = 20.0) -> Any:
        """Call NodeWatchResources; return an iterator over its responses."""
        service = f"{version}.DRAResourceHealth"
        assert service in self.info.supported_versions  # kubelets since 1.37 require it
        messages, services = HEALTH[service]
        stub = services.DRAResourceHealthStub(self._channel)
        return stub.NodeWatchResources(
            messages.NodeWatchResourcesRequest(), timeout=timeout, wait_for_ready=True
        )
