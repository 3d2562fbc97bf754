"""`hearth pull`: a model from the Hugging Face hub into the state folder; safetensors only, no code, no pickle.

A download that was cut goes on where it stopped: partial files are named by the hub's own hash of their content. The
model appears in the catalogue in one piece, when all its files are there and checked; their sums stay beside them.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from cyclopts import Parameter
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from tqdm import tqdm

from gateway.catalogue.catalogue import pulled_folder
from gateway.catalogue.checksums import SUMS_NAME, write_sums
from gateway.catalogue.model_config import architecture_of
from gateway.commands.terminal.options import Source, command_app
from gateway.commands.terminal.output import fail, format_bytes
from gateway.images.vision import VISION_FILES
from gateway.settings.config import Config
from gateway.state_dir import open_state

_TEACHING: Final = """\
examples:
  hearth pull Qwen/Qwen3-0.6B                          then `hearth chat Qwen/Qwen3-0.6B`, or call it by that name
  hearth pull meta-llama/Llama-3.2-1B-Instruct         gated: accept its terms on the hub and set HF_TOKEN
  hearth pull BAAI/bge-base-en-v1.5                    vectors; bge's rerankers score pairs of texts
  hearth pull org/model --revision v2

Served are Llama 2 to 4, Mistral, Ministral, Mixtral, Qwen2 and Qwen3, Phi-3, Gemma 2 and 3 and gpt-oss (Gemma 3 and
Llama 4 see on a CPU; of others that see, the text), and for vectors BERT, RoBERTa and XLM-RoBERTa, with weights as
safetensors. Run it again after an interruption: it goes on where it stopped. A running server takes the new model up
within two seconds. HF_ENDPOINT names a mirror.
"""
_WRITERS: Final = (
    *("Llama", "Mistral", "Ministral", "Ministral3", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3"),
    *("Mixtral", "Qwen3Moe", "Llama4", "GptOss"),
)
_SEEING: Final = ("Mistral3", "Gemma3", "Llama4")
_ENCODERS: Final = ("Bert", "Roberta", "XLMRoberta")
SERVED: Final = frozenset({  # architectures, as the engine has them
    *(f"{family}ForCausalLM" for family in _WRITERS),
    *(f"{family}ForConditionalGeneration" for family in _SEEING),
    *(f"{family}Model" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", *_ENCODERS)),
    *(f"{family}{head}" for family in _ENCODERS for head in ("ForMaskedLM", "ForSequenceClassification")),
})  # fmt: skip
_SMALL: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"),
    *VISION_FILES,
)
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX: Final = "model.safetensors.index.json"
_SUM_LENGTH: Final = 64  # of an etag that is a SHA-256, as large files have
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class PullError(Exception):
    """This model cannot be pulled; the message says why and what to do."""


app = command_app("pull", "download a model from the Hugging Face hub", _TEACHING)


@app.default
def pull(
    model: Annotated[str, Parameter(metavar="HUB_ID", help="as on huggingface.co: organisation/name")],
    /,
    *,
    revision: Annotated[str, Parameter(help="branch, tag or commit (default: main)")] = "main",
    source: Source,
) -> int:
    """Download a model from the Hugging Face hub."""
    config = source.load()
    open_state(config)
    try:
        name = pull_model(config, model, revision)
    except PullError as error:
        return fail(str(error))
    print(
        f"{name} is in the catalogue, and {model} finds it; a server that runs here takes it up within two seconds\n"
        f"next: `hearth chat {model}` talks to it; `hearth serve` starts a server where none runs;\n"
        f"      `hearth models set {model} --price-input 500 --alias NAME` says what it costs and is called"
    )
    return 0


def pull_model(config: Config, hub_id: str, revision: str) -> str:
    """Downloads what is missing and publishes the folder; returns the model's name. Raises PullError."""
    if not _ID.fullmatch(hub_id) or ".." in hub_id:
        raise PullError(f"{hub_id!r} is no hub id: write organisation/name, as on huggingface.co")
    name = f"@hf/{hub_id}"
    folder = pulled_folder(config, name)
    partial = config.models_folder / ".partial" / hub_id.replace("/", "--")
    partial.mkdir(parents=True, exist_ok=True)
    with _hub_errors(hub_id):
        commit, sizes = _listing(hub_id, revision)
        source = _Source(hub_id, commit, partial)
        _refuse_unserved(hub_id, sizes)
        kind = architecture_of(json.loads(source.fetch("config.json").read_text()))
        if kind not in SERVED:
            families = ", ".join((*_WRITERS, *_ENCODERS))
            raise PullError(f"{hub_id} is a model of architecture {kind or '?'}; Hearth serves {families}")
        files = {file: sizes[file] for file in _needed(source, sizes)}
        _refuse_full_disk(partial, files)
        print(f"{hub_id} at {commit[:12]}: {len(files)} files, {format_bytes(sum(files.values()))}")
        for file in files:
            source.fetch(file)
    write_sums(partial, {file: source.sums[file] for file in files})
    _publish(partial, folder, [*files, SUMS_NAME], commit)
    return name


def _listing(hub_id: str, revision: str) -> tuple[str, dict[str, int]]:
    """(commit, size of each file at the top of the repository, and of those below it that are known)."""
    repository = HfApi().model_info(hub_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in repository.siblings or []}
    return repository.sha or revision, {name: size for name, size in sizes.items() if "/" not in name or name in _SMALL}


def _refuse_unserved(hub_id: str, sizes: dict[str, int]) -> None:
    if not any(name.endswith(".safetensors") for name in sizes):
        if any(name.endswith(_PICKLES) for name in sizes):
            raise PullError(
                f"{hub_id} has its weights only as pickle files, which can run code when they are opened: "
                "Hearth reads safetensors. Look for a converted repository."
            )
        raise PullError(f"{hub_id} has no safetensors weights: Hearth cannot serve it")
    for name in ("config.json", "tokenizer.json"):
        if name not in sizes:
            raise PullError(f"{hub_id} has no {name}, which Hearth needs")


def _needed(source: "_Source", sizes: dict[str, int]) -> list[str]:
    """The small files, and of the weights only those that the index names (some repositories hold them twice)."""
    small = [name for name in _SMALL if name in sizes]
    if _INDEX in sizes:
        index = json.loads(source.fetch(_INDEX).read_text())
        weights = sorted({_plain_name(name) for name in index["weight_map"].values()})
        if missing := [name for name in weights if name not in sizes]:
            raise PullError(f"its {_INDEX} names files that are not there: {', '.join(missing)}")
        return [*small, _INDEX, *weights]
    weights = [name for name in sizes if name.endswith(".safetensors") and not name.startswith("consolidated")]
    return [*small, *(["model.safetensors"] if "model.safetensors" in weights else sorted(weights))]


def _plain_name(name: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]+\.safetensors", name):
        raise PullError(f"its {_INDEX} names {name!r}, which is no safetensors file beside it")
    return name


def _refuse_full_disk(partial: Path, sizes: dict[str, int]) -> None:
    missing = sum(size for name, size in sizes.items() if not (partial / name).exists())
    free = shutil.disk_usage(partial).free
    if missing > free:
        raise PullError(
            f"{format_bytes(missing)} are to be downloaded, but {partial} has only {format_bytes(free)} free"
        )


class _Source:
    """The files of one commit, downloaded into `folder`, and their SHA-256 `sums`."""

    def __init__(self, hub_id: str, commit: str, folder: Path) -> None:
        self._hub_id = hub_id
        self._commit = commit
        self._folder = folder
        self.sums: dict[str, str] = {}

    def fetch(self, name: str) -> Path:
        """The file's path, once it is complete and its content is what the hub says it is."""
        done = self._folder / name
        done.parent.mkdir(exist_ok=True)
        url = hf_hub_url(self._hub_id, name, revision=self._commit)
        metadata = get_hf_file_metadata(url)
        etag = re.sub(r"[^A-Za-z0-9]", "", metadata.etag or self._commit)
        stamp = self._folder / f"{name}.{etag}.done"
        if done.exists() and stamp.exists():
            self.sums[name] = etag if len(etag) == _SUM_LENGTH else _sum(done)
            return done
        headers = build_hf_headers()
        if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the token is the hub's, not its storage's
        part = self._folder / f"{name}.{etag}.part"
        with open(part, "ab") as target:
            http_get(
                metadata.location, target, resume_size=target.tell(), headers=headers, expected_size=metadata.size,
                displayed_filename=name, tqdm_class=tqdm,
            )  # fmt: skip
        self.sums[name] = _sum(part)
        if len(etag) == _SUM_LENGTH and self.sums[name] != etag:
            part.unlink()
            raise PullError(f"{name} arrived damaged and was removed: run the command again")
        os.replace(part, done)
        stamp.touch()
        return done


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(partial: Path, folder: Path, names: list[str], commit: str) -> None:
    """One rename makes the model appear; an older revision of it goes away."""
    complete = partial.with_name(partial.name + ".complete")
    shutil.rmtree(complete, ignore_errors=True)
    complete.mkdir()
    for name in names:
        (complete / name).parent.mkdir(exist_ok=True)
        os.replace(partial / name, complete / name)
    (complete / "revision").write_text(commit + "\n")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(complete, folder)
    shutil.rmtree(partial)


@contextlib.contextmanager
def _hub_errors(hub_id: str) -> Iterator[None]:
    try:
        yield
    except GatedRepoError as error:
        raise PullError(f"{hub_id} is gated: accept its terms on the hub, and set HF_TOKEN to your token") from error
    except RepositoryNotFoundError as error:
        raise PullError(f"the hub has no public model {hub_id}; for a private one set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise PullError(f"{hub_id} has no such revision") from error
    except HfHubHTTPError as error:
        raise PullError(f"the hub answered with an error: {error}") from error
    except OSError as error:
        raise PullError(f"the download stopped: {error}; run the command again, it goes on where it stopped") from error
    except Exception as error:
        if "httpx" not in type(error).__module__:
            raise
        raise PullError(f"the hub at {ENDPOINT} cannot be reached: {error}; run the command again to go on") from error
