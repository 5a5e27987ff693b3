"""Sets up TLS to the API server, with all certificate checks except Python 3.13's strict ones.

Python 3.13 sets VERIFY_X509_STRICT by default, which refuses CA certificates without a key usage
extension. Clusters often have such certificates (EKS, microk8s, older kubeadm), and all other
clients accept them. The chain, its dates and the host name are verified as usual.
"""

from __future__ import annotations

import ssl
from typing import Any

import urllib3.connection
import urllib3.connectionpool
import urllib3.util.ssl_


def make_context() -> ssl.SSLContext:
    """Return urllib3's default context without VERIFY_X509_STRICT."""
    context = urllib3.util.ssl_.create_urllib3_context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.hostname_checks_common_name = False
    return context


class _Connection(urllib3.connection.HTTPSConnection):
    """A connection with its own context, so that the trusted authorities are read each time."""

    def connect(self) -> None:
        self.ssl_context = make_context()
        if not (self.ca_certs or self.ca_cert_dir or self.ca_cert_data):
            self.ssl_context.load_default_certs()
        super().connect()


class _Pool(urllib3.connectionpool.HTTPSConnectionPool):
    ConnectionCls = _Connection


def relax(manager: Any) -> None:
    """Make a urllib3.PoolManager use such connections; call it before the first connection."""
    manager.pool_classes_by_scheme = {**manager.pool_classes_by_scheme, "https": _Pool}
