"""A model is the one that was named, found on this computer first, and never another."""

import errno
import hashlib
import http.server
import json
import logging
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import urllib.parse
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT, SHIPPED, write_small_model
from tests.tables import parametrize, tables
from tunix_rt.cli.main import cli
from tunix_rt.errors import ConfigError, InputError, StorageError
from tunix_rt.models.hub import Request, _refusal
from tunix_rt.models.resolve import PRESET_OF, TWO_WAYS_ON, preset_names, resolve_model, resolve_tokenizer
from tunix_rt.models.secrets import redacted, refuse_addresses

COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


def test_a_shipped_model_is_found_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = resolve_model("tiny-gemma3")
    assert (source.folder, source.revision, source.weights) == (SHIPPED, "shipped", "pretrained")
    assert source.config["model_type"] == "gemma3_text"
    assert [path.name for path in source.weight_files()] == ["model.safetensors"]


def test_a_model_of_the_working_folder_is_not_called_shipped(tmp_path, monkeypatch):
    """Also when it has the name of one that is: what was shipped is known to the byte, this one is not."""
    shutil.copytree(SHIPPED, tmp_path / "models" / "tiny-gemma3")
    write_small_model("gpt2", tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    for name, weights in (("tiny-gemma3", "pretrained"), ("mine", "random")):
        source = resolve_model(name, weights=weights)
        assert (source.folder, source.revision) == (tmp_path / "models" / name, "local")
    monkeypatch.chdir(ROOT)
    assert resolve_model("tiny-gemma3").revision == "shipped"


@pytest.mark.parametrize("name", ["tiny-gemma3", str(SHIPPED)])
def test_a_revision_of_a_model_that_has_none_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=r"model\.revision is 'v2'") as caught:
        resolve_model(name, revision="v2")
    assert "leave model.revision out" in caught.value.fix


def test_a_local_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    folder = shutil.copytree(SHIPPED, tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), "my-model", "./my-model", "~/my-model"):
        source = resolve_model(name)
        assert (source.name, source.folder, source.revision) == (name, folder, "local")


def test_random_weights_need_no_weight_files_and_pretrained_ones_do(tmp_path):
    folder = write_small_model("gpt2", tmp_path / "bare")
    assert resolve_model(str(folder), weights="random").weights == "random"
    with pytest.raises(InputError, match=r"no \*\.safetensors") as caught:
        resolve_model(str(folder))
    assert caught.value.exit_code == 3
    assert caught.value.fix == TWO_WAYS_ON


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_missing_folder_is_refused_by_its_path(name):
    with pytest.raises(InputError, match="does not exist") as caught:
        resolve_model(name)
    assert name in caught.value.problem


@pytest.mark.parametrize("name", ["~nobody-of-that-name/model", "x" * 300, "/" + "x" * 300])
def test_a_name_that_cannot_be_a_path_is_refused_not_a_crash(name):
    with pytest.raises(InputError):
        resolve_model(name)


@parametrize("content", "words")
def test_a_folder_without_a_usable_configuration_is_refused(tmp_path, content, words):
    deep = ("[" * 100_000, "cannot be read")
    for text, problem in ((content, words), deep):
        if text is not None:
            (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(InputError, match=problem) as caught:
            resolve_model(str(tmp_path))
        assert str(tmp_path) in caught.value.problem


@pytest.mark.parametrize(
    "name", ["https://someone:hf_abcdefghijklmnopqrstuvwxyz@hub.example/google/gemma-2b", "no.gguf"]
)
def test_an_address_or_a_file_that_is_not_there_is_refused_as_what_it_is(name):
    with pytest.raises((ConfigError, InputError), match=r"not a URL|GGUF file 'no\.gguf' does not exist") as caught:
        resolve_model(name)
    assert "abcdefghij" not in str(caught.value)


# --- weights that are not whole --------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, **files: bytes) -> Path:
    folder = write_small_model("gpt2", tmp_path / "model")
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


WHOLE = (SHIPPED / "model.safetensors").read_bytes()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (WHOLE[:-1], rf"is incomplete: {len(WHOLE) - 1:,} of {len(WHOLE):,} bytes"),
        (WHOLE[:100], r"is incomplete: 100 bytes, its header alone has"),
        (b"", r"is incomplete: 0 bytes"),
        (POINTER, r"a Git LFS pointer of \d+ bytes instead of the weights"),
        (WHOLE + b"x", "is corrupt"),
        (b"<html>404 not found</html>" * 10, "is not a safetensors file"),
        (struct.pack("<Q", 4) + b"null", "its header is not JSON that describes tensors"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "its header is not JSON that describes tensors"),
    ],
)
def test_a_weight_file_that_is_not_whole_is_refused_by_what_is_wrong_with_it(tmp_path, content, words):
    folder = folder_with(tmp_path, model__safetensors=content)
    with pytest.raises(InputError, match=words) as caught:
        resolve_model(str(folder))
    assert f"delete {folder / 'model.safetensors'}" in caught.value.fix
    assert resolve_model(str(folder), weights="random").weights == "random"


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_refused_by_name(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    folder = folder_with(tmp_path, **{"model.safetensors.index.json": json.dumps(index).encode(), names[0]: WHOLE})
    with pytest.raises(InputError, match=rf"1 weight file\(s\) are missing .* first {names[1]}"):
        resolve_model(str(folder))
    (folder / names[1]).symlink_to("nowhere")
    with pytest.raises(InputError, match=f"first {names[1]}"):
        resolve_model(str(folder))
    (folder / "model.safetensors.index.json").write_bytes(POINTER)
    with pytest.raises(InputError, match=r"index\.json cannot be read"):
        resolve_model(str(folder))


def test_weights_of_another_kind_are_named_with_the_reason_they_are_not_read(tmp_path):
    folder = folder_with(tmp_path, pytorch_model__bin=b"x", flax_model__msgpack=b"x")
    with pytest.raises(InputError) as caught:
        resolve_model(str(folder))
    assert "flax_model.msgpack (Flax), pytorch_model.bin (a pickle, which can run code)" in caught.value.problem
    assert caught.value.fix == TWO_WAYS_ON


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file of Linux that cannot be read")
def test_weights_whose_disk_fails_are_refused_by_name_without_a_traceback(tmp_path):
    folder = folder_with(tmp_path)
    (folder / "model.safetensors").symlink_to("/proc/self/mem")  # reading its first byte is an I/O error
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read: Input/output error"):
        resolve_model(str(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_weights_that_this_user_may_not_read_are_refused_by_name_without_a_traceback(tmp_path):
    folder = folder_with(tmp_path, model__safetensors=WHOLE)
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read: Permission denied") as caught:
        resolve_model(str(folder))
    assert "chmod u+r" in caught.value.fix


# --- presets ---------------------------------------------------------------------------------------------------------

BARE = sorted(set(preset_names()) - set(PRESET_OF))


@pytest.mark.parametrize("name", BARE)
def test_a_preset_is_an_architecture_without_weights_and_without_a_tokenizer(name):
    source = resolve_model(name, weights="random")
    assert (source.folder, source.revision, source.weights) == (ROOT / "presets" / name, "preset", "random")
    with pytest.raises(InputError, match="without weights") as caught:
        resolve_model(name)
    assert "--weights random" in caught.value.fix and "local model folder" in caught.value.fix
    with pytest.raises(InputError, match="has no tokenizer") as caught:
        resolve_tokenizer(name)
    assert "model.tokenizer_name_or_path" in caught.value.fix and "tiny-gemma3" in caught.value.fix


def test_a_local_folder_wins_over_the_preset_of_its_name_and_a_preset_has_no_revisions(tmp_path, monkeypatch):
    folder = write_small_model("gpt2", tmp_path / BARE[0])
    with pytest.raises(ConfigError, match="is a preset model, which has no revisions"):
        resolve_model(BARE[0], revision="v2", weights="random")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(BARE[0], weights="random").folder == folder


def test_every_preset_of_a_hub_id_is_there_and_every_preset_has_a_hub_id():
    assert set(PRESET_OF.values()) == set(preset_names())


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_needs_no_model_around_it(tmp_path):
    shutil.copy(SHIPPED / "tokenizer.json", tmp_path)
    assert resolve_tokenizer(str(tmp_path)) == tmp_path
    assert resolve_tokenizer("tiny-gemma3") == SHIPPED
    with pytest.raises(ConfigError, match=r"model\.revision"):
        resolve_tokenizer(str(tmp_path), revision="v2")
    with pytest.raises(InputError, match="does not exist"):
        resolve_tokenizer("./nowhere")


# --- secrets ---------------------------------------------------------------------------------------------------------

TOKEN = "hf_" + "QwErTyUiOpAsDfGhJkLzXcVbNm12345678"


@parametrize("text", "left")
def test_secrets_are_redacted_in_any_text_with_and_without_a_scheme(monkeypatch, text, left):
    monkeypatch.setenv("HF_TOKEN", "my own token")
    assert redacted(text) == left


@pytest.mark.parametrize(
    "part", ["a", "a.", "-", "a:", "a://", "abc:def", "?a", "&-", "?token", "a:bcd@", "bearer ", "hf_", "/a.", ":a.b"]
)
def test_a_text_of_a_million_characters_is_redacted_in_half_a_second(part):
    text = part * (1_000_000 // len(part))
    began = time.process_time()
    redacted(text)
    assert time.process_time() - began < 0.5


ADDRESS = f"https://me:{TOKEN}@hub.example/owner/{TOKEN}"


@pytest.mark.parametrize(
    "name", ["model.model_name_or_path", "model.tokenizer_name_or_path", "data.dataset", "evaluation.evalset"]
)
def test_an_address_for_a_name_is_refused_before_anything_is_written(tmp_path, name):
    section, setting = name.split(".")
    with pytest.raises(ConfigError, match=f"{name} takes a name or a path, not a URL"):
        refuse_addresses({section: {setting: ADDRESS}})
    refuse_addresses({section: {setting: "owner/name"}, "training": {"seed": 0}})
    refuse_addresses({section: {setting: None}})
    arguments = ["train", "smoke_tiny", "--output", str(tmp_path / "run"), "--set", f"{name}={ADDRESS}"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert "not a URL" in result.stderr and TOKEN not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["import", ADDRESS, "--as", "mine"],
        ["check", ADDRESS],
        ["show", ADDRESS],
        ["check", "dev-reasoning", "--model", ADDRESS],
        ["show", "dev-reasoning", "--set", f"model.tokenizer_name_or_path={ADDRESS}"],
    ],
    ids=["import", "check", "show", "model", "tokenizer"],
)
def test_a_verb_of_data_refuses_an_address_and_repeats_nothing_of_it(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["data", *arguments])
    assert result.exit_code == 2 and "takes a name or a path, not a URL (https://...)" in result.stderr
    assert TOKEN not in result.output and not list(tmp_path.iterdir())


def test_a_token_anywhere_in_an_error_does_not_reach_the_screen(tmp_path):
    result = CliRunner().invoke(cli, ["plan", "--model", "tiny-gemma3", "--set", f"training.seed={TOKEN}"])
    assert result.exit_code == 2 and TOKEN not in result.output and "training.seed: " in result.stderr
    result = CliRunner().invoke(cli, ["runs", f"/nowhere/{TOKEN}"])
    assert result.exit_code == 3 and TOKEN not in result.output


REQUEST = Request(name="a/b", revision="main", cached="not in the local cache", ways_on=TWO_WAYS_ON)


@pytest.mark.parametrize(
    "error", [OSError(f"cannot GET https://user:{TOKEN}@hub.example/?token={TOKEN}"), RuntimeError(f"sent {TOKEN}")]
)
def test_a_token_in_the_words_of_another_library_reaches_no_message(error):
    refusal = str(_refusal(error, REQUEST))
    assert TOKEN not in refusal and "cannot be reached" in refusal


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"),
        PermissionError(errno.EACCES, "Permission denied", "/cache"),
    ],
)
def test_a_disk_that_takes_no_more_is_a_storage_error_whoever_says_it(error):
    refusal = _refusal(error, REQUEST)
    assert isinstance(refusal, StorageError) and "HF_HOME" in refusal.fix


# --- the hub's cache: read at import from the environment, so each environment is a process of its own ---------------

ASK = """
    import json, logging, sys
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    from tunix_rt.errors import TunixError
    from tunix_rt.models.resolve import resolve_model
    for name, revision, weights in json.load(sys.stdin):
        try:
            source = resolve_model(name, revision=revision, weights=weights)
            answer = [source.name, str(source.folder), source.revision]
        except TunixError as error:
            answer = [error.exit_code, str(error)]
        print(json.dumps(answer))
    """


def ask(*questions, limit: int | None = None, **environment):
    """What becomes of each (name, revision, weights), in one process whose hub is an address where nothing listens.

    `limit`: bytes that a file may have there."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    variables |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ASK)],
        input=json.dumps([question + ("main", "pretrained")[len(question) - 1 :] for question in questions]),
        env=variables | {key: str(value) for key, value in environment.items()},
        preexec_fn=None if limit is None else partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    secret = str(environment.get("HF_TOKEN", "no secret"))
    assert secret not in ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture
def cache(tmp_path) -> Path:
    """A hub cache as huggingface_hub lays it out, with `gpt2` in it: blobs, links to them, a ref to the commit."""
    return put_into_cache(tmp_path, "gpt2")


def put_into_cache(folder: Path, name: str, **contents: bytes) -> Path:
    repository = folder / "hub" / f"models--{name}"
    snapshot = repository / "snapshots" / COMMIT
    for part in (repository / "refs", repository / "blobs", snapshot):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    config = {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 32, "n_layer": 2, "n_head": 2}
    files = {"config__json": json.dumps(config).encode(), "model__safetensors": WHOLE} | contents
    for number, (file, content) in enumerate(files.items()):
        blob = repository / "blobs" / f"{number:040x}"
        if content != b"gone":
            blob.write_bytes(content)
        (snapshot / file.replace("__", ".")).symlink_to(f"../../blobs/{blob.name}")
    return folder


@pytest.mark.parametrize(("variable", "offline"), [("HF_HOME", "0"), ("HF_HUB_CACHE", "1")])
def test_a_hub_model_in_the_local_cache_resolves_to_its_commit(cache, variable, offline):
    place = cache if variable == "HF_HOME" else cache / "hub"
    by_name, by_commit = ask(("gpt2",), ("gpt2", COMMIT), **{variable: place, "HF_HUB_OFFLINE": offline})
    snapshot = cache / "hub" / "models--gpt2" / "snapshots" / COMMIT
    assert by_name == by_commit == ["gpt2", str(snapshot), COMMIT]


def test_what_the_cache_lacks_is_named_and_not_made_up_for(cache):
    index = json.dumps({"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}).encode()
    put_into_cache(cache, "blobless", model__safetensors=b"gone")
    put_into_cache(cache, "configless", config__json=b"gone")
    put_into_cache(cache, "sharded", **{"model.safetensors.index.json": index})
    put_into_cache(cache, "cut", model__safetensors=WHOLE[:1000])
    put_into_cache(cache, "pickled", pytorch_model__bin=b"x", model__safetensors=b"gone")
    (cache / "hub" / "models--pickled" / "snapshots" / COMMIT / "model.safetensors").unlink()
    questions = [("gpt2", "v2"), ("blobless",), ("configless",), ("sharded",), ("cut",), ("pickled",)]
    answers = ask(*questions, ("blobless", "main", "random"), HF_HOME=cache, HF_HUB_OFFLINE=1)
    assert [answer[0] for answer in answers[:-1]] == [3] * 6
    assert answers[-1][2] == COMMIT, "random weights need no weights"
    revision, blobless, configless, sharded, cut, pickled = (answer[1] for answer in answers[:-1])
    assert "'gpt2' is not in the local cache" in revision and "unset HF_HUB_OFFLINE" in revision
    assert "only partly in the local cache (without model.safetensors)" in blobless and "--weights random" in blobless
    assert "(without config.json)" in configless
    assert "(without other.safetensors)" in sharded
    assert "is incomplete: 1,000 bytes" in cut and f"{COMMIT}" not in cut
    assert str(cache / "hub" / "models--cut" / "blobs") in cut, "the blob is to be deleted, not the link to it"
    assert "(it has pytorch_model.bin)" in pickled


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_model_that_cannot_be_had_is_refused_with_the_two_ways_on(tmp_path, offline):
    names = [("google/gemma-2b",), ("not a name!",), ("tiny-gema3",)]
    [absent, impossible, shipped] = ask(*names, HF_HOME=tmp_path, HF_HUB_OFFLINE=offline)
    assert absent[0] == impossible[0] == 3
    assert "google/gemma-2b" in absent[1]
    assert ("HF_HUB_OFFLINE" if offline == "1" else "the hub cannot be reached") in absent[1]
    assert "local model folder" in absent[1]
    assert "--weights random" in absent[1]
    assert "did you mean" not in absent[1], "the name is a known one"
    assert "did you mean tiny-gemma3?" in shipped[1]
    assert "no model named 'not a name!'" in impossible[1]


def test_random_weights_of_a_hub_id_fall_back_to_its_preset_and_of_no_other(cache):
    """The cache comes first; a revision that is not there is not made up for."""
    questions = [("gpt2",), ("openai-community/gpt2",), ("google/gemma-3-1b-it",), ("some/model",)]
    arguments = [(*name, "main", "random") for name in questions] + [("google/gemma-2b", "v2", "random")]
    cached, small, gemma, other, revision = ask(*arguments, HF_HOME=cache, HF_HUB_OFFLINE=1)
    assert cached[2] == COMMIT
    assert small[1:] == [str(ROOT / "presets" / "gpt2"), "preset"]
    assert gemma[1:] == [str(ROOT / "presets" / "gemma-3-1b"), "preset"]
    assert other[0] == revision[0] == 3
    assert "--weights random" not in other[1], "not advised to someone who asked for them"
    assert "local folder with config.json" in other[1]


def test_the_preset_that_stands_in_for_a_hub_model_is_said_aloud(monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    caplog.set_level(logging.WARNING, logger="tunix_rt")
    assert resolve_model("Qwen/Qwen3-0.6B", weights="random").revision == "preset"
    assert "using the architecture of the preset qwen-3-0.6b, which has no tokenizer" in caplog.text


# --- the hub itself: a small one on this computer ---------------------------------------------------------------------

# Name of a model -> status, X-Error-Code, X-Error-Message: as the hub's client reads them.
REFUSES = tables(__file__)["refuses"]
SAYS = tables(__file__)["says"]


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does: refuses by the name of the model, or gives the files of `repositories`."""

    repositories: ClassVar[dict[str, dict[str, bytes]]] = {}
    answers_left: ClassVar[list[None] | None] = None
    """As many answers as there are entries, then silence; None answers always."""

    def do_GET(self) -> None:
        if self.answers_left is not None:
            if not self.answers_left:
                time.sleep(5)
                return None
            self.answers_left.pop()
        parts = [*urllib.parse.unquote(self.path.split("?")[0]).strip("/").split("/"), "", ""]
        if parts[:2] == ["api", "models"]:
            name, what = parts[3], parts[4]
            if name in REFUSES:
                return self.refuse(*REFUSES[name])
            files = self.repositories[name]
            sizes = {file: int(content) if content.isdigit() else len(content) for file, content in files.items()}
            listed = [{"type": "file", "path": f, "size": n, "oid": self.hash(f, name)} for f, n in sizes.items()]
            siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
            about = {
                "id": f"o/{name}",
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            return self.answer(json.dumps(listed if what == "tree" else about).encode(), {})
        name, file = parts[1], "/".join(parts[4:-2])
        if name not in self.repositories:  # the client asks for other things too
            return self.refuse(404, "EntryNotFound", None)
        if name == "locked":
            return self.refuse(401, "GatedRepo", "Access to model is restricted.")
        return self.answer(
            self.repositories[name][file], {"X-Repo-Commit": COMMIT, "ETag": f'"{self.hash(file, name)}"'}
        )

    do_HEAD = do_GET

    def hash(self, file: str, name: str) -> str:
        return hashlib.sha1(self.repositories[name][file]).hexdigest()

    def refuse(self, status: int, code: str | None, message: str | None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.answer(b"{}", {key: value for key, value in headers.items() if value}, status)

    def answer(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        if wanted := self.headers.get("Range"):  # an interrupted download is resumed
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            content, status = content[start:], 206
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content)), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Not into the output of the tests."""


@pytest.fixture
def hub():
    """The address of a hub that is really there, and what it keeps."""
    config = (SHIPPED / "config.json").read_bytes()
    Hub.repositories = {
        "whole": {"config.json": config, "model.safetensors": WHOLE, "pytorch_model.bin": b"x", "onnx/m.json": b"{}"},
        "locked": {"config.json": config, "model.safetensors": WHOLE},
        "old": {"config.json": config, "pytorch_model.bin": b"x", "tf_model.h5": b"x", "model.gguf": b"x"},
        "huge": {"config.json": config, "model.safetensors": b"9" * 18},
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_refusal_of_the_hub_has_its_own_words_and_way_out(hub, tmp_path):
    names = [f"o/{name}" for name in REFUSES]
    answers = ask(*[(name,) for name in names], HF_ENDPOINT=hub, HF_HOME=tmp_path, HF_TOKEN=TOKEN)
    for name, (code, result) in zip(REFUSES, answers, strict=True):
        problem, fix = result.split("\n  fix: ")
        assert code == 3 and SAYS[name][0] in problem and SAYS[name][1] in fix, result
    assert len({result for _, result in answers}) == len(REFUSES)


def test_a_model_is_fetched_by_its_commit_without_pickles_and_found_again_without_the_hub(hub, tmp_path):
    [fetched] = ask(("o/whole",), HF_ENDPOINT=hub, HF_HOME=tmp_path)
    folder = Path(fetched[1])
    assert fetched[2] == folder.name == COMMIT
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WHOLE
    assert ask(("o/whole",), HF_HUB_OFFLINE=1, HF_HOME=tmp_path) == [fetched], (
        "the branch is remembered with its commit"
    )


def test_what_a_repository_has_instead_of_safetensors_is_named_before_anything_is_fetched(hub, tmp_path):
    [old, huge, locked] = ask(("o/old",), ("o/huge",), ("o/locked",), HF_ENDPOINT=hub, HF_HOME=tmp_path)
    assert old[0] == 3 and "model.gguf (GGUF), pytorch_model.bin (a pickle, which can run code)" in old[1]
    assert "give its path as the model" in old[1]
    assert huge[0] == 8 and "GiB free" in huge[1] and "HF_HOME" in huge[1]
    assert locked[0] == 3 and "gated" in locked[1], "its page may be read, its files may not"


def test_a_disk_that_fills_up_while_a_model_is_fetched_is_a_storage_error(hub, tmp_path):
    """The limit is on the length of a file."""
    [full] = ask(("o/whole",), limit=1_000_000, HF_ENDPOINT=hub, HF_HOME=tmp_path)
    assert full[0] == 8 and "cannot be written to the hub's cache" in full[1]
    [again] = ask(("o/whole",), HF_ENDPOINT=hub, HF_HOME=tmp_path)
    assert again[2] == COMMIT, "what was half there does not stand in the way"


def test_a_partial_snapshot_is_completed_by_the_hub(hub, tmp_path):
    [random] = ask(("o/whole", "main", "random"), HF_ENDPOINT=hub, HF_HOME=tmp_path)
    assert not (Path(random[1]) / "model.safetensors").exists()
    [whole] = ask(("o/whole",), HF_ENDPOINT=hub, HF_HOME=tmp_path)
    assert whole == random and (Path(whole[1]) / "model.safetensors").is_file()


def test_a_hub_that_takes_the_question_and_never_answers_cannot_be_reached(tmp_path):
    """It accepts the connection, and that is all. The client's own setting shortens the 10 s that are waited for it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        [result] = ask(("o/whole",), HF_ENDPOINT=address, HF_HOME=tmp_path, HF_HUB_ETAG_TIMEOUT=1)
        assert time.monotonic() - began < 30
    assert result[0] == 3 and "the hub cannot be reached (ReadTimeout" in result[1] and "check the network" in result[1]


def test_a_hub_that_falls_silent_between_two_answers_cannot_be_reached(hub, tmp_path, monkeypatch):
    """It says what the model is, and nothing when the files are to be listed."""
    monkeypatch.setattr(Hub, "answers_left", [None])
    [result] = ask(("o/whole",), HF_ENDPOINT=hub, HF_HOME=tmp_path, HF_HUB_ETAG_TIMEOUT=1)
    assert result[0] == 3 and "the hub cannot be reached (ReadTimeout" in result[1]
