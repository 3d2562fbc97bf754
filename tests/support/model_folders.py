"""Small models' folders: tokenizers of every kind, trained on the spot, and chat templates like known models'."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.catalogue.catalogue import BUILT_IN, folder_of
from gateway.settings.config import ModelEntryConfig, load_config

EMBER = folder_of(load_config(), ModelEntryConfig(name=BUILT_IN))
CORPUS = [
    "The quick brown fox jumps over the lazy dog. You are a helpful assistant, aren't you?",
    "im start end system user assistant tool INST call <b> [x] | function get_weather location",
    "naïve café größe 東京 Привет 😀😃 0123456789 \n\n  def f(x):\n    return x",
] * 3

CHATML = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'tool' and m.content.startswith('<tool_response>') %}RAW{% endif %}"
    "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% generation %}{{ m.content | trim }}{% endgeneration %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


def byte_level(added: list[AddedToken]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def sentence_piece(added: list[AddedToken], scheme: str) -> Tokenizer:
    """Like Llama 2's: "▁" for spaces, bytes as <0xHH>; specials inside the vocabulary as well."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ours = [copy.deepcopy(token) for token in added]  # it makes special tokens of what it is given
    tokenizer.add_special_tokens([special("<s>"), special("</s>"), special("<unk>"), *ours])
    return tokenizer


def unigram(*, byte_fallback: bool) -> Tokenizer:
    """Like T5's and XLM-R's; with bytes for what is in no token, as newer ones have them."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = [special("<unk>"), special("<s>"), special("</s>")]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=specials, unk_token="<unk>", show_progress=False, n_sub_iterations=1
    )
    trained.train_from_iterator(CORPUS, trainer)
    pieces = [(text, score) for text, score in json.loads(trained.to_str())["model"]["vocab"]]
    if byte_fallback:
        pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace = decoders.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace]) if byte_fallback else metaspace
    tokenizer.add_special_tokens(specials)
    return tokenizer


def word_piece() -> Tokenizer:
    """Like BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=[special("[UNK]"), special("[CLS]"), special("[SEP]")], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, template: str | None, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    document = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    if template is not None:
        document["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return folder


def shapes(root: Path) -> Iterator[tuple[str, Path]]:
    chat = [special("<|im_start|>"), special("<|im_end|>"), special("<|endoftext|>")]
    plain = [AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)]
    plain += [AddedToken("<think>"), AddedToken("</think>"), AddedToken("unused_token")]
    yield "chatml", write(root / "chatml", byte_level(chat + plain), CHATML, eos_token="<|im_end|>")
    llama = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
    yield (
        "llama3",
        write(
            root / "llama3",
            byte_level([special(text) for text in llama]),
            LLAMA3,
            bos_token={"content": "<|begin_of_text|>", "__type": "AddedToken"},
        ),
    )
    phi = [special("<|user|>", rstrip=True), special("<|assistant|>", rstrip=True), special("<|end|>", rstrip=True)]
    phi += [special("<|system|>", rstrip=True), special("<|tool|>", lstrip=True)]
    yield "phi3", write(root / "phi3", byte_level(phi), PHI3)
    inst = [special("[INST]"), special("[/INST]")]
    for scheme in ("first", "always", "never", "normalizer"):
        tokenizer = sentence_piece(inst, scheme)
        yield f"mistral-{scheme}", write(root / scheme, tokenizer, MISTRAL, bos_token="<s>", eos_token="</s>")
    yield "ember", EMBER
