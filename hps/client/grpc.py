"""What is asked over gRPC, with Triton's client."""

from __future__ import annotations

from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from hps.errors import Unauthenticated

_ASK_S = 2.0


def is_hps(address: str, api_key: str | None = None) -> bool:
    """Whether an hps server answers at ``host:port``, in plain text. Raises ``Unauthenticated``."""
    headers = {"x-api-key": api_key} if api_key else None
    try:
        with InferenceServerClient(address) as client:
            about = client.get_server_metadata(headers, client_timeout=_ASK_S)
    except InferenceServerException as error:
        if error.status() == "StatusCode.UNAUTHENTICATED":
            raise Unauthenticated(error.message()) from None
        return False
    return bool(about.name == "hps")
