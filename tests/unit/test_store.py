"""Tokens on disk: made once, found again, never half there, the same by however many processes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from tests.stores import files, quiet, recipe_for, write_sums
from tunix_rt.data import token_cache as store_module
from tunix_rt.data import tokenize as tokenise
from tunix_rt.data.contamination import find_leaks
from tunix_rt.data.sources import find_dataset, find_evalset, read_items
from tunix_rt.data.text import Sketches, sketch
from tunix_rt.data.token_cache import Reading, cache_folder, open_store
from tunix_rt.data.validation import refuse
from tunix_rt.errors import InputError, Preempted
from tunix_rt.storage import merkle_root, row_leaf


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path) -> Path:
    return write_sums(tmp_path / "my.jsonl")


def test_a_second_start_reads_what_the_first_has_made(data):
    first = open_store(recipe_for(data), quiet)
    reported = []
    second = open_store(recipe_for(data), lambda *fields: reported.append(fields))
    assert first.seconds > 0 and second.seconds == 0 and not reported
    assert replace(second, seconds=0, examples=None) == replace(first, seconds=0, examples=None)
    assert [e.ids.tolist() for e in second.examples] == [e.ids.tolist() for e in first.examples]
    assert len(second.examples) == 30


def test_another_file_tokenizer_template_or_setting_is_another_store(data, tmp_path):
    recipe = recipe_for(data)
    others = [
        recipe_for(data, system_instruction="Think."),
        recipe_for(data, completion_only_loss=False),
        recipe_for(data, reasoning_tag="think"),
        replace(recipe, needs_bos=False),
        replace(recipe, format="messages"),
        replace(recipe, tokenizer=replace(recipe.tokenizer, sha256="0" * 64)),
    ]
    (tmp_path / "other.jsonl").write_bytes(data.read_bytes() + data.read_bytes().splitlines()[0].replace(b"0", b"5"))
    others.append(recipe_for(tmp_path / "other.jsonl"))
    assert len({recipe.key, *(other.key for other in others)}) == 1 + len(others)
    assert recipe_for(data, max_length=64, packing=False, validation_fraction=0.5).key == recipe.key


@pytest.mark.parametrize("what", ["a bit of the tokens", "the index cut", "the manifest cut", "no manifest"])
def test_damaged_tokens_are_noticed_and_made_again(data, what, caplog):
    whole = open_store(recipe_for(data), quiet)
    before = files(whole.folder)
    if what == "a bit of the tokens":
        content = bytearray(before["tokens.bin"])
        content[40] ^= 1
        (whole.folder / "tokens.bin").write_bytes(content)
    elif what == "the index cut":
        (whole.folder / "index.bin").write_bytes(before["index.bin"][:-8])
    elif what == "the manifest cut":
        (whole.folder / "manifest.json").write_bytes((whole.folder / "manifest.json").read_bytes()[:50])
    else:
        (whole.folder / "manifest.json").unlink()
    again = open_store(recipe_for(data), quiet)
    assert again.seconds > 0 and "are corrupt" in caplog.text
    assert files(again.folder) == before
    assert again.merkle_root == whole.merkle_root


def test_an_interrupted_build_leaves_no_half_store(data):
    def stop(*reported):
        raise Preempted("stopped", fix="run it again")

    with pytest.raises(Preempted):
        open_store(recipe_for(data), stop)
    assert [path.name for path in cache_folder().iterdir() if not path.name.endswith(".lock")] == []
    assert len(open_store(recipe_for(data), quiet).examples) == 30


def test_every_record_that_cannot_be_read_is_found_in_one_pass_and_changes_nothing_about_the_others(data):
    before = open_store(recipe_for(data), quiet)
    data.write_bytes(b"\n" + data.read_bytes() + b'{"prompt": "?"}\n' * 30)
    after = open_store(recipe_for(data), quiet)
    assert (after.merkle_root, after.tokens, len(after.examples)) == (before.merkle_root, before.tokens, 61)
    assert [(one.rule, one.count, one.first) for one in after.findings if one.refuses] == [
        ("unreadable", 1, f"{data}:1"), ("wrong_field", 30, f"{data}:32"),
    ]  # fmt: skip
    assert after.examples.entries["bad"].tolist() == [True] + [False] * 30 + [True] * 30
    with pytest.raises(InputError) as caught:
        refuse(after.findings)
    listed = [line for line in caught.value.problem.splitlines() if line.startswith(f"  {data}")]
    assert len(listed) == 20 and caught.value.problem.endswith("and 11 more")
    assert [one for one in after.findings if not one.refuses] == [one for one in before.findings if not one.refuses]


def test_the_merkle_root_of_a_store_is_that_of_its_examples(data):
    made = open_store(recipe_for(data), quiet)
    leaves = [row_leaf(e.ids, e.trained, np.arange(len(e.ids))) for e in made.examples]
    assert made.merkle_root == merkle_root(leaves)
    assert made.tokens == sum(len(e.ids) for e in made.examples)
    assert made.trained_tokens == sum(int(e.trained.sum()) for e in made.examples)


def test_tokens_made_by_other_code_or_another_tokenizers_library_are_other_tokens(data, monkeypatch):
    keys = {recipe_for(data).key}
    monkeypatch.setattr(tokenise, "_code_sha256", lambda: "0" * 64)
    keys.add(recipe_for(data).key)
    monkeypatch.setattr(tokenise.importlib.metadata, "version", lambda name: "0")
    assert len({*keys, recipe_for(data).key}) == 3


def test_a_store_that_is_there_is_read_without_writing_anything(data, monkeypatch):
    """As from a cache that is shared and read-only."""
    open_store(recipe_for(data), quiet)
    before = sorted(path.stat().st_mtime_ns for path in cache_folder().rglob("*"))
    monkeypatch.setattr(store_module, "_alone", None)
    assert open_store(recipe_for(data), quiet).seconds == 0
    assert sorted(path.stat().st_mtime_ns for path in cache_folder().rglob("*")) == before


def test_waiting_for_another_program_is_said_and_can_be_stopped(data, caplog):
    place = cache_folder() / recipe_for(data).key
    place.parent.mkdir(parents=True)
    reported = []

    def tell(what, *counts):
        reported.append(what)
        raise Preempted("stopped", fix="run it again")

    with FileLock(f"{place}.lock"), caplog.at_level("INFO"), pytest.raises(Preempted):
        open_store(recipe_for(data), tell)
    assert "waiting for it" in caplog.text and "wait" in reported[0]


def test_what_killed_programs_left_is_swept_and_what_is_being_made_is_not(data):
    for name in ("dead", "alive"):
        (cache_folder() / f".staged-{name}").mkdir(parents=True)
    with FileLock(cache_folder() / "alive.lock"):
        open_store(recipe_for(data), quiet)
        assert [path.name for path in cache_folder().glob(".staged-*")] == [".staged-alive"]


@pytest.mark.parametrize("name", ["big.jsonl", "big.json"])
def test_large_records_make_small_batches_whatever_holds_them(tmp_path, name):
    records = [{"prompt": f"{n}?", "completion": "word " * 20_000} for n in range(10)]
    text = json.dumps(records) if name.endswith(".json") else "".join(json.dumps(r) + "\n" for r in records)
    (tmp_path / name).write_text(text)
    sizes = [len(batch) for batch in Reading(find_dataset(str(tmp_path / name))).batches()]
    assert sum(sizes) == 10 and max(sizes) <= 3


def test_the_search_for_evaluation_questions_is_kept_and_made_again_for_another_eval_set(data, tmp_path, monkeypatch):
    recipe = recipe_for(data)
    kept_in = open_store(recipe, quiet).folder

    def leaks_of(name, prompt):
        path = tmp_path / name
        path.write_text(json.dumps({"id": "1", "prompt": prompt, "answer": "5", "section": "s"}) + "\n")
        evalset = find_evalset(str(path))
        return find_leaks(recipe, kept_in, read_items(evalset), evalset, quiet)

    first = leaks_of("a.jsonl", "What is 4 + 1?")
    assert [(found.rule, found.count, found.first) for found in first] == [("overlap_exact", 1, f"{data}:5")]
    monkeypatch.setattr("tunix_rt.data.contamination._search", lambda *_: [])
    assert leaks_of("a.jsonl", "What is 4 + 1?") == first
    assert leaks_of("b.jsonl", "What is 5 + 1?") == []


# --- hashes and sketches ---------------------------------------------------------------------------------------------


def test_the_merkle_root_is_that_of_rfc_6962():
    """The test vectors of the certificate transparency log, whose leaves are these."""
    leaves = [
        bytes.fromhex(text) for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "60616263")
    ]
    assert merkle_root([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert merkle_root(leaves[:1]) == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert merkle_root(leaves[:2]) == "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"
    assert merkle_root(leaves[:3]) == "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"
    assert len({merkle_root(leaves[:count]) for count in range(9)}) == 9


STORY = [f"word{number}" for number in range(36)]


@pytest.mark.parametrize(("changed", "found"), [(0, True), (1, True), (5, False), (8, False)])
def test_a_sketch_finds_texts_that_share_most_of_their_runs_and_no_others(changed, found):
    other = [*STORY]
    other[-changed:] = [f"{word}x" for word in other[-changed:]] if changed else []
    other = other if changed else STORY
    sketches = Sketches()
    sketches.add(np.array([4, 9]), np.stack([sketch(" ".join(words)) for words in (STORY, other)]))
    assert sketches.near_duplicates() == ({9: 4} if found else {})


def test_sketches_stay_bounded_and_keep_near_duplicates_together(monkeypatch):
    monkeypatch.setattr("tunix_rt.data.text.CAPACITY", 200)
    texts = [f"{n} {n * 7} {n * 3} red {n} blue {n * 11} green {n * 13}" for n in range(1_000)]
    sketches = Sketches()
    sketches.add(np.arange(1_000), np.stack([sketch(text) for text in texts]))
    sketches.add(np.arange(1_000, 2_000), np.stack([sketch(text) for text in texts]))
    assert sketches.compared <= 200 < sketches.seen == 2_000 and sketches.sampled
    pairs = sketches.near_duplicates()
    assert len(pairs) == sketches.compared // 2 > 20
    assert all(later == earlier + 1_000 for later, earlier in pairs.items())
