"""Reports on web applications behind proxies, downloads from the hub, and folders of the user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.hub import Hub, serving

from visavis.core import storage
from visavis.data.hub_files import HubUnavailableError
from visavis.models.encoders.pretrained_files import missing_bytes
from visavis.retrieval.server.application import create_app, web_ui_files

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local hub with the repository ``tiny/model``, which this process uses."""
    from huggingface_hub import constants

    (tmp_path / "model").mkdir()
    with serving({"tiny/model": tmp_path / "model"}) as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path),
            "HF_HUB_ETAG_TIMEOUT": 0.3,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "*")
        yield server


def paths_in_web_ui() -> list[str]:
    """Paths in the files of the web UI that begin at the root of the host."""
    pattern = r"""(?:(?:href|src|action)=|url\(|fetch\()["'`]?(/[\w./-]*)|["'`](/(?:api|login|[\w-]+\.(?:js|css|svg)))"""
    return [
        found[0]
        for content, _, _ in web_ui_files().values()
        for found in re.findall(pattern, content.decode())
    ]


@pytest.mark.report(
    "immich-app/immich#11666", "the application works below a host name only, not below a path"
)
def test_web_ui_needs_no_path_of_its_own():
    assert paths_in_web_ui() == []


@pytest.mark.report(
    "gradio-app/gradio#9972", "assets are not found behind nginx, with or without the prefix"
)
def test_assets_are_found_with_and_without_prefix():
    client = TestClient(create_app([], root_path="/webui"), base_url="http://localhost")
    for name in web_ui_files():
        if name.endswith((".js", ".css", ".svg")):
            assert [client.get(f"{prefix}/{name}").status_code for prefix in ("/webui", "")] == [
                200,
                200,
            ]


@pytest.mark.report(
    "majewsky/portunus#38",
    "Referrer-Policy no-referrer makes browsers hide the origin of the login form, which is then "
    "rejected",
)
def test_login_form_sends_its_origin():
    client = TestClient(
        create_app([], token="a-long-enough-token"),
        base_url="http://localhost",
        follow_redirects=False,
    )
    assert client.get("/login").headers["referrer-policy"] == "same-origin"
    form = {"data": {"token": "a-long-enough-token"}}
    assert client.post("/login", headers={"origin": "http://localhost"}, **form).status_code == 303
    assert client.post("/login", headers={"origin": "null"}, **form).status_code == 403


@pytest.mark.report(
    "huggingface/huggingface_hub#1643", "status 429 is reported as a missing internet connection"
)
def test_too_many_requests_are_no_missing_connection(hub):
    hub.faults["tiny/model"] = 429
    with pytest.raises(
        HubUnavailableError, match=r"no more requests for now, status 429\)\. Wait a few minutes"
    ):
        missing_bytes("tiny/model")


@pytest.mark.report(
    "huggingface/huggingface_hub#2060", "status 503 ends in a traceback without a reason"
)
def test_maintenance_of_the_hub_is_named(hub):
    hub.faults["tiny/model"] = 503
    with pytest.raises(
        HubUnavailableError,
        match=r"a problem of its own, status 503\)\. Run the command again later",
    ):
        missing_bytes("tiny/model")


@pytest.mark.report(
    "huggingface/huggingface_hub#372",
    "a request for information hangs forever where the network swallows it",
)
def test_silent_hub_is_given_up(hub):
    hub.faults["tiny/model"] = "stall"
    with pytest.raises(
        HubUnavailableError, match=r"did not answer within 0\.3 s\)\. Check the network"
    ):
        missing_bytes("tiny/model")


@pytest.mark.report(
    "ActiveState/appdirs#61",
    "relative paths in XDG variables are used, although the specification requires to ignore them",
)
def test_relative_xdg_folder_is_ignored(monkeypatch):
    monkeypatch.delenv("VISAVIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert storage.cache_folder() == Path.home() / ".cache" / "visavis"


@pytest.mark.report(
    "nushell/nushell#3657", "setting one value removes all comments of the configuration file"
)
def test_setting_one_value_keeps_comments(tmp_path):
    (tmp_path / "settings.toml").write_text("# mine\n[a]\nb = 1  # why\n")
    storage.set_toml_value(tmp_path / "settings.toml", "model", "tiny/model")
    assert (
        tmp_path / "settings.toml"
    ).read_text() == 'model = "tiny/model"\n# mine\n[a]\nb = 1  # why\n'
