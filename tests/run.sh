#!/usr/bin/env bash
# Makes the virtual environment, installs the project and runs the tests; the exit code is pytest's.
#
#   bash tests/run.sh              fast tests
#   bash tests/run.sh --all        also integration tests (real launcher) and fault tests
#   bash tests/run.sh --interop    only the tests against real serving engines (builds their environment when missing)
#   bash tests/run.sh --browser    only the tests of the report in a Chromium of this machine
#   bash tests/run.sh [--all] -- PYTEST-ARGUMENTS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(tests/unit -m "not slow")
interop=0
extras=demo,dev
while [ $# -gt 0 ]; do
    case "$1" in
        --all) selection=(tests --ignore=tests/interop) ;;
        --interop) selection=(tests/interop); interop=1 ;;
        --browser) selection=(tests/browser); extras=demo,dev,browser ;;
        --) shift; break ;;
        -h|--help) sed -n '2,9p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; exit 0 ;;
        *) echo "tests/run.sh: unknown argument '$1' (there are --all, --interop, --browser, --)" >&2; exit 2 ;;
    esac
    shift
done

. launch/venv.sh
make_venv "$extras"
if [ "$interop" = 1 ]; then
    . tests/interop/environment.sh
    interop_environment
fi
export PATH="$BIN:$PATH"
exec "$PYTHON" -m pytest "${selection[@]}" "$@"
