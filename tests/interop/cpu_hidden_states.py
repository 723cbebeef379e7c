"""vLLM's connector of hidden states for a machine without CUDA: the copy is made in place of on a stream.

Imported by vLLM itself (``kv_connector_module_path``), so it imports nothing of this project.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(example.ExampleHiddenStatesConnector):
    """Everything but the copy is vLLM's own: paths, locks, layers, and what the client is told."""

    def _submit_async_write(self, pending: Any) -> None:
        offsets = torch.arange(self._block_size)[None]
        slots = (offsets + torch.tensor(pending.block_ids)[:, None] * self._block_size).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        self._req_copy_events[pending.req_id] = _Done()
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
