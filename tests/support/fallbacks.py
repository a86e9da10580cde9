"""The interface of uvicorn that this test run uses: private (``auto``), or only the public one (``uvicorn``).

`make test-fallbacks` chooses the public one by environment variables. Processes read these as settings; tests
that make servers in their own process pass the value below.
"""

from __future__ import annotations

import os

HTTP_PROTOCOL = os.environ.get("HPS__SERVER__HTTP__PROTOCOL", "auto")
