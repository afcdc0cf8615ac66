"""Forgeries of what went in: source, configuration, data, order, seeds, model, versions; and of the checkpoints between."""

from pathlib import Path

from tests.forging.catalogue import forgery
from tests.forging.folder import (
    configure,
    each_step,
    edited,
    lines_of,
    put_lines,
    read,
    rebuild_batches,
    rebuild_log,
    rebuild_root,
    rebuild_source,
    set_loss,
    swap,
    swap_everywhere,
)
from tests.forging.sealing import reseal, reseal_sums, retell, set_run_hash

SOURCE, DATA, MODEL, MACHINE, CHECKPOINTS = "source", "data", "model", "machine", "checkpoints"
OTHER = "5ca1ab1e" * 8
CLASS_WHY = (
    "a recorded machine that is not the verifier's makes the replay one within tolerances (NEAR or CROSS), and the losses, "
    "which are true, are within them"
)


@forgery("another commit named, which is in no repository", group=SOURCE)
def forge_commit(folder: Path) -> None:
    commit = read(folder / "bundle.json")["commit"]
    swap_everywhere(folder, commit, "c0ffee" + commit[6:])
    reseal_sums(folder)


@forgery("no commit, but a line of text", group=SOURCE)
def forge_commit_in_words(folder: Path) -> None:
    swap_everywhere(folder, read(folder / "bundle.json")["commit"], "main")
    reseal_sums(folder)


@forgery("one source file edited before the run, the hash of the source rebuilt", group=SOURCE)
def forge_dirty_tree(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["source_files"]["train.py"] = OTHER
    rebuild_source(folder)
    reseal(folder)


@forgery("one source file edited, the hash of the source as it was", group=SOURCE)
def forge_source_file(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["source_files"]["train.py"] = OTHER
    reseal(folder)


@forgery("a source file added, the hash of the source rebuilt", group=SOURCE)
def forge_added_source_file(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["source_files"]["patched.py"] = OTHER
    rebuild_source(folder)
    reseal(folder)


@forgery("config.yaml edited, its hash as it was", group=SOURCE)
def forge_config(folder: Path) -> None:
    before = read(folder / "precommit.json")["config_sha256"]
    configure(folder, "training", weight_decay=0.1)
    reseal(folder)
    with edited(folder / "precommit.json") as committed:
        committed["config_sha256"] = before
    reseal_sums(folder)


@forgery("another weight decay in config.yaml, hash rebuilt", group=SOURCE, level="L3")
def forge_weight_decay(folder: Path) -> None:
    configure(folder, "training", weight_decay=0.1)
    reseal(folder)


@forgery("a setting in config.yaml that there is not", group=SOURCE)
def forge_unknown_setting(folder: Path) -> None:
    configure(folder, "training", secret_sauce=True)
    reseal(folder)


@forgery("another optimizer in config.yaml, hash rebuilt", group=SOURCE, level="L3")
def forge_optimizer(folder: Path) -> None:
    configure(folder, "training", optim="adafactor")
    reseal(folder)


# --- data -------------------------------------------------------------------------------------------------------------


@forgery("another dataset named, the hashes as they were", group=DATA, level="L3")
def forge_dataset_name(folder: Path) -> None:
    key = read(folder / "precommit.json")["dataset"]["key"]
    swap_everywhere(folder, key, "gsm8k")
    reseal(folder)


@forgery("another hash of the dataset", group=DATA)
def forge_dataset_hash(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["dataset"]["sha256"] = OTHER
    reseal(folder)


@forgery("one row changed in rows.jsonl, the root as it was", group=DATA)
def forge_row(folder: Path) -> None:
    rows = lines_of(folder / "rows.jsonl")
    rows[3]["sha256"] = OTHER
    put_lines(folder / "rows.jsonl", rows)
    rebuild_batches(folder)
    reseal(folder)


@forgery("one row changed, with root and batches rebuilt", group=DATA, level="L3")
def forge_row_everywhere(folder: Path) -> None:
    rows = lines_of(folder / "rows.jsonl")
    rows[3]["sha256"] = OTHER
    put_lines(folder / "rows.jsonl", rows)
    rebuild_root(folder)
    rebuild_batches(folder)
    reseal(folder)


@forgery("the targets of a row counted otherwise, the steps as they were", group=DATA)
def forge_row_targets(folder: Path) -> None:
    rows = lines_of(folder / "rows.jsonl")
    for row in rows:
        row["targets"] += 1
    put_lines(folder / "rows.jsonl", rows)
    reseal(folder)


@forgery("the targets of all rows counted otherwise, the steps too", group=DATA, level="L3")
def forge_targets_everywhere(folder: Path) -> None:
    rows = lines_of(folder / "rows.jsonl")
    for row in rows:
        row["targets"] -= 1
    put_lines(folder / "rows.jsonl", rows)
    rebuild_batches(folder)
    reseal(folder)


@forgery("a row with more targets than tokens", group=DATA)
def forge_more_targets_than_tokens(folder: Path) -> None:
    rows = lines_of(folder / "rows.jsonl")
    for row in rows:
        row["targets"] = row["tokens"] + 1
    put_lines(folder / "rows.jsonl", rows)
    rebuild_batches(folder)
    reseal(folder)


@forgery("rows left out of rows.jsonl, with the root rebuilt", group=DATA)
def forge_fewer_rows(folder: Path) -> None:
    put_lines(folder / "rows.jsonl", lines_of(folder / "rows.jsonl")[:-5])
    rebuild_root(folder)
    reseal(folder)


@forgery("another seed of the order in precommit.json and config.yaml", group=DATA)
def forge_order(folder: Path) -> None:
    configure(folder, "training", data_seed=7)
    with edited(folder / "precommit.json") as committed:
        committed["seeds"]["data_seed"] = 7
    reseal(folder)


@forgery("another seed of the order, with all batches rebuilt", group=DATA, level="L3")
def forge_order_everywhere(folder: Path) -> None:
    configure(folder, "training", data_seed=7)
    with edited(folder / "precommit.json") as committed:
        committed["seeds"]["data_seed"] = 7
    rebuild_batches(folder)
    rebuild_log(folder)
    reseal(folder)


@forgery("another seed in precommit.json than in config.yaml", group=DATA)
def forge_seed(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["seeds"]["seed"] = 7
    reseal(folder)


@forgery("another size of the batch in config.yaml, hash rebuilt", group=DATA)
def forge_batch_size(folder: Path) -> None:
    configure(folder, "training", per_device_train_batch_size=8)
    reseal(folder)


@forgery("more traces than the dataset has", group=DATA)
def forge_traces(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["dataset"]["traces"] *= 10
    reseal(folder)


# --- the model --------------------------------------------------------------------------------------------------------


@forgery("another model named, the hashes as they were", group=MODEL, level="L3")
def forge_model_name(folder: Path) -> None:
    name = read(folder / "precommit.json")["base_model"]["name"]
    swap_everywhere(folder, name, "google/gemma-3-27b-it")
    reseal(folder)


@forgery("another hash of the base model's weights", group=MODEL)
def forge_base_model(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["base_model"]["files"]["model.safetensors"] = OTHER
    reseal(folder)


@forgery("another hash of the tokenizer", group=MODEL)
def forge_tokenizer(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["tokenizer_sha256"] = OTHER
    reseal(folder)


@forgery("more parameters than the model has, in result.json", group=MODEL)
def forge_parameters(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["parameters"] *= 10
    reseal(folder)


@forgery("pretrained weights said to be random ones", group=MODEL)
def forge_kind_of_weights(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["base_model"]["weights"] = "random"
    _say_random(folder)


@forgery("pretrained weights said to be random ones, and no hash of them", group=MODEL, level="L3")
def forge_kind_of_weights_everywhere(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["base_model"]["weights"] = "random"
        committed["base_model"]["files"] = {"config.json": committed["base_model"]["files"]["config.json"]}
    _say_random(folder)


def _say_random(folder: Path) -> None:
    configure(folder, "model", weights="random")
    with edited(folder / "eval_summary.json") as summary:
        summary["weights"] = "random"
    swap(folder / "training_log.txt", "weights=pretrained", "weights=random")
    reseal(folder)


@forgery("a final model that was never proven said to be", group=MODEL)
def forge_proof_of_the_final_model(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["final_model"]["largest_logit_difference"] = 10 * result["final_model"]["tolerance"]
    reseal(folder)


@forgery("the hash of other weights under the final model's name", group=MODEL, level="L2")
def forge_final_model(folder: Path) -> None:
    set_run_hash(folder, "final_model/model.safetensors", OTHER)
    reseal(folder)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@forgery("another chain head in checkpoints.json", group=CHECKPOINTS)
def forge_checkpoint_head(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        listed["checkpoints"][0]["metrics_head"] = OTHER
    reseal(folder, heads=False)


@forgery("the hash of other weights in checkpoints.json", group=CHECKPOINTS, level="L3")
def forge_checkpoint_weights(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        one = listed["checkpoints"][-1]
        one["files"]["model.safetensors"]["sha256"] = OTHER
        set_run_hash(folder, f"checkpoints/step-{one['step']:06d}/model.safetensors", OTHER)
    reseal(folder)


@forgery("a checkpoint's hash in checkpoints.json that run-SHA256SUMS does not have", group=CHECKPOINTS)
def forge_checkpoint_hash(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        listed["checkpoints"][-1]["files"]["model.safetensors"]["sha256"] = OTHER
    reseal(folder)


@forgery("a checkpoint of a step that was not taken", group=CHECKPOINTS)
def forge_checkpoint_step(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        listed["checkpoints"][-1]["step"] += 1000
    reseal(folder)


@forgery("no checkpoints in the list", group=CHECKPOINTS)
def forge_no_checkpoints(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        listed["checkpoints"] = []
    reseal(folder)


# --- the machine ------------------------------------------------------------------------------------------------------


@forgery("another version of the engine in precommit.json only", group=MACHINE)
def forge_version(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["versions"]["torch"] = "2.99.0"
    reseal(folder)


@forgery("another version of the engine in every file", group=MACHINE, level="missed", why=CLASS_WHY)
def forge_version_everywhere(folder: Path) -> None:
    swap_everywhere(folder, read(folder / "precommit.json")["versions"]["torch"], "2.12.3+cpu")
    reseal(folder)


@forgery("another number of threads in processes.json", group=MACHINE, level="missed", why=CLASS_WHY)
def forge_threads(folder: Path) -> None:
    with edited(folder / "processes.json") as told:
        told["processes"][0]["machine"]["threads"] += 1
    reseal(folder)


@forgery(
    "losses lowered by less than the tolerance, and another CPU named so that it applies", group=MACHINE,
    level="missed", why=CLASS_WHY.replace("which are true", "lowered by a ten-millionth"),
)  # fmt: skip
def forge_losses_within_tolerance(folder: Path) -> None:
    with edited(folder / "processes.json") as told:
        told["processes"][0]["machine"]["cpu_flags_sha256"] = OTHER
    each_step(folder, lambda line: set_loss(line, line["loss"] * (1 - 1e-7)))
    reseal(folder)


@forgery("another backend in processes.json", group=MACHINE)
def forge_backend(folder: Path) -> None:
    with edited(folder / "processes.json") as told:
        told["processes"][0]["machine"]["backend"] = "jax"
    reseal(folder)


@forgery("another version of the engine in processes.json", group=MACHINE)
def forge_version_of_the_process(folder: Path) -> None:
    with edited(folder / "processes.json") as told:
        told["processes"][0]["machine"]["versions"]["torch"] = "2.99.0"
    reseal(folder)


@forgery("a process that began training after the first step", group=MACHINE)
def forge_first_step(folder: Path) -> None:
    with edited(folder / "processes.json") as told:
        told["processes"][0]["first_step"] = 2
    reseal(folder)


@forgery("a second process, though the run was not continued", group=MACHINE)
def forge_second_process(folder: Path) -> None:
    with edited(folder / "processes.json") as told:
        first = told["processes"][0]
        told["processes"].append(first | {"first_step": first["first_step"] + 1, "pid": first["pid"] + 1})
    reseal(folder)


@forgery("no process at all", group=MACHINE)
def forge_no_process(folder: Path) -> None:
    with edited(folder / "processes.json") as told:
        told["processes"] = []
    reseal(folder)


@forgery("the precommitment dated a year before the run", group=MACHINE)
def forge_early_commitment(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        year = int(committed["created"][:4])
        committed["created"] = f"{year - 1}{committed['created'][4:]}"
    reseal(folder)


@forgery("the precommitment dated after the run", group=MACHINE)
def forge_late_commitment(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        year = int(committed["created"][:4])
        committed["created"] = f"{year + 1}{committed['created'][4:]}"
    reseal(folder)


@forgery("a run that ended before it began", group=MACHINE)
def forge_times_out_of_order(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["started"], result["finished"] = result["finished"], result["started"]
    reseal(folder)


@forgery("more seconds than lie between the start and the end", group=MACHINE)
def forge_seconds_of_the_run(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["seconds"] *= 100
    reseal(folder)


@forgery("a run that was preempted said to be completed", group=MACHINE)
def forge_status(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["reason"] = "SIGTERM"
        result["exit_code"] = 7
    reseal(folder)


@forgery("another host in bundle.json and the manifest only", group=MACHINE)
def forge_host(folder: Path) -> None:
    retell(folder, "bundle.json", host={"cpu": "AMD EPYC 9965", "cpu_cores": 192, "memory_bytes": 2**40})
