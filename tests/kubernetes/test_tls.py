"""The API server over TLS: which authorities are trusted, and how errors are explained. The TLS server and openssl
are real.

Python sets VERIFY_X509_STRICT from 3.13 on; for older versions the tests set it, in the function with which urllib3
creates contexts.
"""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3
import urllib3.connection
import urllib3.util.ssl_

from kube.cluster import Cluster
from kube.errors import ClusterError
from tests.conftest import lack

NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1", "uid": "u-1"}}


def openssl(*words: str, cwd: Path) -> None:
    if shutil.which("openssl") is None:
        lack("needs openssl")
    subprocess.run(["openssl", *words], cwd=cwd, check=True, capture_output=True)


def authority(directory: Path, name: str, *extensions: str) -> Path:
    """Make a certificate authority with these extensions besides constraints and key identifier."""
    (directory / f"{name}.cnf").write_text(
        f"[req]\ndistinguished_name=dn\nx509_extensions=ext\nprompt=no\n[dn]\nCN={name}\n[ext]\n"
        + "\n".join(("basicConstraints=critical,CA:TRUE", "subjectKeyIdentifier=hash", *extensions))
    )
    openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-config", f"{name}.cnf",
        "-keyout", f"{name}.key", "-out", f"{name}.pem", cwd=directory,
    )  # fmt: skip
    return directory / f"{name}.pem"


def certificate(directory: Path, ca: str, names: str, days: int = 30) -> Path:
    """Make a server's certificate, with its key in the same file."""
    openssl(
        "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-keyout", "s.key",
        "-out", "s.csr", cwd=directory,
    )  # fmt: skip
    (directory / "s.ext").write_text(
        f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\nbasicConstraints=CA:FALSE\n"
    )
    # Unlike `openssl x509`, `openssl ca` accepts dates in the past in every version.
    (directory / "ca.cnf").write_text(
        "[ca]\ndefault_ca = d\n[d]\ndatabase = index\nserial = serial\nnew_certs_dir = .\n"
        "unique_subject = no\n"
        "default_md = sha256\npolicy = p\n[p]\ncommonName = supplied\n"
    )
    (directory / "index").touch()
    (directory / "serial").write_text("07\n")
    begin = datetime.now(UTC) - timedelta(days=2)
    openssl(
        "ca", "-batch", "-notext", "-config", "ca.cnf", "-in", "s.csr", "-cert", f"{ca}.pem",
        "-keyfile", f"{ca}.key", "-extfile", "s.ext", "-out", "s.pem",
        "-startdate", f"{begin:%Y%m%d%H%M%SZ}",
        "-enddate", f"{begin + timedelta(days=days):%Y%m%d%H%M%SZ}", cwd=directory,
    )  # fmt: skip
    both = directory / f"{ca}-server.pem"
    both.write_bytes((directory / "s.pem").read_bytes() + (directory / "s.key").read_bytes())
    return both


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        data = json.dumps(NODE).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass  # from a client that refuses our certificate


@pytest.fixture
def serve() -> Iterator[Callable[[Path], int]]:
    """Yield a function that starts a server with a certificate and returns the port."""
    servers = []

    def start(pem: Path) -> int:
        server = _Quiet(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return int(server.server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make urllib3 create its contexts as under Python 3.13."""
    original = urllib3.connection.create_urllib3_context

    def made(*args: Any, **more: Any) -> ssl.SSLContext:
        context = original(*args, **more)
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    for module in (urllib3.connection, urllib3.util.ssl_):
        monkeypatch.setattr(module, "create_urllib3_context", made)


def kubeconfig(directory: Path, port: int, ca: Path, host: str = "127.0.0.1") -> str:
    path = directory / "kubeconfig"
    cluster = {"server": f"https://{host}:{port}", "certificate-authority": str(ca)}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": "test", "user": {"token": "none"}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            }
        )
    )
    return str(path)


@pytest.mark.usefixtures("strict")
def test_an_authority_without_key_usage_is_trusted(
    tmp_path: Path, serve: Callable[[Path], int]
) -> None:
    """EKS and microk8s create such authorities; urllib3 with its default settings refuses the same
    server.
    """
    ca = authority(tmp_path, "plain")
    port = serve(certificate(tmp_path, "plain", "IP:127.0.0.1"))
    with (
        urllib3.PoolManager(ca_certs=str(ca), retries=False) as manager,
        pytest.raises(urllib3.exceptions.SSLError, match="key usage"),
    ):
        manager.request("GET", f"https://127.0.0.1:{port}/")
    cluster = Cluster(kubeconfig(tmp_path, port, ca))
    assert cluster.node("node-1") == NODE


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("authority", "certificate verify failed"),
        ("host", "IP address mismatch"),
        ("expired", "certificate has expired"),
    ],
)
def test_an_invalid_server_certificate_is_refused_with_a_hint(
    tmp_path: Path, serve: Callable[[Path], int], wrong: str, words: str
) -> None:
    ca = authority(tmp_path, "plain")
    other = authority(tmp_path, "other", "keyUsage=critical,keyCertSign,cRLSign")
    names = "IP:127.0.0.2,DNS:localhost" if wrong == "host" else "IP:127.0.0.1"
    days = 1 if wrong == "expired" else 30
    port = serve(certificate(tmp_path, "plain", names, days))
    cluster = Cluster(kubeconfig(tmp_path, port, other if wrong == "authority" else ca))
    with pytest.raises(ClusterError) as caught:
        cluster.node("node-1")
    error = caught.value
    assert error.http == 0
    assert "no answer from the API server" in error.message
    assert words in error.message
    assert "the trusted certificate authority" in error.hint
    assert "API server answered with status 0" not in str(error)
    assert "\n" not in str(error)


def test_connections_of_the_client_verify_chain_and_name() -> None:
    from kube.tls import make_context

    context = make_context()
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.hostname_checks_common_name is False


def test_a_refused_connection_is_not_reported_as_a_certificate_error(tmp_path: Path) -> None:
    cluster = Cluster(kubeconfig(tmp_path, 1, authority(tmp_path, "plain")))
    with pytest.raises(ClusterError) as caught:
        cluster.node("node-1")
    assert "refused" in caught.value.message
    assert "certificate" not in str(caught.value)
