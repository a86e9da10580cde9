"""Small clients, REST and gRPC: NumPy in, NumPy out, errors that say what to do.

from hps.client import Client

with Client("http://127.0.0.1:8000") as client:  # or grpc://127.0.0.1:8001
    scores = client.predict("ctr", {"user": [17], "ad": [4, 8]}, {"depth": [[2.0]]}).outputs
"""

from hps.client.address import Tls
from hps.client.admin import Admin
from hps.client.client import AsyncClient, Client
from hps.client.wire import Answer

__all__ = ["Admin", "Answer", "AsyncClient", "Client", "Tls"]
