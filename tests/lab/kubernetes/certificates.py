"""Keys and certificates of a cluster, and the files by which kubectl and kubelets prove who they are."""

import base64
import json
import subprocess

DAYS = 30


class Certificates:
    """An authority of its own, in a folder."""

    def __init__(self, folder, server):
        self.folder, self._server = folder, server
        folder.mkdir()
        self._key("ca")
        purpose = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
        words = [word for line in purpose for word in ("-addext", line)]
        self._openssl(
            "req", "-x509", "-new", "-key", "ca.key", "-out", "ca.crt", "-subj", "/CN=lab",
            "-days", DAYS, *words,
        )  # fmt: skip
        self._key("sa")
        self._openssl("pkey", "-in", "sa.key", "-pubout", "-out", "sa.pub")

    def path(self, name):
        """Return the path of a file, e.g. `ca.crt`."""
        return str(self.folder / name)

    def sign(self, name, subject, names=()):
        """Make NAME.key and NAME.crt for a subject such as `/O=group/CN=user`, and the names of a server."""
        self._key(name)
        lines = ["basicConstraints=CA:FALSE", "extendedKeyUsage=serverAuth,clientAuth"]
        lines += [f"subjectAltName={','.join(names)}"] if names else []
        (self.folder / f"{name}.ext").write_text("\n".join(lines))
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
        self._openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", DAYS, "-extfile", f"{name}.ext", "-out", f"{name}.crt",
        )  # fmt: skip

    def kubeconfig(self, name, namespace="default"):
        """Write the file with which the bearer of a certificate reaches the cluster; return its path."""
        user = {
            "client-certificate-data": self._text(f"{name}.crt"),
            "client-key-data": self._text(f"{name}.key"),
        }
        cluster = {
            "server": self._server,
            "certificate-authority-data": self._text("ca.crt"),
        }
        context = {"cluster": "lab", "user": name, "namespace": namespace}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "lab", "context": context}],
            "current-context": "lab",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(document))
        path.chmod(0o600)
        return str(path)

    def _text(self, name):
        return base64.b64encode((self.folder / name).read_bytes()).decode()

    def _key(self, name):
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")

    def _openssl(self, *words):
        argv = ["openssl", *map(str, words)]
        subprocess.run(argv, cwd=self.folder, capture_output=True, check=True)
