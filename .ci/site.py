"""What pages of docs/ need on the site: somewhere to lead for links to files outside of docs/."""

import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the repository, if `repo_url` says where it is; else they are text."""
    docs = Path(config["docs_dir"])
    folder = (docs / page.file.src_uri).parent

    def replaced(match: re.Match) -> str:
        text, target, anchor = match.groups()
        path = Path(os.path.normpath(folder / target))
        if "://" in target or path.is_relative_to(docs) and path.is_file():
            return match[0]
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which is not there")
        if not config["repo_url"]:
            return text
        return f"[{text}]({config['repo_url'].rstrip('/')}/blob/HEAD/{path.relative_to(docs.parent)}{anchor or ''})"

    return LINK.sub(replaced, markdown)
