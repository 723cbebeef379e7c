#!/usr/bin/env bash
# From a fresh clone to a trained, calibrated, measured and exported drafter of SmolLM2-135M-Instruct, on a CPU.
#
#   bash launch/quickstart.sh             about a quarter of an hour on two cores
#   bash launch/quickstart.sh --reduced   the same pipeline on less data (about four minutes after the installs)
#
# Run it again: finished stages are reused. Needs Python 3.10 or newer; no GPU, no model hub, no account.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

overrides=()
name=smollm2_135m
for argument in "$@"; do
    case "$argument" in
        --reduced) name=smollm2_135m_reduced; overrides+=("budget=reduced" "run.name=$name") ;;
        -h|--help) sed -n '2,7p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; exit 0 ;;
        *) echo "quickstart.sh: unknown argument '$argument' (there is --reduced)" >&2; exit 2 ;;
    esac
done

. launch/venv.sh
make_venv demo,dev
export PATH="$BIN:$PATH" DS_ACCELERATOR="${DS_ACCELERATOR:-$(command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)}"

deepspeed --num_accelerators 1 launch/train_drafter.py +experiment=smollm2_135m "${overrides[@]}"

echo
"$PYTHON" -m deepspec.report "runs/$name"
echo "next, the same drafter without its two heads on the same data, and both side by side:"
echo "  $BIN/deepspeed launch/train_drafter.py +experiment=smollm2_135m drafter=dflash${overrides[0]:+ ${overrides[0]}} run.name=${name}_dflash"
echo "  $PYTHON launch/report.py run.dir=runs/$name 'runs=[${name}_dflash]'"
