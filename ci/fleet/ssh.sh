#!/usr/bin/env bash
# One fleet over machines that ssh reaches; this machine is the head, and stops Ray everywhere at the end.
#   ci/fleet/ssh.sh gpu1,gpu2 bench -x
# AISP_ACTIVATE is the command that finds aisp on the machines, such as ". /opt/venv/bin/activate".
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: ci/fleet/ssh.sh HOST,HOST... PATH-OR-OPTION..." >&2
    exit 2
fi
IFS=, read -ra hosts <<<"$1"
shift
activate=${AISP_ACTIVATE:-:}

stop() {
    for host in "${hosts[@]}"; do
        # shellcheck disable=SC2029 # it expands here, as meant
        ssh "$host" "$activate && ray stop" </dev/null || true
    done
    ray stop || true
}
trap stop EXIT

aisp fleet start --head
here=$(hostname -f)
for host in "${hosts[@]}"; do
    # shellcheck disable=SC2029 # it expands here, as meant
    ssh "$host" "$activate && aisp fleet start --address=$here:6379" </dev/null
done
python -m pytest --aisp-fleet "--aisp-artifacts=${AISP_OUT:-fleet}" "$@"
