"""A real Kubernetes API server and its etcd, as processes: objects are checked and kept, never run."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.go_tools import API_SERVER, HELM
from benchmarks.peers.process import free_ports
from tests.deploy.charts import NAMESPACE, crds, need, stored_version
from tests.support.waiting import until

TOKEN = "of-an-administrator"


class Cluster:
    """The API server, called as administrator; ``kubeconfig`` is for helm."""

    def __init__(self, port: int, kubeconfig: Path, certificates: Path) -> None:
        self.port, self.kubeconfig, self.certificates = port, kubeconfig, certificates
        # Its certificate is one that it has just made for itself.
        self._tls = ssl.create_default_context()
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    def ask(self, path: str, body: Any = None, *, verb: str = "") -> tuple[int, Any]:
        """GET, or POST of ``body``, or another verb: the status and the answer."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, context=self._tls, timeout=20
        )
        try:
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            sent = None if body is None else json.dumps(body)
            connection.request(verb or ("GET" if body is None else "POST"), path, sent, headers)
            reply = connection.getresponse()
            text = reply.read()
            return reply.status, json.loads(text) if text[:1] == b"{" else text.decode()
        finally:
            connection.close()

    def ready(self) -> bool:
        try:
            return self.ask("/readyz")[0] == 200
        except OSError:
            return False

    def make(self, path: str, document: Any) -> None:
        status, answer = self.ask(path, document)
        assert status == 201, answer

    def prepare(self) -> None:
        """The namespace, and the kinds of the operators that the chart has objects for."""
        self.make("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for crd in crds():
            self.make("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
            group, plural = crd["spec"]["group"], crd["spec"]["names"]["plural"]
            version = stored_version(crd)["name"]
            kinds = f"/apis/{group}/{version}/namespaces/{NAMESPACE}/{plural}"
            until(lambda kinds=kinds: self.ask(kinds)[0] == 200, timeout_s=30)


@contextmanager
def cluster() -> Iterator[Cluster]:
    need(HELM, API_SERVER)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients, peers, port = free_ports(3)
        urls = [f"http://127.0.0.1:{each}" for each in (clients, peers)]
        _start(
            stack, folder / "etcd.log", "etcd",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={urls[0]}", f"--advertise-client-urls={urls[0]}",
            f"--listen-peer-urls={urls[1]}", f"--initial-advertise-peer-urls={urls[1]}",
            f"--initial-cluster=default={urls[1]}", "--unsafe-no-fsync",
        )  # fmt: skip
        key = folder / "sa.key"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True
        )
        (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        server = _start(
            stack, folder / "server.log", str(API_SERVER.program),
            f"--etcd-servers={urls[0]}", f"--cert-dir={folder}/certificates",
            "--bind-address=127.0.0.1", f"--secure-port={port}",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes", "--authorization-mode=RBAC",
            f"--token-auth-file={folder}/tokens.csv", "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        )  # fmt: skip
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(port)))
        found = Cluster(port, kubeconfig, folder / "certificates")
        until(lambda: found.ready() or server.poll() is not None, timeout_s=120)
        assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
        found.prepare()
        yield found


def _start(stack: ExitStack, log: Path, *command: str) -> subprocess.Popen[bytes]:
    output = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, stdout=output, stderr=output)

    def stop() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)
    return process


def _kubeconfig(port: int) -> Any:
    at = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": at}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
    }
