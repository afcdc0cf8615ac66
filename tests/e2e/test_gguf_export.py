"""A GGUF file is the model: `gguf` and transformers read the same from it, and every defect is named."""

import json

import pytest

from tests.conftest import SHIPPED, write_small_model
from tests.program import in_process, refused
from tests.supervision_checks import write_chat_tokenizer
from tests.tables import parametrize
from tunix_rt.cli.inference import GGUF
from tunix_rt.config.settings import Data
from tunix_rt.data.render import style_of
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.errors import EvidenceError, InputError
from tunix_rt.export.modelfile import modelfile, pieces_of
from tunix_rt.models.families import FAMILIES

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf` (scripts/setup --dev installs it)")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tunix_rt.engines import gguf_tokenizer, gguf_writer  # noqa: E402
from tunix_rt.engines.gguf_reload import check_file  # noqa: E402

KINDS = ("llama", "smollm3", "gpt2", "mistral", "phi3", "olmo2", "granite", "gemma", "gemma3")
FULL = {"mistral": {"sliding_window": None}, "phi3": {"sliding_window": None}, "smollm3": {"no_rope_layers": [1, 1]}}
"""What llama.cpp has of the small models."""
PROMPTS = ([2, 5, 9, 300, 41, 77, 8, 6, 19, 500], [2, 700, 12])


def drawn(folder, kind, **settings):
    """A model in float32 with drawn weights and norms."""
    path = write_small_model(kind, folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **FULL.get(kind, {}), **settings}))
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data += torch.randint(-16, 17, parameter.shape) / 64
    return model


def write(model, folder, kind="f32"):
    tokenizer = load_tokenizer(SHIPPED, model.config.model_type)
    file = folder / "m.gguf"
    made = {"kind": kind, "name": "m", "ends": [1, 765], "template": "{{ messages }}"}
    return file, gguf_writer.write_gguf(file, model, tokenizer, **made)


def checked(model, file, planned):
    texts = {text: load_tokenizer(SHIPPED).encode(text) for text in ("17 + 25 = 42", "naïve\n\n  東京")}
    return check_file(file, model, planned, prompts=PROMPTS, texts=texts)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same_from_the_file_alone(kind, tmp_path):
    model = drawn(tmp_path, kind)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = checked(model, *write(model, tmp_path))
    assert (found.logit_difference is not None) == (FAMILIES[model.config.model_type].gguf is not None)
    assert found.moved_logits <= 1e-5 * found.largest_logit and found.top_tokens_equal == 2
    for name, parameter in model.named_parameters():  # the inverse of the layout gives the parameter again
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=1e-6)


def test_the_facts_of_the_tokenizer_are_those_llama_cpp_reads(tmp_path):
    file, _ = write(drawn(tmp_path, "gemma3"), tmp_path)
    fields = gguf.GGUFReader(file).fields
    facts = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    assert facts["general.architecture"] == "gemma3" and facts["tokenizer.chat_template"] == "{{ messages }}"
    assert (facts["model"], facts["pre"], facts["add_bos_token"]) == ("gpt2", "gpt-2", True)
    assert [facts[f"{role}_token_id"] for role in ("bos", "eos", "eot", "padding", "unknown")] == [2, 1, 765, 0, 3]
    assert len(facts["tokens"]) == len(facts["token_type"]) == 1024
    assert facts["tokens"][:4] == ["<pad>", "<eos>", "<bos>", "<unk>"] and facts["tokens"][-1] == "[PAD1023]"
    assert facts["token_type"][:5] == [3, 3, 3, 3, 1] and facts["token_type"][-1] == 5
    assert facts["gemma3.attention.sliding_window_pattern"] == 2, "not llama.cpp's default of 6"


# --- defects ---------------------------------------------------------------------------------------------------------


def flip_a_weight(model, folder, monkeypatch):
    file, planned = write(model, folder, "q8_0")
    tensor = gguf.GGUFReader(file).tensors[5]
    with file.open("r+b") as opened:
        opened.seek(tensor.data_offset + 3)
        opened.write(b"\x55\x55")
    return file, planned


def keep_the_rows(model, folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(gguf_writer, "PAIRS", ())
        return write(model, folder)


def rotate_otherwise(model, folder, monkeypatch):
    rope, model.config.rope_parameters = model.config.rope_parameters, {"rope_type": "default", "rope_theta": 77.0}
    written = write(model, folder)
    model.config.rope_parameters = rope
    return written


def swap_two_tokens(model, folder, monkeypatch):
    def swapped(*arguments, **more):
        tokens, kinds = right(*arguments, **more)
        tokens[20], tokens[21] = tokens[21], tokens[20]
        return tokens, kinds

    right = gguf_tokenizer._tokens
    with monkeypatch.context() as patch:
        patch.setattr(gguf_tokenizer, "_tokens", swapped)
        return write(model, folder)


def name_another_tensor(model, folder, monkeypatch):
    file, planned = write(model, folder)
    return file, planned[:-1]


DEFECTS = {
    flip_a_weight: r"a weight of blk\.0\.\S+ has .* times the error that Q8_0 allows",
    keep_the_rows: r"a weight of blk\.0\.attn_q\.weight has inf times",
    rotate_otherwise: r"logits of what transformers loads differ by up to",
    swap_two_tokens: r"transformers reads a tokenizer that gives '17 \+ 25 = 42' \d+ other token ids",
    name_another_tensor: r"other tensors: output",
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_of_the_file_is_found(defect, tmp_path, monkeypatch):
    model = drawn(tmp_path, "llama")
    with pytest.raises(EvidenceError, match=DEFECTS[defect]):
        checked(model, *defect(model, tmp_path, monkeypatch))


@parametrize("kind", "settings", "words")
def test_what_llama_cpp_computes_otherwise_is_refused_by_name(kind, settings, words, tmp_path):
    model = drawn(tmp_path, kind, **settings)
    with pytest.raises(InputError, match=words):
        write(model, tmp_path)
    assert not (tmp_path / "m.gguf").exists()


def test_a_tokenizer_that_llama_cpp_cannot_split_as_is_refused(tmp_path):
    inner = json.loads((SHIPPED / "tokenizer.json").read_text())
    inner["pre_tokenizer"]["pretokenizers"][1] = {
        "type": "Split",
        "pattern": {"String": "e"},
        "behavior": "Isolated",
        "invert": False,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    (tmp_path / "tokenizer_config.json").write_text((SHIPPED / "tokenizer_config.json").read_text())
    with pytest.raises(InputError, match="it splits texts as none of gpt-2, smollm, llama-bpe"):
        gguf_tokenizer.split_of(load_tokenizer(tmp_path), inner)


# --- the verb --------------------------------------------------------------------------------------------------------


def test_the_verb_writes_a_file_a_modelfile_and_the_commands_that_load_it(tmp_path):
    done = in_process("export", "tiny-gemma3", "--gguf", "q4_k_m", "--output", tmp_path / "tiny")
    assert done.returncode == 0, done.stderr
    assert "transformers loads the same weights" in done.stdout
    assert f"ollama create tiny -f {tmp_path / 'tiny' / 'Modelfile'}" in done.stdout.splitlines()
    kinds = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "tiny/tiny-q4_k_m.gguf").tensors
    }
    # Rows of 192 weights have no super-blocks; llama.cpp takes these types instead.
    assert [kinds[f"blk.1.{part}.weight"] for part in ("attn_q", "ffn_down", "attn_norm")] == ["Q5_0", "Q4_K", "F32"]
    assert [kinds[name] for name in ("token_embd.weight", "blk.4.ffn_down.weight")] == ["Q8_0", "Q6_K"]
    assert set((tmp_path / "tiny/Modelfile").read_text().splitlines()) >= {
        "FROM ./tiny-q4_k_m.gguf", 'PARAMETER stop "<eos>"', "PARAMETER num_ctx 512", "PARAMETER temperature 0",
    }  # fmt: skip
    proof = json.loads((tmp_path / "tiny/export_proof.json").read_text())
    assert proof["gguf"] == "q4_k_m" and proof["proof"]["largest_error"] <= 1
    assert set(proof["files"]) == {path.name for path in (tmp_path / "tiny").iterdir()} - {"export_proof.json"}


def test_options_that_a_gguf_file_has_no_use_for_are_refused(tmp_path):
    assert list(gguf_writer.FILES) == GGUF, "the verb offers every kind of file"
    more = ("--gguf", "q8_0", "--dtype", "bfloat16", "--output", tmp_path / "x")
    assert "--gguf and --dtype" in refused(in_process("export", "tiny-gemma3", *more), 2)


# --- the Modelfile ---------------------------------------------------------------------------------------------------

OWN_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@parametrize("chosen", "own", "template", "system")
def test_ollama_renders_as_the_chat_template_does(chosen, own, template, system, tmp_path):
    folder = write_chat_tokenizer(tmp_path, template=OWN_SYSTEM if own else None)
    tokenizer = load_tokenizer(folder)
    style = style_of(Data(chat_template=chosen), tokenizer)
    text = modelfile("m.gguf", tokenizer, style, adds_bos=True, ends=[1], positions=None)
    assert f'TEMPLATE """{template}"""' in text and "PARAMETER num_ctx 4096" in text
    assert (f'SYSTEM """{system}"""' in text) if system else "SYSTEM" not in text


def test_a_template_that_ollama_cannot_render_is_left_out(tmp_path):
    numbered = "{% for m in messages %}{{ loop.index }} {{ m['content'] }}\n{% endfor %}"
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path, template=numbered))
    style = style_of(Data(chat_template="tokenizer"), tokenizer)
    assert pieces_of(tokenizer, style, adds_bos=True) is None
    text = modelfile("m.gguf", tokenizer, style, adds_bos=True, ends=[1], positions=None)
    assert text.startswith("# No TEMPLATE") and 'TEMPLATE """' not in text
