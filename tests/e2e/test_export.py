"""An exported model is the model: a fresh process with plain transformers finds the same, and every defect is named."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import SHIPPED, write_small_model
from tests.program import refused, tunix_rt
from tests.supervision_checks import write_chat_tokenizer
from tunix_rt.cli.main import cli
from tunix_rt.config.settings import Data, Training
from tunix_rt.data.render import style_of
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.base import load_backend
from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.evaluate.generate import stop_ids
from tunix_rt.export import roundtrip
from tunix_rt.export.push import plan_push
from tunix_rt.export.roundtrip import Target, check_folder, check_round_trip, differences, reference_of, reload_in_child
from tunix_rt.models.resolve import ModelSource, resolve_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from tests.tables import tables  # noqa: E402

RIGHT = tables(__file__)["right"]


# --- ways in which exports go wrong ----------------------------------------------------------------------------------


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_json(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def one_percent(folder):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] *= 1.01

    change_weights(folder, change)


def swap_layers(folder):
    def change(tensors):
        for name in [name for name in tensors if ".layers.0." in name]:
            other = name.replace(".layers.0.", ".layers.1.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    change_weights(folder, change)


def untie_the_head(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()

    change_weights(folder, change)
    change_json(folder, "config.json", tie_word_embeddings=False)


def lose_a_tensor(folder):
    change_weights(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"))


def round_the_weights(folder):
    change_json(folder, "config.json", dtype="bfloat16")


def rotate_otherwise(folder):
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    change_json(folder, "config.json", rope_parameters={kind: of | {"rope_theta": 77.0} for kind, of in rope.items()})


def edit_the_template(folder):
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<start_of_turn>", "<start_of_turn> ", 1))


def swap_two_ids(folder):
    path = folder / "tokenizer.json"
    inner = json.loads(path.read_text())
    vocabulary = inner["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    path.write_text(json.dumps(inner))


def never_stop(folder):
    change_json(folder, "generation_config.json", eos_token_id=1)


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


DEFECTS = {
    one_percent: r"1 of \d+ tensors differ, first model\.layers\.1\.mlp\.up_proj\.weight \(other values\)",
    swap_layers: r"tensors differ, first model\.layers\.0\..*logits differ by up to .* first after the prompt 'What is 17",
    untie_the_head: r"1 of \d+ tensors differ, first lm_head\.weight.*greedy generation after",
    lose_a_tensor: r"1 missing keys, first model\.layers\.0\.self_attn\.k_proj\.weight",
    round_the_weights: r"tensors differ, first .* \(bfloat16 \[1024, 32\] instead of float32 \[1024, 32\]\)",
    rotate_otherwise: r"^logits differ by up to",
    edit_the_template: r"^its chat template differs: sha256 \w{12} instead of sha256 \w{12}$",
    swap_two_ids: r"other ids for 2 of \d+ tokens, first '7': \d+ instead of \d+; its tokenizer encodes 'What is 17",
    never_stop: r"^eos_token_id in generation_config\.json is \[1\] instead of \[1, 7\d\d\]$",
    cut_off: r"^it cannot be loaded: .*(incomplete|SafetensorError|header)",
}


# --- one fresh process for all of them -------------------------------------------------------------------------------


def engine_of(name: str, folder: Path, settings: dict):
    """A model with drawn weights, with adapters that have learnt something where there are any."""
    model = write_chat_tokenizer(write_small_model(name.split()[0], folder))
    config = json.loads((model / "config.json").read_text())
    source = ModelSource(name=name, folder=model, revision="local", weights="random", config=config)
    backend = load_backend("torch")
    if "lora_rank" not in settings:
        return backend.load_for_inference(source, device="cpu", seed=3, **settings)
    mixed = {"dtype": "bfloat16"} if settings["lora_rank"] is None else {}
    engine = backend.load(source, device="cpu", training=Training(seed=3, **settings, **mixed))
    torch.manual_seed(4)
    for parameter_name, parameter in engine.model.named_parameters():
        if "lora_" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    return engine


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Name of each model and defect -> its reference and what a fresh process loads from its folder."""
    root, backend = tmp_path_factory.mktemp("exports"), load_backend("torch")
    references, folders = {}, {}
    for name, settings in RIGHT.items():
        engine = engine_of(name, root / f"{name} source", settings)
        tokenizer = load_tokenizer(engine.source.folder, str(engine.source.config["model_type"]))
        style = style_of(Data(chat_template="gemma"), tokenizer)
        ends = stop_ids(tokenizer, style)
        folders[name] = root / name
        backend.save(
            engine, folders[name], tokenizer_folder=tokenizer.folder, stop_ids=ends, chat_template=style.template.jinja
        )
        references[name] = reference_of(backend, engine, tokenizer=tokenizer, style=style, stop_ids=ends)
    for defect in DEFECTS:
        name = defect.__name__
        references[name] = references["gemma3"]
        folders[name] = Path(shutil.copytree(folders["gemma3"], root / name))
        defect(folders[name])
    plain = {name: folder for name, folder in folders.items() if not references[name].autocast}
    seen = {}
    for number, (these, cast) in enumerate([(plain, None), (folders.keys() - plain.keys(), "bfloat16")]):
        scratch = root / f"answers-{number}"
        scratch.mkdir()
        place = Target(device="cpu", autocast=cast, share=1.0)
        found = reload_in_child(references["gemma3"], [folders[name] for name in these], place, scratch)
        seen |= dict(zip(these, found, strict=True))
    return {name: (references[name], seen[name]) for name in folders}


@pytest.mark.parametrize("name", RIGHT)
def test_what_was_saved_is_what_plain_transformers_loads(exports, name):
    reference, seen = exports[name]
    share = roundtrip._targets(reference)[0].share
    assert differences(reference, seen, share=share) == []
    apart = abs(seen["logits"] - reference.logits).max() / abs(reference.logits).max()
    equal = sum(roundtrip._equal_tokens(reference, seen))
    assert apart <= share and equal >= 4
    assert reference.conversation is not None and seen["conversation"] == reference.conversation


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_of_an_export_is_found_and_named(exports, defect):
    reference, seen = exports[defect.__name__]
    found = "; ".join(differences(reference, seen, share=roundtrip.EXACT))
    assert re.search(DEFECTS[defect], found), found


# --- the verb --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_shipped_model_is_exported_with_its_round_trip_check(tmp_path):
    done = tunix_rt(
        "export", "tiny-gemma3", "--output", tmp_path / "out", "--dtype", "bfloat16", "--device", "cpu", "--json"
    )
    assert done.returncode == 0, done.stderr
    said, proof = json.loads(done.stdout), json.loads((tmp_path / "out" / "export_proof.json").read_text())
    assert proof["schema"] == "tunix-rt/export-proof/1" and proof["dtype"] == "bfloat16" == said["dtype"]
    assert proof["proof"]["greedy_tokens"] == 64 and proof["proof"]["tensors"] == said["proof"]["tensors"] > 60
    assert set(proof["files"]) == {path.name for path in (tmp_path / "out").iterdir()} - {"export_proof.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing lies beside it"
    again = tunix_rt("export", "tiny-gemma3", "--output", tmp_path / "out", "--device", "cpu")
    assert "is not empty" in refused(again, 2)


@pytest.mark.slow
def test_a_gguf_file_is_exported_with_the_name_of_the_file(tmp_path):
    pytest.importorskip("gguf", reason="needs the extra `gguf` (scripts/setup --dev installs it)")
    from tests.e2e.test_gguf import small_model, write_gguf

    file = write_gguf(tmp_path / "small.gguf", small_model("llama"), quantised=True)
    done = CliRunner().invoke(cli, ["export", str(file), "--output", str(tmp_path / "out"), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "(float32), reloaded by transformers in a fresh process on cpu" in done.output
    proof = json.loads((tmp_path / "out" / "export_proof.json").read_text())
    assert proof["converted_from"].startswith("small.gguf sha256:") and proof["proof"]["prompts"] == 4


def run_of(folder: Path, *, base: Path, **more) -> Path:
    settings = {
        "model.model_name_or_path": base, "data.max_length": 128, "evaluation.enabled": "false", "training.max_steps": 4,
        "training.save_steps": 2, "training.eval_steps": 2, **{f"training.{name}": value for name, value in more.items()},
    }  # fmt: skip
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with pytest.MonkeyPatch.context() as patch:  # the export is checked here; the check of the run takes as long
        patch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)
        done = CliRunner().invoke(cli, ["train", "smoke_tiny", "--output", str(folder), "--device", "cpu", *chosen])
    assert done.exit_code == 0, done.output
    return folder


def exported(run: Path, out: Path, *flags: str) -> dict:
    done = CliRunner().invoke(cli, ["export", str(run), "--output", str(out), "--device", "cpu", *flags])
    assert done.exit_code == 0, done.output
    return load_file(out / "model.safetensors")


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A small model with weights."""
    folder = tmp_path_factory.mktemp("base")
    model = write_small_model("llama", folder / "model")
    config = json.loads((model / "config.json").read_text())
    source = ModelSource(name="small", folder=model, revision="local", weights="random", config=config)
    backend = load_backend("torch")
    engine = backend.load_for_inference(source, device="cpu", dtype="float32")
    backend.save(engine, folder / "base", tokenizer_folder=model, stop_ids=[1])
    return folder / "base"


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory) -> Path:
    """A run with adapters at two modules of each layer."""
    how = {"lora_rank": 2, "lora_alpha": 6, "lora_dropout": 0.1, "lora_target_modules": "[q_proj,down_proj]"}
    return run_of(tmp_path_factory.mktemp("adapted") / "run", base=base, learning_rate=0.05, **how)


def test_a_run_exports_its_final_model_and_its_checkpoints_also_those_of_adapters(base, adapted, tmp_path, monkeypatch):
    """The first export is reloaded in a fresh process; the others are compared tensor by tensor alone."""
    proofs = []

    def once(reference, folder):
        proofs[:] = proofs or [check_folder(reference, folder)]
        return proofs[0]

    monkeypatch.setattr("tunix_rt.export.export.check_folder", once)
    whole = run_of(tmp_path / "whole", base=base)
    final = load_file(whole / "final_model" / "model.safetensors")
    assert same(exported(whole, tmp_path / "final"), final)
    second = exported(whole, tmp_path / "second", "--step", "2")
    assert same(second, load_file(whole / "checkpoints" / "step-000002" / "model.safetensors")) and not same(
        second, final
    )
    exported(tmp_path / "final", tmp_path / "again")
    for name, is_other in (("final", False), ("again", False), ("second", True)):
        card = plan_push(str(whole), "me/tiny", folder=tmp_path / name, private=False).card
        assert ("this is another checkpoint of it, which has no scores" in card) is is_other, name
    with pytest.raises(InputError, match="again: its weights are not those of"):
        plan_push(str(adapted), "me/tiny", folder=tmp_path / "again", private=False)
    one_percent(tmp_path / "again")
    with pytest.raises(InputError, match=r"again: model\.safetensors changed after the export"):
        plan_push(str(whole), "me/tiny", folder=tmp_path / "again", private=False)
    missing = CliRunner().invoke(cli, ["export", str(whole), "--step", "3", "--output", str(tmp_path / "x")])
    assert missing.exit_code == 3 and "has no checkpoint of step 3\n  fix: give --step one of: 2, 4" in missing.output

    merged = exported(adapted, tmp_path / "merged", "--best")
    assert (
        "another checkpoint" not in plan_push(str(adapted), "me/tiny", folder=tmp_path / "merged", private=False).card
    )
    assert same(merged, load_file(adapted / "final_model" / "model.safetensors")) and not same(
        merged, load_file(base / "model.safetensors")
    )
    rounded = ["export", str(adapted), "--step", "4", "--dtype", "bfloat16", "--output", str(tmp_path / "x")]
    refusal = CliRunner().invoke(cli, rounded)
    assert refusal.exit_code == 2 and "adapters are merged in float32" in refusal.output
    refusal = CliRunner().invoke(cli, ["export", str(whole), "--adapter", "--output", str(tmp_path / "x")])
    assert refusal.exit_code == 2 and "trained every parameter, training.lora_rank is not set" in refusal.output


def test_the_adapter_of_a_run_is_a_folder_that_plain_peft_loads(base, adapted, tmp_path):
    import transformers

    peft = pytest.importorskip("peft")
    out = tmp_path / "adapter"
    done = CliRunner().invoke(cli, ["export", str(adapted), "--adapter", "--output", str(out), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert {"adapter_config.json", "adapter_model.safetensors", "export_proof.json"} <= {
        one.name for one in out.iterdir()
    }
    proof = json.loads((out / "export_proof.json").read_text())["proof"]
    assert proof["tensors"] == len(load_file(out / "adapter_model.safetensors")) == 8 and proof["greedy_tokens"] > 0
    ids, load = torch.arange(3, 40).unsqueeze(0), transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        bare, final = (load(folder)(ids).logits for folder in (base, adapted / "final_model"))
        beside = peft.PeftModel.from_pretrained(load(base), out)(ids).logits
    assert (final - bare).abs().max() > 1e-2, "the adapters have learnt something"
    torch.testing.assert_close(beside, final, rtol=1e-4, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"], "nothing lies beside it"


@pytest.mark.slow
def test_an_adapter_that_computes_something_else_is_refused_and_nothing_of_it_stays(adapted, tmp_path, monkeypatch):
    from tunix_rt.export import adapter

    written = adapter._config
    monkeypatch.setattr(adapter, "_config", lambda *given: written(*given) | {"lora_alpha": 12})
    done = CliRunner().invoke(cli, ["export", str(adapted), "--adapter", "--output", str(tmp_path / "out")])
    assert done.exit_code == EvidenceError.exit_code and "logits differ by up to" in done.output
    assert not list(tmp_path.iterdir())


def test_an_export_that_differs_is_refused_and_nothing_of_it_stays(tmp_path, monkeypatch):
    """The disk is made to lie: what arrives in the folder is not what was written."""
    from tunix_rt import storage

    kept = storage.settle_files

    def lying(folder):
        swap = load_file(folder / "model.safetensors")
        swap["model.norm.weight"] = -swap["model.norm.weight"]
        save_file(swap, folder / "model.safetensors", metadata={"format": "pt"})
        kept(folder)

    monkeypatch.setattr(storage, "settle_files", lying)
    done = CliRunner().invoke(
        cli, ["export", "tiny-gemma3", "--output", str(tmp_path / "out"), "--device", "cpu", "--dtype", "float32"]
    )
    assert done.exit_code == EvidenceError.exit_code, done.output
    assert "tensors differ, first model.norm.weight (other values); logits differ by up to" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_saved_model_whose_texts_lost_their_beginning_is_refused_while_the_engine_stays_as_it_was(tmp_path):
    backend, source = load_backend("torch"), resolve_model("tiny-gemma3")
    engine = backend.load_for_inference(source, device="cpu", dtype="bfloat16")
    tokenizer = load_tokenizer(source.folder, "gemma3_text")
    style = style_of(Data(), tokenizer)
    backend.save(engine, tmp_path / "saved", tokenizer_folder=source.folder, stop_ids=[1])
    inner = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    (tmp_path / "saved" / "tokenizer.json").write_text(json.dumps({**inner, "post_processor": None}))
    change_json(tmp_path / "saved", "tokenizer_config.json", add_bos_token=False)
    with pytest.raises(EvidenceError) as caught:
        check_round_trip(backend, engine, tmp_path / "saved", tokenizer=tokenizer, style=style, stop_ids=[1])
    assert "not the model in memory: its tokenizer begins a text with [" in caught.value.problem
    assert "(add_bos_token in tokenizer_config.json)" in caught.value.problem
    assert backend.last_logits(engine, [[2, 5, 6]]).shape == (1, 1024)


def test_a_check_without_memory_is_skipped_with_a_warning(tmp_path, monkeypatch, exports, caplog):
    reference, _ = exports["gemma3"]
    monkeypatch.setattr(roundtrip, "SPARE_BYTES", 2**60)
    assert check_folder(replace(reference, device="cuda"), SHIPPED, device_room=2**40) is None
    assert "was not reloaded: the host has" in caplog.text and "GiB free" in caplog.text


def test_only_runs_have_checkpoints(tmp_path):
    for flags in (["--step", "3"], ["--best"], ["--adapter"]):
        done = CliRunner().invoke(cli, ["export", "tiny-gemma3", "--output", str(tmp_path / "out"), *flags])
        assert done.exit_code == 2 and "tiny-gemma3 is not a run" in done.output
