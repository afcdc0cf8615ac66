"""A push is one commit of whole files; the dry run sends nothing, and no token reaches a file."""

import base64
import hashlib
import http.server
import json
import os
import shutil
import threading
from typing import ClassVar

import pytest
import yaml
from huggingface_hub import constants

from tests.program import in_process, refused
from tunix_rt.runs.record import RunRecord

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, by its own client
TOKEN = "hf_" + "k" * 34
READ_ONLY = "hf_" + "r" * 34


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's answers about model repositories. It stores large files by their hash, and commits only what it has."""

    protocol_version = "HTTP/1.0"
    requests: ClassVar[list[str]] = []
    objects: ClassVar[dict[str, bytes]] = {}
    repositories: ClassVar[dict[str, dict]] = {}
    broken: ClassVar[bool] = False

    def do_GET(self):
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or self.repository not in self.repositories:
            return self.answer(404, {"error": "Repository not found"})
        private = self.repositories[self.repository]["private"]
        self.answer(200, {"id": self.repository, "private": private, "siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append(self.path)
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        known = {f"Bearer {TOKEN}": 200, f"Bearer {READ_ONLY}": 403}.get(self.headers["Authorization"], 401)
        if known != 200:
            return self.answer(known, {"error": "no"})
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name, private = f"{wanted['organization']}/{wanted['name']}", wanted.get("visibility") == "private"
            if name in self.repositories:
                return self.answer(409, {"error": "it exists", "url": self.address(name)})
            self.repositories[name] = {"private": private, "commits": []}
            return self.answer(200, {"url": self.address(name)})
        if self.path.endswith("/preupload/main"):
            large = (".safetensors", ".gguf")
            modes = [
                (one["path"], "lfs" if one["path"].endswith(large) else "regular") for one in json.loads(body)["files"]
            ]
            return self.answer(
                200, {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]}
            )
        if self.path.endswith("/info/lfs/objects/batch"):
            listed = json.loads(body)["objects"]
            uploads = [{**one, "actions": {"upload": {"href": self.address(f"store/{one['oid']}")}}} for one in listed]
            return self.answer(200, {"transfer": "basic", "objects": uploads})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in lines if one["key"] == "file"
        }
        for one in lines:
            if one["key"] == "lfsFile":
                files[one["value"]["path"]] = self.objects[one["value"]["oid"]]
        self.repositories[self.repository]["commits"].append(files)
        self.answer(
            200,
            {"commitUrl": self.address(f"{self.repository}/commit/abc"), "commitOid": "a" * 40, "commitMessage": "x"},
        )

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append("PUT")
        if self.broken:
            return self.answer(400, {"error": "broken"})
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.objects[self.path.rpartition("/")[2]] = content
        self.answer(200, {})

    @property
    def repository(self):
        return "/".join(self.path.removeprefix("/api/models/").split("/")[:2])

    def address(self, path):
        return f"http://127.0.0.1:{self.server.server_port}/{path}"

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for name, value in (("requests", []), ("objects", {}), ("repositories", {}), ("broken", False)):
        monkeypatch.setattr(Hub, name, value)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "tokens"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_push_is_one_commit_of_the_final_model_and_a_card_of_the_run(hub, tiny_run, monkeypatch):
    before = {path: path.read_bytes() for path in tiny_run.rglob("*") if path.is_file()}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    done = in_process("push", tiny_run, "me/tiny", "--private", "--yes")
    assert done.returncode == 0 and "uploaded: http://127.0.0.1" in done.stdout, done.stderr
    assert hub.repositories["me/tiny"]["private"] is True
    [committed] = hub.repositories["me/tiny"]["commits"]
    card = committed.pop("README.md").decode()
    final = tiny_run / "final_model"
    assert committed == {path.name: path.read_bytes() for path in final.iterdir() if path.name != "README.md"}
    record = RunRecord(tiny_run)
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["tunix-rt"]}
    for fact in (
        f"{record.result.final_loss:.4f}", f"{record.result.steps_completed:,}", record.commitment.dataset.sha256,
        record.commitment.config_sha256, hashlib.sha256(committed["model.safetensors"]).hexdigest(),
        f"{100 * record.scores('after').accuracy:.1f} %",
    ):  # fmt: skip
        assert fact in card, fact
    assert "before its export" not in card
    assert {path: path.read_bytes() for path in tiny_run.rglob("*") if path.is_file()} == before
    assert TOKEN not in card + done.stdout + done.stderr


def test_without_yes_files_and_card_are_printed_and_nothing_is_sent(hub, tiny_run, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    done = in_process("push", tiny_run, "me/tiny")
    assert done.returncode == 0 and hub.requests == [], done.stderr
    assert "library_name: transformers" in done.stdout.splitlines()
    for words in (
        "me/tiny (public",
        "model.safetensors",
        "library_name: transformers",
        "Nothing was sent; --yes uploads it",
    ):
        assert words in done.stdout
    exported = shutil.copytree(tiny_run / "final_model", tmp_path / "exported")
    proof = {"files": {}, "weights": [hashlib.sha256((exported / "model.safetensors").read_bytes()).hexdigest()]}
    (exported / "export_proof.json").write_text(json.dumps(proof))
    assert "before its export" in in_process("push", tiny_run, "me/tiny", "--folder", exported).stdout


@pytest.mark.parametrize(
    ("token", "exists", "words"),
    [
        (None, None, "needs a token for an upload, and there is none"),
        ("hf_" + "x" * 34, None, "the hub refuses the token (401; HF_TOKEN)"),
        (READ_ONLY, None, "the hub forbids this token to write there (403; HF_TOKEN)"),
        (TOKEN, False, "--private: me/tiny exists and is public"),
    ],
)
def test_a_push_that_the_hub_refuses_sends_no_file(hub, tiny_run, monkeypatch, token, exists, words):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    if exists is not None:
        hub.repositories["me/tiny"] = {"private": exists, "commits": []}
    errors = refused(in_process("push", tiny_run, "me/tiny", "--private", "--yes"), 3)
    assert words in errors and (token or "hf_k") not in errors
    assert "PUT" not in hub.requests and not any(one["commits"] for one in hub.repositories.values())


def test_an_upload_that_breaks_off_makes_no_commit(hub, tiny_run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(Hub, "broken", True)
    errors = refused(in_process("push", tiny_run, "me/tiny", "--yes"), 3)
    assert "me/tiny was not uploaded (400: " in errors and TOKEN not in errors
    assert hub.repositories["me/tiny"]["commits"] == []


def test_what_is_no_run_no_export_or_no_repository_is_refused(hub, tiny_run, tmp_path):
    assert "'tiny' is no repository of the hub" in refused(in_process("push", tiny_run, "tiny"), 2)
    assert "takes a name or a path, not a URL" in refused(in_process("push", tiny_run, "https://hub/me/tiny"), 2)
    assert "no run in" in refused(in_process("push", tmp_path, "me/tiny"), 3)
    (tmp_path / "other").mkdir()
    errors = refused(in_process("push", tiny_run, "me/tiny", "--folder", tmp_path / "other"), 3)
    assert "has no export_proof.json" in errors and hub.requests == []
    exported = shutil.copytree(tiny_run / "final_model", tmp_path / "exported")
    proof = {"files": {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in exported.iterdir()}}
    for content, words in ((proof, "model.safetensors changed after the export"), ([], "is not that of an export"),
                           ({}, "is not that of an export"), ({"files": 3}, "is not that of an export")):  # fmt: skip
        (exported / "model.safetensors").unlink(missing_ok=True)
        (exported / "export_proof.json").write_text(json.dumps(content))
        assert words in refused(in_process("push", tiny_run, "me/tiny", "--folder", exported), 3)
    other = shutil.copytree(tiny_run, tmp_path / "run")
    with (other / "final_model/model.safetensors").open("r+b") as weights:
        weights.seek(-4, os.SEEK_END)
        weights.write(b"0123")
    errors = refused(in_process("push", other, "me/tiny"), 3)
    assert "final_model: its weights are not those of" in errors and hub.requests == []
