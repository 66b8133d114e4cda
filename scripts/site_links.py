"""A hook of mkdocs: links that leave docs/ lead to the repository, if `repo_url` names one, and are plain text else."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown, page, config, files):
    here = ROOT / "docs" / Path(page.file.src_uri).parent

    def rewritten(match):
        text, target, anchor = match.groups()
        path = (here / target).resolve()
        if path.is_relative_to(ROOT / "docs") or not path.exists():  # mkdocs says what is wrong with it
            return match[0]
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path.relative_to(ROOT)}{anchor or ''})"

    return _LINK.sub(rewritten, markdown)
