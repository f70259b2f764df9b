"""What vLLM's Python classes have under names that aren't here: parameters are taken where they say what is
so anyway, and else told what is there instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from contracts.suggest import did_you_mean


class Elsewhere(NamedTuple):
    """`told` to those who use it, unless its value is None, false, empty, or one of `neutral`."""

    told: str
    neutral: tuple[Any, ...] = ()


_BEAMS: Final = "isn't offered: tokens are drawn one by one, there is no beam search; n gives several answers"

# Of SamplingParams; best_of is looked at apart.
PARAMETERS: Final[Mapping[str, Elsewhere]] = {
    "use_beam_search": Elsewhere(_BEAMS),
    "length_penalty": Elsewhere(_BEAMS, (1.0,)),
    "early_stopping": Elsewhere(_BEAMS),
    "logits_processors": Elsewhere(
        "isn't offered: logit_bias, allowed_token_ids, bad_words and penalties change what is drawn"
    ),
    "guided_decoding": Elsewhere("is now structured_outputs"),
    "output_kind": Elsewhere("is the argument delta of AsyncLLM.generate; LLM gives whole answers"),
    "detokenize": Elsewhere("changes nothing: answers have text and token ids", (True,)),
    "extra_args": Elsewhere("isn't offered: there are no extensions that would read it"),
    "flat_logprobs": Elsewhere("isn't offered: log-probabilities are a list, an entry for each token"),
    "skip_clone": Elsewhere("changes nothing: parameters can't change", (True,)),
    "thinking_token_budget": Elsewhere("isn't offered: max_tokens bounds reasoning and answer together"),
    "repetition_detection": Elsewhere("isn't offered: repetition_penalty and frequency_penalty bound it"),
    "logprob_token_ids": Elsewhere("isn't offered: logprobs name the likeliest tokens, at most 20"),
}

_TEXT: Final = "isn't offered: the models read text only"

# Of the methods of LLM and AsyncLLM.
ARGUMENTS: Final[Mapping[str, Elsewhere]] = {
    "lora_request": Elsewhere("isn't offered yet: load the merged checkpoint"),
    "prompt_adapter_request": Elsewhere("isn't offered"),
    "prompt_token_ids": Elsewhere("is a prompt itself: a list of token ids, or {'prompt_token_ids': [...]}"),
    "guided_options_request": Elsewhere("is now structured_outputs of SamplingParams"),
    "tokenization_kwargs": Elsewhere("isn't offered: a prompt may be token ids"),
    "mm_processor_kwargs": Elsewhere(_TEXT),
    "chat_template": Elsewhere("is an option of the model: LLM(model, chat_template=FILE)"),
    "chat_template_content_format": Elsewhere("is read from the template", ("auto",)),
    "trace_headers": Elsewhere("isn't offered: a worker that serves over HTTP has traces"),
    "pooling_params": Elsewhere("is the argument dimensions of embed"),
    "truncate_prompt_tokens": Elsewhere("is a parameter of SamplingParams; embed takes whole prompts"),
}

# Of LLM.
ATTRIBUTES: Final[Mapping[str, str]] = {
    "get_tokenizer": "the tokenizer is the attribute tokenizer",
    "get_default_sampling_params": "the defaults are SamplingParams()",
    "beam_search": "there is no beam search; n of SamplingParams gives several answers",
    "encode": "embed gives the vectors of a model that pools",
    "score": "embed gives vectors to compare; models that score aren't supported",
    "classify": "models that classify aren't supported",
    "reward": "models that give rewards aren't supported",
    "sleep": "close gives the memory back",
    "wake_up": "make another one after close",
    "get_metrics": "numbers of the engine are the attribute stats",
    "collective_rpc": "a worker is one process: there is nobody to call",
    "apply_model": "no code of others runs within the model",
    "start_profile": "torch.profiler works around generate, in the same process",
    "stop_profile": "torch.profiler works around generate, in the same process",
    "llm_engine": "AsyncLLM takes requests while others run",
}


def known_parameters(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """`given` without vLLM's other parameters that say what is so anyway. ValueError for one that says
    something else, with what is there instead; TypeError for one that nobody has."""
    for name in given.keys() - known:
        value = given[name]
        if name == "best_of":
            if value not in (None, given.get("n", 1)):
                raise ValueError("best_of: only n is accepted: all n answers are returned")
        elif name not in PARAMETERS:
            meant = did_you_mean(name, known)
            raise TypeError(f"SamplingParams has no parameter {name!r}{meant}")
        elif value and value not in PARAMETERS[name].neutral:
            raise ValueError(f"{name}: {PARAMETERS[name].told}")
    return {name: value for name, value in given.items() if name in known}


def check_arguments(method: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """ValueError for one of vLLM's arguments that `method` can't follow, with what is there instead;
    TypeError for one that nobody has."""
    for name, value in given.items():
        if name not in ARGUMENTS:
            meant = did_you_mean(name, method.__annotations__)
            raise TypeError(f"{method.__qualname__} has no argument {name!r}{meant}")
        if value and value not in ARGUMENTS[name].neutral:
            raise ValueError(f"{name}: {ARGUMENTS[name].told}")


def missing(owner: str, name: str) -> AttributeError:
    """For an attribute that isn't there."""
    told = ATTRIBUTES.get(name)
    return AttributeError(f"{owner} has no {name!r}" + (f": {told}" if told else ""))
