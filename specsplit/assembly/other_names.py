"""Our words for what transformers, vLLM, llama.cpp and mlx-lm call otherwise, for the messages about unknown names.

docs/coming-from.md has the same as tables for readers. Imports nothing heavy: every start of the command line has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from specsplit.core.errors import InvalidSettings

_SETTINGS = {
    **dict.fromkeys(("model", "model_name", "hf_repo"), "target_model"),
    **dict.fromkeys(("assistant_model", "model_draft", "speculative_model"), "draft_model"),
    **dict.fromkeys(("max_model_len", "ctx_size", "n_ctx"), "context"),
    "ctx_size_draft": "draft_context",
    **dict.fromkeys(("max_tokens", "n_predict", "predict"), "max_new_tokens"),
    **dict.fromkeys(("max_num_seqs", "parallel", "n_parallel"), "sessions"),
    **dict.fromkeys(("n_threads", "threads_batch"), "threads"),
    **dict.fromkeys(("alias", "served_model_name"), "served_name"),
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    **dict.fromkeys(("stop_strings", "reverse_prompt"), "stop"),
    "torch_dtype": "dtype",
    "device_map": "device",
    "file": "prompt_file",
    **dict.fromkeys(("output_logits", "output_scores"), "logprobs"),
    **dict.fromkeys(("uvicorn_log_level", "log_verbosity"), "log_level"),
}
"""Our settings by other programs' names that mean just the same."""
_NEEDLESS = (
    *(
        "async_scheduling",
        "attention_backend",
        "attention_mask",
        "attn_implementation",
        "batch_size",
        "block_size",
        "color",
    ),
    *("compilation_config", "cont_batching", "ctx_shift"),
    *("disable_log_requests", "disable_log_stats", "escape", "flash_attn", "keep", "load_format"),
    *("log_disable", "max_logprobs", "mlock", "no_context_shift", "no_display_prompt", "no_mmap", "no_warmup", "numa"),
    *(
        "pad_token_id",
        "perf",
        "return_dict_in_generate",
        "return_full_text",
        "runner",
        "simple_io",
        "single_turn",
        "swap_space",
        "task",
    ),
    *("threads_http", "tokenizer_mode", "ubatch_size", "use_cache", "verbose_prompt", "warmup"),
)
"""Names for what is always so here, or never matters."""
_TREES = (
    *("draft_max", "draft_min", "draft_n", "draft_p_min", "num_assistant_tokens", "num_draft_tokens"),
    "num_speculative_tokens",
)
_SAMPLERS = (
    *("dry_multiplier", "dynatemp_range", "mirostat", "repeat_last_n", "samplers", "sampling_seq", "top_n_sigma"),
    *("typical", "typical_p", "xtc_probability"),
)
_ANSWERS = {
    **{name: f"here it is {{{ours}}}" for name, ours in _SETTINGS.items()},
    **dict.fromkeys(_NEEDLESS, "leave it out"),
    **dict.fromkeys(_TREES, "here it is {nodes} and {depth}, the limits of a round's tree"),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "quantization", "quantization_config"),
        "here it is {dtype} int8 or int4, to which weights are rounded",
    ),
    **dict.fromkeys(("kv_cache_dtype", "cache_type_k", "cache_type_v"), "the KV cache is not quantised"),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size"),
        "here it is specsplit target --stages, which cuts a model by layers",
    ),
    "data_parallel_size": "here it is {target} HOST:PORT of serve, once for each replica",
    **dict.fromkeys(("n_gpu_layers", "gpu_layers"), "here it is {device} cuda"),
    **dict.fromkeys(
        ("main_gpu", "split_mode", "tensor_split", "device_ids", "list_devices"),
        "here it is {device} cuda:N, since a model is on one GPU",
    ),
    **dict.fromkeys(
        ("device_draft", "gpu_layers_draft"),
        "a draft takes what the target has, or what {config} FILE says under [draft]",
    ),
    **dict.fromkeys(
        ("host", "port", "bind", "address", "addr", "listen"),
        "here it is {http} HOST:PORT of serve, {listen} HOST:PORT of a worker",
    ),
    **dict.fromkeys(
        ("ssl_keyfile", "ssl_certfile", "ssl_key_file", "ssl_cert_file", "allowed_origins", "root_path"),
        "leave that to an HTTP proxy in front of serve",
    ),
    **dict.fromkeys(("url", "base_url", "endpoint"), "here it is {endpoint} URL of specsplit chat"),
    **dict.fromkeys(("interactive", "conversation"), "here it is specsplit chat"),
    **dict.fromkeys(
        ("enable_lora", "lora", "lora_modules", "adapter_path"), "adapters are not built: merge them into the model"
    ),
    **dict.fromkeys(("grammar", "grammar_file", "json_schema"), "grammars and JSON schemas are not built"),
    **dict.fromkeys(("enable_auto_tool_choice", "tool_call_parser"), "tools are not built"),
    **dict.fromkeys(("reasoning_parser", "reasoning_format"), "what a model reasons is part of its text"),
    **dict.fromkeys(("embedding", "embeddings", "rerank", "reranking"), "embeddings are not built"),
    **dict.fromkeys(("image", "mmproj"), "images are not built"),
    **dict.fromkeys(("chat_template", "jinja", "tokenizer"), "the model's own is always used"),
    **dict.fromkeys(
        ("enable_thinking", "reasoning_budget"), 'here it is {chat_template_kwargs}, such as {"enable_thinking": false}'
    ),
    "default_chat_template_kwargs": "each request has its own chat_template_kwargs",
    **dict.fromkeys(_SAMPLERS, "not built: there are {top_k}, {top_p}, {min_p} and three penalties"),
    **dict.fromkeys(
        ("sampling_params", "generation_config", "override_generation_config"),
        "its values are options of a request, such as {temperature} and {max_new_tokens}",
    ),
    **dict.fromkeys(
        ("stream", "streamer"), "the command line always streams, and Python does by stream() and astream()"
    ),
    **dict.fromkeys(("input_ids", "inputs", "prompts"), "the prompt stands first: a text, or token ids as a list"),
    **dict.fromkeys(("model_url", "hf_file"), "a model is a folder or a hub id, in safetensors"),
    **dict.fromkeys(("download_dir", "cache_dir"), "the variable HF_HOME says where the hub's files are"),
    **dict.fromkeys(("hf_token", "token"), "the variable HF_TOKEN has it"),
    **dict.fromkeys(
        ("hf_overrides", "rope_scaling", "rope_freq_base", "rope_freq_scale"), "a model's config.json is taken as it is"
    ),
    "offline": "here it is the variable HF_HUB_OFFLINE=1",
    "revision": "it stands behind the name of a hub model, as NAME@REVISION",
    "rpc": "here it is {target} and {draft} for models elsewhere, specsplit target --stages for layers",
    "prompt_lookup_num_tokens": "here it is {mode} lookup; the default looks up, too, where that pays",
    **dict.fromkeys(("speculative_config", "spec_type"), "here it is {draft_model}; for ngram, {mode} lookup"),
    "max_length": "here it is {max_new_tokens}, which does not count the prompt",
    **dict.fromkeys(("min_new_tokens", "min_tokens"), "not built; {ignore_eos} goes on behind a text's end"),
    **dict.fromkeys(("stop_token_ids", "eos_token_id"), "a model's own tokens end a text; {stop} takes texts"),
    "do_sample": "here it is {temperature}, which samples if it is above 0",
    **dict.fromkeys(
        ("num_return_sequences", "n", "best_of"), "here it is a list of prompts, each of which has an answer"
    ),
    "num_beams": "beam search is not built",
    "gpu_memory_utilization": "here it is {kv_memory}, bytes or a fraction of what is free",
    **dict.fromkeys(
        ("cpu_offload_gb", "cpu_moe", "n_cpu_moe", "override_tensor"),
        "a model is in one memory as a whole, or cut over several machines by --stages",
    ),
    "max_num_batched_tokens": "here it is {step_tokens} of a worker",
    **dict.fromkeys(
        ("enable_prefix_caching", "no_enable_prefix_caching", "cache_reuse"),
        "it is on by default; {prefix_reuse} of a worker changes that",
    ),
    **dict.fromkeys(
        ("enable_chunked_prefill", "no_enable_chunked_prefill"),
        "it is always on; {prefill_chunk} of a worker bounds a chunk",
    ),
    "trust_remote_code": "code from a model's repository is never run",
    "api_key": "here it is {api_key_file} FILE (specsplit keys new makes a key)",
    **dict.fromkeys(("slots", "props"), "here it is the path /v1/models of serve, and /metrics"),
    "no_webui": "the page is always there, and asks for a key if there are keys",
    "system_prompt": "here it is {system} of specsplit chat",
    "enforce_eager": "here it is --no-record, in Python record=False",
    "verbose": "here it is {explain}, or {log_level} debug of a service",
}
"""The ends of sentences about other programs' names; braces are around our settings."""
OTHER_NAMES = frozenset(_ANSWERS)
"""Names of other programs that messages answer."""
_CLASSES = {
    **dict.fromkeys(
        ("LLM", "Engine", "Llama", "AutoModelForCausalLM", "TextGenerationPipeline"), "here it is Pipeline(MODEL)"
    ),
    **dict.fromkeys(("pipeline", "load"), "here it is Pipeline(MODEL)"),
    **dict.fromkeys(
        ("AsyncLLM", "AsyncLLMEngine", "LLMEngine"), "here it is Pipeline(MODEL), with agenerate() and astream()"
    ),
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs"), "here they are arguments of Pipeline"),
    **dict.fromkeys(
        ("SamplingParams", "GenerationConfig", "GenerationParams"),
        "here they are options of generate(), such as temperature=0.7, and RequestOptions is their type",
    ),
    **dict.fromkeys(("RequestOutput", "CompletionOutput", "GenerateOutput"), "here it is Result"),
    **dict.fromkeys(("generate", "stream_generate", "batch_generate"), "here it is a method of Pipeline"),
    **dict.fromkeys(
        ("TextStreamer", "TextIteratorStreamer", "AsyncTextIteratorStreamer"),
        "here it is Pipeline.stream() or astream()",
    ),
    **dict.fromkeys(
        ("AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast"),
        "Pipeline takes texts, messages and token ids as they are",
    ),
    **dict.fromkeys(("set_seed", "seed_everything"), "here it is the option seed of generate()"),
    **dict.fromkeys(("StoppingCriteria", "StoppingCriteriaList"), "here it is the option stop of generate()"),
    "BitsAndBytesConfig": 'here it is dtype="int8" or "int4" of Pipeline',
    **dict.fromkeys(("StructuredOutputsParams", "GuidedDecodingParams"), "grammars and JSON schemas are not built"),
    **dict.fromkeys(("PoolingParams", "LoRARequest"), "neither embeddings nor adapters are built"),
    **dict.fromkeys(
        ("OpenAI", "AsyncOpenAI"), "the client of the package openai talks to specsplit serve, and Client to workers"
    ),
}
"""The ends of sentences about what others' users would import from the package."""
_SHORT = {
    **dict.fromkeys(("-md", "-hfd"), "model_draft"),
    **dict.fromkeys(("-hf", "-hfr"), "hf_repo"),
    **dict.fromkeys(("-mu", "-hff"), "model_url"),
    **dict.fromkeys(("-ngl", "-ngld"), "n_gpu_layers"),
    **dict.fromkeys(("-dev", "-mg", "-sm", "-ts"), "main_gpu"),
    "-cd": "ctx_size_draft",
    "-devd": "device_draft",
    **dict.fromkeys(("-tp", "-pp"), "tensor_parallel_size"),
    **dict.fromkeys(("-cnv", "-no-cnv", "-i"), "conversation"),
    **dict.fromkeys(("-ctk", "-ctv"), "kv_cache_dtype"),
    **dict.fromkeys(("-b", "-cb", "-co", "-e", "-fa", "-st", "-ub"), "flash_attn"),
    **dict.fromkeys(("-ot", "-cmoe", "-ncmoe"), "cpu_moe"),
    **dict.fromkeys(("-cc", "-O0", "-O1", "-O2", "-O3"), "compilation_config"),
    "-a": "alias",
    "-dp": "data_parallel_size",
    "-np": "n_parallel",
    "-q": "quantization",
    "-r": "reverse_prompt",
    "-lv": "log_verbosity",
    "-sc": "speculative_config",
    "-sys": "system_prompt",
    "-tb": "threads_batch",
    "-v": "verbose",
}
"""Short options of others. Those of several letters our parser would take apart, or for a value."""


def answer_about(name: str, spell: Callable[[str], str] = str) -> str | None:
    """Return the end of a sentence about another program's name of a setting; None for a name that none of them has.

    `spell` writes one of our settings as the user would.
    """
    words = _ANSWERS.get(name.replace("-", "_"))
    return None if words is None else re.sub(r"\{(\w+)\}", lambda match: spell(match[1]), words)


def answer_about_import(name: str) -> str | None:
    """Return the end of a sentence about a class or function that another package has; None for any other name."""
    return _CLASSES.get(name)


def as_option(setting: str) -> str:
    """Return the option of the command line for a setting."""
    # Commands with one model call it --model, and all of them take -m.
    return "-m" if setting == "target_model" else f"--{setting.replace('_', '-')}"


def answer_about_short(option: str) -> str | None:
    """Return the end of a sentence about another program's short option, such as -ngl; None for any other word."""
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
