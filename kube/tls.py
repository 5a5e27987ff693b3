"""TLS to the API server: everything is verified but the form of the authority's certificate.

Python 3.13 sets VERIFY_X509_STRICT by default, which refuses authorities without a key usage
extension. Certificate authorities of clusters are often made so (EKS, microk8s, older kubeadm), and
every other client takes them. The chain, its dates and the host's name are verified as ever.
"""

from __future__ import annotations

import ssl
from typing import Any

import urllib3.connection
import urllib3.connectionpool
import urllib3.util.ssl_


def make_context() -> ssl.SSLContext:
    """Return urllib3's own context without the one flag."""
    context = urllib3.util.ssl_.create_urllib3_context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.hostname_checks_common_name = False
    return context


class _Connection(urllib3.connection.HTTPSConnection):
    """A connection with a context of its own: what authorities it trusts is read each time."""

    def connect(self) -> None:
        self.ssl_context = make_context()
        if not (self.ca_certs or self.ca_cert_dir or self.ca_cert_data):
            self.ssl_context.load_default_certs()
        super().connect()


class _Pool(urllib3.connectionpool.HTTPSConnectionPool):
    ConnectionCls = _Connection


def relax(manager: Any) -> None:
    """Have an urllib3.PoolManager make its connections so; call it before the first one."""
    manager.pool_classes_by_scheme = {**manager.pool_classes_by_scheme, "https": _Pool}
