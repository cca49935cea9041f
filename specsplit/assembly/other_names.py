"""Our words for what transformers, vLLM, llama.cpp and mlx-lm call otherwise, for the messages about unknown names.

docs/coming-from.md has the same as tables for readers. Imports nothing heavy: every start of the command line has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from specsplit.core.errors import InvalidSettings

_SETTINGS = {
    **dict.fromkeys(("model", "hf_repo"), "target_model"),
    **dict.fromkeys(("assistant_model", "model_draft", "speculative_model"), "draft_model"),
    **dict.fromkeys(("max_model_len", "ctx_size", "n_ctx"), "context"),
    **dict.fromkeys(("max_tokens", "n_predict", "predict"), "max_new_tokens"),
    **dict.fromkeys(("max_num_seqs", "parallel", "n_parallel"), "sessions"),
    **dict.fromkeys(("n_threads", "threads_batch"), "threads"),
    **dict.fromkeys(("alias", "served_model_name"), "served_name"),
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "torch_dtype": "dtype",
    "device_map": "device",
    "file": "prompt_file",
}
"""Our settings by other programs' names that mean just the same."""
_ANSWERS = {
    **{name: f"here it is {{{ours}}}" for name, ours in _SETTINGS.items()},
    **dict.fromkeys(
        ("num_speculative_tokens", "num_assistant_tokens", "num_draft_tokens", "draft_max", "draft_n", "draft_min"),
        "here it is {nodes} and {depth}, the limits of a round's tree",
    ),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "quantization", "quantization_config"),
        "here it is {dtype} int8 or int4, to which weights are rounded",
    ),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size"),
        "here it is specsplit target --stages, which cuts a model by layers",
    ),
    **dict.fromkeys(("n_gpu_layers", "gpu_layers"), "here it is {device} cuda"),
    **dict.fromkeys(("host", "port"), "here it is {http} HOST:PORT of serve, {listen} HOST:PORT of a worker"),
    **dict.fromkeys(("interactive", "conversation"), "here it is specsplit chat"),
    **dict.fromkeys(("enable_lora", "lora", "adapter_path"), "adapters are not built: merge them into the model"),
    **dict.fromkeys(("grammar", "json_schema"), "grammars and JSON schemas are not built"),
    **dict.fromkeys(("chat_template", "jinja", "tokenizer"), "the model's own is always used"),
    **dict.fromkeys(("flash_attn", "mlock", "no_mmap", "cont_batching", "batch_size", "ubatch_size"), "leave it out"),
    **dict.fromkeys(
        ("stream", "streamer"), "the command line always streams, and Python does by stream() and astream()"
    ),
    **dict.fromkeys(("download_dir", "cache_dir"), "the variable HF_HOME says where the hub's files are"),
    **dict.fromkeys(("hf_token", "token"), "the variable HF_TOKEN has it"),
    "rpc": "here it is {target} and {draft} for models elsewhere, specsplit target --stages for layers",
    "prompt_lookup_num_tokens": "here it is {mode} lookup; the default looks up, too, where that pays",
    "speculative_config": "here it is {draft_model}; for ngram, {mode} lookup",
    "max_length": "here it is {max_new_tokens}, which does not count the prompt",
    "do_sample": "here it is {temperature}, which samples if it is above 0",
    "num_return_sequences": "here it is a list of prompts, each of which has an answer",
    "num_beams": "beam search is not built",
    "gpu_memory_utilization": "here it is {kv_memory}, bytes or a fraction of what is free",
    "max_num_batched_tokens": "here it is {step_tokens} of a worker",
    "enable_prefix_caching": "it is on by default; {prefix_reuse} of a worker changes that",
    "enable_chunked_prefill": "it is always on; {prefill_chunk} of a worker bounds a chunk",
    "trust_remote_code": "code from a model's repository is never run",
    "api_key": "here it is {api_key_file} FILE (specsplit keys new makes a key)",
    "metrics": "here it is the path /metrics of serve, {metrics} HOST:PORT of a worker",
    "system_prompt": "here it is {system} of specsplit chat",
    "verbose": "here it is {explain}, or {log_level} debug of a service",
}
"""The ends of sentences about other programs' names; braces are around our settings."""
OTHER_NAMES = frozenset(_ANSWERS)
"""Names of other programs that messages answer."""
_SHORT = {
    **dict.fromkeys(("-md", "-hfd"), "model_draft"),
    **dict.fromkeys(("-hf", "-hfr"), "hf_repo"),
    **dict.fromkeys(("-ngl", "-ngld"), "n_gpu_layers"),
    **dict.fromkeys(("-tp", "-pp"), "tensor_parallel_size"),
    **dict.fromkeys(("-cnv", "-no-cnv"), "conversation"),
    "-np": "n_parallel",
    "-tb": "threads_batch",
    "-fa": "flash_attn",
    "-cb": "cont_batching",
    "-sys": "system_prompt",
}
"""Short options of others with several letters: our parser would take the letters apart, or for a value."""


def answer_about(name: str, spell: Callable[[str], str] = str) -> str | None:
    """Return the end of a sentence about another program's name of a setting; None for a name that none of them has.

    `spell` writes one of our settings as the user would.
    """
    words = _ANSWERS.get(name.replace("-", "_"))
    return None if words is None else re.sub(r"\{(\w+)\}", lambda match: spell(match[1]), words)


def as_option(setting: str) -> str:
    """Return the option of the command line for a setting."""
    # Commands with one model call it --model, and all of them take -m.
    return "-m" if setting == "target_model" else f"--{setting.replace('_', '-')}"


def answer_about_short(option: str) -> str | None:
    """Return the end of a sentence about another program's short option of several letters, such as -ngl; else None."""
    return answer_about(_SHORT[option], as_option) if option in _SHORT else None


def refuse_other_names(given: Iterable[str]) -> None:
    """Refuse arguments of Python that another program has by that name; others that are unknown are left alone.

    Raises:
        InvalidSettings: there is one; the message has our name for it.
    """
    # The settings would name the nearest spelling, which for a word of another program means something else.
    for name in given:
        answer = answer_about(name)
        if answer is not None:
            raise InvalidSettings(f"There is no setting {name}; {answer}.")
