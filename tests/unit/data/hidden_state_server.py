"""Servers in threads that hand out the hidden states of a real, tiny model the way vLLM and SGLang do.

The exchange is the one recorded from vLLM 0.32 (``extract_hidden_states`` with ExampleHiddenStatesConnector) and, from
its source, SGLang 0.5.23 (``/generate`` with ``return_hidden_states``).
"""

import fcntl
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from fake_server import Answer
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Spoil = Callable[[list[int], dict[str, Any]], Optional[dict[str, Any]]]


class TinyEngine:
    """A model that remembers what its layers gave."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._lock = threading.Lock()
        self._outputs: list[Tensor] = []
        for layer in self._model.model.layers:
            layer.register_forward_hook(lambda _module, _arguments, output: self._outputs.append(
                (output[0] if isinstance(output, tuple) else output)[0]))

    @torch.no_grad()
    def run(self, ids: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Embedding and outputs of all layers, each [T, D]; the last after the final norm; log-probabilities [T, V]."""
        with self._lock:
            self._outputs = []
            tokens = torch.tensor(ids)[None]
            logits = self._model(tokens, use_cache=False).logits[0].float()
            states = [self._model.get_input_embeddings()(tokens)[0], *self._outputs]
        return states, self._model.model.norm(states[-1]), logits.log_softmax(-1)


def vllm(engine: TinyEngine, folder: Path, layers: list[int], spoil: Optional[Spoil] = None, *,
         delay: float = 0.0) -> Answer:
    """``layers`` in vLLM's counting (0 is the embedding). ``spoil`` gets the ids and {"states", "token_ids", "reply"},
    which it may change, or returns what is answered instead."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        states, _, logprobs = engine.run(ids)
        chosen = int(logprobs[-1].argmax())
        path = folder / f"cmpl-{uuid.uuid4().hex[:16]}-0-{uuid.uuid4().hex[:8]}.safetensors"
        choice: dict[str, Any] = {
            "index": 0, "text": "", "finish_reason": "length", "prompt_token_ids": ids, "token_ids": [chosen],
            "logprobs": {"token_logprobs": [float(logprobs[-1, chosen])], "tokens": ["x"]}, "prompt_logprobs": None,
        }
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": float(logprobs[place, token]), "rank": 5, "decoded_token": "x"}}
                for place, token in enumerate(ids[1:])
            ]
        made = {"states": torch.stack([states[layer] for layer in layers], dim=1), "token_ids": torch.tensor(ids),
                "reply": {"id": "cmpl-1", "choices": [choice],
                          "kv_transfer_params": {"hidden_states_path": str(path)}}}
        instead = spoil(ids, made) if spoil is not None else None
        if instead is not None:
            return instead
        _write(path, made, delay)
        return made["reply"]

    return answer


def _write(path: Path, made: dict[str, Any], delay: float) -> None:
    """The lock is held before the answer goes out and until the file is whole."""
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def work() -> None:
        time.sleep(delay)
        if made["states"] is not None:
            save_file({"hidden_states": made["states"].contiguous(), "token_ids": made["token_ids"]}, path)
        os.close(lock)

    threading.Thread(target=work).start()


def sglang(engine: TinyEngine, layers: Optional[list[int]], spoil: Optional[Spoil] = None, *,
           before_norm: bool = False) -> Answer:
    """``layers`` in our counting; None: a server of the last hidden state."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        ids = body["input_ids"]
        states, last, logprobs = engine.run(ids)
        chosen = int(logprobs[-1].argmax())
        rows = torch.cat([states[layer + 1] for layer in layers], dim=1) if layers is not None else (
            states[-1] if before_norm else last)
        meta: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": 1, "hidden_states": [rows.tolist()]}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[float(logprobs[-1, chosen]), chosen, None]]
            if body.get("logprob_start_len") == 0:
                meta["input_token_logprobs"] = [[None, ids[0], None]] + [
                    [float(logprobs[place, token]), token, None] for place, token in enumerate(ids[1:])]
        made = {"states": rows, "reply": {"text": "", "output_ids": [chosen], "meta_info": meta}}
        instead = spoil(ids, made) if spoil is not None else None
        return made["reply"] if instead is None else instead

    return answer
