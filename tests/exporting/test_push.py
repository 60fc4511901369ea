"""Uploads to a local stand-in of the hub: the endpoints of repositories, upload modes, large files
and commits.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest
from tests.processes import Command

import visavis
from visavis.core.errors import SpecError
from visavis.data.hub_files import validate_repo

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow


class Hub(ThreadingHTTPServer):
    """The hub: repositories, the files of their commits, and large files by hash. It refuses one
    repository.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.large, self.files = {}, {}, defaultdict(dict)  # type: ignore[var-annotated]
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: object, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        self.answer(
            {"id": "owner/model", "sha": "0" * 40, "siblings": [], "private": False, "tags": []}
        )

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body, path = self.body(), self.path.partition("?")[0]
        asked = json.loads(body) if path == "/api/repos/create" else {}
        repo = (
            f"{asked['organization']}/{asked['name']}"
            if asked
            else "/".join(path.removeprefix("/api/models/").split("/")[:2])
        )
        if repo == REFUSED:
            self.answer({"error": "Invalid credentials"}, 401)
        elif asked:
            self.server.repositories[repo] = asked
            self.answer({"url": f"{self.server.url}/{repo}"})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                (file["path"], "lfs" if file["path"].endswith(".safetensors") else "regular")
                for file in files
            ]
            self.answer(
                {
                    "files": [
                        {"path": name, "uploadMode": mode, "shouldIgnore": False}
                        for name, mode in modes
                    ]
                }
            )
        elif path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [
                {"upload": {"href": f"{self.server.url}/large/{one['oid']}"}} for one in objects
            ]
            self.answer(
                {
                    "transfer": "basic",
                    "objects": [
                        one | {"actions": action}
                        for one, action in zip(objects, actions, strict=True)
                    ],
                }
            )
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[repo][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[repo][value["path"]] = self.server.large[value["oid"]]
            self.answer(
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"{self.server.url}/{repo}/commit/{'1' * 40}",
                }
            )
        else:
            self.answer({})


REFUSED = "refused/model"
"""A repository that the stand-in refuses."""


def upload_all() -> None:
    """Push the model that the arguments name in three ways. Each writes a line: exit code, output,
    errors.
    """
    import visavis
    from visavis.cli import main

    model, out = sys.argv[1:]
    for repo in ("owner/model", REFUSED):
        folder = f"{out}/{repo.partition('/')[0]}"
        sys.argv = [
            "visavis",
            "export",
            model,
            "--out",
            folder,
            "--push",
            repo,
            "--license",
            "mit",
            "--json",
        ]
        code, output, errors = 0, StringIO(), StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            try:
                main()
            except SystemExit as end:
                code = end.code
        sys.stdout.write(json.dumps([code, output.getvalue(), errors.getvalue()]) + "\n")
    sys.stdout.write(
        json.dumps([0, visavis.load(model).push_to_hub("private/model", private=True), ""]) + "\n"
    )


class Uploads(NamedTuple):
    """The stand-in after three uploads by one process, since the library of the hub reads its
    settings at its import.
    """

    hub: Hub
    folder: Path
    exported: list
    refused: list
    private: list


@pytest.fixture(scope="module")
def uploads(dual_encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uploads]:
    hub, folder = Hub(), tmp_path_factory.mktemp("uploads")
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "HF_TOKEN": "hf_test",
    }
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    thread = Thread(target=hub.serve_forever)
    thread.start()
    try:
        command = Command(
            folder / "output",
            dual_encoders / "clip",
            folder,
            program=upload_all,
            messages=folder / "messages",
            environment=environment,
        )
        assert command.wait(300) == 0, (folder / "messages").read_text()
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
    return Uploads(hub, folder, *map(json.loads, command.output_text.splitlines()))


def test_push_uploads_every_file(uploads):
    code, output, errors = uploads.exported
    assert code == 0, errors
    exported, files = json.loads(output), uploads.hub.files["owner/model"]
    assert exported["url"] == f"{uploads.hub.url}/owner/model/commit/{'1' * 40}"
    assert list(uploads.hub.repositories) == ["owner/model", "private/model"]
    assert sorted(files) == exported["files"]
    for name, content in files.items():
        assert content == (uploads.folder / "owner" / name).read_bytes(), name
    assert files["README.md"].startswith(b"---\nlicense: mit\n")


def test_push_to_hub_uploads_folder_that_load_reads(uploads, tmp_path):
    assert uploads.private[1] == f"{uploads.hub.url}/private/model/commit/{'1' * 40}"
    created = uploads.hub.repositories["private/model"]
    assert created.get("private") or created.get("visibility") == "private"
    for name, content in uploads.hub.files["private/model"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert visavis.load(tmp_path).encode(["a red circle"]).shape == (1, 10)


def test_push_reports_refusal_and_keeps_folder(uploads):
    code, _, errors = uploads.refused
    assert code == 1
    assert f"{REFUSED}: expected an upload to the Hugging Face hub, got" in errors
    assert "Traceback" not in errors
    assert (uploads.folder / "refused" / "model.safetensors").is_file()


@pytest.mark.parametrize("repo", ["model", "", "a/b/c", "owner/", "owner/mo del", "../x"])
def test_repo_name_is_checked_before_the_export(repo):
    with pytest.raises(
        SpecError, match=r"^push: expected owner/name of a repository of the Hugging Face hub, got "
    ):
        validate_repo(repo, "push")
