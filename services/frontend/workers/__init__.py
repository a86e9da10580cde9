"""Processes that answer requests beside the node's: one supervisor in the node's process, and the workers."""
