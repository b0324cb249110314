"""A server on the loopback address that answers as the Hub does: repositories, revisions, tokens, and faults."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


_PATH = re.compile(r"(?:/api/models)?/([^/]+/[^/]+?)(?:/(resolve|revision|tree|blob)/([^/]+)(?:/(.+))?)?")


class Request(NamedTuple):
    """One that the server got."""

    method: str
    path: str
    token: str | None
    range: str | None


@dataclass
class Repository:
    """What the server has under one id.

    Attributes:
        revisions: the directory of each branch or tag. Its commit is made of the directory's path.
        access: ``"private"`` or ``"gated"`` without :data:`TOKEN`, else ``"public"``.
        fault: what happens when weights are sent: ``"cut"``: the connection ends half-way, the first two times;
            ``"reset"``: it is reset half-way, every time; ``"moving"``: each question for the commit of ``main`` is
            answered with another branch's.
        served: how often weights were asked for, or the commit.
    """

    revisions: dict[str, Path]
    access: str = "public"
    fault: str = ""
    served: int = 0

    def commit(self, revision: str) -> str | None:
        if revision == "main" and self.fault == "moving":
            revision = sorted(self.revisions)[self.served % len(self.revisions)]
            self.served += 1
        commits = {name: hashlib.sha1(str(path).encode()).hexdigest() for name, path in self.revisions.items()}
        return revision if revision in commits.values() else commits.get(revision)

    def directory(self, commit: str) -> Path:
        return next(path for path in self.revisions.values() if hashlib.sha1(str(path).encode()).hexdigest() == commit)


@dataclass
class Hub:
    """The server's contents and what it was asked.

    Attributes:
        address: for ``HF_ENDPOINT``.
    """

    address: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    def of(self, repository: str) -> list[Request]:
        """The requests for one repository."""
        return [request for request in self.requests if f"/{repository}/" in f"{request.path}/"]


@contextmanager
def hub() -> Iterator[Hub]:
    """A running server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *args: object) -> None:
        pass

    def answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        hub.requests.append(Request(self.command, path, token, self.headers.get("Range")))
        found = _PATH.fullmatch(path)
        repository = hub.repositories.get(found[1]) if found else None
        if found is None or repository is None or (repository.access == "private" and token != f"Bearer {TOKEN}"):
            return self.send(401, b"Invalid username or password.", {"X-Error-Code": "RepoNotFound"})
        _, kind, revision, file = found.groups()
        commit = repository.commit(revision or "main")
        if commit is None:
            return self.send(404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
        if kind in (None, "revision"):
            return self.send(200, json.dumps({"id": found[1], "sha": commit}).encode())
        directory = repository.directory(commit)
        if kind == "tree":
            files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
            listed = [
                {
                    "type": "file",
                    "path": str(file.relative_to(directory)),
                    "size": file.stat().st_size,
                    "oid": _tag(file),
                }
                for file in files
            ]
            return self.send(200, json.dumps(listed).encode())
        if repository.access == "gated" and token != f"Bearer {TOKEN}":
            return self.send(403, b"Access is restricted", {"X-Error-Code": "GatedRepo", "X-Repo-Commit": commit})
        path = directory / (file or "")
        if not path.is_file():
            return self.send(404, b"Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_tag(path)}"', "Accept-Ranges": "bytes"}
        if kind == "resolve" and path.suffix == ".safetensors":  # as large files are
            headers |= {"X-Linked-Size": str(path.stat().st_size), "X-Linked-ETag": headers["ETag"]}
            return self.send(302, b"", headers | {"Location": f"{hub.address}/{found[1]}/blob/{commit}/{file}"})
        return self.send_file(path.read_bytes(), headers, repository if kind == "blob" else None)

    def send_file(self, content: bytes, headers: dict[str, str], repository: Repository | None) -> None:
        status, begin = 200, 0
        if (given := self.headers.get("Range")) is not None:
            status, begin = 206, int(given.removeprefix("bytes=").split("-")[0])
            headers = headers | {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        rest = content[begin:]
        if repository is None or self.command == "HEAD" or repository.fault not in ("cut", "reset"):
            return self.send(status, rest, headers)
        repository.served += 1
        if repository.fault == "cut" and repository.served > 2:
            return self.send(status, rest, headers)
        self.send(status, rest[: len(rest) // 2], headers, length=len(rest))
        self.wfile.flush()
        if repository.fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None, length: int = -1) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length < 0 else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _tag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:40]
