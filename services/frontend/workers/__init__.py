"""Worker processes that answer requests from the node's cache, and their supervisor in the node's process."""
