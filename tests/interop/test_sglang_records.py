"""Shards written by SGLang's own recorder are read as records. Needs DEEPSPEC_SGLANG_SRC: a folder that holds sglang/.

DEEPSPEC_SGLANG_PYTHON may name a Python that has msgspec and torch (default: the one that runs the tests).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepspec.calibration.imports import load_records
from deepspec.errors import InputRefused

SOURCE = os.environ.get("DEEPSPEC_SGLANG_SRC")
PYTHON = os.environ.get("DEEPSPEC_SGLANG_PYTHON", sys.executable)
pytestmark = [pytest.mark.interop, pytest.mark.skipif(not SOURCE, reason="DEEPSPEC_SGLANG_SRC is not set: no source")]
EXPECTED = {"block_length": 5, "drafter_sha256": "a" * 64, "sampling_temperature": 0.0, "thinking": False}
WRITER = """
import importlib.util, json, sys, torch
folder, source = sys.argv[1:]
path = f"{source}/sglang/srt/speculative/dspark_components/dspark_sts.py"
spec = importlib.util.spec_from_file_location("dspark_sts", path)
module = importlib.util.module_from_spec(spec)
sys.modules["dspark_sts"] = module
spec.loader.exec_module(module)
recorder = module.StsDataRecorder(path_stem=f"{folder}/sts", gamma=5, flush_every=2)
generator = torch.Generator().manual_seed(0)
steps = [(torch.randn(16, 5, generator=generator), torch.randint(0, 6, (16,), generator=generator)) for _ in range(23)]
for logits, accepted in steps:
    recorder.record(confidence_raw=logits, num_correct_drafts=accepted)
recorder.flush()
print(json.dumps({"logits": torch.cat([one for one, _ in steps]).tolist(),
                  "accepted": torch.cat([one for _, one in steps]).tolist()}))
"""


def test_shards_of_sglangs_recorder(tmp_path: Path) -> None:
    if subprocess.run([PYTHON, "-c", "import msgspec, torch"], capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON} lacks msgspec or torch: set DEEPSPEC_SGLANG_PYTHON")
    done = subprocess.run([PYTHON, "-c", WRITER, str(tmp_path), str(SOURCE)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    wanted = json.loads(done.stdout)
    assert len(list(tmp_path.glob("sts.*.pt"))) == 12  # the tenth and later must not be read before the second
    records = load_records(tmp_path, EXPECTED)
    assert np.abs(records.logits - np.array(wanted["logits"])).max() < 1e-6
    assert records.accepted.tolist() == wanted["accepted"] and (records.drafted == 5).all()
    with pytest.raises(InputRefused, match="sampling_temperature"):
        load_records(tmp_path, EXPECTED | {"sampling_temperature": 1.0})
