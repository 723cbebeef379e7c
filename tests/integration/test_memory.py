"""A long run on the CPU needs no more memory at its end than after its first windows, whatever its packs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
UNIT = Path(__file__).resolve().parents[1] / "unit" / "training"

SCRIPT = """
import dataclasses, sys
from pathlib import Path
import torch
import tiny_training as tiny
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.sources import SampleInfo
from deepspec.drafters.types import SharedWeights

torch.set_num_threads(1)
WIDTH, VOCABULARY = 128, 1024
shape = dataclasses.replace(tiny.SHAPE, hidden_size=WIDTH, target_hidden_size=WIDTH, intermediate_size=256, num_heads=4,
                            num_kv_heads=2, head_dim=32, vocab_size=VOCABULARY, num_layers=1)

class FreshSource:
    # Like a store: every read makes new tensors, each of another size than the ones before.
    def __init__(self):
        lengths = torch.randint(40, 1200, (48,), generator=torch.Generator().manual_seed(1)).tolist()
        self.samples = [SampleInfo(f"s{i}", "chat", n, n - n // 3 - 1) for i, n in enumerate(lengths)]
    def __len__(self):
        return len(self.samples)
    def get(self, indices):
        rows = []
        for info in (self.samples[index] for index in indices):
            ids, mask = torch.arange(info.length) % 1000, torch.arange(info.length) >= info.length // 3
            rows.append(FeatureSample(Sample(info.sample_id, "chat", ids, mask), torch.randn(info.length, 2 * WIDTH),
                                      torch.randn(info.length, WIDTH)))
        return rows
    @property
    def documents(self):
        return [row.sample for row in self.get(range(len(self)))]

weights = torch.randn(VOCABULARY, WIDTH)
tiny.shared_weights = lambda: SharedWeights(weights, weights, "target-fingerprint")
config = tiny.tiny_config(Path(sys.argv[1]), global_batch_size=6, num_anchors=24, epochs=100, max_steps=300,
                          **(dict(pack_tokens=2400, pack_anchors=96) if sys.argv[2] == "packed" else {}))
config.data.num_workers = 1
trainer = tiny.tiny_trainer(None, config=config, source=FreshSource(), shape=shape)
trainer.run()
"""


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_memory_is_flat_over_packs_of_ever_new_sizes(tmp_path: Path, kind: str) -> None:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{UNIT}{os.pathsep}{UNIT.parents[2]}"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), kind], env=environ, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    peaks = [row["peak_memory_bytes"] for row in rows]
    assert len(peaks) == 300 and peaks == sorted(peaks)
    # The largest pack comes up within the first 100 windows; what is added after them would be growth.
    assert peaks[-1] - peaks[99] < 30 << 20, [peak >> 20 for peak in peaks[::50]]
