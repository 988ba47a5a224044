"""Fields of other servers that would change an answer, and that nobody reads here: a 400 says what to send instead.

A form, a limit or a sampler that is dropped with 200 shows only in wrong answers. The values that ask for nothing are
let through, since clients send them along; null always is.
"""

from __future__ import annotations

from typing import Any

from kakera.errors import RequestRefused

LIMITS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length"),
    *("n_predict", "num_predict"),
)
# (names, the values that ask for nothing, what to do)
TABLE: list[tuple[str, tuple[Any, ...], str]] = [
    (
        "json_schema schema response_schema json_object json_mode grammar format regex ebnf structural_tag "
        "guided_json_object guided_whitespace_pattern response_format structured_outputs output_format text.format "
        "output_config.format",
        ("", False, {"type": "text"}),
        "send response_format of type json_schema, regex or grammar; on Messages output_config.format, on Responses "
        "text.format",
    ),
    (
        "bad_words bad_words_ids force_words force_words_ids allowed_tokens allowed_token_ids banned_tokens "
        "banned_strings suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id "
        "logits_processors logit_processors custom_logit_processor",
        ([],),
        "send a form that leaves only what is wanted, as response_format of type regex does, or logit_bias",
    ),
    (" ".join(LIMITS), (-1,), "the limit is called max_tokens, on Responses max_output_tokens"),
    (
        "mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range smoothing_factor epsilon_cutoff "
        "eta_cutoff top_a no_repeat_ngram_size use_beam_search",
        (0,),
        "the samplers here are temperature, top_p, top_k, min_p and three penalties",
    ),
    ("typical_p tfs_z tfs length_penalty best_of", (0, 1), "the samplers here are temperature, top_p, top_k and min_p"),
    ("top_n_sigma", (-1, 0), "the samplers here are temperature, top_p, top_k and min_p"),
    ("repeat_penalty", (1,), "it is called repetition_penalty here"),
    ("suffix", ("",), "write the model's own marks for filling in into the prompt of /v1/completions"),
    ("stop_sequences", ([], ""), "it is called stop here"),
    ("n", (1,), "/v1/chat/completions and /v1/completions give several choices"),
    ("logprobs top_logprobs", (False, 0), "/v1/chat/completions has both; /v1/completions takes logprobs as a number"),
    ("echo", (False,), "/v1/completions has it"),
    ("extra_body", ({},), "it belongs to the client's library; its fields stand in the body itself"),
    ("stop_regex", ("", []), "stop takes strings; a form of type regex ends an answer where it is complete"),
    ("prompt_logprobs", (False,), "/v1/completions has them: send echo with logprobs"),
    ("truncate_prompt_tokens", (-1,), "shorten the prompt"),
    ("prompt_embeds documents", ([], ""), "write it into the prompt or the messages"),
    ("chat_template", ("",), "the model's own is used; /v1/completions takes a prompt that is written out"),
    ("add_generation_prompt", (True,), "/v1/completions takes a prompt that is written out"),
    ("continue_final_message", (False,), "a last message of the assistant is not continued"),
    ("include_stop_str_in_output return_token_ids return_tokens_as_token_ids", (False,), "leave it out"),
    ("skip_special_tokens", (True,), "leave it out"),
    (
        "mm_processor_kwargs images_kwargs videos_kwargs max_pixels min_pixels",
        ({},),
        "an image's detail low and kakera serve --image-tokens limit how large it is",
    ),
    ("modalities audio", (["text"], []), "this model writes text only"),
    ("web_search_options", (), "nothing is searched here; declare a tool that the client runs"),
]
WITHIN = {"text": "format", "output_config": "format"}  # of another dialect: only this field of theirs is a form
FIELDS = {name: (nothing, advice) for names, nothing, advice in TABLE for name in names.split()}


def check_foreign(name: str, value: Any, limited: bool) -> None:
    """Raises RequestRefused (400) for a field that asks for something which does not exist here. A second limit is none
    where the body has its own (`limited`)."""
    if name in WITHIN and isinstance(value, dict):
        name, value = f"{name}.{WITHIN[name]}", value.get(WITHIN[name])
    if name not in FIELDS or value is None or (limited and name in LIMITS):
        return
    nothing, advice = FIELDS[name]
    if value not in nothing:
        raise RequestRefused(f"{name} is not supported here: {advice}", param=name, code="unsupported_parameter")
