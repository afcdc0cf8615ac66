"""A GGUF file is a model like any other: converted once, to the same numbers, with words about what it is."""

import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from filelock import FileLock

from tests.conftest import SHIPPED
from tests.materials import gemma3_270m_gguf, real_tokenizer, smollm2_gguf
from tests.program import environment
from tests.tables import parametrize
from tunix_rt.cli.main import cli
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.errors import InputError, StorageError
from tunix_rt.models.gguf import MANIFEST
from tunix_rt.models.resolve import ModelSource, resolve_model, resolve_tokenizer
from tunix_rt.plan.shape import shape_of

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf` (scripts/setup --dev installs it)")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES, "head_dim": 16, "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", **SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", **SIZES, "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 6},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 128, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256},
}
QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)


def small_model(kind: str):
    """A model with random weights; every norm has a value that survives adding 1 and taking it away again."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**CONFIGS[kind], bos_token_id=2, eos_token_id=1, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data += torch.randint(-16, 17, parameter.shape) / 64
    return model


def write_gguf(path: Path, model, *, quantised: bool = False, more: dict | None = None, rotation: bool = False) -> Path:
    """What llama.cpp's own converter would write of this model, as far as a reader can tell."""
    config, arch = model.config, model.config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        parameters = config.rope_parameters
        writer.add_rope_freq_base(parameters.get("full_attention", parameters)["rope_theta"])
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer)
    for key, value in (more or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, values in _as_llama_cpp_has_them(model, arch):
        stem, _, suffix = name.rpartition(".")
        kind = gguf.GGMLQuantizationType.Q8_0 if quantised and values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind)
    if rotation:
        writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    _write_out(writer)
    return path


def _write_out(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_llama_cpp_has_them(model, arch: str):
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            values = values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if arch == "gemma3" and "norm" in name:
            values = values + 1
        if arch == "gpt2" and values.ndim == 2 and (".attn." in name or ".mlp." in name):
            values = values.T
        yield name, np.ascontiguousarray(values)


def _add_tokenizer(writer) -> None:
    """The shipped one: 769 tokens, while the models above have a table of 1,024 rows."""
    inner = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in inner["added_tokens"]}
    tokens = {number: text for text, number in inner["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    kinds = {number: 3 if token["special"] else 4 for number, token in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens[number] for number in range(len(tokens))])
    writer.add_token_types([kinds.get(number, 1) for number in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in inner["model"]["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)


def converted(file: Path, place: Path):
    """The model of the folder that the file becomes, and the folder; converted in this process, to save starting one."""
    from tunix_rt.engines.gguf import convert

    convert(file, place, with_weights=True)
    return transformers.AutoModelForCausalLM.from_pretrained(place), place


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", small_model("llama"))


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_weights_of_the_file_come_out_to_the_bit_and_the_model_answers_the_same(kind, tmp_path):
    original = small_model(kind)
    model, folder = converted(write_gguf(tmp_path / "m.gguf", original), tmp_path / "made")
    before, after = original.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.randint(1024, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(ids[:1], **options), original.generate(ids[:1], **options))
    config = json.loads((folder / "config.json").read_text())
    assert shape_of(config).parameters == sum(parameter.numel() for parameter in original.parameters())
    assert (config["vocab_size"], config["dtype"]) == (1024, "float32")


def test_quantised_blocks_become_exactly_the_values_they_stand_for(tmp_path):
    original = small_model("llama-tied")
    model, folder = converted(write_gguf(tmp_path / "m.gguf", original, quantised=True), tmp_path / "made")
    kind = gguf.GGMLQuantizationType.Q8_0
    table = original.get_input_embeddings().weight.detach().numpy()
    meant = gguf.quants.dequantize(gguf.quants.quantize(table, kind), kind)
    kept = model.get_input_embeddings().weight.detach().numpy()
    assert (kept == meant).all() and not (kept == table).all()
    about = json.loads((folder / MANIFEST).read_text())
    assert about["quantisation"] == "Q8_0 (15 tensors), F32 (5)"
    assert about["weights"].startswith("dequantised to float32")


def test_the_tokenizer_of_the_file_puts_the_token_that_begins_a_text(tmp_path, llama_file):
    _, folder = converted(llama_file, tmp_path / "made")
    ours, shipped = load_tokenizer(folder, "llama"), load_tokenizer(SHIPPED, "llama")
    assert ours.prefix == (2,) and (ours.eos_id, ours.pad_id, ours.bos_id) == (1, 0, 2)
    text = "<reasoning>3 apples and 4 pears</reasoning>"
    assert ours.encode_conversation(text) == shipped.encode_conversation(text)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("apples")["input_ids"] == [2, *ours.encode("apples")], "also for those who use transformers"


# --- through the front door ------------------------------------------------------------------------------------------


def test_a_gguf_file_is_converted_once_and_what_it_is_stands_in_log_and_source(
    tmp_path, llama_file, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, logger="tunix_rt")
    source = resolve_model(str(llama_file))
    assert isinstance(source, ModelSource) and source.revision == "local"
    assert source.folder.is_relative_to(tmp_path / "cache" / "tunix-rt" / "gguf")
    assert {path.name for path in source.folder.iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    name, _, sha256 = (source.converted_from or "").partition(" sha256:")
    assert name == "small.gguf" and source.folder.name == sha256 and len(sha256) == 64
    for words in ("Converting small.gguf", "has F32 (21 tensors)", str(source.folder)):
        assert words in caplog.text
    caplog.clear()
    again = resolve_model(str(llama_file.parent))  # the folder with that one file in it
    assert again.folder == source.folder and "Converting" not in caplog.text
    assert (
        resolve_tokenizer(str(llama_file)) == resolve_model(str(llama_file), weights="random").folder == source.folder
    )
    assert not list(source.folder.parent.glob(".staged-*"))


def test_random_weights_of_a_gguf_file_cost_no_conversion_of_its_weights(tmp_path, llama_file):
    from tunix_rt.engines.gguf import convert

    convert(llama_file, tmp_path / "made", with_weights=False)
    assert not list((tmp_path / "made").glob("*.safetensors"))
    assert json.loads((tmp_path / "made" / "config.json").read_text())["num_hidden_layers"] == 2
    assert load_tokenizer(tmp_path / "made").prefix == (2,)


def test_files_beside_a_gguf_file_win_over_what_is_in_it(tmp_path, llama_file):
    file = Path(shutil.copy(llama_file, tmp_path / "m.gguf"))
    config = {**CONFIGS["llama"], "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, tmp_path / name)
    model, folder = converted(file, tmp_path / "made")
    assert model.config.rope_parameters["rope_theta"] == 77.0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_a_file_beside_it_that_changes_is_not_answered_from_the_cache(tmp_path, llama_file, monkeypatch):
    from tunix_rt.models import gguf as module

    file = Path(shutil.copy(llama_file, tmp_path / "m.gguf"))
    keys = [module._hash_of_files_beside(file)]
    for content in ("{}", '{"a": 1}'):
        (tmp_path / "tokenizer.json").write_text(content)
        keys.append(module._hash_of_files_beside(file))
    assert keys[0] == [] and len({tuple(key) for key in keys}) == 3


def test_a_conversion_that_is_killed_leaves_nothing_that_could_be_taken_for_a_model(tmp_path, llama_file):
    place = tmp_path / "cache" / "made"
    command = [sys.executable, "-P", "-m", "tunix_rt.engines.gguf", str(llama_file), str(place)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        deadline = time.monotonic() + 200
        while not (building := list(place.parent.glob(".staged-*"))) and time.monotonic() < deadline:
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
    assert building and building[0].is_dir() and not place.exists()
    model, _ = converted(llama_file, place)
    assert torch.isfinite(model.get_input_embeddings().weight).all()
    assert not building[0].exists()


def test_a_conversion_ends_with_the_program_that_asked_for_it(tmp_path, llama_file):
    """The lock of the place is held here, so that the conversion would wait for it for ever."""
    place = tmp_path / "tunix-rt" / "gguf" / hashlib.sha256(llama_file.read_bytes()).hexdigest()
    place.parent.mkdir(parents=True)
    code = f"from tunix_rt.models.resolve import resolve_model; resolve_model({str(llama_file)!r})"
    variables = environment() | {"XDG_CACHE_HOME": str(tmp_path)}
    with FileLock(place.with_name(f"{place.name}.lock")):
        with subprocess.Popen([sys.executable, "-c", code], env=variables) as parent:
            deadline = time.monotonic() + 200
            while not (children := psutil.Process(parent.pid).children()) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.5)
            parent.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=60)
        for child in alive:
            child.kill()
    assert children and not alive


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_off_anywhere_is_refused_with_its_bytes(tmp_path, llama_file):
    from tunix_rt.engines.gguf import read_header

    torn = Path(shutil.copy(llama_file, tmp_path / "torn.gguf"))
    whole = torn.stat().st_size
    for length in sorted({*range(4, 64), *range(64, whole, 997), whole - 1}, reverse=True):
        os.truncate(torn, length)
        with pytest.raises(InputError, match=r"torn\.gguf is incomplete"):
            read_header(torn)
    assert len(read_header(llama_file).tensors) == 21
    torn.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(InputError, match="GGUF version 0 is not known"):
        read_header(torn)


def test_a_damaged_header_is_refused_or_read_and_nothing_else(tmp_path, llama_file):
    from tunix_rt.engines.gguf import Header, read_header

    whole, random = llama_file.read_bytes(), np.random.default_rng(3)
    answers = set()
    for _ in range(300):
        damaged = bytearray(whole)
        for at in random.integers(4, 40_000, size=3):
            damaged[at] = random.integers(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            answers.add(type(read_header(tmp_path / "damaged.gguf")))
        except InputError as error:
            assert "damaged.gguf" in error.problem
            answers.add(InputError)
    assert answers == {Header, InputError}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x04pickle of something", "not GGUF by its first bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer instead of the model"),
        (b"", "not GGUF by its first bytes"),
    ],
)
def test_a_foreign_file_is_refused_by_its_first_bytes(tmp_path, content, words):
    (tmp_path / "foreign.gguf").write_bytes(content)
    with pytest.raises(InputError, match=words):
        resolve_model(str(tmp_path / "foreign.gguf"))


def test_a_torn_file_ends_a_run_with_exit_code_3_and_what_to_do(tmp_path, llama_file, monkeypatch):
    (tmp_path / "torn.gguf").write_bytes(llama_file.read_bytes()[:-1])
    size = llama_file.stat().st_size
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = CliRunner().invoke(cli, ["plan", "smoke_tiny", "--model", str(tmp_path / "torn.gguf")])
    assert result.exit_code == 3 and result.stderr.splitlines()[-2].startswith("error: "), result.stderr
    assert f"torn.gguf is incomplete: {size - 1:,} of {size:,} bytes" in result.stderr and "\n  fix: " in result.stderr


def test_a_file_that_its_reader_cannot_convert_is_refused_without_a_traceback(tmp_path, monkeypatch):
    """The header is in order; its architecture is one that transformers does not read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "rwkv-of-the-moon")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    _write_out(writer)
    with pytest.raises(InputError, match=r"odd\.gguf cannot be converted: ValueError: .*rwkv-of-the-moon") as caught:
        resolve_model(str(tmp_path / "odd.gguf"))
    assert "Traceback" not in caught.value.problem
    assert not list((tmp_path / "cache" / "tunix-rt" / "gguf").glob(".staged-*"))


def test_two_gguf_files_in_a_folder_are_listed_and_safetensors_come_first(tmp_path, llama_file):
    for name in ("q4.gguf", "q8.gguf"):
        shutil.copy(llama_file, tmp_path / name)
    with pytest.raises(InputError, match=r"2 GGUF files: q4\.gguf, q8\.gguf") as caught:
        resolve_model(str(tmp_path))
    assert "give the path of one of them" in caught.value.fix
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SHIPPED / name, tmp_path / name)
    assert resolve_model(str(tmp_path)).converted_from is None


@pytest.mark.parametrize("missing", ["gguf", "torch"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, llama_file, monkeypatch, missing):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, missing, None)  # as Python itself marks a module that is not to be had
    with pytest.raises(InputError, match=f"needs {missing}") as caught:
        resolve_model(str(llama_file))
    assert caught.value.fix == f'pip install "tunix-rt[{missing}]"'


@parametrize("more", "rotation", "words")
def test_what_would_be_lost_in_silence_is_refused(tmp_path, more, rotation, words):
    file = write_gguf(tmp_path / "m.gguf", small_model("llama"), more=more, rotation=rotation)
    with pytest.raises(InputError, match=words):
        converted(file, tmp_path / "made")
    if rotation:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
        model, _ = converted(file, tmp_path / "made")
        assert model.config.num_hidden_layers == 2


def test_a_tensor_the_model_has_no_place_for_is_not_dropped_in_silence(tmp_path):
    original = small_model("llama-tied")
    file = write_gguf(tmp_path / "m.gguf", original)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama-tied"], "num_hidden_layers": 1}))
    with pytest.raises(InputError, match="20 tensors in the file, 11 in the model"):
        converted(file, tmp_path / "made")


@pytest.fixture
def short_files() -> Iterator[None]:
    """No file can grow beyond 100,000 bytes. Python ignores the signal, so the write that would do it fails."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def test_a_full_disk_is_a_storage_error(tmp_path, llama_file, short_files, capsys):
    """The limit is on the length of a file: the weights are the first to meet it."""
    from tunix_rt.engines.gguf import main

    place = tmp_path / "cache" / "made"
    assert main([str(llama_file), str(place)]) == StorageError.exit_code
    assert str(place.parent) in json.loads(capsys.readouterr().out.splitlines()[-1])["problem"]
    assert not place.exists() and not list(place.parent.glob(".staged-*"))


# --- real files ------------------------------------------------------------------------------------------------------


def loss(folder: Path, ids: list[int]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)


@pytest.mark.slow
@pytest.mark.registry
def test_smollm2_in_four_bits_converts_to_a_model_that_speaks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = resolve_model(str(smollm2_gguf()))
    assert shape_of(source.config).parameters == 134_515_008
    tokenizer = load_tokenizer(source.folder, "llama")
    assert tokenizer.prefix == () and tokenizer.chat_template is not None
    assert tokenizer.vocab_size == source.config["vocab_size"] == 49_152
    assert loss(source.folder, tokenizer.encode(QUESTION)) == pytest.approx(3.885, abs=0.02)


@pytest.mark.slow
@pytest.mark.registry
def test_gemma_in_four_bits_is_asked_with_the_token_that_begins_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = resolve_model(str(gemma3_270m_gguf()))
    assert shape_of(source.config).parameters == 268_098_176
    tokenizer, real = load_tokenizer(source.folder, ""), load_tokenizer(real_tokenizer("gemma3"))
    for text in (QUESTION, "  two   spaces\n\tand 12345 </b> 日本 é", "def f(x):\n    return x ** 2\n"):
        assert tokenizer.encode(text) == real.encode(text)
    ids = tokenizer.encode(QUESTION)
    assert loss(source.folder, [*tokenizer.prefix, *ids]) == pytest.approx(3.04, abs=0.02)
    assert loss(source.folder, ids) > 7, "the trap is real: without the token it is another model"
    assert tokenizer.vocab_size == source.config["vocab_size"] == 262_144
