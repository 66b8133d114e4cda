"""The page at `/`: one self-contained document, built from the files of this folder."""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent
_SCRIPTS = ("common.js", "markdown.js", "highlight.js", "store.js", "api.js", "chat.js", "complete.js", "main.js")


class Page(NamedTuple):
    """The document and its headers."""

    body: bytes
    headers: dict[str, str]


@cache
def page() -> Page:
    """The policy lets the browser run this script only, contact this server only, and never parse text as HTML."""
    style = (_FOLDER / "page.css").read_text()
    script = '"use strict";\n' + "\n".join((_FOLDER / name).read_text() for name in _SCRIPTS)
    body = (_FOLDER / "index.html").read_text().replace("{{style}}", style, 1).replace("{{script}}", script, 1)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
    return Page(body.encode(), headers)


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
