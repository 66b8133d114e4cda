"""A hub on 127.0.0.1 with as much of the protocol as huggingface_hub asks for, which notes every request."""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_a-secret-of-nobody"


class Asked(NamedTuple):
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Repository:
    """Its commits, by hash, each a dict of files; and what goes wrong with it."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]  # branch or tag -> hash
    is_gated: bool = False  # without `TOKEN` no file is given
    cuts: dict[str, int] = field(default_factory=dict)  # file -> how often its connection is cut in the middle
    listed: dict[str, int] = field(default_factory=dict)  # file -> a size that is not its own
    tells_sizes: bool = True
    slow: set[str] = field(default_factory=set)  # files of which a KiB comes every half second
    short: set[str] = field(default_factory=set)  # files whose bodies lack a byte, and say so


class FakeHub:
    """As a context manager, a server at `url`."""

    def __init__(self):
        self.repos: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.status: int | None = None  # of every answer
        self.meeting: threading.Barrier | None = None  # of those who ask for a revision

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> Repository:
        """A commit with these files, which `revision` leads to from now on."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        repo = self.repos.setdefault(name, Repository({}, {}))
        repo.commits[digest] = files
        repo.refs[revision] = digest
        return repo

    def fetched(self, method: str = "GET") -> list[str]:
        """The files whose contents were asked for, in order."""
        found = [
            asked.path.split("/resolve/")[1]
            for asked in self.asked
            if asked.method == method and "/resolve/" in asked.path
        ]
        return [path.split("/", 1)[1] for path in found]

    def __enter__(self) -> "FakeHub":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.hub.asked.append(Asked(self.command, path, headers.get("Range"), headers.get("Authorization")))
        api, resolve = path.startswith("/api/models/"), "/resolve/" in path
        name = path.removeprefix("/api/models/").strip("/").split("/")
        repo = self.hub.repos.get("/".join(name[:2])) if api or resolve else None
        if self.hub.status is not None:
            return self._send(self.hub.status, b"{}")
        if repo is None:
            return self._refuse(404, "RepoNotFound")
        revision = path.split("/revision/" if api else "/resolve/")[1]
        rest = "" if api else revision.split("/", 1)[1]
        revision = revision if api else revision.split("/")[0]
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        return self._list(repo, commit) if api else self._file(repo, commit, rest)

    def _list(self, repo: Repository, commit: str) -> None:
        if self.hub.meeting is not None:
            self.hub.meeting.wait()
        siblings = [
            {"rfilename": name} | ({"size": repo.listed.get(name, len(body))} if repo.tells_sizes else {})
            for name, body in repo.commits[commit].items()
        ]
        self._send(200, json.dumps({"id": "org/name", "sha": commit, "siblings": siblings}).encode())

    def _file(self, repo: Repository, commit: str, name: str) -> None:
        if repo.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(403, "GatedRepo")
        body = repo.commits[commit].get(name)
        if body is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self._send(200, body, **headers)
        status, asked = 200, self.headers.get("Range")
        if asked:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            status, body = 206, body[start:]
        if name in repo.slow:
            return self._drip(body, **headers)
        if repo.cuts.get(name, 0):
            repo.cuts[name] -= 1
            return self._send(status, body, cut=len(body) // 2, **headers)
        return self._send(status, body[:-1] if name in repo.short else body, **headers)

    def _drip(self, body: bytes, **headers: str) -> None:
        self._send(200, body, cut=0, **headers)
        for start in range(0, len(body), 1024):
            try:
                self.wfile.write(body[start : start + 1024])
            except ConnectionError:  # whom it was for has gone
                return
            time.sleep(0.5)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", **{"X-Error-Code": code})

    def _send(self, status: int, body: bytes, cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
