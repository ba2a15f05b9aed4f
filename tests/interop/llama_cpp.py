"""llama.cpp, through the wheel `xllamacpp`: what it computes for a GGUF file on the CPU, over its local server."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp as llama


class LlamaCpp:
    """A GGUF file in llama.cpp, with its KV cache in F32 and without flash attention."""

    def __init__(self, path: Path, length: int, embeds: bool = False):
        params = llama.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = length, 1, 0
        params.n_batch = params.n_ubatch = length
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_threads_http = 1
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup, params.verbosity, params.embedding = False, -1, embeds
        params.fit_params = False
        self._server = llama.Server(params)

    def greedy(self, ids: list[int], new: int) -> list[int]:
        """Return the ids that follow, at most `new`, to the end of the text."""
        return self._complete(prompt=ids, n_predict=new, return_tokens=True)["tokens"]

    def log_probabilities(self, ids: list[int], count: int) -> dict[int, float]:
        """Return the log-probabilities of the `count` most probable next ids."""
        found = self._complete(prompt=ids, n_predict=2, n_probs=count)["completion_probabilities"][0]
        return {one["id"]: one["logprob"] for one in found["top_logprobs"]}

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text; with `special`, with the tokens around it."""
        return self._post("tokenize", content=text, add_special=special, parse_special=False)["tokens"]

    def embed(self, text: str) -> list[float]:
        """Return the vector of a text."""
        return self._post("embedding", content=text)[0]["embedding"][0]

    def _complete(self, **request: Any) -> Any:
        fixed = {"temperature": 0.0, "top_k": 1, "cache_prompt": False, "samplers": ["top_k"]}
        return self._post("completion", **fixed, **request)

    def _post(self, name: str, **request: Any) -> Any:
        data = json.dumps(request).encode()
        sent = urllib.request.Request(
            f"{self._server.listening_address}/{name}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(sent, timeout=120) as answer:
            return json.load(answer)
