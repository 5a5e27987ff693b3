"""The certificates of a cluster: one authority, made by openssl, and the certificates of all parts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

DAYS = "2"

# `openssl req -x509` takes its extensions from a section of a configuration file. The authorities of EKS,
# microk8s, and many that are made by hand have no key usage extension.
AUTHORITY = """[req]
distinguished_name = name
prompt = no
x509_extensions = authority
[name]
CN = kubernetes
[authority]
basicConstraints = critical, CA:TRUE
{usage}
"""

LEAF = """basicConstraints = CA:FALSE
extendedKeyUsage = serverAuth, clientAuth
authorityKeyIdentifier = keyid
{names}
"""


class Certificates:
    """An authority in a directory, and the certificates that it has signed there: NAME.crt with NAME.key."""

    def __init__(self, directory: Path, *, key_usage: bool) -> None:
        """Make the authority. Without `key_usage` its certificate does not say what the key may be used for."""
        self.directory = directory
        directory.mkdir(parents=True)
        usage = "keyUsage = critical, keyCertSign, cRLSign" if key_usage else ""
        settings = directory / "authority.cnf"
        settings.write_text(AUTHORITY.format(usage=usage))
        self._key("ca")
        self._openssl(
            "req", "-x509", "-new", "-key", self.key("ca"), "-days", DAYS,
            "-config", str(settings), "-out", self.certificate("ca"),
        )  # fmt: skip
        # The key that signs service accounts' tokens; it needs no certificate.
        self._key("service-accounts")
        self._openssl(
            "pkey", "-in", self.key("service-accounts"), "-pubout",
            "-out", str(directory / "service-accounts.pub"),
        )  # fmt: skip

    def key(self, name: str) -> str:
        """Return the path of a private key."""
        return str(self.directory / f"{name}.key")

    def certificate(self, name: str) -> str:
        """Return the path of a certificate."""
        return str(self.directory / f"{name}.crt")

    def sign(self, name: str, user: str, *, group: str = "", names: tuple[str, ...] = ()) -> None:
        """Make a key and a certificate for a user in a group.

        `names` are the alternative names of a server, each with the prefix DNS: or IP:.
        """
        subject = (f"/O={group}" if group else "") + f"/CN={user}"
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        extensions.write_text(
            LEAF.format(names=f"subjectAltName = {', '.join(names)}" if names else "")
        )
        self._key(name)
        self._openssl("req", "-new", "-key", self.key(name), "-subj", subject, "-out", str(request))
        self._openssl(
            "x509", "-req", "-in", str(request), "-CA", self.certificate("ca"), "-CAkey", self.key("ca"),
            "-CAcreateserial", "-days", DAYS, "-extfile", str(extensions), "-out", self.certificate(name),
        )  # fmt: skip

    def kubeconfig(self, name: str, server: str) -> Path:
        """Write NAME.kubeconfig, with which the user of NAME.crt reaches the API server."""
        path = self.directory / f"{name}.kubeconfig"
        cluster = {"server": server, "certificate-authority": self.certificate("ca")}
        user = {"client-certificate": self.certificate(name), "client-key": self.key(name)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": name}}],
        }
        path.write_text(json.dumps(document, indent=2))
        return path

    def _key(self, name: str) -> None:
        curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
        self._openssl("genpkey", *curve, "-out", self.key(name))

    @staticmethod
    def _openssl(*arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"openssl {arguments[0]}: {done.stderr}"
