"""gRPC on the event loop: HTTP/2 connections and the calls on them."""
