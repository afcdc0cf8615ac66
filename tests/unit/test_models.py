"""A model is the one that was named, found on this computer first, and never another."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT, SHIPPED, write_small_model
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.models import TWO_WAYS_ON, resolve_model

COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


def test_a_shipped_model_is_found_by_its_name():
    source = resolve_model("tiny-gemma3")
    assert (source.folder, source.revision, source.weights) == (SHIPPED, "shipped", "pretrained")
    assert source.config["model_type"] == "gemma3_text"
    assert [path.name for path in source.weight_files()] == ["model.safetensors"]


def test_a_shipped_model_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny-gemma3").folder == SHIPPED


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
    with pytest.raises(ConfigError, match=r"model\.revision: 'v2'") as caught:
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no config.json"),
        (b"{", "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "names no model_type"),
        (b"{}", "names no model_type"),
        (b'{"model_type": ""}', "names no model_type"),
    ],
)
def test_a_folder_without_a_usable_configuration_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        resolve_model(str(tmp_path))
    assert str(tmp_path) in caught.value.problem


# --- the hub's cache: read at import from the environment, so each environment is a process of its own ---------------

ASK = """
    import json, sys
    from tunix_rt.errors import TunixError
    from tunix_rt.models import resolve_model
    for name, revision, weights in json.load(sys.stdin):
        try:
            source = resolve_model(name, revision=revision, weights=weights)
            answer = [source.name, str(source.folder), source.revision]
        except TunixError as error:
            answer = [error.exit_code, str(error)]
        print(json.dumps(answer))
    """


def ask(*questions, **environment):
    """What becomes of each (name, revision, weights), in one process whose hub is an address where nothing listens."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    variables |= {"HF_ENDPOINT": "http://127.0.0.1:9", **{key: str(value) for key, value in environment.items()}}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ASK)],
        input=json.dumps([question + ("main", "pretrained")[len(question) - 1 :] for question in questions]),
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture
def cache(tmp_path) -> Path:
    """A hub cache as huggingface_hub lays it out, with `gpt2` in it: blobs, links to them, a ref to the commit."""
    return put_into_cache(tmp_path, "gpt2")


def put_into_cache(folder: Path, name: str, *, weights: bool = True) -> Path:
    repository = folder / "hub" / f"models--{name}"
    snapshot = repository / "snapshots" / COMMIT
    for part in (repository / "refs", repository / "blobs", snapshot):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    config = {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 32, "n_layer": 2, "n_head": 2}
    contents = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": (SHIPPED / "tokenizer.json").read_bytes(),
    }
    if weights:
        contents["model.safetensors"] = (SHIPPED / "model.safetensors").read_bytes()[:100]
    for number, (file, content) in enumerate(contents.items()):
        (repository / "blobs" / f"{number:040x}").write_bytes(content)
        (snapshot / file).symlink_to(f"../../blobs/{number:040x}")
    return folder


@pytest.mark.parametrize(("variable", "offline"), [("HF_HOME", "0"), ("HF_HUB_CACHE", "1")])
def test_a_hub_model_in_the_local_cache_resolves_to_its_commit(cache, variable, offline):
    place = cache if variable == "HF_HOME" else cache / "hub"
    by_name, by_commit = ask(("gpt2",), ("gpt2", COMMIT), **{variable: place, "HF_HUB_OFFLINE": offline})
    snapshot = cache / "hub" / "models--gpt2" / "snapshots" / COMMIT
    assert by_name == by_commit == ["gpt2", str(snapshot), COMMIT]


def test_neither_another_revision_nor_absent_weights_are_made_up_for(cache):
    put_into_cache(cache, "bare", weights=False)
    questions = [("gpt2", "v2"), ("bare", "main", "pretrained"), ("bare", "main", "random")]
    other_revision, without_weights, random = ask(*questions, HF_HOME=cache, HF_HUB_OFFLINE=1)
    assert other_revision[0] == without_weights[0] == 3
    assert "'gpt2'" in other_revision[1]
    assert "--weights random" in without_weights[1]
    assert random[2] == COMMIT


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_model_that_cannot_be_had_is_refused_with_the_two_ways_on(tmp_path, offline):
    [absent, impossible] = ask(("google/gemma-2b",), ("not a name!",), HF_HOME=tmp_path, HF_HUB_OFFLINE=offline)
    assert absent[0] == impossible[0] == 3
    assert "google/gemma-2b" in absent[1]
    assert "local model folder" in absent[1]
    assert "--weights random" in absent[1]
    assert "no model named 'not a name!'" in impossible[1]


def test_random_weights_are_not_advised_to_someone_who_asked_for_them(monkeypatch, tmp_path):
    from huggingface_hub import errors

    def nothing(*_, **__):
        raise errors.LocalEntryNotFoundError("nothing cached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    with pytest.raises(InputError) as caught:
        resolve_model("gpt2", weights="random")
    assert "--weights random" not in caught.value.fix and "local folder" in caught.value.fix
