"""A dataset is fetched by its name from a hub that is really there: pinned to a commit, resumed, compared with its hashes."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from typing import ClassVar

import pytest

from tunix_rt.models.hub import Repository, Request, fetch

COMMIT = "7" * 40
ASK = """
import json, logging, sys
from tunix_rt.data.sources import find_dataset
from tunix_rt.errors import TunixError
logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
for name in json.load(sys.stdin):
    try:
        found = find_dataset(name)
        print(json.dumps([0, found.sha256, [str(file.path) for file in found.files]]))
    except TunixError as error:
        print(json.dumps([error.exit_code, str(error), []]))
"""
LARGE = b'{"prompt": "a", "completion": "b"}\n' * 400_000  # 14 MB: the client writes 10 MiB at a time


def lines(text):
    return json.dumps({"prompt": text, "completion": "x"}).encode() + b"\n"


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's answers about datasets; `cut` is how many bytes of a file come before the connection ends, once."""

    protocol_version = "HTTP/1.0"
    repositories: ClassVar[dict[str, dict[str, bytes]]] = {}
    sent: ClassVar[list[tuple[str, str]]] = []
    cut: ClassVar[int | None] = None
    damaged: ClassVar[bool] = False

    def do_GET(self):
        parts = urllib.parse.unquote(self.path.split("?")[0]).strip("/").split("/")
        api = parts[:2] == ["api", "datasets"]
        name = parts[3] if api else parts[2] if parts[0] == "datasets" else ""
        if name == "private":
            return self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 401)
        if name not in self.repositories:
            return self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)
        files = self.repositories[name]
        if api:
            listed = [about(file, content) for file, content in files.items()]
            tree = [{"type": "file", "path": one["rfilename"], "oid": one["blobId"], **one} for one in listed]
            whole = {"id": f"o/{name}", "sha": COMMIT, "siblings": listed, "private": False, "tags": [], "downloads": 0}
            return self.answer(json.dumps(tree if "tree" in parts else whole).encode(), {})
        file = "/".join(parts[5:])
        if file not in files:
            return self.answer(b"{}", {"X-Error-Code": "EntryNotFound"}, 404)
        content, known = files[file], about(file, files[file])
        tag = known["lfs"]["sha256"] if known.get("lfs") else known["blobId"]
        content = b"#" + content[1:] if self.damaged else content
        if self.command == "GET":
            self.sent.append((file, self.headers.get("Range") or "whole"))
        return self.answer(content, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'}, cut=self.cut)

    do_HEAD = do_GET

    def answer(self, content, headers, status=200, cut=None):
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            content, status = content[start:], 206
            cut = cut and 0
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content)), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content if cut is None else content[:cut])

    def log_message(self, *_):
        """Quiet."""


def about(file, content):
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    sha256 = hashlib.sha256(content).hexdigest()
    lfs = {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 130}
    large = {"lfs": lfs} if len(content) > 10_000 else {}
    return {"rfilename": file, "size": len(content), "blobId": git, **large}


@pytest.fixture
def hub(monkeypatch):
    plain = {"README.md": b"# x\n", "train.jsonl": lines("a"), "test.jsonl": lines("b")}
    configs = {
        f"{config}/{split}-00000-of-00001.jsonl": lines(config + split)
        for config in ("main", "other")
        for split in ("train", "test")
    }
    repositories = {
        "plain": plain,
        "gsm8k": configs,
        "large": {"train.jsonl": LARGE},
        "short": {"train-00000-of-00002.jsonl": b"{}\n"},
    }
    for name, value in (("repositories", repositories), ("sent", []), ("cut", None), ("damaged", False)):
        monkeypatch.setattr(Hub, name, value)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def ask(tmp_path, hub):
    """What becomes of each name, in a process with a cache of its own; and its log."""

    def asked(*names, **more):
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own = {
            "HF_ENDPOINT": hub,
            "HF_HOME": tmp_path / "hf",
            "XDG_CACHE_HOME": tmp_path / "cache",
            "HF_HUB_DISABLE_XET": "1",
        }
        variables = kept | {
            key: str(value) for key, value in {**own, "HF_HUB_DISABLE_PROGRESS_BARS": 1, **more}.items()
        }
        done = subprocess.run(
            [sys.executable, "-c", ASK], input=json.dumps(names), env=variables, cwd=tmp_path, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    return asked


def test_parts_are_fetched_by_split_and_configuration_and_found_again_offline(ask):
    names = ["o/plain:train", "o/gsm8k:main/train", f"o/gsm8k@{COMMIT}:other/test-*"]
    found, log = ask(*names)
    assert [[path.split(COMMIT + "/")[1] for path in paths] for _, _, paths in found] == [
        ["train.jsonl"], ["main/train-00000-of-00001.jsonl"], ["other/test-00000-of-00001.jsonl"]]  # fmt: skip
    assert found[0][1] == hashlib.sha256(lines("a")).hexdigest()
    assert f"Fetching o/plain: 1 file(s), 0.0 MiB, commit {COMMIT}" in log
    assert {file for file, _ in Hub.sent} == {path.split(COMMIT + "/")[1] for _, _, paths in found for path in paths}
    again, _ = ask(*names, HF_HUB_OFFLINE=1)
    assert again == found, "the branch is remembered with its commit"
    ((code, words, _),), _ = ask("o/plain:test", HF_HUB_OFFLINE=1)
    assert code == 3 and "only partly in the local cache of the hub" in words and "unset HF_HUB_OFFLINE" in words


def test_an_interrupted_download_is_resumed_and_what_is_there_is_not_fetched_again(ask, monkeypatch, caplog):
    monkeypatch.setattr(Hub, "cut", 12_000_000)
    ((code, words, _),), _ = ask("o/large", HF_HUB_DOWNLOAD_TIMEOUT=2)
    monkeypatch.setattr(Hub, "cut", None)
    assert code == 3 and "cannot be reached (RemoteProtocolError" in words
    assert "check the network; the same command continues an interrupted download; or" in words
    Hub.sent.clear()
    ((whole, sha256, _),), log = ask("o/large")
    assert whole == 0 and sha256 == hashlib.sha256(LARGE).hexdigest()
    assert Hub.sent == [("train.jsonl", f"bytes={10 * 2**20}-")] and "Resuming train.jsonl at 10.0 of 13.4 MiB" in log
    Hub.sent.clear()
    assert ask("o/large")[0][0][1] == sha256 and not Hub.sent

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("tunix_rt.models.hub._fetch_large", interrupted)
    request = Request(name="o/large", revision="main", cached="", ways_on="")
    with pytest.raises(KeyboardInterrupt):
        fetch(request, ["train.jsonl"], Repository(commit=COMMIT, files={}))
    assert "Download interrupted; the same command continues it" in caplog.text


def test_a_file_with_another_hash_is_refused_deleted_and_fetched_again(ask, monkeypatch):
    monkeypatch.setattr(Hub, "damaged", True)
    both, _ = ask("o/large", "o/plain:train")
    assert [code for code, _, _ in both] == [3, 3]
    assert all("was damaged on the way" in words and "fetches it again" in words for _, words, _ in both)
    monkeypatch.setattr(Hub, "damaged", False)
    assert [code for code, _, _ in ask("o/large", "o/plain:train")[0]] == [0, 0]


def test_what_cannot_be_fetched_is_refused_by_its_reason(ask):
    reasons = {
        "o/plain": ("is ambiguous", "o/plain:test.jsonl, o/plain:train.jsonl"),
        "o/plain:dev": ("no 'dev' in o/plain", "there are: test.jsonl, train.jsonl"),
        "o/short": ("1 of 2 files of train are missing", "fetch the rest"),
        "o/private": (
            "no dataset named 'o/private' on the hub that can be seen without a token (401)",
            "hf auth login",
        ),
        "o/nothing": ("no dataset named 'o/nothing' on the hub", "check the spelling"),
        "data/missing.jsonl": ("no such file or folder", "the path of a file or folder"),
        "https://x.example/a.jsonl": ("no dataset named", "the path of a file"),
    }
    found, _ = ask(*reasons)
    for (code, words, _), (name, (problem, fix)) in zip(found, reasons.items(), strict=True):
        assert code == 3 and problem in words and fix in words.split("\n  fix: ")[1], (name, words)
    assert not Hub.sent
    ((code, words, _),), _ = ask("o/plain:train", HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 3 and "the hub cannot be reached" in words
