"""Ember's tokenizer: trains a byte-level BPE whose cuts make copying easy, and writes it with the chat template.

Digits, capitals and punctuation are tokens of their own and a capitalised word never swallows the space before
it, so that a name, a price or a code has the same tokens wherever it stands. It knows nothing of the model.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN: Final = "<|begin|>"
END: Final = "<|end|>"
PAD: Final = "<|pad|>"
SPECIALS: Final = (BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>", PAD)
VOCABULARY: Final = 4096
CONTEXT_TOKENS: Final = 8192

# A lower-case word with its space; a capitalised word; another script's letters; one digit; newlines; spaces; one symbol.
CUTS: Final = r" ?\p{Ll}+|\p{Lu}\p{Ll}+|\p{Lu}|[\p{L}\p{M}]+|\p{N}|\n+| +|[^\p{L}\p{M}\p{N}\n ]"

# One turn is its role's token, its content and <|end|>. No template text stands between a control token and content,
# so encoding the content apart gives the same tokens as encoding the whole. Tools are written as plain lines, whichever
# of the two JSON shapes they came in; a tool call is one line of JSON, {"name": …, "arguments": {…}}.
CHAT_TEMPLATE: Final = """
{{- '<|begin|>' }}
{%- if tools %}
  {{- '<|tools|>' }}
  {%- for tool in tools %}
    {%- set function = tool.function if tool.function else tool %}
    {{- function.name }}
    {%- if function.description %}{{- ': ' + function.description | trim }}{% endif %}
    {%- set parameters = function.parameters if function.parameters else {} %}
    {%- set required = parameters.required if parameters.required else [] %}
    {%- if parameters.properties %}
      {%- for name, property in parameters.properties.items() %}
        {{- '\\n- ' + name + ' (' }}
        {%- if property.enum %}{{- 'one of ' + property.enum | join(', ') }}
        {%- elif property.type is string %}{{- property.type }}
        {%- else %}{{- 'any' }}
        {%- endif %}
        {%- if name in required %}{{- ', required' }}{% endif %}
        {{- ')' }}
        {%- if property.description %}{{- ': ' + property.description | trim }}{% endif %}
      {%- endfor %}
    {%- endif %}
    {%- if not loop.last %}{{- '\\n' }}{% endif %}
  {%- endfor %}
  {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' and message.tool_calls %}
    {{- '<|assistant|>' }}
    {%- for call in message.tool_calls %}
      {%- set function = call.function if call.function else call %}
      {{- '{"name": "' + function.name + '", "arguments": ' }}
      {%- if function.arguments is string %}{{- function.arguments }}{% else %}{{- function.arguments | tojson }}{% endif %}
      {{- '}' }}
      {%- if not loop.last %}{{- '\\n' }}{% endif %}
    {%- endfor %}
    {{- '<|end|>' }}
  {%- else %}
    {%- if message.role == 'assistant' %}{{- '<|assistant|>' }}
    {%- elif message.role == 'tool' %}{{- '<|tool|>' }}
    {%- elif message.role in ('system', 'developer') %}{{- '<|system|>' }}
    {%- else %}{{- '<|user|>' }}
    {%- endif %}
    {%- if message.content %}{{- message.content | trim }}{% endif %}
    {{- '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
""".strip()


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of VOCABULARY ids, the SPECIALS first. Any UTF-8 text survives encode and decode unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUTS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, chat template included."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [token for token in SPECIALS if token not in (BEGIN, END, PAD)],
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    from benchmarks.ember.corpus import texts

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ember.tokenizer",
        description="Trains Ember's tokenizer on generated text. The same seed and count give the same tokenizer.",
    )
    parser.add_argument("folder", type=Path, help="where tokenizer.json and tokenizer_config.json are written")
    parser.add_argument("--documents", type=int, default=20_000, help="generated documents to learn merges from")
    parser.add_argument("--seed", type=int, default=1, help="which documents")
    asked = parser.parse_args()
    print(f"training {VOCABULARY} tokens on {asked.documents} documents", flush=True)
    tokenizer = train(texts(asked.seed, asked.documents))
    save(tokenizer, asked.folder)
    print(f"wrote {asked.folder / 'tokenizer.json'}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
