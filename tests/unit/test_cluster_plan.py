"""`tunix-rt plan` for several GPUs: the fullest rank, the fewest GPUs, the network, replicas and the cost of a restart."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner

from docs.solver_pages import shape_named
from tests.tables import parametrize
from tunix_rt.accelerators import nodes
from tunix_rt.cli.main import cli
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.answer import PlanTarget, answer
from tunix_rt.plan.fit import predict_as_run, verdict
from tunix_rt.plan.report import look
from tunix_rt.plan.target import several, target_named

LLAMA = "llama-3.1-8b"
BFLOAT16 = ["--set", "training.dtype=bfloat16", "--set", "training.master_dtype=bfloat16"]


def config(**training) -> RunConfig:
    """Two rows of 8,192 tokens on each GPU, checkpointed, without generation."""
    training = {"dtype": "bfloat16", "master_dtype": "bfloat16", "per_device_train_batch_size": 2, **training}
    return RunConfig.model_validate({
        "data": {"max_length": 8192, "validation_fraction": 0}, "evaluation": {"enabled": False},
        "training": {"gradient_checkpointing": True, **training},
    })  # fmt: skip


def target(name="8xh100", gpus=None, nodes_=None, gbit=None):
    return several(target_named(name), gpus=gpus, nodes_=nodes_, network_gbit=gbit)


def planned(on, **training):
    return answer(config(**training), PlanTarget(target=on), model=LLAMA, shape=shape_named(LLAMA))


def said(*words):
    return CliRunner().invoke(cli, ["plan", "--model", LLAMA, *words])


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_a_run_that_fits_eight_gpus_is_described_and_ends_with_0():
    words = [*BFLOAT16, "--on", "8xh100", "--set", "training.gradient_checkpointing=true"]
    done = said(*words)
    assert done.exit_code == 0, done.output
    for line in ("each of 8", "on 8 GPUs", "fewest GPUs that fit", "NVLink of 450 GB/s", "restart: repeats"):
        assert line in done.stdout
    value = json.loads(said(*words, "--json").stdout)
    cluster, memory = value["cluster"], value["memory"]
    assert (cluster["ranks"], cluster["shards"], memory["devices"]) == (8, 8, 8)
    parts = {name for phase in memory["phases"] for name in phase["parts"]}
    assert {"gathered", "unreduced", "reducing"} <= parts
    assert json.loads(said(*BFLOAT16, "--on", "h200", "--json").stdout)["cluster"] is None


def test_a_run_that_does_not_fit_two_gpus_ends_with_5_and_names_what_would():
    done = said("--on", "2x4090")
    assert done.exit_code == 5 and "does not fit on 2x4090" in done.stderr
    assert "--set evaluation.enabled=false" in done.stdout, "a rank that generates gathers the whole model"


def test_gpus_of_the_catalogue_and_nodes_of_it_are_one_plan():
    by_count, by_name = (
        json.loads(said(*BFLOAT16, *words, "--nodes", "2", "--json").stdout)
        for words in (["--on", "h100-sxm", "--gpus", "8"], ["--on", "8xh100"])
    )
    assert by_count["cluster"] == by_name["cluster"] and by_count["memory"] == by_name["memory"]
    one = [json.loads(said("--on", "h200", *words, "--json").stdout) for words in ([], ["--gpus", "1"])]
    assert one[0] == one[1]


@parametrize("words", "expected")
def test_what_is_not_sharded_over_gpus_is_refused_with_the_way_out(words, expected):
    done = said(*words)
    assert done.exit_code == 2 and expected in done.stderr, done.output


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_rank_needs_less_of_more_and_never_less_than_what_is_whole():
    peaks = [planned(target(nodes_=count)).outlook.plan for count in (1, 2, 8, 128)]
    assert all(more.peak_bytes < fewer.peak_bytes for fewer, more in pairwise(peaks))
    table = 2 * shape_named(LLAMA).embedding_parameters
    assert peaks[-1].peak_bytes > 3 * table, "embedding, lm_head and its gradient"


def test_replicas_have_the_state_of_fewer_shards():
    one, four = (planned(target(nodes_=4), data_replicas=count).outlook.plan for count in (1, 4))
    eight = planned(target()).outlook.plan
    for name in ("weights", "optimizer"):
        assert four.peak.parts[name] == eight.peak.parts[name] > one.peak.parts[name]


def test_the_fewest_gpus_fit_and_one_less_does_not():
    found = planned(target("2x4090", nodes_=8, gbit=100), per_device_train_batch_size=1)
    fewest = found.cluster.fewest
    assert fewest and fewest > 2

    def fits(ranks):
        plan = predict_as_run(
            shape_named(LLAMA), config(per_device_train_batch_size=1), found.outlook.target, devices=ranks
        )
        return verdict(plan, found.outlook.target).fits

    assert fits(fewest) and not fits(fewest - 1)


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes_", "seconds"), [(1, 2.46), (16, 2.52)])
def test_published_steps_are_within_the_range(nodes_, seconds):
    """torchtitan, Llama 3.1 8B, 16,384 tokens on each H100."""
    time = planned(target(nodes_=nodes_)).outlook.time
    assert time.seconds_low <= seconds <= time.seconds_high


def test_enough_tokens_hide_the_network_and_fewer_do_not():
    slow = planned(target(nodes_=2, gbit=100))
    assert not slow.cluster.hidden and slow.outlook.time.parts["network"] > 0.5
    for share, hidden in ((0.9, False), (1.1, True)):
        rows = round(share * slow.cluster.tokens_to_hide / 8192)
        assert planned(target(nodes_=2, gbit=100), per_device_train_batch_size=rows).cluster.hidden is hidden
    assert planned(target(nodes_=2)).cluster.hidden


def test_replicas_are_proposed_where_they_are_faster_and_fit():
    on = target(nodes_=2, gbit=100)
    found = look(shape_named(LLAMA), config(), on)
    assert found.runs and any(one.settings.get("training.data_replicas") == 2 for one in found.faster)
    for one in found.faster:
        assert verdict(one.plan, on).fits and one.level == 0
    choices = planned(on).cluster.choices
    assert [one.data_replicas for one in choices] == [1, 2] and choices[1].seconds < choices[0].seconds


def test_a_slower_network_never_makes_a_step_faster():
    seconds = [planned(target(nodes_=4, gbit=gbit)).outlook.time.seconds for gbit in (3200, 800, 100, 10)]
    assert seconds == sorted(seconds)


def test_half_an_interval_is_repeated_after_a_restart():
    by_steps = planned(target(), save_steps=100)
    assert by_steps.cluster.restart.repeated_seconds == pytest.approx(50 * by_steps.outlook.time.seconds)
    assert planned(target()).cluster.restart.repeated_seconds == 300
    shards = {count: planned(target(nodes_=count)).cluster.restart.checkpoint_bytes for count in (1, 2)}
    assert shards[1] == pytest.approx(2 * shards[2], rel=0.001)


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_every_node_names_its_gpus_and_its_source():
    assert {"8xh100", "8xa100", "2x4090", "4xl40s", "gb200-nvl72"} <= {node.id for node in nodes()}
    for node in nodes():
        on = target_named(node.id)
        assert on.links and (on.links.gpus, on.id) == (node.gpus, node.accelerator) and not on.links.assumed
        assert replace(on, name=node.accelerator, links=None) == target_named(node.accelerator)
        assert node.link in ("nvlink", "pcie") and len(node.source) > 30
