"""The ranks of a launch, read from the environment, and how they share a tensor."""

import contextlib
import threading
from types import SimpleNamespace

import pytest

from tunix_rt import ranks
from tunix_rt.cli.launch import without_launch
from tunix_rt.errors import ConfigError, StorageError
from tunix_rt.ranks import EXIT_FILE, World, part_of, process_exit_code, world

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_process_without_a_launcher_or_alone_under_one_is_a_single_rank():
    assert world({}) == World() == world(LAUNCHED | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert world(LAUNCHED | {"TORCHELASTIC_RESTART_COUNT": "2"}) == World(rank=1, size=4, local_rank=1, restarts=2)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"RANK": ""}, "RANK is not set"), ({"MASTER_PORT": ""}, "MASTER_PORT"), ({"RANK": "4"}, "RANK is 4"),
     ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'")],
)  # fmt: skip
def test_half_of_a_launch_is_refused_with_the_name_of_the_variable(change, named):
    with pytest.raises(ConfigError, match=named):
        world(LAUNCHED | change)


@pytest.mark.parametrize(("rows", "shards"), [(8, 2), (7, 4), (3, 4), (1, 2), (0, 3)])
def test_the_parts_of_a_tensor_are_its_rows_once_each(rows, shards):
    parts = [part_of((rows, 5), shard, shards) for shard in range(shards)]
    assert [row for part in parts for row in range(part.first, part.first + part.rows)] == list(range(rows))


def test_a_rank_is_started_without_the_options_of_its_launcher():
    words = ["train", "demo", "--nproc", "2", "--output", "run", "--max-restarts=3", "--nproc=gpu", "--resume"]
    assert without_launch(words) == ["train", "demo", "--output", "run", "--resume"]


@pytest.mark.parametrize("fact", ["gpu", "versions"])
def test_ranks_on_other_gpus_or_of_other_versions_are_refused_by_name(monkeypatch, fact):
    from tunix_rt.engines.torch import lead

    facts = {"rank": 0, "host": "one", "gpu": "H100", "versions": {"torch": "2.13"}}
    orders = SimpleNamespace(
        world=World(size=2), announce=lambda call: 1, answers=lambda name: {1: {**facts, "host": "two", fact: "other"}}
    )
    nothing = contextlib.nullcontext
    watch = SimpleNamespace(busy=lambda *_: nothing(), awaiting=lambda _: nothing())
    monkeypatch.setattr(lead, "_open", [SimpleNamespace(orders=orders, watch=watch)])
    monkeypatch.setattr(lead, "facts_of", lambda engine, world: facts)
    with pytest.raises(ConfigError, match=f"rank 1 on two has {fact} other, rank 0 has") as refused:
        lead.rank_facts(None)
    assert "same GPUs" in refused.value.fix


@pytest.mark.parametrize(("code", "own", "left"), [(7, 0, "7"), (2, 0, "2"), (0, 0, "0"), (1, 1, None)])
def test_under_nproc_only_what_is_worth_another_try_fails_for_torchrun(tmp_path, monkeypatch, code, own, left):
    monkeypatch.setenv(EXIT_FILE, str(tmp_path / "code"))
    assert process_exit_code(code) == own
    assert ((tmp_path / "code").read_text() if left else None) == left


def test_a_folder_that_another_host_makes_is_awaited_and_refused_if_it_never_appears(tmp_path, monkeypatch):
    later = threading.Timer(0.2, (tmp_path / "checkpoint").mkdir)
    later.start()
    assert ranks.wait_for(tmp_path / "checkpoint").is_dir()
    later.join()
    monkeypatch.setattr(ranks, "VISIBLE_SECONDS", 0.0)
    with pytest.raises(StorageError, match="which rank 0 made, is not visible on"):
        ranks.wait_for(tmp_path / "none")
