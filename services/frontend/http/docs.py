"""The page at ``/docs``: Swagger UI, with its files from an installed package.

The page loads nothing from other hosts, and its content security policy forbids it: a foreign script on the
admin port could act with an operator's key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def add_docs(api: FastAPI) -> None:
    """Serve the page and its files. Addresses in it are relative: a proxy may add a prefix to all paths."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=api.title,
        swagger_js_url="docs/files/swagger-ui-bundle.js",
        swagger_css_url="docs/files/swagger-ui.css",
        swagger_favicon_url="docs/files/favicon.png",
    )
    html = bytes(page.body).decode()
    headers = {"content-security-policy": _policy(html)}

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    folder = resources.files("fastapi_offline") / "static"
    api.mount("/docs/files", StaticFiles(directory=str(folder)))


def _policy(html: str) -> str:
    """Content security policy: this server's content only, and the inline scripts that ``html`` has now."""
    digests = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in _INLINE_SCRIPT.findall(html)
    )
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
