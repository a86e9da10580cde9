"""What `arrivals.py` and `push.py` need of grpc's inside, which is not its public interface, and whether it
is as they expect."""

from __future__ import annotations

import inspect

from grpc import _server
from grpc._cython import cygrpc

_EXPECTED = {
    "_process_event_and_continue": ["state", "event"],
    "_send_message": ["state", "token"],
    "_get_initial_metadata_operation": ["state", "metadata"],
    "_Context": ["rpc_event", "state", "request_deserializer"],
    "_ServerState": [
        "completion_queue",
        "server",
        "generic_handlers",
        "interceptor_pipeline",
        "thread_pool",
        "maximum_concurrent_rpcs",
    ],
}
_SERVER = {"lock", "due", "rpc_states", "stage", "registered_method_handlers"}
_CALL = {"due", "statused", "client", "condition", "initial_metadata_allowed"}
# What becomes of an event whose tag grpc's server does not know for one of its own.
_TOLD = "rpc_state, callbacks = event.tag(event)"


def _known() -> bool:
    for name, parameters in _EXPECTED.items():
        found = getattr(_server, name, None)
        if found is None or list(inspect.signature(found).parameters) != parameters:
            return False
    try:
        source = inspect.getsource(_server._process_event_and_continue)
        server = inspect.getsource(_server._ServerState)
    except OSError:
        return False
    return (
        _TOLD in source
        and all(f"self.{name} =" in server for name in _SERVER)
        and hasattr(_server._ServerStage, "STARTED")
        and hasattr(_server, "_CANCELLED")
        and vars(_server._RPCState()).keys() >= _CALL
        and hasattr(cygrpc.Server, "request_registered_call")
    )


KNOWN = _known()
