"""Stand-in for a kubelet: it reports that pods have succeeded, and their logs."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.deploy.charts import NAMESPACE
from tests.deploy.kube import Cluster
from tests.support.waiting import until

NODE = "here"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class Kubelet:
    """Runs nothing."""

    def __init__(self, kube: Cluster, port: int) -> None:
        self._kube = kube
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        endpoints = {"kubeletEndpoint": {"Port": port}}
        node = {
            "metadata": {"name": NODE},
            "status": {"addresses": addresses, "daemonEndpoints": endpoints},
        }
        kube.make("/api/v1/nodes", node)

    def end_well(self, pod: str) -> None:
        """Wait for the pod, bind it to the node, and report that it succeeded."""
        until(lambda: self._kube.ask(f"{PODS}/{pod}")[0] == 200)
        self._kube.make(
            f"{PODS}/{pod}/binding",
            {"metadata": {"name": pod}, "target": {"kind": "Node", "name": NODE}},
        )
        _, document = self._kube.ask(f"{PODS}/{pod}")
        document["status"]["phase"] = "Succeeded"
        status, answer = self._kube.ask(f"{PODS}/{pod}/status", document, verb="PUT")
        assert status == 200, answer


@contextmanager
def kubelet(kube: Cluster, certificates: Path, logged: str) -> Iterator[Kubelet]:
    """``certificates``: the API server's own folder; it does not ask whose they are."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            there = self.path.startswith("/containerLogs/")
            self.send_response(200 if there else 404)
            self.end_headers()
            self.wfile.write(logged.encode() if there else b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Kubelet(kube, server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
