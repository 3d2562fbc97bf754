"""A real model's file: its tensors, its tokens and its answers are those of the reference library."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.gguf.convert import import_file
from engine.protocol.types import SamplingParams
from gateway.text.tokenizer import ModelTokenizer
from tests.support.model_folders import CORPUS
from tests.support.small_models import Text, logits, open_small, shuffled_tables
from tests.support.smollm2 import gguf_file

pytestmark = [pytest.mark.usefixtures("inference"), pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

# What SmolLM2's own tokenizer makes of the system prompt that its template puts before a conversation.
SYSTEM_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511),
    *(308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
]
# And of texts, as others have published them.
KNOWN_IDS = {
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "  leading and   multiple   spaces  ": [216, 2899, 284, 256, 2701, 256, 5600, 256],
    "Grüße, café!": [27302, 7170, 34878, 85, 28, 37366, 17],
    "Hello, 世界!": [19556, 28, 216, 7906, 240, 178, 239, 230, 17],
    "The year 2024 had 365 days": [504, 713, 216, 34, 32, 34, 36, 761, 216, 35, 38, 37, 2009],
}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smollm2") / "made"
    import_file(gguf_file(), made)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_its_tensors_are_those_that_the_reference_library_reads(folder: Path, reference: PreTrainedModel) -> None:
    """In its own way: it undoes the permutation of q and k, and names tensors, by its own tables."""
    read = load_gguf_checkpoint(str(gguf_file()), return_tensors=True, model_to_load=reference)["tensors"]
    imported = load_file(folder / "model.safetensors")
    assert imported.keys() == read.keys()
    for name, number in imported.items():
        assert torch.equal(number, torch.tensor(read[name]).bfloat16()), name


def test_its_tokens_are_the_known_ones_and_lead_back_to_the_text(folder: Path) -> None:
    ours, theirs = ModelTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    encoded = ours.encode_chat(QUESTION)
    assert encoded[: len(SYSTEM_IDS)] == SYSTEM_IDS
    assert encoded == theirs.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert ours.stop_ids == [2, 0]
    assert {text: ours.encode_text(text) for text in KNOWN_IDS} == KNOWN_IDS
    for text in [*CORPUS, *KNOWN_IDS]:
        ids = ours.encode_text(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert theirs.decode(ids) == text


def test_it_answers_as_in_the_reference_library_and_well(folder: Path, reference: PreTrainedModel) -> None:
    tokenizer = ModelTokenizer(folder)
    prompt = tokenizer.encode_chat(QUESTION)
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    model = open_small(folder, kv_bytes=64 << 20)
    text = Text(list(prompt), *shuffled_tables(model, [len(prompt) + 64], seed=2))
    with torch.inference_mode():
        for step, row in enumerate(expected.logits):
            computed = logits(model, [text.slice(len(text.ids) - text.computed, SamplingParams())])[0]
            assert (computed - row[0]).abs().max() <= 1e-3, step
            text.ids.append(int(computed.argmax()))
    assert text.ids == expected.sequences[0].tolist()
    assert text.ids[-1] in tokenizer.stop_ids
    shown = tokenizer.detokenizer().push(text.ids[len(prompt) :])
    assert shown == "The capital of France is Paris."
