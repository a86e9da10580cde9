"""What `arrivals.py` needs of grpc's inside, which is not its public interface, and whether it is as
expected."""

from __future__ import annotations

import inspect

from grpc import _server
from grpc._cython import cygrpc

# Of its server's state.
_STATE = {
    "completion_queue",
    "due",
    "lock",
    "registered_method_handlers",
    "rpc_states",
    "server",
    "stage",
}
# What becomes of an event whose tag grpc's server does not know for one of its own.
_TOLD = "rpc_state, callbacks = event.tag(event)"


def _known() -> bool:
    try:
        told = inspect.getsource(_server._process_event_and_continue)
        state = inspect.getsource(_server._ServerState)
    except (AttributeError, OSError):
        return False
    return (
        _TOLD in told
        and all(f"self.{name} =" in state for name in _STATE)
        and hasattr(_server, "_ServerStage")
        and hasattr(_server._ServerStage, "STARTED")
        and hasattr(cygrpc.Server, "request_registered_call")
    )


KNOWN = _known()
