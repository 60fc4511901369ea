"""Uploads to a local stand-in of the hub: the endpoints of repositories, upload modes, large files and commits."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import visavis
from visavis.errors import SpecError
from visavis.models.hub_upload import validate_repo

pytest.importorskip("huggingface_hub")


class Hub(ThreadingHTTPServer):
    """The hub: repositories with the files of their commits, and large files by hash."""

    def __init__(self, refuse: int = 0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.refuse, self.repositories, self.large, self.files = refuse, {}, {}, {}  # type: ignore[var-annotated]
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
        self.answer({"id": "owner/model", "sha": "0" * 40, "siblings": [], "private": False, "tags": []})

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body, path = self.body(), self.path.partition("?")[0]
        if self.server.refuse:
            self.answer({"error": "Invalid credentials"}, self.server.refuse)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            self.server.repositories[f"{asked.get('organization')}/{asked['name']}"] = asked
            self.answer({"url": f"{self.server.url}/{asked.get('organization')}/{asked['name']}"})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [(file["path"], "lfs" if file["path"].endswith(".safetensors") else "regular") for file in files]
            self.answer({"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]})
        elif path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{self.server.url}/large/{one['oid']}"}} for one in objects]
            self.answer({"transfer": "basic", "objects": [one | {"actions": action} for one, action in zip(objects, actions, strict=True)]})
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.large[value["oid"]]
            self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.server.url}/owner/model/commit/{'1' * 40}"})
        else:
            self.answer({})


def push(hub: Hub, model: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Export a model and upload it."""
    words = ["export", str(model), "--out", str(out), "--push", "owner/model", "--license", "mit", "--json"]
    return run_with_hub(hub, ["-m", "visavis", *words])


def run_with_hub(hub: Hub, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that talks to the stand-in."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    thread = Thread(target=hub.serve_forever)
    thread.start()
    try:
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=300)
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def test_push_uploads_every_file(dual_encoders, tmp_path):
    hub = Hub()
    done = push(hub, dual_encoders / "clip", tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    exported = json.loads(done.stdout)
    assert exported["url"] == f"{hub.url}/owner/model/commit/{'1' * 40}"
    assert list(hub.repositories) == ["owner/model"]
    assert sorted(hub.files) == exported["files"]
    for name, content in hub.files.items():
        assert content == (tmp_path / "exported" / name).read_bytes(), name
    assert hub.files["README.md"].startswith(b"---\nlicense: mit\n")


def test_push_to_hub_uploads_folder_that_load_reads(dual_encoders, tmp_path):
    hub = Hub()
    code = "import sys, visavis; sys.stdout.write(visavis.load(sys.argv[1]).push_to_hub('owner/model', private=True))"
    done = run_with_hub(hub, ["-c", code, str(dual_encoders / "clip")])
    assert done.stdout == f"{hub.url}/owner/model/commit/{'1' * 40}", done.stderr
    assert hub.repositories["owner/model"].get("private") or hub.repositories["owner/model"].get("visibility") == "private"
    for name, content in hub.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert visavis.load(tmp_path).encode(["a red circle"]).shape == (1, 10)


def test_push_reports_refusal_and_keeps_folder(dual_encoders, tmp_path):
    done = push(Hub(refuse=401), dual_encoders / "clip", tmp_path / "exported")
    assert done.returncode == 1
    assert "owner/model: expected an upload to the Hugging Face hub, got" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "exported" / "model.safetensors").is_file()


@pytest.mark.parametrize("repo", ["model", "", "a/b/c", "owner/", "owner/mo del", "../x"])
def test_repo_name_is_checked_before_the_export(repo):
    with pytest.raises(SpecError, match=r"^push: expected owner/name of a repository of the Hugging Face hub, got "):
        validate_repo(repo, "push")
